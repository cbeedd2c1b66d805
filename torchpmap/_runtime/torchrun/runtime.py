"""The runtime of one of several processes that a launcher started; each of them is a controller.

Each process owns one device and runs plans in place, on its own blocks; the collectives in them
reach the other processes.  All processes run the same script, so each knows what the others hold.
Before a plan runs for the first time the processes compare it (see ``Rendezvous``); later calls
cost nothing beyond the compiled code.

A process that fails in a plan drops its groups.  So the others fail at once instead of waiting for
it, and they read from the store which process failed first.  Nothing is repaired: the launcher
restarts the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from torchpmap._base.config import Config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.devices import PLATFORMS, Device
from torchpmap._base.errors import (
    POOL_CLOSED,
    CallTimeout,
    CollectiveMismatch,
    RuntimeClosed,
    WorkerDied,
    WorkerError,
    kind_of,
)
from torchpmap._base.platform import Event, Platform
from torchpmap._base.torch_internals import (
    has_transforms,
    num_modes,
    outside_modes,
    outside_transforms,
)
from torchpmap._layout.axis_stack import group_name
from torchpmap._runtime import wire
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.groups.process_groups import Groups, RankPartition, is_communication
from torchpmap._runtime.task import Rank, Report, Task, Work
from torchpmap._runtime.torchrun.launcher import JobPlace
from torchpmap._runtime.torchrun.rendezvous import Rendezvous
from torchpmap._runtime.torchrun.watch import Watch
from torchpmap._trace.boxed import Boxed
from torchpmap._trace.compile import (
    Definition,
    communicates,
    compile_definition,
    run_first_time,
)
from torchpmap._trace.pickling import number_of

T = TypeVar("T")


_CONSEQUENCES = (WorkerError, WorkerDied)
"""Errors that a process raises because another one failed."""


class _Block:
    """This process's own block of a value, freed with the last reference to it."""

    __slots__ = ("block", "event", "team")

    seq = 0  # plans run in place: a block that exists is computed

    def __init__(self, block: torch.Tensor | None, team: Team, event: Event | None = None) -> None:
        """``block``: None where this process has no part of the value; ``event``: when it is
        computed, if the device is asynchronous.
        """
        self.block = block
        self.event = event
        self.team = team


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


class TorchrunRuntime:
    """One process of several (see ``Runtime`` for the interface)."""

    runs_here = True
    forked = False
    scarred = False
    """Values are lost only with the whole job."""

    def __init__(self, place: JobPlace, device_type: str, config: Config) -> None:
        self.devices = tuple(Device(rank, device_type, rank) for rank in range(place.size))
        self.rank = place.rank
        self.timeout = config.timeout
        self._platform = PLATFORMS[device_type]
        self.device = _own_device(place, self._platform)
        self._closed_because: str | None = None
        self._lock = threading.RLock()  # one call at a time: all ranks need one order of them
        self._plans: dict[int, _Defined] = {}
        self._teams: dict[tuple[int, ...], Team] = {}
        self._rendezvous = Rendezvous(place, device_type, config.patience)
        self._groups = Groups(
            place.rank, self.device, self._rendezvous.store.raw, config, self._rendezvous.address
        )
        self._watch = Watch(self._rendezvous, self._groups, self._end_process)
        self._recorded: BaseException | None = None
        self._previous_hook = sys.excepthook
        sys.excepthook = self._uncaught

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

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
            self.insist()
            with self._failing():
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
            copy = None
            if self.rank in team.ranks:
                block = blocks[team.ranks.index(self.rank)].detach()
                # a copy: the caller may write to its tensors
                copy = torch.empty(block.shape, dtype=block.dtype, device=self.device).copy_(block)
            return _Block(copy, team)

    def fetch(self, handle: Any, requests: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        self.insist()
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
            target.copy_(block)

    def block(self, handle: Handle) -> None:
        self.insist()
        self._platform.synchronize()

    def is_ready(self, handle: Any) -> bool:
        return not self.closed and (handle.event is None or handle.event.query())

    def check(self, handle: Handle) -> None:
        self.insist()

    # -- calls -------------------------------------------------------------------------------------

    def define(self, team: Team, definition: Definition, groups: dict[str, RankPartition]) -> None:
        ranks = definition.ranks
        with self._lock:
            self.insist()
            if self.rank not in ranks:
                raise ValueError(
                    f"{definition.name}: this process (rank {self.rank}) has none of the devices "
                    f"{', '.join(str(self.devices[rank]) for rank in ranks)}; only the processes "
                    "of these devices may call it."
                )
            with self._failing():
                described = _described(definition, self.device)
                if len(ranks) > 1:
                    self._rendezvous.agree(ranks, described, definition.name)
                self.make_groups(groups)
                index = torch.tensor(ranks.index(self.rank), device=self.device)
                with self._in_turn(definition), _plain(), torch.no_grad():
                    runner = compile_definition(definition, index)
                if not definition.backend.is_inductor:  # Inductor's code turns gradients off itself
                    runner = torch.no_grad()(runner)
                axis = ranks if communicates(definition) else None
                number = number_of(described.encode())
                self._groups.calls[number] = definition.name
                first = self._first_run(definition, runner)
                limit = definition.timeout
                watched = axis is not None or limit is not None
                self._plans[definition.plan_id] = _Defined(
                    first, definition.name, axis, number, limit, watched
                )

    def _first_run(self, definition: Definition, runner: Boxed) -> Boxed:
        def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            where = f"on device {self.devices[self.rank]}"
            results, later = run_first_time(definition, runner, blocks, where)
            plan = self._plans[definition.plan_id]
            self._plans[definition.plan_id] = plan._replace(runner=later)
            return results

        return run

    def _in_turn(self, definition: Definition) -> AbstractContextManager[None]:
        """Let one process of each host compile first: the others load it from Inductor's cache."""
        if definition.backend.is_inductor and len(definition.ranks) > 1:
            return self._rendezvous.in_turn(definition.ranks, definition.name)
        return nullcontext()

    def make_groups(self, groups: dict[str, RankPartition]) -> None:
        for name, partition in groups.items():
            self._groups.ensure(name, partition)

    def forget(self, plan_id: int) -> None:
        self._plans.pop(plan_id, None)

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
            if self._closed_because is not None:
                self.insist()
            plan = self._plans[plan_id]
            blocks = [handle.block for handle in held]
            if give_up is not None:
                give_up()
            held.clear()
            try:
                if plan.is_watched or has_transforms() or num_modes():
                    results = self._run(plan, blocks)
                else:
                    results = plan.runner(blocks)
            except Exception as error:
                failure = self._failed(error)
                raise failure from failure.__cause__
        finally:
            self._lock.release()
        event = self._platform.record() if self._platform.is_asynchronous else None
        if num_outputs == 1:
            return [_Block(results[0], team, event)]
        return [_Block(result, team, event) for result in results]

    def _run(self, plan: _Defined, blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a plan that waits for other processes, has a timeout, or is started in a transform or
        a mode.
        """
        if plan.is_watched:
            self._watch.begin(plan.axis or (), plan.name, plan.timeout)
            self._groups.occasion.number = plan.number
        try:
            with _plain() if has_transforms() or num_modes() else nullcontext():
                return plan.runner(blocks)
        finally:
            if plan.is_watched:
                self._groups.occasion.number = 0
                self._watch.end()

    def run_task(
        self, team: Team, task: Task, held: Sequence[Any]
    ) -> tuple[list[Report | None], list[Handle]]:
        with self._lock:
            self.insist()
            assert task.body is not None
            # a copy, as in the local runtime: what the function changes must not be seen outside;
            # the pickle is safe, since it has not left this process
            work: Work = pickle.loads(task.body)
            blocks = [handle.block for handle in held]
            index = torch.tensor(task.ranks.index(self.rank), device=self.device)
            rank = Rank(task.ranks, task.group, index, self._groups.ensure)
            with self._failing():
                self._meet(task, blocks)
                self._watch.begin(task.ranks, task.name, task.timeout)
                try:
                    with _plain():
                        report, stored = work.run(rank, task.given, blocks)
                finally:
                    self._watch.end()
                reports = self._gathered(task, report)
            return reports, [_Block(block, team) for block in stored]

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

    # -- failure and end ---------------------------------------------------------------------------

    def insist(self) -> None:
        """Raise if the runtime was closed."""
        if self._closed_because is not None:
            raise RuntimeClosed(self._closed_because)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An exception of the block ends the job, as in ``execute``."""
        try:
            yield
        except Exception as error:
            failure = self._failed(error)
            raise failure from failure.__cause__

    def _failed(self, error: Exception) -> Exception:
        """The exception to raise for ``error``; tells the others, which then stop waiting."""
        self._rendezvous.hurry()
        if is_communication(error):
            try:
                self._watch.raise_verdict()
                self._rendezvous.raise_cause()
                self._rendezvous.raise_absence()
                error = _lost(error)
            except (WorkerError, CollectiveMismatch, CallTimeout) as cause:
                error = cause
            except Exception:  # the store is gone too
                error = _lost(error)
        if not isinstance(error, _CONSEQUENCES):
            self._record(error)  # at once: torchrun takes the earliest record for the cause
        self._rendezvous.report_cause(error)
        self._groups.drop()
        self._closed_because = (
            "a mapped call failed in this process, so the others cannot go on with it: "
            f"{type(error).__name__}: {str(error).removesuffix('.')}. End the script, and let the "
            "launcher restart it."
        )
        return error

    def _end_process(self, error: BaseException) -> None:
        """End this process: the call that should raise ``error`` does not return."""
        self._record(error)
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)

    def _record(self, error: BaseException) -> None:
        """Write for torchrun why this process fails."""
        if "TORCHELASTIC_ERROR_FILE" not in os.environ or error is self._recorded:
            return
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        self._recorded, where = error, error.__traceback__
        try:
            raise error  # torchrun records the exception that is being handled
        except BaseException as handled:
            get_error_handler().record_exception(handled)
        error.with_traceback(where)
        if isinstance(error, _CONSEQUENCES):
            _note_as_later(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        """``sys.excepthook``: the others, and torchrun, learn what ended this process."""
        if not self.closed:
            self._rendezvous.hurry()
            self._rendezvous.report_cause(error.with_traceback(where))
            self._groups.drop()
            self._closed_because = f"this process failed: {kind.__name__}: {error}"
        self._record(error)
        self._previous_hook(kind, error, where)

    def close(self) -> None:
        failed = self.closed
        if self._closed_because is None:
            self._closed_because = POOL_CLOSED
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._previous_hook
        self._watch.stop()
        if not failed:
            self._platform.synchronize()  # or what runs would be aborted half-way
        self._rendezvous.leave(failed=failed)  # first: it is why the others' collectives end
        self._groups.drop()


def _lost(error: BaseException) -> WorkerDied:
    """The error to raise when a collective broke off and no process reported why."""
    lost = WorkerDied(
        "the connection to another process of this job broke off, and it did not say why: it was "
        "killed (perhaps for lack of memory), or its host is gone. The launcher's report names it."
    )
    lost.__cause__ = error
    return lost


def _note_as_later(file: Path) -> None:
    """Date a consequence a second later: torchrun takes the earliest failure for the cause, and
    counts in whole seconds.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(file.read_text())
        extra = note["message"]["extraInfo"]
        extra["timestamp"] = str(int(extra["timestamp"]) + 1)
        file.write_text(json.dumps(note))


def _own_device(place: JobPlace, platform: Platform) -> torch.device:
    if not platform.is_hardware:
        return platform.device()
    visible = platform.count()
    number = place.local_rank if visible > 1 else 0  # some launchers show a process only its GPU
    if number >= visible:
        raise ValueError(
            f"local rank {place.local_rank} has no device of its own: {visible} are visible, and "
            "each process needs one. Start fewer processes per host, or use "
            "TORCHPMAP_DEVICE_TYPE=cpu."
        )
    return platform.open(number)


class _plain:
    """Leaves the caller's transforms and modes: a plan runs on the devices' own values."""

    def __enter__(self) -> None:
        self._contexts = [outside_transforms(), outside_modes()]
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exception)


def _described(definition: Definition, device: torch.device) -> str:
    """A plan for ``device`` as text, equal for all processes that would run the same."""
    inputs = ", ".join(kind_of(*given) for given in definition.inputs)
    backend = definition.backend
    lines: Iterable[str] = [
        f"{definition.name}({inputs}) on {len(definition.ranks)} devices",
        f"compile: {backend.name} {backend.mode} {backend.options}",
        *str(definition.graph.graph).splitlines(),
    ]
    constants = {
        name: value
        for name, value in sorted(vars(definition.graph).items())
        if isinstance(value, torch.Tensor)
    }
    text = "\n".join([*lines, *(f"{name} = {value!r}" for name, value in constants.items())])
    return text.replace(str(device), device.type)  # each process has a number of its own
