"""Functions of other modules that are replaced for a while, in all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

_NEVER = object()


class Replacement(NamedTuple):
    """``make`` takes what ``module`` has as ``name``, and returns what takes its place; None stands
    for a name that the module lacks, as it has it of Python.
    """

    module: Any
    name: str
    make: Callable[[Any], Any]


class Replaced:
    """While it is entered, by any thread, attributes of modules are replaced.

    Other threads meet the replacements too, so these must do as the originals do where the calling
    thread has not asked for more.  Blocks of several threads may end in any order: the first one
    that begins replaces, and the last one that ends restores.
    """

    def __init__(self, replacements: Sequence[Replacement]) -> None:
        self._replacements = replacements
        self._lock = threading.Lock()
        self._entered = 0
        self._done: list[tuple[Any, str, Any, Any]] = []
        """(module, name, the original, what took its place)"""
        self._made: dict[Replacement, tuple[Any, Any]] = {}
        """(the original, what took its place) of the last time: making it takes longer."""

    def __enter__(self) -> Self:
        with self._lock:
            if not self._entered:
                for each in self._replacements:
                    module, name, make = each
                    own = getattr(module, name, None)
                    last, new = self._made.get(each, (_NEVER, None))
                    if last is not own:
                        new = make(own)
                        self._made[each] = own, new
                    setattr(module, name, new)
                    self._done.append((module, name, own, new))
            self._entered += 1
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                for module, name, own, new in reversed(self._done):
                    if getattr(module, name) is new:  # else another package has replaced it since
                        if own is None:
                            delattr(module, name)
                        else:
                            setattr(module, name, own)
                self._done.clear()
