"""The default runtime: this process is the controller, one worker process per device on this host.

A call is one small frame, packed once and written to every worker of its team under the send lock: that lock is what gives all
ranks the same order of calls, and with it the same order of collectives.  Nothing is awaited; the sockets' buffers are the only
bound on how far calls run ahead.

Failures are noticed by the monitor thread and judged by ``Supervisor``; the repair itself (drain, respawn, regroup) is carried
out by the next caller that needs the pool, under the repair lock.  Until then ``_broken`` keeps everybody from sending.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from torchpmap import _wire
from torchpmap._compile import Definition
from torchpmap._devices import Device, enumerate_devices, threads_per_device
from torchpmap._errors import RuntimeClosed, ShardLost, WorkerDied, exit_reason, unpack_exception
from torchpmap._groups import RankPartition
from torchpmap._program import EagerCall, EagerReport
from torchpmap._runtimes._base import Handle, Team
from torchpmap._runtimes._monitor import Monitor, Pending
from torchpmap._runtimes._process import WorkerProcess
from torchpmap._runtimes._supervise import (
    Action,
    Close,
    Cut,
    Deadline,
    Drain,
    Event,
    Exited,
    Kill,
    Phase,
    Regroup,
    Report,
    Respawn,
    Supervisor,
    Verdict,
)
from torchpmap._runtimes._worker import CUT
from torchpmap._shipping import pickled
from torchpmap._wire import frame, pack_ints, put_frame

__all__ = ["LocalRuntime"]

_REPAIR_PATIENCE_S = 30.0
"""How long a rank may take to drain or regroup before it is killed (a busy one is merely slow: be generous)."""
_STOP_PATIENCE_S = 1.0
_EAGER_OUTPUTS = 1 << 20
"""Handles reserved for the outputs of a call whose outputs are not known yet."""


class LocalRuntime:
    """Controller side of one pool of worker processes (see ``Runtime`` for the interface)."""

    def __init__(self, num_devices: int, device_type: str, timeout_s: float) -> None:
        self.devices = enumerate_devices(num_devices, device_type)
        self._device_type = device_type
        self._timeout_s = timeout_s
        self._threads = threads_per_device(num_devices)
        self._store_fd = os.memfd_create(
            "torchpmap-store", os.MFD_CLOEXEC
        )  # rendezvous file without a name
        self._send_lock = (
            threading.Lock()
        )  # guards _seq, _next_handle, everything below up to _groups, and all sends
        self._seq = 0
        self._next_handle = 1
        self._teams: dict[tuple[int, ...], Team] = {}
        self._definitions: dict[int, tuple[tuple[int, ...], bytes]] = {}
        self._retired: deque[int] = deque()  # plans nobody can call any more (any thread appends)
        self._shipped: set[tuple[int, int]] = set()  # (rank, function id)
        self._groups: dict[str, RankPartition] = {}
        self._state_lock = threading.Lock()  # guards _supervisor
        self._supervisor = Supervisor(num_devices, phase=Phase.REBUILDING, epoch=1)
        self._actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._repair_lock = threading.RLock()  # held by the one thread that performs _actions
        self._poisoned: list[
            tuple[int, int, Verdict]
        ] = []  # (first seq, last seq, why); written by the repairer
        self._lost: dict[
            int, tuple[int, int, Verdict]
        ] = {}  # rank -> (completed, last seq before its death, why)
        self.scarred = False
        """Whether any value was ever lost or poisoned, so that handles must be checked."""
        self._broken = True
        self._closed_because: str | None = None
        self.forked = False
        """Whether this object is a copy in a forked child of the process that owns the workers."""
        self._drain_seq = 0
        self._monitor = Monitor(device_type, self._on_event, self._flush_released)
        self._workers = {rank: self._new_worker(rank) for rank in range(num_devices)}
        # in the background: the fork server may still be importing, and the caller has a function to trace meanwhile
        self._starter = threading.Thread(
            target=self._start_all, name="torchpmap-starter", daemon=True
        )
        self._starter.start()
        self._actions.put(Regroup(1))
        _live.add(self)

    # -- calls -------------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def team(self, ranks: tuple[int, ...]) -> Team:
        team = self._teams.get(ranks)
        if team is None:
            with self._send_lock:
                team = self._teams.setdefault(ranks, Team(self, ranks))
                team.sockets = [self._workers[rank].stream for rank in ranks]
        return team

    def execute(
        self, team: Team, plan_id: int, inputs: Sequence[int], num_outputs: int
    ) -> tuple[int, int]:
        self._acquire_healthy()
        try:
            seq = self._seq = self._seq + 1
            out = self._next_handle
            self._next_handle = out + num_outputs
            count = len(inputs)
            released = _take(team.released)
            total = 3 + count + len(released)
            message = struct.pack(
                f"<QQ{total + 1}q",
                8 * total,
                _wire.CALL,
                seq,
                plan_id,
                out,
                count,
                *inputs,
                *released,
            )
            for stream in team.sockets:
                stream.send((message,))
        finally:
            self._send_lock.release()
        return out, seq

    def put(self, team: Team, blocks: Sequence[torch.Tensor]) -> Handle:
        self._acquire_healthy()
        try:
            seq, handle = self._number(1)
            previous, buffers = None, []
            for stream, block in zip(team.sockets, blocks, strict=True):
                if block is not previous:
                    previous, buffers = block, put_frame(seq, handle, block)
                stream.send(buffers)
        finally:
            self._send_lock.release()
        return Handle(handle, seq, team)

    def define(self, team: Team, definition: Definition, groups: dict[str, RankPartition]) -> None:
        body = pickled(definition)
        self.make_groups(groups)
        leader, *others = team.ranks
        while True:
            pending = self._ask({leader: body}, _wire.DEFINE)
            if pending.wait():
                break
            self.repair()
            error = self._own_failure(pending.seq, (leader,))
            if error is not None:
                raise error
        self._acquire_healthy()
        try:
            self._forget_retired()
            self._definitions[definition.plan_id] = (team.ranks, body)
            self._tell(others, _wire.DEFINE, body)
        finally:
            self._send_lock.release()

    def run_eagerly(self, team: Team, call: EagerCall) -> tuple[list[EagerReport], int, int]:
        self._acquire_healthy()
        try:
            seq, first = self._number(_EAGER_OUTPUTS)
            pending = self._pending(seq, team.ranks)
            bodies: dict[bool, bytes] = {}
            for rank in team.ranks:
                known = (rank, call.function_id) in self._shipped
                if known not in bodies:
                    bodies[known] = pickle.dumps(call.placed(first, without_function=known))
                self._workers[rank].stream.send((frame(_wire.EAGER, seq, bodies[known]),))
                self._shipped.add((rank, call.function_id))
        finally:
            self._send_lock.release()
        if not pending.wait():
            self.repair()
            raise self._failure(seq, team.ranks) or RuntimeClosed(
                "the call was interrupted by a repair of the pool"
            )
        return [pickle.loads(pending.replies[rank]) for rank in team.ranks], first, seq

    def fetch(self, handle: Handle, requests: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        ranks = handle.team.ranks
        targets = {ranks[place]: _wire.bytes_of(target) for place, _, _, target in requests}
        bodies = {
            ranks[place]: pack_ints(handle.id, dim, position)
            for place, dim, position, _ in requests
        }
        self._insist(handle, lambda: self._ask(bodies, _wire.FETCH, targets))

    def block(self, handle: Handle) -> None:
        if not self.is_computed(handle):
            self._insist(
                handle, lambda: self._ask(dict.fromkeys(handle.team.ranks, b""), _wire.SYNC)
            )

    def is_ready(self, handle: Handle) -> bool:
        if self.is_computed(handle):
            return True
        if not self._broken:
            self._ask(
                dict.fromkeys(handle.team.ranks, b""), _wire.SYNC
            )  # so that asking again will tell
        return False

    def is_computed(self, handle: Handle) -> bool:
        """Whether every rank is known to be done with the call that made the value, and it succeeded."""
        self.check(handle)
        return all(self._workers[rank].completed >= handle.seq for rank in handle.team.ranks)

    def check(self, handle: Handle) -> None:
        """Raise if the value is known to be lost."""
        if self._closed_because is not None:
            raise RuntimeClosed(self._closed_because)
        if self.scarred:
            error = self._failure(handle.seq, handle.team.ranks)
            if error is not None:
                raise error

    # -- sending (the send lock is held where a name starts with an underscore and says so) ---------------------------------

    def _acquire_healthy(self) -> None:
        """Take the send lock with the pool in working order (repairing it first if need be)."""
        while True:
            self._send_lock.acquire()
            if not self._broken:
                return
            self._send_lock.release()
            self.repair()

    def _number(self, num_handles: int) -> tuple[int, int]:
        """Next seq and first of ``num_handles`` new handle ids (send lock held)."""
        self._seq += 1
        first = self._next_handle
        self._next_handle += num_handles
        return self._seq, first

    def _pending(
        self, seq: int, ranks: Sequence[int], targets: dict[int, memoryview] | None = None
    ) -> Pending:
        """Register a request before it is sent (send lock held)."""
        pending = self._monitor.pending[seq] = Pending(seq, ranks, targets)
        if self._broken:  # since we took the lock: the monitor may have missed this one
            self._monitor.interrupt(seq)
        return pending

    def _ask(
        self, bodies: dict[int, bytes], kind: int, targets: dict[int, memoryview] | None = None
    ) -> Pending:
        self._acquire_healthy()
        try:
            self._seq += 1
            pending = self._pending(self._seq, tuple(bodies), targets)
            for rank, body in bodies.items():
                self._workers[rank].stream.send((frame(kind, self._seq, body),))
        finally:
            self._send_lock.release()
        return pending

    def _tell(self, ranks: Sequence[int], kind: int, body: bytes) -> None:
        """Send without an answer (send lock held)."""
        self._seq += 1
        message = (frame(kind, self._seq, body),)
        for rank in ranks:
            self._workers[rank].stream.send(message)

    def _insist(self, handle: Handle, ask: Callable[[], Pending]) -> None:
        """Ask about a value, again after a repair, until the answer or the value's own failure is there."""
        while True:
            self.check(handle)
            if ask().wait():
                return
            self.repair()

    def make_groups(self, groups: dict[str, RankPartition]) -> None:
        for name, partition in groups.items():
            if name not in self._groups:
                self._acquire_healthy()
                try:
                    self._groups[name] = partition
                    self._tell(tuple(self._workers), _wire.GROUP, pickle.dumps((name, partition)))
                finally:
                    self._send_lock.release()

    def forget(self, plan_id: int) -> None:
        """Let the workers drop a plan (called by finalizers: only notes it)."""
        self._retired.append(plan_id)

    def _forget_retired(self) -> None:
        """Send what ``forget`` noted (send lock held)."""
        retired = [
            plan_id
            for plan_id in _take(self._retired)
            if self._definitions.pop(plan_id, None) is not None
        ]
        if retired:
            self._tell(tuple(self._workers), _wire.FORGET, pack_ints(*retired))

    def _flush_released(self) -> None:
        """Free what nobody uses although no call comes (monitor thread: must not wait for the send lock)."""
        if self._broken or not (
            self._retired or any(team.released for team in tuple(self._teams.values()))
        ):
            return
        if self._send_lock.acquire(blocking=False):
            try:
                self._forget_retired()
                for team in self._teams.values():
                    released = _take(team.released)
                    if released:
                        self._tell(team.ranks, _wire.FREE, pack_ints(*released))
            finally:
                self._send_lock.release()

    # -- failure and repair ------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Judge an event (monitor thread); the part of the answer that cannot wait is done here, the rest by ``repair``."""
        with self._state_lock:
            was_healthy = self._supervisor.phase is Phase.HEALTHY
            actions = self._supervisor.on(event)
            self._broken = self._broken or self._supervisor.phase is not Phase.HEALTHY
        for action in actions:
            if isinstance(action, Cut):
                self._cut(action)
            else:
                self._actions.put(action)
        if was_healthy and self._broken:
            self._monitor.interrupt_all()

    def _cut(self, cut: Cut) -> None:
        for rank in cut.ranks:
            with contextlib.suppress(OSError):
                self._workers[rank].control.send(CUT.pack(cut.epoch))

    def repair(self) -> None:
        """Carry out what the supervisor wants until the pool works again (or is closed: raises)."""
        with self._repair_lock:
            while self._broken:
                if self._closed_because is not None:
                    raise RuntimeClosed(self._closed_because)
                try:
                    action = self._actions.get(timeout=_REPAIR_PATIENCE_S)
                except queue.Empty:
                    self._on_event(Deadline())
                    continue
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Drain(ranks=ranks):
                with self._send_lock:
                    self._drain_seq = self._seq
                    self._tell(ranks, _wire.DRAIN, b"")
            case Kill(ranks=ranks):
                for rank in ranks:
                    self._workers[rank].kill()
            case Respawn(ranks=ranks):
                for rank in ranks:
                    self._replace(rank)
            case Regroup(epoch=epoch):
                with self._send_lock:
                    message = (frame(_wire.REGROUP, epoch, pickle.dumps(self._groups)),)
                    for worker in self._workers.values():
                        worker.stream.send(message)
            case Report(verdict=verdict):
                self._note(verdict)
                with self._state_lock:  # unless the next failure is already there
                    self._broken = self._supervisor.phase is not Phase.HEALTHY
            case Close(verdict=verdict):
                cause = self._exception(verdict)
                self.close(f"the workers cannot be started or repaired: {cause}")
                raise cause

    def _note(self, verdict: Verdict) -> None:
        """Remember which values a failure cost, and give new workers the plans of the old ones."""
        first = verdict.first_seq
        if first is not None:
            self._poisoned.append((first, self._drain_seq, verdict))
        for death in verdict.deaths:
            completed = self._lost.get(death.rank, (0,))[0]
            self._lost[death.rank] = (completed, self._drain_seq, verdict)
        self.scarred = bool(self._poisoned or self._lost)
        dead = {death.rank for death in verdict.deaths}
        self._shipped = {(rank, function) for rank, function in self._shipped if rank not in dead}
        with self._send_lock:
            for ranks, body in self._definitions.values():
                self._tell([rank for rank in ranks if rank in dead], _wire.DEFINE, body)

    def _failure(self, seq: int, ranks: Sequence[int]) -> BaseException | None:
        """What became of the call ``seq`` on ``ranks``, as a new exception, or None if nothing happened to it."""
        for first, last, verdict in self._poisoned:
            if first <= seq <= last:
                return self._exception(verdict)
        for rank in ranks:
            completed, last, verdict = self._lost.get(rank, (0, -1, None))
            if seq <= last and verdict is not None:
                cause = self._exception(verdict)
                if seq > completed:
                    return cause
                lost = ShardLost(
                    f"the shard on device {self.devices[rank]} is lost: {cause}. Values that do not live on that device are "
                    "intact; compute or load this one again."
                )
                lost.__cause__ = cause
                return lost
        return None

    def _own_failure(self, seq: int, ranks: Sequence[int]) -> BaseException | None:
        """As ``_failure``, but only if the command ``seq`` failed itself (and not merely stood behind one that did)."""
        for _, _, verdict in self._poisoned:
            if any(failure.seq == seq for failure in verdict.failures):
                return self._exception(verdict)
        return None

    def _exception(self, verdict: Verdict) -> BaseException:
        cause = verdict.cause
        if isinstance(cause, Exited):
            error: BaseException = WorkerDied(
                _obituary(self.devices[cause.rank], cause), rank=cause.rank, exitcode=cause.exitcode
            )
        else:
            error = unpack_exception(cause.packed, where=cause.where)
        for other in verdict.consequences:
            if isinstance(other, Exited):
                error.add_note(_obituary(self.devices[other.rank], other))
            elif not other.communication:
                error.add_note(f"also {other.where}: {unpack_exception(other.packed, where='')!r}")
        return error

    # -- processes ---------------------------------------------------------------------------------------------------------

    def _new_worker(self, rank: int) -> WorkerProcess:
        return WorkerProcess(
            rank, self._device_type, self._threads, self._timeout_s, self._store_fd
        )

    def _start_all(self) -> None:
        for worker in self._workers.values():
            worker.start()
            self._monitor.watch(worker)

    def _replace(self, rank: int) -> None:
        old = self._workers[rank]
        self._lost[rank] = (old.completed, 0, self._lost.get(rank, (0, 0, None))[2])
        self._monitor.forget(old)
        old.close(0)
        new = self._workers[rank] = self._new_worker(rank)
        new.start()
        self._monitor.watch(new)
        with self._send_lock:
            for team in self._teams.values():
                team.sockets = [self._workers[r].stream for r in team.ranks]

    def close(self, because: str = "the runtime was shut down (torchpmap.shutdown)") -> None:
        """End all workers and forget all values; idempotent."""
        with self._repair_lock:
            if self._closed_because is not None:
                return
            self._closed_because = because
            self._broken = True
        with self._state_lock:
            self._supervisor.phase = Phase.CLOSED
        self._monitor.interrupt_all()
        self._starter.join()
        workers = list(self._workers.values())
        for worker in workers:
            self._monitor.forget(worker)
            worker.stream.send((frame(_wire.STOP, 0),))
        self._monitor.stop()
        for worker in workers:
            worker.close(_STOP_PATIENCE_S)
        os.close(self._store_fd)
        _live.discard(self)

    def abandon(self) -> None:
        """In a forked child: the workers are the parent's; never touch them again."""
        self.forked = True
        self._closed_because = (
            "this process was forked from the one that owns the torchpmap devices; use torchpmap in the parent, or start "
            "the child with spawn or forkserver"
        )
        self._broken = True


_live: weakref.WeakSet[LocalRuntime] = weakref.WeakSet()


def _abandon_all() -> None:
    for runtime in tuple(_live):
        runtime.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _take(released: deque[int]) -> list[int]:
    """Empty a deque that other threads may append to meanwhile."""
    return [released.popleft() for _ in range(len(released))]


def _obituary(device: Device, death: Exited) -> str:
    words = death.last_words.strip()
    return (
        f"the worker of device {device} (rank {death.rank}, pid {death.pid}) died: {exit_reason(death.exitcode)}"
        + (f"\nIts last words on stderr:\n{words}" if words else "")
    )
