"""When a device is done with a command, if its operations return before they are complete.

::

    main thread   launched(7)  launched(8) ...... settle(), before it answers a request
    own thread                 event of 7 -> note(7)    event of 8 -> note(8)

The error of a kernel comes late, and a collective that was aborted half-way raises nothing at all:
the device goes on with garbage.  So a command is done when its event is reached without an error
and, if it communicates, before anything has aborted its groups.  The thread reports the first
command that fails, and notes none after it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchpmap._base.errors import GroupLost
from torchpmap._base.platform import Event, Platform


class Launched(NamedTuple):
    seq: int
    doing: str
    communicates: bool
    event: Event
    source: torch.Tensor | None
    """Memory of the host that must not change before the event."""


class Completion:
    """``launched``, ``wait`` and ``settle``: main thread; ``begin``, ``note`` and ``fail`` are
    called by the own thread.
    """

    def __init__(
        self,
        platform: Platform,
        is_aborted: Callable[[], bool],
        note: Callable[[int], None],
        fail: Callable[[int, str, BaseException], None],
        begin: Callable[[int], None] = lambda seq: None,
    ) -> None:
        """``begin``: the device has come to a command.  ``note`` may raise, which fails it."""
        self._platform = platform
        self._is_aborted = is_aborted
        self._begin = begin
        self._note = note
        self._fail = fail
        self._queue: queue.Queue[Launched | None] = queue.Queue()
        self._progress = threading.Condition()
        self.done = 0
        """The last command that the device is done with."""
        self.has_failed = False
        """Since ``renew``."""
        self.current: Launched | None = None
        """What the device is at, or the last that it did."""
        self._thread = threading.Thread(
            target=self._watch, name="torchpmap-completion", daemon=True
        )
        self._thread.start()

    def launched(
        self, seq: int, doing: str, communicates: bool, source: torch.Tensor | None = None
    ) -> None:
        """All work up to command ``seq`` has been given to the device."""
        self._queue.put(Launched(seq, doing, communicates, self._platform.record(), source))

    def wait(self, seq: int) -> bool:
        """Wait until command ``seq`` is noted, or one has failed; whether it is noted."""
        if self.done < seq:
            with self._progress:
                self._progress.wait_for(lambda: self.done >= seq or self.has_failed)
        return self.done >= seq

    def settle(self) -> bool:
        """Wait until everything launched is noted or has failed; whether nothing has failed."""
        self._queue.join()
        return not self.has_failed

    def renew(self) -> None:
        """A new epoch begins."""
        self.settle()
        self._platform.renew()
        self.has_failed = False

    def close(self, limit_s: float | None = None) -> None:
        """End the thread; wait at most so long for a device that does not end what it runs."""
        self._queue.put(None)
        self._thread.join(limit_s)

    def _watch(self) -> None:
        while (each := self._queue.get()) is not None:
            self.current = each._replace(source=None)
            try:
                self._finish(each)
            finally:
                del each  # its memory of the host
                self._queue.task_done()

    def _finish(self, each: Launched) -> None:
        has_failed = self.has_failed
        if not has_failed:
            self._begin(each.seq)
        try:
            each.event.synchronize()
            if each.communicates and self._is_aborted():
                raise GroupLost(f"a collective of {each.doing} was aborted")
            if not has_failed:
                self._note(each.seq)
        except BaseException as error:
            if not has_failed:
                self._fail(each.seq, each.doing, error)
                has_failed = True
        with self._progress:
            self.has_failed = has_failed
            if not has_failed:
                self.done = each.seq
            self._progress.notify_all()
