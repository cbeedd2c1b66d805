"""How a collective runs over one axis or several, perhaps cut into groups of indices.

Groups consist of row-major indices over all axes. Most are a product of cuts of the single axes:
over sizes (2, 2), [[0, 1], [2, 3]] is (each index of the first) x (all of the second). Then the
collective runs over one axis after the other, each cut by itself (``Along``), and sends only within
groups. For any other groups (``Scattered``) every device receives everything, computes the results
of all groups, and takes its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchpmap._collectives.backend import ReduceOp, summable
from torchpmap._collectives.extremes import extreme
from torchpmap._collectives.primitives import (
    AllGather,
    AllReduce,
    Copy,
    IndexedScope,
    Primitive,
    Scope,
    apply,
    results_of_groups,
)
from torchpmap._collectives.varying import Axes, axes_of, in_order
from torchpmap._layout.axis_stack import Axis, Partition, joined

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Along:
    """One axis, whole or cut."""

    scope: Scope
    index: torch.Tensor | None
    """That of a vmapped axis."""

    @property
    def indexed_scope(self) -> IndexedScope:
        return self.scope, self.index

    @property
    def size(self) -> int:
        """Members of one group."""
        return self.scope.size

    @property
    def is_sent(self) -> bool:
        """Whether values leave the process."""
        return self.scope.group is not None

    def run(self, primitive: Callable[[Scope], Primitive], xs: Tensors) -> Tensors:
        given = [varied(x, self.scope.tracked) for x in xs]
        return apply(primitive(self.scope), self.index, given)


def whole(axis: Axis) -> Along:
    """All indices of an axis."""
    scope = Scope(axis.size, axis.group, tracked=axis.tracked)
    return Along(scope, axis.index if axis.group is None else None)


def varied(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """``x``, cast so that it varies along some axes as well."""
    lacking = axes - axes_of(x) if axes else axes
    for axis in joined(in_order(lacking)):
        along = whole(axis)
        (x,) = apply(Copy(along.scope), along.index, [x])
    return x


def along_groups(axis: Axis, groups: Partition) -> Along | None:
    """An axis cut into groups; None if each has one index, because then nothing is to do."""
    if groups == (tuple(range(axis.size)),):
        return whole(axis)
    if len(groups) == axis.size:
        return None
    size = len(groups[0])
    tracked = axis.tracked
    if axis.group is None:
        return Along(Scope(size, None, groups, tracked, is_part=True), axis.index)
    assert axis.subgroup is not None
    return Along(Scope(size, axis.subgroup(groups), tracked=tracked, is_part=True), None)


def cuts(axes: Sequence[Axis], partition: Partition) -> tuple[Along, ...] | None:
    """The axes, each cut by itself, if the groups are the product of such cuts.

    (0, 2), (1, 3) over sizes (2, 2) are (0, 0) (1, 0) and (0, 1) (1, 1): the first axis whole, the
    second in single indices.
    """
    sizes = tuple(axis.size for axis in axes)
    found: list[dict[frozenset[int], tuple[int, ...]]] = [{} for _ in axes]
    for group in partition:
        per_axis = [place.tolist() for place in np.unravel_index(group, sizes)]
        distinct = [tuple(dict.fromkeys(places)) for places in per_axis]
        if list(itertools.product(*distinct)) != list(zip(*per_axis, strict=True)):
            return None
        for known, places in zip(found, distinct, strict=True):
            if known.setdefault(frozenset(places), places) != places:  # one set in two orders
                return None
    if any(sum(map(len, known)) != size for known, size in zip(found, sizes, strict=True)):
        return None  # an index is in two groups of this axis, or in none
    along = (
        along_groups(axis, tuple(known.values())) for axis, known in zip(axes, found, strict=True)
    )
    return tuple(step for step in along if step is not None)


def summed(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The sum over some axes, along which it does not vary."""
    for axis in joined(in_order(axes)):
        (x,) = whole(axis).run(AllReduce, [x])
    return x


@dataclass(frozen=True, eq=False)
class Scattered:
    """Groups over several axes that are not a product of cuts of each."""

    axes: tuple[Along, ...]
    """All of them, whole."""
    partition: Partition
    index: torch.Tensor
    """Row-major over the axes."""

    @property
    def size(self) -> int:
        """Members of one group."""
        return len(self.partition[0])

    @property
    def is_sent(self) -> bool:
        """Whether values leave the process."""
        return any(axis.is_sent for axis in self.axes)

    def run(self, primitive: Callable[[Scope], Primitive], xs: Tensors) -> Tensors:
        how = primitive(Scope(self.size, None))
        return [self._own(rows, how.along, how.replicates) for rows in gathered(self.axes, xs)]

    def extreme(self, op: ReduceOp, xs: Tensors) -> Tensors:
        def along(rows: torch.Tensor) -> torch.Tensor:
            (result,) = extreme(op, (), [rows], lead=1)
            return result

        rows = gathered(self.axes, [summable(x) for x in xs])
        results = [self._own(row, along, replicates=True) for row in rows]
        return [y.to(x.dtype) for x, y in zip(xs, results, strict=True)]

    def _own(
        self,
        rows: torch.Tensor,
        along: Callable[[torch.Tensor], torch.Tensor],
        replicates: bool,
    ) -> torch.Tensor:
        """What this device gets, from the rows of all."""
        results, place_of = results_of_groups(along, rows, self.partition, replicates)
        return pick(results, entry(self.index, place_of))


def gathered(axes: Sequence[Along | Scattered], xs: Tensors) -> Tensors:
    """The tensors of all members, stacked along one leading dim."""
    for axis in reversed(axes):
        xs = axis.run(AllGather, xs)
    return [merged_lead(axes, x) for x in xs]


def merged_lead(axes: Sequence[Along | Scattered], stack: torch.Tensor) -> torch.Tensor:
    """Merge the leading dims, one per axis, into one."""
    return stack.reshape((math.prod(axis.size for axis in axes), *stack.shape[len(axes) :]))


# What follows looks up by tensor, never by a Python int: the graph is the same on every device.


def entry(index: torch.Tensor, table: dict[int, int]) -> torch.Tensor:
    """``table[index]``."""
    values = torch.tensor([table[k] for k in range(len(table))], device=index.device)
    return pick(values, index)


def pick(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]`` for an index with no dim (one row) or one dim."""
    # for a scalar index torch would ask for its value
    found = _take(rows, index.reshape(-1))
    return found if index.dim() else found.squeeze(0)


def choose(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``torch.where``, also for the unsigned integers, which torch 2.11 refuses on the CPU."""
    carried = _SIGNED.get(x.dtype)
    if carried is None:
        return torch.where(condition, x, y)
    return torch.where(condition, x.view(carried), y.view(carried)).view(x.dtype)


_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# Under vmap, torch 2.13 cannot index these dtypes, but it can index integers of their width.
_INDEXED_AS = _SIGNED | {
    torch.complex32: torch.int32,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    carried = _INDEXED_AS.get(rows.dtype)
    if carried is None:
        return rows.index_select(0, index)
    return rows.view(carried).index_select(0, index).view(rows.dtype)
