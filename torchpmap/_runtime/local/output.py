"""Prints what workers write to stdout and stderr, line by line, on the user's streams.

A thread of its own does it: the user's stream may be a pipe that is not read, and answers must
arrive nevertheless.  It writes only if there is room, since a thread that is stuck inside of
``sys.stdout`` makes Python abort at exit.  While it writes it reads nothing: if a worker writes
faster than its lines can be printed, they stay in its pipe, and the worker waits.
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
from collections.abc import Sequence
from typing import Any

from torchpmap._base.deadline import Deadline
from torchpmap._runtime.wire import PLAIN_LINE

_TURN_BYTES = 1 << 16
_LINE_BYTES = 1 << 16
"""A longer line is cut."""
_LAST_WORDS_BYTES = 4000
_PIPE_READS = 16
"""More reads than empty a full pipe, unless its writer goes on."""
_PIECE = 1024
"""Characters that can be written without waiting when a pipe says that it has room (``PIPE_BUF``
is 4096 bytes).
"""
_STUCK_S = 1.0
_LOOK_MS = 100


class Lines:
    """One pipe of a worker."""

    def __init__(self, fd: int, prefix: str, stream: str = "stdout", rank: int = 0) -> None:
        """``stream``: where they are printed, by its name in ``sys``."""
        self.fd, self.stream, self.rank = fd, stream, rank
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
    """Any thread may call it; only ``flush`` and ``stop`` wait."""

    def __init__(self) -> None:
        # guards what follows, and is never held for long (a signal handler may take it again)
        self._lock = threading.RLock()
        self._lines: dict[int, Lines] = {}  # by descriptor
        self._queue: deque[tuple[str, str] | threading.Event] = deque()
        self._begun: float | None = None  # when the last step of the current item began
        self._end: Deadline | None = None
        self._ready = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready.register(self._bell, select.EPOLLIN)
        self.thread = threading.Thread(target=self._run, name="torchpmap-printer", daemon=True)
        try:
            self.thread.start()
        except BaseException:  # Ctrl-C while it starts
            self._change(Deadline(0))
            raise

    @property
    def _is_stuck(self) -> bool:
        begun = self._begun
        return begun is not None and time.monotonic() - begun > _STUCK_S

    def add(self, rank: int, output: int, errors: int, prefix: str) -> None:
        """Print what comes from the pipes of a worker."""
        with self._lock:
            for fd, stream in ((output, "stdout"), (errors, "stderr")):
                self._lines[fd] = Lines(fd, prefix, stream, rank)
                self._ready.register(fd, select.EPOLLIN)

    def remove(self, rank: int) -> bytes:
        """Read no more from a worker than what is there now; the last bytes of its stderr."""
        with self._lock:
            lines = self._take((rank,))
            for each in lines:
                del self._lines[each.fd]
                self._unregister(each)
            self._change()
        return lines[-1].tail

    def write(self, stream: str, text: str) -> None:
        """``stream``: its name in ``sys``."""
        with self._lock:
            self._queue.append((stream, text))
            self._change()

    def flush(self, ranks: Sequence[int]) -> None:
        """Wait until what these have written is printed, or cannot be."""
        done = threading.Event()
        with self._lock:
            if self._is_stuck or self._end is not None:
                return
            self._take(ranks)
            if self._begun is None and not self._queue:
                return
            self._queue.append(done)
            self._change()
        while not (self._is_stuck or threading.current_thread() is self.thread):
            if done.wait(_LOOK_MS / 1000) or not self.thread.is_alive():
                return

    def stop(self, patience_s: float) -> None:
        """End the thread when it has written what is left, or when its time is up."""
        self._change(Deadline(patience_s))
        if threading.current_thread() is not self.thread:
            self.thread.join(patience_s + 2 * _LOOK_MS / 1000)

    def _change(self, end: Deadline | None = None) -> None:
        """Let the thread look at what has changed."""
        with self._lock:
            self._end = self._end or end
            if self._bell >= 0:  # else the thread has ended
                os.eventfd_write(self._bell, 1)

    def _take(self, ranks: Sequence[int]) -> list[Lines]:
        """Read all that is there, also a last line that has no end yet (lock held)."""
        found = [each for each in self._lines.values() if each.rank in ranks]
        for each in found:
            for _ in range(_PIPE_READS):
                text = each.read()
                if not text:
                    break
                self._queue.append((each.stream, text))
            if rest := each.rest():
                self._queue.append((each.stream, rest))
        return found

    def _unregister(self, lines: Lines) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is not, or the thread has ended
            self._ready.unregister(lines.fd)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._begun = time.monotonic() if self._queue else None
                item = self._queue.popleft() if self._queue else None
            if isinstance(item, threading.Event):
                item.set()
            elif item is not None:
                # the user's stream may be closed, absent or broken; this thread must live
                with contextlib.suppress(Exception):
                    stream = getattr(sys, item[0])
                    self._print(stream, _writable(stream, item[1]))
            elif self._end is None:
                self._read(self._ready.poll())
            else:
                break
        with self._lock:
            self._ready.close()
            os.close(self._bell)
            self._bell = -1

    def _read(self, ready: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            for fd, _ in ready:
                lines = self._lines.get(fd)  # None if it was removed meanwhile
                text = None if lines is None else lines.read()
                if fd == self._bell:
                    os.eventfd_read(fd)
                elif lines is not None and text is None:
                    self._unregister(lines)
                elif lines is not None and text:
                    self._queue.append((lines.stream, text))

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


def _writable(stream: Any, text: str) -> str:
    """``text`` with escapes for characters that the encoding of a stream lacks: not to write them
    would lose all lines around them.
    """
    encoding = getattr(stream, "encoding", None)
    if encoding is None:  # it takes any
        return text
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


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
