"""Sizes of bound axes and indices along them; reductions for code that also runs unmapped.

The reductions ``psum_if_bound`` and relatives leave out the names that are not bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import Tree
from torchpmap._collectives.operands import AxisName, IndexGroups, is_dim, resolve
from torchpmap._collectives.reduce import pmax, pmean, pmin, psum
from torchpmap._layout import axis_stack


@boundary
def axis_size(axis_name: AxisName) -> int:
    """Return the number of devices along ``axis_name``, as a Python int.

    axis_size: -> int

    Args:
        axis_name: name of a bound axis, or a tuple of names, whose sizes multiply.

    Returns:
        The size; 1 for an empty tuple.

    Raises:
        NameError: the axis is not bound.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: x / tp.axis_size("i"), axis_name="i")(torch.arange(4.0)).tolist()
        [0.0, 0.25, 0.5, 0.75]

    Source: jax.lax.axis_size; checked in tests/collectives/test_collectives.py.
    """
    return resolve("axis_size", axis_name, sends=False).size


@boundary
def axis_index(axis_name: AxisName) -> torch.Tensor:
    """Return the index of this device along ``axis_name``.

    axis_index: -> int64[] per device
    Backward: none. The index is a tensor, never a Python int: every device runs the same program.

    Args:
        axis_name: name of a bound axis, or a tuple of names: the row-major index over all of them.

    Returns:
        int64 scalar, 0 <= index < axis_size; 0 for an empty tuple.

    Raises:
        NameError: the axis is not bound.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: x + 10 * tp.axis_index("i"), axis_name="i")(torch.zeros(4)).tolist()
        [0.0, 10.0, 20.0, 30.0]

    Source: jax.lax.axis_index, which gives int32; checked in tests/collectives/test_collectives.py.
    """
    return resolve("axis_index", axis_name, sends=False).index()


def axis_bound(axis_name: AxisName) -> bool:
    """Return whether ``axis_name`` is bound here, so that collectives over it work.

    axis_bound: -> bool

    Args:
        axis_name: a name, or a tuple of names, which must all be bound. None is never bound, so
            that a module can have ``axis_name=None`` for "not mapped".

    Returns:
        True inside a function mapped over that name, also while it is traced.

    Example:
        >>> import torch, torchpmap as tp
        >>> def standardized(x):
        ...     return x / tp.axis_size("i") if tp.axis_bound("i") else x
        >>> standardized(torch.tensor(8.0)).item()
        8.0
        >>> tp.pmap(standardized, axis_name="i")(torch.full((4,), 8.0)).tolist()
        [2.0, 2.0, 2.0, 2.0]

    Source: kfac_jax.utils.in_pmap; checked in tests/collectives/test_if_bound.py.
    """
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    known = {parts[0].name for parts in axis_stack.bound()}
    return all(name is not None and name in known for name in names)


@boundary
def psum_if_bound(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Sum ``x`` over ``axis_name`` where it is bound; anywhere else, over this one device.

    psum_if_bound: number[*s] per device -> number[*s] per device
    Backward: that of ``psum``, or the identity.

    Args:
        x: as for ``psum``; dtypes do not depend on what is bound.
        axis_name: a name, or a tuple of names; names that are not bound are left out. None is never
            bound.
        axis_index_groups: as for ``psum``; unused where no name is bound.

    Returns:
        As ``psum``.

    Raises:
        ValueError: as ``psum``.

    Example:
        >>> import torch, torchpmap as tp
        >>> def normalize(x):
        ...     return x / tp.psum_if_bound(x.sum(), "i")
        >>> normalize(torch.tensor([1.0, 3.0])).tolist()
        [0.25, 0.75]
        >>> tp.pmap(normalize, axis_name="i")(torch.ones(4, 1)).tolist()
        [[0.25], [0.25], [0.25], [0.25]]

    Source: kfac_jax.utils.psum_if_pmap; checked in tests/collectives/test_if_bound.py.
    """
    return _if_bound(psum, x, axis_name, axis_index_groups)


@boundary
def pmean_if_bound(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Average ``x`` over ``axis_name`` where it is bound; anywhere else, over this one device.

    pmean_if_bound: number[*s] per device -> inexact[*s] per device
    Backward: that of ``pmean``, or the identity.

    Args, Returns and Raises: as ``psum_if_bound``.

    Example:
        >>> import torch, torchpmap as tp
        >>> def centered(x):
        ...     return x - tp.pmean_if_bound(x.mean(), "i")
        >>> centered(torch.tensor([1.0, 3.0])).tolist()
        [-1.0, 1.0]
        >>> tp.pmap(centered, axis_name="i")(torch.arange(4.0)).tolist()
        [-1.5, -0.5, 0.5, 1.5]

    Source: kfac_jax.utils.pmean_if_pmap; checked in tests/collectives/test_if_bound.py.
    """
    return _if_bound(pmean, x, axis_name, axis_index_groups)


@boundary
def pmax_if_bound(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Take the maximum of ``x`` over ``axis_name`` where it is bound; anywhere else it is ``x``.

    pmax_if_bound: real[*s] per device -> real[*s] per device
    Backward: that of ``pmax``, or the identity.

    Args, Returns and Raises: as ``psum_if_bound``; complex numbers have no order.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmax_if_bound(torch.tensor(2.0), "i").item()
        2.0
        >>> f = tp.pmap(lambda x: tp.pmax_if_bound(x, "i"), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [3.0, 3.0, 3.0, 3.0]

    Source: kfac_jax.utils.wrap_if_pmap; checked in tests/collectives/test_if_bound.py.
    """
    return _if_bound(pmax, x, axis_name, axis_index_groups)


@boundary
def pmin_if_bound(x: Tree, axis_name: AxisName, *, axis_index_groups: IndexGroups = None) -> Tree:
    """Take the minimum of ``x`` over ``axis_name`` where it is bound; anywhere else it is ``x``.

    pmin_if_bound: real[*s] per device -> real[*s] per device
    Backward: that of ``pmin``, or the identity.

    Args, Returns and Raises: as ``psum_if_bound``; complex numbers have no order.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmin_if_bound(torch.tensor(2.0), "i").item()
        2.0
        >>> f = tp.pmap(lambda x: tp.pmin_if_bound(x, "i"), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [0.0, 0.0, 0.0, 0.0]

    Source: kfac_jax.utils.wrap_if_pmap; checked in tests/collectives/test_if_bound.py.
    """
    return _if_bound(pmin, x, axis_name, axis_index_groups)


def _if_bound(
    collective: Callable[..., Tree], x: Tree, axis_name: AxisName, groups: IndexGroups
) -> Tree:
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    bound = tuple(name for name in names if is_dim(name) or axis_bound(name))
    named = [name for name in bound if not is_dim(name)]
    return collective(x, bound, axis_index_groups=groups if named else None)
