"""``x[i]``, ``x[i] = v``, ``x[i:i + 8]``, ``x.narrow(0, i, 8)`` and ``x.select(0, i)`` with a
traced ``i``, such as the step of a loop or the index of a device.

The results are views in torch, and ``_trace/traced_views`` makes them behave as views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchpmap._base.torch_internals import fake_mode, is_vmap_wrapper, layers
from torchpmap._trace.affine import difference
from torchpmap._trace.traced_views import traced_views
from torchpmap._trace.windows import Entries, Window, at, consumed, in_part, put, span, take

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def traced_indexing(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Does what ``func`` does, if that is to select at a traced position; else None."""
    if func not in _SELECTING:
        return None
    given = dict(zip(_SELECTING[func], args, strict=False)) | kwargs
    x = given.get("self", given.get("input"))
    if not isinstance(x, torch.Tensor):
        return None
    if func is _GET or func is _SET:
        key = _entries(given["key"])
        if not any(_is_number(each) or _is_traced(each) for each in key):
            return None
        return lambda: (_get if func is _GET else _set)(*args)
    dim, start = given.get("dim"), given.get("index", given.get("start"))
    if not isinstance(dim, int) or not _is_number(start) or not x.dim():
        return None
    return lambda: _along(x, dim, start, given.get("length"))


_SELECTING: dict[Any, tuple[str, ...]] = {
    _GET: ("self", "key"),
    _SET: ("self", "key", "value"),
    torch.narrow: ("input", "dim", "start", "length"),
    torch.select: ("input", "dim", "index"),
    torch.Tensor.narrow: ("self", "dim", "start", "length"),
    torch.Tensor.select: ("self", "dim", "index"),
}
"""Functions that select a view, and the names of their arguments."""


def _along(x: torch.Tensor, dim: int, start: torch.Tensor, length: Any) -> torch.Tensor:
    size = x.size(dim)  # which raises if there is none
    dim %= x.dim()
    if length is None:
        window = at(start, size)
    elif 0 <= length <= size:
        window = span(start, length, size)
    else:
        raise RuntimeError(f"narrow(): length is {length}, but dim {dim} has {size} elements")
    key: list[Any] = [slice(None)] * x.dim()
    key[dim] = window
    return _view(x, tuple(key))


def _entries(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _is_number(entry: Any) -> bool:
    """Whether torch takes it for a number, and has no value of it.  (A mask and uint8, which is one
    too, have values that decide on the shape.)
    """
    return (
        isinstance(entry, torch.Tensor)
        and (fake_mode() is not None or any(map(is_vmap_wrapper, layers(entry))))
        and not entry.dim()
        and entry.dtype not in (torch.bool, torch.uint8)
        and not entry.is_floating_point()
        and not entry.is_complex()
    )


def _is_traced(entry: Any) -> bool:
    """Whether it is a slice between traced numbers."""
    return isinstance(entry, slice) and _is_number(entry.start) and _is_number(entry.stop)


def _extent(entry: Any, size: int) -> int | None:
    """The stop less the start of a slice between traced numbers, of a dim of this size; None if not
    known.
    """
    is_simple = entry.step is None or (isinstance(entry.step, int) and entry.step > 0)
    return difference(entry.stop, entry.start, size) if is_simple else None


def _is_basic(entry: Any) -> bool:
    """Whether it selects a view."""
    if isinstance(entry, torch.Tensor | bool):
        return False
    return entry is None or hasattr(entry, "__index__") or isinstance(entry, slice | Window)


def _with_windows(x: torch.Tensor, key: Any) -> Entries:
    """The entries, one for each dim, with windows for what is traced and slices for ``...``."""
    entries = list(_entries(key))
    missing = x.dim() - sum(consumed(entry) for entry in entries if entry is not Ellipsis)
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    place = next((k for k, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[place : place + 1] = [slice(None)] * missing
    dim = 0
    for k, entry in enumerate(entries):
        extent = _extent(entry, x.shape[dim]) if _is_traced(entry) else None
        if _is_number(entry):
            entries[k] = at(entry, x.shape[dim])
        elif extent is not None:
            step = entry.step or 1
            length = max(0, -(-extent // step))
            entries[k] = span(entry.start, length, x.shape[dim], step=step, extent=extent)
        dim += consumed(entry)
    return tuple(entries)


def _view(x: torch.Tensor, entries: Entries, key: Any = None) -> torch.Tensor:
    views = traced_views()
    return take(x, entries) if views is None else views.view(x, entries, key)


def _get(x: torch.Tensor, key: Any) -> torch.Tensor:
    entries = _with_windows(x, key)
    return _view(x, entries, key) if all(map(_is_basic, entries)) else take(x, entries)


def _set(x: torch.Tensor, key: Any, value: Any) -> None:
    if not isinstance(value, torch.Tensor | bool | int | float | complex):
        raise TypeError(f"can't assign a {type(value).__name__} to a {x.dtype} tensor")
    views = traced_views()
    if views is not None and views.has(x, key, value):
        return  # x[i] += 1 has written through x[i]
    entries = _with_windows(x, key)
    if all(map(_is_basic, entries)):
        put(x, entries, torch.as_tensor(value, dtype=x.dtype, device=x.device))
        return
    part, others = in_part(x, entries)
    part[others] = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    whole: list[Any] = [slice(None)] * x.dim()
    dim = 0
    for entry in entries:
        if isinstance(entry, Window):
            whole[dim] = Window(entry.positions)
        dim += consumed(entry)
    put(x, tuple(whole), part)
