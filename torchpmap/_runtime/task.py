"""Tasks: Python code that each rank of a team runs on its own blocks: an uncompiled call, its part
of a checkpoint, a question about the rank itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from torchpmap._runtime.groups.process_groups import RankPartition


class Usage(NamedTuple):
    """Memory of a rank."""

    value_bytes: int
    """Of all values that it stores; memory that several share counts once."""
    shared_bytes: int
    """Of the host, shared with the controller."""


def bytes_held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


Handler = Callable[[int, memoryview], None]
"""Of a command: its number and its body."""


@dataclass(frozen=True)
class Rank:
    """The rank that a task runs on."""

    ranks: tuple[int, ...]
    """The ranks of the team, in axis order."""
    group: str
    """Name of the process group of ``ranks``, in that order."""
    index: torch.Tensor
    """This rank's place in ``ranks``, on its device."""
    ensure_group: Callable[[str, RankPartition], None]
    """Makes process groups of parts of ``ranks``; all of them must call it."""
    usage: Callable[[], Usage] = lambda: Usage(0, 0)
    """What it holds now."""
    handlers: dict[int, Handler] = field(default_factory=dict)
    """What it calls for each kind of command (see ``wire``): a profiler replaces them for a while.
    """
    doing: Callable[[], str] = str
    """What it does now, or did last, in words."""


class Report(Protocol):
    """What a rank reports of its run.  Between hosts it travels as data, never as a pickle."""

    def as_data(self) -> list[Any]:
        """The report in a form that can be sent to another host."""

    def like(self, data: list[Any], name: str) -> Report:
        """The report that another process made of the call ``name``; raises if ``data`` is none."""


class Work(Protocol):
    """The body of a task; a rank unpickles it again for every run."""

    def run(
        self, rank: Rank, given: Any, blocks: Sequence[torch.Tensor]
    ) -> tuple[Report | None, list[torch.Tensor]]:
        """The report, and the blocks to store."""


@dataclass(frozen=True)
class Task:
    """One run of a body on the ranks of a team."""

    name: str
    """Name of the call in messages."""
    body_id: int
    body: bytes | None
    """The pickled ``Work``; None for a worker that has it already."""
    ranks: tuple[int, ...]
    group: str
    given: Any = None
    """The argument of the body in this run."""
    sources: tuple[tuple[str, Any], ...] = ()
    """Source lines that are in no file (notebook cells), for tracebacks; sent with the body."""
    timeout: float | None = None
    where: str = ""
    """``file:line`` of the user's function."""
    serial: int = 0
    """Of the program that it runs, among those of this process."""
    inputs: tuple[int, ...] = ()
    first_output: int = 0

    def placed(self, inputs: tuple[int, ...], first_output: int, *, without_body: bool) -> Task:
        """The task as it is sent to a worker: with the handles of its inputs and first output."""
        placed = replace(self, inputs=inputs, first_output=first_output)
        return replace(placed, body=None, sources=()) if without_body else placed
