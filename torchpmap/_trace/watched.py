"""The outside references of a function as they were noted, and whether they are the same now."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, is_, itemgetter
from types import CellType
from typing import Any, NamedTuple

from torchpmap._base.exact import Pictures


class MISSING:
    """Stands for the value where there is none.  A class is the same object in a copy."""


_registry_of = getattr(abc, "_get_dump")  # noqa: B009 (not in the stubs)
OF_A_FUNCTION: tuple[Callable[[Any], Any], ...] = tuple(
    map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))
)
"""What ask a function for what it runs."""
cell_contents: Callable[[CellType], Any] = attrgetter("cell_contents")
mro_of: Callable[[type], tuple[type, ...]] = attrgetter("__mro__")
referent: Callable[[Any], Any] = attrgetter("__reduce_ex__.__self__")
"""Of a weak proxy."""


class Place(NamedTuple):
    """Where a reference is, as code names it that changes it."""

    origin: str
    """What of the function's leads to it, as logs say it."""
    kind: str = "items"
    """``name``, of a global or a closure; ``attribute``; ``items``, of a container."""
    name: str | None = None
    """Of the global or attribute; None for any."""


class Watched:
    """What a walk met, stored so that comparing it is quick: the check is part of every call.

    *Sources* are called for the present values, all of them in one loop that runs in C.
    """

    def __init__(self) -> None:
        self._sources: list[Callable[[], Iterable[Any]]] = []
        self._expected: list[Any] = []
        """The values of all sources, as they were noted."""
        self._sized: list[Sized] = []
        self._sizes: list[int] = []
        self._singles: dict[Callable[[Any], Any], tuple[list[Any], list[Any], list[Place]]] = {}
        """By what is asked: of whom, the answers, and their places."""
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, Any], dict[str, Place]]] = {}
        """By id of a table: the table, values by name, and their places."""
        self._views: list[tuple[Any, list[Any] | None, int, Place | None]] = []
        """Objects with items, such as lists and ``dict.values()``: the items, unless only their
        number is watched, that number, and the place; None: see ``_owners``."""
        self._owners: list[tuple[Any, dict[str, Any], Collection[str] | None, str]] = []
        """Instances, their ``__dict__``, its names if these are watched, and the origin."""

    def __len__(self) -> int:
        num_objects = sum(len(objects) for objects, _, _ in self._singles.values())
        return num_objects + len(self._names) + len(self._views) + len(self._owners)

    def add(self, ask: Callable[[Any], Any], of: Any, place: Place) -> Any:
        """Watch an answer, which is returned; ``ask`` runs at each call."""
        answer = ask(of)
        for entries, entry in zip(
            self._singles.setdefault(ask, ([], [], [])), (of, answer, place), strict=True
        ):
            entries.append(entry)
        return answer

    def add_read(self, read: Callable[[], Any], place: Place) -> Any:
        """Watch what ``read`` returns, and return it."""
        return self.add(call, read, place)

    def add_name(self, table: Mapping[str, Any], name: str, place: Place) -> Any:
        """Watch an entry of a table, and return it; None if there is none."""
        value = table.get(name, MISSING)
        _, values, places = self._names.setdefault(id(table), (table, {}, {}))
        values[name], places[name] = value, place
        return None if value is MISSING else value

    def add_size(self, sized: Sized, place: Place) -> None:
        self._views.append((sized, None, len(sized), place))

    def add_view(self, view: Any, place: Place | None) -> None:
        items = list(view)
        self._views.append((view, items, len(items), place))

    def add_attributes(
        self, owner: Any, table: dict[str, Any], origin: str, *, names: bool
    ) -> None:
        """Watch that ``table`` stays the ``__dict__`` of the owner, and the names in it."""
        if names:
            self.add_view(table.keys(), None)
        self._owners.append((owner, table, list(table) if names else None, origin))

    def seal(self) -> None:
        """Make ready to compare; nothing is added afterwards."""
        for ask, (objects, answers, _) in self._singles.items():
            self._sources.append(partial(map, ask, objects))
            self._expected += answers
        for table, values, _ in self._names.values():
            names = [name for name, value in values.items() if value is not MISSING]
            absent = values.keys() - names
            if absent:
                self._sources.append(partial(map, table.keys().isdisjoint, [absent]))
                self._expected.append(True)
            if names:
                names += names[: len(names) == 1]  # of one name, it gives no tuple
                self._sources.append(partial(itemgetter(*names), table))
                self._expected += [values[name] for name in names]
        if self._owners:
            owners = [owner for owner, *_ in self._owners]
            self._sources.append(partial(map, object.__getattribute__, owners, repeat("__dict__")))
            self._expected += [table for _, table, *_ in self._owners]
        self._sized = [view for view, *_ in self._views]
        self._sizes = [size for _, _, size, _ in self._views]
        filled = [(view, items) for view, items, *_ in self._views if items]
        if filled:
            self._sources.append(partial(chain.from_iterable, [view for view, _ in filled]))
            self._expected += chain.from_iterable(items for _, items in filled)

    def same(self) -> bool:
        """Whether nothing has changed."""
        if self._sized and list(map(len, self._sized)) != self._sizes:
            return False
        try:
            if all(map(is_, chain.from_iterable(map(call, self._sources)), self._expected)):
                return True
            now = list(chain.from_iterable(map(call, self._sources)))
        except (KeyError, AttributeError, ValueError):  # deleted
            return False
        if not all_same(now, self._expected):  # what is equal but not identical is rare
            return False
        self._expected = now
        return True

    def changes(self) -> Iterator[Place]:
        """Where something has changed."""
        for ask, (objects, answers, places) in self._singles.items():
            for one, answer, place in zip(objects, answers, places, strict=True):
                if not all_same([answer_of(ask, one)], [answer]):
                    yield place
        for table, values, name_places in self._names.values():
            for name, value in values.items():
                if not all_same([table.get(name, MISSING)], [value]):
                    yield name_places[name]
        for owner, table, names, origin in self._owners:
            now = object.__getattribute__(owner, "__dict__")
            if now is not table:
                yield Place(origin, "attribute")
            for name in () if names is None else now.keys() ^ names:
                yield Place(origin, "attribute", name)
        for view, items, size, view_place in self._views:
            is_same = len(view) == size and (items is None or all_same(list(view), items))
            if view_place is not None and not is_same:
                yield view_place


def num_registered(cls: abc.ABCMeta) -> int:
    """How many classes were registered with an abstract one: a small number, which is the same
    object each time.
    """
    return len(_registry_of(cls)[0])


def answer_of(ask: Callable[[Any], Any], of: Any) -> Any:
    """``MISSING`` if it has none: nothing is assigned, or a proxy leads to nothing."""
    try:
        return ask(of)
    except (AttributeError, ValueError, ReferenceError):
        return MISSING


def attribute_of(value: Any, name: str) -> Any:
    """Read without calling the user's ``__getattr__``; ``MISSING`` if there is none."""
    return answer_of(partial(object.__getattribute__, value), name)


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


def holds_items(kind: Any, value: Any, expected: tuple[Any, ...]) -> bool:
    return all_same(tuple(kind.__iter__(value)), expected)


def holds_bytes(value: Any, expected: bytes) -> bool:
    return bytes(value) == expected
