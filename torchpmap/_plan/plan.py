"""The frozen result of preparing a call: everything about one (function, shapes, layouts) that can
be decided once.

    leaves of a call --handles_of--> handles --Plan--> one frame to the workers --> handles -->
    ShardedTensors

A ``Plan`` belongs to one runtime; dropping it makes the workers forget it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchpmap._base.config import config
from torchpmap._base.contents import Contents, ReadProperty
from torchpmap._base.errors import kind_of
from torchpmap._base.pytree import Structure
from torchpmap._layout.axis_stack import Partition
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import GiveUp, Handle, Team
from torchpmap._runtime.defining import define
from torchpmap._sharded.device_put import handle_of
from torchpmap._sharded.tensor import ShardedTensor, gather
from torchpmap._trace import recording
from torchpmap._trace.compile import Definition
from torchpmap._trace.custom_ops import Implementations
from torchpmap._trace.program import check_replicated
from torchpmap._trace.repetition import Repeated
from torchpmap.random._streams import draw_key


class Called(NamedTuple):
    """The result of starting a plan."""

    outputs: list[tuple[Layout, Handle]]
    tree: Callable[[list[Any]], Any]
    """Turns the leaves into what the function returns."""
    requires_grad: bool
    """Whether the outputs depend on a captured tensor that requires grad."""
    key: torch.Tensor | None = None
    """The key of the random numbers, if it is not an input."""


class Captured:
    """A tensor the function closes over: sent when first needed, and again when it has changed."""

    __slots__ = ("_given", "_handle", "_requires_grad", "_sent", "layout", "tensor")

    def __init__(self, tensor: torch.Tensor, layout: Layout) -> None:
        self.tensor = tensor
        self.layout = layout
        self._requires_grad = tensor.requires_grad
        self._handle: Handle | None = None
        self._given: Handle | None = None
        """The handle that a ``ShardedTensor`` had when it was laid out."""
        self._sent: Contents | None = None

    def fits(self) -> bool:
        """Whether it is of the kind that was traced, which ``tensor.data = ...`` may change."""
        tensor, layout = self.tensor, self.layout
        return (
            tensor.requires_grad == self._requires_grad
            and tensor.shape == layout.shape
            and tensor.dtype == layout.dtype
        )

    def value(self) -> torch.Tensor:
        """The tensor as an input of the next call."""
        return self.tensor

    def handle(self) -> Handle:
        tensor = self.tensor
        if type(tensor) is ShardedTensor:
            if self._handle is None or tensor._handle is not self._given:
                self._handle = handle_of(tensor, self.layout)
                self._given = tensor._handle
        elif self._handle is None or self._sent is None or not self._sent.same():
            # copy first: a write between the two lines is then sent again, not missed
            self._sent = Contents(tensor, compared=config.check_captured)
            self._handle = handle_of(tensor, self.layout)
        return self._handle


class Drawn(Captured):
    """The key for the random numbers of a call: a new one each time."""

    __slots__ = ()

    def value(self) -> torch.Tensor:
        return draw_key()

    def handle(self) -> Handle:
        return handle_of(self.value(), self.layout)


class Pinned:
    """A tensor whose value, or another property of it, was read while tracing."""

    __slots__ = ("_handle", "_read", "_tensor")

    def __init__(self, tensor: torch.Tensor | ReadProperty) -> None:
        self._tensor = tensor
        self._handle = tensor._handle if isinstance(tensor, ShardedTensor) else None
        self._read: Contents | ReadProperty | None = None
        if not isinstance(tensor, ShardedTensor):
            self._read = tensor if isinstance(tensor, ReadProperty) else Contents(tensor)

    def holds(self) -> bool:
        """Whether that is still the same."""
        if self._read is not None:
            return self._read.same()
        return getattr(self._tensor, "_handle", None) is self._handle


defined: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
"""The plans that devices know, by their ids."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What one call runs on a team of devices, which compile it when it first runs."""

    definition: Definition
    groups: dict[str, Partition]
    """The process groups it uses: name -> ranks."""
    axes: dict[str, str]
    """The names of the axes that each of these groups runs along."""
    prefix: str
    """The call as messages name it."""
    described: str
    """What it computes, and of which arguments, as logs name it."""
    team: Team
    outputs: tuple[Layout, ...]
    structure: Structure
    """Of what the function returns."""
    captured: tuple[Captured, ...] = ()
    pinned: tuple[Pinned, ...] = ()
    nones: tuple[int, ...] = ()
    """Leaves of ``structure`` that are None and have no output."""
    requires_grad: bool = False
    """Whether an output depends differentiably on a captured tensor."""
    num_checks: int = 0
    """Trailing outputs that measure how far outputs declared replicated differ between devices."""
    checked: tuple[str, ...] = ()
    """Their leaf paths."""
    is_passing: bool = False
    """Whether it closes over tensors that a transform around the call is tracing."""
    writes_inputs: bool = False
    """Whether it writes in place to (its copies of) inputs."""
    undefined: list[bool] = field(default_factory=lambda: [True])
    """Empty once the workers know the plan."""
    repeated: Repeated | None = None
    """A line of the function that should be a loop."""
    held: tuple[tuple[int, ...], ...] = ()
    """Per input of the graph: a number for each device, equal for devices that are known to hold
    equal blocks.  Empty if nothing is known.
    """
    implementations: Implementations | None = None
    """Functions of the user's own operations, of which the workers have copies."""
    names: tuple[str, ...] = ()
    """Of its outputs, if ``structure`` does not tell."""

    def holds(self) -> bool:
        """Whether what tracing baked in is still true."""
        if self.is_passing:
            return False
        if self.implementations is not None and self.implementations.changed():
            return False
        if self.captured and not all(map(Captured.fits, self.captured)):
            return False
        return not self.pinned or all(map(Pinned.holds, self.pinned))

    def broken_by(self) -> str:
        """Why it does not hold, as logs say it."""
        for captured in self.captured:
            if not captured.fits():
                now, layout = captured.tensor, captured.layout
                return (
                    f"a tensor that it closes over is {kind_of(now.shape, now.dtype)} "
                    f"(requires_grad={now.requires_grad}), and was "
                    f"{kind_of(layout.shape, layout.dtype)}"
                )
        if not all(map(Pinned.holds, self.pinned)):
            return "a value that it read of a tensor (.item(), .numpy()) has changed"
        if self.implementations is not None and self.implementations.changed():
            return "an operation of yours (torch.library) has changed"
        return "it closes over tensors that a transform around the call is tracing"

    @property
    def has_final_outputs(self) -> bool:
        """Whether its outputs need nothing more: no checks, and no gradients of captured tensors
        can follow.
        """
        return not self.num_checks and not self.requires_grad

    def call(
        self,
        held: list[Handle],
        captured: Sequence[Handle] | None = None,
        give_up: GiveUp | None = None,
    ) -> Called:
        """``run``, and return only the outputs, after the checks of ``check_replicated``."""
        outputs = self._checked(self.run(held, captured, give_up))
        return Called(outputs, self.tree, self.requires_grad)

    def run(
        self,
        held: list[Handle],
        captured: Sequence[Handle] | None = None,
        give_up: GiveUp | None = None,
    ) -> list[Handle]:
        """Start it on stored blocks, without waiting; handles of its outputs, checks and
        residuals.

        Args:
            held: the arguments; the list belongs to the call from here on.
            captured: blocks instead of the tensors it closes over.
            give_up: see ``Runtime.execute``.
        """
        ring = recording.ring
        self.prepare()
        if self.captured:
            if captured is None:
                captured = [each.handle() for each in self.captured]
            held[:0] = captured
        if ring is not None:
            ring.keep(self, held)
            self.define()  # only now, so that a call that does not compile is kept
        team, definition = self.team, self.definition
        num_outputs = len(definition.outputs)
        return team.runtime.execute(team, definition.plan_id, held, num_outputs, give_up)

    def prepare(self) -> None:
        """Compile it, if that need not wait until its call is recorded."""
        if self.undefined and recording.ring is None:
            self.define()

    def define(self) -> None:
        """Make the workers compile the plan, if they have not."""
        if self.undefined:
            define(self.team, self.definition, self.groups, self.described)
            self.undefined.clear()
            defined[self.definition.plan_id] = self

    def _checked(self, handles: list[Handle]) -> list[tuple[Layout, Handle]]:
        outputs = list(zip(self.outputs, handles))  # noqa: B905 - residuals are left out
        if not self.num_checks:
            return outputs
        found = (float(gather(*output)) for output in outputs[-self.num_checks :])
        check_replicated(self.prefix, zip(self.checked, found, strict=True))
        return outputs[: -self.num_checks]

    def tree(self, leaves: list[Any]) -> Any:
        """Output leaves (without the None ones) to what the function returns."""
        return self.structure.unflatten(with_nones(leaves, self.nones))

    def __del__(self) -> None:
        if not getattr(self, "undefined", True):  # missing if ``__init__`` failed
            self.team.runtime.forget(self.definition.plan_id)


def with_nones(leaves: list[Any], positions: Sequence[int]) -> list[Any]:
    for position in positions:
        leaves.insert(position, None)
    return leaves
