"""``pcast``: from a value that devices share to one that each has for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import Tree
from torchpmap._collectives.operands import AxisName, Over, map_leaves, own_values, resolve
from torchpmap._collectives.primitives import AllReduce, Primitive, Tensors

# Per thread, as the bound axes are.
_sums: ContextVar[bool] = ContextVar("torchpmap_pcast_sums", default=False)


@contextmanager
def casts_sum(sums: bool) -> Iterator[None]:
    """Whether the cotangents of ``pcast`` are summed in the block."""
    token = _sums.set(sums)
    try:
        yield
    finally:
        _sums.reset(token)


class _Copy(Primitive):
    """[*s] -> [*s], a shared value as one of each member; their cotangents are summed."""

    elementwise = True

    def across(self, xs: Tensors) -> Tensors:
        return [x.clone() for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def transposed(self) -> Primitive:
        return _Total(self.scope)


class _Total(AllReduce):
    """The sum as a value that members share, where ``AllReduce`` gives each member its own."""

    def transposed(self) -> Primitive:
        return _Copy(self.scope)


class _Split(_Copy):
    """The same of a value of which each member has a part of the cotangent, not a copy."""

    def transposed(self) -> Primitive:
        return AllReduce(self.scope)


@boundary
def pcast(x: Tree, axis_name: AxisName, *, to: str = "varying") -> Tree:
    """Return ``x``, which devices share, as a value that each device has for itself.

    pcast: T[*s] per device -> T[*s] per device, the same numbers
    Backward: psum of the cotangents, inside a ``shard_map`` with ``check_vma=True``; the cotangent
    itself elsewhere.

    With it a gradient taken inside with respect to a shared value is the sum over the devices, as
    JAX's default is for every shared value.

    Args:
        x: tensor or pytree.
        axis_name: name of a bound axis, or a tuple of names.
        to: ``"varying"``; JAX's other kinds do not exist here.

    Raises:
        NameError: the axis is not bound.
        ValueError: ``to`` is something else.

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((4,), ("i",))
        >>> loss = lambda w, x: (tp.pcast(w, "i") * x).sum()
        >>> slope = tp.shard_map(tp.grad(loss), mesh=mesh, in_specs=(tp.P(), tp.P("i")),
        ...                      out_specs=tp.P())
        >>> slope(torch.tensor(1.0), torch.arange(8.0))
        ShardedTensor(28., replicated on cpu:0 cpu:1 cpu:2 cpu:3)

    Source: ``jax.lax.pcast``.
    """
    if to != "varying":
        raise ValueError(f"pcast: to must be 'varying', but got {to!r}.")
    over = resolve("pcast", axis_name)
    if not over.axes or not _sums.get():
        return own_values(over, x)
    return map_leaves(over, x, lambda xs: over.fold(_Copy, xs))


def split(over: Over, x: Any) -> Any:
    """``x`` with cotangents that are summed, in derivatives of any order."""
    return map_leaves(over, x, lambda xs: over.fold(_Split, xs))
