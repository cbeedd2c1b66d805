"""The Python objects that a function reaches, as they were before it was traced.

A trace that is given up is followed by a run of the function itself.  What its Python code changed
in the trace is taken back first, so that it changes once.  And a tensor of a trace must not stay in
an object: later calls run the graph, and would find it there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch

from torchpmap._base.sources import is_foreign
from torchpmap._base.torch_internals import FakeTensor
from torchpmap._trace.environment import others_run
from torchpmap._trace.reach import dict_of

_DEPTH = 5
"""Of containers in attributes: ``optimizer.state[p]["exp_avg"]`` is one of 3."""
_MISSING = object()
_TABLES = (dict, list, set, deque)


class Snapshot:
    """``objects``: what the function reaches; containers in their attributes are found here.

    Instances of other packages are left alone, since their threads may change them meanwhile; but
    for modules, and for ``also``: optimizers and the like.
    """

    def __init__(self, objects: Iterable[Any], also: tuple[type, ...] = ()) -> None:
        self._others_run = others_run()
        self._tables: dict[int, tuple[Any, Any]] = {}
        """By id: a container, and a copy."""
        self._places: list[tuple[Any, str, Any]] = []
        """Owners of names: a cell, a class, or the globals of a module; what was there."""
        own = (*_TABLES, torch.nn.Module, FunctionType, *also)
        for each in objects:
            if isinstance(each, own) or not is_foreign(type(each).__module__):
                self._add(each, _DEPTH)
            if isinstance(each, torch.Tensor) and each.is_leaf and each.requires_grad:
                self._note(each, "grad")
            if isinstance(each, FunctionType):
                known = each.__globals__
                for cell in each.__closure__ or ():
                    self._note(cell, "cell_contents")
                for name in each.__code__.co_names:
                    self._note(known, name)
            elif isinstance(each, type) and not is_foreign(each.__module__):
                for name in vars(each).keys() - {"__dict__", "__weakref__"}:
                    self._note(each, name)
            for name in _slots(each):
                self._note(each, name)

    def _note(self, owner: Any, name: str) -> None:
        self._places.append((owner, name, _read(owner, name)))

    def _add(self, value: Any, depth: int) -> None:
        table = value if isinstance(value, _TABLES) else dict_of(value)
        if table is None or id(table) in self._tables:
            return
        copy = dict(_own(table).items(table)) if isinstance(table, dict) else list(table)
        self._tables[id(table)] = table, copy
        if depth:
            for item in _items(copy):
                if isinstance(item, _TABLES):
                    self._add(item, depth - 1)

    def restore(self) -> None:
        """Take back what has changed; but not of lists, if other threads may have added to them."""
        is_alone = not (self._others_run or others_run())
        for table, copy in self._tables.values():
            if isinstance(table, dict):
                _restore_dict(table, copy, is_alone)
            elif is_alone and not _same(table, copy):
                table.clear()
                (table.update if isinstance(table, set) else table.extend)(copy)
            elif not isinstance(table, set):
                for place in reversed(range(len(table))):
                    if _has_traced(table[place]):
                        del table[place]
        for owner, name, value in self._places:
            if _read(owner, name) is not value:
                _write(owner, name, value)

    def leaked(self) -> str | None:
        """Where a tensor of a trace is that was not there; None if nowhere."""
        for table, copy in self._tables.values():
            if not _same(table, copy):
                names = list(dict.keys(table)) if isinstance(table, dict) else range(len(table))
                for name, item in zip(names, _items(table), strict=False):
                    if _has_traced(item):
                        return repr(name)
        for owner, name, value in self._places:
            now = _read(owner, name)
            if now is not value and _has_traced(now):
                return "a variable" if isinstance(owner, CellType) else repr(name)
        return None


def _own(table: dict[Any, Any]) -> Any:
    """The class whose methods read and write just what a table holds: one of the user's may make
    its entries only when it is asked for them, as transformers' tables do.
    """
    return OrderedDict if isinstance(table, OrderedDict) else dict


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        if not is_foreign(kind.__module__):
            yield from (names,) if isinstance(names, str) else names


def _items(table: Any) -> Iterator[Any]:
    return iter(list(dict.values(table) if isinstance(table, dict) else table))


def _same(table: Any, copy: Any) -> bool:
    if isinstance(table, dict):
        now = dict(_own(table).items(table))
        return list(now) == list(copy) and all(copy[name] is item for name, item in now.items())
    if len(table) != len(copy):
        return False
    return all(a is b for a, b in zip(list(table), copy, strict=False))


def _restore_dict(table: dict[Any, Any], copy: dict[Any, Any], is_alone: bool) -> None:
    """Give a table its entries back, in their order unless other threads may use it."""
    kind = _own(table)
    if is_alone and list(kind.keys(table)) != list(copy):
        kind.clear(table)
    for name in dict.keys(table) - copy.keys():
        kind.__delitem__(table, name)
    for name, item in copy.items():
        if dict.get(table, name, _MISSING) is not item:
            kind.__setitem__(table, name, item)


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return dict.get(owner, name, _MISSING)
    if isinstance(owner, type):
        return vars(owner).get(name, _MISSING)
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # not assigned
        return _MISSING


def _write(owner: Any, name: str, value: Any) -> None:
    """Set a name as it was, or take it away."""
    change: Callable[..., Any]
    if isinstance(owner, dict):
        owner.pop(name, None)
        if value is not _MISSING:
            owner[name] = value
        return
    change, given = (delattr, ()) if value is _MISSING else (setattr, (value,))
    change(owner, name, *given)


def _has_traced(value: Any, depth: int = 8) -> bool:
    """Whether a tensor of a trace is in a value that the function has stored."""
    if isinstance(value, FakeTensor):
        return True
    if not depth or isinstance(value, torch.nn.Module | type | FunctionType):
        return False
    if isinstance(value, (*_TABLES, tuple, frozenset)):
        return any(_has_traced(item, depth - 1) for item in _items(value))
    if is_foreign(type(value).__module__):
        return False
    inside = [*(dict_of(value) or {}).values(), *(_read(value, x) for x in _slots(value))]
    return any(_has_traced(item, depth - 1) for item in inside)
