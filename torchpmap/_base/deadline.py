"""One time limit for all the waits of an operation, however many there are."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Deadline:
    """A time limit, made where an operation begins and passed to everything that waits for it.

    Example:
        >>> deadline = Deadline(60)
        >>> deadline.passed, 59 < deadline.left() <= 60
        (False, True)
    """

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def pauses(self) -> Iterator[float]:
        """Yield seconds to pause after each check in a polling loop: short at first, then 10 ms.

        A last 0.0 comes after the end, so that the loop checks once more.
        """
        pause = 0.0002
        while not self.passed:
            yield pause
            pause = min(2 * pause, 0.01)
        yield 0.0
