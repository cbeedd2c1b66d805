"""``vmap`` with JAX's arguments: ``torch.func.vmap`` whose axis can have a name.

``torch.func.vmap`` gets one more mapped argument, ``arange(size)``: the index of the axis. Its
batch dimension is how collectives recognise the axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from torchpmap._base import axis_spec
from torchpmap._base.arrays import for_torch
from torchpmap._base.boundary import outside_graphs
from torchpmap._base.errors import check_array
from torchpmap._base.pytree import Structure, flatten, flatten_call
from torchpmap._base.torch_internals import is_batched
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis
from torchpmap._trace import transform_rules

_P = ParamSpec("_P")
_R = TypeVar("_R")


@outside_graphs
def vmap(
    fun: Callable[_P, _R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    randomness: str = "different",
) -> Callable[_P, _R]:
    """Map ``fun`` over an axis of its arguments, all rows at once, on the device it runs on.

    vmap: (fun: a -> b, in_axes, out_axes) -> a[n at in_axes] -> b[n at out_axes]

    Args:
        fun: the function of one row.
        in_axes: the mapped dim of every argument: an int, None for an argument that all rows
            share, or a tuple of these, one per positional argument, each a prefix of it. Keyword
            arguments are mapped over dim 0.
        out_axes: where the mapped dim goes in every output (a prefix); None for a shared value.
        axis_name: name by which collectives inside ``fun`` reach across the rows.
        axis_size: number of rows; needed only when no argument is mapped.
        randomness: "different" or "same" random numbers in all rows, or "error".

    Returns:
        A function of the batched arguments.

    Raises:
        ValueError: bad mapped dims or axes, or a shared output that differs from row to row.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.vmap(lambda x: x / tp.psum(x, "j"), axis_name="j")(torch.tensor([1.0, 3.0]))
        tensor([0.2500, 0.7500])
        >>> tp.vmap(lambda x, y: x @ y, (1, None))(torch.eye(2), torch.tensor([3.0, 4.0]))
        tensor([3., 4.])

    Source: jax.vmap; checked in tests/transforms/test_vmap.py.
    """
    axis_spec.check_axis_spec(in_axes, "vmap in_axes")
    axis_spec.check_axis_spec(out_axes, "vmap out_axes")
    spec = tuple(in_axes) if isinstance(in_axes, list) else in_axes

    @outside_graphs
    @functools.wraps(fun)
    def mapped(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        axes = axis_spec.broadcast_axes((spec, 0), (args, kwargs), what="vmap in_axes")
        leaves, structure, size = _arguments(fun, args, kwargs, axes, axis_size)
        outputs: list[_Output] = []

        def rows(index: torch.Tensor, *row: Any) -> list[torch.Tensor]:
            row_args, row_kwargs = structure.unflatten(row)
            axis = Axis(axis_name, size, index, None)
            with nullcontext() if axis_name is None else axis_stack.bind(axis):
                outputs.append(_Output(fun(*row_args, **row_kwargs), out_axes))
                return outputs[-1].stacked(axis_name, index.device)

        over_rows = transform_rules.vmap(rows, (0, *axes), randomness)
        stacked = over_rows(torch.arange(size, device=_device(leaves)), *leaves)
        return outputs[-1].joined(stacked)

    return mapped


class _Output:
    """The output of one call, taken apart inside the vmap and put together outside.

    Only leaves with an axis go through ``torch.func.vmap``: it takes no numbers, and its own check
    of ``out_dims=None`` mistakes the batch dimension of an outer vmap for its own.
    """

    def __init__(self, output: Any, out_axes: Any) -> None:
        self._leaves, self._structure = flatten(output)
        self._axes = axis_spec.broadcast_axes(out_axes, output, what="vmap out_axes")
        self._paths = self._structure.paths("output")

    def stacked(self, axis_name: Hashable, device: torch.device) -> list[torch.Tensor]:
        found = []
        for leaf, axis, path in zip(self._leaves, self._axes, self._paths, strict=True):
            if axis is not None:
                found.append(_as_tensor(leaf, path, device))
            elif isinstance(leaf, torch.Tensor) and is_batched(leaf):
                raise ValueError(
                    f"vmap has mapped output (axis_name={axis_name}) but out_axes is None: {path} "
                    "differs from row to row. Reduce it over the axis, or give it an axis in "
                    "out_axes."
                )
        return found

    def joined(self, stacked: list[torch.Tensor]) -> Any:
        rows_first = iter(stacked)

        def whole(leaf: Any, axis: int | None, path: str) -> Any:
            if axis is None:
                return leaf
            rows = next(rows_first)
            what = "vmap out_axes"
            return rows.movedim(0, axis_spec.canonical_axis(axis, rows.dim(), what=what, path=path))

        return self._structure.unflatten(list(map(whole, self._leaves, self._axes, self._paths)))


def _arguments(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: list[int | None],
    axis_size: int | None,
) -> tuple[list[Any], Structure, int]:
    """(leaves, with arrays as tensors; their structure; the size of the axis)."""
    leaves, structure = flatten_call(args, kwargs)
    paths = structure.call_paths(axis_spec.argument_names(fun, len(args)))
    described: list[axis_spec.LeafInfo] = []
    for position, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if isinstance(leaf, np.ndarray | np.generic):
            check_array(leaf, f"vmap: argument {path}")
            leaf = leaves[position] = torch.tensor(for_torch(leaf))
        if isinstance(leaf, torch.Tensor):
            described.append((path, tuple(leaf.shape), str(leaf.dtype)))
        else:
            described.append((path, None if leaf is None else (), type(leaf).__name__))
    size = axis_spec.mapped_axis_size(described, axes, what="vmap", axis_size=axis_size)
    if size is None:
        raise ValueError(
            "vmap must have at least one non-None value in in_axes or axis_size must be specified"
            if leaves
            else "vmap wrapped function must be passed at least one argument containing an array "
            "or axis_size must be specified, got empty *args=() and **kwargs={}"
        )
    return leaves, structure, size


def _device(leaves: list[Any]) -> torch.device | None:
    """Where the index lives: with the arguments, else with the enclosing axis."""
    for tensor in [*leaves, *(parts[0].index for parts in reversed(axis_stack.bound()))]:
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return None


def _as_tensor(leaf: Any, path: str, device: torch.device) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic):
        check_array(leaf, f"vmap: {path}")
        return torch.tensor(for_torch(leaf), device=device)
    raise TypeError(
        f"vmap returns tensors, numpy arrays and Python numbers, but {path} is {leaf!r} of type "
        f"{type(leaf).__name__}. With None in out_axes it is returned as it is."
    )
