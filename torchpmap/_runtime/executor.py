"""What one rank does with a plan or a task: the same in a worker and in a process of a launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torchpmap._base.platform import Kinds, Platform
from torchpmap._runtime.groups.process_groups import Groups
from torchpmap._runtime.task import Handler, Rank, Report, Task, Usage, Work
from torchpmap._trace.boxed import Boxed
from torchpmap._trace.compile import CompileReport, Definition, communicates, compile_and_report
from torchpmap._trace.promises import run_first_time


@dataclass(slots=True)
class Compiled:
    """A plan that this rank has compiled."""

    doing: str
    run: Boxed
    outputs: Kinds
    communicates: bool


@dataclass(frozen=True)
class Executor:
    rank: int
    device: torch.device
    platform: Platform
    groups: Groups
    where: str
    """The device in messages."""
    usage: Callable[[], Usage]
    handlers: dict[int, Handler] = field(default_factory=dict)
    doing: Callable[[], str] = str
    _indices: dict[int, torch.Tensor] = field(default_factory=dict)

    def define(
        self, definition: Definition, guarded: Callable[[Boxed], Boxed] | None = None
    ) -> tuple[Compiled, CompileReport]:
        """Compile a plan; the first run checks what tracing promised.  ``guarded`` wraps each run
        in what this process needs.
        """
        runner, report = compile_and_report(definition, self.index(definition.ranks))
        if guarded is not None:
            runner = guarded(runner)

        def run_first(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            results, plan.run = run_first_time(definition, runner, blocks, self.where)
            return results

        doing = f"running {definition.name}"
        plan = Compiled(doing, run_first, definition.outputs, communicates(definition))
        return plan, report

    def index(self, ranks: Sequence[int]) -> torch.Tensor:
        """This rank's position among the ranks of a plan, as data: all run one graph."""
        position = ranks.index(self.rank)
        if position not in self._indices:
            with torch.inference_mode(False):  # a later call may need its gradient's graph
                self._indices[position] = torch.tensor(position, device=self.device)
        return self._indices[position]

    def run(
        self, task: Task, work: Work, blocks: Sequence[torch.Tensor]
    ) -> tuple[Report | None, list[torch.Tensor]]:
        """Run a task and wait for the device: the report, and the blocks to store."""
        rank = Rank(
            *(task.ranks, task.group, self.index(task.ranks), self.groups.ensure),
            *(self.usage, self.handlers, self.doing),
        )
        done = work.run(rank, task.given, blocks)
        self.platform.synchronize()
        self.groups.refuse_if_aborted()  # a device goes on after a collective that was aborted
        return done
