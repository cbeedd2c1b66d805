"""``fun.lower(...)``: what a mapped call will do, before it is compiled or run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._base.arrays import for_torch
from torchpmap._base.boundary import boundary
from torchpmap._base.errors import check_array, kind_of
from torchpmap._base.pytree import Structure, flatten_call
from torchpmap._layout.layout import Layout
from torchpmap._plan.certificate import Certificate, certificate_of
from torchpmap._plan.cost import Cost, cost_of
from torchpmap._plan.plan import Plan
from torchpmap._plan.roofline import Machine
from torchpmap._sharded.device_put import handle_of
from torchpmap._sharded.tensor import make_sharded


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
        structure: Structure,
        positions: Sequence[int],
        paths: Sequence[str],
        layouts: Sequence[Layout],
        giving_up: Callable[[Sequence[Any]], Callable[[], None] | None],
    ) -> None:
        """``giving_up``: what takes the donated ones of the leaves that travel from the caller."""
        super().__init__(plan, [f"compared in each call: {claim}" for claim in plan.checked])
        self._structure = structure
        self._positions = tuple(positions)
        self.in_layouts = dict(zip(paths, layouts, strict=True))
        self.out_layouts = plan.outputs[: len(plan.outputs) - plan.num_checks]
        self.compared = plan.checked
        self._giving_up = giving_up

    @boundary
    def compile(self) -> Compiled:
        """Compile on the devices now; errors of the compiler are raised here."""
        self._plan.define()
        return Compiled(self)


class Compiled:
    """A compiled mapped function for arguments of one structure, shapes and dtypes."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._plan = lowered._plan

    @boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; ``TypeError`` if the arguments are not those it was compiled for."""
        lowered = self._lowered
        leaves, structure = flatten_call(args, kwargs)
        expected = lowered._structure
        if structure != expected or structure.dict_order != expected.dict_order:
            raise TypeError(
                f"{self._plan.prefix}: function compiled with input pytree "
                f"{expected} does not match the input pytree it was called with: "
                f"{structure}"
            )
        held = []
        leaves = [leaves[position] for position in lowered._positions]
        for leaf, (path, layout) in zip(leaves, lowered.in_layouts.items(), strict=True):
            check_array(leaf, f"{self._plan.prefix}: argument {path}")
            value = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(for_torch(leaf))
            if tuple(value.shape) != layout.shape or value.dtype != layout.dtype:
                raise TypeError(
                    f"{self._plan.prefix}: argument types differ from the types for which this "
                    f"computation was compiled: argument {path} compiled with "
                    f"{kind_of(layout.shape, layout.dtype)} and called with "
                    f"{kind_of(value.shape, value.dtype)}"
                )
            held.append(handle_of(value, layout))
        called = self._plan.call(held, None, lowered._giving_up(leaves))
        return called.tree([make_sharded(layout, handle) for layout, handle in called.outputs])
