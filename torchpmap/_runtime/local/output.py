"""Prints what workers write to stdout and stderr, line by line, on the user's streams.

A thread of its own writes: the user's stream may be a pipe that is not read, and answers must
arrive nevertheless.  It writes only if there is room, since a thread that is stuck inside of
``sys.stdout`` makes Python abort at exit.  Memory is bounded: if a worker writes faster than its
lines can be printed, they stay in its pipe, and the worker waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torchpmap._base.deadline import Deadline
from torchpmap._runtime.wire import PLAIN_LINE

_TURN_BYTES = 1 << 16
_LINE_BYTES = 1 << 16
"""A longer line is cut."""
_LAST_WORDS_BYTES = 4000
_QUEUED_CHARACTERS = 1 << 20
_PIECE = 1024
"""Characters that can be written without waiting when a pipe says that it has room (``PIPE_BUF``
is 4096 bytes).
"""
_STUCK_S = 1.0
_LOOK_MS = 100


class Lines:
    """One pipe of a worker (owner: the monitor)."""

    def __init__(self, fd: int, prefix: str) -> None:
        self.fd = fd
        self._prefix = prefix
        self._partial = b""  # a line without its end; shorter than _LINE_BYTES
        self.tail = b""
        """The last bytes that were read."""

    def read(self) -> str | None:
        """What has arrived, up to a limit, as lines for the user; None at the end of file."""
        try:
            found = os.read(self.fd, _TURN_BYTES)
        except BlockingIOError:
            return ""
        if not found:
            return None
        self.tail = (self.tail + found)[-_LAST_WORDS_BYTES:]
        *lines, self._partial = (self._partial + found).split(b"\n")
        if len(self._partial) >= _LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        return "".join(map(self._text, lines))

    def rest(self) -> str:
        """A last line that has no end yet."""
        line, self._partial = self._partial, b""
        return self._text(line) if line else ""

    def _text(self, line: bytes) -> str:
        text = line.decode(errors="replace")
        return (text[1:] if text.startswith(PLAIN_LINE) else self._prefix + text) + "\n"


class Printer:
    """Writes in order what the monitor gives it, and makes calls in between."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        """``on_room`` is called when the printer has been full and has room again."""
        self._on_room = on_room
        self._queue: deque[tuple[str, str] | Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._queued = 0  # characters
        self._was_full = False
        self._begun: float | None = None  # when the last step of the current item began
        self._end: Deadline | None = None
        self.thread = threading.Thread(target=self._run, name="torchpmap-printer", daemon=True)
        try:
            self.thread.start()
        except BaseException:  # Ctrl-C while it starts
            self._tell(0)
            raise

    @property
    def is_full(self) -> bool:
        """Whether it must be given no more until it calls ``on_room``."""
        with self._changed:
            is_full = self._queued > _QUEUED_CHARACTERS
            # only the printing thread resets this: another pipe may wait for room already
            self._was_full = self._was_full or is_full
            return is_full

    @property
    def is_idle(self) -> bool:
        """Whether all that was given has been written."""
        return self._begun is None and not self._queue

    @property
    def _is_stuck(self) -> bool:
        begun = self._begun
        return begun is not None and time.monotonic() - begun > _STUCK_S

    def write(self, stream: str, text: str) -> None:
        """``stream``: its name in ``sys``."""
        if text:
            with self._changed:
                self._queue.append((stream, text))
                self._queued += len(text)
                self._changed.notify()

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` when all earlier text is printed (or cannot be printed: ``overdue``)."""
        if self.is_idle or self._is_stuck:
            act()
            return
        with self._changed:
            self._queue.append(act)
            self._changed.notify()

    def overdue(self) -> list[Callable[[], None]]:
        """The calls that must not wait any more, because the user's stream takes nothing."""
        if not self._is_stuck:
            return []
        with self._changed:
            found = [item for item in self._queue if not isinstance(item, tuple)]
            self._queue = deque(item for item in self._queue if isinstance(item, tuple))
        return found

    def stop(self, patience_s: float) -> None:
        """End the thread when it has written what is left, or when its time is up."""
        self._tell(patience_s)
        if threading.current_thread() is not self.thread:
            self.thread.join(patience_s + 2 * _LOOK_MS / 1000)

    def _tell(self, patience_s: float) -> None:
        with self._changed:
            self._end = Deadline(patience_s)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._begun = None
                while not self._queue:
                    if self._end is not None:
                        return
                    self._changed.wait()
                item = self._queue.popleft()
                self._begun = time.monotonic()
            if not isinstance(item, tuple):
                item()
                continue
            # the user's stream may be closed, absent or broken; this thread must live
            with contextlib.suppress(Exception):
                self._print(getattr(sys, item[0]), item[1])
            with self._changed:
                self._queued -= len(item[1])
                has_room = self._was_full and self._queued < _QUEUED_CHARACTERS // 2
                self._was_full = self._was_full and not has_room
            if has_room:
                self._on_room()

    def _print(self, stream: Any, text: str) -> None:
        room = _room_of(stream)
        if room is None:
            stream.write(text)
            stream.flush()
            return
        for begin in range(0, len(text), _PIECE):
            while not room.poll(_LOOK_MS):
                if self._end is not None and self._end.passed:
                    return
            stream.write(text[begin : begin + _PIECE])
            stream.flush()
            self._begun = time.monotonic()


def _room_of(stream: Any) -> select.poll | None:
    """What can wait for room in a stream; None if writing to it does not wait for a reader."""
    try:
        fd = stream.fileno()
        mode = os.fstat(fd).st_mode
    except Exception:  # the stream is in memory, or of a class of the user's
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
        return None
    room = select.poll()
    room.register(fd, select.POLLOUT)
    return room
