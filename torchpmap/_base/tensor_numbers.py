"""Numbers of optimizers, such as rates, that are tensors whose value is unknown."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchpmap._base.torch_internals import has_transforms


class TensorNumbers(TorchFunctionMode):
    """Lets ``alpha=`` and ``value=`` be tensors whose value is unknown."""

    # Delete when no optimizer passes a tensor (lr, its step counter) as a number; in torch 2.13
    # SGD, Adagrad, RMSprop, Adadelta and Muon do.

    def __init__(self, optimizer: object) -> None:
        super().__init__()
        self._name = type(optimizer).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.item and has_transforms():
            raise RuntimeError(
                f"{self._name} reads values with .item(), and under vmap a tensor has no single "
                "value. Update one row at a time (pmap with one row per device, or a loop), or use "
                "another optimizer."
            )
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
