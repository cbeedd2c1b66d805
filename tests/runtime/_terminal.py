"""A terminal for a program: what it writes is kept, and drawn as a screen."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
from collections.abc import Callable

_PART = re.compile(r"\x1b\[\?7[lh]|\x1b\[K|\x1b[78]|\r|\n|[^\x1b\r\n]+")


def screen(output: str) -> list[str]:
    """The lines that a terminal shows, without blanks at their ends."""
    lines, row, column, saved = [""], 0, 0, (0, 0)
    for part in _PART.findall(output):
        if part == "\x1b7":
            saved = row, column
        elif part == "\x1b8":
            row, column = saved
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif not part.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    assert "".join(_PART.findall(output)) == output, "a code that is not known here"
    return [line.rstrip() for line in lines]


class Terminal:
    """A Python program whose standard streams are a terminal of its own."""

    def __init__(self, source: str, **environment: str) -> None:
        self.output = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-c", source]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", **environment})

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        os.close(self._fd)  # hangs up, which the program may ignore
        if kind is not None:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def until(self, is_there: Callable[[list[str]], object], seconds: float = 90.0) -> list[str]:
        """Read until the screen is as wanted, and return it."""
        while not is_there(screen(self.output)):
            assert self._read(seconds), f"it is not there, and nothing follows:\n{self.output}"
        return screen(self.output)

    def rest(self) -> list[str]:
        """The screen when the program has ended."""
        while self._read(90.0):
            pass
        return screen(self.output)

    def type(self, text: str) -> None:
        """Send what a user types."""
        os.write(self._fd, text.encode())

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        try:
            found = os.read(self._fd, 4096)
        except OSError:  # the program has ended
            found = b""
        self.output += found.decode()
        return bool(found)
