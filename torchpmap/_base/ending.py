"""Other threads when the program ends.

Python runs its exit handlers while daemon threads go on, and ends each of them where it next wants
the interpreter, by unwinding its stack (up to 3.13).  Inside of torch's C++ code that aborts the
process.  So at exit threads that are in a call are let out of it first, and one that makes another
call sleeps for good, as from Python 3.14 on.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from torchpmap._base.deadline import Deadline
from torchpmap._base.sources import PACKAGE

_PAUSE_S = 0.002

_begun = False
_asleep: set[int] = set()


def begin() -> None:
    """The program ends: nothing is started any more."""
    global _begun
    _begun = True


def has_begun() -> bool:
    return _begun


def sleep_if_ending() -> None:
    """Called where a call cannot go on because its pool was shut down."""
    if _begun and threading.current_thread() is not threading.main_thread():
        _asleep.add(threading.get_ident())
        forever = threading.Lock()
        forever.acquire()
        forever.acquire()


def wait_for_calls(deadline: Deadline) -> None:
    """Wait until no other thread is inside of this package, or sleeps there."""
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
