"""What the arguments of a collective stand for: axis names, groups of indices, leaves of a pytree.

Everything here is checked before any communication, so misuse is an error on every device at once.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchpmap._base import axis_spec
from torchpmap._base.arrays import for_torch
from torchpmap._base.errors import check_array, kind_of
from torchpmap._base.pytree import Structure, flatten
from torchpmap._collectives.backend import Pairs, ReduceOp
from torchpmap._collectives.extremes import extreme
from torchpmap._collectives.groups import Along, Scattered, Tensors, cuts, entry, varied, whole
from torchpmap._collectives.primitives import Primitive, Scope
from torchpmap._collectives.varying import NONE, set_axes
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis, Partition, joined

AxisName = Hashable | tuple[Hashable, ...] | list[Hashable]
IndexGroups = Sequence[Sequence[int]] | np.ndarray | None

NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, eq=False)
class Over:
    """What a collective runs over: bound axes, perhaps cut into groups, and dims of the operand."""

    what: str
    """Name of the collective, for messages."""
    axes: tuple[Axis, ...]
    dims: tuple[int, ...]
    partition: Partition | None
    """Groups of the row-major index over the axes."""
    along: tuple[Along, ...]
    """The axes that take part, one after the other."""
    scattered: Scattered | None
    """Instead of ``along``, for groups that no cuts of the axes make."""
    how: tuple[Hashable, ...] = ()
    """Further arguments of the collective, equal on all devices."""

    @property
    def steps(self) -> tuple[Along | Scattered, ...]:
        """The axes a collective runs over one after another, slowest first."""
        return self.along if self.scattered is None else (self.scattered,)

    def purpose(self, structure: Structure, tensors: dict[int, torch.Tensor]) -> str:
        """The call of the collective, in words that are equal on all devices."""
        names = _leaf_names(structure)
        given = [f"{names[i]} {kind_of(x.shape, x.dtype)}".lstrip() for i, x in tensors.items()]
        axes = [axis.name for axis in self.axes if isinstance(axis.name, str)]
        told = [
            repr(part)
            for part in (*axes, *self.dims, self.partition, *self.how)
            if part is not None
        ]
        return f"{self.what}({', '.join(told)}) of {', '.join(given)}"

    @property
    def passes_on(self) -> bool:
        """Whether a later step adds up the sums of an earlier one."""
        return self.scattered is not None or len(self.along) > 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Members of one group in every step."""
        return tuple(step.size for step in self.steps)

    @property
    def size(self) -> int:
        """Members of one group over all axes; groups are equal wherever this is used."""
        return math.prod(self.sizes)

    def members(self) -> int | torch.Tensor:
        """Members of the group of this device; a tensor where groups differ."""
        if self.partition is None or len({len(part) for part in self.partition}) == 1:
            return self.size
        sizes = {member: len(part) for part in self.partition for member in part}
        return entry(self.index(), sizes)

    def index(self) -> torch.Tensor:
        """Row-major index over the axes; ``(i, j)`` of sizes (4, 2): i * 2 + j."""
        if not self.axes:
            return torch.zeros((), dtype=torch.int64)
        index, *rest = self.axes
        total = index.index.clone()  # the original is shared by the whole function
        for axis in rest:
            total = total * axis.size + axis.index
        set_axes(total, NONE.union(*(axis.tracked for axis in self.axes)))  # of joined ones too
        return total

    @property
    def order(self) -> list[int]:
        """The steps in an order that sends little: sums within a process come first."""
        return sorted(range(len(self.steps)), key=lambda k: self.steps[k].is_sent)

    @property
    def reductions(self) -> Sequence[Along | Scattered]:
        """The steps of a reduction: as their order does not matter, data is sent once for all."""
        if self.partition is not None:
            return [self.steps[k] for k in self.order]
        local = [axis for axis in self.axes if axis.group is None]
        sent = joined([axis for axis in self.axes if axis.group is not None])
        return [whole(axis) for axis in (*local, *sent)]

    def fold(self, primitive: Callable[[Scope], Primitive], xs: Tensors) -> Tensors:
        """Run a primitive that keeps the shape over one axis after the other."""
        for step in self.reductions:
            xs = step.run(primitive, xs)
        return xs

    def extreme(self, op: ReduceOp, xs: Tensors) -> Tensors:
        """Max or min over the axes and as many leading dims as there are positional axes."""
        if self.scattered is None:
            steps = self.along if self.partition is not None else self.reductions
            scopes = [axis.indexed_scope for axis in steps if isinstance(axis, Along)]
            tracked = NONE.union(*(scope.tracked for scope, _ in scopes))
            return extreme(op, scopes, [varied(x, tracked) for x in xs], lead=len(self.dims))
        return self.scattered.extreme(op, xs)

    def dims_of(self, x: torch.Tensor) -> tuple[int, ...]:
        """The positional axes as dims of ``x``."""
        dims = tuple(self.dim(dim, x.dim()) for dim in self.dims)
        if len(set(dims)) < len(dims):
            raise ValueError(f"{self.what}: duplicate positional axes {self.dims}")
        return dims

    def dim(self, dim: int, ndim: int) -> int:
        """``dim`` counted from the front."""
        return axis_spec.canonical_axis(dim, ndim, what=self.what, path="the operand")

    def as_tensor(self, leaf: Any) -> torch.Tensor:
        """A number or numpy array as a tensor on the device of the axes."""
        check_array(leaf, f"{self.what}: the operand")
        device = self.axes[0].index.device if self.axes else None
        return torch.tensor(for_torch(leaf), device=device)


def resolve(
    what: str,
    axis_name: AxisName,
    groups: IndexGroups = None,
    *,
    positional: bool = False,
    equal: bool = False,
    sends: bool = True,
    how: tuple[Hashable, ...] = (),
) -> Over:
    """Look the names up and check the groups.

    Args:
        what: name of the collective, for messages.
        axis_name: a name, or several.
        groups: ``axis_index_groups`` as the user gave it.
        positional: ints are dims of the operand.
        equal: groups must have one size, and the order of their indices counts.
        sends: whether data will be sent; then neighbouring axes of a mesh are joined.
        how: further arguments of the collective.
    """
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    for name in names:
        _check_name(what, name)
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: repeated axis in axis_name={axis_name!r}")
    dims = [name for name in names if positional and is_dim(name)]
    axes = tuple(part for name in names if name not in dims for part in axis_stack.lookup(name))
    if sends:
        axes = joined(axes)
    if groups is None:
        return Over(what, axes, tuple(dims), None, tuple(whole(axis) for axis in axes), None, how)
    if dims:
        raise ValueError("axis_index_groups only supported for sums over just named axes")
    partition = _partition(what, groups, axis_name, math.prod(axis.size for axis in axes), equal)
    along = cuts(axes, partition) if axes else ()
    if along is not None:
        return Over(what, axes, (), partition, along, None, how)
    over = Over(what, axes, (), partition, tuple(whole(axis) for axis in axes), None, how)
    return replace(over, along=(), scattered=Scattered(over.along, partition, over.index()))


def is_dim(name: Any) -> bool:
    """Whether it is a dim of the operand, if dims may stand among the names."""
    return isinstance(name, int) and not isinstance(name, bool)


def _check_name(what: str, name: Any) -> None:
    """Raise ``TypeError`` for a value that cannot name an axis, and for None if all have names."""
    unnamed = name is None and not any(parts[0].name is None for parts in axis_stack.bound())
    if unnamed or not isinstance(name, Hashable) or isinstance(name, torch.Tensor | tuple | list):
        raise TypeError(
            f"{what}: axis_name must be the name of an axis (as in pmap(f, axis_name='i')) or a "
            f"tuple of names, but got {name!r}."
        )


def _partition(what: str, groups: Any, axis_name: AxisName, size: int, equal: bool) -> Partition:
    partition = tuple(tuple(operator.index(k) for k in part) for part in groups if len(part))
    if sorted(k for part in partition for k in part) != list(range(size)):
        raise ValueError(
            f"axis_index_groups must cover all indices exactly once: axis {axis_name!r} has the "
            f"indices 0 to {size - 1}, but {what} got {[list(part) for part in partition]}"
        )
    if equal and len({len(part) for part in partition}) > 1:
        raise ValueError(
            f"axis_index_groups of {what} must all have the same size, because every device's "
            f"result has the same shape, but got {[list(part) for part in partition]}"
        )
    return partition if equal else tuple(tuple(sorted(part)) for part in partition)


@functools.lru_cache(maxsize=256)
def _leaf_names(structure: Structure) -> list[str]:
    """The paths of the leaves; ``?`` for a path whose text may differ between processes."""
    return [path if _PLAIN_PATH.fullmatch(path) else "?" for path in structure.paths()]


_PLAIN_PATH = re.compile(r"(\[\d+\]|\['[^']*'\]|\.\w+)*")


def permutation(what: str, perm: Iterable[tuple[int, int]], over: Over) -> Pairs:
    """(source, destination) pairs, with indices counted from the front."""
    pairs = tuple((operator.index(s), operator.index(d)) for s, d in perm)
    size = over.size
    for k in (k for pair in pairs for k in pair):
        if not -size <= k < size:
            raise IndexError(
                f"{what}: index {k} is out of range for an axis of size {size}, in {pairs}"
            )
    counted = tuple((s % size, d % size) for s, d in pairs)
    if len({s for s, _ in counted}) < len(pairs) or len({d for _, d in counted}) < len(pairs):
        raise ValueError(f"{what} sources and destinations must be unique, got {pairs}.")
    return counted


def own_values(over: Over, x: Any) -> Any:
    """The result of a collective over no axis at all: the operand."""
    return map_leaves(over, x, lambda xs: xs, lambda leaf: leaf)


def map_leaves(
    over: Over,
    x: Any,
    on_tensors: Callable[[list[torch.Tensor]], Tensors],
    on_constant: Callable[[Any], Any] | None = None,
) -> Any:
    """Apply a collective to all leaves of ``x`` at once; None passes through.

    Args:
        over: what the collective runs over.
        x: the pytree.
        on_tensors: gives a result for every tensor leaf.
        on_constant: gives the result for a number or numpy array, which is the same on every
            device; without it they become tensors.
    """
    leaves, structure = flatten(x)
    tensors: dict[int, torch.Tensor] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors[i] = leaf
        elif leaf is None:
            continue
        elif not isinstance(leaf, (*NUMBERS, np.ndarray, np.generic)):
            raise TypeError(
                f"{over.what} takes tensors, numpy arrays and Python numbers, but "
                f"{structure.paths('x')[i]} is {leaf!r} of type {type(leaf).__name__}"
            )
        elif on_constant is None:
            tensors[i] = over.as_tensor(leaf)
        else:
            leaves[i] = on_constant(leaf)
    if tensors:
        with axis_stack.serving(lambda: over.purpose(structure, tensors)):
            alone = not over.steps and not over.dims
            # a write to the result must not reach the operand
            results = on_tensors([x.clone() if alone else x for x in tensors.values()])
        for i, result in zip(tensors, results, strict=True):
            leaves[i] = result
    return structure.unflatten(leaves)
