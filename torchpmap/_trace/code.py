"""What code mentions, reads and stores."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchpmap._base.sources import is_extension
from torchpmap._trace.watched import Place

_STORES_NAME = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_STORES_ATTRIBUTE = {"STORE_ATTR", "DELETE_ATTR"}
_STORES_ITEM = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GL")
_ANY_NAME = {"exec", "globals"}
_ANY_ATTRIBUTE = {"setattr", "delattr", "__setattr__", "__dict__", "vars"}
_ASKING = {"getattr", "hasattr"}
_FORMATTING = {"format", "format_map"}
_BUILTINS = _ASKING | {"setattr", "delattr", "vars", "dir", "eval", "exec"}
_READING_ANY = {
    *_BUILTINS,
    *_FORMATTING,
    *("attrgetter", "__dict__", "__getattribute__", "__getstate__"),
    *("__reduce__", "__reduce_ex__"),
}
_FORMAT = re.compile(r"\{\w*[.\[]\w")
"""A text for ``str.format`` that reads attributes."""
_READERS = {"builtins", "copy", "dataclasses", "inspect", "pickle"}
_BUILT_IN = (
    *(type, types.BuiltinFunctionType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType),
)
_CALLING = {"closing": "close", "aclosing": "aclose"}
"""Functions of Python that call a method of what they are given."""
_CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "fill", "insert"),
    *("move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault"),
    *("sort", "symmetric_difference_update", "update", "next", "shuffle"),
}
"""Methods and functions that change a container."""


class Code(NamedTuple):
    """Of a function, with those inside it."""

    globals: tuple[str, ...]
    """That it reads.  ``co_names`` would not do: an attribute may have the name of a global that
    changes all the time, such as a loop's ``i``.
    """
    modules: tuple[str, ...]
    """That it imports."""
    names: tuple[str, ...]
    """Of globals and closures that it stores to."""
    attributes: tuple[str, ...]
    """That it stores to."""
    mentioned: tuple[str, ...]
    """What may be attributes among its names and texts."""
    unread: tuple[str, ...]
    """Those of them that it only stores to or calls, as ``step`` in ``optimizer.step()``."""
    stores_items: bool
    reads_any: bool
    """Whether it may read attributes whose names are not in it."""


@functools.lru_cache(maxsize=4096)
def code_facts(code: types.CodeType) -> Code:
    read: dict[str, None] = {}
    imported: dict[str, None] = {}
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    mentioned: dict[str, None] = {}
    unread: dict[str, None] = {}
    stores_items, before = False, ""
    last: Any = None
    instructions = list(dis.get_instructions(code))
    reads_any = _reads_any(instructions)
    for instruction in instructions:
        kind = instruction.opname
        if kind in _STORES_ATTRIBUTE or _is_method(instruction):
            unread[instruction.argval] = None
        elif instruction.opcode in dis.hasname:
            mentioned[instruction.argval] = None
        if kind == "MATCH_CLASS":
            mentioned |= dict.fromkeys(last)
        last = instruction.argval
        if kind == "IMPORT_NAME":
            imported |= dict.fromkeys((instruction.argval, instruction.argval.split(".")[0]))
        elif kind.startswith(_LOADS):
            read[instruction.argval] = None
        elif kind in _STORES_NAME:
            names[instruction.argval] = None
            stores_items |= before.endswith("=")
        elif kind in _STORES_ATTRIBUTE:
            attributes[instruction.argval] = None
            stores_items |= before.endswith("=")
        elif kind in _STORES_ITEM:
            stores_items = True
        if kind not in ("CACHE", "COPY", "SWAP"):
            before = instruction.argrepr if kind == "BINARY_OP" else ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = code_facts(constant)
            read |= dict.fromkeys(inner.globals)
            imported |= dict.fromkeys(inner.modules)
            names |= dict.fromkeys(inner.names)
            attributes |= dict.fromkeys(inner.attributes)
            mentioned |= dict.fromkeys(name for name in inner.mentioned if name not in inner.unread)
            unread |= dict.fromkeys(inner.unread)
            stores_items |= inner.stores_items
            reads_any |= inner.reads_any
        elif isinstance(constant, str):  # getattr(x, "name"), attrgetter("name.other")
            mentioned |= dict.fromkeys(constant.split("."))
            reads_any |= _FORMAT.search(constant) is not None
    mentioned |= {method: None for name, method in _CALLING.items() if name in mentioned | unread}
    unread_only = tuple(name for name in unread if name not in mentioned)
    facts = tuple(read), tuple(imported), tuple(names), tuple(attributes)
    return Code(*facts, (*mentioned, *unread_only), unread_only, stores_items, reads_any)


def _reads_any(instructions: Sequence[dis.Instruction]) -> bool:
    kinds = [x for x in instructions if x.opname not in ("CACHE", "PRECALL")]
    for place, each in enumerate(kinds):
        name = each.argval if each.opcode in dis.hasname else None
        if name in _BUILTINS:  # ``model.eval()`` is none
            is_any = each.opname.startswith(_LOADS)
            is_any &= not (name in _ASKING and _is_constant(kinds[place + 1 :]))
        elif name in _FORMATTING:  # a text in the code is looked at itself
            is_any = kinds[place - 1].opname != "LOAD_CONST"
        else:
            is_any = name in _READING_ANY or each.opname == "MATCH_CLASS"
        if is_any:
            return True
    return False


def _is_constant(arguments: Sequence[dis.Instruction]) -> bool:
    """Whether the second argument of a call is a text: ``getattr(self.model, "rate", None)``."""
    pushed: list[Any] = []
    for each in arguments:
        if each.opname == "CALL":
            return each.arg == len(pushed) in (2, 3) and isinstance(pushed[1], str)
        if each.opname == "LOAD_ATTR" and not _is_method(each):
            pushed[-1:] = [None]
        elif each.opname in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CONST"):
            pushed.append(each.argval if each.opname == "LOAD_CONST" else None)
        else:
            return False
    return False


def _is_method(load: dis.Instruction) -> bool:
    """Whether a method is loaded to call it: Python 3.11 has ``LOAD_METHOD`` for that."""
    is_flag = sys.version_info >= (3, 12) and load.opname == "LOAD_ATTR"
    return load.opname == "LOAD_METHOD" or (is_flag and bool((load.arg or 0) & 1))


def is_reader(value: Any) -> bool:
    """Whether a module, or a function that has any name in the code, reads attributes whose names
    are not in the code.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__ in _READERS
    if isinstance(value, types.FunctionType):
        return value.__module__ in _READERS
    if isinstance(value, _BUILT_IN) and value.__name__ in _READING_ANY:
        return True
    return is_extension(value.__module__ if isinstance(value, type) else _made_in(value))


def names_in(getter: Any) -> set[str]:
    """What is mentioned by an ``attrgetter`` or ``methodcaller``."""
    made, given = getter.__reduce__()
    texts = [x for x in (*getattr(made, "args", ()), *given) if isinstance(x, str)]
    return set(".".join(texts).split("."))


def made_by_dataclass(cls: type) -> tuple[set[str], set[str]]:
    """Names of methods such as ``__eq__`` that ``dataclass`` has made, and of the fields."""
    fields = vars(cls).get("__dataclass_fields__", ())
    made = {name for name, x in vars(cls).items() if fields and _is_made(x)}
    return made, set(fields)


def _is_made(value: Any) -> bool:
    made = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
    return isinstance(made, types.FunctionType) and made.__code__.co_filename == "<string>"


def _made_in(value: Any) -> Any:
    """Its module, read without calling the user's ``__getattr__``."""
    try:
        return object.__getattribute__(value, "__module__")
    except AttributeError:
        return None


class Stores:
    """What the code that was met stores to: what a trace of it may change by itself."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.items = False
        self.has_hooks = False
        """Whether torch calls hooks, which may assign any attribute of modules."""

    def add(self, code: types.CodeType) -> None:
        found = code_facts(code)
        self.names.update(found.names)
        self.attributes.update(found.attributes)
        self.items |= found.stores_items

    def explain(self, place: Place, mentioned: set[str]) -> bool:
        """Whether the code may have changed what is there; ``mentioned``: all names in it."""
        if place.kind == "name":
            return place.name in self.names or not _ANY_NAME.isdisjoint(mentioned)
        if place.kind == "items":
            return self.items or not _CHANGING.isdisjoint(mentioned)
        if self.has_hooks or not _ANY_ATTRIBUTE.isdisjoint(mentioned):
            return True
        return bool(self.attributes) if place.name is None else place.name in self.attributes
