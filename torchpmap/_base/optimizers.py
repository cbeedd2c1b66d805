"""What optimizers of torch need where values are unknown: state, and numbers that are tensors."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode

from torchpmap._base.replaced import Replaced, Replacement


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


def _as_number(dtype: torch.dtype) -> torch.dtype:
    """That of Python's numbers of this kind."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.promote_types(dtype, torch.int64)


def _of_two(own: Callable[..., Any], wins: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """``max`` or ``min``, also of tensors whose value is unknown."""

    def choose(*given: Any, **options: Any) -> Any:
        if len(given) != 2 or not any(isinstance(x, torch.Tensor) for x in given):
            return own(*given, **options)
        first, second = given
        return torch.where(wins(second, first), second, first)

    return choose


_adafactor = sys.modules[getattr(torch.optim.Adafactor, "_init_group").__module__]  # noqa: B009
_choices = Replaced(
    [
        Replacement(_adafactor, "max", lambda _: _of_two(max, operator.gt)),
        Replacement(_adafactor, "min", lambda _: _of_two(min, operator.lt)),
    ]
)


class TensorNumbers(TorchFunctionMode):
    """Lets ``alpha=``, ``value=``, settings and ``x.item()`` be tensors whose value is unknown."""

    # Delete when no optimizer passes a tensor (lr, its step counter) as a number; in torch 2.13
    # SGD, Adagrad, RMSprop, Adadelta, Muon and Adafactor do.

    def __enter__(self) -> Self:
        _choices.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _choices.__exit__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.item:
            return args[0].to(_as_number(args[0].dtype))
        if func in (torch.Tensor.lerp, torch.Tensor.lerp_) and isinstance(args[2], torch.Tensor):
            wide = torch.promote_types(args[0].dtype, torch.float32)
            own = torch.lerp(*(each.to(wide) for each in args)).to(args[0].dtype)
            if func is torch.Tensor.lerp:
                return own
            func, args = torch.Tensor.copy_, (args[0], own)
        if func is torch.Tensor.square_:  # functionalize of torch 2.13 does not know it
            return args[0].mul_(args[0])
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


class Positive(TorchFunctionMode):
    """Answers for tensors whose value is unknown that they are more than zero."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {id(each): each for each in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and id(args[0]) in self._tensors:
            if func in _COMPARISONS and type(args[1]) in (int, float) and args[1] == 0:
                return _COMPARISONS[func](1, 0)
            if func is torch.Tensor.to:  # 1 - beta is exact in double precision only
                is_exact = args[0].dtype == torch.float64
                found = args[0] if is_exact else func(*args, **(kwargs or {}))
                self._tensors[id(found)] = found
                return found
        if func.__name__ == "_foreach_lerp_" and isinstance(args[2], torch.Tensor):
            for x, y in zip(*args[:2], strict=True):
                x.lerp_(y, args[2].to(x.dtype))
            return None
        return func(*args, **(kwargs or {}))
