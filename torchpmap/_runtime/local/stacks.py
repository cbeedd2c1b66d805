"""What workers are doing, seen from outside, even if they cannot answer.

Each writes to a file that the controller reads::

    its control thread   the stacks, then which call runs; not while C code holds the GIL
    faulthandler         then the stacks alone, on SIGUSR1, unless the process is stopped

The kernel knows whether a process runs, sleeps or is stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torchpmap._base.deadline import Deadline
from torchpmap._base.sources import PACKAGE, TORCH
from torchpmap._runtime import wire
from torchpmap._runtime.local.process import WorkerProcess
from torchpmap._runtime.local.waits import STOPPED

_ANSWER_S = 0.5
"""Longer than an answer takes, unless the GIL is held."""
_STACK_S = 0.2
"""Longer than it takes to write the stacks."""
_PAUSE_S = 0.005
"""How long to wait before it is looked at again."""
_MARK = "\x1e"
"""Comes before and after what the control thread says."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WORKER = str(Path(__file__).with_name("worker.py"))
_LIBRARIES = (
    PACKAGE,
    TORCH,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)


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


def answer(fd: int, seq: int, doing: str, waits: str | None) -> None:
    """In a worker: write what ``Look`` asks for."""
    faulthandler.dump_traceback(fd)
    os.write(fd, (_MARK + json.dumps((seq, doing, waits)) + _MARK).encode())


class Look:
    """Asks workers what they do, once; to be looked at until they have answered.

    ``interrupts``: for a call that fails whatever the answer.  A worker that does not answer gets
    the signal for the stacks, which cuts a sleep in C code short.
    """

    def __init__(self, workers: Mapping[int, WorkerProcess], *, interrupts: bool) -> None:
        self._workers = workers
        self._interrupts = interrupts
        self._states = {rank: worker.state for rank, worker in workers.items()}
        self._silent: list[int] = []
        self._patience = Deadline(_ANSWER_S)
        for worker in workers.values():
            with contextlib.suppress(OSError):  # closed, or its control socket is full
                os.ftruncate(worker.stacks, 0)
                worker.control.send(wire.CONTROL.pack(wire.DUMP, 0), wire.NO_WAIT)

    def sights(self) -> dict[int, Sight] | None:
        """What was seen; None while there is hope for more."""
        texts = {rank: _text(worker.stacks) for rank, worker in self._workers.items()}
        silent = [
            rank
            for rank, text in texts.items()
            if text.count(_MARK) < 2 and self._states[rank] not in STOPPED
        ]
        if (silent or self._silent) and not self._patience.passed:
            return None
        if silent and not self._silent and self._interrupts:
            self._silent, self._patience = silent, Deadline(_STACK_S)
            for rank in silent:
                self._workers[rank].signal(signal.SIGUSR1)
            return None
        return {rank: self._sight(rank, text) for rank, text in texts.items()}

    def _sight(self, rank: int, text: str) -> Sight:
        stacks, *said = text.split(_MARK)  # of several answers if it was asked before, and is late
        if rank in self._silent or len(said) < 2:
            return Sight(self._states[rank], False, 0, "", None, _main_stack(stacks))
        seq, doing, waits = json.loads(said[0])
        return Sight(self._states[rank], True, seq, doing, waits, _main_stack(stacks))


def seen(workers: Mapping[int, WorkerProcess]) -> dict[int, str]:
    """What workers do now, and their stacks."""
    look = Look(dict(workers), interrupts=False)
    while (sights := look.sights()) is None:
        time.sleep(_PAUSE_S)
    return {
        rank: f"{described(sight, sight.seq)}\n{sight.stack}".rstrip()
        for rank, sight in sights.items()
    }


def _text(fd: int) -> str:
    with contextlib.suppress(OSError):  # closed
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
    return ""


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
    if sight.state in STOPPED:
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
