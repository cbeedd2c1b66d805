"""What a worker process sets up for itself: where its output goes, and that it ends with the
controller.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from typing import TextIO

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def leave_signals_to_controller() -> None:
    """Go on at signals that all processes of a job get, in the fork server and the workers: Ctrl-C,
    and what schedulers send before they end a job.  The controller may have a handler that saves
    what the workers hold.  If it ends, they end with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _go_on)


def _go_on(*_: object) -> None:
    """Not ``SIG_IGN``, which programs that a worker starts would have too."""


def obey_in_children() -> None:
    """Let ``terminate()`` end a child that this process forks, however soon it comes."""
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, _ENDING),
        after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _ENDING),
        after_in_child=_obey,
    )


def _obey() -> None:
    for number in _ENDING:
        if signal.getsignal(number) is _go_on:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def change_variables(changed: Mapping[str, str | None]) -> None:
    """Set variables of the environment, or delete them (None)."""
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def arm_lifeline(fd: int) -> None:
    """Die when the other end of a pipe is closed, even while this process is stopped or holds the
    GIL in C code.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(fd, 1) == b"":  # the controller went before the signal was armed
            os._exit(0)


def arm_child(lifeline: int) -> None:
    """In a child that user code has made with ``multiprocessing``: it dies with the pool too."""
    # opened again: the signal for a shared descriptor goes to the worker alone
    arm_lifeline(os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_CLOEXEC))


def kill_children() -> None:
    """End the processes that user code has forked or spawned with ``multiprocessing``: no exit
    handler of this process does it.
    """
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed
            child.kill()


def redirect_output(output: int, errors: int) -> None:
    """Send everything written to stdout and stderr, also from C, to the controller, which prints
    it.
    """
    for fd, stream in ((output, 1), (errors, 2)):
        os.dup2(fd, stream)
        os.close(fd)
    sys.stdout, sys.stderr = map(_text_stream, (1, 2))
    faulthandler.enable()


def _text_stream(fd: int) -> TextIO:
    """The controller reads UTF-8, whatever the locale is; nothing that is printed is an error."""
    return open(fd, "w", 1, "utf-8", "backslashreplace", closefd=False)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
