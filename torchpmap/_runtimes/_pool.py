"""The worker processes of one host, sending to them in one order, and their repair.

One lock, the *send lock*, is what gives all ranks the same order of commands, and with it the same
order of collectives.  Nothing is awaited while it is held; the sockets' buffers are the only bound
on how far commands run ahead.

Failures are noticed by the monitor thread and judged by ``Supervisor``.  What cannot wait (cutting
the groups, so that nobody stays blocked) the monitor does at once; the repair itself (drain,
respawn, regroup) is carried out by the next caller that needs the pool, under the repair lock.
From the first sign of a failure until then ``broken`` keeps everybody from sending.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchpmap import _wire
from torchpmap._config import Config
from torchpmap._devices import Device, threads_per_device
from torchpmap._errors import RuntimeClosed
from torchpmap._groups import RankPartition
from torchpmap._runtimes._losses import Losses, exception_of
from torchpmap._runtimes._monitor import Monitor, Pending
from torchpmap._runtimes._outbox import Outbox
from torchpmap._runtimes._process import WorkerProcess
from torchpmap._runtimes._progress import Progress
from torchpmap._runtimes._supervise import (
    Action,
    Close,
    Cut,
    Deadline,
    Drain,
    Event,
    Kill,
    Phase,
    Regroup,
    Report,
    Respawn,
    Supervisor,
)
from torchpmap._runtimes._worker import CUT
from torchpmap._wire import frame

__all__ = ["Pool"]

T = TypeVar("T")

_REPAIR_PATIENCE_S = 30.0
"""How long a rank may take to drain or regroup before it is killed; a busy one is merely slow."""
_STOP_PATIENCE_S = 1.0
_SHORT_SLEEP_MS = 2
"""Worth more than telling the workers to ring, which takes some 30 us."""


class Pool:
    """One worker per device (owner: the runtime, which must call ``close``)."""

    def __init__(
        self,
        devices: Sequence[Device],
        config: Config,
        *,
        on_idle: Callable[[], None],
        on_repaired: Callable[[set[int]], None],
    ) -> None:
        """``on_idle``: called by the monitor now and then; ``on_repaired``: with the ranks that
        have new workers, by the repairing thread, before others may send again.
        """
        self._devices = tuple(devices)
        self._config = config
        self._on_repaired = on_repaired
        self._store_fd = os.memfd_create("torchpmap-store", os.MFD_CLOEXEC)  # a file with no name
        self.send_lock = threading.Lock()
        self.outbox = Outbox()
        self._progress = Progress(len(devices))
        self._waiting = threading.Lock()  # held by the thread that sleeps until the bell rings
        self.seq = 0  # number of the last command; guarded by the send lock
        self._groups: dict[str, RankPartition] = {}  # guarded by the send lock
        self._state_lock = threading.Lock()  # guards _supervisor
        self._supervisor = Supervisor(len(devices), phase=Phase.REBUILDING, epoch=1)
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()  # monitor -> repairer
        self._repair_lock = threading.RLock()  # held by the thread that performs _actions
        self._drain_seq = 0  # last command before the repair; written by the repairer
        self._completed: dict[int, int] = {}  # of replaced workers; written by the repairer
        self.losses = Losses(self._devices)
        self.broken = True
        """Whether commands must wait (set by the monitor, cleared by the repairer)."""
        self.closed_because: str | None = None
        self._monitor = Monitor(self._devices, self._on_event, on_idle)
        self.workers = {rank: self._new_worker(rank) for rank in range(len(devices))}
        # in the background: the fork server may still be importing, and the caller has a function
        # to trace meanwhile
        self._starter = threading.Thread(
            target=self._start_all, name="torchpmap-starter", daemon=True
        )
        self._starter.start()
        self._actions.put(Regroup(1))

    # -- sending -----------------------------------------------------------------------------------

    def in_order(self, send: Callable[..., T], *args: Any) -> T:
        """What ``send(*args)`` returns, called with the send lock held and the pool in working
        order, repaired first if need be.
        """
        while True:
            with self.send_lock:  # ``acquire()`` keeps it if Ctrl-C comes just when it returns
                if not self.broken:
                    return send(*args)
            self.repair()

    def tell(self, ranks: Sequence[int], kind: int, body: bytes) -> None:
        """Send a command without an answer (send lock held)."""
        self.seq += 1
        self.post(dict.fromkeys(ranks, frame(kind, self.seq, body)))

    def post(self, frames: dict[int, bytes]) -> None:
        """Send a frame to each of these ranks (send lock held)."""
        self.outbox.post([self.workers[rank].socket for rank in frames], list(frames.values()))

    def expect(
        self, seq: int, ranks: Sequence[int], targets: dict[int, memoryview] | None = None
    ) -> Pending:
        """Register a request before it is sent (send lock held)."""
        pending = self._monitor.pending[seq] = Pending(seq, ranks, targets)
        if self.broken:  # since we took the lock: the monitor may have missed this one
            self._monitor.interrupt(seq)
        return pending

    def refuse_lost(self, seq: int, ranks: Sequence[int]) -> None:
        """Raise if the value of command ``seq`` is lost (send lock held): perhaps since a repair
        that ended just before the lock was taken; a worker that misses it fails, and all with it.
        """
        error = self.losses.of_value(seq, ranks)
        if error is not None:
            raise error

    def ask(
        self,
        bodies: dict[int, bytes],
        kind: int,
        targets: dict[int, memoryview] | None = None,
        about: int | None = None,
    ) -> Pending:
        """Send a request, with a body per rank; ``about``: the command whose value it needs."""

        def send() -> Pending:
            if about is not None:
                self.refuse_lost(about, tuple(bodies))
            self.seq += 1
            pending = self.expect(self.seq, tuple(bodies), targets)
            self.post({rank: frame(kind, self.seq, body) for rank, body in bodies.items()})
            return pending

        return self.in_order(send)

    @property
    def prints(self) -> bool:
        """Whether plans print: the monitor sees to it that their output comes before their
        results.
        """
        return self._monitor.prompt

    def expect_output(self) -> None:
        """Plans print from now on."""
        self._monitor.prompt = True

    def has_reached(self, seq: int, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are known to be done with everything up to command ``seq``."""
        return self._progress.reached(seq, ranks)

    def wait_for(self, seq: int, ranks: Sequence[int]) -> bool:
        """Wait until ``ranks`` are done with everything up to command ``seq``; False when a failure
        came first.
        """
        if self.prints or not self._waiting.acquire(blocking=False):
            return self.ask(dict.fromkeys(ranks, b""), _wire.SYNC).wait()
        progress = self._progress
        try:
            if progress.wait(seq, ranks, _SHORT_SLEEP_MS):
                return True
            epoch, seq = self.in_order(self._ask_to_ring, ranks)
            while not progress.wait(seq, ranks, None):
                if self.broken or self._supervisor.epoch != epoch:
                    return False
            return True
        finally:
            self._waiting.release()

    def _ask_to_ring(self, ranks: Sequence[int]) -> tuple[int, int]:
        """In which epoch, by which command."""
        epoch = self._supervisor.epoch  # first: what fails from here on changes it
        self.tell(ranks, _wire.RING, b"")
        return epoch, self.seq

    @property
    def waits(self) -> bool:
        """Whether a request is unanswered."""
        return bool(self._monitor.pending)

    def make_groups(self, groups: dict[str, RankPartition]) -> None:
        for name, partition in groups.items():
            if name not in self._groups:
                self.in_order(self._make_group, name, partition)

    def _make_group(self, name: str, partition: RankPartition) -> None:
        self._groups[name] = partition
        self.tell(tuple(self.workers), _wire.GROUP, pickle.dumps((name, partition)))

    # -- failure and repair ------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Judge an event (monitor thread)."""
        with self._state_lock:
            was_healthy = self._supervisor.phase is Phase.HEALTHY
            actions = self._supervisor.on(event)
            self.broken = self.broken or self._supervisor.phase is not Phase.HEALTHY
        for action in actions:
            if isinstance(action, Cut):
                self._cut(action)
            self._actions.put(action)
        if was_healthy and self.broken:
            self._wake_all()

    def _wake_all(self) -> None:
        self._monitor.interrupt_all()
        self._progress.ring()

    def _cut(self, cut: Cut) -> None:
        for rank in cut.ranks:
            with contextlib.suppress(OSError):
                self.workers[rank].control.send(CUT.pack(cut.epoch))

    def repair(self) -> None:
        """Carry out what the supervisor wants until the pool works (or is closed: raises).

        Not in the main thread: there Ctrl-C would end it half-way, and nobody could go on with it.
        """
        if threading.current_thread() is not threading.main_thread():
            self._repair()
            return
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._repair()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="torchpmap-repair", daemon=True)
        thread.start()
        thread.join()
        for error in failures:
            raise error

    def _repair(self) -> None:
        with self._repair_lock:
            while self.broken:
                if self.closed_because is not None:
                    raise RuntimeClosed(self.closed_because)
                try:
                    action = self._actions.get(timeout=_REPAIR_PATIENCE_S)
                except queue.Empty:
                    if not self._starter.is_alive():  # else the workers are not even there yet
                        self._on_event(Deadline())
                    continue
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Cut():
                self._cut(action)  # again: a worker that is started only now has missed it
            case Drain(ranks=ranks):
                with self.send_lock:
                    self._drain_seq = self.seq
                    self.tell(ranks, _wire.DRAIN, b"")
            case Kill(ranks=ranks):
                for rank in ranks:
                    self.workers[rank].kill()
            case Respawn(ranks=ranks):
                for rank in ranks:
                    self._replace(rank)
            case Regroup(epoch=epoch):
                with self.send_lock:
                    body = pickle.dumps((epoch, self._groups))
                    self.tell(tuple(self.workers), _wire.REGROUP, body)
            case Report(verdict=verdict):
                self.losses.note(verdict, self._drain_seq, self._completed)
                self._on_repaired({death.rank for death in verdict.deaths})
                with self._state_lock:  # unless the next failure is already there
                    self.broken = self._supervisor.phase is not Phase.HEALTHY
            case Close(verdict=verdict):
                cause = exception_of(verdict, self._devices)
                self.close(f"the workers cannot be started or repaired: {cause}")
                raise cause

    # -- processes ---------------------------------------------------------------------------------

    def _new_worker(self, rank: int) -> WorkerProcess:
        device_type = self._devices[rank].platform
        threads = threads_per_device(len(self._devices))
        return WorkerProcess(
            rank, device_type, threads, self._config, self._store_fd, self._progress
        )

    def _start_all(self) -> None:
        for worker in self.workers.values():
            worker.start()
            self._monitor.watch(worker)

    def _replace(self, rank: int) -> None:
        old = self.workers[rank]
        self._completed[rank] = self._progress[rank]
        self._monitor.forget(old)
        old.close(0)
        new = self._new_worker(rank)
        new.start()
        self.workers[rank] = new
        self._monitor.watch(new)

    def close(self, because: str) -> None:
        """End all workers; idempotent."""
        with self._repair_lock:
            if self.closed_because is not None:
                return
            self.closed_because = because
            self.broken = True
        with self._state_lock:
            self._supervisor.phase = Phase.CLOSED
        self._wake_all()
        self._starter.join()
        for worker in self.workers.values():
            self._monitor.forget(worker)
            worker.hang_up()
        self._monitor.stop()
        deadline = time.monotonic() + _STOP_PATIENCE_S
        for worker in self.workers.values():
            worker.close(max(0.0, deadline - time.monotonic()))
        os.close(self._store_fd)
        if self._waiting.acquire(
            blocking=False
        ):  # else a thread wakes only now, and needs the bell
            self._progress.close()

    def abandon(self, because: str) -> None:
        """In a forked child: the workers are the parent's; never touch them again."""
        self.closed_because = because
        self.broken = True
