"""One line on the terminal while torchpmap keeps the user waiting, which goes away by itself.

    with waiting("tracing `step`"):     nothing for 2 s, then "torchpmap: tracing `step`, 2 s"
        with waiting("..."):            the innermost is shown

It is shown where it can vanish: on a terminal, or in the cell of a notebook.  On a terminal it
stands behind the cursor, which stays where the user's output has left it.  A thread draws the line;
it lives as long as the outermost ``waiting``.  While the line is there, ``sys.stdout`` and
``sys.stderr`` erase it before they write.

``TORCHPMAP_PROGRESS=0`` or ``tp.config.progress = False`` switches it off.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from torchpmap._base.config import config
from torchpmap._base.notebook import display_in_cell

_DELAY_S = 2.0
_PERIOD_S = 0.5
_JOIN_S = 1.0
"""How long to wait for the thread, which may be stuck in a terminal that takes no output."""

_SAVE, _RESTORE = "\x1b7", "\x1b8"  # where the cursor is
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE = "\x1b[K"  # from the cursor to the end of the line

_lock = threading.Lock()  # guards _ticker
_ticker: _Ticker | None = None
_is_silent = False


def silence() -> None:
    """Show nothing in this process: another one of its job does, on the same terminal."""
    global _is_silent
    _is_silent = True


class waiting:
    """A block in which the user waits; ``what`` says for what, and may be None for not saying."""

    def __init__(self, what: str | Callable[[], str | None] | None) -> None:
        self._what = what
        self._ticker: _Ticker | None = None
        self._begin = 0.0

    def text(self) -> str | None:
        """What to show now."""
        what = self._what() if callable(self._what) else self._what
        return what and f"torchpmap: {what}, {time.monotonic() - self._begin:.0f} s"

    def __enter__(self) -> None:
        global _ticker
        self._begin = time.monotonic()
        with _lock:
            if _ticker is None or not _ticker.is_alive():
                display = _display()
                if display is None:
                    return
                _ticker = _Ticker(display, sys._getframe(1))
            elif _ticker.owner != threading.get_ident():
                return  # there is one line
            self._ticker = _ticker
            _ticker.stack.append(self)
        if self._ticker.ident is None:
            with contextlib.suppress(RuntimeError):  # there are too many threads
                self._ticker.start()

    def __exit__(self, *exception: Any) -> None:
        ticker = self._ticker
        if ticker is not None:
            ticker.stack.remove(self)
            if not ticker.stack:
                ticker.end()


class _Display(Protocol):
    def show(self, text: str) -> None:
        """Show a line in place of the last one."""

    def close(self) -> None:
        """Remove the line."""


class _Ticker(threading.Thread):
    """Shows what the thread that made it waits for."""

    def __init__(self, display: _Display, frame: FrameType) -> None:
        context = contextvars.copy_context()  # says to a notebook which cell it is
        super().__init__(target=context.run, args=(self._tick,), name="torchpmap-busy", daemon=True)
        self.owner = threading.get_ident()
        self.stack: list[waiting] = []
        self._frame: FrameType | None = frame
        self._display = display
        self._has_ended = threading.Event()

    def end(self) -> None:
        self._has_ended.set()
        self._frame = None
        if self.ident is not None:
            self.join(_JOIN_S)

    def _tick(self) -> None:
        # a display that fails has nothing to say
        with contextlib.suppress(Exception), contextlib.closing(self._display):
            pause = _DELAY_S
            while not self._has_ended.wait(pause) and self._is_waiting():
                pause = _PERIOD_S
                stack = self.stack.copy()
                text = stack[-1].text() if stack else None
                if text is None:
                    self._display.close()
                else:
                    self._display.show(" ".join(text.split()))

    def _is_waiting(self) -> bool:
        """Whether the block still runs: Ctrl-C may come just before Python enters it."""
        frame = sys._current_frames().get(self.owner)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def _display() -> _Display | None:
    """Where to show the line, if anywhere."""
    try:
        is_wanted = config.progress and not _is_silent
    except ValueError:  # a wrong environment variable is reported where a runtime starts
        return None
    if not is_wanted:
        return None
    display = display_in_cell()
    if display is not None:
        return _Cell(display)
    try:
        fd = sys.stderr.fileno()
        has_terminal = os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"
        is_in_front = has_terminal and os.tcgetpgrp(fd) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # None, closed, no file, no terminal of ours
        return None
    return _Terminal(fd) if is_in_front else None


class _Terminal:
    """The line behind the cursor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._is_shown = False
        self._hooked: list[tuple[Any, Any]] = []
        self._lock = threading.RLock()  # a signal handler may print while the line is drawn

    def show(self, text: str) -> None:
        with self._lock:
            if not self._hooked:
                self._hook()
            room = os.get_terminal_size(self._fd).columns or 80
            shown = "".join(letter for letter in text if letter.isprintable())[: room - 1]
            self._write(f"{_SAVE}{_NO_WRAP}{_ERASE}{shown}{_WRAP}{_RESTORE}")
            self._is_shown = True

    def close(self) -> None:
        with self._lock:
            self._erase()
            for stream, write in self._hooked:
                if vars(stream).get("write") is write:
                    del stream.write
            self._hooked.clear()

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(self._fd, text.encode(sys.stderr.encoding or "ascii", "replace"))

    def _hook(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # no stream, or one that is not Python's own
                if stream.isatty() and "write" not in vars(stream):
                    write = self._erasing(stream.write)
                    stream.write = write  # type: ignore[method-assign]
                    self._hooked.append((stream, write))

    def _erasing(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def erase_and_write(text: str) -> int:
            if os.getpid() == self._pid:  # in a forked child the lock may be held for ever
                with self._lock:
                    self._erase()
            return write(text)

        return erase_and_write


class _Cell:
    """The line in the output of a notebook's cell."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, text: str) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)
            return
        self._handle = self._display({"text/plain": text}, raw=True, display_id=True)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
            self._handle = None
