"""The Python objects that a function reaches, as they were before it was traced.

A trace that is given up is followed by another one, or by a run of the function itself.  What its
Python code changed in the trace is taken back first, so that it changes once.  And a tensor of a
trace must not stay in an object: later calls run the graph, and would find it there.  Where the
function leaves one, it is told, as a ``Slot``, so that each call can leave its own.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from torchpmap._base.exact import exact
from torchpmap._base.pytree import Structure, flatten
from torchpmap._base.sources import is_foreign
from torchpmap._base.torch_internals import FakeTensor, innermost
from torchpmap._trace.code import ANY_ATTRIBUTE, code_facts
from torchpmap._trace.environment import others_run
from torchpmap._trace.reach import SIMPLE, dict_of, is_holder, slots_of, table_kind
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.watched import MISSING, all_same, answer_of, attribute_of

_DEPTH = 5
"""Of containers in attributes: ``optimizer.state[p]["exp_avg"]`` is one of 3."""
_CACHE = type(functools.cache(len))
_TABLES = (dict, list, set, deque)
_PLAIN = torch.Tensor | enum.Enum | SIMPLE


class Slot(NamedTuple):
    """Where a function stores a value: an entry of a dict or a list, a variable, an attribute."""

    owner: Any
    name: Any
    is_users: bool = True
    """Whether what holds on to containers in the value counts; else it is an optimizer's or
    torch's own."""

    @property
    def key(self) -> tuple[int, Any]:
        return id(self.owner), self.name

    @property
    def text(self) -> str:
        """What errors call it."""
        if isinstance(self.owner, CellType):
            return "a variable"
        if isinstance(self.owner, list | deque):
            return "an item of a list"
        return "a key of a dict" if isinstance(self.name, torch.Tensor) else repr(self.name)

    @property
    def is_mode(self) -> bool:
        """Whether it is ``training`` of a module, of which there are only two: each call sets it,
        so that ``train()`` in one function and ``eval()`` in another need no new traces.
        """
        return self.name == "training" and isinstance(self.read(), bool)

    def read(self) -> Any:
        """The value; ``MISSING`` if there is none."""
        owner, name = self.owner, self.name
        if isinstance(owner, dict):
            return dict.get(owner, name, MISSING)
        if isinstance(owner, list):
            return owner[name] if name < len(owner) else MISSING
        if isinstance(owner, type):
            return vars(owner).get(name, MISSING)
        if isinstance(owner, ContextVar):
            return owner.get(MISSING)
        return attribute_of(owner, name)

    def write(self, value: Any) -> None:
        """Set it, or take it away."""
        owner, is_gone = self.owner, value is MISSING
        if is_gone and (isinstance(owner, ContextVar) or self.read() is MISSING):
            return  # a trace has a context of its own, which ends with it
        if isinstance(owner, ContextVar):
            owner.set(value)
            return
        if isinstance(owner, dict | list):
            kind = table_kind(owner) if isinstance(owner, dict) else list
            change = kind.__delitem__ if is_gone else kind.__setitem__
        else:
            kind = type if isinstance(owner, type) else object
            change = kind.__delattr__ if is_gone else kind.__setattr__
        change(owner, self.name, *([] if is_gone else [value]))

    def refusal(self, where: str) -> Untraceable:
        """What says that calls cannot store a tensor there."""
        return Untraceable(
            f"it stores a new tensor ({self.text}), which later calls would not",
            where,
            "buffer.copy_(value), or return the value",
        )


class _Table(NamedTuple):
    """A container."""

    table: Any
    copy: Any
    parent: _Table | None
    """The one that it was found in, if only there."""
    is_users: bool
    """Whether it is none of an optimizer or the like."""

    def is_there(self) -> bool:
        """Whether the object still leads to it."""
        if self.parent is None:
            return True
        is_item = any(item is self.table for item in _items(self.parent.table))
        return is_item and self.parent.is_there()

    def attribute(self, name: Any) -> Slot:
        """The place in the outermost container that leads to an entry by names."""
        if self.parent is None or not isinstance(self.parent.copy, dict):
            return Slot(self.table, name, False)
        names = [x for x, item in self.parent.copy.items() if item is self.table]
        return self.parent.attribute(names[0])


class Snapshot:
    """``objects``: what the function reaches; containers in their attributes are found here.

    Of instances of other packages, only attributes that the user's code stores are noted, since
    their threads may change others meanwhile; but for modules, and for ``also``: optimizers and the
    like.
    """

    def __init__(self, objects: Iterable[Any], also: tuple[type, ...] = ()) -> None:
        self._others_run = others_run()
        self._tables: dict[int, _Table] = {}
        """By the id of the container."""
        self._places: list[tuple[Slot, Any]] = []
        """Names of a cell, a class, or the globals of a module; what was there."""
        own = (*_TABLES, torch.nn.Module, FunctionType, *also)
        objects = list(objects)
        caches = [each for each in objects if isinstance(each, _CACHE)]
        self._caches = [(each, each.cache_info().misses) for each in caches]
        codes = [code_facts(each.__code__) for each in objects if isinstance(each, FunctionType)]
        attributes = {name for code in codes for name in code.mentioned}
        if ANY_ATTRIBUTE.isdisjoint(attributes):
            attributes = {name for code in codes for name in code.attributes}
        for each in objects:
            is_users = not isinstance(each, also)
            if isinstance(each, FunctionType):  # a trace replaces some of torch's for a while
                # a wrapper has the name of another module, with functools.wraps
                modules = each.__module__, each.__globals__.get("__name__")
                is_users = not all(map(is_foreign, modules))
            if isinstance(each, own) or is_holder(type(each)):
                self._add(each, _DEPTH, None, is_users)
            elif not isinstance(each, type):
                table = dict_of(each)
                for name in attributes if table is not None else ():
                    self._note(table, name)
            if isinstance(each, torch.Tensor) and each.is_leaf and each.requires_grad:
                self._note(each, "grad")
            if isinstance(each, FunctionType):
                facts = code_facts(each.__code__)
                for cell in each.__closure__ or ():
                    self._note(cell, "cell_contents", is_users)
                for name in {*facts.globals, *facts.names}:
                    self._note(each.__globals__, name, is_users)
            elif isinstance(each, type) and not is_foreign(each.__module__):
                for name in vars(each).keys() - {"__dict__", "__weakref__"}:
                    self._note(each, name)
            elif isinstance(each, ContextVar):
                self._note(each, each.name)
            for name, _ in slots_of(each):
                self._note(each, name)

    def _note(self, owner: Any, name: str, is_users: bool = True) -> None:
        slot = Slot(owner, name, is_users and not isinstance(owner, torch.Tensor))
        self._places.append((slot, slot.read()))

    def _add(self, value: Any, depth: int, parent: _Table | None, is_users: bool) -> None:
        table = value if isinstance(value, _TABLES) else dict_of(value)
        if table is None or id(table) in self._tables:
            return
        copy = dict(table_kind(table).items(table)) if isinstance(table, dict) else list(table)
        found = self._tables[id(table)] = _Table(table, copy, parent, is_users)
        if depth:
            for item in _items(copy):
                if isinstance(item, _TABLES):
                    self._add(item, depth - 1, found, is_users)

    def _clear_caches(self) -> None:
        """Forget what ``functools.cache`` has kept of a trace."""
        for each, num_misses in self._caches:
            if each.cache_info().misses != num_misses:
                each.cache_clear()

    def restore(self) -> None:
        """Take back what has changed; but nothing that other threads may have added."""
        self._clear_caches()
        is_alone = not (self._others_run or others_run())
        for table, copy, *_ in self._tables.values():
            if isinstance(table, dict):
                _restore_dict(table, copy, is_alone)
            elif same_items(table, copy):  # its items may still hold tensors of a trace
                continue
            elif is_alone:
                table.clear()
                (table.update if isinstance(table, set) else table.extend)(copy)
            elif not isinstance(table, set):
                own = set(map(id, copy))
                for place in reversed(range(len(table))):
                    if id(table[place]) not in own and has_traced(table[place]):
                        del table[place]
        for slot, value in self._places:
            if slot.read() is not value:
                slot.write(value)

    def has(self, slot: Slot) -> bool:
        """Whether the function reaches it."""
        return id(slot.owner) in self._tables or any(
            place.key == slot.key for place, _ in self._places
        )

    def stored(self, known: Sequence[Slot], where: str, *, constants: bool) -> list[Slot]:
        """Where tensors of a trace are, besides what is ``known``; if there are any, also where
        other values are that the function has moved or made, which may be ``constants``.  Modes
        of modules that it has changed are among them in any case.

        Raises:
            Untraceable: later calls could not store theirs there.
        """
        self._clear_caches()
        keys = {slot.key for slot in known}
        stores = any(not slot.is_mode for slot in known)
        new: dict[tuple[int, Any], Slot] = {}
        moved: dict[tuple[int, Any], Slot] = {}
        others: list[str] = []
        is_alone = not (self._others_run or others_run())  # else another thread may have done it
        for slot, now, can_store in self._changes():
            if has_traced((slot.name, now)):
                if has_traced(slot.name) or not (can_store and _is_plain(now)):
                    raise slot.refusal(where)
                new[slot.key] = slot
            elif slot.is_users and slot.key not in keys:
                is_known = is_alone and (constants or slot.is_mode or _has_tensor(now))
                is_moved = is_known and can_store and _is_plain(now)
                moved |= {slot.key: slot} if is_moved else {}
                others += [] if is_moved else [slot.text]
        stores |= bool(new)
        if others and stores:
            raise Untraceable(
                f"it stores a new tensor, and changes what is none ({others[0]}), which later "
                "calls would not",
                where,
                "a tensor for that too, or return the new tensor",
            )
        found = new | {key: slot for key, slot in moved.items() if stores or slot.is_mode}
        return [slot for key, slot in found.items() if key not in keys]

    def _changes(self) -> Iterator[tuple[Slot, Any, bool]]:
        """Where something is not as it was, what is there now, and whether calls can store
        there.
        """
        for each in self._tables.values():
            table, copy = each.table, each.copy
            if same_items(table, copy) or not each.is_there():
                continue
            is_dict = isinstance(table, dict)
            before = copy if is_dict else dict(enumerate(copy))
            names = list(dict.keys(table)) if is_dict else range(len(table))
            items = dict(zip(names, _items(table), strict=False))
            is_fixed = is_dict or (type(table) is list and len(table) == len(copy))
            for name in {**before, **items}:
                now = items.get(name, MISSING)
                if not _differ(now, before.get(name, MISSING)):
                    continue
                if each.is_users:
                    yield Slot(table, name), now, is_fixed
                elif has_traced(now):  # the containers in it may be others in each call
                    slot = each.attribute(name)
                    yield slot, slot.read(), self._tables[id(slot.owner)].parent is None
        for slot, value in self._places:
            now = slot.read()
            if _differ(now, value):
                yield slot, now, not isinstance(slot.owner, type | torch.Tensor)


def _differ(now: Any, before: Any) -> bool:
    is_simple = isinstance(now, SIMPLE) and isinstance(before, SIMPLE)
    return now is not before and not (is_simple and exact(now) == exact(before))


def _is_plain(value: Any) -> bool:
    """Whether each call can have a value of its own like this one."""
    leaves, structure = flatten(value)
    return not has_traced_keys(structure) and all(
        (isinstance(x, _PLAIN) and innermost(x) is x) or x is MISSING for x in leaves
    )


def _has_tensor(value: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in flatten(value)[0])


def _items(table: Any) -> Iterator[Any]:
    return iter(list(dict.values(table) if isinstance(table, dict) else table))


def same_items(table: Any, copy: Any) -> bool:
    """Whether a container holds the objects of its copy, in their order."""
    if isinstance(table, dict):
        now = dict(table_kind(table).items(table))
        is_same = all_same(list(now), list(copy))
        return is_same and all(copy[name] is item for name, item in now.items())
    if len(table) != len(copy):
        return False
    return all(a is b for a, b in zip(list(table), copy, strict=False))


def _restore_dict(table: dict[Any, Any], copy: dict[Any, Any], is_alone: bool) -> None:
    """Give a table its entries back, in their order unless other threads may use it."""
    kind = table_kind(table)
    if is_alone and not all_same(list(kind.keys(table)), list(copy)):
        kind.clear(table)
    for name in dict.keys(table) - copy.keys():
        if is_alone or has_traced((name, dict.get(table, name))):
            kind.__delitem__(table, name)
    for name, item in copy.items():
        if dict.get(table, name, MISSING) is not item:
            kind.__setitem__(table, name, item)


def has_traced_keys(structure: Structure) -> bool:
    """Whether a tensor of a trace is a key of a dict in a pytree."""
    return has_traced(structure.unflatten([None] * structure.num_leaves))


def has_traced(value: Any, depth: int = 8) -> bool:
    """Whether a tensor of a trace is in a value that the function has stored."""
    if isinstance(innermost(value), FakeTensor):
        return True
    if not depth or isinstance(value, torch.nn.Module | type | FunctionType):
        return False
    if isinstance(value, (*_TABLES, tuple, frozenset)):
        keys = list(dict.keys(value)) if isinstance(value, dict) else ()
        return any(has_traced(item, depth - 1) for item in (*keys, *_items(value)))
    if not is_holder(type(value)):
        return False
    inside = [
        *(dict_of(value) or {}).values(),
        *(answer_of(member.__get__, value) for _, member in slots_of(value)),
    ]
    return any(has_traced(item, depth - 1) for item in inside)
