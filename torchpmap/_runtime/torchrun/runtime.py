"""The runtime of one of several processes that a launcher started; each of them is a controller.

Each process owns one device and runs plans in place, on its own blocks; the collectives in them
reach the other processes.  All processes run the same script, so each knows what the others hold.
Before a plan runs for the first time the processes compare it (see ``Rendezvous``); later calls
cost nothing beyond the compiled code.

On an asynchronous device a call only gives the plan to the device; ``Completion`` notes when it is
done.  A failure of one process ends the job (see ``Failures``).  Nothing is repaired: the launcher
restarts the job.
"""

from __future__ import annotations

import functools
import gc
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from torchpmap._base.busy import silence
from torchpmap._base.config import Config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.errors import FORKED, CallTimeout, WorkerError
from torchpmap._base.platform import LATE_HINT
from torchpmap._base.torch_internals import (
    has_transforms,
    lazy_bits,
    num_modes,
)
from torchpmap._layout.axis_stack import group_name
from torchpmap._runtime import wire
from torchpmap._runtime.base import GiveUp, Handle, Team
from torchpmap._runtime.completion import Completion
from torchpmap._runtime.executor import Executor
from torchpmap._runtime.groups.process_groups import Groups, RankPartition
from torchpmap._runtime.task import Report, Task, Usage, Work, bytes_held
from torchpmap._runtime.torchrun.calls import Calls, Defined, plain
from torchpmap._runtime.torchrun.failure import Failures
from torchpmap._runtime.torchrun.place import (
    JobPlace,
    Placement,
    devices_of,
    own_number,
    refuse_shared,
    share_code,
)
from torchpmap._runtime.torchrun.rendezvous import Rendezvous
from torchpmap._runtime.torchrun.watch import Watch, Watched
from torchpmap._trace.boxed import Boxed
from torchpmap._trace.compile import CompileReport, Definition

T = TypeVar("T")


_STOPPING_S = 1.0
_HINT = f"The device cannot be used any more. {LATE_HINT}"


class _Block:
    """This process's own block of a value, freed with the last reference to it."""

    __slots__ = ("block", "seq", "team")

    def __init__(self, block: torch.Tensor | None, team: Team, seq: int = 0) -> None:
        """``block``: None where this process has no part of the value; ``seq``: the call that the
        device computes it in, if it is asynchronous.
        """
        self.block = block
        self.team = team
        self.seq = seq


class TorchrunRuntime:
    """One process of several (see ``Runtime`` for the interface)."""

    runs_here = True
    has_losses = False
    """Values are lost only with the whole job."""

    def __init__(self, place: JobPlace, device_type: str, config: Config) -> None:
        self._platform = PLATFORMS[device_type]
        self.devices = devices_of(place, self._platform)
        self.rank = place.rank
        if self.rank:
            silence()
        number = self._platform.narrow(own_number(place, self._platform))
        self.device = self._platform.open(number, place.rank)
        self.forked = False
        self.send_lock = threading.RLock()  # one call at a time: all ranks need one order of them
        self._plans: dict[int, Defined] = {}
        self._teams: dict[tuple[int, ...], Team] = {}
        self._rendezvous = Rendezvous(place, device_type, config.patience)
        self._shares_code = self._compare_placements(number)
        """Whether what one process has compiled fits the others."""
        self._groups = Groups(
            place.rank, self.device, self._rendezvous.store.raw, config, self._rendezvous.address
        )
        self._executor = Executor(
            *(self.rank, self.device, self._platform, self._groups),
            *(f"on device {self.devices[self.rank]}", self._usage),
        )
        self._rendezvous.lost_peers = self._groups.lost_peers
        self._failures = Failures(self._rendezvous, self._groups)
        self._rendezvous.raise_if_closed = self._failures.raise_if_closed
        self._watch = Watch(self._rendezvous, self._groups, self._failures)
        self._calls = Calls(self._rendezvous, self._groups, self._watch, config.timeout)
        self._launched: dict[int, Watched] = {}
        """Calls that the device is not done with, if they are watched."""
        self._seq = 0
        """Of the latest call."""
        self._completion: Completion | None = None
        if self._platform.is_asynchronous:
            self._completion = Completion(
                self._platform,
                lambda: self._groups.is_aborted,
                self._note,
                self._fail_late,
                self._come_to,
            )

    def _compare_placements(self, number: int) -> bool:
        if not self._platform.is_hardware:
            return True
        mine = Placement(socket.gethostname(), self._platform.hardware(number), number)
        ranks = range(len(self.devices))
        given = self._rendezvous.exchange(ranks, packed(tuple(mine)), "choosing the devices")
        placements = [Placement.of(unpacked(data)) for data in given]
        refuse_shared(placements)
        return share_code(placements)

    @property
    def timeout(self) -> float | None:
        return self._calls.timeout

    @property
    def closed(self) -> bool:
        return self._failures.closed_because is not None

    def stacks(self) -> dict[int, str]:
        return {self.rank: self._watch.shown(threading.main_thread().ident or 0)}

    def raise_if_closed(self) -> None:
        """Raise if the runtime was closed."""
        self._failures.raise_if_closed()

    @property
    def rendezvous(self) -> Rendezvous:
        """How this process reaches the others without collectives."""
        self.raise_if_closed()
        return self._rendezvous

    def exchange(
        self, ranks: Sequence[int], mine: bytes, what: str, where: str = ""
    ) -> list[bytes]:
        return self.together(lambda rendezvous: rendezvous.exchange(ranks, mine, what, where))

    def together(self, work: Callable[[Rendezvous], T]) -> T:
        """Run work that needs all processes and calls no plan; it fails as a call does."""
        with self.send_lock:
            self._settle()  # the work may use a group that a call uses
            with self._failures.failing():
                return work(self._rendezvous)

    def agree(self, ranks: Sequence[int], mine: bytes, what: str) -> bool:
        with self.send_lock:
            if not self._platform.is_hardware:  # else the groups of its calls are others
                self._settle()
            self.raise_if_closed()
            with self._failures.failing():
                return self._calls.agree(tuple(sorted(ranks)), mine, what)

    def note(self, team: Team, plan_id: int, numbers: Sequence[tuple[Any, int]]) -> None:
        plan = self._plans[plan_id]
        self._calls.history.note(team.ranks, plan.number, plan.name, numbers)

    def limit(self, config: Config) -> None:
        self._calls.timeout = config.timeout
        self._rendezvous.patience_s = config.patience
        self._groups.limit(config.patience)

    def group_of_all(self) -> str:
        """Name of a process group of all processes, which carries CPU tensors."""
        ranks = tuple(range(len(self.devices)))
        name = group_name(ranks)  # which calls on all devices use, too
        self._groups.ensure(name, (ranks,))
        return name

    def team(self, ranks: tuple[int, ...]) -> Team:
        team = self._teams.get(ranks)
        if team is None:
            team = self._teams.setdefault(ranks, Team(self, ranks))
        return team

    # -- values ------------------------------------------------------------------------------------

    def put(self, team: Team, blocks: Sequence[torch.Tensor]) -> Handle:
        with self.send_lock:
            self.raise_if_closed()
            if self.rank not in team.ranks:
                return _Block(None, team)
            block = blocks[team.ranks.index(self.rank)].detach()
            with self._platform.own_stream():
                # a copy: the caller may write to its tensors
                copy = self._platform.place(block, self.device)
                if self._completion is not None:
                    self._seq += 1
                    self._completion.launched(self._seq, "receiving a value", communicates=False)
            return _Block(copy, team, self._seq)

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def fetch(self, handle: Any, requests: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        self.block(handle)
        for place, dim, position, target in requests:
            ranks = handle.team.ranks
            rank = ranks[min(place, len(ranks) - 1)]  # a replicated value's team: this process only
            if rank != self.rank:
                raise RuntimeError(
                    f"the block on device {self.devices[rank]} belongs to another process (rank "
                    f"{rank}; this is rank {self.rank}). Use addressable_shards for the blocks "
                    "here, or torchpmap.multihost.all_gather for the whole value in every process."
                )
            block = handle.block.select(dim, position) if dim >= 0 else handle.block
            wire.refuse_other(block, wire.describe(target), f"on device {self.devices[rank]}")
            self._platform.fetch(block, target)

    def block(self, handle: Handle) -> None:
        if self._completion is not None:
            self._completion.wait(handle.seq)
        self.raise_if_closed()

    def is_ready(self, handle: Handle) -> bool:
        is_done = self._completion is None or handle.seq <= self._completion.done
        return is_done and not self.closed

    def check(self, handle: Handle) -> None:
        self.raise_if_closed()

    # -- calls -------------------------------------------------------------------------------------

    def define(
        self, team: Team, definition: Definition, groups: dict[str, RankPartition]
    ) -> CompileReport:
        ranks = definition.ranks
        with self.send_lock:
            self.raise_if_closed()
            if self.rank not in ranks:
                raise ValueError(
                    f"{definition.name}: this process (rank {self.rank}) has none of the devices "
                    f"{', '.join(str(self.devices[rank]) for rank in ranks)}; only the processes "
                    "of these devices may call it."
                )
            with self._failures.failing():
                number = self._calls.agree_on_plan(definition, groups, self.device)
                # Inductor's code turns gradients off itself
                guarded = None if definition.backend.is_inductor else _without_gradients
                with self._in_turn(definition), plain(), torch.no_grad():
                    compiled, report = self._executor.define(definition, guarded)
                self._plans[definition.plan_id] = self._calls.defined(
                    definition, compiled, number, groups
                )
                return report

    def _in_turn(self, definition: Definition) -> AbstractContextManager[None]:
        """Let one process of each host compile first: the others load it from Inductor's cache.

        Where they see several GPUs, each has another number, which is in the code: then all compile
        at the same time.  To hide the other GPUs from the process would not do, since a script that
        calls ``torch.cuda.set_device(local_rank)`` would no longer find its own.
        """
        is_shared = definition.backend.is_inductor and len(definition.ranks) > 1
        if is_shared and self._shares_code:
            return self._rendezvous.in_turn(definition.ranks, definition.name)
        return nullcontext()

    def forget(self, plan_id: int) -> None:
        self._plans.pop(plan_id, None)

    def plan_name(self, plan_id: int) -> str:
        return self._plans[plan_id].name

    def execute(
        self,
        team: Team,
        plan_id: int,
        held: list[Any],
        num_outputs: int,
        give_up: GiveUp | None = None,
    ) -> list[Handle]:
        self.send_lock.acquire()  # "with" takes twice as long
        try:
            if self._failures.closed_because is not None:
                self.raise_if_closed()
            plan = self._plans[plan_id]
            blocks = [handle.block for handle in held]
            held.clear()
            if give_up is not None:
                give_up(())
            try:
                if self._completion is not None:
                    results = self._launch(plan, blocks, self._completion)
                elif plan.is_watched or self._calls.timeout or has_transforms() or num_modes():
                    results = self._calls.run(plan, blocks)
                else:
                    results = plan.compiled.run(blocks)
            except Exception as error:
                failure = self._failures.fail(error)
                raise failure from failure.__cause__
            seq = self._seq
        finally:
            self.send_lock.release()
        held += [_Block(result, team, seq) for result in results]
        return held

    def _launch(
        self, plan: Defined, blocks: list[torch.Tensor], completion: Completion
    ) -> Sequence[torch.Tensor]:
        """Give a plan to a device that runs it later."""
        self._seq += 1
        watched = self._calls.watched(plan)
        if watched is not None:
            self._launched[self._seq] = watched
        run = functools.partial(self._calls.run_later, plan, self._calls.history.of(plan.axis))
        with self._platform.own_stream(), plain():
            results = self._platform.launch(run, blocks, plan.compiled.outputs)
            completion.launched(self._seq, plan.name, communicates=plan.compiled.communicates)
        return results

    def run_task(
        self, team: Team, task: Task, held: Sequence[Any]
    ) -> tuple[list[Report | None], list[Handle]]:
        with self.send_lock:
            self._settle()
            assert task.body is not None
            # a copy, as in the local runtime: what the function changes must not be seen outside;
            # the pickle is safe, since it has not left this process
            work: Work = pickle.loads(task.body)
            blocks = [handle.block for handle in held]
            with self._failures.failing():
                with self._calls.of_task(task, blocks), self._platform.own_stream(), plain():
                    report, stored = self._executor.run(task, work, blocks)
                reports = self._gathered(task, report)
            return reports, [_Block(block, team) for block in stored]

    def _usage(self) -> Usage:
        """Looks through all objects of the process: a list of the values would cost every call."""
        mine = [each for each in gc.get_objects() if type(each) is _Block]
        blocks = [each.block for each in mine if each.block is not None]
        return Usage(bytes_held(blocks), 0)

    def _gathered(self, task: Task, report: Report | None) -> list[Report | None]:
        if report is None or len(task.ranks) == 1:
            return [report] * len(task.ranks)
        given = self._rendezvous.exchange(task.ranks, packed(report.as_data()), task.name)
        return [report.like(unpacked(data), task.name) for data in given]

    # -- an asynchronous device --------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until the device has done everything; raise what has failed."""
        if self._completion is not None:
            self._completion.settle()
        self.raise_if_closed()

    def _come_to(self, seq: int) -> None:
        """The device has come to a call (this and the next two: completion thread)."""
        if seq in self._launched:
            self._watch.begin(self._launched[seq])

    def _note(self, seq: int) -> None:
        if self._launched.pop(seq, None) is not None:
            self._watch.end()

    def _fail_late(self, seq: int, doing: str, error: BaseException) -> None:
        """A call has failed that had returned."""
        if not isinstance(error, Exception):  # it would end the thread that it is raised in
            error = WorkerError(f"{doing}: {type(error).__name__}: {error}")
        if not self._platform.recover(error):
            error.add_note(_HINT)
        try:
            self._note(seq)
        except CallTimeout as verdict:
            error = verdict
        self._failures.fail(error, is_late=True)

    def in_forked_child(self) -> None:
        """In a forked child: memory and connections are shared with the parent, whose part in the
        job it would take.
        """
        self.forked, self._completion, self.send_lock = True, None, threading.RLock()
        self._failures.closed_because = FORKED
        self._failures.close()
        self._groups.in_forked_child()

    def close(self) -> None:
        if self.forked:
            return
        if self._completion is not None and not self.closed:
            self._completion.settle()  # or what runs would be aborted half-way, here and elsewhere
        failed = self.closed
        self._failures.close()
        self._watch.stop()
        self._rendezvous.leave(failed=failed)  # first: it is why the others' collectives end
        if self._completion is not None and not failed:
            self._rendezvous.wait_for_others()  # their collectives may still read from this device
        self._groups.drop()
        if self._completion is not None:
            self._completion.close(_STOPPING_S)
        self._failures.surface()


def _without_gradients(run: Boxed) -> Boxed:
    return torch.no_grad()(lazy_bits()(run))
