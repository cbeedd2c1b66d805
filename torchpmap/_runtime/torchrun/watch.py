"""Notices a call that can never end, because another process waits for this one in another call.

A process that runs a plan for the first time waits for the others (see ``Rendezvous``).  If one of
them is in a collective of another plan meanwhile, each waits for the other, and Gloo gives up only
after half an hour.  This thread looks once a second, in calls that take longer than that.

It also ends calls that exceed their timeout.  A call that waits in a collective is freed, and
raises.  A call that still goes on is in the user's code, where only the end of the process ends it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CallTimeout, CollectiveMismatch, PmapError
from torchpmap._runtime.groups.process_groups import Groups
from torchpmap._runtime.torchrun.rendezvous import Rendezvous

_INTERVAL_S = 1.0
_STOPPING_S = 1.0
_OBEY_S = 2.0
"""How long a call may go on after its time is up."""
_PAUSE_S = 0.05


class Watch:
    """``begin`` and ``running`` belong to the thread that makes calls."""

    def __init__(
        self, rendezvous: Rendezvous, groups: Groups, end_process: Callable[[BaseException], None]
    ) -> None:
        """``end_process``: called with an error if the call does not return to raise it."""
        self._end_process = end_process
        self._rendezvous = rendezvous
        self._groups = groups
        self.running: tuple[tuple[int, ...], str] | None = None
        """Ranks and name of the call in progress."""
        self._verdict: PmapError | None = None
        self._end = math.inf
        self._timeout = math.inf
        self._caller = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchpmap-watch", daemon=True)
        self._thread.start()

    def begin(self, ranks: tuple[int, ...], name: str, timeout: float | None) -> None:
        """A call with collectives over ``ranks`` begins."""
        self._rendezvous.calls[ranks] += 1
        if timeout is not None:
            self._timeout, self._caller = timeout, threading.get_ident()
            self._end = time.monotonic() + timeout
        self.running = ranks, name

    def end(self) -> None:
        """The call has ended; raises if it took too long."""
        self.running, self._end = None, math.inf
        if type(self._verdict) is CallTimeout:
            raise self._verdict

    def raise_verdict(self) -> None:
        """Raise if the watching thread has ended the call."""
        if self._verdict is not None:
            raise self._verdict

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_STOPPING_S)
        if self._thread.is_alive():  # it waits for an answer of the store
            self._rendezvous.store.abort()
            self._thread.join(_STOPPING_S)

    def _run(self) -> None:
        before = None
        while not self._stopped.wait(_INTERVAL_S):
            running = self.running
            if running is not None and time.monotonic() >= self._end:
                self._expire(running)
                return
            if running is not None and running is before:
                try:
                    crossed = self._rendezvous.deadlock(*running)
                except (dist.DistError, PmapError):
                    return  # the store is gone or was tampered with; the main thread will raise
                if crossed is not None:
                    self._conclude(CollectiveMismatch(crossed))
                    return
            before = running

    def _conclude(self, verdict: PmapError) -> None:
        self._verdict = verdict
        self._rendezvous.report_cause(verdict)
        self._groups.abort(self._groups.epoch)

    def _expire(self, running: tuple[tuple[int, ...], str]) -> None:
        waits = self._groups.waits()
        frame = sys._current_frames().get(self._caller)
        stack = "".join(traceback.format_stack(frame))
        what = f"waits for {waits}" if waits is not None else "runs"
        self._conclude(
            CallTimeout(
                f"{running[1]} did not end within its timeout of {self._timeout:g} s; rank "
                f"{self._rendezvous.place.rank} {what}:\n{stack}"
            )
        )
        deadline = Deadline(_OBEY_S)
        while self.running is running:
            if deadline.passed:
                assert self._verdict is not None
                self._end_process(self._verdict)
            self._stopped.wait(_PAUSE_S)
