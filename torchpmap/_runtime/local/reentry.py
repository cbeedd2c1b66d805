"""Calls of torchpmap that interrupt another one: from signal handlers and finalizers.

Python runs both between two instructions, a finalizer in any thread that collects garbage.
They may drop values, which takes no lock.  They may not make a call that would wait for the code
that it has interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

MONITOR, REPAIRER = "torchpmap-monitor", "torchpmap-repair"
_OWN_THREADS = frozenset({MONITOR, REPAIRER})
"""Every call needs these threads, so they cannot wait for one."""

_REMEDY = "Set a flag there instead, and make the call where the script checks the flag."


def held_here(lock: Any) -> Callable[[], bool]:
    """A function that tells whether the calling thread holds an ``RLock``."""
    return lock._is_owned


def refuse() -> NoReturn:
    """Raise in a call that has interrupted another one."""
    raise RuntimeError(
        "a signal handler or a finalizer (__del__, weakref.finalize) calls torchpmap while the "
        "thread that it has interrupted sends another call, and would wait for itself. " + _REMEDY
    )


def refuse_to_wait(*locks: Any) -> None:
    """Raise in a thread of the pool itself, and in one that holds one of ``locks``: it would wait
    for itself.
    """
    if threading.current_thread().name in _OWN_THREADS:
        raise RuntimeError(
            "a finalizer (__del__, weakref.finalize) calls torchpmap and waits, in one of "
            "torchpmap's own threads, which happened to collect garbage. " + _REMEDY
        )
    for lock in locks:  # each step of a training loop asks: ``any`` takes twice as long
        if held_here(lock)():
            refuse()
