"""Exchanges over named axes: all_gather, psum_scatter, all_to_all and pswapaxes.

The primitives work on one stacked leading dim per axis; this module makes it of, and merges it
into, the dims that the user names. Axes of sizes (4, 2) are one dim of 8 = 4 * 2 rows, row-major.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import Tree
from torchpmap._collectives.backend import narrowed, summable, widened
from torchpmap._collectives.groups import gathered, merged_lead
from torchpmap._collectives.operands import (
    AxisName,
    IndexGroups,
    Over,
    map_leaves,
    own_values,
    resolve,
)
from torchpmap._collectives.primitives import AllToAll, ReduceScatter


@boundary
def all_gather(
    x: Tree,
    axis_name: AxisName,
    *,
    axis_index_groups: IndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
) -> Tree:
    """Collect ``x`` from all devices along ``axis_name``; every device gets all of it.

    all_gather: any[*s] per device -> any[n, *s] per device (equal on all)
    Backward: psum_scatter of the cotangents, with the same arguments.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names, the first the slowest.
        axis_index_groups: lists of axis indices that cover the axis, all of one length; a device
            gets the values of its list, in the order of the list.
        axis: where the new dim goes; with ``tiled``, the dim that is concatenated.
        tiled: concatenate along an existing dim instead of stacking along a new one.

    Returns:
        Same structure as ``x``; every leaf has a new dim n, or with ``tiled`` a dim n times as big.

    Raises:
        NameError: the axis is not bound.
        ValueError: ``axis`` does not exist, or the groups are unequal or do not cover the axis.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.all_gather(x, "i"), axis_name="i")
        >>> f(torch.arange(4.0))[2].tolist()  # [] -> [4] per device
        [0.0, 1.0, 2.0, 3.0]

    Source: jax.lax.all_gather under jax.pmap; checked in tests/collectives/test_collectives.py.
    """
    over = resolve("all_gather", axis_name, axis_index_groups, equal=True, how=(axis, tiled))
    if not over.axes:
        return own_values(over, x)

    def gather(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dims = [over.dim(axis, x.dim() if tiled else x.dim() + 1) for x in xs]
        given = [summable(x) for x in xs] if over.passes_on else xs
        stacks = [y.to(x.dtype) for x, y in zip(xs, gathered(over.steps, given), strict=True)]
        return _merged(stacks, dims, tiled)

    return map_leaves(over, x, gather)


@boundary
def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
) -> Tree:
    """Sum ``x`` over ``axis_name``; every device gets its own slice of the sum.

    psum_scatter: number[n, *s] per device -> number[*s] per device
    Backward: all_gather of the cotangents, with the same arguments.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names, the first the slowest.
        scatter_dimension: the dim of ``x`` that is cut into n slices.
        axis_index_groups: lists of axis indices that cover the axis, all of one length; slice k
            goes to the k-th of the list.
        tiled: keep the dim, at 1/n of its size, instead of removing it.

    Returns:
        Same structure as ``x``; every leaf lost the dim, or with ``tiled`` has 1/n of it.

    Raises:
        NameError: the axis is not bound.
        TypeError: bools cannot be added.
        ValueError: the dim does not exist or cannot be cut into n slices, or bad groups.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.psum_scatter(x, "i"), axis_name="i")
        >>> f(torch.arange(16.0).reshape(4, 4)).tolist()  # [4] -> [] per device
        [24.0, 28.0, 32.0, 36.0]

    Source: jax.lax.psum_scatter under jax.pmap; checked in tests/collectives/test_collectives.py.
    """
    how = scatter_dimension, tiled
    over = resolve("psum_scatter", axis_name, axis_index_groups, equal=True, how=how)
    if not over.axes:
        return own_values(over, x)

    def scatter(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        ys: Sequence[torch.Tensor] = [_summands(over, x, scatter_dimension, tiled) for x in xs]
        left = list(range(len(over.steps)))  # one leading dim each
        for k in over.order:
            place = left.index(k)
            ys = over.steps[k].run(ReduceScatter, [y.movedim(place, 0) for y in ys])
            left.remove(k)
        return [narrowed(y, "sum", x.dtype) for x, y in zip(xs, ys, strict=True)]

    return map_leaves(over, x, scatter)


@boundary
def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
) -> Tree:
    """Send slice k of ``x`` to device k; every device gets the slices sent to it, stacked.

    all_to_all: any[n, *s] per device -> any[n, *s] per device
    Backward: all_to_all of the cotangents, with split and concat swapped.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names, the first the slowest.
        split_axis: the dim of ``x`` that is cut into n slices.
        concat_axis: where the received slices are stacked, counted in the result; with ``tiled``,
            the dim along which they are concatenated.
        axis_index_groups: lists of axis indices that cover the axis, all of one length.
        tiled: cut and concatenate existing dims instead of removing one and adding one.

    Returns:
        Same structure as ``x``; the dim n moves from ``split_axis`` to ``concat_axis``. With
        ``tiled``, dim ``split_axis`` shrinks to 1/n and dim ``concat_axis`` grows n times.

    Raises:
        NameError: the axis is not bound.
        ValueError: a dim does not exist or cannot be cut into n slices, or bad groups.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.all_to_all(x, "i", 0, 0), axis_name="i")
        >>> f(torch.arange(16).reshape(4, 4))[1].tolist()  # [4] -> [4] per device
        [1, 5, 9, 13]

    Source: jax.lax.all_to_all under jax.pmap; checked in tests/collectives/test_collectives.py.
    """
    how = split_axis, concat_axis, tiled
    over = resolve("all_to_all", axis_name, axis_index_groups, equal=True, how=how)
    if not over.axes:
        return own_values(over, x)

    def exchange(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dims = [over.dim(concat_axis, x.dim()) for x in xs]
        ys = [_parcels(over, x, split_axis, axis_name, tiled) for x in xs]
        for k, step in enumerate(over.steps):
            received = step.run(AllToAll, [y.movedim(k, 0) for y in ys])
            ys = [y.movedim(0, k) for y in received]
        return _merged([merged_lead(over.steps, y) for y in ys], dims, tiled)

    return map_leaves(over, x, exchange)


@boundary
def pswapaxes(
    x: Tree, axis_name: AxisName, axis: int, *, axis_index_groups: IndexGroups = None
) -> Tree:
    """Swap the mapped axis ``axis_name`` with the dim ``axis`` of ``x``.

    pswapaxes: any[n, *s] per device -> any[n, *s] per device
    Backward: pswapaxes of the cotangents.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names.
        axis: dim of ``x`` whose size is that of the axis.
        axis_index_groups: lists of axis indices that cover the axis, all of one length.

    Returns:
        Same structure, shapes and dtypes as ``x``.

    Raises:
        NameError: the axis is not bound.
        ValueError: the dim does not exist or has another size, or bad groups.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.pswapaxes(x, "i", 0), axis_name="i")
        >>> f(torch.arange(16).reshape(4, 4))[1].tolist()  # [4] -> [4] per device
        [1, 5, 9, 13]

    Source: jax.lax.pswapaxes; checked in tests/collectives/test_collectives.py.
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def _summands(over: Over, x: torch.Tensor, scatter_dimension: int, tiled: bool) -> torch.Tensor:
    if x.dtype == torch.bool:
        raise TypeError("psum_scatter: add does not accept dtype bool; count in an integer dtype")
    dim = over.dim(scatter_dimension, x.dim())
    size, count = x.shape[dim], over.size
    if tiled and size % count:
        raise ValueError(
            f"tiled reduce_scatter operand scatter dimension size {size} must be divisible by "
            f"shard_count {count}"
        )
    if not tiled and size != count:
        raise ValueError(
            f"reduce_scatter operand scatter dimension size {size} must match shard count {count}"
        )
    return _slices(over, widened(x, "sum"), dim, tiled)


def _parcels(
    over: Over, x: torch.Tensor, split_axis: int, axis_name: AxisName, tiled: bool
) -> torch.Tensor:
    dim = over.dim(split_axis, x.dim())
    size, count = x.shape[dim], over.size
    if tiled and size % count:
        raise ValueError(
            f"The size of all_to_all split_axis ({size}) has to be divisible by the size of "
            f"the named axis {axis_name} ({count})"
        )
    if not tiled and size != count:
        raise ValueError(
            "all_to_all requires the size of the mapped axis axis_name to equal "
            f"x.shape[split_axis], but they are {count} and {size} respectively."
        )
    return _slices(over, x, dim, tiled)


def _slices(over: Over, x: torch.Tensor, dim: int, tiled: bool) -> torch.Tensor:
    """Bring the slices of ``dim`` to the front: one leading dim per step."""
    if tiled:
        x = x.unflatten(dim, (over.size, x.shape[dim] // over.size))
    front = x.movedim(dim, 0)
    return front.reshape((*over.sizes, *front.shape[1:]))


def _merged(stacks: Sequence[torch.Tensor], dims: Sequence[int], tiled: bool) -> list[torch.Tensor]:
    """Move the leading dim of each stack to its place; with ``tiled``, merge it into the next."""
    placed = [y.movedim(0, d) for y, d in zip(stacks, dims, strict=True)]
    if not tiled:
        return placed
    return [y.flatten(d, d + 1) for y, d in zip(placed, dims, strict=True)]
