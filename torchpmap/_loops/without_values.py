"""What a function would return, without running it: kinds of tensors, and no effects.

The tensors vary along the axes along which the function's would.

Nothing is computed, printed, sent or drawn, and no tensor is written to: each is replaced by one
that has no values, below all transforms, so tensors that the function closes over are too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from torchpmap._base.inexact import kinds_of
from torchpmap._base.pytree import map_tensors
from torchpmap._base.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    batched_levels,
    outside_modes,
)
from torchpmap._collectives.varying import Tracking, axes_of, set_axes
from torchpmap._loops.trees import Parts
from torchpmap._trace.casts import is_tracked


def without_values(run: Callable[[], Parts]) -> Parts | None:
    """Tensors of the kinds that ``run`` would return; None if they cannot be found out so."""
    try:
        with (
            outside_modes(),
            FakeTensorMode() as mode,
            Tracking() if is_tracked() else nullcontext(),
            _Replaced(mode),
            torch.no_grad(),
        ):
            found = run()
            kinds = kinds_of(found.tensors)
            axes = [axes_of(x) for x in found.tensors]
            levels = tuple(map(batched_levels, found.tensors))
    except Exception:  # a function may need values
        return None
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
    for x, along in zip(tensors, axes, strict=True):
        set_axes(x, along)
    return Parts(found.tree, tensors, found.weak, levels=levels)


class _Replaced(TorchDispatchMode):
    """Gives operations tensors without values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors(self._replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replace(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        found = self._mode.from_tensor(value)  # the same one each time
        set_axes(found, axes_of(value))
        return found
