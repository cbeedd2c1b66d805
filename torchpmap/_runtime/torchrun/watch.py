"""Notices a call that can never end, because another process does not come to it.

A process that runs a plan for the first time waits for the others (see ``Rendezvous``).  If one of
them is in a collective of another plan meanwhile, each waits for the other, and Gloo gives up only
after half an hour.  NCCL does not even notice a process that has failed or ended.  This thread
looks once a second, in calls that take longer than that.

It also ends calls that exceed their timeout.  A call that waits in a collective is freed, and
raises.  A call that still goes on is in the user's code, where only the end of the process ends it.

On an asynchronous device a call is in progress from when the device comes to it until it is done
with it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback

import torch.distributed as dist

from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CallTimeout, CollectiveMismatch, PmapError, WorkerError
from torchpmap._runtime.groups.process_groups import Groups
from torchpmap._runtime.torchrun.failure import Failures
from torchpmap._runtime.torchrun.rendezvous import Rendezvous, lost

_INTERVAL_S = 1.0
_STOPPING_S = 1.0
_OBEY_S = 2.0
"""How long a call may go on after its time is up."""
_PAUSE_S = 0.05


Watched = tuple[tuple[int, ...], int, str, float | None, int]
"""A call that may have to be ended: the ranks its collectives wait for, which of the calls over
these it is, its name, its timeout, and the thread that has made it.  (Every call makes one: a class
with names would take five times as long.)
"""


class Watch:
    """``announced``: the thread that makes calls; ``begin`` and ``end``: the one that runs them, or
    that sees the device run them.
    """

    def __init__(self, rendezvous: Rendezvous, groups: Groups, failures: Failures) -> None:
        self._rendezvous = rendezvous
        self._calls = rendezvous.calls
        self._groups = groups
        self._failures = failures
        self._running: Watched | None = None
        self._end = math.inf
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchpmap-watch", daemon=True)
        self._thread.start()

    def announced(self, ranks: tuple[int, ...], name: str, timeout: float | None) -> Watched:
        """A call with collectives over ``ranks``, in its place among all calls."""
        number = self._calls[ranks] = self._calls[ranks] + 1
        return ranks, number, name, timeout, threading.get_ident()

    def begin(self, call: Watched) -> None:
        timeout = call[3]
        if timeout is not None:
            self._end = time.monotonic() + timeout
        self._running = call

    def end(self) -> None:
        """The call has ended; raises if it took too long."""
        self._running, self._end = None, math.inf
        verdict = self._failures.verdict
        if type(verdict) is CallTimeout:
            raise verdict

    def shown(self, thread: int) -> str:
        """What a thread that makes calls does, and its stack (any thread)."""
        waits = self._groups.waits()
        what = f"waits for {waits}" if waits is not None else "runs"
        stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
        return f"{what}:\n{stack}"

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_STOPPING_S)
        if self._thread.is_alive():  # it waits for an answer of the store
            self._rendezvous.store.abort()
            self._thread.join(_STOPPING_S)

    def _run(self) -> None:
        before = None
        while not self._stopped.wait(_INTERVAL_S):
            running = self._running
            if running is not None and time.monotonic() >= self._end:
                self._expire(running)
                return
            if running is not None and running is before:
                try:
                    verdict = self._verdict_on(running)
                except (dist.DistError, PmapError):
                    return  # the store is gone or was tampered with; the main thread will raise
                if verdict is not None:
                    self._failures.conclude(verdict)
                    return
            before = running

    def _verdict_on(self, running: Watched) -> PmapError | None:
        """Why a call never ends; None if that is not certain."""
        ranks, number, name, _, _ = running
        lost_peers = self._groups.lost_peers()  # first: who leaves or fails says so before
        try:
            self._rendezvous.have_left(ranks)  # as long as there is a store
            lost_peers = [each for each in lost_peers if not self._rendezvous.have_left(each)]
            self._rendezvous.raise_if_in_vain((ranks, number), name)
        except (WorkerError, CollectiveMismatch) as verdict:
            return verdict
        except dist.DistError as error:
            if lost_peers:  # it has kept the store
                return lost(error)
            raise
        return lost(None) if lost_peers else None

    def _expire(self, running: Watched) -> None:
        _, _, name, timeout, caller = running
        verdict = CallTimeout(
            f"{name} did not end within its timeout of {timeout:g} s; rank "
            f"{self._rendezvous.place.rank} {self.shown(caller)}"
        )
        self._failures.conclude(verdict)
        deadline = Deadline(_OBEY_S)
        while self._running is running:
            if deadline.passed:
                self._failures.end_process(verdict)
            self._stopped.wait(_PAUSE_S)
