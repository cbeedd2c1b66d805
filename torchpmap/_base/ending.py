"""Calls on other threads when the script ends.

Daemon threads go on while Python runs its exit handlers.  Then (up to 3.13) Python ends each thread
where it next wants the interpreter, by unwinding its stack.  Inside torch's C++ code that aborts
the process.  So the exit handlers wait for threads that are in a call to leave it, and a thread
that makes another call sleeps for good, as from Python 3.14 on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from torchpmap._base.deadline import Deadline
from torchpmap._base.sources import PACKAGE

_PAUSE_S = 0.002

_begun = False
_asleep: set[int] = set()


def begin() -> None:
    """Say that the script is ending; from now on nothing is started."""
    global _begun
    _begun = True


def has_begun() -> bool:
    return _begun


def surely(end: Callable[[], None]) -> None:
    """Call ``end``, and again if Ctrl-C comes meanwhile: nothing else would do what it does."""
    try:
        end()
    except BaseException:
        end()
        raise


def sleep_if_ending() -> None:
    """Called when the pool of a call was shut down; at the end other threads sleep here."""
    if _begun and threading.current_thread() is not threading.main_thread():
        _asleep.add(threading.get_ident())
        forever = threading.Lock()
        forever.acquire()
        forever.acquire()


def wait_for_calls(deadline: Deadline) -> None:
    """Wait until every other thread is outside this package or in ``sleep_if_ending``."""
    while _calling() and not deadline.passed:
        time.sleep(_PAUSE_S)


def _calling() -> set[int]:
    found = set()
    for ident, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                found.add(ident)
                break
            frame = frame.f_back
    return found - _asleep - {threading.get_ident()}
