"""Calls of torchpmap that are made in the middle of one: by signal handlers and finalizers.

Python runs both between two steps of a program, a finalizer in whatever thread happens to collect
garbage.  They may drop values, which takes no lock.  A call is refused where it could only wait for
the code that it has interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

LIMIT, MONITOR = "torchpmap-limit", "torchpmap-monitor"
REPAIRER, STARTER = "torchpmap-repair", "torchpmap-starter"
_OWN_THREADS = frozenset({LIMIT, MONITOR, REPAIRER, STARTER})
"""Without these no call goes on: they cannot wait for one."""

_REMEDY = "Note there what is to be done, and do it where the program looks at the note."


def held_here(lock: Any) -> Callable[[], bool]:
    """What tells whether the calling thread holds an ``RLock``."""
    return lock._is_owned


def refuse() -> NoReturn:
    """Raise in a call that has interrupted another one."""
    raise RuntimeError(
        "a signal handler or a finalizer (__del__, weakref.finalize) calls torchpmap while the "
        "thread that it has interrupted sends another call, and would wait for itself. " + _REMEDY
    )


def refuse_to_wait(*locks: Any) -> None:
    """Raise in a thread of a pool's own, and in one that holds one of ``locks``: what they wait for
    would not come.
    """
    if threading.current_thread().name in _OWN_THREADS:
        raise RuntimeError(
            "a finalizer (__del__, weakref.finalize) calls torchpmap and waits, in a thread of "
            "torchpmap's own that happens to collect garbage. " + _REMEDY
        )
    if any(held_here(lock)() for lock in locks):
        refuse()
