"""Notices that a call in progress can never end, because another process waits for us elsewhere.

A process that meets a plan for the first time waits for the others (see ``Rendezvous``).  If one of
them is in a collective of another plan meanwhile, each waits for the other, and Gloo would for half
an hour.  This thread looks once a second, in calls that take longer than that.
"""

from __future__ import annotations

import threading

import torch.distributed as dist

from torchpmap._errors import CollectiveMismatch
from torchpmap._groups import Groups
from torchpmap._runtimes._rendezvous import Rendezvous

__all__ = ["Watch"]

_INTERVAL_S = 1.0


class Watch:
    """``begin`` and ``running`` belong to the thread that makes calls."""

    def __init__(self, rendezvous: Rendezvous, groups: Groups) -> None:
        self._rendezvous = rendezvous
        self._groups = groups
        self.running: tuple[tuple[int, ...], str] | None = None
        """Ranks and name of the call in progress."""
        self._verdict: str | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchpmap-watch", daemon=True)
        self._thread.start()

    def begin(self, ranks: tuple[int, ...], name: str) -> None:
        """A call with collectives over ``ranks`` begins."""
        self._rendezvous.calls[ranks] += 1
        self.running = ranks, name

    def raise_verdict(self) -> None:
        """Raise if this thread has ended the call."""
        if self._verdict is not None:
            raise CollectiveMismatch(self._verdict)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        before = None
        while not self._stopped.wait(_INTERVAL_S):
            running = self.running
            if running is not None and running is before:
                try:
                    self._verdict = self._rendezvous.deadlock(*running)
                except dist.DistError:
                    return  # the store is gone, and the job with it
                if self._verdict is not None:
                    self._rendezvous.report_cause(CollectiveMismatch(self._verdict))
                    self._groups.cut(self._groups.epoch)
                    return
            before = running
