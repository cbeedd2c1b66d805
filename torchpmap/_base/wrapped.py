"""torch's functions that are written in Python, run so that a function mode sees what they call.

torch hands a call of ``F.gumbel_softmax`` to the active modes.  A mode that then calls the function
is off meanwhile, so the random numbers that the function draws would pass it by.  With the mode on,
the function would hand itself to the mode again, for ever.  ``without_asking`` gives a copy of the
function that does not ask for modes, to be called while the mode is on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import CellType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

_QUESTION = "has_torch_function"
"""How the names begin by which torch's functions ask whether a mode, or a class, wants the call."""

_copies: WeakKeyDictionary[Any, Callable[..., Any] | None] = WeakKeyDictionary()


def without_asking(func: Any, names: Collection[str]) -> Callable[..., Any] | None:
    """A copy of a function of torch that does not ask for modes; None if it is not written in
    Python, or uses none of ``names``, also not through other functions of torch.

    It is for arguments whose classes want no calls: it does not ask for these either.
    """
    if not isinstance(func, FunctionType):
        return None
    if func not in _copies:
        is_found = any(map(_asks, _parts(func))) and _uses(func, names, set())
        _copies[func] = _copy(func) if is_found else None
    return _copies[func]


def _parts(func: FunctionType) -> list[FunctionType]:
    """The function, and those that it is a wrapper of."""
    cells = [cell.cell_contents for cell in func.__closure__ or ()]
    return [func, *(value for value in cells if isinstance(value, FunctionType))]


def _asks(func: FunctionType) -> bool:
    return any(name.startswith(_QUESTION) for name in func.__code__.co_names)


def _uses(func: FunctionType, names: Collection[str], seen: set[FunctionType]) -> bool:
    """Whether the code names one of ``names``, or a function of torch whose code does."""
    seen.add(func)
    mentioned = func.__code__.co_names
    others = [*_parts(func)[1:], *(func.__globals__.get(name) for name in mentioned)]
    return not set(names).isdisjoint(mentioned) or any(
        isinstance(other, FunctionType)
        and str(other.__module__).startswith("torch.")
        and other not in seen
        and _uses(other, names, seen)
        for other in others
    )


def _copy(func: FunctionType) -> FunctionType:
    closure = [
        CellType(_copy(value)) if isinstance(value := cell.cell_contents, FunctionType) else cell
        for cell in func.__closure__ or ()
    ]
    copied = FunctionType(
        func.__code__, _Globals(func), func.__name__, func.__defaults__, tuple(closure)
    )
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


class _Globals(dict[str, Any]):
    """The names of a function's module, but those that ask for modes."""

    def __init__(self, func: FunctionType) -> None:
        super().__init__()
        self._module = func.__globals__

    def __missing__(self, name: str) -> Any:
        if name.startswith(_QUESTION):
            return _no
        found = self._module[name]
        return _Module(found) if found is torch or found is torch.overrides else found


class _Module:
    """``torch`` or ``torch.overrides``, but for the functions that ask for modes."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_QUESTION):
            return _no
        found = getattr(self._module, name)
        return _Module(found) if found is torch.overrides else found


def _no(*arguments: Any) -> bool:
    return False
