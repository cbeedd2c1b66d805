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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from torchpmap._base.busy import silence
from torchpmap._base.config import Config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.errors import CallTimeout, WorkerError, kind_of
from torchpmap._base.platform import LATE_HINT, Kinds
from torchpmap._base.torch_internals import (
    has_transforms,
    num_modes,
    outside_modes,
    outside_transforms,
)
from torchpmap._layout.axis_stack import group_name
from torchpmap._runtime import wire
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.completion import Completion
from torchpmap._runtime.groups.process_groups import Groups, RankPartition
from torchpmap._runtime.task import Rank, Report, Task, Usage, Work, bytes_held
from torchpmap._runtime.torchrun.failure import Failures
from torchpmap._runtime.torchrun.launcher import JobPlace
from torchpmap._runtime.torchrun.placement import (
    Placement,
    devices_of,
    own_number,
    refuse_shared,
    share_code,
)
from torchpmap._runtime.torchrun.rendezvous import Rendezvous
from torchpmap._runtime.torchrun.watch import Watch, Watched
from torchpmap._trace.boxed import Boxed
from torchpmap._trace.compile import (
    CompileReport,
    Definition,
    communicates,
    compile_and_report,
)
from torchpmap._trace.pickling import number_of
from torchpmap._trace.promises import run_first_time

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


class _Defined(NamedTuple):
    """A plan that this process has compiled."""

    runner: Boxed
    name: str
    axis: tuple[int, ...] | None
    """The ranks that its collectives wait for; None if there are none."""
    number: int
    """Identifies the plan: the same number in all processes."""
    timeout: float | None
    is_watched: bool
    """Whether a call of it may have to be ended."""
    outputs: Kinds


class TorchrunRuntime:
    """One process of several (see ``Runtime`` for the interface)."""

    runs_here = True
    forked = False
    scarred = False
    """Values are lost only with the whole job."""

    def __init__(self, place: JobPlace, device_type: str, config: Config) -> None:
        self._platform = PLATFORMS[device_type]
        self.devices = devices_of(place, self._platform)
        self.rank = place.rank
        if self.rank:
            silence()
        self.timeout = config.timeout
        number = self._platform.narrow(own_number(place, self._platform))
        self.device = self._platform.open(number, place.rank)
        self._lock = threading.RLock()  # one call at a time: all ranks need one order of them
        self._plans: dict[int, _Defined] = {}
        self._teams: dict[tuple[int, ...], Team] = {}
        self._rendezvous = Rendezvous(place, device_type, config.patience)
        self._shares_code = self._compare_placements(number)
        """Whether what one process has compiled fits the others."""
        self._groups = Groups(
            place.rank, self.device, self._rendezvous.store.raw, config, self._rendezvous.address
        )
        self._failures = Failures(self._rendezvous, self._groups)
        self._rendezvous.insist = self._failures.insist
        self._watch = Watch(self._rendezvous, self._groups, self._failures)
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
    def closed(self) -> bool:
        return self._failures.closed_because is not None

    def insist(self) -> None:
        """Raise if the runtime was closed."""
        self._failures.insist()

    @property
    def rendezvous(self) -> Rendezvous:
        """How this process reaches the others without collectives."""
        self.insist()
        return self._rendezvous

    def exchange(self, ranks: Sequence[int], mine: bytes, what: str) -> list[bytes]:
        return self.together(lambda rendezvous: rendezvous.exchange(ranks, mine, what))

    def together(self, work: Callable[[Rendezvous], T]) -> T:
        """Run work that needs all processes and calls no plan; it fails as a call does."""
        with self._lock:
            self._settle()  # the work may use a group that a call uses
            with self._failures.failing():
                return work(self._rendezvous)

    def group_of_all(self) -> str:
        """Name of a process group of all processes, which carries CPU tensors."""
        ranks = tuple(range(len(self.devices)))
        name = group_name(ranks)  # which calls on all devices use, too
        self.make_groups({name: (ranks,)})
        return name

    def team(self, ranks: tuple[int, ...]) -> Team:
        team = self._teams.get(ranks)
        if team is None:
            team = self._teams[ranks] = Team(self, ranks)
        return team

    # -- values ------------------------------------------------------------------------------------

    def put(self, team: Team, blocks: Sequence[torch.Tensor]) -> Handle:
        with self._lock:
            self.insist()
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
        self.insist()

    def is_ready(self, handle: Handle) -> bool:
        is_done = self._completion is None or handle.seq <= self._completion.done
        return is_done and not self.closed

    def check(self, handle: Handle) -> None:
        self.insist()

    # -- calls -------------------------------------------------------------------------------------

    def define(
        self, team: Team, definition: Definition, groups: dict[str, RankPartition]
    ) -> CompileReport:
        ranks = definition.ranks
        with self._lock:
            self.insist()
            if self.rank not in ranks:
                raise ValueError(
                    f"{definition.name}: this process (rank {self.rank}) has none of the devices "
                    f"{', '.join(str(self.devices[rank]) for rank in ranks)}; only the processes "
                    "of these devices may call it."
                )
            with self._failures.failing():
                described = _described(definition, self.device)
                if len(ranks) > 1:
                    self._rendezvous.agree(ranks, described, definition.name)
                self.make_groups(groups)
                index = torch.tensor(ranks.index(self.rank), device=self.device)
                with self._in_turn(definition), _plain(), torch.no_grad():
                    runner, report = compile_and_report(definition, index)
                if not definition.backend.is_inductor:  # Inductor's code turns gradients off itself
                    runner = torch.no_grad()(runner)
                axis = ranks if communicates(definition) else None
                number = number_of(described.encode())
                self._groups.calls[number] = definition.name
                first = self._first_run(definition, runner)
                limit = definition.timeout
                watched = axis is not None or limit is not None
                self._plans[definition.plan_id] = _Defined(
                    first, definition.name, axis, number, limit, watched, definition.outputs
                )
                return report

    def _first_run(self, definition: Definition, runner: Boxed) -> Boxed:
        def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            where = f"on device {self.devices[self.rank]}"
            results, later = run_first_time(definition, runner, blocks, where)
            plan = self._plans.get(definition.plan_id)
            if plan is not None:  # else it was forgotten before the device came to it
                self._plans[definition.plan_id] = plan._replace(runner=later)
            return results

        return run

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

    def make_groups(self, groups: dict[str, RankPartition]) -> None:
        for name, partition in groups.items():
            self._groups.ensure(name, partition)

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
        give_up: Callable[[], None] | None = None,
    ) -> list[Handle]:
        self._lock.acquire()  # "with" takes twice as long
        try:
            if self._failures.closed_because is not None:
                self.insist()
            plan = self._plans[plan_id]
            blocks = [handle.block for handle in held]
            if give_up is not None:
                give_up()
            held.clear()
            try:
                if self._completion is not None:
                    results = self._launch(plan, blocks, self._completion)
                elif plan.is_watched or has_transforms() or num_modes():
                    results = self._run(plan, blocks)
                else:
                    results = plan.runner(blocks)
            except Exception as error:
                failure = self._failures.fail(error)
                raise failure from failure.__cause__
            seq = self._seq
        finally:
            self._lock.release()
        if num_outputs == 1:
            return [_Block(results[0], team, seq)]
        return [_Block(result, team, seq) for result in results]

    def _run(self, plan: _Defined, blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a plan that waits for other processes, has a timeout, or is started in a transform or
        a mode.
        """
        if plan.is_watched:
            self._watch.begin(self._watch.announced(plan.axis or (), plan.name, plan.timeout))
            self._groups.occasion.number = plan.number
        try:
            with _plain() if has_transforms() or num_modes() else nullcontext():
                return plan.runner(blocks)
        finally:
            if plan.is_watched:
                self._groups.occasion.number = 0
                self._watch.end()

    def _launch(
        self, plan: _Defined, blocks: list[torch.Tensor], completion: Completion
    ) -> Sequence[torch.Tensor]:
        """Give a plan to a device that runs it later."""
        self._seq += 1
        if plan.is_watched:
            watched = self._watch.announced(plan.axis or (), plan.name, plan.timeout)
            self._launched[self._seq] = watched
        run = functools.partial(self._run_on_occasion, plan)
        plain = _plain() if has_transforms() or num_modes() else nullcontext()
        with self._platform.own_stream(), plain:
            results = self._platform.launch(run, blocks, plan.outputs)
            completion.launched(self._seq, plan.name, communicates=plan.axis is not None)
        return results

    def _run_on_occasion(
        self, plan: _Defined, blocks: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        self._groups.occasion.number = plan.number if plan.is_watched else 0
        try:
            return plan.runner(blocks)
        finally:
            self._groups.occasion.number = 0

    def run_task(
        self, team: Team, task: Task, held: Sequence[Any]
    ) -> tuple[list[Report | None], list[Handle]]:
        with self._lock:
            self._settle()
            assert task.body is not None
            # a copy, as in the local runtime: what the function changes must not be seen outside;
            # the pickle is safe, since it has not left this process
            work: Work = pickle.loads(task.body)
            blocks = [handle.block for handle in held]
            index = torch.tensor(task.ranks.index(self.rank), device=self.device)
            rank = Rank(task.ranks, task.group, index, self._groups.ensure, self._usage)
            with self._failures.failing():
                self._meet(task, blocks)
                self._watch.begin(self._watch.announced(task.ranks, task.name, task.timeout))
                try:
                    with self._platform.own_stream(), _plain():
                        report, stored = work.run(rank, task.given, blocks)
                    self._platform.synchronize()
                    # a device goes on behind a collective that was aborted
                    self._groups.refuse_if_aborted()
                finally:
                    self._watch.end()
                reports = self._gathered(task, report)
            return reports, [_Block(block, team) for block in stored]

    def _usage(self) -> Usage:
        """Looks through all objects of the process: a list of the values would cost every call."""
        mine = [each for each in gc.get_objects() if type(each) is _Block]
        blocks = [each.block for each in mine if each.block is not None]
        return Usage(bytes_held(blocks), 0)

    def _meet(self, task: Task, blocks: Sequence[torch.Tensor]) -> None:
        """Agree with the others on every uncompiled call: it has no plan that was compared."""
        if len(task.ranks) > 1:
            inputs = ", ".join(kind_of(block.shape, block.dtype) for block in blocks)
            self._rendezvous.exchange(task.ranks, b"", f"{task.name}({inputs}), compile=False")
        self.make_groups({task.group: (task.ranks,)})

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
        self.insist()

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

    def close(self) -> None:
        if self._completion is not None and not self.closed:
            self._completion.settle()  # or what runs would be aborted half-way, here and elsewhere
        failed = self.closed
        self._failures.close()
        self._watch.stop()
        self._rendezvous.leave(failed=failed)  # first: it is why the others' collectives end
        if self._completion is not None and not failed:
            self._rendezvous.see_off()  # their collectives may still read from this device
        self._groups.drop()
        if self._completion is not None:
            self._completion.close(_STOPPING_S)
        self._failures.surface()


class _plain:
    """Leaves the caller's transforms and modes: a plan runs on the devices' own values."""

    def __enter__(self) -> None:
        self._contexts = [outside_transforms(), outside_modes()]
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exception)


def _value(constant: torch.Tensor) -> str:
    if constant.numel() <= 64:
        return str(constant.tolist())
    number = number_of(bytes(wire.bytes_of(constant.contiguous())))
    return f"{kind_of(constant.shape, constant.dtype)} number {number}"


def _described(definition: Definition, device: torch.device) -> str:
    """A plan for ``device`` as text, equal for all processes that would run the same."""
    inputs = ", ".join(kind_of(*given) for given in definition.inputs)
    backend = definition.backend
    lines: Iterable[str] = [
        f"{definition.name}({inputs}) on {len(definition.ranks)} devices",
        f"compile: {backend.name} {backend.mode} {backend.options}",
        *str(definition.graph.graph).splitlines(),
    ]
    constants = definition.graph.named_buffers()
    text = "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in constants)])
    return text.replace(str(device), device.type)  # each process has a number of its own
