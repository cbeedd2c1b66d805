"""What a worker is doing, seen from outside, even if it cannot answer.

Three sources::

    its control thread   answers which call runs, unless C code holds the GIL
    faulthandler         writes the Python stacks on SIGUSR1, unless the process is stopped
    the kernel           knows whether the process runs, sleeps or is stopped
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchpmap._base.deadline import Deadline
from torchpmap._base.sources import PACKAGE, TORCH
from torchpmap._runtime import wire
from torchpmap._runtime.local.forkserver import process_state
from torchpmap._runtime.local.process import WorkerProcess

_ANSWER_S = 0.5
"""Longer than an answer takes, unless the GIL is held."""
_STACK_S = 0.2
_SETTLED_S = 0.01
"""A stack is complete when nothing was added for so long; writing it takes a tenth of that."""
_tokens = itertools.count(1)

_COMPILES = ("compiling ", "receiving a plan", "importing the compiler")
"""What a worker does before it can run a call of a plan (see ``_Worker.doing``)."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WORKER = str(Path(__file__).with_name("worker.py"))
_LIBRARIES = (
    PACKAGE,
    TORCH,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)


class Answer(NamedTuple):
    """What a worker answers to ``ask``."""

    state: str
    """As in ``/proc/PID/stat``."""
    said: dict[str, Any] | None
    """None if it does not answer."""

    def has_begun(self, seq: int) -> bool:
        """Whether the worker has begun call ``seq``; assumed if it does not answer."""
        return self.said is None or self.said.get("seq", 0) >= seq

    @property
    def is_compiling(self) -> bool:
        """Whether the worker is known to compile, or to load, a plan or the compiler."""
        return self.said is not None and self.said.get("doing", "").startswith(_COMPILES)


class Sight(NamedTuple):
    """What was seen of one worker."""

    state: str
    """As in ``/proc/PID/stat``."""
    answered: bool
    seq: int
    """The call that runs; 0 if none does, or if that is not known."""
    doing: str
    waits: str | None
    """The rank that it waits for, and the collective."""
    stack: str
    """The stack of its main thread, innermost frame first."""


def ask(workers: Mapping[int, WorkerProcess]) -> dict[int, Answer]:
    """Ask workers what they do, without disturbing them; takes half a second at most (one thread at
    a time).
    """
    states = {
        rank: "" if worker.pid is None else process_state(worker.pid)
        for rank, worker in workers.items()
    }
    token = next(_tokens)
    for worker in workers.values():
        with contextlib.suppress(OSError):
            message = wire.CONTROL.pack(wire.DUMP, token)
            worker.control.send(message, wire.NO_WAIT)
    deadline = Deadline(_ANSWER_S)
    return {
        rank: Answer(
            states[rank],
            None
            if states[rank] in ("T", "t", "Z", "")
            else _answer(worker.control, token, deadline),
        )
        for rank, worker in workers.items()
    }


def look(workers: Mapping[int, WorkerProcess], answers: Mapping[int, Answer]) -> dict[int, Sight]:
    """What workers do, with their stacks.  Only for a call that has failed: the signal for the
    stacks cuts a sleep in C code short.
    """
    for worker in workers.values():
        with contextlib.suppress(OSError):
            os.ftruncate(worker.stacks, 0)
            if worker.pidfd >= 0:
                signal.pidfd_send_signal(worker.pidfd, signal.SIGUSR1)
    stacks = Deadline(_STACK_S)
    sights = {}
    for rank, worker in workers.items():
        state, said = answers[rank]
        status = said or {}
        sights[rank] = Sight(
            state,
            said is not None,
            status.get("seq", 0),
            status.get("doing", ""),
            status.get("waits"),
            _main_stack(_stacks(worker.stacks, stacks)),
        )
    return sights


def _answer(control: socket.socket, token: int, deadline: Deadline) -> dict[str, Any] | None:
    """What the control thread says; None if it does not."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # closed, or a broken answer
        poll.register(control, select.POLLIN)
        while poll.poll(int(1000 * deadline.left())):
            number, length = wire.CONTROL.unpack(control.recv(wire.CONTROL.size))
            body = control.recv(length)
            if number == token:  # else it is a late answer to an earlier question
                found: dict[str, Any] = json.loads(body)
                return found
            if deadline.passed:
                break
    return None


def _stacks(fd: int, deadline: Deadline) -> str:
    size = 0
    while True:
        before, size = size, os.fstat(fd).st_size
        if (size and size == before) or deadline.passed:
            return os.pread(fd, size, 0).decode(errors="replace")
        time.sleep(_SETTLED_S)


def _main_stack(text: str) -> str:
    """The stack of the thread that runs calls."""
    for thread in text.split("\n\n"):
        _, _, frames = thread.partition("\n")
        if f'File "{_WORKER}"' in frames and "in serve" in frames:
            return frames.rstrip()
    return ""


def described(sight: Sight, seq: int) -> str:
    """What a rank that should run call ``seq`` is doing.

    Example:
        >>> stack = '  File "train.py", line 7 in step'
        >>> described(Sight("R", True, 5, "running step", None, stack), 5)
        'runs step at train.py:7'
        >>> described(Sight("T", False, 0, "", None, ""), 5)
        'is stopped (SIGSTOP, or a debugger)'
    """
    line = _users_line(sight.stack)
    if sight.state in ("T", "t"):
        return "is stopped (SIGSTOP, or a debugger)"
    if not sight.answered:
        return f"is in C code that holds the GIL{line}" if sight.stack else "does not answer"
    if sight.waits is not None:
        return f"waits for {sight.waits}{line}"
    if sight.seq == 0:
        return "waits for a command"
    if sight.seq < seq:
        return f"has not begun it: it is still {sight.doing}"
    what = sight.doing.removeprefix("running ")
    if sight.doing.startswith("compiling "):
        return f"is {sight.doing}"
    return f"{'sleeps or waits in' if sight.state == 'S' else 'runs'} {what}{line}"


def _users_line(stack: str) -> str:
    """The innermost line of the user's code."""
    frames = _FRAME.findall(stack)
    for file, line, _ in frames:
        if not file.startswith(_LIBRARIES):
            return f" at {file}:{line}"
    return ""
