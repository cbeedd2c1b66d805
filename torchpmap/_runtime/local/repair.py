"""A repair of the pool: a thread of its own does it, and any number of callers wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures

from torchpmap._runtime.local.reentry import REPAIRER

_LOOK_S = 0.25


class Repair:
    """Ended when ``work`` has returned or raised."""

    def __init__(self, work: Callable[[], None], on_interrupt: Callable[[], None]) -> None:
        """``on_interrupt``: called when a caller that waits is interrupted."""
        self._work = work
        self._on_interrupt = on_interrupt
        self._ended: futures.Future[None] = futures.Future()
        self._has_begun = threading.Lock()

    def start(self) -> None:
        """Begin, if it has not; ``RuntimeError`` if there are too many threads."""
        if not self.has_begun:
            threading.Thread(None, self._run, REPAIRER, daemon=True).start()

    @property
    def has_begun(self) -> bool:
        return self._has_begun.locked()

    def _run(self) -> None:
        if not self._has_begun.acquire(blocking=False):
            return  # Ctrl-C came after an earlier start had made its thread
        try:
            self._work()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def wait(self, failure: Callable[[], BaseException | None]) -> BaseException | None:
        """Wait for the end, and return what the work raised.  Raises what ``failure`` returns, if
        that comes first.
        """
        while not self._has_ended():
            error = failure()
            if error is not None:
                raise error
        return self._ended.exception()

    def is_over(self, seconds: float) -> bool:
        """Whether it has ended, after so many seconds at most."""
        return bool(futures.wait([self._ended], seconds).done)

    def _has_ended(self) -> bool:
        try:
            return self.is_over(_LOOK_S)
        except BaseException:  # Ctrl-C
            self._on_interrupt()
            raise
