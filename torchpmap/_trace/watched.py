"""The outside references of a function as they were noted, and whether they are the same now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from operator import attrgetter, call, is_, itemgetter
from typing import Any, NamedTuple

from torchpmap._base.exact import Pictures

_mro = attrgetter("__mro__")


_MISSING = object()


class Place(NamedTuple):
    """Where a reference is, as code names it that changes it."""

    origin: str
    """What of the function's leads to it, as logs say it."""
    kind: str = "items"
    """``name``, of a global or a closure; ``attribute``; ``items``, of a container."""
    name: str | None = None
    """Of the global or attribute; None for any."""


class Watched:
    """What a walk met, stored so that comparing it is quick: the check is part of every call."""

    def __init__(self) -> None:
        self.reads: list[Callable[[], Any]] = []
        self._read: list[Any] = []
        """The results of the reads."""
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        """By id of a table: the table, and values by name; sealed to what follows."""
        self._getters: list[Callable[[], tuple[Any, ...]]] = []
        self._got: list[Any] = []
        """The items of all the getters."""
        self._lacking: list[Callable[[], bool]] = []
        """Each answers whether a table still lacks all names that it lacked."""
        self._name_places: dict[tuple[int, str], Place] = {}
        self._views: list[Iterable[Any]] = []
        """Objects with items, such as lists and ``dict.values()``."""
        self._items: list[Any] = []
        """Of all the views."""
        self._lengths: list[int] = []
        """Of the views."""
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._owners: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        """The attributes of the owners: ``x.__dict__`` can be assigned."""
        self._attributes: list[dict[str, Any] | None] = []
        """Copies of them; None if not all of them are watched here."""
        self._objects: list[Any] = []
        self._types: list[type] = []
        """Of the objects: ``x.__class__`` can be assigned."""
        self._classes: list[type] = []
        self._mros: list[tuple[type, ...]] = []
        """Of the classes: ``C.__bases__`` can be assigned."""
        self._origins: list[str] = []
        """Of the owners."""
        self._places: tuple[list[Place | None], ...] = ([], [], [], [], [])
        """Of the reads, views, sizes, objects and classes; None for the attributes of owners."""

    def __len__(self) -> int:
        entries = self.reads, self._names, self._sized, self._objects, self._classes
        return sum(map(len, entries))

    def add_read(self, read: Callable[[], Any], value: Any, place: Place) -> None:
        self._places[0].append(place)
        self.reads.append(read)
        self._read.append(value)

    def add_name(self, table: Mapping[str, Any], name: str, place: Place) -> Any:
        """Watch an entry of a table; returns its value."""
        value = table.get(name, _MISSING)
        self._names.setdefault(id(table), (table, {}))[1][name] = value
        self._name_places[id(table), name] = place
        return None if value is _MISSING else value

    def seal(self) -> None:
        """Make ready to compare; nothing is added afterwards."""
        for table, values in self._names.values():
            absent = frozenset(name for name, value in values.items() if value is _MISSING)
            if absent:
                self._lacking.append(partial(table.keys().isdisjoint, absent))
            names = [name for name in values if name not in absent]
            if names:
                names += names[: len(names) == 1]  # of one name, it gives no tuple
                self._getters.append(partial(itemgetter(*names), table))
                self._got += [values[name] for name in names]

    def add_size(self, sized: Any, place: Place | None) -> None:
        self._places[2].append(place)
        self._sized.append(sized)
        self._sizes.append(len(sized))

    def add_view(self, view: Any, place: Place | None) -> None:
        self.add_size(view, place)
        if self._sizes[-1]:
            self._places[1].append(place)
            self._views.append(view)
            before = len(self._items)
            self._items.extend(view)
            self._lengths.append(len(self._items) - before)

    def add_attributes(self, owner: Any, table: dict[str, Any], origin: str) -> None:
        """``table``: the ``__dict__`` of the owner, of which all is watched."""
        self.add_view(table.keys(), None)
        self.add_view(table.values(), None)
        self.add_dict(owner, table, dict(table), origin)

    def add_dict(
        self, owner: Any, table: dict[str, Any], copy: dict[str, Any] | None, origin: str
    ) -> None:
        """Watch that the ``__dict__`` of the owner stays this one."""
        self._owners.append(owner)
        self._dicts.append(table)
        self._attributes.append(copy)
        self._origins.append(origin)

    def add_object(self, value: Any, place: Place) -> None:
        self._places[3].append(place)
        self._objects.append(value)
        self._types.append(type(value))

    def add_class(self, cls: type, place: Place) -> None:
        self._places[4].append(place)
        self._classes.append(cls)
        self._mros.append(cls.__mro__)

    def same(self) -> bool:
        """Whether nothing has changed."""
        if self._sized and list(map(len, self._sized)) != self._sizes:
            return False
        # these loops run in C; objects that are equal but not identical are rare
        if not all(map(is_, map(type, self._objects), self._types)):
            return False
        if not all(map(is_, map(_mro, self._classes), self._mros)):
            return False
        dicts = map(object.__getattribute__, self._owners, repeat("__dict__"))
        if not all(map(is_, dicts, self._dicts)):
            return False
        if not all(map(call, self._lacking)):
            return False
        try:
            is_got = all(map(is_, chain.from_iterable(map(call, self._getters)), self._got))
        except KeyError:  # deleted
            return False
        is_read = is_got and all(map(is_, map(call, self.reads), self._read))
        if is_read and all(map(is_, chain.from_iterable(self._views), self._items)):
            return True
        got = list(chain.from_iterable(map(call, self._getters)))
        read = list(map(call, self.reads))
        items = list(chain.from_iterable(self._views))
        pairs = (got, self._got), (read, self._read), (items, self._items)
        if not all(all_same(now, expected) for now, expected in pairs):
            return False
        self._got, self._read, self._items = got, read, items
        return True

    def changes(self) -> Iterator[Place]:
        """Where something has changed."""
        yield from filter(None, self._changed_places())
        for owner, dict_, attributes, origin in zip(
            self._owners, self._dicts, self._attributes, self._origins, strict=True
        ):
            now = object.__getattribute__(owner, "__dict__")
            if now is not dict_:
                yield Place(origin, "attribute")
            if attributes is not None:
                for name in attributes.keys() | now.keys():
                    values = now.get(name, _MISSING), attributes.get(name, _MISSING)
                    if not all_same(values[:1], values[1:]):
                        yield Place(origin, "attribute", name)

    def _changed_places(self) -> Iterator[Place | None]:
        reads, views, sizes, objects, classes = self._places
        for key, (table, values) in self._names.items():
            for name, value in values.items():
                if not all_same([table.get(name, _MISSING)], [value]):
                    yield self._name_places[key, name]
        for place, sized, size in zip(sizes, self._sized, self._sizes, strict=True):
            if len(sized) != size:
                yield place
        for place, value, kind in zip(objects, self._objects, self._types, strict=True):
            if type(value) is not kind:
                yield place
        for place, cls, mro in zip(classes, self._classes, self._mros, strict=True):
            if cls.__mro__ is not mro:
                yield place
        for place, read, value in zip(reads, self.reads, self._read, strict=True):
            if not all_same([read()], [value]):
                yield place
        items = iter(self._items)
        for place, view, length in zip(views, self._views, self._lengths, strict=True):
            if not all_same(list(view), list(islice(items, length))):
                yield place


def _same(now: Any, expected: Any) -> bool:
    """Whether no code can tell two values apart that are different objects, and never will."""
    if type(now) is not type(expected):
        return False
    pictures = Pictures(is_data=False)
    return pictures.of(now) == pictures.of(expected)


def all_same(now: Sequence[Any], expected: Sequence[Any]) -> bool:
    if len(now) != len(expected):
        return False
    return all(a is b or _same(a, b) for a, b in zip(now, expected, strict=True))
