"""``x[i]`` and ``x[i] = v`` where ``i`` is a traced number, such as the step of a loop.

torch (2.13) asks for the value of an integer tensor without dims that stands in ``[]``.  A trace
has none, so here the same elements are selected by operations that take the index as a tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from torchpmap._base.torch_internals import fake_mode

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def is_indexing(func: Any, args: Any) -> bool:
    """Whether this is a call that ``indexed`` is for."""
    return (
        func in (_GET, _SET)
        and any(map(_is_number, _entries(args[1])))
        and isinstance(args[0], torch.Tensor)
        and fake_mode() is not None
    )


def indexed(func: Any, args: Any) -> Any:
    return _get(*args) if func is _GET else _set(*args)


def _entries(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _is_number(entry: Any) -> bool:
    return (
        isinstance(entry, torch.Tensor)
        and not entry.dim()
        and entry.dtype != torch.bool
        and not entry.is_floating_point()
        and not entry.is_complex()
    )


def _consumed(entry: Any) -> int:
    """How many dims an entry indexes."""
    if entry is None or isinstance(entry, bool):
        return 0
    if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool:
        return entry.dim()
    return 1


def _with_slices(x: torch.Tensor, key: Any) -> list[Any]:
    """The entries, with slices for ``...``."""
    entries = list(_entries(key))
    missing = x.dim() - sum(_consumed(entry) for entry in entries if entry is not Ellipsis)
    for k, entry in enumerate(entries):
        if entry is Ellipsis:
            entries[k : k + 1] = [slice(None)] * missing
            break
    return entries


def _position(number: torch.Tensor, size: int) -> torch.Tensor:
    place = number.to(torch.int64)
    return torch.where(place < 0, place + size, place).reshape(1)


def _get(x: torch.Tensor, key: Any) -> torch.Tensor:
    entries, dim = _with_slices(x, key), 0
    for k, entry in enumerate(entries):
        if _is_number(entry):
            x = x.index_select(dim, _position(entry, x.shape[dim]))
            entries[k] = 0
        dim += _consumed(entry)
    return x[tuple(entries)]


def _set(x: torch.Tensor, key: Any, value: Any) -> None:
    entries = _with_slices(x, key)
    places = [k for k, entry in enumerate(entries) if _is_number(entry)]
    others = [entry for k, entry in enumerate(entries) if k not in places]
    if any(isinstance(entry, torch.Tensor | list) for entry in others):
        raise NotImplementedError(
            "x[...] = value with a tensor without dims and one with dims as indices cannot be "
            "traced. Use torch.where, or indices with dims only (i.reshape(1))."
        )
    numbers = [entries[k] for k in places]
    for k in places:
        entries[k] = slice(None)
    kept = [entry is None or isinstance(entry, slice) for entry in entries]
    dims = [sum(kept[:k]) for k in places]
    rows = x[tuple(entries)].movedim(dims, list(range(len(dims))))  # a view
    at = tuple(_position(each, rows.shape[k]) for k, each in enumerate(numbers))
    row = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    rows.index_put_(at, row.expand(rows.shape[len(dims) :]).unsqueeze(0))
