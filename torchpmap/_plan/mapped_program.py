"""A mapped program as a ``Differentiable``: the user's function, with what it closes over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torchpmap._layout.axis_stack import Axis
from torchpmap._layout.layout import Layout
from torchpmap._plan.derivatives import Differentiable, Outputs, Tensors
from torchpmap._plan.lower import Target, lower
from torchpmap._plan.plan import Drawn, Pinned, Plan
from torchpmap._plan.uncompiled import UncompiledPlan
from torchpmap._runtime.base import Handle
from torchpmap._sharded.device_put import handle_of
from torchpmap._trace.capture import Exchange
from torchpmap._trace.compile import EAGER
from torchpmap._trace.environment import Surroundings
from torchpmap._trace.program import Outcome, Program


class MappedProgram(Differentiable):
    """A mapped program; its inputs are its arguments and then the tensors it closes over."""

    def __init__(
        self,
        target: Target,
        program: Program,
        layouts: Sequence[Layout],
        plan: Plan | UncompiledPlan,
        surroundings: Surroundings,
        outside: Collection[int] = (),
    ) -> None:
        """``surroundings``: what the program reads, as of when ``plan`` was traced."""
        self._program = program
        self._surroundings = surroundings
        self._num_arguments = len(layouts)
        if isinstance(plan, UncompiledPlan):
            # derivatives need a graph, even if the call itself runs without one
            target = replace(target, backend=EAGER)
            with surroundings.tracing():
                plan = lower(target, program.run, layouts, outside)
        self.captured, self._pinned = plan.captured, plan.pinned
        layouts = [*layouts, *(captured.layout for captured in plan.captured)]
        super().__init__(target, self._body, layouts)
        self._plan = plan
        self.keys = tuple(
            self._num_arguments + k
            for k, captured in enumerate(plan.captured)
            if isinstance(captured, Drawn)
        )

    def _body(self, blocks: Tensors, axis: Axis) -> Outcome:
        count = self._num_arguments
        exchange = Exchange([each.tensor for each in self.captured], blocks[count:])
        if self._surroundings.changed() or not all(map(Pinned.holds, self._pinned)):
            raise RuntimeError(other_surroundings(self.target.prefix))
        if self.plan.writes_inputs:  # a transform allows writes only to tensors that it made
            blocks = [block.clone() for block in blocks]
        with self._surroundings.tracing(), exchange:
            outcome = self._program.run(blocks[:count], axis)
        if exchange.unmet:
            raise RuntimeError(other_closures(self.target.prefix))
        return outcome

    def placed(self, tensors: Tensors) -> list[Handle]:
        """Captured tensors that have not changed are on the devices already."""
        count = self._num_arguments
        arguments = zip(tensors[:count], self.layouts[:count], strict=True)
        closures = zip(tensors[count:], self.captured, strict=True)
        return [handle_of(x, layout) for x, layout in arguments] + [
            captured.handle() if x is captured.tensor else handle_of(x, captured.layout)
            for x, captured in closures
        ]

    def start(self, tensors: Tensors) -> Outputs:
        held = self.placed(tensors)
        count = self._num_arguments
        return self.plan.call(held[:count], held[count:]).outputs


def other_closures(prefix: str) -> str:
    return (
        f"{prefix}: the function closes over other tensors now, when its derivative is traced, "
        "than when it was called (for example, a module whose parameters were swapped for the "
        "call). Pass them as arguments."
    )


def other_surroundings(prefix: str) -> str:
    return (
        f"{prefix}: what the function reads from outside itself (a global, an attribute, the "
        "training mode of a module, an array) has changed since the call, and a derivative of that "
        "call is only traced now. Change it after backward(), or pass it as an argument."
    )
