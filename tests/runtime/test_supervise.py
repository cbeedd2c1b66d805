"""Covers: _runtime/local/supervise.py. No process is started: events go in, actions come out."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchpmap._runtime.local.supervise import (
    Abort,
    Announce,
    Cancel,
    Close,
    Drain,
    Drained,
    Exited,
    Failed,
    GivenUp,
    Impatient,
    Kill,
    Overdue,
    Phase,
    Ready,
    Regroup,
    Respawn,
    StillDraining,
    Stopped,
    Supervisor,
    Verdict,
)


def user(rank: int, seq: int = 1) -> Failed:
    return Failed(rank, seq, False, b"", f"rank {rank}")


def communication(rank: int, seq: int = 1) -> Failed:
    return Failed(rank, seq, True, b"", f"rank {rank}")


def death(rank: int, unanswered: int | None = None) -> Exited:
    return Exited(rank, -9, 1000 + rank, unanswered=unanswered)


def supervisor(*events, size=3, **settings) -> Supervisor:
    """A supervisor that has seen these events."""
    result = Supervisor(size, **settings)
    for event in events:
        result.on(event)
    return result


def waited(seconds: float, *begun: int) -> StillDraining:
    """``begun``: what each rank has begun last; by default none has begun a function."""
    return StillDraining(seconds, begun or (0,) * 3)


OVERDUE = "it went on after the timeout of a call"
STUCK = "it went on after its call had failed or was interrupted"
STOPPED = "it had been stopped for 5 s while it was waited for"
EVERYONE = (Drained(0), Drained(1), Drained(2))
ALL_READY = (Ready(0, 1), Ready(1, 1), Ready(2, 1))

DRAINING, REBUILDING, HEALTHY = Phase.DRAINING, Phase.REBUILDING, Phase.HEALTHY
CUT = [Abort(0, (0, 1, 2)), Drain((0, 1, 2))]
OVER = [Overdue(user(1, 5), 0), Drained(0)]
GIVEN_UP = [GivenUp(user(1, 5)), Drained(0)]
FAILED = [user(0, 5), Drained(0), Drained(1)]
TOO_LATE = [*FAILED, waited(30), Overdue(user(2, 5), 0)]

TRANSITIONS = {
    "a call that took too long is ended": (
        [], Overdue(user(1, 5), 0), [*CUT, Cancel(5, (0, 1, 2))], DRAINING),
    "if it does not end, its ranks are": (OVER, waited(2), [Kill((1, 2), OVERDUE)], DRAINING),
    "but they have time to obey": (OVER, waited(1.9), [Cancel(5, (1, 2))], DRAINING),
    "a call that takes too long while another failure is worked off is ended": (
        FAILED, Overdue(user(2, 5), 0), [Cancel(5, (2,))], DRAINING),
    "if it does not end then, its ranks are": (
        TOO_LATE, waited(32), [Kill((2,), OVERDUE)], DRAINING),
    "time to obey counts from when it was too late": (
        TOO_LATE, waited(31), [Cancel(5, (2,))], DRAINING),
    "a call that takes too long while a death is worked off is ended": (
        [death(0), Drained(1)], Overdue(user(2, 5), 0), [Cancel(5, (2,))], DRAINING),
    "a call that took too long has ended when all have": (
        [user(0, 5), *EVERYONE], Overdue(user(2, 5), 0), [], REBUILDING),
    "a call that took too long has ended before the repair": (
        [user(0, 5), *EVERYONE, *ALL_READY], Overdue(user(2, 5), 0), [], HEALTHY),
    "a call whose caller was interrupted is ended": (
        [], GivenUp(user(1, 5)), [*CUT, Cancel(5, (0, 1, 2))], DRAINING),
    "if it does not end, its ranks are, but later": (
        GIVEN_UP, waited(10, 5, 5, 5), [Cancel(5, (1, 2)), Kill((1, 2), STUCK)], DRAINING),
    "until then its ranks live": (GIVEN_UP, waited(9, 5, 5, 5), [Cancel(5, (1, 2))], DRAINING),
    "a rank that has not begun it lives": (
        GIVEN_UP, waited(100, 5, 5, 4), [Cancel(5, (1, 2)), Kill((1,), STUCK)], DRAINING),
    "a function that does not end after a failure elsewhere is ended much later": (
        FAILED, waited(60, 5, 5, 5), [Cancel(5, (2,)), Kill((2,), STUCK)], DRAINING),
    "it has a minute": (FAILED, waited(59, 5, 5, 5), [Cancel(5, (2,))], DRAINING),
    "less if a caller that waited for it was interrupted": (
        [*FAILED, waited(20, 5, 5, 5), Impatient()], waited(30, 5, 5, 5),
        [Cancel(5, (2,)), Kill((2,), STUCK)], DRAINING),
    "but ten seconds": ([*FAILED, waited(20, 5, 5, 5), Impatient()], waited(29, 5, 5, 5),
        [Cancel(5, (2,))], DRAINING),
    "a call that no failure concerns may take long": (
        [death(0), Drained(1)], waited(1000, 5, 5, 5), [], DRAINING),
    "also if a caller that waited for it was interrupted": (
        [death(0), Drained(1), Impatient()], waited(1000, 5, 5, 5), [], DRAINING),
    "an interrupted caller that waits for no rank changes nothing": ([], Impatient(), [], HEALTHY),
    "interrupted while another failure is worked off": (
        [user(0, 7), Drained(0)], GivenUp(user(1, 5)), [Cancel(5, (0, 1, 2))], DRAINING),
    "interrupted when all have ended what they did": (
        [user(1), *EVERYONE], GivenUp(user(1, 5)), [], REBUILDING),
    "drained twice counts once": ([user(1), Drained(0), Drained(0)], Drained(0), [], DRAINING),
    "a death is noticed once": ([death(1)], death(1), [], DRAINING),
    "ready of all": ([user(1, seq=7), *EVERYONE, Ready(0, 1), Ready(2, 1)], Ready(1, 1),
        [Announce(Verdict((user(1, seq=7),), ()))], HEALTHY),
    "ready while healthy": ([], Ready(0, 0), [], HEALTHY),
    "drained while healthy": ([], Drained(0), [], HEALTHY),
    "drained while rebuilding": ([user(1), *EVERYONE], Drained(0), [], REBUILDING),
    "who lingers in a poisoned call is cancelled": (
        [user(1, seq=7), Drained(0)], waited(1), [Cancel(7, (1, 2))], DRAINING),
    "who lingers in a call that waits for a dead rank": (
        [death(1, unanswered=9), Drained(0)], waited(1), [Cancel(9, (2,))], DRAINING),
    "who lingers in a call that a death does not concern goes on": (
        [death(1)], waited(1), [], DRAINING),
    "no rank lingers in a rebuild": ([user(1), *EVERYONE], waited(1), [], REBUILDING),
    "no rank lingers while healthy": ([], waited(1), [], HEALTHY),
    "a stopped rank is killed": ([], Stopped(1), [Kill((1,), STOPPED)], HEALTHY),
    "a stopped rank is killed while it drains": (
        [user(0)], Stopped(1), [Kill((1,), STOPPED)], DRAINING),
    "a dead rank is not killed again": ([death(1)], Stopped(1), [], DRAINING),
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "event", "actions", "phase"), TRANSITIONS.values(), ids=TRANSITIONS.keys()
)
def test_transition(before, event, actions, phase):
    tested = supervisor(*before)
    assert tested.on(event) == actions
    assert tested.phase is phase


def test_a_closed_pool_goes_on_with_the_ranks_that_are_left():
    tested = supervisor(death(1), Drained(0), Drained(2), max_attempts=0)
    assert tested.phase is Phase.CLOSED
    assert tested.on(death(0)) == []
    assert [each.rank for each in tested.go_on().deaths] == [1, 0]
    assert tested.phase is HEALTHY
    assert tested.epoch == 1
    assert tested.on(death(2)) == [
        *(Abort(1, ()), Drain(()), Close(Verdict((), (death(2),)))),
    ]


CAUSES = {
    "user error over death": ([death(0), user(2)], user(2)),
    "user error over communication": ([communication(0, 1), user(2, 5)], user(2, 5)),
    "death over communication": ([communication(0), death(2)], death(2)),
    "earliest user error": ([user(0, 5), user(2, 4)], user(2, 4)),
    "lowest rank of equally early ones": ([user(2, 4), user(1, 4)], user(1, 4)),
    "lowest rank of the dead": ([death(2), death(1)], death(1)),
    "earliest communication error": (
        [communication(0, 5), communication(1, 4)],
        communication(1, 4),
    ),
}


@pytest.mark.parametrize(("events", "cause"), CAUSES.values(), ids=CAUSES.keys())
def test_cause(events, cause):
    failures = tuple(e for e in events if isinstance(e, Failed))
    verdict = Verdict(failures, tuple(e for e in events if isinstance(e, Exited)))
    assert verdict.cause == cause
    assert set(verdict.consequences) == set(events) - {cause}


def test_first_seq_is_the_earliest_failed_call():
    assert Verdict((user(0, 9), communication(1, 8)), (death(2),)).first_seq == 8
    assert Verdict((), (death(2),)).first_seq is None


class Pool(RuleBasedStateMachine):
    """The supervisor against a model of a pool whose workers fail and die at any moment."""

    @initialize(size=st.integers(1, 4), max_attempts=st.integers(1, 3), starting=st.booleans())
    def start(self, size, max_attempts, starting):
        self.size = size
        self.max_attempts = max_attempts
        self.tested = Supervisor(size, max_attempts)
        if starting:
            self.tested = Supervisor(size, max_attempts, phase=Phase.REBUILDING, epoch=1)
        self.epoch = self.tested.epoch
        self.alive = set(range(size))
        self.to_drain = set()
        self.to_join = set(range(size)) if starting else set()
        self.events = []
        self.attempts = 0
        self.seq = 0
        self.reports = 0
        self.incidents = int(starting)
        self.closed = False

    def happens(self, event):
        """Feed an event and carry out what is asked for, as the runtime would."""
        was_healthy = self.tested.phase is Phase.HEALTHY
        if isinstance(event, Failed | Exited) and not self.closed:
            self.events.append(event)
            self.incidents += was_healthy
        actions = self.tested.on(event)
        assert not (self.closed and actions), "a closed pool asks for nothing"
        for action in actions:
            match action:
                case Abort(epoch=epoch, ranks=ranks):
                    assert epoch == self.epoch, "a cut of another epoch would hit innocent calls"
                    assert set(ranks) == self.alive
                case Drain(ranks=ranks):
                    assert set(ranks) == self.alive
                    self.to_drain = set(ranks)
                    self.to_join = set()
                case Kill(ranks=ranks, why=why):
                    assert ranks
                    assert why
                    assert self.alive.issuperset(ranks)
                case Cancel(seq=seq, ranks=ranks):
                    assert set(ranks) == self.to_drain
                    assert ranks
                    assert seq == min(e.seq for e in self.events if isinstance(e, Failed))
                case Respawn(ranks=ranks):
                    assert not self.alive & set(ranks), "only the dead are started again"
                    self.alive |= set(ranks)
                case Regroup(epoch=epoch):
                    assert self.alive == set(range(self.size)), "regrouping waits for every rank"
                    assert not self.to_drain, "regrouping while calls of the last epoch run"
                    assert epoch == self.epoch + 1
                    self.epoch = epoch
                    self.to_join = set(self.alive)
                    self.attempts += 1
                case Announce(verdict=verdict):
                    self.check(verdict)
                    self.reports += 1
                    self.attempts = 0
                case Close(verdict=verdict):
                    assert self.attempts == self.max_attempts
                    self.check(verdict)
                    self.closed = True

    def check(self, verdict):
        """The verdict names everything since the last one, and the right thing as its cause."""
        events, self.events = self.events, []
        assert [*verdict.failures] == [e for e in events if isinstance(e, Failed)]
        assert [*verdict.deaths] == [e for e in events if isinstance(e, Exited)]
        if events:
            rules = [
                lambda e: isinstance(e, Failed) and not e.communication,
                lambda e: isinstance(e, Exited),
                lambda e: True,
            ]
            strongest = next(r for r in rules if any(map(r, events)))
            assert strongest(verdict.cause)
            assert len(verdict.consequences) == len(events) - 1

    @rule(data=st.data(), is_communication=st.booleans())
    def call_fails(self, data, is_communication):
        if self.alive:
            self.seq += 1
            rank = data.draw(st.sampled_from(sorted(self.alive)))
            self.happens(Failed(rank, self.seq, is_communication, b"", ""))

    @rule(data=st.data())
    def worker_exits(self, data):
        if self.alive:
            rank = data.draw(st.sampled_from(sorted(self.alive)))
            self.alive.discard(rank)
            self.to_drain.discard(rank)
            self.to_join.discard(rank)
            self.happens(Exited(rank, -9, 0))

    @precondition(lambda self: self.to_drain)
    @rule(data=st.data())
    def rank_drains(self, data):
        rank = data.draw(st.sampled_from(sorted(self.to_drain)))
        self.to_drain.discard(rank)
        self.happens(Drained(rank))

    @precondition(lambda self: self.to_join)
    @rule(data=st.data())
    def rank_joins(self, data):
        rank = data.draw(st.sampled_from(sorted(self.to_join)))
        self.to_join.discard(rank)
        self.happens(Ready(rank, self.epoch))

    @rule(data=st.data())
    def stale_ready(self, data):
        rank = data.draw(st.integers(0, self.size - 1))
        before = self.reports
        self.happens(Ready(rank, self.epoch - 1))
        assert self.reports == before

    @rule(seconds=st.floats(0, 100), begun=st.lists(st.integers(0, 50), min_size=4, max_size=4))
    def they_still_drain(self, seconds, begun):
        self.happens(StillDraining(seconds, begun))

    @precondition(lambda self: self.alive and self.tested.phase is not Phase.REBUILDING)
    @rule(data=st.data())
    def call_takes_too_long(self, data):
        """A failure of its own only if nothing explains it; who does not obey is ended.

        In REBUILDING it is one of the last epoch, which is no news: TRANSITIONS.
        """
        rank = data.draw(st.sampled_from(sorted(self.alive)))
        failure = Failed(rank, self.seq + 1, False, b"", "")
        late, before = self.tested.unfinished(), len(self.tested.verdict().failures)
        is_new = self.tested.phase is Phase.HEALTHY and not self.closed
        actions = self.tested.on(Overdue(failure, self.epoch))
        recorded = len(self.tested.verdict().failures) - before
        assert recorded or not is_new
        self.events += [failure] * recorded
        self.incidents += is_new
        for action in actions:
            assert isinstance(action, Abort | Drain | Cancel)
            if isinstance(action, Drain):
                self.to_drain, self.to_join = set(self.alive), set()
        if self.tested.phase is Phase.DRAINING and late:
            assert Cancel(failure.seq, late) in actions
            seconds = self.tested._drained_for + 2
            assert Kill(late, OVERDUE) in self.tested.on(StillDraining(seconds, (0,) * 4))

    @rule()
    def caller_is_interrupted(self):
        self.happens(Impatient())

    @rule(data=st.data())
    def rank_is_stopped(self, data):
        self.happens(Stopped(data.draw(st.integers(0, self.size - 1))))

    @invariant()
    def who_is_waited_for(self):
        if hasattr(self, "tested") and not self.closed:
            assert set(self.tested.unfinished()) == self.to_drain | self.to_join

    @invariant()
    def healthy_only_when_settled(self):
        if not hasattr(self, "tested"):
            return
        assert (self.tested.phase is Phase.CLOSED) == self.closed
        if self.tested.phase is Phase.HEALTHY:
            assert self.alive == set(range(self.size))
            assert not self.to_drain
            assert not self.to_join
            assert not self.events
        if not self.closed:
            waiting = self.tested.phase is not Phase.HEALTHY
            assert self.reports + waiting == self.incidents, "one report per incident"

    @invariant()
    def never_stuck(self):
        """A rank's answer or end is awaited: a repair cannot wait for nothing."""
        if hasattr(self, "tested") and not self.closed and self.tested.phase is not Phase.HEALTHY:
            assert self.to_drain or self.to_join


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40)
