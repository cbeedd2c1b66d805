"""``fun.lower(...)``: what a mapped call will do, before it is compiled or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.errors import check_array, kind_of
from torchpmap._base.pytree import Structure, flatten_call
from torchpmap._base.torch_internals import FakeTensorMode, OpOverload
from torchpmap._collectives.backend import NAMESPACES
from torchpmap._layout.layout import Layout
from torchpmap._plan.plan import Plan
from torchpmap._sharded.device_put import handle_of
from torchpmap._sharded.tensor import make_sharded
from torchpmap._trace.boxed import copied


@dataclass(frozen=True)
class Cost:
    """What one device computes, sends and holds in one call."""

    flops: int
    """Floating-point operations of matrix products, convolutions and attention (as
    ``torch.utils.flop_counter`` counts them).
    """
    collectives: tuple[tuple[str, int], ...]
    """Operation and the bytes that the device sends into it, in program order."""
    argument_bytes: int
    output_bytes: int
    peak_bytes: int
    """The most that is alive at once, arguments included, if no operations are fused."""

    @property
    def collective_bytes(self) -> int:
        """Bytes that the device sends into collectives."""
        return sum(size for _, size in self.collectives)


class Lowered:
    """A mapped function for arguments of certain shapes, traced and not yet compiled.

    Attributes:
        in_layouts: argument path -> layout, in the order of the leaves.
        out_layouts: one layout per output leaf.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda w, x: tp.pmean(w @ x, "i"), "i", in_axes=(None, 0))
        >>> lowered = f.lower(torch.zeros(8, 3), torch.zeros(4, 3))
        >>> lowered.cost().flops, lowered.cost().collectives
        (48, (('all_reduce', 32),))
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
    ) -> None:
        self._plan = plan
        self._structure = structure
        self._positions = tuple(positions)
        self.in_layouts = dict(zip(paths, layouts, strict=True))
        self.out_layouts = plan.outputs

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The graph that every device runs: [axis index,] captured tensors, arguments."""
        return self._plan.definition.graph

    def as_text(self) -> str:
        """The graph as text, one operation a line."""
        return str(self.graph.graph).strip()

    def cost(self) -> Cost:
        """Count, from shapes alone, what a call costs one device."""
        return _cost(self._plan)

    def compile(self) -> Compiled:
        """Compile on the devices now; errors of the compiler are raised here."""
        self._plan.define()
        return Compiled(self)

    def __repr__(self) -> str:
        return f"<lowered {self._plan.prefix}>"


class Compiled:
    """A compiled mapped function for arguments of one structure, shapes and dtypes."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._plan = lowered._plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; ``TypeError`` if the arguments are not those it was compiled for."""
        lowered = self._lowered
        leaves, structure = flatten_call(args, kwargs)
        if structure != lowered._structure:
            raise TypeError(
                f"{self._plan.prefix}: function compiled with input pytree "
                f"{lowered._structure} does not match the input pytree it was called with: "
                f"{structure}"
            )
        held = []
        for position, (path, layout) in zip(
            lowered._positions, lowered.in_layouts.items(), strict=True
        ):
            leaf = leaves[position]
            check_array(leaf, f"{self._plan.prefix}: argument {path}")
            value = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)
            if tuple(value.shape) != layout.shape or value.dtype != layout.dtype:
                raise TypeError(
                    f"{self._plan.prefix}: argument types differ from the types for which this "
                    f"computation was compiled: argument {path} compiled with "
                    f"{kind_of(layout.shape, layout.dtype)} and called with "
                    f"{kind_of(value.shape, value.dtype)}"
                )
            held.append(handle_of(value, layout))
        called = self._plan.call(held)
        return called.tree([make_sharded(layout, handle) for layout, handle in called.outputs])


def _cost(plan: Plan) -> Cost:
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils.flop_counter import FlopCounterMode

    definition = plan.definition
    graph = torch.fx.GraphModule(definition.graph, copied(definition.graph.graph))
    kinds = [*([((), torch.int64)] if definition.uses_index else []), *definition.inputs]
    mode = FakeTensorMode()
    with mode:
        examples = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]
    counter = FlopCounterMode(display=False)
    with counter:
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*examples)
    nodes = list(graph.graph.nodes)
    sizes = {node: _bytes(node.meta.get("val")) for node in nodes}
    collectives = tuple(
        (node.target._schema.name.split("::")[1], sum(sizes[n] for n in node.all_input_nodes))
        for node in nodes
        if isinstance(node.target, OpOverload)
        and node.target.namespace in NAMESPACES
        and "wait" not in node.target._schema.name
    )
    inputs = sum(sizes[node] for node in nodes if node.op == "placeholder")
    (output,) = (node for node in nodes if node.op == "output")
    outputs = sum(sizes[node] for node in set(output.all_input_nodes))
    return Cost(counter.get_total_flops(), collectives, inputs, outputs, _peak(nodes, sizes))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _peak(nodes: Sequence[torch.fx.Node], sizes: dict[torch.fx.Node, int]) -> int:
    last_use = {source: k for k, node in enumerate(nodes) for source in node.all_input_nodes}
    alive = peak = 0
    ends: dict[int, list[torch.fx.Node]] = {}
    for node, k in last_use.items():
        if node.op != "placeholder":  # the caller holds them
            ends.setdefault(k, []).append(node)
    for k, node in enumerate(nodes):
        alive += _own(node, sizes)
        peak = max(peak, alive)
        alive -= sum(_own(done, sizes) for done in ends.get(k, []))
    return peak


def _own(node: torch.fx.Node, sizes: dict[torch.fx.Node, int]) -> int:
    """Bytes that a node adds: none for a view."""
    return 0 if getattr(node.target, "is_view", False) else sizes[node]
