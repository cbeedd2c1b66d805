"""What a runtime is: it stores blocks on devices, runs plans on them, and gives them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

if TYPE_CHECKING:
    import socket

    from torchpmap._base.devices import Device
    from torchpmap._runtime.groups.process_groups import RankPartition
    from torchpmap._runtime.task import Report, Task
    from torchpmap._runtime.torchrun.rendezvous import Rendezvous
    from torchpmap._trace.compile import Definition


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
        """To its workers, where it has some."""
        self.released: deque[int] = deque()
        """Values there whose last reference died (any thread appends, the sender of the next frame
        takes).
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
        """A number that no value has which was computed before."""


class Runtime(Protocol):
    """One pool of devices.  Every method may be called from any thread."""

    devices: tuple[Device, ...]
    device: torch.device
    """Where tensors are inside plans."""

    @property
    def runs_here(self) -> bool:
        """Whether plans and functions run in this process, where all that the user defined is."""

    @property
    def scarred(self) -> bool:
        """Whether values may be lost: only then need callers ``check`` what they keep."""

    @property
    def timeout(self) -> float | None:
        """How long a call may take that does not say so itself."""

    @property
    def forked(self) -> bool:
        """Whether this is a copy, in a forked child of the process that owns the devices."""

    @property
    def closed(self) -> bool:
        """Whether the runtime was shut down; its values are gone then."""

    def team(self, ranks: tuple[int, ...]) -> Team:
        """The team of these ranks."""

    def put(self, team: Team, blocks: Sequence[torch.Tensor]) -> Handle:
        """Store one CPU tensor per rank of the team."""

    def define(self, team: Team, definition: Definition, groups: dict[str, RankPartition]) -> None:
        """Compile a plan: one rank first, the others load what it built.  Returns when the first is
        done.
        """

    def make_groups(self, groups: dict[str, RankPartition]) -> None:
        """Make sure that process groups of these names exist on all ranks."""

    def forget(self, plan_id: int) -> None:
        """A plan will not be called again."""

    def check(self, handle: Handle) -> None:
        """Raise if a value is known to be lost."""

    def execute(
        self, team: Team, plan_id: int, held: Sequence[Any], num_outputs: int
    ) -> list[Handle]:
        """Start a plan on stored values; its outputs.  Does not wait; raises if a value is known to
        be lost.
        """

    def run_task(
        self, team: Team, task: Task, held: Sequence[Any]
    ) -> tuple[list[Report | None], list[Handle]]:
        """Run Python code on every rank and wait; one report per rank, and the outputs."""

    def fetch(self, handle: Any, requests: Sequence[tuple[int, int, int, torch.Tensor]]) -> None:
        """Copy blocks here: (place in the team, dim or -1, position, CPU tensor to fill) per
        request; waits.
        """

    def block(self, handle: Handle) -> None:
        """Wait until a value is computed; raise what its call raised."""

    def is_ready(self, handle: Handle) -> bool:
        """Whether a value is known to be computed, without waiting."""

    def exchange(self, ranks: Sequence[int], mine: bytes, what: str) -> list[bytes]:
        """What the processes of ``ranks`` give, in their order; all must call it."""

    def insist(self) -> None:
        """Raise ``RuntimeClosed`` if the runtime was closed."""

    def close(self) -> None:
        """End the workers; idempotent."""


@runtime_checkable
class JobRuntime(Runtime, Protocol):
    """The runtime of one of several processes, each of which is a controller."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the processes meet."""

    def together(self, work: Callable[[Rendezvous], T]) -> T:
        """Do what needs all processes and is no call of a plan; it fails as a call does."""

    def group_of_all(self) -> str:
        """Name of a process group of all processes, which carries CPU tensors."""
