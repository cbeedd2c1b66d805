"""The worker processes of one host: sends them commands in one order, and repairs them.

One lock, the *send lock*, gives all ranks the same order of commands, and so of collectives.  The
thread that holds it waits for nothing.  Only the sockets' buffers limit how far commands run ahead;
a caller whose command finds no room waits without the lock.

The monitor thread notices failures, and ``Supervisor`` judges them.  The monitor aborts the process
groups at once, so that no rank stays blocked.  The repair itself (drain, respawn, regroup) begins
when the next caller needs the pool.  From the first sign of a failure until the pool is repaired
``broken`` keeps all threads from sending.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torchpmap._base.busy import waiting
from torchpmap._base.config import Config
from torchpmap._base.devices import Device
from torchpmap._base.ending import sleep_if_ending, surely
from torchpmap._base.errors import RuntimeClosed
from torchpmap._runtime import wire
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._runtime.local.incidents import Era, Incidents, exception_of, given_up
from torchpmap._runtime.local.monitor import Pending
from torchpmap._runtime.local.outbox import Outbox, wait_for_room
from torchpmap._runtime.local.reentry import held_here, refuse, refuse_to_wait
from torchpmap._runtime.local.repair import Repair
from torchpmap._runtime.local.supervise import (
    Abort,
    Action,
    Announce,
    Cancel,
    Close,
    Drain,
    Event,
    Exited,
    Impatient,
    Kill,
    Phase,
    Regroup,
    Respawn,
    StillDraining,
    Supervisor,
    Verdict,
)
from torchpmap._runtime.local.watch import Watch
from torchpmap._runtime.local.workers import Workers
from torchpmap._runtime.wire import frame
from torchpmap._trace.toolchain import import_dynamo

T = TypeVar("T")

_EARLY_S = 1.6
"""How long a caller waits for all ranks if it is already known why its call failed: it has the
error before a rank that goes on is ended for it.
"""
_CLOSE_S = 4.0
"""How long ``close`` may take in all, whatever has happened."""
_LOOK_MS = 1000
"""How long a thread sleeps at most before it checks whether the pool was closed."""
_ROOM_MS = 50
"""The same where a failure does not wake it."""
_SALVAGE = "torchpmap.resize with the other devices, called next, keeps their values."
_REPAIR = (
    "it finishes the calls sent before another device failed",
    "it starts, or connects to the others",
)
"""What a rank does that a repair waits for: first, and then."""
_WAITS_FOR = ("starting the workers", "waiting for the devices after a failure")


class Pool:
    """One worker per device (owner: the runtime, which must call ``close``)."""

    ended = False  # whether the workers were told to end
    _only_reads = False  # some ranks have no worker, and values are only fetched

    def __init__(
        self,
        devices: Sequence[Device],
        config: Config,
        *,
        on_tick: Callable[[], None],
        on_repaired: Callable[[set[int]], None],
    ) -> None:
        """``on_tick``: called by the monitor now and then; ``on_repaired``: with the ranks that
        have new workers, by the repairing thread, before others may send again.
        """
        self._devices = tuple(devices)
        self._tick = on_tick
        self._on_repaired = on_repaired
        self.send_lock = threading.RLock()
        self._is_sending = held_here(self.send_lock)
        self.outbox = Outbox()
        self.seq = 0  # number of the last command; guarded by the send lock
        self.groups: dict[str, RankPartition] = {}  # guarded by the send lock
        self._state_lock = threading.Lock()  # guards _supervisor; never taken by a caller
        self._supervisor = Supervisor(len(devices), phase=Phase.REBUILDING, epoch=1)
        self._verdict = self._supervisor.verdict()  # written by the monitor
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()  # monitor -> repairer
        self._unfinished: Action | None = None  # in which the last repairer failed
        self._replaced: set[int] = set()  # the ranks for which that action is done
        self._killed: dict[int, str] = {}  # by rank, why the pool has killed its worker
        self._repairs = threading.RLock()  # guards the beginning of a repair
        self._repair_in_progress: Repair | None = None
        self._completed: dict[int, int] = {}  # last command by dead rank; written by the repairer
        self.incidents = Incidents(self._devices)
        self.prints = False
        """Whether plans print: then what they printed comes before their results."""
        self.broken = True
        """Whether commands must wait (set by the monitor, cleared by the repairer)."""
        self.closed_because: str | None = None
        self._closed_by: BaseException | None = None
        self._closing = threading.Lock()  # taken for good by the thread that closes the pool
        self._closer: int | None = None
        self._closed = threading.Event()
        self._drain_begin = math.inf
        self._workers = Workers(
            self._devices,
            config,
            on_event=self._on_event,
            on_tick=self._on_tick,
            on_crash=self._on_crash,
        )
        self._watch = Watch(self._workers, self._supervisor)
        self.workers = self._workers.by_rank
        self.landing = self._workers.landing
        self.common = self._workers.common
        self.monitor = self._workers.monitor
        self._progress = self._workers.progress
        self.limit = self._watch.limit
        for action in (Respawn(tuple(range(len(devices)))), Regroup(1)):
            self._actions.put(action)

    # -- sending -----------------------------------------------------------------------------------

    def in_order(self, send: Callable[..., T], *args: Any) -> T:
        """Call ``send(*args)`` with the send lock held and the pool in working order, repaired
        first if need be.  Returns its result when everything that it posted is sent.
        """
        if self._is_sending():
            refuse()
        outbox = self.outbox
        while True:
            with self.send_lock:  # ``acquire()`` keeps it if Ctrl-C comes just when it returns
                if not self.broken and (outbox.unsent is None or outbox.finish()):
                    sent = send(*args)
                    if outbox.unsent is None:
                        return sent
                    break
            self._wait_for_room()
        rounds = outbox.rounds
        while outbox.rounds == rounds and not self._push():
            self._wait_for_room()
        return sent

    def _push(self) -> bool:
        """Send what there was no room for; returns whether nothing is left."""
        with self.send_lock:
            return self.outbox.finish()

    def _wait_for_room(self) -> None:
        """Wait until there may be room to send; repair the pool if it is broken."""
        refuse_to_wait()
        if self.broken:
            self.repair()
        else:
            wait_for_room(self.outbox.blocked, _ROOM_MS)

    def tell(self, ranks: Sequence[int], kind: int, body: bytes) -> None:
        """Send a command without an answer (send lock held)."""
        self.seq += 1
        self.post(dict.fromkeys(ranks, frame(kind, self.seq, body)))

    def post(self, frames: dict[int, bytes]) -> None:
        """Send a frame to each of these ranks (send lock held)."""
        self.outbox.post([self.workers[rank].socket for rank in frames], list(frames.values()))

    def expect(
        self,
        seq: int,
        ranks: Sequence[int],
        what: str,
        targets: dict[int, memoryview] | None = None,
    ) -> Pending:
        """Register a request before it is sent (send lock held)."""
        pending = self.monitor.pending[seq] = Pending(seq, self.incidents.era, ranks, what, targets)
        if self.broken:  # since the lock was taken: the monitor may have missed this request
            self.monitor.interrupt(seq)
        return pending

    def ask(
        self,
        bodies: dict[int, bytes],
        kind: int,
        targets: dict[int, memoryview] | None = None,
        about: tuple[Era, int] | None = None,
        what: str = "it runs a call",
        sent: list[Pending] | None = None,
    ) -> Pending:
        """Send a request, with a body per rank; ``about``: the command whose value it needs;
        ``what``: what the ranks do meanwhile; ``sent`` gets the request before it is sent, for a
        caller that gives it up at Ctrl-C.
        """
        refuse_to_wait()

        def send() -> Pending:
            if about is not None:
                self.incidents.refuse(*about, tuple(bodies))
            self.seq += 1
            pending = self.expect(self.seq, tuple(bodies), what, targets)
            if sent is not None:
                sent.append(pending)
            try:
                self.post({rank: frame(kind, self.seq, body) for rank, body in bodies.items()})
            except BaseException:  # Ctrl-C: an answer may never come
                if sent is None:
                    self.monitor.pending.pop(pending.seq, None)
                raise
            return pending

        return self.in_order(send)

    def has_reached(self, seq: int, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are known to be done with everything up to command ``seq``."""
        return self._progress.reached(seq, ranks)

    def wait_for(self, era: Era, seq: int, ranks: Sequence[int]) -> bool:
        """Wait until ``ranks`` are done with command ``seq``, whatever comes after it; False when
        a failure came first.
        """
        refuse_to_wait()
        done = self._progress.wait(seq, ranks, lambda: self.broken or self.incidents.era is not era)
        if self.prints:
            self.monitor.printer.flush(ranks)
        return done

    def answered(self, pending: Pending, ranks: Sequence[int], *, prints: bool = True) -> bool:
        """Wait for all answers, and for what the ranks have printed before; False when a failure
        came first.
        """
        done = pending.wait()
        if prints:
            self.monitor.printer.flush(ranks)
        return done

    def make_groups(self, groups: dict[str, RankPartition]) -> None:
        """Make those that are missing (send lock held)."""
        for name, partition in groups.items():
            if name not in self.groups:
                self.groups[name] = partition
                self.tell(tuple(self.workers), wire.GROUP, pickle.dumps((name, partition)))

    # -- failure and repair ------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Judge an event (monitor thread)."""
        if isinstance(event, Exited):
            event = self._explained(event)
        with self._state_lock:
            was_healthy = self._supervisor.phase is Phase.HEALTHY
            actions = self._supervisor.on(event)
            self.broken = self.broken or self._supervisor.phase is not Phase.HEALTHY
            self._verdict = self._supervisor.verdict()
        for action in actions:
            match action:
                case Cancel(seq=seq, ranks=ranks):
                    self._workers.control(ranks, wire.CANCEL, seq)
                case Kill(ranks=ranks, why=why):
                    for rank in ranks:
                        self._killed.setdefault(rank, why)
                        self.workers[rank].kill()
                case _:
                    if isinstance(action, Abort):
                        self._workers.control(action.ranks, wire.ABORT, action.epoch)
                    self._actions.put(action)
        if was_healthy and self.broken:
            self._wake_all()

    def _explained(self, event: Exited) -> Exited:
        """Add what the supervisor cannot know."""
        unanswered = self.monitor.first_missing(event.rank)
        return replace(event, unanswered=unanswered, why=self._killed.get(event.rank, ""))

    def _wake_all(self) -> None:
        self.monitor.interrupt_all()
        self._progress.ring()

    def _on_tick(self) -> float:
        """Look at calls and workers that take long; when to do it again (monitor thread)."""
        now = time.monotonic()
        if now >= self._drain_begin:
            self._on_event(StillDraining(now - self._drain_begin, self._progress.begun()))
        for event in self._watch.look(self._awaited()):
            self._on_event(event)
        self._tick()
        return self._watch.pause_s

    def _awaited(self) -> dict[int, str]:
        """The ranks that a thread waits for, and what each does."""
        if not self.broken:
            return self._watch.awaited(self.outbox.blocked)
        starts = self._supervisor.phase is Phase.REBUILDING
        is_awaited = self._repair_in_progress is not None
        return dict.fromkeys(self._supervisor.unfinished() if is_awaited else (), _REPAIR[starts])

    def give_up(self, pending: Pending, ranks: Sequence[int], name: str) -> None:
        """End what ranks do for a request whose caller was interrupted, unless it has ended."""
        self.monitor.give_up(pending.seq, given_up(pending.seq, ranks[0], name))

    def repair(self, wanted: int | None = None) -> None:
        """Wait until the pool works; raises if it is closed.

        A thread of its own does the work, since a caller may leave earlier: at Ctrl-C, or when it
        is known that a user's exception has poisoned ``wanted``.  The repair then waits for slow
        ranks without it.
        """
        self._raise_if_closed()
        refuse_to_wait(self.send_lock, self._repairs)
        with self._repairs:
            repair = self._repair_in_progress
            if repair is None:
                if not self.broken:
                    return
                self.monitor.begin()
                repair = self._repair_in_progress = Repair(self._run, self._hurry)
            repair.start()  # also one whose start was interrupted
        import_dynamo()  # the caller has to wait, and most trace next
        with waiting(_WAITS_FOR[bool(self._verdict.failures or self._verdict.deaths)]):
            failure = repair.wait(lambda: self._known_failure(wanted))
        if failure is not None:
            if self.ended:  # that is why the repair has failed
                self._raise_if_closed()
            raise failure

    def _hurry(self) -> None:
        self.monitor.soon(lambda: self._on_event(Impatient()))

    def _known_failure(self, seq: int | None) -> BaseException | None:
        """What has poisoned a command, if the ranks have had time to report."""
        if seq is None or time.monotonic() - self._drain_begin < _EARLY_S:
            return None
        verdict = self._verdict
        return exception_of(verdict, self._devices) if verdict.explains(seq) else None

    def _run(self) -> None:
        try:
            while self.broken:
                self._raise_if_closed()
                action = self._unfinished = self._unfinished or self._next_action()
                if action is not None:
                    self._raise_if_closed()
                    self._perform(action)
                    self._unfinished = None
        finally:
            self._repair_in_progress = None

    def _raise_if_closed(self) -> None:
        """Raise if the pool was closed."""
        if self.closed_because is None:
            return
        sleep_if_ending()
        raise RuntimeClosed(self.closed_because) from self._closed_by

    def _next_action(self) -> Action | None:
        """The supervisor's next action, if it comes soon; meanwhile sends what was posted."""
        is_sent = self._push()
        with contextlib.suppress(queue.Empty):
            return self._actions.get(timeout=_LOOK_MS / 1000 if is_sent else 0)
        if not is_sent:
            wait_for_room(self.outbox.blocked, _ROOM_MS)
        return None

    def _perform(self, action: Action) -> None:
        match action:
            case Abort(epoch=epoch, ranks=ranks):  # again: a new worker has missed the first
                self._workers.control(ranks, wire.ABORT, epoch)
            case Drain(ranks=ranks):
                with self.send_lock:
                    self.tell(ranks, wire.DRAIN, b"")
                self._drain_begin = time.monotonic()
            case Respawn(ranks=ranks):
                self._drain_begin = math.inf
                for rank in ranks:
                    if rank not in self._replaced:
                        self._completed.setdefault(rank, self._progress[rank])
                        self._workers.start(rank, self.send_lock)
                        self._killed.pop(rank, None)
                    self._replaced.add(rank)
                self._replaced.clear()
            case Regroup(epoch=epoch):
                self._drain_begin = math.inf
                self._workers.empty_store()
                with self.send_lock:
                    body = pickle.dumps((epoch, self.groups))
                    self.tell(tuple(self.workers), wire.REGROUP, body)
            case Announce(verdict=verdict):
                self._resume(verdict)
            case Close() if self._only_reads:
                self.reopen()
            case Close(verdict=verdict):
                cause, self._unfinished = exception_of(verdict, self._devices), None
                self.stop(f"the workers cannot be started or repaired: {cause}. {_SALVAGE}")
                raise cause

    def _resume(self, verdict: Verdict) -> None:
        self.incidents.note(verdict, self._completed)
        self._completed.clear()
        self._watch.clear()
        self._on_repaired({death.rank for death in verdict.deaths})
        with self._state_lock:  # there may be a new failure already
            self.broken = self._supervisor.phase is not Phase.HEALTHY or bool(self.closed_because)

    def reopen(self) -> None:
        """After ``stop``: let values be fetched from the workers that are left."""
        if self.ended:
            self._raise_if_closed()
        self._only_reads, self.closed_because = True, None
        with self._state_lock:
            verdict = self._supervisor.go_on()
        self._completed = {d.rank: self._progress[d.rank] for d in verdict.deaths} | self._completed
        self.groups.clear()
        self._perform(Regroup(self._supervisor.epoch))  # what failed obeys again
        self._resume(verdict)

    # -- the end -----------------------------------------------------------------------------------

    def _on_crash(self, error: BaseException) -> None:
        """A thread of the pool failed, and no other does its work."""
        self._closed_by = error
        self.close(f"the pool failed: {type(error).__name__}: {error}")

    def close(self, because: str) -> None:
        """End all workers; idempotent.  Takes at most ``_CLOSE_S``, whatever locks are held: a
        signal handler or a finalizer that has interrupted this class may call it.
        """
        if not self._closing.acquire(blocking=False):
            if self._closer != threading.get_ident():
                self._closed.wait(_CLOSE_S)
            return
        self._closer, self.ended = threading.get_ident(), True
        surely(lambda: self._end(self.closed_because or because))
        self._progress.close()

    def _end(self, because: str) -> None:
        self.stop(because)
        self._actions.put(Regroup(0))  # wakes the thread that repairs
        self._workers.end(self._repair_in_progress)
        self.outbox.drop()
        self._closed.set()

    def stop(self, because: str) -> None:
        """Refuse all commands; the workers go on until ``close``, or can be asked by ``reopen``."""
        self.closed_because = because
        self.broken = True
        self._supervisor.phase = Phase.CLOSED
        self._wake_all()

    def in_forked_child(self, because: str) -> None:
        """In a forked child, which must not keep the parent's workers alive."""
        self.closed_because = because
        self.broken = True
        self._closing, self._closed, self.ended = threading.Lock(), threading.Event(), True
        self._closing.acquire()
        self._closed.set()
        self._workers.in_forked_child()
