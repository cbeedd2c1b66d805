"""When a device is done with a command, if its operations return before they are complete.

::

    main thread   launched(7)  launched(8) ...... settle(), before it answers a request
    own thread                 event of 7 -> note(7)    event of 8 -> note(8)

The error of a kernel comes late, and a collective that was aborted half-way raises nothing at all:
the device goes on with garbage.  So a command is done when its event is reached without an error
and, if it communicates, before anything has aborted its groups.  The thread reports the first
command that fails, and notes none behind it.
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
    """``launched`` and ``settle``: main thread; ``note``, ``fail`` are called by the own thread."""

    def __init__(
        self,
        platform: Platform,
        is_aborted: Callable[[], bool],
        note: Callable[[int], None],
        fail: Callable[[int, str, BaseException], None],
    ) -> None:
        self._platform = platform
        self._is_aborted = is_aborted
        self._note = note
        self._fail = fail
        self._queue: queue.Queue[Launched | None] = queue.Queue()
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

    def settle(self) -> bool:
        """Wait until everything launched is noted or has failed; whether nothing has failed."""
        self._queue.join()
        return not self.has_failed

    def renew(self) -> None:
        """A new epoch begins."""
        self.settle()
        self.has_failed = False

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (each := self._queue.get()) is not None:
            self.current = each
            try:
                self._finish(each)
            finally:
                self._queue.task_done()

    def _finish(self, each: Launched) -> None:
        error: BaseException | None = None
        try:
            each.event.synchronize()
            if each.communicates and self._is_aborted():
                error = GroupLost(f"a collective of {each.doing} was aborted")
        except Exception as raised:
            error = raised
        if self.has_failed:
            return
        if error is None:
            self._note(each.seq)
        else:
            self.has_failed = True
            self._fail(each.seq, each.doing, error)
