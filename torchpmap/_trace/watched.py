"""The outside references of a function as they were noted, and whether they are the same now."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import call, is_
from typing import Any

import numpy as np
import torch


class Watched:
    """What a walk met, stored so that comparing it is quick: the check is part of every call."""

    def __init__(self) -> None:
        self.reads: list[Callable[[], Any]] = []
        self._read: list[Any] = []
        """The results of the reads."""
        self._views: list[Iterable[Any]] = []
        """Objects with items, such as lists and ``dict.values()``."""
        self._items: list[Any] = []
        """Of all the views."""
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._origins: tuple[list[str], list[str], list[str]] = ([], [], [])
        """Of the reads, views and sizes: what of the function's leads to them."""

    def __len__(self) -> int:
        return len(self.reads) + len(self._sized)

    def add_read(self, read: Callable[[], Any], value: Any, origin: str) -> None:
        self._origins[0].append(origin)
        self.reads.append(read)
        self._read.append(value)

    def add_size(self, sized: Any, origin: str) -> None:
        self._origins[2].append(origin)
        self._sized.append(sized)
        self._sizes.append(len(sized))

    def add_view(self, view: Any, origin: str) -> None:
        self.add_size(view, origin)
        if self._sizes[-1]:
            self._origins[1].append(origin)
            self._views.append(view)
            self._items.extend(view)

    def same(self) -> bool:
        """Whether nothing has changed."""
        if self._sized and list(map(len, self._sized)) != self._sizes:
            return False
        # these loops run in C; objects that are equal but not identical are rare
        is_read = all(map(is_, map(call, self.reads), self._read))
        if is_read and all(map(is_, chain.from_iterable(self._views), self._items)):
            return True
        read = list(map(call, self.reads))
        items = list(chain.from_iterable(self._views))
        if not all_same(read, self._read) or not all_same(items, self._items):
            return False
        self._read, self._items = read, items
        return True

    def changed_origin(self) -> str:
        """What of the function's leads to the first change, if there is one."""
        reads, views, sizes = self._origins
        for origin, sized, size in zip(sizes, self._sized, self._sizes, strict=True):
            if len(sized) != size:
                return origin
        for origin, read, value in zip(reads, self.reads, self._read, strict=True):
            if not all_same([read()], [value]):
                return origin
        items = iter(self._items)
        for origin, view in zip(views, self._views, strict=True):
            if not all(a is b or _same(a, b) for a, b in zip(view, items, strict=False)):
                return origin
        return "an object"


def _same(now: Any, expected: Any) -> bool:
    """Whether no code can tell two values apart that are different objects."""
    kind = type(now)
    if kind is not type(expected):
        return False
    if kind is float:
        if now != now or now == 0:
            return repr(now) == repr(expected)
        return bool(now == expected)
    if kind is complex:
        return _same(now.real, expected.real) and _same(now.imag, expected.imag)
    if kind in (tuple, torch.Size, slice):
        if kind is slice:
            now, expected = _parts(now), _parts(expected)
        return all_same(now, expected)
    if isinstance(now, np.generic):
        return now.dtype == expected.dtype and now.tobytes() == expected.tobytes()
    if kind is types.MethodType:  # a new object at each read
        return now.__self__ is expected.__self__ and now.__func__ is expected.__func__
    return kind in _COMPARED and bool(now == expected)


_COMPARED = {
    bool,
    int,
    str,
    bytes,
    range,
    torch.device,
    types.BuiltinMethodType,
    type(np.dtype(int)),
}


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def all_same(now: Sequence[Any], expected: Sequence[Any]) -> bool:
    if len(now) != len(expected):
        return False
    return all(a is b or _same(a, b) for a, b in zip(now, expected, strict=True))
