"""``compile=False``: the Python function itself runs on every worker, and the call waits for it.

Without a graph, nothing guarantees that all devices run the same collectives, and Gloo answers a
mismatch with wrong numbers.  So the ranks compare every collective before it runs (see
``_trace/agreement``), and the controller compares their results before the call returns.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from torchpmap._base.ambient import ambient
from torchpmap._base.pytree import Structure
from torchpmap._layout.axis_stack import group_name
from torchpmap._layout.grid import Grid
from torchpmap._layout.layout import Layout
from torchpmap._plan.plan import Called, with_nones
from torchpmap._plan.uncompiled_work import Given, UncompiledReport, UncompiledWork
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.task import Task
from torchpmap._sharded.device_put import handles_of
from torchpmap._trace import recording
from torchpmap._trace.pickling import number_of, pickled_function
from torchpmap._trace.program import Program, check_replicated, check_same_kinds
from torchpmap.random._streams import draw_key, no_stream, peek_key

_serials = itertools.count(1)


@dataclass(eq=False)
class UncompiledPlan:
    """How to run one program uncompiled; prepared like a ``Plan``, but its outputs are known only
    afterwards.
    """

    program: Program
    grid: Grid
    prefix: str
    timeout: float | None
    where: str
    """``file:line`` of the function."""
    serial: int = field(default_factory=_serials.__next__)
    requires_grad = False  # known when it has run

    def holds(self) -> bool:
        return True  # the function is pickled anew for every call, with what it closes over

    def call(self, leaves: Sequence[Any], layouts: Sequence[Layout]) -> Called:
        """Place the leaves, run the function on them and wait for all devices.

        Raises:
            TypeError: the function cannot be pickled; nothing was sent.
        """
        runtime = current_runtime()
        team = runtime.team(tuple(device.id for device in self.grid.devices))
        key = peek_key()
        timeout = runtime.timeout if self.timeout is None else self.timeout
        task = self._task(key, timeout, here=runtime.runs_here)
        held = handles_of(leaves, layouts)
        recording.lacks(self.prefix, "as Python on the devices (compile=False)")
        told, outputs = runtime.run_task(team, task, held)
        reports = cast(list[UncompiledReport], told)
        self._check(reports)
        report = reports[0]
        structure = report.structure
        assert isinstance(structure, Structure), "one that all devices have"
        if report.used_key:
            draw_key()  # the next call gets another one
        layouts = [self.grid.stacked(*each) for each in report.results if each is not None]
        nones = [k for k, each in enumerate(report.results) if each is None]

        def tree(leaves: list[Any]) -> Any:
            return structure.unflatten(with_nones(leaves, nones))

        return Called(list(zip(layouts, outputs, strict=True)), tree, report.requires_grad, key)

    def _task(self, key: torch.Tensor, timeout: float | None, *, here: bool) -> Task:
        name = self.program.name
        body = pickled_function(UncompiledWork, self.program, f"{name}()", here=here)
        return Task(
            name,
            number_of(body),
            body,
            self.grid.ranks,
            group_name(self.grid.ranks),
            Given(tuple(key.tolist()), ambient()),
            _sources_of_no_file(),
            timeout,
            self.where,
            self.serial,
        )

    def _check(self, reports: Sequence[UncompiledReport]) -> None:
        """Raise if devices returned different kinds of results, or the function broke a rule."""
        for report in reports:
            if report.written is not None:
                raise RuntimeError(report.written)
            if report.used_generator:
                raise NotImplementedError(no_stream(self.prefix))
        pairs = zip(self.grid.axis_devices, reports, strict=True)
        kinds = [(device, report.structure, report.results) for device, report in pairs]
        check_same_kinds(self.prefix, "devices", kinds)
        # devices of different lines of a mesh have compared different values
        checked = zip(*(report.differences for report in reports), strict=True)
        found = ((each[0][0], max(distance for _, distance in each)) for each in checked)
        check_replicated(self.prefix, found, self.program.otherwise)


def _sources_of_no_file() -> tuple[tuple[str, Any], ...]:
    """Entries of ``linecache`` without a modification time: notebook cells, for example."""
    entries = linecache.cache.copy().items()  # other threads add to it, at every trace
    return tuple(item for item in entries if len(item[1]) == 4 and not item[1][1])
