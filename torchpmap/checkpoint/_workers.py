"""What the worker processes do for a checkpoint: write their blocks, and read them.

Both are tasks, like calls with ``compile=False``, so they run after all earlier calls.  A worker
copies the blocks that it writes to the host and returns; its background thread writes them, and
sends the result to the controller through a separate socket:

    controller                          worker k
    WriterConnections, listens
    Snapshot, one per 256 MiB  ------>  copies its blocks
    the last Snapshot          ------>  connects, starts the thread
    answers()                  <------  (what it wrote, None), or (None, what went wrong)

If a worker dies, its connection ends and the controller stops waiting; for a stopped worker the
controller waits until a deadline.  Only data goes over a connection, first the save's secret token.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from torchpmap._base.config import config
from torchpmap._base.data import packed, unpacked
from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CallTimeout, PmapError
from torchpmap._runtime.task import Rank
from torchpmap._runtime.torchrun.store import limit_waits
from torchpmap.checkpoint._storage import Written, write
from torchpmap.checkpoint._table import Extent, Table

NAME = "torchpmap.checkpoint"
"""Of the tasks, in messages."""
_STRANGERS = 16
"""How many connections of other processes may wait to be refused."""
_TOKEN_BYTES = 16
_MOST_BYTES_OF_GREETING = 64
_copies: dict[bytes, dict[MetadataIndex, torch.Tensor]] = {}
"""In a worker: what it has copied for the save that is being prepared, by the save's token."""

WriteAnswer = tuple[list[Written] | None, str | None]
"""What was written, or what went wrong."""


def attempt(
    folder: Path, writer: int | str, plan: SavePlan, values: Mapping[MetadataIndex, Any]
) -> WriteAnswer:
    try:
        return write(folder, writer, plan, values), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Address:
    """How a worker reaches the controller for one save."""

    path: str
    token: bytes
    """16 random bytes."""
    folder: Path
    limit_s: float


@dataclass(frozen=True)
class Snapshot:
    """Copy blocks; the last call also writes what all calls have copied."""

    address: Address
    todo: tuple[tuple[tuple[int, MetadataIndex], ...], ...]
    """Per device of the team: the positions of the given blocks to copy, and their indices."""
    plans: tuple[tuple[int, SavePlan], ...] = ()
    """Per device of the team: its rank and what it writes now; empty: more calls follow."""

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[None, list[torch.Tensor]]:
        place = int(rank.index)
        if self.address.token not in _copies:
            _copies.clear()  # they are left from a save that failed
        copies = _copies.setdefault(self.address.token, {})
        for position, index in self.todo[place]:
            copies[index] = blocks[position].cpu().contiguous()
        if self.plans:
            writer, plan = self.plans[place]
            connection = _called(self.address)
            connection.send_bytes(self.address.token + str(writer).encode())
            del _copies[self.address.token]
            arguments = (connection, self.address.folder, writer, plan, copies)
            threading.Thread(target=_write, args=arguments, daemon=True).start()
        return None, []


def _called(address: Address) -> Connection:
    """A connection to the controller, which need not have accepted it yet."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(address.limit_s)
        end.connect(address.path)
        return _limited(end, address.limit_s)


def _limited(end: socket.socket, limit_s: float) -> Connection:
    """A connection that waits at most ``limit_s`` for its peer, then raises ``BlockingIOError``."""
    end.settimeout(None)
    limit_waits(end, limit_s)
    return Connection(end.detach())


def _write(connection: Connection, *arguments: Any) -> None:
    with connection:
        connection.send_bytes(packed(attempt(*arguments)))


@dataclass(frozen=True)
class Restore:
    """Read blocks from files; they become values of the device."""

    folder: Path
    digest: str
    """Of the table that the controller has read."""
    extents: tuple[dict[str, Extent], ...]
    """Per device of the team: the part of each leaf that it reads."""

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[None, list[torch.Tensor]]:
        extents = self.extents[int(rank.index)]
        read = Table.known(self.folder, self.digest, extents).read(extents)
        return None, [block.to(rank.index.device) for block in read.values()]


class WriterConnections:
    """The controller's end of the connections for one save."""

    def __init__(self, folder: Path, num_writers: int) -> None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        # in a folder that only this user can enter
        path = str(Path(util.get_temp_dir(), f"checkpoint-{secrets.token_hex(8)}"))
        self.address = Address(path, token, folder, config.snapshot().patience)
        self._num_writers = num_writers
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: dict[str, Connection] = {}
        """By the rank that writes."""
        try:
            self._listener.bind(path)
            self._listener.listen(num_writers + _STRANGERS)
        except OSError:
            self._listener.close()
            raise

    def accept(self) -> None:
        """Accept the connections that all writers have made.

        Raises:
            CallTimeout: a writer did not send its token and rank.
        """
        deadline = Deadline(self.address.limit_s)
        callers: list[Connection] = []
        while len(self._connections) < self._num_writers:
            ready = wait([self._listener, *callers], deadline.left())
            if not ready:
                raise CallTimeout(
                    f"of {self._num_writers} worker processes that write a checkpoint only "
                    f"{len(self._connections)} connected within torchpmap.config.timeout "
                    f"({self.address.limit_s:g} s)."
                )
            for caller in [caller for caller in callers if caller in ready]:
                callers.remove(caller)
                self._welcome(caller)
            if self._listener in ready:
                callers.append(_limited(self._listener.accept()[0], self.address.limit_s))
        for stranger in callers:
            stranger.close()
        self._hang_up()

    def _welcome(self, caller: Connection) -> None:
        try:
            token, rank = _split(caller.recv_bytes(_MOST_BYTES_OF_GREETING))
        except (EOFError, OSError):
            token, rank = b"", ""
        if secrets.compare_digest(token, self.address.token) and rank not in self._connections:
            self._connections[rank] = caller
        else:
            caller.close()

    def _hang_up(self) -> None:
        self._listener.close()
        Path(self.address.path).unlink(missing_ok=True)

    def close(self) -> None:
        self._hang_up()
        for connection in self._connections.values():
            connection.close()

    def answers(self) -> list[WriteAnswer]:
        """Wait for the writers; returns their answers."""
        deadline = Deadline(self.address.limit_s)
        return [self._answer(*each, deadline) for each in self._connections.items()]

    def _answer(self, writer: str, connection: Connection, deadline: Deadline) -> WriteAnswer:
        late = (
            f"the worker process that writes __{writer}_0.distcp was not done within "
            f"torchpmap.config.timeout ({self.address.limit_s:g} s)"
        )
        with connection:
            try:
                if not connection.poll(deadline.left()):
                    return None, late
                answer: WriteAnswer = unpacked(connection.recv_bytes())
            except BlockingIOError:
                return None, late
            except (EOFError, OSError):
                return None, f"the worker process that was writing __{writer}_0.distcp has ended"
            except PmapError as error:
                return None, str(error)
        return answer


def _split(greeting: bytes) -> tuple[bytes, str]:
    return greeting[:_TOKEN_BYTES], greeting[_TOKEN_BYTES:].decode(errors="replace")
