"""The default runtime: this process is the controller, one worker process per device on this host.

A call is one small frame, packed once and written to every worker of its team under the pool's send
lock.  Values are numbers (handles) here; the workers hold the tensors.
"""

from __future__ import annotations

import math
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch

from torchpmap._base.config import Config
from torchpmap._base.devices import PLATFORMS, enumerate_devices
from torchpmap._base.ending import sleep_if_ending
from torchpmap._base.errors import FORKED, POOL_CLOSED, RuntimeClosed
from torchpmap._runtime import wire
from torchpmap._runtime.base import GiveUp, Handle, Team
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._runtime.local.blocks import Stored, block_frames, free_blocks, store_blocks
from torchpmap._runtime.local.incidents import Era
from torchpmap._runtime.local.monitor import Pending
from torchpmap._runtime.local.plans import Plans, hand_over, take
from torchpmap._runtime.local.pool import Pool
from torchpmap._runtime.local.reentry import refuse_to_wait
from torchpmap._runtime.local.stacks import seen
from torchpmap._runtime.local.staging import STAGED_BYTES, TAKEN, copy
from torchpmap._runtime.local.values import FREED
from torchpmap._runtime.task import Report, Task
from torchpmap._runtime.wire import frame, pack_ints
from torchpmap._trace.compile import CompileReport, Definition

_JOINED_BYTES = 1 << 16
"""Up to this size a block is copied after its header, and sent with it."""


class _Stored:
    """A value that a team's workers hold."""

    __slots__ = ("era", "id", "seq", "team")

    def __init__(self, id: int, seq: int, team: Team, era: Era) -> None:
        self.id = id
        self.era = era
        self.seq = seq
        """Number of the command that makes it."""
        self.team = team

    def __del__(self) -> None:
        try:
            self.team.released.append(self.id)
            self.id = FREED  # a later ``__del__`` of the same cycle may still use the value
        except AttributeError:  # a signal handler has raised in the middle of __init__
            pass


class LocalRuntime:
    """Controller side of one pool of worker processes (see ``Runtime`` for the interface)."""

    runs_here = False

    def __init__(self, num_devices: int, device_type: str, config: Config) -> None:
        self.devices = enumerate_devices(num_devices, device_type)
        self.device = PLATFORMS[device_type].device()  # each worker sees one GPU
        self.timeout = config.timeout
        self.forked = False
        # guarded by the pool's send lock:
        self._next_handle = 1
        self._teams: dict[tuple[int, ...], Team] = {}
        self._shipped: dict[int, dict[int, None]] = {}  # rank -> ids of the functions it keeps
        # of fetches that were interrupted: command, ranks, memory to which they may still write
        self._lent: deque[tuple[int, Sequence[int], Sequence[torch.Tensor]]] = deque()
        self._pool = Pool(self.devices, config, on_tick=self._tell_news, on_repaired=self._restore)
        self.send_lock = self._pool.send_lock
        self._plans = Plans(self._pool, self.devices)
        self._limited = self._plans.limited
        self._incidents = self._pool.incidents
        self._lossy = self._incidents.lossy
        _live.add(self)

    # -- calls -------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._pool.closed_because is not None

    def team(self, ranks: tuple[int, ...]) -> Team:
        team = self._teams.get(ranks)
        if team is None:
            if not self._pool.workers.keys() >= set(ranks):
                # the ranks are of a pool that another thread has shut down since the call began
                raise RuntimeClosed(POOL_CLOSED)
            with self._pool.send_lock:
                new = Team(self, ranks)
                new.sockets = [self._pool.workers[rank].socket for rank in ranks]
                team = self._teams.setdefault(ranks, new)
        return team

    def execute(
        self,
        team: Team,
        plan_id: int,
        held: list[Any],
        num_outputs: int,
        give_up: GiveUp | None = None,
    ) -> list[Handle]:
        return self._pool.in_order(self._send_call, team, plan_id, held, num_outputs, give_up)

    def _send_call(
        self,
        team: Team,
        plan_id: int,
        held: list[Any],
        num_outputs: int,
        give_up: GiveUp | None,
    ) -> list[Handle]:
        pool = self._pool
        if self._lossy:
            self._refuse_lost(held)
        inputs = [handle.id for handle in held]
        held.clear()  # perhaps the last references: such inputs are released with this call
        era = self._incidents.era
        seq = pool.seq = pool.seq + 1
        out = self._next_handle
        ids = range(out, out + num_outputs)
        self._next_handle = ids.stop
        if self._limited or self.timeout is not None:
            limit = self._plans.limit_of(plan_id, self.timeout)
            if limit is not None:
                pool.limit(seq, team.ranks, *limit)
        freed: list[int] = []
        command = team, freed, seq, plan_id, out, len(inputs), *inputs
        posts: int | None = None
        try:
            # map: trees have hundreds of leaves, and a Python loop costs 0.1 us for each
            made: Iterable[_Stored] = map(_Stored, ids, repeat(seq), repeat(team), repeat(era))
            if give_up is not None:
                made = outputs = list(made)  # else later, when the workers have begun
                posts = pool.outbox.posts
                give_up(outputs)
            self._post_call(*command)
            held += made
            return held
        except BaseException:  # Ctrl-C
            if give_up is None or posts is None:  # the workers make values that no caller gets
                team.released.extend((*ids, *freed))  # freeing twice does no harm
            else:  # the old values are gone, so the call goes on
                try:
                    give_up(outputs)
                    if pool.outbox.posts == posts:
                        self._post_call(*command)
                    held[:] = outputs
                except BaseException:
                    give_up(outputs if pool.outbox.posts > posts else ())
                    team.released.extend(freed)
                    raise
            raise

    def _post_call(self, team: Team, freed: list[int], seq: int, *ints: int) -> None:
        take(team.released, freed)
        num = len(ints) + len(freed)
        message = wire.call_packer(num)(8 * num, wire.CALL, seq, *ints, *freed)
        self._pool.outbox.post(team.sockets, (message,) * len(team.sockets))

    def put(self, team: Team, blocks: Sequence[torch.Tensor]) -> Handle:
        if blocks[0].nbytes < STAGED_BYTES:
            return self._pool.in_order(self._send_blocks, team, blocks, [])
        stored: Stored = []
        try:
            own = [self._pool.workers[rank].staging for rank in team.ranks]
            store_blocks(blocks, own, self._pool.common, stored)
            return self._pool.in_order(self._send_blocks, team, blocks, stored)
        finally:  # of which some are the workers' to free, when all is well
            free_blocks(stored)

    def _send_blocks(self, team: Team, blocks: Sequence[torch.Tensor], stored: Stored) -> Handle:
        """Leaves in ``stored`` what the caller must free."""
        self._free(team)
        own = [self._pool.workers[rank].staging for rank in team.ranks]
        common = self._pool.common
        regions = [
            region if file in (mine, common) else None  # a worker may have been replaced meanwhile
            for mine, (file, region) in zip(own, stored, strict=False)
        ]
        seq, handle = self._number(1)
        frames = block_frames(seq, handle, blocks, regions)
        outbox = self._pool.outbox
        stored[:] = [each for each in stored if each[0] is common]
        try:
            for rank, region in zip(team.ranks, regions, strict=False):
                if region is not None and region.is_common:
                    region.change(rank, TAKEN)
            if sum(map(len, frames[0])) <= _JOINED_BYTES and not any(regions):
                outbox.post(team.sockets, [b"".join(buffers) for buffers in frames])
            else:
                heads, payloads = zip(*frames, strict=True)
                outbox.post(team.sockets, heads, [payloads])
        except BaseException:  # Ctrl-C
            team.released.append(handle)
            raise
        return _Stored(handle, seq, team, self._incidents.era)

    def define(
        self, team: Team, definition: Definition, groups: dict[str, RankPartition]
    ) -> CompileReport:
        return self._plans.define(team.ranks, definition, groups)

    def expect_compiling(self) -> None:
        self._plans.expect_compiling()

    def forget(self, plan_id: int) -> None:
        self._plans.retired.append(plan_id)

    def run_task(
        self, team: Team, task: Task, held: Sequence[Any]
    ) -> tuple[list[Report | None], list[Handle]]:
        refuse_to_wait()
        sent: list[tuple[Pending, int]] = []
        try:
            self._pool.in_order(self._send_task, team, task, held, sent)
            ((pending, first),) = sent
            if not self._pool.answered(pending, team.ranks):
                self._pool.repair(pending.seq)
                error = self._incidents.of_value(pending.era, pending.seq, team.ranks)
                raise error or RuntimeClosed("the call was interrupted by a repair of the pool")
            replies = [pickle.loads(pending.replies[rank]) for rank in team.ranks]
        except BaseException:
            for pending, first in sent:
                team.released.append(-first)  # what some ranks may have stored
                self._pool.give_up(pending, team.ranks, task.name)
            raise
        stored = range(first, first + replies[0][1])
        return [report for report, _ in replies], [
            _Stored(handle, pending.seq, team, pending.era) for handle in stored
        ]

    def _send_task(
        self, team: Team, task: Task, held: Sequence[Any], sent: list[tuple[Pending, int]]
    ) -> None:
        """``sent`` gets the request and its first output before anything is sent."""
        self._refuse_lost(held)
        self._pool.make_groups({task.group: (task.ranks,)})
        for each in self._teams.values():
            self._free(each)  # the task may tell what is stored
        inputs = tuple(handle.id for handle in held)
        seq, first = self._number(wire.TASK_OUTPUTS)
        sent.append((self._pool.expect(seq, team.ranks, f"it runs {task.name}"), first))
        if task.timeout is not None:
            self._pool.limit(seq, team.ranks, task.timeout, task.name)
        bodies: dict[bool, bytes] = {}
        frames: dict[int, bytes] = {}
        for rank in team.ranks:
            shipped = self._shipped.setdefault(rank, {})
            known = task.body_id in shipped
            if known not in bodies:
                placed = task.placed(inputs, first, without_body=known)
                bodies[known] = pickle.dumps(placed)
            frames[rank] = frame(wire.TASK, seq, bodies[known])
            wire.keep_latest(shipped, task.body_id, None)
        self._pool.post(frames)

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        large = math.prod(shape) * dtype.itemsize >= STAGED_BYTES
        found = self._pool.landing.tensor(shape, dtype) if large else None
        return torch.empty(shape, dtype=dtype, device="cpu") if found is None else found

    def fetch(self, handle: Any, requests: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        ranks = tuple(handle.team.ranks[place] for place, *_ in requests)
        landed = [self._landed(target) for *_, target in requests]
        self._retried(handle, ranks, lambda: self._fetched(handle, ranks, requests, landed))
        for target, (*_, wanted) in zip(landed, requests, strict=True):
            self._pool.landing.filled(target)
            if target is not wanted:
                copy(target, wanted)

    def _landed(self, target: torch.Tensor) -> torch.Tensor:
        """Memory that is filled first: shared, or else contiguous."""
        if self._pool.landing.region_of(target) is not None:
            return target
        shape, dtype, found = tuple(target.shape), target.dtype, None
        if target.nbytes >= STAGED_BYTES:
            found = self._pool.landing.tensor(shape, dtype, is_passed_on=True)
        if found is None and not target.is_contiguous():
            found = torch.empty(shape, dtype=dtype, device="cpu")
        return target if found is None else found

    def _fetched(
        self,
        handle: Any,
        ranks: Sequence[int],
        requests: Sequence[tuple[int, int, int, torch.Tensor]],
        landed: Sequence[torch.Tensor],
    ) -> bool:
        """Ask each rank for a block, and wait; False if a failure came first."""
        bodies, targets = {}, {}
        for rank, (_, dim, position, _), target in zip(ranks, requests, landed, strict=True):
            region = self._pool.landing.region_of(target)
            if region is None:
                targets[rank], where = wire.bytes_of(target), [-1, 0, 0]
            else:
                where = [region.offset, region.room, int(target.storage_offset())]
            what = *wire.describe(target), *target.stride()
            bodies[rank] = pack_ints(handle.seq, handle.id, dim, position, *where, *what)
        pending = None
        try:
            about = handle.era, handle.seq
            pending = self._pool.ask(bodies, wire.FETCH, targets, about=about)
            is_done = self._pool.answered(pending, ranks, prints=self._pool.prints)
        except BaseException as cause:
            # a worker may still write there, unless nothing was sent; Ctrl-C may come at any time
            is_sent = pending is not None or not isinstance(cause, Exception)
            if is_sent and not self._pool.ended:
                seq = self._pool.seq if pending is None else pending.seq
                self._lent.append((seq, ranks, landed))
            raise
        if not is_done:  # after a repair no worker is at an earlier command
            self._pool.repair(handle.seq)
        error = None if is_done else self._incidents.of_command(pending.era, pending.seq)
        if error is not None:  # asking again would not help
            raise error
        return is_done

    def block(self, handle: Any) -> None:
        if self._pool.prints or not self._is_computed(handle):
            ranks = handle.team.ranks
            self._retried(handle, ranks, lambda: self._pool.wait_for(handle.era, handle.seq, ranks))

    def is_ready(self, handle: Handle) -> bool:
        if self._pool.broken and not self.closed:
            return False  # else this would wait for a repair
        return self._is_computed(handle)

    @property
    def has_losses(self) -> bool:
        return self._pool.broken or bool(self._lossy)

    def check(self, handle: Handle) -> None:
        self._check(handle, handle.team.ranks)

    def loss(self, handle: Any, place: int) -> BaseException | None:
        if self._pool.broken:  # which values are lost is known after the repair
            self._pool.repair(handle.seq)
        return self._incidents.of_value(
            handle.era, handle.seq, handle.team.ranks[place : place + 1]
        )

    @property
    def ended(self) -> bool:
        return self._pool.ended

    @contextmanager
    def readable(self) -> Iterator[None]:
        because = self._pool.closed_because
        try:
            if because is not None:
                self._pool.reopen()
            yield
        finally:
            if because is not None:
                self._pool.stop(because)

    def lost(self, team: Team, error: BaseException) -> Handle:
        return _Stored(0, 0, team, self._incidents.era_of(error))  # no value has the number 0

    def exchange(
        self, ranks: Sequence[int], mine: bytes, what: str, where: str = ""
    ) -> list[bytes]:
        return [mine]

    def agree(self, ranks: Sequence[int], mine: bytes, what: str) -> bool:
        return True

    def note(self, team: Team, plan_id: int, numbers: Sequence[tuple[Any, int]]) -> None:
        pass

    def limit(self, config: Config) -> None:
        self.timeout = config.timeout

    def stacks(self) -> dict[int, str]:
        return seen(self._pool.workers)

    def raise_if_closed(self) -> None:
        if self._pool.closed_because is not None:
            sleep_if_ending()
            raise RuntimeClosed(self._pool.closed_because)

    def _refuse_lost(self, held: Sequence[Any]) -> None:
        """Raise if an argument is lost (send lock held)."""
        for handle in held:
            if handle.era.has_losses:
                self._incidents.refuse(handle.era, handle.seq, handle.team.ranks)

    def _check(self, handle: Any, ranks: Sequence[int]) -> None:
        self.raise_if_closed()
        if self.has_losses:
            if self._pool.broken:  # which values are lost is known after the repair
                self._pool.repair(handle.seq)
            error = self._incidents.of_value(handle.era, handle.seq, ranks)
            if error is not None:
                raise error

    def close(self) -> None:
        self._pool.close(POOL_CLOSED)
        self._lent.clear()
        _live.discard(self)

    # -- inside ------------------------------------------------------------------------------------

    def _number(self, num_handles: int) -> tuple[int, int]:
        """Next seq and first of ``num_handles`` new handles (send lock held)."""
        self._pool.seq += 1
        first = self._next_handle
        self._next_handle += num_handles
        return self._pool.seq, first

    def _is_computed(self, handle: Handle) -> bool:
        """Whether every rank is known to be done with the value's command, and it succeeded."""
        self.check(handle)
        return self._pool.has_reached(handle.seq, handle.team.ranks)

    def _retried(self, handle: Any, ranks: Sequence[int], ask: Callable[[], bool]) -> None:
        """Ask ``ranks`` about a value, again after each repair, until all answer; raises if the
        value is lost.
        """
        with self._plans.waiting():
            while True:
                self._check(handle, ranks)
                if ask():
                    self._check(handle, ranks)  # a failure may have come and gone before ``ask``
                    return
                self._pool.repair(handle.seq)

    def _free(self, team: Team) -> None:
        """Send which values are not used any more (send lock held); ``execute`` sends this with its
        call.
        """
        hand_over(
            team.released,
            lambda released: self._pool.tell(team.ranks, wire.FREE, pack_ints(*released)),
        )

    def _tell_news(self) -> None:
        """Free unused values, and prepare for plans, when no calls are made (monitor: must not wait
        for the lock).
        """
        self._free_shared()
        teams = tuple(self._teams.values())
        idle = not (self._plans.has_news or any(team.released for team in teams))
        if self._pool.broken or (idle and self._pool.outbox.unsent is None):
            return
        if self._pool.send_lock.acquire(blocking=False):
            try:
                if self._pool.outbox.finish():
                    self._plans.tell()
                    for team in teams:
                        self._free(team)
            finally:
                self._pool.send_lock.release()

    def _free_shared(self) -> None:
        for _ in tuple(self._lent):  # each goes to the end, or goes
            seq, ranks, targets = self._lent.popleft()
            if not self._pool.has_reached(seq, ranks):
                self._lent.append((seq, ranks, targets))
        for worker in tuple(self._pool.workers.values()):
            worker.staging.trim()
        self._pool.landing.trim()
        self._pool.common.trim()

    def _restore(self, new_ranks: set[int]) -> None:
        """After a repair: give new workers the plans of the old ones."""
        with self._pool.send_lock:
            self._shipped.clear()  # workers have skipped functions sent after the failure
            for team in self._teams.values():
                team.sockets = [self._pool.workers[rank].socket for rank in team.ranks]
            self._plans.restore(new_ranks)

    def in_forked_child(self) -> None:
        """In a forked child: the workers are the parent's."""
        self.forked = True
        self._pool.in_forked_child(FORKED)


_live: weakref.WeakSet[LocalRuntime] = weakref.WeakSet()


def _all_in_forked_child() -> None:
    for runtime in tuple(_live):
        runtime.in_forked_child()


os.register_at_fork(after_in_child=_all_in_forked_child)
