"""``pcast``: from a value that devices share to one that each has for itself."""

from __future__ import annotations

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import Tree
from torchpmap._collectives.groups import Tensors, varied
from torchpmap._collectives.operands import AxisName, map_leaves, own_values, resolve
from torchpmap._collectives.varying import NONE


@boundary
def pcast(x: Tree, axis_name: AxisName, *, to: str = "varying") -> Tree:
    """Return ``x``, which devices share, as a value that each device has for itself.

    pcast: T[*s] per device -> T[*s] per device, the same numbers
    Backward: psum of the cotangents, inside a ``shard_map`` with ``check_vma=True``; the cotangent
    itself elsewhere.

    Such a ``shard_map`` casts by itself where a shared value meets one that varies.  ``pcast`` says
    where, for a value that is written to in place.

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
        >>> @tp.shard_map(mesh=mesh, in_specs=(tp.P(), tp.P("i")), out_specs=tp.P())
        ... def slope(w, x):
        ...     return tp.grad(lambda w: tp.pcast(w, "i").mul_(x).sum())(w)
        >>> slope(torch.tensor([1.0]), torch.arange(4.0)).tolist()
        [6.0]

    Source: ``jax.lax.pcast``.
    """
    if to != "varying":
        raise ValueError(f"pcast: to must be 'varying', but got {to!r}.")
    over = resolve("pcast", axis_name)
    tracked = NONE.union(*(axis.tracked for axis in over.axes))

    def cast(xs: Tensors) -> Tensors:
        found = [varied(x, tracked) for x in xs]
        return [y.clone() if y is x else y for x, y in zip(xs, found, strict=True)]

    return map_leaves(over, x, cast) if over.axes else own_values(over, x)
