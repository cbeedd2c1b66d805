"""What a function reads from outside itself, watched so that a traced graph is never stale.

JAX bakes closed-over values into the program at the first call and never looks again.  Here the
cells, globals, defaults and attributes that the function's code can reach are noted by identity;
when one is rebound, the function is traced again. (In-place changes of tensors need no new trace
and are noticed separately, by ``Captured``; so are changes of a property that the function read.)

It follows plain functions, partials, methods, modules (``torch.nn``), instances, classes, and
containers such as lists, dicts and sets.  Of a class it follows the methods that the code names,
and those that Python and torch call by themselves.  numpy arrays have no version counter, so their
contents are compared.
"""

from __future__ import annotations

import array
import dis
import functools
import inspect
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torchpmap._base.contents import ArrayContents
from torchpmap._base.errors import warn
from torchpmap._trace.watched import Watched, all_same

_MAX_FOLLOWED = 20_000
_MISSING = object()
_FOREIGN = ("torch", "torchpmap", "numpy", "builtins", *sys.stdlib_module_names)
"""Packages whose functions and instances do not change under a user's feet."""
_HOLDERS = ("types", "argparse", "collections", "torch.optim", "torch.distributions")
"""Except for these: their instances hold nothing but a user's values."""
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, frozenset, deque)
_SIMPLE = bool | int | float | complex | str | bytes | None
_IMPLIED = {"forward", "backward", "setup_context", "vmap", "jvp"}
"""Methods that torch calls, so the user's code may not mention them."""
_AT_CREATION = {"__init__", "__new__", "__post_init__"}
_NO_CODE = _AT_CREATION | {"__module__", "__dict__", "__doc__", "__weakref__", "__slots__"}
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")


class Environment:
    """The outside references of one function."""

    def __init__(self, fun: Callable[..., Any], *, quiet: bool = False) -> None:
        """``quiet``: another ``Environment`` of this function warns about unwatched objects."""
        self._fun: Any = fun
        self._watched: Watched | None = None
        self._code: tuple[Any, Any, Any] | None = None
        """The snapshot of a function that closes over nothing."""
        self._tensors: list[torch.Tensor] = []
        self._unwatched: str | None = None
        self._has_warned = quiet

    def refresh(self) -> None:
        """Note the present state."""
        walk = _Walk()
        walk.run(self._fun)
        self._watched = walk.watched
        self._tensors = walk.tensors
        self._unwatched = walk.unwatched
        is_alone = isinstance(self._fun, types.FunctionType) and len(walk.watched) == 1
        self._code = _code_of(self._fun) if is_alone else None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among them."""
        return self._tensors

    def change(self) -> str:
        """What has changed since it was noted, as logs say it."""
        origin = "the function itself"
        if self._code is None and self._watched is not None:
            origin = self._watched.changed_origin()
        return f"what it reads from outside has changed ({origin})"

    def changed(self) -> bool:
        """Whether a reference leads to something else than when it was noted."""
        if self._code is not None:
            fun, (code, defaults, keywords) = self._fun, self._code
            return (
                fun.__code__ is not code
                or fun.__defaults__ is not defaults
                or fun.__kwdefaults__ is not keywords
            )
        if self._watched is None or not self._watched.same():
            return True
        if self._unwatched is not None and not self._has_warned:
            self._has_warned = True
            warn(
                f"{getattr(self._fun, '__name__', self._fun)} closes over {self._unwatched}, which "
                f"leads to more than {_MAX_FOLLOWED} objects. Changes of the objects beyond these "
                "are not noticed: the compiled function keeps using the old ones. Pass what "
                "changes as an argument."
            )
        return False


def parameters(fun: Callable[..., Any]) -> list[torch.Tensor]:
    """The leaf tensors that a function can reach and that require grad."""
    environment = Environment(fun)
    environment.refresh()
    leaves = [tensor for tensor in environment.tensors() if tensor.is_leaf and tensor.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


class _Walk:
    """Everything that a function can reach, nearest first."""

    def __init__(self) -> None:
        self.watched = Watched()
        self.tensors: list[torch.Tensor] = []
        self.unwatched: str | None = None
        """The value that the function closes over and that leads to too many objects."""
        self._seen: dict[int, Any] = {}
        """By id; kept, so that no other value gets the id."""
        self._queue: deque[tuple[Any, str]] = deque()
        self._names: set[str] = set()
        """What the code that was met mentions."""
        self._owners: list[tuple[Mapping[str, Any], set[str], set[str], str]] = []
        """(attributes by name, names that are always watched, names watched by now, origin); any
        other attribute is watched when the code mentions its name."""

    def run(self, value: Any) -> None:
        self._add(value, "the function itself")
        num_followed = 0
        while self._queue:
            while self._queue:
                value, origin = self._queue.popleft()
                num_followed += 1
                if num_followed > _MAX_FOLLOWED:
                    self.unwatched = origin
                    return
                self._follow(value, origin)
            self._mentioned()

    def _mentioned(self) -> None:
        """Watch the attributes that the code met so far mentions."""
        for table, implied, done, origin in self._owners:
            for name in [name for name in list(table) if name in self._names or name in implied]:
                if name not in done:
                    done.add(name)
                    self._watch(functools.partial(table.get, name, _MISSING), origin)

    def _add(self, value: Any, origin: str) -> None:
        if not isinstance(value, _SIMPLE) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append((value, origin))

    def _watch(self, read: Callable[[], Any], origin: str) -> None:
        value = read()
        self.watched.add_read(read, value, origin)
        self._add(value, origin)

    def _view(self, view: Any, origin: str) -> None:
        """Watch items, their number and their order."""
        self.watched.add_view(view, origin)
        for item in list(view):  # other threads may add to it
            self._add(item, origin)

    def _follow(self, value: Any, origin: str) -> None:
        if isinstance(value, types.FunctionType):
            if not _is_foreign(value.__module__):
                self._function(value, origin)
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            self._add(value.__func__, origin)
            self._add(getattr(value, "__self__", None), origin)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self._add(part, origin)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part, origin)
        elif isinstance(value, torch.nn.Module):
            self._module(value, origin)
        elif isinstance(value, type):
            self._class(value, origin)
        elif isinstance(value, types.ModuleType):
            self._attributes(value, self._names, origin)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, origin)
        elif isinstance(value, np.ndarray):
            self.watched.add_read(ArrayContents(value).same, True, origin)
            for item in value.ravel().tolist() if value.dtype == object else ():
                self._add(item, origin)
        elif isinstance(value, bytearray | array.array | memoryview):
            same = functools.partial(_same_bytes, value, bytes(value))
            self.watched.add_read(same, True, origin)
        elif isinstance(value, weakref.ReferenceType):
            self._watch(value, origin)
        else:
            self._holder(value, origin)

    def _holder(self, value: Any, origin: str) -> None:
        """Anything that has items or attributes."""
        kind = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
        if kind in (dict, OrderedDict):
            self._view(kind.keys(value), origin)
            self._view(kind.values(value), origin)
        elif isinstance(value, types.MappingProxyType):
            self._view(value.keys(), origin)
            self._view(value.values(), origin)
        elif isinstance(value, tuple):  # always holds the same
            for item in tuple.__iter__(value):
                self._add(item, origin)
        elif kind is not None and type(value).__iter__ is kind.__iter__:
            self._view(value, origin)
        elif kind is not None:
            items = tuple(kind.__iter__(value))
            self.watched.add_read(functools.partial(_same_items, kind, value, items), True, origin)
            for item in items:
                self._add(item, origin)
        module = type(value).__module__
        if not _is_foreign(module) or module.startswith(_HOLDERS):
            self._instance(value, origin)
        else:
            wrapped = inspect.getattr_static(value, "__wrapped__", None)
            self._add(value.__wrapped__ if isinstance(wrapped, property) else wrapped, origin)

    def _instance(self, value: Any, origin: str) -> None:
        table = _dict_of(value)
        if table is not None:
            self._view(table.keys(), origin)
            self._view(table.values(), origin)
        for cls in type(value).__mro__:
            for member in vars(cls).values():
                if isinstance(member, types.MemberDescriptorType) and not _is_foreign(
                    cls.__module__
                ):
                    self._watch(functools.partial(_slot, member, value), origin)
        self._add(type(value), origin)

    def _class(self, cls: type, origin: str) -> None:
        for base in cls.__mro__:
            if _is_foreign(base.__module__):
                continue
            table = vars(base)
            implied = {name for name in table if name.startswith("__")} - _NO_CODE
            implied |= _IMPLIED
            implied.update(name for name, value in table.items() if isinstance(value, _DATA))
            self.watched.add_size(table, origin)
            self._owners.append((table, implied, set(), origin))

    def _function(self, function: types.FunctionType, origin: str) -> None:
        is_outermost = not self.watched.reads
        code, defaults, keywords = _code_of(function)
        same = functools.partial(_same_function, function, code, defaults, keywords)
        self.watched.add_read(same, True, origin)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._watch(functools.partial(_cell, cell), repr(name) if is_outermost else origin)
        self._add(defaults, origin)
        self._add(keywords, origin)
        names = set(_names(code))
        self._names |= names
        self._owners.append((vars(function), {"__wrapped__"}, set(), origin))
        known = function.__globals__
        if _is_foreign(known.get("__name__")):  # a wrapper of torch's around a user's function
            return
        read_names, imported = _globals(code)
        for name in imported:
            self._attributes(sys.modules.get(name), names, origin)
        for name in read_names:
            if name in known:
                value = known[name]
                if isinstance(value, types.ModuleType) or _is_foreign_class(value):
                    self._attributes(value, names, origin)
                else:
                    read = functools.partial(known.get, name, _MISSING)
                    self._watch(read, repr(name) if is_outermost else origin)

    def _attributes(self, module: Any, names: set[str], origin: str) -> None:
        """Watch the attributes of a module that are in ``names``."""
        if not isinstance(module, types.ModuleType) or _is_foreign(module.__name__):
            return
        self._seen[id(module)] = module
        table = vars(module)
        for name in sorted(name for name in names if name in table):
            value = table[name]
            if isinstance(value, types.ModuleType):
                if id(value) not in self._seen:
                    self._attributes(value, names, origin)
            elif not _is_foreign_class(value):
                self._watch(functools.partial(table.get, name, _MISSING), origin)

    def _module(self, module: torch.nn.Module, origin: str) -> None:
        state = vars(module)
        self.watched.add_size(state, origin)
        for name in list(state):
            if name not in _OF_MODULES or name == "training":
                self._watch(functools.partial(state.get, name, _MISSING), origin)
        for name in _TABLES:
            table = state.get(name)  # missing before Module.__init__
            if table:
                self._view(table.values(), origin)
                self._view(table.keys(), origin)
            elif table is not None:
                self.watched.add_size(table, origin)
        self._add(type(module), origin)

    def _tensor(self, tensor: torch.Tensor, origin: str) -> None:
        self.tensors.append(tensor)
        table = _dict_of(tensor)
        if table:
            self._owners.append((table, set(), set(), origin))
        if not _is_foreign(type(tensor).__module__):
            self._add(type(tensor), origin)


_DATA = bool | int | float | complex | str | torch.Tensor | np.ndarray | np.generic


def _names(code: types.CodeType) -> Iterable[str]:
    """What may be attributes among the names and texts of the code and of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):  # getattr(x, "name")
            yield constant


@functools.lru_cache(maxsize=4096)
def _globals(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(globals, modules) that the code, or a function inside it, reads or imports.

    ``co_names`` would not do: an attribute may have the name of a global that changes all the time,
    such as a loop's ``i``.
    """
    found: dict[str, None] = {}
    imported: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            imported |= dict.fromkeys((instruction.argval, instruction.argval.split(".")[0]))
        elif instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GL")):
            found[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, inner_imported = _globals(constant)
            found |= dict.fromkeys(inner)
            imported |= dict.fromkeys(inner_imported)
    return tuple(found), tuple(imported)


def _same_items(kind: Any, value: Any, expected: tuple[Any, ...]) -> bool:
    return all_same(tuple(kind.__iter__(value)), expected)


def _same_bytes(value: Any, expected: bytes) -> bool:
    return bytes(value) == expected


def _code_of(function: types.FunctionType) -> tuple[types.CodeType, Any, Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _same_function(
    function: types.FunctionType, code: types.CodeType, defaults: Any, keywords: Any
) -> bool:
    return (
        function.__code__ is code
        and function.__defaults__ is defaults
        and function.__kwdefaults__ is keywords
    )


def _dict_of(value: Any) -> dict[str, Any] | None:
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


def _is_foreign_class(value: Any) -> bool:
    return isinstance(value, type) and _is_foreign(value.__module__)


def _is_foreign(module: str | None) -> bool:
    return module is not None and module != "__main__" and module.split(".")[0] in _FOREIGN
