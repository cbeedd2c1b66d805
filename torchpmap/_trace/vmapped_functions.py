"""The named axes in the rules that torch makes for rows of an ``autograd.Function`` with
``generate_vmap_rule``.

Each of them begins the vmap again, at another level, and a backward pass does so when the mapped
function has ended.  There the axes that were bound around the function are bound again, and the
index of the axis of that vmap is a new one.

Of a result that is the same in all rows, torch gives ``backward`` the sum of the cotangents of all
rows.  A device has the cotangent of its own copy, and so has a row that stands for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpmap._base.pytree import tree_map_only
from torchpmap._base.torch_internals import (
    add_batch_dim,
    batched_levels,
    depth,
    level_of,
    transforms,
)
from torchpmap._layout.axis_stack import Axis, bound, bound_again


class _InAxes:
    """An ``autograd.Function`` whose rules run with the axes that are bound now."""

    def __init__(self, function: Any, own: Sequence[Axis]) -> None:
        """``own``: of them, those of the vmap."""
        self.__name__ = function.__name__
        self._function = function
        self._axes = bound()
        self._own = own

    def __getattr__(self, name: str) -> Any:
        rule = getattr(self._function, name)

        def in_axes(*args: Any) -> Any:
            now = bound()  # these may be at other levels by now
            axes = (*now, *self._axes[len(now) :])
            with bound_again(tuple(tuple(map(self._again, parts)) for parts in axes)):
                result = rule(*args)
            return self._in_rows(result) if name == "forward" else result

        return in_axes

    def _in_rows(self, result: Any) -> Any:
        sizes = [axis.size for axis in self._own if axis.is_lanes]
        if not sizes:
            return result

        def in_rows(x: torch.Tensor) -> torch.Tensor:
            if depth() in batched_levels(x):
                return x
            return add_batch_dim(x.expand(sizes[0], *x.shape).clone(), 0, depth())

        return tree_map_only(torch.Tensor, in_rows, result)

    def _again(self, axis: Axis) -> Axis:
        if axis not in self._own:
            return axis
        index = torch.arange(axis.size, device=axis.index.device)
        return replace(axis, index=add_batch_dim(index, 0, depth()))


def in_axes(own: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of ``own``, torch's maker of the rules."""

    def vmapify_autograd_function(function: Any, *args: Any) -> Any:
        level = transforms()[-1].level()
        axes = [axis for parts in bound() for axis in parts if level_of(axis.index) == level]
        return own(_InAxes(function, axes) if axes else function, *args)

    return vmapify_autograd_function
