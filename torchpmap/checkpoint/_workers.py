"""What the worker processes do for a checkpoint: write their blocks, and read them.

Both are tasks, like calls with ``compile=False``, so they run after all earlier calls.  A worker
copies the blocks that it writes to the host and returns; its background thread writes them, and
sends the result to the controller through a pipe of its own:

    controller                          worker k
    Pipes, reads
    Snapshot, one per team     ------>  copies its blocks
    the last Snapshot          ------>  opens its pipe, starts the thread
    answers()                  <------  (what it wrote, None), or (None, what went wrong)

If a worker dies, its pipe ends and the controller stops waiting; for a stopped worker it waits
until a deadline.  Only data goes through the pipes.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.config import config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import PmapError
from torchpmap._runtime.task import Rank
from torchpmap.checkpoint._blocks import Files, Plan, Written, write
from torchpmap.checkpoint._table import Extent, Row

NAME = "torchpmap.checkpoint"
"""Of the tasks, in messages."""
HOST = -1
"""The controller of worker processes, as a writer; with several controllers, rank 0."""
Answers = dict[int, tuple[Written | None, str | None]]
"""By writer, what it wrote, or what went wrong."""
_copies: dict[str, dict[str, torch.Tensor]] = {}
"""In a worker: what it has copied for the save that is being prepared, by the save's pipes."""


def file_of(writer: int) -> str:
    return "host.safetensors" if writer == HOST else f"rank_{writer}.safetensors"


def attempt(folder: Path, writer: int, plan: Plan, blocks: Mapping[str, torch.Tensor]) -> Answers:
    try:
        return {writer: (write(folder / file_of(writer), plan, blocks), None)}
    except Exception as error:
        return {writer: (None, f"{type(error).__name__}: {error}")}


@dataclass(frozen=True)
class Snapshot:
    """Copy blocks; the last call also writes what all calls have copied."""

    pipes: str
    """Path of the writers' pipes, without their ranks."""
    plans: Mapping[int, Plan]
    """By rank, what it writes."""
    keys: tuple[str, ...]
    """Of the blocks that are given."""
    folder: Path | None = None
    """Where to write now; None: more calls follow."""

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[None, list[torch.Tensor]]:
        writer = rank.ranks[int(rank.index)]
        plan = self.plans.get(writer, {})
        if self.pipes not in _copies:
            _copies.clear()  # they are left from a save that failed
        copies = _copies.setdefault(self.pipes, {})
        for key, block in zip(self.keys, blocks, strict=True):
            if key in plan:
                copies[key] = block.cpu().contiguous()
        if self.folder is not None:
            # without a reader this raises, rather than waits for one
            pipe = os.open(f"{self.pipes}{writer}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(pipe, True)
            arguments = (pipe, self.folder, writer, plan, _copies.pop(self.pipes))
            threading.Thread(target=_write, args=arguments, daemon=True).start()
        return None, []


def _write(pipe: int, *arguments: Any) -> None:
    with os.fdopen(pipe, "wb") as file:
        file.write(packed(attempt(*arguments)))


@dataclass(frozen=True)
class Restore:
    """Read blocks from files; they become values of the device."""

    folder: Path
    rows: Sequence[Row]
    extents: Mapping[int, Sequence[Extent]]
    """By rank, the part of each row that it reads."""

    def blocks(self, rank: int) -> Iterator[torch.Tensor]:
        with Files(self.folder) as files:
            for row, extent in zip(self.rows, self.extents[rank], strict=True):
                yield row.read(files, extent)

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[None, list[torch.Tensor]]:
        mine = self.blocks(rank.ranks[int(rank.index)])
        return None, [block.to(rank.index.device) for block in mine]


class Pipes:
    """The controller's ends of the pipes for one save."""

    def __init__(self, writers: Collection[int]) -> None:
        # in a folder that only this user can enter, and that is made when it is needed
        folder = util.get_temp_dir() if writers else ""
        self.path = f"{folder}/checkpoint-{secrets.token_hex(8)}-"
        self._limit_s = config.snapshot().patience
        self._ends: dict[int, int] = {}
        try:
            for writer in writers:
                os.mkfifo(f"{self.path}{writer}", 0o600)
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                self._ends[writer] = os.open(f"{self.path}{writer}", flags)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for writer, end in self._ends.items():
            os.close(end)
            Path(f"{self.path}{writer}").unlink(missing_ok=True)
        self._ends.clear()

    def answers(self) -> Answers:
        """Wait for the writers, which have opened their ends."""
        deadline, answers = Deadline(self._limit_s), Answers()
        for writer, end in self._ends.items():
            data = b""
            while wait([end], deadline.left()) and (part := os.read(end, 2**16)):
                data += part
            try:
                answers |= unpacked(data)
            except PmapError:
                late = f"was not done within torchpmap.config.timeout ({self._limit_s:g} s)"
                what = late if deadline.passed else "has ended"
                answers[writer] = None, f"the worker that writes {file_of(writer)} {what}"
        self.close()
        return answers
