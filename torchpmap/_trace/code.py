"""What code mentions, reads and stores."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torchpmap._base.sources import is_extension
from torchpmap._trace.watched import Place, attribute_of

_STORES_NAME = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_STORES_ATTRIBUTE = {"STORE_ATTR", "DELETE_ATTR"}
_STORES_ITEM = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_PLACING = {"CACHE", "PRECALL", "COPY", "SWAP"}
"""Instructions that only make or move values."""
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GL")
_ANY_NAME = {"exec", "globals"}
ANY_ATTRIBUTE = {"setattr", "delattr", "__setattr__", "__dict__", "vars"}
"""Names in code that may store to any attribute."""
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
    names: set[str]
    """Of globals and closures that it stores to."""
    attributes: set[str]
    """That it stores to."""
    mentioned: set[str]
    """What may be attributes among its names and texts."""
    unread: set[str]
    """Those of them that it only stores to or calls, as ``step`` in ``optimizer.step()``."""
    stores_items: bool
    reads_any: bool
    """Whether it may read attributes whose names are not in it."""


@functools.lru_cache(maxsize=4096)
def code_facts(code: types.CodeType) -> Code:
    steps = [x for x in dis.get_instructions(code) if x.opname not in _PLACING]
    inner = [code_facts(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    texts = [x for x in code.co_consts if isinstance(x, str)]

    def stored(kinds: set[str], of_inner: Iterable[set[str]]) -> set[str]:
        return {x.argval for x in steps if x.opname in kinds}.union(*of_inner)

    read = (x.argval for x in steps if x.opname.startswith(_LOADS))
    imports = (x.argval for x in steps if x.opname == "IMPORT_NAME")
    imported = (x for name in imports for x in (name, name.split(".")[0]))
    named = [(x.argval, _is_use(x)) for x in steps if x.opcode in dis.hasname]
    unread = {name for name, is_use in named if is_use}.union(*(x.unread for x in inner))
    mentioned = {name for name, is_use in named if not is_use}
    # getattr(x, "name"), attrgetter("name.other")
    mentioned.update(*(text.split(".") for text in texts), *(x.mentioned - x.unread for x in inner))
    stores_items = any(x.stores_items for x in inner)
    for before, x in itertools.pairwise(steps):
        if x.opname == "MATCH_CLASS":
            mentioned.update(before.argval)
        is_update = before.opname == "BINARY_OP" and before.argrepr.endswith("=")
        stores_items |= is_update and x.opname in _STORES_NAME | _STORES_ATTRIBUTE
        stores_items |= x.opname in _STORES_ITEM
    mentioned |= {method for name, method in _CALLING.items() if name in mentioned | unread}
    return Code(
        globals=tuple(dict.fromkeys(itertools.chain(read, *(x.globals for x in inner)))),
        modules=tuple(dict.fromkeys(itertools.chain(imported, *(x.modules for x in inner)))),
        names=stored(_STORES_NAME, (x.names for x in inner)),
        attributes=stored(_STORES_ATTRIBUTE, (x.attributes for x in inner)),
        mentioned=mentioned | unread,
        unread=unread - mentioned,
        stores_items=stores_items,
        reads_any=_reads_any(steps)
        or any(map(_FORMAT.search, texts))
        or any(x.reads_any for x in inner),
    )


def _reads_any(steps: Sequence[dis.Instruction]) -> bool:
    for place, each in enumerate(steps):
        name = each.argval if each.opcode in dis.hasname else None
        if name in _BUILTINS:  # ``model.eval()`` is none
            is_any = each.opname.startswith(_LOADS)
            is_any &= not (name in _ASKING and _is_constant(steps[place + 1 :]))
        elif name in _FORMATTING:  # a text in the code is looked at itself
            is_any = steps[place - 1].opname != "LOAD_CONST"
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


def _is_use(step: dis.Instruction) -> bool:
    """Whether it only stores to an attribute, or calls it."""
    return step.opname in _STORES_ATTRIBUTE or _is_method(step)


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
    return is_extension(attribute_of(value, "__module__"))


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
        if self.has_hooks or not ANY_ATTRIBUTE.isdisjoint(mentioned):
            return True
        return bool(self.attributes) if place.name is None else place.name in self.attributes
