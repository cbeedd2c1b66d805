"""What the ranks of a team run as Python, each on its own blocks: an uncompiled call, or their part
of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from torchpmap._runtime.groups.process_groups import RankPartition


@dataclass(frozen=True)
class Rank:
    """The rank that a task runs on."""

    ranks: tuple[int, ...]
    """Of the team, in axis order."""
    group: str
    """Of all of them, in that order."""
    index: torch.Tensor
    """This rank's place among them, on its device."""
    ensure_group: Callable[[str, RankPartition], None]
    """Makes groups of some of them, which all must do."""


class Report(Protocol):
    """What a rank tells of its run.  Between hosts only data travels."""

    def as_data(self) -> list[Any]:
        """The report for another process."""

    def like(self, data: list[Any], name: str) -> Report:
        """The report of another process on the call ``name``; raises if its data cannot be one."""


class Work(Protocol):
    """The body of a task; ranks unpickle it anew for every run."""

    def run(
        self, rank: Rank, given: Any, blocks: Sequence[torch.Tensor]
    ) -> tuple[Report | None, list[torch.Tensor]]:
        """The report, and the blocks to store."""


@dataclass(frozen=True)
class Task:
    """One run of a body on the ranks of a team."""

    name: str
    """The call as messages name it."""
    body_id: int
    body: bytes | None
    """The pickled ``Work``; None for a worker that has it."""
    ranks: tuple[int, ...]
    group: str
    given: Any = None
    """What the body is told this time."""
    sources: tuple[tuple[str, Any], ...] = ()
    """Source lines that are in no file (notebook cells), for tracebacks; sent with the body."""
    timeout: float | None = None
    inputs: tuple[int, ...] = ()
    first_output: int = 0

    def placed(self, inputs: tuple[int, ...], first_output: int, *, without_body: bool) -> Task:
        """The task as a worker is told: where its inputs are, and where its outputs go."""
        placed = replace(self, inputs=inputs, first_output=first_output)
        return replace(placed, body=None, sources=()) if without_body else placed
