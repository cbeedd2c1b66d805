"""What optimizers of torch need where values are unknown: state, and numbers that are tensors."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode

from torchpmap._base.torch_internals import has_transforms


def state_maker(
    optimizer: Optimizer,
) -> Callable[[dict[str, Any], Iterable[torch.Tensor]], None] | None:
    """What makes the state that ``step`` would make first, of some parameters of a group, which
    have gradients; None for an optimizer that is not torch's.
    """
    # Replace _init_group when there is a public way. (torch.distributed.checkpoint takes a step
    # with lr=0, which advances counters.)
    make = getattr(optimizer, "_init_group", None)
    if make is None or not make.__module__.startswith("torch.optim."):
        return None

    def make_state(group: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
        make(group, *([] for _ in list(inspect.signature(make).parameters)[1:]))
        if type(optimizer) is SGD and group["momentum"] != 0 and group["dampening"] == 0:
            # A first step without a buffer is one with a buffer of zeros: the state has its final
            # structure from the start, and a step is compiled once, not twice.
            for p in params:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)

    return make_state


_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    own: getattr(operator, name)
    for name in ("ne", "eq", "gt", "ge", "lt", "le")
    for own in (getattr(torch.Tensor, name), getattr(torch.Tensor, f"__{name}__"))
}


class TensorNumbers(TorchFunctionMode):
    """Lets ``alpha=``, ``value=`` and settings be tensors whose value is unknown."""

    # Delete when no optimizer passes a tensor (lr, its step counter) as a number; in torch 2.13
    # SGD, Adagrad, RMSprop, Adadelta and Muon do.

    def __init__(self, optimizer: object, positive: Iterable[torch.Tensor] = ()) -> None:
        """``positive``: settings of which it is known that they are more than zero."""
        super().__init__()
        self._name = type(optimizer).__name__
        self._positive = {id(each): each for each in positive}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.item and has_transforms():
            raise RuntimeError(
                f"{self._name} reads values with .item(), and under vmap a tensor has no single "
                "value. Update one row at a time (pmap with one row per device, or a loop), or use "
                "another optimizer."
            )
        if args and id(args[0]) in self._positive:
            if func in _COMPARISONS and type(args[1]) in (int, float) and args[1] == 0:
                return _COMPARISONS[func](1, 0)
            if func is torch.Tensor.to:  # 1 - beta is exact in double precision only
                return args[0]
        if func in (torch.Tensor.lerp, torch.Tensor.lerp_) and isinstance(args[2], torch.Tensor):
            wide = torch.promote_types(args[0].dtype, torch.float32)
            own = torch.lerp(*(each.to(wide) for each in args)).to(args[0].dtype)
            return own if func is torch.Tensor.lerp else args[0].copy_(own)
        if func is torch.Tensor.copy_:
            # functionalize makes it aten::copy, which has no batching rule (slow, with a warning).
            everywhere = torch.ones_like(args[0], dtype=torch.bool)
            return args[0].masked_fill_(everywhere, 0).add_(args[1])
        for name in ("alpha", "value"):
            if isinstance(kwargs.get(name), torch.Tensor):
                x, scaled, *rest = args  # add(x, scaled, alpha=), addcdiv(x, scaled, y, value=)
                dtype = torch.result_type(x, scaled)
                args = (x, (scaled.to(dtype) * kwargs.pop(name)).to(dtype), *rest)
        return func(*args, **kwargs)
