"""The named axes that are bound right now, and the record of the collectives that ran over them.

A mapped axis has up to two parts: a *process axis* (one OS process per index; collectives travel
through a process group) and a *vmapped axis* (the indices are a batch dimension of
``torch.func.vmap``; collectives are plain arithmetic). Sixteen rows on four devices are a process
axis of 4 times a vmapped axis of 4, in this order. User code sees only the name.

The axis index is always a tensor, never a Python int. Over a process axis this keeps the traced
graph the same on every device; over a vmapped axis the index is ``arange(size)``, batched by
exactly that ``vmap``, and being batched is how a collective recognises the functorch level it
reduces over, with no bookkeeping of levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

__all__ = [
    "Axis",
    "Partition",
    "Parts",
    "Signature",
    "bind",
    "bound",
    "lookup",
    "record",
    "recording",
    "subgroup_name",
]

Partition = tuple[tuple[int, ...], ...]
"""Disjoint groups of axis indices that cover an axis; their inner order is their rank order."""

Signature = tuple[Hashable, ...]
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


Parts = tuple[Axis, ...]
"""All parts of one bound axis, the slowest first; they share its name."""

# Per thread: a thread that user code starts inside a mapped function begins with no axes.
_bound: ContextVar[tuple[Parts, ...]] = ContextVar("torchpmap_axes", default=())

# Per process: autograd may run a backward pass, and so its collectives, on threads of its own.
_recorder: list[Signature] | None = None
_before: Callable[[Signature], None] | None = None


@contextmanager
def bind(*parts: Axis) -> Iterator[Parts]:
    """Make an axis visible to collectives in the block; the innermost binding of a name wins."""
    token = _bound.set((*_bound.get(), parts))
    try:
        yield parts
    finally:
        _bound.reset(token)


def bound() -> tuple[Parts, ...]:
    """Every bound axis, outermost first."""
    return _bound.get()


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


def subgroup_name(group: str, partition: Partition) -> str:
    """The name of the groups that ``partition`` cuts ``group`` into, the same on every rank."""
    return f"{group}[{'|'.join(','.join(map(str, part)) for part in partition)}]"


def record(signature: Signature) -> None:
    """Note a collective that runs now, outside a trace; every rank must note the same sequence."""
    if _before is not None:
        _before(signature)
    if _recorder is not None:
        _recorder.append(signature)


@contextmanager
def recording(
    before: Callable[[Signature], None] | None = None,
) -> Iterator[list[Signature]]:
    """Collect the signatures of the collectives that run in the block; ``before`` is told each
    before it runs.
    """
    global _recorder, _before
    outer = _recorder, _before
    _recorder, _before = [], before
    try:
        yield _recorder
    finally:
        _recorder, _before = outer
