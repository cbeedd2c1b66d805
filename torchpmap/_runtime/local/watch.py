"""Looks at the workers that threads wait for, and at calls that may take only so long (monitor
thread); ``Waits`` decides what follows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchpmap._base.errors import CallTimeout, pack_exception
from torchpmap._runtime.local.forkserver import child_programs
from torchpmap._runtime.local.stacks import Look, Sight, described
from torchpmap._runtime.local.supervise import Event, Failed, Overdue, Stopped, Supervisor
from torchpmap._runtime.local.waits import Awaited, Limit, Waits, helped, notice
from torchpmap._runtime.local.workers import Workers

_TICK_S = 0.5
_SOON_S = 0.02
"""How soon it looks again while ranks are asked what they do."""
_STACKS_CHARS = 1 << 17
"""Length of the stacks of all ranks together in an error."""


class Watch:
    """One per pool."""

    def __init__(self, workers: Workers, supervisor: Supervisor) -> None:
        self._workers = workers
        self._supervisor = supervisor
        self._waits = Waits()
        self._overdue: tuple[Limit, list[int], Look] | None = None
        """A call whose time is up, and whose ranks are asked what they do."""

    @property
    def pause_s(self) -> float:
        """When to look again."""
        return _TICK_S if self._overdue is None else _SOON_S

    def limit(self, seq: int, ranks: Sequence[int], seconds: float, name: str) -> None:
        """Let a call take only so long (send lock held)."""
        end = time.monotonic() + seconds
        limit = Limit(seq, self._supervisor.epoch, ranks, seconds, name, end)
        self._waits.limits[seq] = limit

    def clear(self) -> None:
        """After a repair all calls have ended."""
        self._waits.limits.clear()

    def awaited(self, blocked: Iterable[object]) -> dict[int, str]:
        """The ranks that callers wait for, and what each does.  ``blocked``: full sockets."""
        what, workers = "it runs a call", self._workers
        found = dict.fromkeys(workers.progress.awaited(), what)
        found |= {
            rank: what for rank, worker in workers.by_rank.items() if worker.socket in blocked
        }
        for pending in tuple(workers.monitor.pending.values()):
            found |= dict.fromkeys(tuple(pending.missing), pending.what)
        return found

    def look(self, awaited: Mapping[int, str]) -> Iterator[Event]:
        """What has happened, to the ranks that are waited for and to any call."""
        now, workers, epoch = time.monotonic(), self._workers, self._supervisor.epoch
        doing = {k: Awaited(what, (epoch, workers.progress[k])) for k, what in awaited.items()}
        stopped, slow = self._waits.look(now, doing, lambda rank: workers.by_rank[rank].state)
        if slow:
            named = [
                (workers.name(rank), awaited[rank], helped(state, self._programs_of(rank)))
                for rank, state, _ in slow
            ]
            workers.monitor.say(notice(named, slow[0][2]))
        yield from map(Stopped, stopped)
        if self._overdue is None and self._supervisor.runs_calls:
            found = self._waits.overdue(now, workers.progress.rank, self._supervisor.has_ended)
            if found is not None:
                limit, late = found
                workers.monitor.withhold(limit.seq)
                self._overdue = (
                    limit,
                    late,
                    Look({k: workers.by_rank[k] for k in late}, interrupts=True),
                )
        if self._overdue is not None:
            limit, late, look = self._overdue
            sights = look.sights()
            if sights is not None:
                self._overdue = None
                yield Overdue(self._failed(limit, late, sights), limit.epoch)

    def _programs_of(self, rank: int) -> list[str]:
        pid = self._workers.by_rank[rank].pid
        return [] if pid is None else child_programs(pid)

    def _failed(self, limit: Limit, late: Sequence[int], sights: Mapping[int, Sight]) -> Failed:
        lines, stacks = [], []
        for rank in limit.ranks:
            where, sight = self._workers.name(rank), sights.get(rank)
            what = "has finished it" if sight is None else described(sight, limit.seq)
            lines.append(f"  {where} {what}")
            if sight is not None:
                shown = sight.stack[: _STACKS_CHARS // len(late)] or "  (no Python stack)"
                stacks.append(f"{where}, innermost frame first:\n{shown}")
        error = CallTimeout(
            f"{limit.name} did not end within its timeout of {limit.seconds:g} s:\n"
            + "\n".join(lines)
        )
        packed = pack_exception(error, limit=2 * _STACKS_CHARS, trace="\n".join(stacks))
        return Failed(late[0], limit.seq, False, packed, f"while running {limit.name}")
