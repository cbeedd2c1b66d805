"""Reading and writing a part of a tensor at a place that a tensor gives.

torch (2.13) asks for the value of an integer tensor without dims that stands in ``[]``.  A trace
has none, so here the same elements are selected by operations that take the place as a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.storages import storage_number
from torchpmap._base.torch_internals import is_vmap, transforms


@dataclass(frozen=True, eq=False)
class Window:
    """Some positions along a dim."""

    positions: torch.Tensor
    """[length]; one that is not in the range of the dim raises when the graph runs."""
    is_number: bool = False
    """Whether the result lacks the dim."""


Windows = Sequence[tuple[int, Window]]
"""With the dim of each."""

Entries = tuple[Any, ...]
"""For each dim of a tensor an int, a slice or a ``Window``, and None for a new dim."""

_SIGN = 2**63 - 1
"""``k & _SIGN`` is ``k``, and out of every range for a negative ``k``, which Inductor (2.13) would
count from the end once more.
"""


def at(number: torch.Tensor, size: int) -> Window:
    """One element of a dim."""
    place = number.to(torch.int64)
    place = torch.where(place < 0, place + size, place) & _SIGN
    return Window(place.reshape(1), is_number=True)


def span(
    start: torch.Tensor, length: int, size: int, *, step: int = 1, extent: int | None = None
) -> Window:
    """``length`` elements of a dim.  ``extent``: of a slice, its stop less its start.  Where a
    slice would be shorter than ``length``, the positions are out of range.
    """
    place = start.to(torch.int64)
    wrapped: Any = place + size
    if extent is not None:  # x[-1:1] is empty, and not the last element and the first
        wrapped = torch.where(place + extent < 0, wrapped, size)
    place = torch.where(place < 0, wrapped, place) & _SIGN
    steps = torch.arange(length, device=place.device) * step
    return Window(place.reshape(1) + steps)


def consumed(entry: Any) -> int:
    """How many dims an entry of ``[]`` indexes."""
    if entry is None or isinstance(entry, bool):
        return 0
    if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 1


def in_part(x: torch.Tensor, entries: Entries) -> tuple[torch.Tensor, Entries]:
    """What the windows select, and the other entries as they index that."""
    others = list(entries)
    dim = 0
    for k, entry in enumerate(entries):
        if isinstance(entry, Window):
            x = x.index_select(dim, entry.positions)
            others[k] = 0 if entry.is_number else slice(None)
        dim += consumed(entry)
    return x, tuple(others)


def take(x: torch.Tensor, entries: Entries) -> torch.Tensor:
    """The part of ``x``: a copy."""
    part, others = in_part(x, entries)
    return part[others]


def put(x: torch.Tensor, entries: Entries, value: torch.Tensor) -> None:
    """Write to the part of ``x``; ``value`` is broadcast to it."""
    # a view whose dims are those of the part, and one for each number
    view = x[tuple(slice(None) if isinstance(entry, Window) else entry for entry in entries)]
    kept = [entry for entry in entries if not isinstance(entry, int)]
    sizes = [
        len(entry.positions) if isinstance(entry, Window) else size
        for entry, size in zip(kept, view.shape, strict=True)
    ]
    numbers = [k for k, entry in enumerate(kept) if isinstance(entry, Window) and entry.is_number]
    part = [size for k, size in enumerate(sizes) if k not in numbers]
    while value.dim() > len(part) and value.shape[0] == 1:  # torch drops these
        value = value[0]
    value = value.to(view.dtype).expand(part)
    for k in numbers:
        value = value.unsqueeze(k)
    if storage_number(value) == storage_number(x):
        value = value.clone()
    windows = [(k, entry) for k, entry in enumerate(kept) if isinstance(entry, Window)]
    if _in_vmaps():
        view.copy_(with_part(view, windows, value))
        return
    places, (view, value) = _in_front(windows, view, value)
    view.index_put_(places, value)


def with_part(x: torch.Tensor, windows: Windows, value: torch.Tensor) -> torch.Tensor:
    """``x`` with ``value``, which has as many dims, at the windows."""
    if not _in_vmaps():
        places, (front, part) = _in_front(windows, x, value)
        dims, back = list(range(len(windows))), [dim for dim, _ in windows]
        return front.index_put(places, part).movedim(dims, back)
    (dim, window), *others = windows
    if others:
        value = with_part(x.index_select(dim, window.positions), others, value)
    shape = [-1 if k == dim else 1 for k in range(x.dim())]
    return x.scatter(dim, window.positions.reshape(shape).expand(value.shape), value)


def _in_vmaps() -> bool:
    """Whether ``index_put`` is wrong: torch (2.13) confuses the dims of nested vmaps."""
    return sum(map(is_vmap, transforms())) > 1


def _in_front(
    windows: Windows, *tensors: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """The positions as ``index_put`` takes them, and the tensors with the dims of windows first."""
    dims, front = [dim for dim, _ in windows], list(range(len(windows)))
    places = [
        window.positions.reshape([-1 if j == k else 1 for j in front])
        for k, (_, window) in enumerate(windows)
    ]
    return tuple(places), [x.movedim(dims, front) for x in tensors]
