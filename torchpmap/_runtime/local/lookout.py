"""Looks twice a second at the workers that threads wait for (monitor thread; see ``Vigil``)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchpmap._base.devices import Device
from torchpmap._runtime.local.crew import Crew
from torchpmap._runtime.local.forkserver import child_programs, process_state
from torchpmap._runtime.local.outbox import Outbox
from torchpmap._runtime.local.supervise import Phase, Supervisor
from torchpmap._runtime.local.vigil import Awaited, Vigil, helped, notice

_CALL = "it runs a call"
_REST = "it finishes the calls sent before another device failed"
_START = "it starts, or connects to the others"


class Lookout:
    """One per pool."""

    def __init__(self, devices: Sequence[Device], crew: Crew, outbox: Outbox) -> None:
        self._devices = devices
        self._crew = crew
        self._outbox = outbox
        self._vigil = Vigil()

    def after_repair(self, supervisor: Supervisor) -> list[int]:
        """The ranks that a repair waits for and that are stopped for good."""
        what = _START if supervisor.phase is Phase.REBUILDING else _REST
        ranks = supervisor.unsettled()
        return self._look({rank: Awaited(what, supervisor.epoch) for rank in ranks})

    def after_calls(self) -> list[int]:
        """The ranks that callers wait for and that are stopped for good."""
        crew, progress = self._crew, self._crew.progress
        found = {rank: Awaited(_CALL, progress[rank]) for rank in progress.awaited()}
        blocked = set(self._outbox.blocked)
        for rank, worker in crew.workers.items():
            if worker.socket in blocked:
                found[rank] = Awaited(_CALL, progress[rank])
        for pending in tuple(crew.monitor.pending.values()):
            for rank in tuple(pending.missing):
                found[rank] = Awaited(pending.what, progress[rank])
        return self._look(found)

    def _look(self, awaited: dict[int, Awaited]) -> list[int]:
        stopped, slow = self._vigil.look(time.monotonic(), awaited, self._state_of)
        if slow:
            named = [
                (self._name(rank), awaited[rank].what, helped(state, self._programs_of(rank)))
                for rank, state, _ in slow
            ]
            self._crew.monitor.say(notice(named, slow[0][2]))
        return stopped

    def _name(self, rank: int) -> str:
        return f"{self._devices[rank]} (rank {rank}, pid {self._crew.workers[rank].pid})"

    def _programs_of(self, rank: int) -> list[str]:
        pid = self._crew.workers[rank].pid
        return [] if pid is None else child_programs(pid)

    def _state_of(self, rank: int) -> str:
        pid = self._crew.workers[rank].pid
        return "" if pid is None else process_state(pid)
