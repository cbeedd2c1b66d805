"""One line on the terminal while torchpmap keeps the user waiting, which goes away by itself.

    with waiting("tracing `step`"):     nothing for 2 s, then "torchpmap: tracing `step`, 2 s"
        with waiting("..."):            the innermost is shown

It is shown where it can vanish: on a terminal, or in the cell of a notebook.  On a terminal it
stands behind the cursor, which stays where the user's output has left it.  A thread draws the line;
it lives as long as the outermost ``waiting``.  While the line is there, ``sys.stdout`` and
``sys.stderr`` erase it before they write.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchpmap._base.config import config
from torchpmap._base.notebook import display_in_cell

_DELAY_S = 2.0
_PERIOD_S = 0.5
_JOIN_S = 1.0
"""How long to wait for the thread, which may be stuck in a terminal that takes no output."""
_LINE = "\x1b7\x1b[?7l\x1b[K{}\x1b[?7h\x1b8"
"""From the cursor on, instead of what is there; no line break, and the cursor returns."""

_lock = threading.Lock()  # guards _line
_line: _Line | None = None
_is_silent = False


def silence() -> None:
    """Show nothing in this process: another one of its job does, on the same terminal."""
    global _is_silent
    _is_silent = True


@contextlib.contextmanager
def waiting(what: str | Callable[[], str | None] | None) -> Iterator[None]:
    """A block in which the user waits; ``what`` says for what, and may be None for not saying.

    A generator: if Ctrl-C comes before Python enters the block, it is collected, which ends it.
    """
    global _line
    # made without the lock: a finalizer or a signal handler that runs meanwhile may wait, too
    made = _new_line() if _line is None else None
    with _lock:
        if _line is None:
            _line = made
        line = _line
    if line is None or line.owner != threading.get_ident():  # there is one line
        yield
        return
    depth = len(line.stack)
    try:
        line.stack.append((what, time.monotonic()))
        if line.ident is None:
            with contextlib.suppress(RuntimeError):  # there are too many threads
                line.start()
        yield
    finally:
        del line.stack[depth:]
        if not depth:
            _line = None
            line.end()


def _new_line() -> _Line | None:
    """None where there is no place for one."""
    try:
        if _is_silent or not config.progress:
            return None
        display = display_in_cell()
        if display is not None:
            return _Line(_Cell(display).show)
        fd = sys.stderr.fileno()
        has_terminal = os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"
        is_in_front = has_terminal and os.tcgetpgrp(fd) == os.getpgrp()
        return _Line(_Terminal(fd).show) if is_in_front else None
    # stderr is None, closed, no file or no terminal of ours; or a variable is wrong, which is
    # reported where a runtime starts
    except (AttributeError, OSError, ValueError):
        return None


class _Line(threading.Thread):
    """Shows what the thread that made it waits for; ``show("")`` removes the line."""

    def __init__(self, show: Callable[[str], None]) -> None:
        context = contextvars.copy_context()  # says to a notebook which cell it is
        super().__init__(target=context.run, args=(self._tick,), name="torchpmap-busy", daemon=True)
        self.owner = threading.get_ident()
        self.stack: list[tuple[str | Callable[[], str | None] | None, float]] = []
        self._show = show
        self._has_ended = threading.Event()

    def end(self) -> None:
        self._has_ended.set()
        if self.ident is not None:
            self.join(_JOIN_S)

    def _tick(self) -> None:
        with contextlib.suppress(Exception):  # a display that fails has nothing to say
            try:
                pause = _DELAY_S
                while not self._has_ended.wait(pause):
                    pause = _PERIOD_S
                    self._show(self._text())
            finally:
                self._show("")

    def _text(self) -> str:
        for what, begin in self.stack[-1:]:
            text = what() if callable(what) else what
            if text:
                text = " ".join(text.split())
                return f"torchpmap: {text}, {time.monotonic() - begin:.0f} s"
        return ""


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
            self._draw(text)
            for stream in (sys.stdout, sys.stderr) if text and not self._hooked else ():
                with contextlib.suppress(Exception):  # no stream, or one that is not Python's own
                    if stream.isatty() and "write" not in vars(stream):
                        write = partial(self._erase_and_write, stream.write)
                        stream.write = write  # type: ignore[method-assign]
                        self._hooked.append((stream, write))
            while self._hooked and not text:
                stream, write = self._hooked.pop()
                if vars(stream).get("write") is write:
                    del stream.write

    def _draw(self, text: str) -> None:
        if text or self._is_shown:
            self._is_shown = bool(text)
            with contextlib.suppress(OSError):  # the terminal is gone
                room = os.get_terminal_size(self._fd).columns or 80
                line = _LINE.format("".join(filter(str.isprintable, text))[: room - 1])
                os.write(self._fd, line.encode(sys.stderr.encoding or "ascii", "replace"))

    def _erase_and_write(self, write: Callable[[str], int], text: str) -> int:
        if os.getpid() != self._pid:  # a forked child, where the lock may be held for ever
            return write(text)
        with self._lock:
            self._draw("")
            return write(text)


class _Cell:
    """The line in the output of a notebook's cell."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, text: str) -> None:
        if self._handle is not None:
            data = {"text/plain": text} if text else {"text/plain": "", "text/html": ""}
            self._handle.update(data, raw=True)
        elif text:
            self._handle = self._display({"text/plain": text}, raw=True, display_id=True)
