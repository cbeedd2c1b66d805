"""Everything that a function can reach by its code: what ``Environment`` watches."""

from __future__ import annotations

import abc
import array
import contextvars
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import torch

from torchpmap._base.contents import ArrayContents
from torchpmap._base.pytree import registration
from torchpmap._base.sources import is_foreign
from torchpmap._base.torch_internals import torch_function_off
from torchpmap._trace.code import Stores, code_facts
from torchpmap._trace.watched import (
    Place,
    Watched,
    all_same,
    cell_contents,
    code_of,
    mro_of,
    num_registered,
)

MAX_FOLLOWED = 20_000
_MISSING = object()
_HOLDERS = ("types", "argparse", "collections", "functools", "torch.optim", "torch.distributions")
"""Foreign modules whose instances hold nothing but a user's values."""
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, frozenset, deque)
SIMPLE = bool | int | float | complex | str | bytes | None
_IMPLIED = {"forward", "backward", "setup_context", "vmap", "jvp"}
"""Methods that torch calls, so the user's code may not mention them."""
_AT_CREATION = {"__init__", "__new__", "__post_init__"}
_NO_CODE = _AT_CREATION | {"__module__", "__dict__", "__doc__", "__weakref__", "__slots__"}
_OF_MODULES = set(vars(torch.nn.Module()))
_OPEN = (object, abc.ABC, Generic, Protocol, torch.nn.Module)
"""Foreign classes whose own code reads no attributes of a user's."""
_READING_ANY = {
    *("getattr", "hasattr", "setattr", "delattr", "vars", "dir", "eval", "exec", "attrgetter"),
    *("copy", "deepcopy", "asdict", "astuple", "replace", "fields", "getmembers"),
    *("format", "format_map", "dump", "dumps", "__dict__", "__getattribute__", "__getstate__"),
    *("__reduce__", "__reduce_ex__", "__match_args__"),
}
"""Names in code that may read attributes whose names are not in it."""
_OFTEN_METHODS = {"copy", "eval", "replace"}
"""Those of them that are also methods which read none: ``model.eval()``, ``batch.copy()``."""
_OF_READING_ANY = ("builtins", "copy", "dataclasses")
"""The modules whose functions they are."""
_ASKING = {"hasattr", "getattr", "AttributeError", "Exception"}
"""Names in code that may ask a module for what it lacks."""
_SCALING = {"_enabled", "_growth_factor", "_backoff_factor", "_growth_interval"}
"""Settings of a ``GradScaler`` that its own code reads."""
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *_MODULE_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _Owner(NamedTuple):
    """Attributes of which those are watched that the code mentions."""

    table: Mapping[str, Any]
    implied: set[str]
    """Names that are always watched."""
    done: set[str]
    """Names that are watched by now."""
    origin: str
    is_instance: bool = False
    """Whether code may read them by names that are made while it runs."""


class Walk:
    """Everything that a function can reach, nearest first."""

    def __init__(
        self, by_name: tuple[type, ...] = (), stored: Collection[tuple[int, Any]] = ()
    ) -> None:
        """``by_name``: classes; of an instance only what the code mentions is watched.  ``stored``:
        (id of the owner, name) of places that may hold anything.
        """
        self._by_name = by_name
        self._stored = stored
        self._owners_of_stored = {owner for owner, _ in stored}
        self.watched = Watched()
        self.tensors: list[torch.Tensor] = []
        self.origins: list[str] = []
        """What leads to each."""
        self.unwatched: str | None = None
        """The value that the function closes over and that leads to too many objects."""
        self.stores = Stores()
        self.names: set[str] = set()
        """What the code that was met mentions."""
        self._read: set[str] = set()
        """Those of them that it does not only call as methods."""
        self._may_copy = False
        """Whether it reaches a module of ``_OF_READING_ANY``."""
        self._seen: dict[int, Any] = {id(_MISSING): _MISSING}
        """By id; kept, so that no other value gets the id."""
        self._queue: deque[tuple[Any, str]] = deque()
        self._owners: list[_Owner] = []

    def run(self, fun: Any, given: tuple[Any, ...] = ()) -> None:
        """Watch what ``fun`` reaches; if it is given values, only what these lead to besides."""
        self._run(fun, "the function itself")
        if given:
            self.watched, self.tensors, self.origins = Watched(), [], []
            for value in given:
                self._run(value, "a static argument")
        self._called()
        self.watched.seal()

    def objects(self) -> list[Any]:
        """All that was met."""
        return list(self._seen.values())

    def _run(self, value: Any, origin: str) -> None:
        self._add(value, origin)
        num_followed = 0
        while self._queue:
            while self._queue:
                value, origin = self._queue.popleft()
                num_followed += 1
                if num_followed > MAX_FOLLOWED:
                    self.unwatched = origin
                    break
                self._follow(value, origin)
            else:
                self._mentioned()
                continue
            break

    def _mentioned(self) -> None:
        """Watch the attributes that the code met so far mentions."""
        methods = set() if self._may_copy else _OFTEN_METHODS - self._read
        is_any = not (_READING_ANY - methods).isdisjoint(self.names)
        for table, implied, done, origin, is_instance in self._owners:
            for name, value in list(table.items()):
                is_read = name in self._read or name in implied or (is_instance and is_any)
                is_called = name in self.names and not (is_instance and isinstance(value, SIMPLE))
                if name not in done and (is_read or is_called):
                    done.add(name)
                    self._watch_attribute(table, name, origin)

    def _called(self) -> None:
        """Watch that what has the name of a method in the code, such as a number of steps beside
        ``optimizer.step()``, stays what cannot be called.
        """
        for table, _, done, origin, is_instance in self._owners:
            for name in self.names.intersection(table) - done if is_instance else ():
                is_simple = functools.partial(_is_simple, table, name)
                self.watched.add_read(is_simple, Place(origin, "attribute", name))

    def _add(self, value: Any, origin: str) -> None:
        if not isinstance(value, SIMPLE) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append((value, origin))

    def _watch(self, read: Callable[[], Any], place: Place) -> None:
        self._add(self.watched.add_read(read, place), place.origin)

    def _watch_name(self, table: Mapping[str, Any], name: str, place: Place) -> None:
        if (id(table), name) not in self._stored:
            self._add(self.watched.add_name(table, name, place), place.origin)

    def _watch_attribute(self, table: Mapping[str, Any], name: str, origin: str) -> None:
        self._watch_name(table, name, Place(origin, "attribute", name))

    def _view(self, view: Any, place: Place) -> None:
        """Watch items, their number and their order."""
        self.watched.add_view(view, place)
        for item in list(view):  # other threads may add to it
            self._add(item, place.origin)

    def _entries(self, table: dict[Any, Any], place: Place) -> None:
        """Watch a dict, but for what is stored there."""
        kind = OrderedDict if isinstance(table, OrderedDict) else dict
        self._view(kind.keys(table), place)
        if id(table) not in self._owners_of_stored:
            self._view(kind.values(table), place)
            return
        for name in list(kind.keys(table)):
            self._watch_name(table, name, place)

    def _attributes_of(self, value: Any, origin: str) -> None:
        table = dict_of(value)
        if table is None:
            return
        if is_open(type(value)):
            self.watched.add_attributes(value, table, origin, values=False)
            fields = {x for base in type(value).__mro__ if _made(base) for x in _fields(base)}
            self._owners.append(_Owner(table, fields, set(), origin, True))
        elif id(table) in self._owners_of_stored:
            self.watched.add_dict(value, table, origin)
            self._entries(table, Place(origin, "attribute"))
        else:
            self.watched.add_attributes(value, table, origin)
            for item in list(table.values()):
                self._add(item, origin)

    def _follow(self, value: Any, origin: str) -> None:
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | attrgetter):
            name = getattr(value, "__name__", "attrgetter")  # that the code has another name for
            self.names |= _READING_ANY & {name}
            self._read |= _READING_ANY & {name}
        if isinstance(value, types.FunctionType):
            if not is_foreign(value.__module__) or not is_foreign(_module_of(value)):
                self._function(value, origin)
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            self._add(value.__func__, origin)
            self._add(getattr(value, "__self__", None), origin)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self._add(part, origin)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):  # __setstate__ assigns them
                read = functools.partial(getattr, value, name)
                self._watch(read, Place(origin, "attribute", name))
            self._instance(value, origin)
        elif isinstance(value, torch.nn.Module):
            self._module(value, origin)
        elif isinstance(value, type):
            self._class(value, origin)
        elif isinstance(value, types.ModuleType):
            self._attributes(value, self.names, origin)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, origin)
        elif isinstance(value, self._by_name):
            self._owners.append(_Owner(vars(value), {*_SCALING, *STEP_HOOKS}, set(), origin))
        elif isinstance(value, np.ndarray):
            self.watched.add_read(ArrayContents(value).same, Place(origin))
            for item in value.ravel().tolist() if value.dtype == object else ():
                self._add(item, origin)
        elif isinstance(value, bytearray | array.array | memoryview):
            same = functools.partial(_same_bytes, value, bytes(value))
            self.watched.add_read(same, Place(origin))
        elif isinstance(value, weakref.ReferenceType):
            self._watch(value, Place(origin))
        elif isinstance(value, contextvars.ContextVar):
            if (id(value), value.name) not in self._stored:
                self._watch(functools.partial(value.get, _MISSING), Place(origin))
        elif isinstance(value, threading.local):
            self._watch(functools.partial(getattr, value, "__dict__"), Place(origin))
        else:
            self._holder(value, origin)

    def _holder(self, value: Any, origin: str) -> None:
        """Anything that has items or attributes."""
        kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
        if kind in (dict, OrderedDict):
            self._entries(value, Place(origin))
        elif kind is list and id(value) in self._owners_of_stored:
            self.watched.add_size(value, Place(origin))
            for place in range(len(value)):
                if (id(value), place) not in self._stored:
                    self._add(self.watched.add(itemgetter(place), value, Place(origin)), origin)
        elif isinstance(value, types.MappingProxyType):
            self._view(value.keys(), Place(origin))
            self._view(value.values(), Place(origin))
        elif isinstance(value, tuple):  # always holds the same
            for item in tuple.__iter__(value):
                self._add(item, origin)
        elif kind is not None and type(value).__iter__ is kind.__iter__:
            self._view(value, Place(origin))
        elif kind is not None:
            items = tuple(kind.__iter__(value))
            same = functools.partial(_same_items, kind, value, items)
            self.watched.add_read(same, Place(origin))
            for item in items:
                self._add(item, origin)
        if is_holder(type(value)):
            self._instance(value, origin)
        else:
            wrapped = inspect.getattr_static(value, "__wrapped__", None)
            self._add(value.__wrapped__ if isinstance(wrapped, property) else wrapped, origin)

    def _instance(self, value: Any, origin: str) -> None:
        self._attributes_of(value, origin)
        for cls in type(value).__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, types.MemberDescriptorType) and not is_foreign(
                    cls.__module__
                ):
                    read = functools.partial(_slot, member, value)
                    if (id(value), name) not in self._stored:
                        self._watch(read, Place(origin, "attribute", name))
        self._kind(value, origin)

    def _kind(self, value: Any, origin: str) -> None:
        """Watch the class of an instance, which may be assigned."""
        if not is_foreign(type(value).__module__):
            self.watched.add(type, value, Place(origin, "attribute", "__class__"))
        self._add(type(value), origin)

    def _class(self, cls: type, origin: str) -> None:
        users = [base for base in cls.__mro__ if not is_foreign(base.__module__)]
        if users:
            self.watched.add(mro_of, cls, Place(origin, "attribute", "__bases__"))
            self._kind(cls, origin)
            if isinstance(cls, abc.ABCMeta):
                self.watched.add(num_registered, cls, Place(origin, "attribute", "register"))
        for base in users:
            table = vars(base)
            implied = {name for name in table if name.startswith("__")} - _NO_CODE - _made(base)
            implied |= _IMPLIED
            implied.update(name for name, value in table.items() if isinstance(value, _DATA))
            self.watched.add_size(table, Place(origin, "attribute"))
            self._owners.append(_Owner(table, implied, set(), origin))

    def _function(self, function: types.FunctionType, origin: str) -> None:
        is_outermost = not len(self.watched)
        place = Place(origin, "attribute", "__code__")
        code, defaults, keywords = self.watched.add(code_of, function, place)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            place = Place(repr(name) if is_outermost else origin, "name", name)
            if (id(cell), "cell_contents") in self._stored:
                continue
            try:
                self._add(self.watched.add(cell_contents, cell, place), place.origin)
            except ValueError:  # not assigned yet
                self._watch(functools.partial(_cell, cell), place)
        self._add(defaults, origin)
        self._add(keywords, origin)
        facts = code_facts(code)
        names = set(facts.mentioned)
        self.names |= names
        self._read |= names.difference(facts.called)
        self.stores.add(code)
        self._owners.append(_Owner(vars(function), {"__wrapped__", "registry"}, set(), origin))
        if is_foreign(_module_of(function)):  # a wrapper of torch's around a user's function
            return
        known = function.__globals__
        for name in facts.modules:
            self._attributes(sys.modules.get(name), names, origin)
        # also those that are not there, as they may come to hide Python's; names that no code can
        # be written with lead to what rewrote the code, such as pytest
        for name in filter(str.isidentifier, facts.globals):
            value = known.get(name)
            place = Place(repr(name) if is_outermost else origin, "name", name)
            if isinstance(value, types.ModuleType) or _is_foreign_class(value):
                self.watched.add_name(known, name, place)
                self._attributes(value, names, origin)
            else:
                self._watch_name(known, name, place)

    def _attributes(self, module: Any, names: set[str], origin: str) -> None:
        """Watch the attributes of a module that are in ``names``."""
        self._may_copy |= getattr(module, "__name__", "") in _OF_READING_ANY
        if not isinstance(module, types.ModuleType) or is_foreign(module.__name__):
            return
        self._seen[id(module)] = module
        table = vars(module)
        hook = table.get("__getattr__")  # called for names that are not there
        if hook is not None:
            names = names | {"__getattr__"}
        may_lack = hook is not None or not _ASKING.isdisjoint(names)
        for name in sorted(name for name in names if may_lack or name in table):
            value = table.get(name)
            if isinstance(value, types.ModuleType) or _is_foreign_class(value):
                self.watched.add_name(table, name, Place(origin, "attribute", name))
                if id(value) not in self._seen:
                    self._attributes(value, names, origin)
            else:
                self._watch_attribute(table, name, origin)

    def _module(self, module: torch.nn.Module, origin: str) -> None:
        state = vars(module)
        self.watched.add_dict(module, state, origin)
        self.watched.add_size(state, Place(origin, "attribute"))
        implied = {"training"} if is_open(type(module)) else {"training", *state}
        self._owners.append(_Owner(state, implied, _OF_MODULES - {"training"}, origin, True))
        for name in _TABLES:
            table = state.get(name)  # missing before Module.__init__
            if table:
                self._entries(table, Place(origin, "attribute"))
                self.stores.has_hooks |= name in _MODULE_HOOKS
            elif table is not None:
                self.watched.add_size(table, Place(origin, "attribute"))
        self.watched.add(type, module, Place(origin, "attribute", "__class__"))
        self._add(type(module), origin)

    def _tensor(self, tensor: torch.Tensor, origin: str) -> None:
        self.tensors.append(tensor)
        self.origins.append(origin)
        table = dict_of(tensor)
        if table:
            self._owners.append(_Owner(table, set(), set(), origin))
        with torch_function_off():  # one of another trace would raise
            tables = [getattr(tensor, name) for name in _TENSOR_HOOKS]
        for name, hooks in zip(_TENSOR_HOOKS, tables, strict=True):
            if hooks:
                self._entries(hooks, Place(origin, "attribute", name))
        if not is_foreign(type(tensor).__module__):
            self._kind(tensor, origin)


def is_open(kind: type) -> bool:
    """Whether only code of the user's reads the attributes of instances, by their names."""
    foreign = {base for base in kind.__mro__ if is_foreign(base.__module__)}
    return foreign.issubset(_OPEN) and registration(kind) is None


def _fields(cls: type) -> Iterable[str]:
    return vars(cls).get("__dataclass_fields__", ())


def _is_made(value: Any) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    made = inspect.unwrap(value)  # __repr__ is wrapped
    return isinstance(made, types.FunctionType) and made.__code__.co_filename == "<string>"


def _made(cls: type) -> set[str]:
    """Methods such as ``__eq__`` that ``dataclass`` has made, which read the fields of their own
    class, whose names others may have too.
    """
    own = vars(cls).items() if _fields(cls) else ()
    made = {name for name, x in own if _is_made(x)}
    return made - _NO_CODE


def _is_simple(table: Mapping[str, Any], name: str) -> bool:
    return isinstance(table.get(name), SIMPLE)


_DATA = bool | int | float | complex | str | torch.Tensor | np.ndarray | np.generic


def is_holder(kind: type) -> bool:
    """Whether instances have attributes that are the user's."""
    return not is_foreign(kind.__module__) or kind.__module__.startswith(_HOLDERS)


def _same_items(kind: Any, value: Any, expected: tuple[Any, ...]) -> bool:
    return all_same(tuple(kind.__iter__(value)), expected)


def _same_bytes(value: Any, expected: bytes) -> bool:
    return bytes(value) == expected


def dict_of(value: Any) -> dict[str, Any] | None:
    """Its attributes, read without calling the user's ``__getattr__``."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def _slot(member: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:  # not assigned yet
        return _MISSING


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _module_of(function: types.FunctionType) -> str | None:
    """Where it was defined; ``__module__`` of a wrapper is that of what it wraps."""
    return function.__globals__.get("__name__")


def _is_foreign_class(value: Any) -> bool:
    return isinstance(value, type) and is_foreign(value.__module__)
