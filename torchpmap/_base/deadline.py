"""One moment that ends all the waits of one operation, however many they are."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Deadline:
    """Made once where an operation begins, and handed to everything that waits for it.

    Example:
        >>> deadline = Deadline(60)
        >>> deadline.passed, 59 < deadline.left() <= 60
        (False, True)
    """

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def pauses(self) -> Iterator[float]:
        """Seconds to pause after each look at what others do, until then: short at first, then 10
        ms; one more look comes after the last pause.
        """
        pause = 0.0002
        while not self.passed:
            yield pause
            pause = min(2 * pause, 0.01)
        yield 0.0
