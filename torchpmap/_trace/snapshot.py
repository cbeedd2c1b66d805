"""The Python objects that a function reaches, as they were before it was traced.

A trace that is given up is followed by a run of the function itself.  What its Python code changed
in the trace is taken back first, so that it changes once.  And a tensor of a trace must not stay in
an object: later calls run the graph, and would find it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType
from typing import Any

import torch

from torchpmap._base.sources import is_foreign
from torchpmap._base.torch_internals import FakeTensor

_DEPTH = 5
"""Of containers in attributes: ``optimizer.state[p]["exp_avg"]`` is one of 3."""


class Snapshot:
    """``objects``: what the function reaches; containers in their attributes are found here.

    Instances of other packages are left alone, since their threads may change them meanwhile; but
    for modules, and for ``also``: optimizers and the like.
    """

    def __init__(self, objects: Iterable[Any], also: tuple[type, ...] = ()) -> None:
        self._tables: dict[int, tuple[Any, Any]] = {}
        """By id: a dict, list or set, and a copy."""
        self._cells: list[tuple[CellType, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        own = (*_TABLES, torch.nn.Module, *also)
        for each in objects:
            if isinstance(each, own) or not is_foreign(type(each).__module__):
                self._add(each, _DEPTH)
            if isinstance(each, FunctionType):
                self._add_function(each)
            elif isinstance(each, type) and not is_foreign(each.__module__):
                self._classes.append((each, dict(vars(each))))

    def _add_function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                self._cells.append((cell, cell.cell_contents))
        known = function.__globals__
        names = [name for name in function.__code__.co_names if name in known]
        self._globals.append((known, {name: known[name] for name in names}))

    def _add(self, value: Any, depth: int) -> None:
        table = value if isinstance(value, _TABLES) else _attributes(value)
        if table is None or id(table) in self._tables:
            return
        self._tables[id(table)] = table, _copied(table)
        if depth:
            for item in _items(table):
                if isinstance(item, _TABLES):
                    self._add(item, depth - 1)

    def restore(self) -> None:
        """Take back what has changed."""
        for table, copy in self._tables.values():
            if not _same(table, copy):
                _assign(table, copy)
        for cell, contents in self._cells:
            if cell.cell_contents is not contents:
                cell.cell_contents = contents
        for kind, attributes in self._classes:
            for name, x in attributes.items():
                if vars(kind).get(name) is not x:
                    setattr(kind, name, x)
        for known, values in self._globals:
            known.update({name: x for name, x in values.items() if known.get(name) is not x})

    def leaked(self) -> str | None:
        """Where a tensor of a trace is that was not there; None if nowhere."""
        for table, copy in self._tables.values():
            if _same(table, copy):
                continue
            names = table if isinstance(table, dict) else range(len(table))
            for name, item in zip(names, _items(table), strict=True):
                if isinstance(item, FakeTensor) or any(
                    isinstance(inner, FakeTensor)
                    for inner in (_items(item) if isinstance(item, (*_TABLES, tuple)) else ())
                ):
                    return repr(name)
        if any(isinstance(cell.cell_contents, FakeTensor) for cell, _ in self._cells):
            return "in a variable"
        for known, values in self._globals:
            for name in values:
                if isinstance(known.get(name), FakeTensor):
                    return repr(name)
        return None


_TABLES = (dict, list, set)


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if type(table) is dict else None


def _items(table: Any) -> Iterator[Any]:
    return iter(list(table.values() if isinstance(table, dict) else table))


def _copied(table: Any) -> Any:
    """The items in their order, whatever class of container it is."""
    return dict(table) if isinstance(table, dict) else list(table)


def _same(table: Any, copy: Any) -> bool:
    if len(table) != len(copy):
        return False
    if isinstance(table, dict):
        return all(
            a is b and x is y
            for (a, x), (b, y) in zip(list(table.items()), copy.items(), strict=False)
        )
    return all(a is b for a, b in zip(list(table), copy, strict=False))


def _assign(table: Any, copy: Any) -> None:
    table.clear()
    if isinstance(table, dict | set):
        table.update(copy)
    else:
        table.extend(copy)
