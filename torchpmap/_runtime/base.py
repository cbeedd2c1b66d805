"""The interface of a runtime: it stores blocks on devices, runs plans there and returns blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

if TYPE_CHECKING:
    import socket
    from threading import RLock

    from torchpmap._base.config import Config
    from torchpmap._base.devices import Device
    from torchpmap._runtime.groups.process_groups import RankPartition
    from torchpmap._runtime.task import Report, Task
    from torchpmap._runtime.torchrun.rendezvous import Rendezvous
    from torchpmap._trace.compile import CompileReport, Definition


T = TypeVar("T")


class Team:
    """The ranks that hold a value or run a call together, in axis order (interned per runtime:
    compared by identity).
    """

    __slots__ = ("ranks", "released", "runtime", "sockets")

    def __init__(self, runtime: Runtime, ranks: tuple[int, ...]) -> None:
        self.runtime = runtime
        self.ranks = ranks
        self.sockets: list[socket.socket] = []
        """To the workers of ``ranks``; empty in a runtime without workers."""
        self.released: deque[int] = deque()
        """Handles that the ranks are to free, because the last reference died (any thread appends,
        the sender of the next frame removes).
        """


class Handle(Protocol):
    """A value stored on the ranks of a team, which free it when the last reference dies.  Each
    runtime has its own kind.
    """

    @property
    def team(self) -> Team:
        """The ranks that hold it."""

    @property
    def seq(self) -> int:
        """A number that is not smaller than that of any value computed before."""


GiveUp = Callable[[Sequence[Handle]], None]


class Runtime(Protocol):
    """One pool of devices.  Every method may be called from any thread."""

    devices: tuple[Device, ...]
    device: torch.device
    """Device of the tensors that a plan computes with."""
    send_lock: RLock
    """Held by a thread while it sends a call."""

    @property
    def runs_here(self) -> bool:
        """Whether plans and functions run in this process, which has all that the user defined."""

    @property
    def has_losses(self) -> bool:
        """Whether values may be lost: only then must callers ``check`` the handles they keep."""

    @property
    def timeout(self) -> float | None:
        """How many seconds a call without a timeout of its own may take."""

    def limit(self, config: Config) -> None:
        """From now on, let calls and waiting take as long as these settings say."""

    @property
    def forked(self) -> bool:
        """Whether this object is a copy in a forked child of the process that owns the devices."""

    @property
    def closed(self) -> bool:
        """Whether the runtime was shut down; its values are gone then."""

    def team(self, ranks: tuple[int, ...]) -> Team:
        """The team of these ranks."""

    def put(self, team: Team, blocks: Sequence[torch.Tensor]) -> Handle:
        """Store one CPU tensor per rank of the team."""

    def define(
        self, team: Team, definition: Definition, groups: dict[str, RankPartition]
    ) -> CompileReport:
        """Compile a plan: one rank compiles it, then the others load the result.  Returns when the
        first rank is done, with its report.
        """

    def forget(self, plan_id: int) -> None:
        """Drop a plan, which will not be called again."""

    def check(self, handle: Handle) -> None:
        """Raise if a value is known to be lost."""

    def execute(
        self,
        team: Team,
        plan_id: int,
        held: list[Any],
        num_outputs: int,
        give_up: GiveUp | None = None,
    ) -> list[Handle]:
        """The outputs of a plan, which is started on stored values without waiting for it; raises
        if a value is known to be lost.

        When nothing can prevent the start, ``held`` is emptied, and ``give_up`` is called, which
        drops the caller's references to donated values; it is given the outputs if a command makes
        them later, or else nothing.  A value to which nothing else refers is freed after its last
        use in the call.  ``held`` gets the outputs: also if Ctrl-C comes while this waits for room,
        as the call is sent nevertheless.
        """

    def run_task(
        self, team: Team, task: Task, held: Sequence[Any]
    ) -> tuple[list[Report | None], list[Handle]]:
        """Run Python code on every rank and wait; one report per rank, and the outputs."""

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An empty CPU tensor that ``fetch`` fills quickly, also in parts."""

    def fetch(self, handle: Any, requests: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        """Copy blocks to CPU tensors, and wait.  A request is (place in the team, dim or -1 for the
        whole block, position, tensor to fill).
        """

    def block(self, handle: Handle) -> None:
        """Wait until a value is computed; raise what its call raised."""

    def is_ready(self, handle: Handle) -> bool:
        """Whether a value is known to be computed, without waiting."""

    def exchange(
        self, ranks: Sequence[int], mine: bytes, what: str, where: str = ""
    ) -> list[bytes]:
        """``mine`` of every process of ``ranks``, in that order; all must call it, for ``what``.
        ``where``: the place of the user's function, for messages.
        """

    def agree(self, ranks: Sequence[int], mine: bytes, what: str) -> bool:
        """Whether all processes of ``ranks`` give the same; all must call it.  It is quicker than
        ``exchange``.
        """

    def note(self, team: Team, plan_id: int, numbers: Sequence[tuple[Any, int]]) -> None:
        """Note an operation on values that several processes hold, so that a process that has done
        others is found; ``numbers``: those that it was given, each with a digest.
        """

    def stacks(self) -> dict[int, str]:
        """What each device of this process does now, and its Python stack, by rank."""

    def raise_if_closed(self) -> None:
        """Raise ``RuntimeClosed`` if the runtime was closed."""

    def in_forked_child(self) -> None:
        """In a forked child: the devices are the parent's, and every use raises."""

    def close(self) -> None:
        """End the workers; idempotent."""


@runtime_checkable
class JobRuntime(Runtime, Protocol):
    """The runtime of one of several processes, each of which is a controller."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the processes meet."""

    def together(self, work: Callable[[Rendezvous], T]) -> T:
        """Run work that needs all processes and calls no plan; it fails as a call does."""

    def plan_name(self, plan_id: int) -> str:
        """Name of a plan in messages."""

    def group_of_all(self) -> str:
        """Name of a process group of all processes, which carries CPU tensors."""


@runtime_checkable
class PoolRuntime(Runtime, Protocol):
    """The runtime of one controller, whose workers can be lost one by one."""

    @property
    def ended(self) -> bool:
        """Whether its workers were ended.  If not, though it is closed, a device is lost for good,
        and the other devices still have their values.
        """

    def expect_compiling(self) -> None:
        """Let its workers import the compiler between two commands; returns at once."""

    def readable(self) -> AbstractContextManager[None]:
        """Values can be fetched meanwhile, also if it is closed, but has not ended."""

    def loss(self, handle: Any, place: int) -> BaseException | None:
        """Why the block at this place of the value's team is lost, once that is known; None if it
        is there.
        """

    def lost(self, team: Team, error: BaseException) -> Handle:
        """A value whose every use raises (a copy of) this error."""
