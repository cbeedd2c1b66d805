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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Generic, NamedTuple, Protocol, get_args

import numpy as np
import torch

from torchpmap._base.contents import ArrayContents
from torchpmap._base.pytree import registration
from torchpmap._base.sources import is_extension, is_foreign
from torchpmap._base.torch_internals import HOOKS_OF_ALL_MODULES, hooks_of, torch_function_off
from torchpmap._trace.code import Stores, code_facts, is_reader, made_by_dataclass, names_in
from torchpmap._trace.watched import (
    MISSING,
    OF_A_FUNCTION,
    Place,
    Watched,
    answer_of,
    attribute_of,
    cell_contents,
    holds_bytes,
    holds_items,
    mro_of,
    num_registered,
    referent,
)

MAX_FOLLOWED = 20_000
_HOLDERS = (
    *("types", "typing", "argparse", "collections", "functools", "queue", "weakref", "_weakrefset"),
    *("torch.optim", "torch.distributions"),
)
"""Foreign modules whose instances hold nothing but a user's values."""
_MAPPINGS: tuple[Any, ...] = (OrderedDict, dict, types.MappingProxyType)
_CONTAINERS = (*_MAPPINGS, list, set, frozenset, deque, tuple)
SIMPLE = bool | int | float | complex | str | bytes | None
_NO_CALL = set(get_args(SIMPLE))
"""Types of what cannot be called, as an ``IntEnum`` can."""
_AT_CREATION = {"__init__", "__new__", "__post_init__"}
"""Methods that run when code calls a class; what they only store to is the new instance."""
_AT_COPY = {
    *("__copy__", "__deepcopy__", "__replace__", "__getstate__", "__setstate__"),
    *("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"),
}
"""Methods that run when code copies or pickles an instance."""
_NO_CODE = {"__module__", "__dict__", "__doc__", "__weakref__", "__slots__"}
_OWN_CLASS = {"type", "__class__"}
"""Names in code that may call the class of an instance."""
_OF_MODULES = vars(torch.nn.Module()).keys() - {"training"}
_OPEN = (object, abc.ABC, Generic, Protocol, torch.nn.Module)
"""Foreign classes whose own code reads no attributes of a user's."""
_ASKING = {"hasattr", "getattr", "AttributeError", "Exception"}
"""Names in code that may ask a module for what it lacks."""
_SCALING = {"_enabled", "_growth_factor", "_backoff_factor", "_growth_interval"}
"""Settings of a ``GradScaler`` that its own code reads."""
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *_MODULE_HOOKS)
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
        """Those of them that it does not only call as methods, or store to in a new instance."""
        self._reads_any = False
        """Whether it may read attributes of instances whose names it does not mention."""
        self._kinds: dict[int, tuple[type, str]] = {}
        """By id: classes of instances, with their origins."""
        self._called: set[int] = set()
        """Ids of classes that code may call."""
        self._seen: dict[int, Any] = {id(MISSING): MISSING}
        """By id; kept, so that no other value gets the id."""
        self._queue: deque[tuple[Any, str]] = deque()
        self._owners: list[_Owner] = []
        self._looked: tuple[Any, int] = None, 0
        """For how many names the code was looked through, and at how many owners."""

    def run(self, fun: Any, given: tuple[Any, ...] = ()) -> None:
        """Watch what ``fun`` reaches; if it is given values, only what these lead to besides."""
        self._run(fun, "the function itself")
        if given:
            self.watched, self.tensors, self.origins = Watched(), [], []
            for value in given:
                self._run(value, "a static argument")
        self._never_called()
        self.watched.seal()

    def objects(self) -> list[Any]:
        """All that was met."""
        return list(self._seen.values())

    def _run(self, value: Any, origin: str) -> None:
        self._add(value, origin)
        self._mentioned()  # a class that was met as that of an instance is one that code may call
        num_followed = 0
        while self._queue:
            value, origin = self._queue.popleft()
            num_followed += 1
            if num_followed > MAX_FOLLOWED:
                self.unwatched = origin
                return
            self._follow(value, origin)
            if not self._queue:
                self._mentioned()

    def _mentioned(self) -> None:
        """Watch the attributes that the code met so far mentions."""
        for kind, origin in () if _OWN_CLASS.isdisjoint(self.names) else self._kinds.values():
            self._call(kind, origin)
        known, begin = (len(self.names), len(self._read), self._reads_any), 0
        if self._looked[0] == known:
            begin = self._looked[1]
        # others are appended meanwhile
        for table, implied, done, origin, is_instance in islice(self._owners, begin, None):
            for name in [name for name in list(table) if name not in done]:
                is_read = name in self._read or name in implied
                is_read |= self._reads_any and (is_instance or name in _AT_COPY)
                if not is_read and name in self.names:
                    is_read = not (is_instance and type(table.get(name)) in _NO_CALL)
                if is_read:
                    done.add(name)
                    self._watch_attribute(table, name, origin)
        self._looked = known, len(self._owners)

    def _never_called(self) -> None:
        """Watch that what has the name of a method in the code, such as a number of steps beside
        ``optimizer.step()``, stays so; and that functions get no names, if code may ask for some.
        """
        may_lack = not _ASKING.isdisjoint(self.names)
        for table, _, done, origin, is_instance in self._owners:
            if may_lack and not is_instance:
                self.watched.add_size(table, Place(origin, "attribute"))
            for name in self.names.intersection(table) - done if is_instance else ():
                is_simple = functools.partial(_is_simple, table, name)
                self.watched.add_read(is_simple, Place(origin, "attribute", name))

    def _add(self, value: Any, origin: str) -> None:
        if isinstance(value, type):
            self._call(value, origin)
        self._meet(value, origin)

    def _add_all(self, values: Iterable[Any], origin: str) -> None:
        for value in values:
            self._add(value, origin)

    def _call(self, cls: type, origin: str) -> None:
        """Follow what runs when code calls a class."""
        for base in _users(cls):
            if id(base) not in self._called:
                self._called.add(id(base))
                table = vars(base)
                self._owners.append(_Owner(table, _AT_CREATION, {*table} - _AT_CREATION, origin))

    def _meet(self, value: Any, origin: str) -> None:
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
        self._add_all(tuple(view), place.origin)  # other threads may add to it

    def _entries(self, table: Mapping[Any, Any], place: Place) -> None:
        """Watch a dict, but for what is stored there."""
        if not table:
            self.watched.add_size(table, place)
            return
        kind = table_kind(table)
        self._view(kind.keys(table), place)
        if id(table) not in self._owners_of_stored:
            self._view(kind.values(table), place)
            return
        for name in list(kind.keys(table)):
            self._watch_name(table, name, place)

    def _attributes_of(self, value: Any, origin: str) -> None:
        """Watch the attributes of an instance: their names, and all values or those that code may
        read.
        """
        table = dict_of(value)
        if table is None:
            return
        is_module, is_read_by_name = isinstance(value, torch.nn.Module), is_open(type(value))
        implied = {"training"} if is_module else set()
        if is_read_by_name:
            implied |= _implied(table).union(*map(_compared, type(value).__mro__))
        else:
            implied.update(table)
        is_sized = is_module and not is_read_by_name  # all values are watched: that is quicker
        self.watched.add_attributes(value, table, origin, names=not is_sized)
        if is_sized:
            self.watched.add_size(table, Place(origin, "attribute"))
        done = set(_OF_MODULES) if is_module else set()
        self._owners.append(_Owner(table, implied, done, origin, True))

    def _follow(self, value: Any, origin: str) -> None:
        self._kind(value, origin)
        self._reads_any |= is_reader(value)
        if isinstance(value, weakref.ProxyTypes):
            self._watch(functools.partial(answer_of, referent, value), Place(origin))
        elif isinstance(value, types.FunctionType):
            if not is_foreign(value.__module__) or not is_foreign(_module_of(value)):
                self._function(value, origin)
                return
            for cell in value.__closure__ or ():  # torch.func.vmap(partial(loss, model)) is torch's
                inside = answer_of(cell_contents, cell)
                self._add(inside if callable(inside) else None, origin)
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            self._add_all((value.__func__, getattr(value, "__self__", None)), origin)
            self.names |= {"__class__"} if isinstance(value, classmethod) else set()
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType):
                self._add(value.__self__, origin)
        elif isinstance(value, attrgetter | methodcaller):
            names = names_in(value)
            self.names |= names
            self._read |= names
        elif isinstance(value, property):
            self._add_all((value.fget, value.fset), origin)
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
            self._attributes_of(value, origin)
            self.watched.add_read(ArrayContents(value).same, Place(origin))
            self._add_all(value.ravel().tolist() if value.dtype == object else (), origin)
        elif isinstance(value, bytearray | array.array | memoryview):
            same = functools.partial(holds_bytes, value, bytes(value))
            self.watched.add_read(same, Place(origin))
        elif isinstance(value, weakref.ReferenceType):
            self._watch(value, Place(origin))
        elif isinstance(value, contextvars.ContextVar):
            if (id(value), value.name) not in self._stored:
                self._watch(functools.partial(value.get, MISSING), Place(origin))
        elif isinstance(value, threading.local):
            self._watch(functools.partial(getattr, value, "__dict__"), Place(origin))
        else:
            self._holder(value, origin)

    def _holder(self, value: Any, origin: str) -> None:
        """Anything that has items or attributes."""
        kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
        place = Place(origin)
        if kind in _MAPPINGS:
            self._entries(value, place)
        elif kind is list and id(value) in self._owners_of_stored:
            self.watched.add_size(value, place)
            for number in range(len(value)):
                if (id(value), number) not in self._stored:
                    self._add(self.watched.add(itemgetter(number), value, place), origin)
        elif kind is not None:
            items = tuple(kind.__iter__(value))
            if kind is not tuple and type(value).__iter__ is kind.__iter__:
                self.watched.add_view(value, place)
            elif kind is not tuple:  # a tuple always holds the same
                same = functools.partial(holds_items, kind, value, items)
                self.watched.add_read(same, place)
            self._add_all(items, origin)
        if is_holder(type(value)):
            self._attributes_of(value, origin)
        else:
            wrapped = inspect.getattr_static(value, "__wrapped__", None)
            self._add(value.__wrapped__ if isinstance(wrapped, property) else wrapped, origin)

    def _kind(self, value: Any, origin: str) -> None:
        """Watch the class of an instance, which may be assigned, and what is in its slots."""
        kind = type(value)
        if not is_foreign(kind.__module__) or isinstance(value, torch.nn.Module):
            self.watched.add(type, value, Place(origin, "attribute", "__class__"))
            self._kinds[id(kind)] = kind, origin
            self._meet(kind, origin)
        for name, member in slots_of(value):
            if (id(value), name) not in self._stored:
                read = functools.partial(answer_of, member.__get__, value)
                self._watch(read, Place(origin, "attribute", name))

    def _class(self, cls: type, origin: str) -> None:
        known = registration(cls)
        if known is not None:
            self._add_all((known.flatten_fn, known.unflatten_fn), origin)
        users = _users(cls)
        if users:
            self.watched.add(mro_of, cls, Place(origin, "attribute", "__bases__"))
            if isinstance(cls, abc.ABCMeta):
                self.watched.add(num_registered, cls, Place(origin, "attribute", "register"))
        # what a foreign class has a method for, its own code may call
        foreign = {name for base in cls.__mro__ if base not in users for name in vars(base)}
        for base in users:
            table = vars(base)
            implied = (_implied(table) | foreign) - _AT_CREATION - _AT_COPY - _NO_CODE
            implied -= made_by_dataclass(base)[0]
            implied.update(name for name, value in table.items() if isinstance(value, _DATA))
            self.watched.add_size(table, Place(origin, "attribute"))
            self._owners.append(_Owner(table, implied, set(), origin))

    def _function(self, function: types.FunctionType, origin: str) -> None:
        is_outermost = not len(self.watched)
        place = Place(origin, "attribute", "__code__")
        code, defaults, keywords = (self.watched.add(ask, function, place) for ask in OF_A_FUNCTION)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            place = Place(repr(name) if is_outermost else origin, "name", name)
            if (id(cell), "cell_contents") in self._stored:
                continue
            follow = self._meet if name == "__class__" else self._add  # of super()
            try:
                follow(self.watched.add(cell_contents, cell, place), place.origin)
            except ValueError:  # not assigned yet
                self._watch(functools.partial(answer_of, cell_contents, cell), place)
        self._add_all((defaults, keywords), origin)
        facts = code_facts(code)
        is_creation = code.co_name in _AT_CREATION  # those of its bases are followed
        names = facts.mentioned - (_AT_CREATION if is_creation else set())
        self._read |= set() if is_creation else facts.attributes
        self.names |= names
        self._read |= names.difference(facts.unread)
        self._reads_any |= facts.reads_any
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
            if isinstance(value, types.ModuleType):
                self.watched.add_name(known, name, place)
                self._attributes(value, names, origin)
            else:
                self._watch_name(known, name, place)

    def _attributes(self, module: Any, names: set[str], origin: str) -> None:
        """Watch the attributes of a module that are in ``names``."""
        self._reads_any |= is_reader(module)
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
            if isinstance(value, types.ModuleType):
                self.watched.add_name(table, name, Place(origin, "attribute", name))
                if id(value) not in self._seen:
                    self._attributes(value, names, origin)
            else:
                self._watch_attribute(table, name, origin)

    def _module(self, module: torch.nn.Module, origin: str) -> None:
        for hooks in HOOKS_OF_ALL_MODULES:
            self._add(hooks, "a hook of all modules")
            self.stores.has_hooks |= bool(hooks)
        self._attributes_of(module, origin)
        for name in _TABLES:
            table = vars(module).get(name)  # missing before Module.__init__
            if table is not None:
                self._entries(table, Place(origin, "attribute"))
                self.stores.has_hooks |= name in _MODULE_HOOKS and bool(table)

    def _tensor(self, tensor: torch.Tensor, origin: str) -> None:
        self.tensors.append(tensor)
        self.origins.append(origin)
        table = dict_of(tensor)
        if table:
            self._owners.append(_Owner(table, set(), set(), origin))
        with torch_function_off():  # one of another trace would raise
            tables = hooks_of(tensor)
        for hooks in filter(None, tables):
            self._entries(hooks, Place(origin, "attribute"))


def is_open(kind: type) -> bool:
    """Whether only code of the user's reads the attributes of instances, by their names."""
    modules = [base.__module__ for base in kind.__mro__ if base not in _OPEN]
    is_unseen = any(is_foreign(module) or is_extension(module) for module in modules)
    return not is_unseen and registration(kind) is None


def _users(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if not is_foreign(base.__module__)]


def _implied(table: Mapping[str, Any]) -> set[str]:
    """What Python or numpy may ask for."""
    return {name for name in table if name.startswith("__")}


def _compared(cls: type) -> set[str]:
    """Fields that ``==``, ``repr`` and the like of a dataclass read."""
    made, fields = made_by_dataclass(cls)
    return fields if made - _AT_CREATION - _AT_COPY else set()


def _is_simple(table: Mapping[str, Any], name: str) -> bool:
    return type(table.get(name)) in _NO_CALL


_DATA = bool | int | float | complex | str | torch.Tensor | np.ndarray | np.generic


def is_holder(kind: type) -> bool:
    """Whether instances have attributes that are the user's."""
    return not is_foreign(kind.__module__) or kind.__module__.startswith(_HOLDERS)


def dict_of(value: Any) -> dict[str, Any] | None:
    """Its attributes, read without calling the user's ``__getattr__``."""
    table = attribute_of(value, "__dict__")
    return table if isinstance(table, dict) else None


def table_kind(table: Mapping[Any, Any]) -> Any:
    """The class whose methods read and write just what a table holds: one of the user's may make
    its entries only when it is asked for them, as transformers' tables do.
    """
    return next(kind for kind in _MAPPINGS if isinstance(table, kind))


def slots_of(value: Any) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """Names, and what reads them; a ``partial`` has such too."""
    for base in filter(is_holder, type(value).__mro__):
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__":
                yield name, member


def _module_of(function: types.FunctionType) -> str | None:
    """Where it was defined; ``__module__`` of a wrapper is that of what it wraps."""
    return function.__globals__.get("__name__")
