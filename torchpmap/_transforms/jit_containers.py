"""Lists and dicts among the arguments of a jitted function, which it changes.

    labels = batch.pop("labels"); cache.append(key); state["hidden"] = hidden

A trace works on copies of them.  What it leaves there is a further result, which each call puts
into those of the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchpmap._base.pytree import MAPPINGS, open_node, tree_map, tree_map_only
from torchpmap._base.sources import users_line
from torchpmap._trace.reach import SIMPLE
from torchpmap._trace.snapshot import same_items
from torchpmap._trace.untraceable import Untraceable


class Changed(NamedTuple):
    """What a function returns, and what it leaves in containers, by their numbers."""

    result: Any
    contents: dict[int, Any]


class _Before:
    """Stands for what was in a container: the number of that, and the place in it.  It is a leaf,
    as no tuple is.
    """

    def __init__(self, container: int, place: int) -> None:
        self.container, self.place = container, place


class NotingChanges:
    """A function, which tells by ``Changed`` that it changes what it is given."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._fun = fun
        self.has_changed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        containers = list(_containers((args, kwargs)))
        known = [(k, container, _items(container)) for k, container in enumerate(containers)]
        # a node may be registered with children that are made anew each time, which tell nothing
        known = [each for each in known if same_items(_items(each[1]), each[2])]
        result = self._fun(*args, **kwargs)
        contents = {
            number: _items(container)
            for number, container, items in known
            if not same_items(_items(container), items)
        }
        if not contents:
            return result
        self.has_changed = True
        for number in contents:
            kind = type(containers[number])
            if kind not in (*MAPPINGS, list, deque):
                reason = f"it changes a {kind.__name__} that it is given"
                raise Untraceable(reason, users_line(), "a dict, or return the new one")
        before = [
            (x, _Before(number, place))
            for number, _, items in known
            for place, x in enumerate(_values(items))
            if not isinstance(x, SIMPLE)
        ]
        kept = {id(x): mark for x, mark in before}
        # a tensor that is returned is a result, as that of any other call
        others = {id(x): mark for x, mark in before if not isinstance(x, torch.Tensor)}
        return Changed(_marked(result, others), _marked(contents, kept))


def _marked(tree: Any, marks: dict[int, _Before]) -> Any:
    return tree_map(lambda x: marks.get(id(x), x), tree, is_leaf=lambda x: id(x) in marks)


def put_back(changed: Changed, given: Any) -> Any:
    """Put into the containers of a caller what a call leaves there; the result of the call.

    given: positional arguments and those by name.
    """
    containers = list(_containers(given))
    before = [list(_values(_items(container))) for container in containers]
    result, contents = tree_map_only(_Before, lambda x: before[x.container][x.place], changed)
    for number, items in contents.items():
        container = containers[number]
        container.clear()
        (container.update if isinstance(container, dict) else container.extend)(items)
    return result


def are_given_twice(given: Any) -> bool:
    """Whether a list or dict is in two places, so that a change at one would be one at the other,
    which a trace does not know.
    """
    ids = [id(x) for x in _containers(given) if not isinstance(x, tuple)]
    return len(set(ids)) < len(ids)


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
