"""What the worker processes do for a checkpoint: write their blocks, and read them.

Both run as calls of ``compile=False`` do, so they come after what was called before.  A worker
copies the blocks it has to write to the host and returns; a thread of it writes them, and tells the
controller through a socket of their own how it went:

    controller                          worker k
    Line.open, listens
    Snapshot, one per 256 MiB  ------>  copies its blocks
    the last of them           ------>  connects, starts the thread
    Line.answers()             <------  (what it wrote, None), or (None, what went wrong)

A worker that dies ends its connection, so nobody waits for it.
"""

from __future__ import annotations

import pickle
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from torchpmap._axes import Axis
from torchpmap._checkpoint_storage import Extent, Table, Written, write
from torchpmap._program import EagerCall, Outcome
from torchpmap._runtimes._base import Handle, Team
from torchpmap._structure import flatten

__all__ = ["Answer", "Line", "Restore", "Snapshot", "attempt", "run_on"]

_AXIS = "checkpoint"
_copies: dict[bytes, dict[MetadataIndex, torch.Tensor]] = {}
"""In a worker: what it has copied for the save that is being prepared, by the save's token."""

Answer = tuple[list[Written] | None, str | None]
"""What was written, or what went wrong."""


def attempt(
    folder: Path, writer: int | str, plan: SavePlan, values: Mapping[MetadataIndex, Any]
) -> Answer:
    try:
        return write(folder, writer, plan, values), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Address:
    """How a worker reaches the controller for one save."""

    address: str
    token: bytes
    folder: Path


@dataclass(frozen=True)
class Snapshot:
    """Copy blocks; the last call also writes what all calls have copied."""

    line: Address
    todo: tuple[tuple[tuple[int, MetadataIndex], ...], ...]
    """Per device of the team: which of the given blocks to copy, and what they are."""
    plans: tuple[tuple[int, SavePlan], ...] = ()
    """Per device of the team: its rank and what it writes now; empty: more calls come."""
    axis_name = _AXIS

    def axes(self, axis: Axis) -> tuple[Axis]:
        return (axis,)

    def run(self, blocks: Sequence[torch.Tensor], axis: Axis, key: torch.Tensor) -> Outcome:
        place = int(axis.index)
        if self.line.token not in _copies:
            _copies.clear()  # of a save that failed
        copies = _copies.setdefault(self.line.token, {})
        for position, index in self.todo[place]:
            copies[index] = blocks[position].cpu().contiguous()
        if self.plans:
            rank, plan = self.plans[place]
            connection = Client(self.line.address, "AF_UNIX")  # does not wait to be accepted
            connection.send_bytes(str(rank).encode())
            del _copies[self.line.token]
            arguments = (connection, self.line.folder, rank, plan, copies)
            threading.Thread(target=_write, args=arguments, daemon=True).start()
        return Outcome(flatten(())[1], (), (), (), ())


def _write(connection: Connection, *arguments: Any) -> None:
    with connection:
        connection.send_bytes(pickle.dumps(attempt(*arguments)))


@dataclass(frozen=True)
class Restore:
    """Read blocks from files; they become values of the device."""

    folder: Path
    extents: tuple[dict[str, Extent], ...]
    """Per device of the team: what it reads of which leaves."""
    axis_name = _AXIS

    def axes(self, axis: Axis) -> tuple[Axis]:
        return (axis,)

    def run(self, blocks: Sequence[torch.Tensor], axis: Axis, key: torch.Tensor) -> Outcome:
        read = tuple(Table.of(self.folder).read(self.extents[int(axis.index)]).values())
        return Outcome(flatten(read)[1], read, ((0,),) * len(read), (), ())


def run_on(team: Team, program: Snapshot | Restore, handles: Sequence[Handle]) -> list[Handle]:
    """Run on every device of a team and wait; the values that came out."""
    group = f"ranks:{','.join(map(str, team.ranks))}"
    team.runtime.make_groups({group: (team.ranks,)})
    call = EagerCall(
        "torchpmap.checkpoint",
        secrets.randbits(56),
        pickle.dumps((program, [])),
        team.ranks,
        group,
        (),
    )
    return team.runtime.run_eagerly(team, call, handles)[1]


class Line:
    """The controller's end of the connections for one save."""

    def __init__(self, folder: Path, num_writers: int) -> None:
        # in a folder that only this user can enter
        self._listener = Listener(family="AF_UNIX", backlog=max(num_writers, 1))
        self.address = Address(str(self._listener.address), secrets.token_bytes(16), folder)
        self._connections: list[Connection] = []

    def accept(self, num_writers: int) -> None:
        """Take the connections of all writers, who have called."""
        self._connections = [self._listener.accept() for _ in range(num_writers)]
        self._listener.close()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def answers(self) -> list[Answer]:
        """What the writers say at their end; waits."""
        return [_answer(connection) for connection in self._connections]


def _answer(connection: Connection) -> Answer:
    writer = "?"
    with connection:
        try:
            writer = connection.recv_bytes().decode()
            answer: Answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return None, f"the worker process that was writing __{writer}_0.distcp has ended"
    return answer
