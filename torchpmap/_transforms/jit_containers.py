"""Lists and dicts among the arguments of a jitted function, which it changes.

    labels = batch.pop("labels"); cache.append(key); state["hidden"] = hidden

A trace works on copies of them.  What it leaves there is a further result, which each call puts
into those of the caller.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchpmap._base.exact import exact
from torchpmap._base.pytree import (
    MAPPINGS,
    flatten,
    open_node,
    tree_flatten,
    tree_map,
    tree_map_only,
)
from torchpmap._trace.reach import SIMPLE
from torchpmap._trace.snapshot import has_traced, same_items
from torchpmap._trace.untraceable import Untraceable

_KINDS = (*MAPPINGS, list, deque)


class Changed(NamedTuple):
    """What a function returns, and what it leaves in containers, by their numbers."""

    result: Any
    contents: dict[int, Any]


@dataclass(frozen=True)
class Changes:
    """What a program does with lists and dicts."""

    of_given: bool = False
    """Whether it returns ``Changed``."""
    owners: frozenset[int] = frozenset()
    """Ids of those that it changes, or where it changes what it is given, that it reaches."""

    @classmethod
    def of(cls, of_given: bool, reached: Iterable[Any], changed: Iterable[Any]) -> Changes:
        """``changed``: of those ``reached``, those that it stores to."""
        owners = reached if of_given else changed
        return cls(of_given, frozenset(id(x) for x in owners if isinstance(x, _KINDS)))

    def meet(self, given: Any) -> bool:
        """Whether a change at one place would be one at another, which a trace does not know."""
        if not (self.of_given or self.owners):
            return False
        return (self.of_given and are_given_twice(given)) or not self.owners.isdisjoint(_ids(given))

    def put_back(self, result: Any, given: Any) -> Any:
        """Put into the containers of a caller what a call leaves there; the result of the call.

        given: positional arguments and those by name.
        """
        if not self.of_given:
            return result
        containers = list(_containers(given))
        before = [list(_values(_items(container))) for container in containers]
        result, contents = tree_map_only(_Before, lambda x: before[x.container][x.place], result)
        for number, items in contents.items():
            container = containers[number]
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(items)
        return result


class _Before:
    """Stands for what was in a container: the number of that, and the place in it.  It is a leaf,
    as no tuple is.
    """

    def __init__(self, container: int, place: int) -> None:
        self.container, self.place = container, place


class NotingChanges:
    """A function, which tells by ``Changed`` that it changes what it is given."""

    def __init__(self, fun: Callable[..., Any], where: str) -> None:
        """``where``: the function is defined."""
        self._fun, self._where = fun, where
        self.has_changed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        containers = list(_containers(given))
        known = [(k, container, _items(container)) for k, container in enumerate(containers)]
        # a node may be registered with children that are made anew each time, which tell nothing
        known = [each for each in known if same_items(_items(each[1]), each[2])]
        sets = [x for x in flatten(given)[0] if isinstance(x, set)]
        others = [(x, _picture(x)) for x in (*containers, *sets)]
        result = self._fun(*args, **kwargs)
        contents = {
            number: _items(container)
            for number, container, items in known
            if not same_items(_items(container), items)
        }
        changed = [containers[number] for number in contents]
        changed += [x for x, picture in others if _picture(x) != picture]
        for kind in (type(x) for x in changed if type(x) not in _KINDS):
            raise self._refusal(f"it changes a {kind.__name__} that it is given")
        if not contents:
            return result
        self.has_changed = True
        before = [
            (x, _Before(number, place))
            for number, _, items in known
            for place, x in enumerate(_values(items))
            if not isinstance(x, SIMPLE)
        ]
        kept = {id(x): mark for x, mark in before}
        self._check_new(contents, result, kept)
        # a tensor that is returned is a result, as that of any other call
        own = {id(x): mark for x, mark in before if not isinstance(x, torch.Tensor)}
        return Changed(_marked(result, own), _marked(contents, kept))

    def _check_new(self, contents: dict[int, Any], result: Any, kept: dict[int, Any]) -> None:
        """Raise for what is put into containers and would not be there as one object."""
        values = tuple(x for items in contents.values() for x in _values(items))
        new = may_change(values, kept)
        ids, returned = list(map(id, new)), {id(x) for x in may_change(result, kept)}
        if len(set(ids)) < len(ids) or not returned.isdisjoint(ids):
            raise self._refusal("it puts a new list or dict into two places")
        for x in new:
            if open_node(x) is None and has_traced(x):
                kind = type(x).__name__
                raise self._refusal(f"it puts a {kind} with a tensor inside into a list or dict")

    def _refusal(self, reason: str) -> Untraceable:
        return Untraceable(reason, self._where, "a dict, or return the new one")


def _picture(value: Any) -> Any:
    """Of what a set holds, and of what a node holds besides its children."""
    if isinstance(value, set):
        return set(value)
    opened = None if type(value) in (*_KINDS, tuple) else open_node(value)
    return None if opened is None else exact(opened[1].context)


def _marked(tree: Any, marks: dict[int, _Before]) -> Any:
    return tree_map(lambda x: marks.get(id(x), x), tree, is_leaf=lambda x: id(x) in marks)


def are_given_twice(given: Any) -> bool:
    """Whether a list or dict is in two places."""
    ids = _ids(given)
    return len(set(ids)) < len(ids)


def _ids(given: Any) -> list[int]:
    return [id(x) for x in _containers(given) if not isinstance(x, tuple)]


def may_change(tree: Any, kept: Container[int] = ()) -> list[Any]:
    """The containers and objects in a pytree that may change; ``kept``: ids of those to leave."""
    found: list[Any] = []

    def note(x: Any) -> bool:
        is_kept = id(x) in kept
        if not is_kept and not isinstance(x, torch.Tensor | tuple | type | enum.Enum | SIMPLE):
            found.append(x)
        return is_kept

    tree_flatten(tree, note)
    return found


def _containers(tree: Any) -> Iterator[Any]:
    """Those of a pytree, outer ones first."""
    opened = open_node(tree)
    if opened is not None:
        yield tree
        for child in opened[0]:
            yield from _containers(child)


def _items(container: Any) -> Any:
    if type(container) in MAPPINGS:
        return dict(container)
    opened = open_node(container)
    assert opened is not None
    return opened[0]


def _values(items: Any) -> Any:
    return items.values() if isinstance(items, dict) else items
