"""``fun.lower(...)``: what a mapped call will do, before it is compiled or run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._base.boundary import boundary
from torchpmap._layout.layout import Layout
from torchpmap._plan.certificate import Certificate, certificate_of
from torchpmap._plan.cost import Cost, cost_of
from torchpmap._plan.plan import Plan
from torchpmap._plan.roofline import Machine


class LoweredPlan:
    """What is known of a call when it is traced, and not yet compiled."""

    def __init__(self, plan: Plan, notes: Sequence[str]) -> None:
        """``notes``: what a call does besides its graph, each a line of ``as_text``."""
        self._plan = plan
        self._notes = notes

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The graph that every device runs: [axis index,] captured tensors, arguments."""
        return self._plan.definition.graph

    def as_text(self) -> str:
        """The graph as text, one operation a line, and then what else a call does."""
        notes = (f"# {note}" for note in self._notes)
        return "\n".join([str(self.graph.graph).strip(), *notes])

    def cost(self, machine: Machine | None = None) -> Cost:
        """Count, from shapes alone, what a call costs one device.

        Args:
            machine: the one of ``Cost.seconds``; by default this one, if it is calibrated.
        """
        return cost_of(self._plan, machine)

    def certificate(self) -> Certificate:
        """List the collectives of a call, and say whether all devices will agree about them: what
        the graph proves, and what only holds at run time.
        """
        return certificate_of(self._plan)

    def __repr__(self) -> str:
        return f"<lowered {self._plan.prefix}>"


class Lowered(LoweredPlan):
    """A mapped function for arguments of certain shapes, traced and not yet compiled.

    Attributes:
        in_layouts: argument path -> layout, in the order of the leaves.
        out_layouts: one layout per output leaf.
        compared: what each call compares between the devices, because ``check_replicated`` asks for
            it and tracing did not prove that it is the same.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda w, x: tp.pmean(w @ x, "i"), "i", in_axes=(None, 0))
        >>> lowered = f.lower(torch.zeros(8, 3), torch.zeros(4, 3))
        >>> lowered.cost().flops, lowered.cost().collectives
        (48, (Collective(name='all_reduce', num_bytes=32, axis='i'),))
        >>> lowered.compile()(torch.ones(8, 3), torch.ones(4, 3)).shape
        torch.Size([4, 8])

    Source: ``jax.stages.Lowered``.
    """

    def __init__(
        self,
        plan: Plan,
        paths: Sequence[str],
        layouts: Sequence[Layout],
        call: Callable[..., Any],
    ) -> None:
        """``call``: runs the plan for arguments, if they are of its kind."""
        super().__init__(plan, [f"compared in each call: {claim}" for claim in plan.checked])
        self.in_layouts = dict(zip(paths, layouts, strict=True))
        self.out_layouts = plan.outputs[: len(plan.outputs) - plan.num_checks]
        self.compared = plan.checked
        self._call = call

    @boundary
    def compile(self) -> Compiled:
        """Compile on the devices now; errors of the compiler are raised here."""
        self._plan.define()
        return Compiled(self)


class Compiled:
    """A compiled mapped function for arguments of one structure, shapes and dtypes."""

    def __init__(self, lowered: Lowered) -> None:
        self._call = lowered._call

    @boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; ``TypeError`` if the arguments are not those it was compiled for."""
        return self._call(args, kwargs)
