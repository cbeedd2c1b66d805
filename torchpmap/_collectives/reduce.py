"""Reductions over named axes: psum, pmean, pmax, pmin and pbroadcast.

Every device gets the same result. Dtypes and positional axes are handled here, the rest in
``primitives``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.errors import warn
from torchpmap._base.pytree import Tree
from torchpmap._base.torch_internals import FakeTensor, innermost, outside_modes
from torchpmap._collectives.backend import ReduceOp, narrowed, widened
from torchpmap._collectives.extremes import extreme
from torchpmap._collectives.operands import (
    NUMBERS,
    AxisName,
    IndexGroups,
    Over,
    map_leaves,
    own_values,
    permutation,
    resolve,
)
from torchpmap._collectives.primitives import AllReduce
from torchpmap._collectives.varying import NONE, axes_of, is_gradient, named
from torchpmap._layout.axis_stack import Axis

# Sums of these overflow where their mean does not.
_NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16)


@boundary
def psum(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Sum ``x`` over the mapped axis ``axis_name``; every device gets the sum.

    psum: number[*s] per device -> number[*s] per device (equal on all)
    Backward: psum of the cotangents (self-dual), so ``grad`` of a psummed loss is the derivative of
    the sum of all devices' losses; inside a ``shard_map`` with ``check_vma=True`` the cotangent, as
    devices share the sum. Many leaves travel as one message per dtype.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device. bool is counted in int32.
            Python numbers and numpy arrays are the same on every device and are multiplied by the
            size with no communication: ``psum(1, "i")`` is the int n.
        axis_name: name of a bound axis or a tuple of names; an int in it is a dim of ``x``, summed
            as well.
        axis_index_groups: lists of axis indices that cover the axis, to sum within each.

    Returns:
        Same structure as ``x``; same shapes, less the dims summed.

    Raises:
        NameError: the axis is not bound.
        ValueError: a name is repeated, or the groups do not cover the axis.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i")(torch.arange(4.0)).tolist()
        [6.0, 6.0, 6.0, 6.0]
        >>> pairs = [[0, 1], [2, 3]]
        >>> f = tp.pmap(lambda x: tp.psum(x, "i", axis_index_groups=pairs), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [1.0, 1.0, 5.0, 5.0]

    Source: jax.lax.psum under jax.pmap; checked in tests/collectives/test_collectives.py.
    """
    over = resolve("psum", axis_name, axis_index_groups, positional=True)

    def constant(leaf: Any) -> Any:
        if isinstance(leaf, NUMBERS) and not over.dims:
            return leaf * over.members()
        given = _counted(over.as_tensor(leaf))
        total = _sum_dims(over, given) * over.members()
        return narrowed(total, "sum", given.dtype)

    def total(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _warn_of_summed(over, xs)
        given = [_counted(x) for x in xs]
        sums = _sum(over, given)
        return [narrowed(y, "sum", x.dtype) for x, y in zip(given, sums, strict=True)]

    return map_leaves(over, x, total, constant)


@boundary
def pmean(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Average ``x`` over the mapped axis ``axis_name``; every device gets the mean.

    pmean: number[*s] per device -> inexact[*s] per device (equal on all)
    Backward: pmean of the cotangents; as for ``psum``, their n-th part inside a ``shard_map``.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device. Integers and bools give the
            default dtype, summed in at least 32 bits.
        axis_name: name of a bound axis or a tuple of names; an int in it is a dim of ``x``,
            averaged as well.
        axis_index_groups: lists of axis indices that cover the axis, to average within each. Groups
            may differ in size; each divides by its own.

    Returns:
        Same structure as ``x``; same shapes, less the dims averaged.

    Raises:
        NameError: the axis is not bound.
        ValueError: a name is repeated, or the groups do not cover the axis.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: tp.pmean(x, "i"), axis_name="i")(torch.arange(4.0)).tolist()
        [1.5, 1.5, 1.5, 1.5]

    Source: jax.lax.pmean under jax.pmap, which divides unequal groups by the size of the first;
        checked in tests/collectives/test_collectives.py.
    """
    over = resolve("pmean", axis_name, axis_index_groups, positional=True)

    def mean(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        _warn_of_summed(over, xs)
        members, given = over.members(), [_widened(x) for x in xs]
        return [
            _divided(y, members * _numel(over, x), x.dtype)
            for x, y in zip(given, _sum(over, given), strict=True)
        ]

    def constant(leaf: Any) -> Any:
        if isinstance(leaf, NUMBERS) and not over.dims:
            return leaf / 1
        given = _widened(over.as_tensor(leaf))
        return _divided(_sum_dims(over, given), _numel(over, given), given.dtype)

    return map_leaves(over, x, mean, constant)


@boundary
def pmax(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Take the elementwise maximum of ``x`` over ``axis_name``; every device gets it.

    pmax: real[*s] per device -> real[*s] per device (equal on all)
    Backward: the psummed cotangent goes to the device that holds the maximum; ties split evenly.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device. NaN wins; bool stays bool.
        axis_name: name of a bound axis or a tuple of names; an int in it is a dim of ``x``.
        axis_index_groups: lists of axis indices that cover the axis, to reduce within each.

    Returns:
        Same structure as ``x``; same shapes, less the dims reduced.

    Raises:
        NameError: the axis is not bound.
        TypeError: complex numbers have no order.
        ValueError: a name is repeated, or the groups do not cover the axis.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: tp.pmax(x, "i"), axis_name="i")(torch.arange(4.0)).tolist()
        [3.0, 3.0, 3.0, 3.0]

    Source: jax.lax.pmax, which has no derivative and may drop NaN; checked in
        tests/collectives/test_collectives.py.
    """
    return _extremum("max", x, axis_name, axis_index_groups)


@boundary
def pmin(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Take the elementwise minimum of ``x`` over ``axis_name``; every device gets it.

    pmin: real[*s] per device -> real[*s] per device (equal on all)
    Backward: the psummed cotangent goes to the device that holds the minimum; ties split evenly.

    Args, Returns and Raises: as ``pmax``.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: tp.pmin(x, "i"), axis_name="i")(torch.arange(4.0)).tolist()
        [0.0, 0.0, 0.0, 0.0]

    Source: jax.lax.pmin, which has no derivative and may drop NaN; checked in
        tests/collectives/test_collectives.py.
    """
    return _extremum("min", x, axis_name, axis_index_groups)


@boundary
def pbroadcast(x: Tree, axis_name: AxisName, source: int) -> Tree:
    """Give every device the ``x`` of device ``source``.

    pbroadcast: any[*s] per device -> any[*s] per device (equal on all)
    Backward: psum of the cotangents on the source, zeros on the others.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names.
        source: (row-major) index of the device that sends; negative counts from the end.

    Returns:
        Same structure, shapes and dtypes as ``x``.

    Raises:
        NameError: the axis is not bound.
        IndexError: ``source`` is not on the axis.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.pbroadcast(x, "i", 2), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [2.0, 2.0, 2.0, 2.0]

    Source: jax.lax.pbroadcast, which exists on GPUs only; checked in
        tests/collectives/test_collectives.py.
    """
    over = resolve("pbroadcast", axis_name)
    ((source, _),) = permutation("pbroadcast", [(source, source)], over)
    over = replace(over, how=(source,))

    def broadcast(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        here = over.index() == source
        wide = [widened(_counted(x), "sum") for x in xs]
        # -0.0 and not 0.0, which would turn a -0.0 of the source into 0.0.
        masked = [torch.where(here, w, torch.full_like(w, -0.0)) for w in wide]
        sums = over.fold(AllReduce, masked)
        return [narrowed(y, "sum", x.dtype) for x, y in zip(xs, sums, strict=True)]

    def constant(leaf: Any) -> Any:
        return leaf if isinstance(leaf, NUMBERS) else over.as_tensor(leaf)

    return map_leaves(over, x, broadcast, constant) if over.axes else own_values(over, x)


# Sums stay in the dtype they are taken in until the last step, so that they are rounded once.


def _sum(over: Over, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The sums, to be narrowed."""
    return over.fold(AllReduce, [_sum_dims(over, x) for x in xs])


def _warn_of_summed(over: Over, xs: Sequence[torch.Tensor]) -> None:
    """Warn of gradients that are summed over the axes already, as those of values that devices
    share are; the first device does.
    """
    axes = [axis for axis in over.axes if axis.group is None or not _is_later_device(axis)]
    tracked = NONE.union(*(axis.tracked for axis in axes))
    shared = NONE.union(*(tracked - axes_of(x) for x in xs if is_gradient(x)))
    if not shared or over.partition is not None:
        return
    names, size = named(shared), math.prod(axis.size for axis in shared)
    effect = f"multiplies it by {size}"
    if over.what == "pmean":
        effect = f"leaves it as it is, {size} times the mean"
    warn(
        f"{over.what}: this gradient is already summed over {names}; {over.what} {effect}. Inside "
        "a shard_map the gradient of a value that devices share is the sum over them. Leave "
        f"{over.what} out; for the gradient of a mean, take the mean of the loss (tp.pmean)."
    )


def _is_later_device(axis: Axis) -> bool:
    """Whether the process is known not to be the first along an axis."""
    index = innermost(axis.index)
    with outside_modes():  # in a branch that does not run, too
        return not isinstance(index, FakeTensor) and bool(index.any())


def _sum_dims(over: Over, x: torch.Tensor) -> torch.Tensor:
    """The sum over the positional axes, to be narrowed."""
    dims, wide = over.dims_of(x), widened(x, "sum")
    return wide.sum(dims, dtype=wide.dtype) if dims else wide


def _divided(total: torch.Tensor, count: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mean, in ``dtype`` or a float dtype, from a sum that is still wide."""
    if dtype.is_floating_point or dtype.is_complex:
        return (total / count).to(dtype)
    return narrowed(total, "sum", dtype) / count


def _numel(over: Over, x: torch.Tensor) -> int:
    return math.prod(x.shape[dim] for dim in over.dims_of(x))


def _counted(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int32) if x.dtype == torch.bool else x


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int32) if x.dtype in _NARROW else x


def _extremum(op: ReduceOp, x: Tree, axis_name: AxisName, groups: IndexGroups) -> Tree:
    over = resolve(f"p{op}", axis_name, groups, positional=True)
    if not over.axes and not over.dims:
        return own_values(over, x)

    def front(x: torch.Tensor) -> torch.Tensor:
        if x.is_complex():
            raise TypeError(f"p{op} does not accept dtype {x.dtype}: it has no order")
        return x.movedim(over.dims_of(x), tuple(range(len(over.dims))))

    def constant(leaf: Any) -> Any:
        given = front(over.as_tensor(leaf))
        if isinstance(leaf, NUMBERS) and not over.dims:
            return leaf
        (result,) = extreme(op, (), [given], lead=len(over.dims))
        return result

    return map_leaves(over, x, lambda xs: over.extreme(op, [front(x) for x in xs]), constant)
