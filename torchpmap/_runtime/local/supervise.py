"""What to do when a worker fails or dies: a pure state machine, events in, actions out.

::

    HEALTHY --Failed/Exited--> DRAINING --all drained or dead--> REBUILDING --all ready--> HEALTHY
                                  ^                                  |
                                  +-----------Failed/Exited----------+
    more than ``max_attempts`` rebuilds in a row --> CLOSED

* DRAINING: every surviving rank first finishes (or skips) what was sent before, because a rank
  blocked in a collective with the failed one reports a *consequence*, often before the cause
  arrives.  The cause is chosen when all have answered.
* A rank that is still busy after a moment is cancelled, if what it does is poisoned anyway.  It is
  never killed for being slow: computing for an hour is no error.  It is killed when its process is
  stopped, which the owner notices, and when a call does not end after its timeout.
* The cause is, in this order: an exception of the user's code (earliest call, lowest rank), a
  death, a communication error.
* A rank that drained without failing has completed all its calls, so only calls from the earliest
  reported failure on are poisoned, and only values with a shard on a dead rank are lost.

No clock, no sockets, no processes here: ``_runtime/local/pool`` performs the actions and reports
the events.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Phase(enum.Enum):
    HEALTHY = "healthy"
    DRAINING = "draining"
    REBUILDING = "rebuilding"
    CLOSED = "closed"


# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    """A call raised on ``rank``; ``communication`` when the exception came from a collective and
    may be a consequence.
    """

    rank: int
    seq: int
    communication: bool
    packed: bytes
    where: str


@dataclass(frozen=True)
class Exited:
    """The process of ``rank`` ended."""

    rank: int
    exitcode: int | None
    pid: int
    last_words: str = ""
    why: str = ""
    """Why the pool killed it, if it did."""
    doomed: int | None = None
    """The earliest request that the rank has not answered."""


@dataclass(frozen=True)
class Drained:
    """``rank`` has finished or skipped everything sent before the drain."""

    rank: int


@dataclass(frozen=True)
class Ready:
    """``rank`` has joined the groups of ``epoch``."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class Lingering:
    """The draining ranks have had time to finish what was nearly done."""


@dataclass(frozen=True)
class Overdue:
    """A call took longer than its timeout; ``failure`` says so."""

    failure: Failed


@dataclass(frozen=True)
class GivenUp:
    """The caller of a call was interrupted; ``failure`` is for the calls queued behind it."""

    failure: Failed


@dataclass(frozen=True)
class Stubborn:
    """The cancelled ranks have had time to obey."""


@dataclass(frozen=True)
class Stopped:
    """The process of ``rank`` does not run, and a caller has waited for it long enough."""

    rank: int


Event = Failed | Exited | Drained | Ready | Lingering | Overdue | GivenUp | Stubborn | Stopped


# -- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Break the connections of the groups of ``epoch`` on ``ranks``, so that no rank waits for a
    rank that will not come.
    """

    epoch: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    """End the calls from ``seq`` on that these ranks run."""

    seq: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Drain:
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Kill:
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Respawn:
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Regroup:
    epoch: int


@dataclass(frozen=True)
class Announce:
    verdict: Verdict


@dataclass(frozen=True)
class Close:
    """The pool cannot be repaired."""

    verdict: Verdict


Action = Abort | Cancel | Drain | Kill | Respawn | Regroup | Announce | Close


@dataclass(frozen=True)
class Verdict:
    """Why a repair was needed and what it cost."""

    failures: tuple[Failed, ...]
    deaths: tuple[Exited, ...]

    @property
    def first_seq(self) -> int | None:
        """The earliest call that did not complete on a surviving rank; later ones are poisoned with
        it.
        """
        return min((f.seq for f in self.failures), default=None)

    @property
    def cause(self) -> Failed | Exited:
        users = [f for f in self.failures if not f.communication]
        if users:
            return min(users, key=lambda f: (f.seq, f.rank))
        if self.deaths:
            return min(self.deaths, key=lambda d: d.rank)
        return min(self.failures, key=lambda f: (f.seq, f.rank))

    @property
    def consequences(self) -> tuple[Failed | Exited, ...]:
        events: tuple[Failed | Exited, ...] = (*self.deaths, *self.failures)
        return tuple(event for event in events if event is not self.cause)


@dataclass
class Supervisor:
    """The state of one pool of ``size`` ranks (used under one lock by its owner)."""

    size: int
    max_attempts: int = 3
    phase: Phase = Phase.HEALTHY
    epoch: int = 0
    _failures: list[Failed] = field(default_factory=list)
    _deaths: list[Exited] = field(default_factory=list)
    _dead: set[int] = field(default_factory=set)
    _settled: set[int] = field(default_factory=set)
    _attempts: int = 0
    _is_overdue: bool = False

    def on(self, event: Event) -> list[Action]:
        if self.phase is Phase.CLOSED:
            return []
        match event:
            case Failed():
                return self._failed(event)
            case Exited():
                return self._exited(event)
            case Drained(rank=rank):
                if self.phase is not Phase.DRAINING:
                    return []
                self._settled.add(rank)
                return self._rebuild_when_settled()
            case Ready(rank=rank, epoch=epoch):
                if self.phase is not Phase.REBUILDING or epoch != self.epoch:
                    return []
                self._settled.add(rank)
                return self._report_when_settled()
            case Lingering():
                return self._cancel()
            case Overdue(failure=failure):
                if self.phase is not Phase.HEALTHY:
                    return []  # another failure was first
                self._is_overdue = True
                return [*self._failed(failure), Cancel(failure.seq, self._alive())]
            case GivenUp(failure=failure):
                if self.phase is Phase.REBUILDING:
                    return []  # it has ended already
                return [*self._failed(failure), Cancel(failure.seq, self._alive())]
            case Stubborn():
                late = self.unsettled()
                draining = self.phase is Phase.DRAINING
                return [Kill(late)] if self._is_overdue and draining and late else []
            case Stopped(rank=rank):
                return [Kill((rank,))] if rank not in self._dead else []

    def _failed(self, event: Failed) -> list[Action]:
        self._failures.append(event)
        return [] if self.phase is Phase.DRAINING else self._drain()

    def _exited(self, event: Exited) -> list[Action]:
        if event.rank in self._dead:
            return []
        self._dead.add(event.rank)
        self._deaths.append(event)
        if self.phase is Phase.DRAINING:
            # a rank that still drains may wait for the one that has just died
            return [Abort(self.epoch, self._alive()), *self._rebuild_when_settled()]
        return self._drain()

    def _cancel(self) -> list[Action]:
        poisoned = [failure.seq for failure in self._failures]
        poisoned += [death.doomed for death in self._deaths if death.doomed is not None]
        late = self.unsettled()
        if self.phase is not Phase.DRAINING or not poisoned or not late:
            return []
        return [Cancel(min(poisoned), late)]

    def unsettled(self) -> tuple[int, ...]:
        """The ranks that a repair waits for."""
        if self.phase not in (Phase.DRAINING, Phase.REBUILDING):
            return ()
        return tuple(rank for rank in self._alive() if rank not in self._settled)

    def _alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self._dead)

    def _drain(self) -> list[Action]:
        self.phase = Phase.DRAINING
        self._settled.clear()
        alive = self._alive()
        return [Abort(self.epoch, alive), Drain(alive), *self._rebuild_when_settled()]

    def _rebuild_when_settled(self) -> list[Action]:
        if not self._settled.issuperset(self._alive()):
            return []
        self._attempts += 1
        if self._attempts > self.max_attempts:
            self.phase = Phase.CLOSED
            return [Close(self.verdict())]
        dead = tuple(sorted(self._dead))
        self._dead.clear()
        self._settled.clear()
        self.phase = Phase.REBUILDING
        self.epoch += 1
        return [*([Respawn(dead)] if dead else []), Regroup(self.epoch)]

    def _report_when_settled(self) -> list[Action]:
        if len(self._settled) < self.size:
            return []
        verdict = self.verdict()
        self.phase = Phase.HEALTHY
        self._failures.clear()
        self._deaths.clear()
        self._settled.clear()
        self._attempts = 0
        self._is_overdue = False
        return [Announce(verdict)]

    def verdict(self) -> Verdict:
        """The verdict so far."""
        return Verdict(tuple(self._failures), tuple(self._deaths))
