"""What a function reads from outside itself, watched so that a traced graph is never stale.

JAX bakes closed-over values into the program at the first call and never looks again.  Here the
cells, globals, defaults and attributes that the function's code can reach are noted by identity;
when one is rebound, the function is traced again. (In-place changes of tensors are noticed
separately, without a new trace.)

It follows plain functions, partials, bound methods, modules (``torch.nn``), instances, classes,
lists, tuples and dicts, a few levels deep.  numpy arrays count no versions: their contents are
compared.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["Environment", "parameters"]

_MAX_DEPTH = 6
_MAX_WATCHED = 20_000
_MISSING = object()
_FOREIGN = ("torch", "torchpmap", "numpy", "builtins", *sys.stdlib_module_names)
"""Packages whose functions and instances do not change under a user's feet."""
_NAMESPACES = ("types", "argparse")
"""But these have instances that hold nothing except a user's values."""


class Environment:
    """The outside references of one function."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self._fun = fun
        self._watched: list[tuple[Callable[[], Any], Any]] | None = None

    def refresh(self) -> None:
        """Note the present state."""
        self._watched = list(_limited(_references(self._fun, _MAX_DEPTH, set())))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among them."""
        return [value for _, value in self._watched or () if isinstance(value, torch.Tensor)]

    def changed(self) -> bool:
        """Whether a reference leads to something else than when it was noted."""
        if not self._watched:
            return self._watched is None
        for read, expected in self._watched:
            now = read()
            if now is not expected and not _same_constant(now, expected):
                return True
        return False


def parameters(fun: Callable[..., Any]) -> list[torch.Tensor]:
    """The leaf tensors that require grad, of those that a function can reach."""
    environment = Environment(fun)
    environment.refresh()
    leaves = [tensor for tensor in environment.tensors() if tensor.is_leaf and tensor.requires_grad]
    return list({id(leaf): leaf for leaf in leaves}.values())


_Reference = tuple[Callable[[], Any], Any]


def _limited(references: Iterator[_Reference]) -> Iterator[_Reference]:
    for number, reference in enumerate(references):
        if number >= _MAX_WATCHED:
            return
        yield reference


def _same_constant(now: Any, expected: Any) -> bool:
    return (
        type(now) is type(expected)
        and isinstance(now, bool | int | float | complex | str | bytes)
        and now == expected
    )


def _references(value: Any, depth: int, seen: set[int]) -> Iterator[_Reference]:
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        if not _is_foreign(value.__module__):
            yield from _function(value, depth, seen)
    elif isinstance(value, types.MethodType):
        yield from _references(value.__func__, depth, seen)
        yield from _references(value.__self__, depth, seen)
    elif isinstance(value, functools.partial):
        yield from _references(value.func, depth, seen)
        for inner in (*value.args, *value.keywords.values()):
            yield from _references(inner, depth - 1, seen)
    elif isinstance(value, torch.nn.Module):
        yield from _module(value, depth, seen)
    elif isinstance(value, np.ndarray):
        yield functools.partial(_contents, value), _contents(value)
    elif isinstance(value, type):
        for cls in value.__mro__:
            if not _is_foreign(cls.__module__):
                yield functools.partial(len, vars(cls)), len(vars(cls))
                yield from _watch_dict(vars(cls), _plain(vars(cls)), depth, seen)
    elif isinstance(value, dict):
        yield functools.partial(len, value), len(value)
        yield from _watch_dict(value, list(value), depth, seen)
    elif isinstance(value, set | frozenset):
        yield functools.partial(_members, value), _members(value)
    elif isinstance(value, list | tuple | deque):
        yield functools.partial(len, value), len(value)
        for position in range(len(value)):
            yield from _watch(functools.partial(_item, value, position), depth, seen)
    elif not isinstance(value, types.ModuleType | torch.Tensor):
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield from _references(wrapped, depth - 1, seen)
        module = type(value).__module__
        if not _is_foreign(module) or module in _NAMESPACES:
            yield from _instance(value, depth, seen)


def _instance(value: Any, depth: int, seen: set[int]) -> Iterator[_Reference]:
    if hasattr(value, "__dict__"):
        yield functools.partial(len, vars(value)), len(vars(value))
        yield from _watch_dict(vars(value), list(vars(value)), depth, seen)
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield from _watch(functools.partial(getattr, value, name, _MISSING), depth, seen)
    yield from _references(type(value), depth - 1, seen)


def _function(function: types.FunctionType, depth: int, seen: set[int]) -> Iterator[_Reference]:
    for cell in function.__closure__ or ():
        yield from _watch(functools.partial(_cell, cell), depth, seen)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _references(default, depth - 1, seen)
    names = set(_names(function.__code__))
    known = function.__globals__
    yield from _watch_dict(known, sorted(name for name in names if name in known), depth, seen)
    for name in sorted(names):
        module = known.get(name)
        if isinstance(module, types.ModuleType) and not _is_foreign(module.__name__):
            attributes = [name for name in sorted(names) if name in vars(module)]
            yield from _watch_dict(vars(module), attributes, depth - 1, seen)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield from _references(wrapped, depth, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that the code, or a function inside it, mentions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _module(module: torch.nn.Module, depth: int, seen: set[int]) -> Iterator[_Reference]:
    for inner in module.modules():
        seen.add(id(inner))
        for table in _tables(inner):
            yield functools.partial(len, table), len(table)
            for name in table:
                yield functools.partial(table.get, name, _MISSING), table[name]
        state = vars(inner)
        yield functools.partial(len, state), len(state)
        yield from _watch_dict(state, _plain(state), depth, seen)
        yield from _references(type(inner), depth - 1, seen)


def _tables(module: torch.nn.Module) -> tuple[Mapping[Any, Any], ...]:
    members = module._parameters, module._buffers, module._modules
    return *members, module._forward_pre_hooks, module._forward_hooks


def _plain(table: Mapping[str, Any]) -> list[str]:
    """Names of the values that are data, not code."""
    data = bool | int | float | complex | str | torch.Tensor | np.ndarray | np.generic
    return [name for name, value in list(table.items()) if isinstance(value, data)]


def _members(value: set[Any] | frozenset[Any]) -> int:
    return hash(frozenset(value))


def _contents(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.hasobject:
        return b""
    return hashlib.blake2b(array.tobytes()).digest()


def _watch_dict(
    table: Mapping[Any, Any], names: list[Any], depth: int, seen: set[int]
) -> Iterator[_Reference]:
    for name in names:
        yield from _watch(functools.partial(table.get, name, _MISSING), depth, seen)


def _watch(read: Callable[[], Any], depth: int, seen: set[int]) -> Iterator[_Reference]:
    value = read()
    if isinstance(value, types.ModuleType) or (
        isinstance(value, type) and _is_foreign(value.__module__)
    ):
        return
    yield read, value
    yield from _references(value, depth - 1, seen)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _item(sequence: Any, position: int) -> Any:
    return sequence[position] if position < len(sequence) else _MISSING


def _is_foreign(module: str | None) -> bool:
    return module is not None and module != "__main__" and module.split(".")[0] in _FOREIGN
