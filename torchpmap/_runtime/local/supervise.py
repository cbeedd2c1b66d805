"""What to do when a worker fails or dies: a pure state machine, events in, actions out.

::

    HEALTHY --Failed/Exited--> DRAINING --all drained or dead--> REBUILDING --all ready--> HEALTHY
                                  ^                                  |
                                  +-----------Failed/Exited----------+
    more than ``max_attempts`` rebuilds in a row --> CLOSED --go_on--> HEALTHY, without the dead

* DRAINING: every surviving rank first finishes (or skips) what was sent before, because a rank
  blocked in a collective with the failed one reports a *consequence*, often before the cause
  arrives.  The cause is chosen when all have answered.
* A rank that is still busy after a moment is cancelled, if what it does is poisoned anyway.  It is
  never killed for being slow: computing for an hour is no error.  It is killed when its process is
  stopped, which the owner notices, when a call does not end after its timeout, and when a function
  or a compiler goes on long after it was cancelled.
* The cause is, in this order: an exception of the user's code (earliest call, lowest rank), a
  death, a communication error.
* A rank that drained without failing has completed all its calls, so only calls from the earliest
  reported failure on are poisoned, and only values with a shard on a dead rank are lost.

No clock, no sockets, no processes here: ``_runtime/local/pool`` performs the actions and reports
the events.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchpmap._runtime.local.waits import STOPPED_S

_GRACE_S = 1.0
"""How long a rank may go on with a call that a failure elsewhere has poisoned."""
_OBEY_S = 2.0
"""How long a cancelled rank may go on after a call took too long."""
_INTERRUPTED_S = 10.0
"""How long a function may go on after it was cancelled, and a caller was interrupted."""
_STUCK_S = 60.0
"""The same if no caller was interrupted: a single operation of a function may be slow."""

_STOPPED = f"it had been stopped for {STOPPED_S:g} s while it was waited for"
_OVERDUE = "it went on after the timeout of a call"
_STUCK = "it went on after its call had failed or was interrupted"


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
    unanswered: int | None = None
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
class StillDraining:
    """The ranks have been told to drain so many seconds ago."""

    seconds: float
    begun: Sequence[int]
    """For each rank, the last function or compilation that it has begun."""


@dataclass(frozen=True)
class Overdue:
    """A call of ``epoch`` took longer than its timeout; ``failure`` says so."""

    failure: Failed
    epoch: int


@dataclass(frozen=True)
class GivenUp:
    """The caller of a call was interrupted; ``failure`` is for the calls queued behind it."""

    failure: Failed


@dataclass(frozen=True)
class Impatient:
    """A caller that waited for the repair was interrupted."""


@dataclass(frozen=True)
class Stopped:
    """The process of ``rank`` does not run, and a caller has waited for it long enough."""

    rank: int


Event = Failed | Exited | Drained | Ready | StillDraining | Overdue | GivenUp | Impatient | Stopped


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
    why: str


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

    def explains(self, seq: int) -> bool:
        """Whether an exception of the user's code has poisoned command ``seq``."""
        return any(not each.communication and each.seq <= seq for each in self.failures)

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
    _finished: set[int] = field(default_factory=set)
    _attempts: int = 0
    _drained_for: float = 0.0
    _overdue_at: float = math.inf
    """How long the ranks had drained when a call took too long."""
    _interrupted_at: float = math.inf
    """The same when a caller was interrupted."""

    def on(self, event: Event) -> list[Action]:
        if self.phase is Phase.CLOSED:
            if isinstance(event, Exited):  # for ``go_on``
                self._dead.add(event.rank)
                self._deaths.append(event)
            return []
        match event:
            case Failed():
                return self._failed(event)
            case Exited():
                return self._exited(event)
            case Drained(rank=rank):
                if self.phase is not Phase.DRAINING:
                    return []
                self._finished.add(rank)
                return self._rebuild_when_finished()
            case Ready(rank=rank, epoch=epoch):
                if self.phase is not Phase.REBUILDING or epoch != self.epoch:
                    return []
                self._finished.add(rank)
                return self._report_when_ready()
            case StillDraining(seconds=seconds, begun=begun):
                self._drained_for = seconds
                return self._hurry(begun) if self.phase is Phase.DRAINING else []
            case Overdue(failure=failure, epoch=epoch):
                # else it has ended: all that an epoch has begun ends before the next one
                return self._overdue(failure) if epoch == self.epoch else []
            case GivenUp(failure=failure):
                if self.phase is Phase.REBUILDING:
                    return []  # it has ended already
                actions = [*self._failed(failure), Cancel(failure.seq, self._alive())]
                self._interrupted_at = min(self._interrupted_at, self._drained_for)
                return actions
            case Impatient():
                if self.phase is Phase.DRAINING:
                    self._interrupted_at = min(self._interrupted_at, self._drained_for)
                return []
            case Stopped(rank=rank):
                return [Kill((rank,), _STOPPED)] if rank not in self._dead else []

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
            return [Abort(self.epoch, self._alive()), *self._rebuild_when_finished()]
        return self._drain()

    def _overdue(self, failure: Failed) -> list[Action]:
        is_explained = bool(self._deaths) or self.verdict().explains(failure.seq)
        actions = [] if is_explained else self._failed(failure)
        self._overdue_at = min(self._overdue_at, self._drained_for)
        late = self.unfinished()
        return [*actions, Cancel(failure.seq, late)] if late else actions

    def _hurry(self, begun: Sequence[int]) -> list[Action]:
        """Cancel ranks that are still busy, and end those that do not obey."""
        poisoned = [failure.seq for failure in self._failures]
        poisoned += [death.unanswered for death in self._deaths if death.unanswered is not None]
        late, first = self.unfinished(), min(poisoned, default=math.inf)
        if late and self._drained_for >= self._overdue_at + _OBEY_S:
            return [Kill(late, _OVERDUE)]
        patience = min(_STUCK_S, self._interrupted_at + _INTERRUPTED_S)
        stuck = tuple(rank for rank in late if begun[rank] >= first)
        actions: list[Action] = []
        if late and poisoned and self._drained_for >= _GRACE_S:
            actions.append(Cancel(min(poisoned), late))
        if stuck and self._drained_for >= patience:
            actions.append(Kill(stuck, _STUCK))
        return actions

    @property
    def runs_calls(self) -> bool:
        """Whether ranks may be at calls."""
        return self.phase in (Phase.HEALTHY, Phase.DRAINING)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank is known to run nothing that was sent before the failure."""
        return self.phase is not Phase.HEALTHY and (rank in self._dead or rank in self._finished)

    def unfinished(self) -> tuple[int, ...]:
        """The ranks that a repair waits for."""
        if self.phase not in (Phase.DRAINING, Phase.REBUILDING):
            return ()
        return tuple(rank for rank in self._alive() if rank not in self._finished)

    def _alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self._dead)

    def _drain(self) -> list[Action]:
        self.phase = Phase.DRAINING
        self._finished.clear()
        self._drained_for, self._overdue_at, self._interrupted_at = 0.0, math.inf, math.inf
        alive = self._alive()
        return [Abort(self.epoch, alive), Drain(alive), *self._rebuild_when_finished()]

    def _rebuild_when_finished(self) -> list[Action]:
        if not self._finished.issuperset(self._alive()):
            return []
        self._attempts += 1
        if self._attempts > self.max_attempts:
            self.phase = Phase.CLOSED
            return [Close(self.verdict())]
        dead = tuple(sorted(self._dead))
        self._dead.clear()
        self._finished.clear()
        self.phase = Phase.REBUILDING
        self.epoch += 1
        return [*([Respawn(dead)] if dead else []), Regroup(self.epoch)]

    def _report_when_ready(self) -> list[Action]:
        if len(self._finished) < self.size:
            return []
        self._attempts = 0
        return [Announce(self.go_on())]

    def go_on(self) -> Verdict:
        """Begin anew; when closed, with the ranks that are left.  As no rebuild will succeed then,
        the next failure closes at once.
        """
        verdict = self.verdict()
        self.epoch += self.phase is Phase.CLOSED
        self.phase = Phase.HEALTHY
        self._failures.clear()
        self._deaths.clear()
        self._finished.clear()
        return verdict

    def verdict(self) -> Verdict:
        """The verdict so far."""
        return Verdict(tuple(self._failures), tuple(self._deaths))
