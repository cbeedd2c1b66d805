"""Keys that are equal only for values that no code can tell apart.

A graph is traced once for each key, so ``==`` is too coarse a key: ``1 == 1.0 == True``,
``0.0 == -0.0``, ``(2,) == (2.0,)``, and a class may define it as it likes.  A value is also
compared with what it was, not with what has become of it, so a key holds no part that can change:

    exact((1, [-0.0]))  ->  (tuple, ((int, 1), (list, (<8 bytes of -0.0>,))))

Data is pictured by its type and its parts, down to numbers and texts.  Objects that are equal only
to themselves, such as functions and modules, are pictured by their identity.
"""

from __future__ import annotations

import enum
import functools
import struct
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from torchpmap._base.sources import is_foreign

_MAX_KINDS = 1024
_pack_float = struct.Struct("d").pack


class Same:
    """Pictures an object by its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


class Pictures:
    """Makes pictures of values, and finds what in them is pictured by its identity."""

    __slots__ = ("_open", "has_parts", "identities", "is_data")

    def __init__(self, *, is_data: bool = True) -> None:
        """``is_data``: whether lists, dicts and objects with ``==`` are pictured by their parts;
        else, by their identity.
        """
        self.identities: list[Any] = []
        """Functions, modules and other objects that may change unseen."""
        self.has_parts = False
        """Whether there were lists, dicts or objects, whose parts may change."""
        self.is_data = is_data
        self._open: set[int] = set()
        """The objects around the one that is being pictured, which may lead back to them."""

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is str or kind is types.NoneType:
            return value
        if kind in _ATOMS:
            return kind, value
        if kind is float:
            return _pack_float(value)
        if kind is tuple:
            return kind, tuple(map(self.of, value))
        found = _kinds.get(kind)
        if found is None:
            if len(_kinds) >= _MAX_KINDS:
                _kinds.clear()
            found = _kinds[kind] = _picture_of(value)
        picture, is_mutable = found
        if not is_mutable:
            return picture(self, value)
        if not self.is_data:
            return Same(value)
        if id(value) in self._open:
            return Same(kind)
        self.has_parts = True
        self._open.add(id(value))
        try:
            return picture(self, value)
        finally:
            self._open.discard(id(value))

    def items(self, values: Any) -> Hashable:
        return tuple(map(self.of, values))


def exact(value: Any) -> Hashable:
    """A key of a value, as it is now."""
    return Pictures().of(value)


_ATOMS: set[Any] = {bool, int, bytes, type(...), type(NotImplemented)}
_ATOMS |= {torch.dtype, torch.device, torch.layout, torch.memory_format}

_Picture = Callable[[Pictures, Any], Hashable]


def _identity(pictures: Pictures, value: Any) -> Hashable:
    pictures.identities.append(value)
    return Same(value)


def _method(pictures: Pictures, value: Any) -> Hashable:  # a new object at each access
    pictures.identities.append(value.__self__)
    of_class = getattr(value, "__func__", value.__qualname__)
    return type(value), Same(value.__self__), Same(of_class) if callable(of_class) else of_class


def _array(pictures: Pictures, value: Any) -> Hashable:
    held = pictures.items(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes()
    return type(value), value.dtype, value.shape, value.strides, held


def _sequence(pictures: Pictures, value: Any) -> Hashable:
    return type(value), pictures.items(value)  # of a set, too: code sees the order


def _mapping(pictures: Pictures, value: Any) -> Hashable:
    return type(value), pictures.items(value), pictures.items(value.values())


def _of_parts(parts: Callable[[Any], tuple[Any, ...]]) -> _Picture:
    return lambda pictures, value: (type(value), pictures.items(parts(value)))


class _Parts:
    """Pictures the instances of a class by attributes and contents, read without its methods."""

    def __init__(self, kind: type, read: Callable[[Any], Any] | None) -> None:
        self._kind = Same(kind)
        self._read = read
        members = [item for cls in kind.__mro__ for item in vars(cls).items()]
        self._slots = [m for _, m in members if isinstance(m, types.MemberDescriptorType)]
        self._derived = {n for n, m in members if isinstance(m, functools.cached_property)}

    def __call__(self, pictures: Pictures, value: Any) -> Hashable:
        parts: list[Hashable] = [self._kind]
        try:
            table = object.__getattribute__(value, "__dict__")
        except AttributeError:
            table = {}
        for name, held in table.items():
            if name not in self._derived:
                parts += name, pictures.of(held)
        for member in self._slots:
            try:
                parts.append(pictures.of(member.__get__(value)))
            except AttributeError:  # not assigned yet
                parts.append(_MISSING)
        if self._read is not None:
            contents = self._read(value)
            is_one = type(contents) in _CONTENTS
            parts.append(pictures.of(contents if is_one else tuple(contents)))
        return tuple(parts)


_MISSING = Same(object())
_kinds: dict[Any, tuple[_Picture, bool]] = {}
"""How the values of a type are pictured, and whether by parts that may change."""
_BUILTIN: dict[Any, tuple[_Picture, bool]] = {
    complex: (_of_parts(lambda value: (value.real, value.imag)), False),
    torch.Size: (_sequence, False),
    range: (_of_parts(lambda value: (value.start, value.stop, value.step)), False),
    slice: (_of_parts(lambda value: (value.start, value.stop, value.step)), False),
    types.MethodType: (_method, False),
    types.BuiltinFunctionType: (_method, False),
    functools.partial: (_of_parts(lambda x: (x.func, x.args, x.keywords, vars(x))), True),
    np.ndarray: (_array, True),
    **dict.fromkeys((list, set, frozenset), (_sequence, True)),
    **dict.fromkeys((dict, OrderedDict, types.MappingProxyType), (_mapping, True)),
}
_CONTENTS: dict[Any, Callable[[Any], Any]] = {
    **{kind: kind.__iter__ for kind in (tuple, list, deque, set, frozenset)},
    dict: dict.items,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    int: int.__index__,
    float: float.__float__,
    complex: lambda value: complex(complex.real.__get__(value), complex.imag.__get__(value)),
}


def _picture_of(value: Any) -> tuple[_Picture, bool]:
    """How values of its type are pictured, and whether by parts that may change."""
    kind: Any = type(value)
    if kind in _BUILTIN:
        return _BUILTIN[kind]
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return _of_parts(lambda value: (value.dtype, value.tobytes())), False
    if isinstance(value, np.dtype):
        return (lambda _, value: (type(value), value)), False
    if isinstance(value, enum.Enum):
        return (lambda _, value: Same(value)), False
    is_own = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    if is_own or isinstance(value, type | types.FunctionType | torch.Tensor):
        return _identity, False
    read = next((read for known, read in _CONTENTS.items() if isinstance(value, known)), None)
    if read is None:
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # it has a state that Python cannot read
            return _identity, False
        if is_foreign(kind.__module__) or not isinstance(reduced, tuple):
            return _of_parts(lambda value: (value.__reduce_ex__(4),)), True
    return _Parts(kind, read), True
