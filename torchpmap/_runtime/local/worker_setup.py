"""What a worker process sets up for itself: where its output goes, and that it ends with the
controller.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys


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
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
