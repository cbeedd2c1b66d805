"""The named axes that are bound right now, and the record of the collectives that ran over them.

A mapped axis has up to two parts: a *process axis* (one OS process per index; collectives travel
through a process group) and a *vmapped axis* (the indices are a batch dimension of
``torch.func.vmap``; collectives are plain arithmetic). Sixteen rows on four devices are a process
axis of 4 times a vmapped axis of 4, in this order. User code sees only the name.

Axes that share the devices, such as those of a ``pmap`` of a ``pmap``, are the dims of a *mesh*, a
grid of all devices; all devices together are an axis as well. The process part of such an axis is a
dim of the mesh; its groups are lines of the grid.

The axis index is always a tensor, never a Python int. Over a process axis this keeps the traced
graph the same on every device. Over a vmapped axis the index is ``arange(size)``, batched by
exactly that ``vmap``, by which a collective recognises the functorch level it reduces over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from torchpmap._base.context import assigned
from torchpmap._base.torch_internals import fake_mode

Partition = tuple[tuple[int, ...], ...]
"""Disjoint groups of axis indices that cover an axis; their inner order is their rank order."""

CollectiveSignature = tuple[Hashable, ...]
"""What a collective is: operation, reduction or route, group, shape, dtype; equal on all ranks."""


@dataclass(frozen=True, eq=False, slots=True)
class Axis:
    """One part of a bound axis; compared by identity: names may be reused by an inner axis."""

    name: Hashable
    size: int
    index: torch.Tensor
    """int64 scalar per device."""
    group: str | None
    """Name of the process group; None for a vmapped axis."""
    subgroup: Callable[[Partition], str] | None = None
    """Names the process group that holds this device in a partition of a process axis."""
    line: MeshLine | None = None
    """For an axis of a mesh."""
    is_tracked: bool = False
    """Whether it is followed which values vary along it (``_collectives/varying``)."""
    is_lanes: bool = False
    """Of a vmapped axis, whether its rows stand for devices, each with a copy of every value."""
    parts: tuple[Axis, ...] = ()
    """For several axes of a mesh as one: these."""

    @property
    def tracked(self) -> frozenset[Axis]:
        """The axes in it along which it is followed which values vary."""
        if self.parts:
            return frozenset().union(*(part.tracked for part in self.parts))
        return frozenset({self}) if self.is_tracked else frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class MeshLine:
    """Where an axis of a mesh lies in the axis of all devices."""

    whole: Axis
    sizes: tuple[int, ...]
    """Of the mesh; its row-major order is that of ``whole``."""
    dims: tuple[int, ...]
    """Dims of the mesh that the axis runs over, the first the slowest."""

    @property
    def partition(self) -> Partition:
        """Indices of ``whole``, line by line."""
        return lines(self.sizes, self.dims)


def lines(sizes: Sequence[int], dims: Sequence[int]) -> Partition:
    """Places of a mesh, in groups that differ only along some dims, the first of which is the
    slowest: over sizes (2, 3), dims (0,) are 0 3 | 1 4 | 2 5.
    """
    grid = np.arange(math.prod(sizes)).reshape(tuple(sizes))
    last = range(len(sizes) - len(dims), len(sizes))
    size = math.prod(sizes[dim] for dim in dims)
    return tuple(map(tuple, np.moveaxis(grid, tuple(dims), last).reshape(-1, size).tolist()))


Parts = tuple[Axis, ...]
"""All parts of one bound axis, the slowest first; they share its name."""

# Per thread: a thread that user code starts inside a mapped function begins with no axes.

_bound: ContextVar[tuple[Parts, ...]] = ContextVar("torchpmap_axes", default=())

# Per thread: rows that run one after the other each have a thread of their own.
_count: ContextVar[int] = ContextVar("torchpmap_count", default=0)
_purpose: ContextVar[Callable[[], str] | None] = ContextVar("torchpmap_purpose", default=None)
_split: ContextVar[Split | None] = ContextVar("torchpmap_split", default=None)
_apart: ContextVar[Split | None] = ContextVar("torchpmap_apart", default=None)

_parted: ContextVar[Mapping[int, str]] = ContextVar(
    "torchpmap_parted", default=MappingProxyType({})
)

# Per process: autograd may run a backward pass, and so its collectives, on threads of its own.
_before: Callable[[CollectiveSignature], bool] | None = None


@contextmanager
def bind(*parts: Axis) -> Iterator[Parts]:
    """Make an axis visible to collectives in the block; the innermost binding of a name wins."""
    token = _bound.set((*_bound.get(), parts))
    try:
        yield parts
    finally:
        _bound.reset(token)


def bound_again(axes: tuple[Parts, ...]) -> AbstractContextManager[None]:
    """Bind in the block exactly the axes that ``bound`` returned earlier."""
    return assigned(_bound, axes)


bound = _bound.get  # no wrapper in Python, because every call asks
"""Every bound axis, outermost first."""


def lookup(name: Hashable) -> Parts:
    """The innermost axis of that name, or a ``NameError`` that says what is bound."""
    for parts in reversed(_bound.get()):
        if parts[0].name == name:
            return parts
    raise NameError(_unbound(name))


def _unbound(name: Hashable) -> str:
    sizes = ((parts[0].name, math.prod(part.size for part in parts)) for parts in _bound.get())
    here = ", ".join(f"{bound_name!r} (size {size})" for bound_name, size in sizes) or "nothing"
    return (
        f"unbound axis name: {name}. Bound here: {here}. Name the axis where the function is "
        f"mapped: pmap(f, axis_name={name!r}) or vmap(f, axis_name={name!r})."
    )


_RANKS = "ranks:"


def group_name(ranks: Sequence[int]) -> str:
    """The name of the group of some ranks, in their order."""
    return f"{_RANKS}{','.join(map(str, ranks))}"


def is_group_name(text: str) -> bool:
    return text.startswith(_RANKS)


def is_of_one(group: str) -> bool:
    """Whether each rank is alone in its group of this name."""
    return is_group_name(group) and "," not in group.rpartition("[")[2]


def subgroup_name(group: str, partition: Partition) -> str:
    """The name of the groups that ``partition`` cuts ``group`` into, the same on every rank."""
    return f"{group}[{'|'.join(','.join(map(str, part)) for part in partition)}]"


def mesh_axes(
    whole: Axis, sizes: Sequence[int], names: Sequence[Hashable]
) -> tuple[Axis | None, ...]:
    """The axes of a mesh over ``whole``, the axis of all devices: ``whole`` itself for a 1-D mesh,
    else one axis per dim, or None for a dim of size 1.
    """
    if len(sizes) == 1:
        return (whole,)
    return tuple(
        None if size == 1 else _axis_of(MeshLine(whole, tuple(sizes), (dim,)), name)
        for dim, (size, name) in enumerate(zip(sizes, names, strict=True))
    )


def joined(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes, with neighbours of one mesh as one axis, so that data is sent once for all."""
    found: list[Axis] = []
    kinds = itertools.groupby(axes, lambda a: (a.line and a.line.whole, bool(a.tracked)))
    for _, group in kinds:
        first, *others = group
        if first.line is None or not others:
            found += [first, *others]
        else:
            dims = [dim for axis in (first, *others) if axis.line for dim in axis.line.dims]
            line = MeshLine(first.line.whole, first.line.sizes, tuple(dims))
            found.append(replace(_axis_of(line, first.name), parts=(first, *others)))
    return tuple(found)


def peers(axis: Axis) -> Partition:
    """The indices of all devices, grouped by the lines of a process axis."""
    return (tuple(range(axis.size)),) if axis.line is None else axis.line.partition


def _axis_of(line: MeshLine, name: Hashable) -> Axis:
    whole, partition = line.whole, line.partition
    assert whole.group is not None
    if partition == (tuple(range(whole.size)),):
        return Axis(name, whole.size, whole.index, whole.group, whole.subgroup)
    ordered = whole.subgroup
    assert ordered is not None

    def subgroup(groups: Partition) -> str:
        return ordered(tuple(tuple(row[k] for k in group) for row in partition for group in groups))

    size = len(partition[0])
    index: torch.Tensor | int = 0
    for dim in line.dims:  # device 5 of a mesh of (2, 4): 5 // 4 = 1 along dim 0, 5 % 4 along dim 1
        place = whole.index // math.prod(line.sizes[dim + 1 :])
        index = index * line.sizes[dim] + (place % line.sizes[dim] if dim else place)
    assert isinstance(index, torch.Tensor)
    return Axis(name, size, index, ordered(partition), subgroup, line)


def parting(levels: Iterable[int], name: str) -> AbstractContextManager[None]:
    """Say that rows of the vmaps of these levels take different ways in the block, in a loop or
    branch called ``name``: there a collective over such rows has no meaning.
    """
    return _parted_by({**_parted.get(), **dict.fromkeys(levels, name)})


def parts_at(level: int) -> str | None:
    """The loop or branch in which rows of the vmap of this level take different ways here."""
    return _parted.get().get(level)


@contextmanager
def entering(level: int, name: str | None) -> Iterator[None]:
    """A vmap of this level begins: it is another one than that which had the level before.

    Args:
        level: its level; those above have ended.
        name: the loop or branch in which its rows take different ways; None if they do not.
    """
    enclosing = {each: by for each, by in _parted.get().items() if each < level}
    with _parted_by(enclosing if name is None else {**enclosing, level: name}):
        yield


def _parted_by(names: Mapping[int, str]) -> AbstractContextManager[None]:
    return assigned(_parted, names)


def check_together(level: int) -> None:
    """Raise if the rows of the vmap of this level do not all get here."""
    name = parts_at(level)
    if name is not None:
        names = [parts[0].name for parts in _bound.get() if parts[-1].group is None]
        raise ValueError(parted(name, " or ".join(map(repr, names))))


def parted(name: str, axis: str, *, prints: bool = False) -> str:
    """``prints``: whether only prints communicate."""
    what, cure = (
        (
            "an ordered print, for which all devices send their lines to the first",
            "print with ordered=False",
        )
        if prints
        else ("a collective over that axis", "take the collective out")
    )
    return (
        f"{name}: the predicate may differ along axis {axis}, but the loop or branch that it "
        f"decides on contains {what}: some devices would wait for others that "
        "never come. Make the predicate the same on all of them (reduce it with psum, pmax or pmin "
        f"over the axis), or {cure}."
    )


def record(signature: CollectiveSignature) -> None:
    """Note a collective that runs now, outside a trace; every rank must note the same sequence, but
    for those that run ``apart``.
    """
    if _apart.get() is None:
        _count.set(_count.get() + 1)
    if _before is not None:
        _before(signature)


ordinal = _count.get
"""How many collectives this thread has run."""


class Split(NamedTuple):
    """A part of a program, in a loop or branch, in which devices may take different ways."""

    axes: frozenset[Axis]
    """Those along which they do."""
    group: str
    """That of the devices that take the same way."""
    enclosing: Split | None
    """The part that this one is in."""


split = _split.get


def split_again(enclosing: Split | None) -> AbstractContextManager[None]:
    """In the block, ``split`` returns this, unless it is None."""
    return assigned(_split, enclosing or _split.get())


def split_by(axes: frozenset[Axis]) -> Split | None:
    """The part in which devices along some axes take different ways.  None if no others go
    together, if those of the part around do, or if not all of these ask, which they compare: one
    that has a collective alone would wait for ever.
    """
    enclosing = _split.get()
    known = axes if enclosing is None else axes | enclosing.axes
    if not axes or (enclosing and known == enclosing.axes) or fake_mode() is not None:
        return None
    bound = (axis for parts in _bound.get() for axis in parts if axis.group is not None)
    others = joined([axis for axis in bound if axis.is_tracked and axis not in known])
    group = others[0].group if len(others) == 1 else None
    if group is None:
        return None
    with assigned(_apart, enclosing):
        is_whole = _before is None or _before((PART, "", group))
    return Split(known, group, enclosing) if is_whole else None


PART = "a branch or step that some devices take"
"""What devices compare that come to a part: a part for itself for those that come alone."""


@contextmanager
def entered(part: Split | None) -> Iterator[None]:
    """The block is such a part.  The devices that go together compare their collectives, and that
    none runs more.
    """
    if part is None:
        yield
        return
    with assigned(_split, part):
        yield
        with assigned(_apart, part):
            record(("the end of a branch or step", "", part.group))


def over(axes: frozenset[Axis]) -> AbstractContextManager[None]:
    """A collective over some axes runs in the block; apart from devices that may be elsewhere, if
    it joins none of them.
    """
    part = _split.get()
    while part is not None and not (axes and part.axes.isdisjoint(axes)):
        part = part.enclosing
    return assigned(_apart, part)


apart = _apart.get
"""The part of the program, if the collective that runs is apart."""


def serving(purpose: Callable[[], str]) -> AbstractContextManager[None]:
    """Say what the collectives in the block are for, in words that are equal on all ranks; they are
    computed only where ranks compare what they do.
    """
    return assigned(_purpose, purpose)


def purpose() -> str:
    """What the collectives of this thread are for now, or an empty text."""
    told = _purpose.get()
    return "" if told is None else told()


@contextmanager
def recording(before: Callable[[CollectiveSignature], bool]) -> Iterator[None]:
    """``before`` gets the signature of each collective in the block before it runs, and returns
    whether all devices come to it: of a ``PART``, some may not.
    """
    global _before
    outer, _before = _before, before
    token = _count.set(0)  # earlier collectives may have failed on some ranks only
    try:
        yield
    finally:
        _before = outer
        _count.reset(token)
