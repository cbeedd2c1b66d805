"""What one device computes, sends and holds in a call, counted from the graph and shapes alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.errors import size_text
from torchpmap._base.torch_internals import FakeTensorMode, LazyGraphModule
from torchpmap._collectives.backend import c10d
from torchpmap._plan.collectives import (
    Collective,
    bytes_of,
    collective,
    name_of,
    users_operations,
)
from torchpmap._plan.plan import Plan
from torchpmap._plan.roofline import Machine, kept, moved_bytes
from torchpmap._trace.graphs import (
    COND,
    PRINT,
    SCAN,
    WHILE,
    copied,
    inner_graphs,
    is_view,
    met,
    nested,
    output_of,
    placeholders,
)

_PASSING = (operator.getitem, c10d.wait_tensor.default)
_RECURRENT = "_rnn"
"""In the names of recurrent layers that are one operation, such as ``mkldnn_rnn_layer``."""


@dataclass(frozen=True)
class Cost:
    """What one device computes, sends and holds in one call; ``print`` it."""

    flops: int
    """Floating-point operations of matrix products, convolutions and attention, forward and
    backward.
    """
    collectives: tuple[Collective, ...]
    """In program order; that in a loop is one, of several ``times``."""
    argument_bytes: int
    """Of the arguments and of captured tensors."""
    output_bytes: int
    temporary_bytes: int
    """The most that values between arguments and results take at once.  It is an upper estimate:
    compiled code fuses operations, and makes fewer of these values.
    """
    peak_bytes: int
    """The most that is alive at once, arguments and results included; estimated the same way."""
    uncounted: tuple[str, ...] = ()
    """Operations whose floating-point operations are not known: those of your own, and fused
    recurrent layers.
    """
    moved_bytes: int = 0
    """That the device reads and writes in its memory, estimated for what is fused."""
    seconds: float | None = None
    """That the call takes once it is compiled, within a factor of two or so on a machine that does
    nothing else; a ``while_loop`` counts as one step.  None unless the devices of this machine were
    calibrated (``debug.calibrate``), or ``cost`` was given a ``Machine``.
    """

    @property
    def collective_bytes(self) -> int:
        """Bytes that the device sends into collectives."""
        return _total(self.collectives)

    def __str__(self) -> str:
        lines = [f"{self.flops:,} flops on each device"]
        alike: dict[tuple[str, str], list[Collective]] = {}
        for each in self.collectives:
            alike.setdefault((each.name, each.axis), []).append(each)
        for (name, axis), same in alike.items():
            count = sum(each.times for each in same)
            times = f" ({count} times)" if count > 1 else ""
            lines.append(f"{name} over {axis}{times}: {size_text(_total(same))}")
        lines.append(
            f"memory: {size_text(self.argument_bytes)} arguments, "
            f"{size_text(self.output_bytes)} results, "
            f"at most {size_text(self.temporary_bytes)} temporaries"
        )
        if self.uncounted:
            lines.append(f"flops not counted: {', '.join(self.uncounted)}")
        return "\n".join(lines)


def _total(collectives: Sequence[Collective]) -> int:
    return sum(each.times * each.num_bytes for each in collectives)


def cost_of(plan: Plan, machine: Machine | None = None) -> Cost:
    """``machine``: that of the seconds; None for this one."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    again: list[int] = []
    with counter:
        graph = propagated(plan, counter.get_total_flops, again)
    inputs, returned = placeholders(graph), output_of(graph).all_input_nodes
    flops = counter.get_total_flops() + sum(again)
    collectives = tuple(collective(plan, x) for x in met(graph) if name_of(x.node) != PRINT)
    moved = moved_bytes(graph, is_fused=plan.definition.backend.is_inductor)
    machine = machine or kept(plan.team.runtime.devices)
    return Cost(
        flops,
        collectives,
        sum(map(_size, inputs)),
        sum(map(_size, set(returned))),
        _peak(graph, without={*inputs, *map(_memory, returned)}),
        _peak(graph),
        _uncounted(graph),
        moved,
        None if machine is None else machine.seconds(flops, moved, collectives),
    )


def propagated(
    plan: Plan, flops: Callable[[], int] = int, again: list[int] | None = None
) -> torch.fx.Graph:
    """A copy of the graph with the fake value of each node in ``meta["val"]``.

    A body of a loop is run once; ``again`` gets the flops, which ``flops`` counts, of its other
    steps.  Of the branches of a ``cond`` the one with more counts.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    class Prop(FakeTensorProp):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            name = getattr(target, "_name", "")
            if name not in (SCAN, WHILE, COND):
                return super().call_function(target, args, kwargs)
            bodies = [each for each in args if isinstance(each, torch.fx.GraphModule)]
            if name == COND:
                return branches(bodies, args[-1])
            init, *rest = args[len(bodies) :]
            if name == WHILE:
                Prop(bodies[0], self._mode).run(*init, *rest[-1])
            length = rest[0][0].shape[0] if name == SCAN else 1
            rows = [x[0] for x in rest[0]] if name == SCAN else []
            before = flops()
            results = Prop(bodies[-1], self._mode).run(*init, *rows, *rest[-1])
            if again is not None:
                again.append((flops() - before) * (length - 1))
            ys = [y.expand(length, *y.shape).clone() for y in results[len(init) :]]
            return (*results[: len(init)], *ys)

    def branches(bodies: list[torch.fx.GraphModule], operands: Any) -> Any:
        # torch 2.13 counts them as if no operation of the same name came before
        counts = [flops()]
        for body in bodies:
            results = Prop(body, mode).run(*operands)
            counts.append(flops())
        if again is not None:
            again.append(-min(counts[1] - counts[0], counts[2] - counts[1]))
        return results

    definition = plan.definition
    module = LazyGraphModule(definition.graph, copied(definition.graph.graph))
    kinds = [*([((), torch.int64)] if definition.uses_index else []), *definition.inputs]
    mode, device = FakeTensorMode(), _device_of(definition.graph.graph)
    with mode:
        examples = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
        Prop(module, mode).propagate_dont_convert_inputs(*examples)
    return module.graph


def _device_of(graph: torch.fx.Graph) -> torch.device:
    """Where a graph makes tensors: its inputs are there, too."""
    devices = (node.kwargs.get("device") for node, _ in nested(graph))
    real = (x for x in devices if isinstance(x, torch.device) and x.type not in ("cpu", "meta"))
    return next(real, torch.device("cpu"))


def _uncounted(graph: torch.fx.Graph) -> tuple[str, ...]:
    recurrent = (str(node.target) for node, _ in nested(graph))
    found = (name.removesuffix(".default") for name in recurrent if _RECURRENT in name)
    return tuple(dict.fromkeys([*users_operations(graph), *found]))


# -- flops that torch does not count ---------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """[b, h, s, d], [b, h, t, d], [b, h, t, e]: scores, and their product with the values."""
    *batch, rows, width = query
    return 2 * math.prod(batch) * rows * key[-2] * (width + value[-1])


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Scores again; and from them the gradients of query, key, value and the scores."""
    *batch, rows, width = query
    return 2 * math.prod(batch) * rows * key[-2] * (3 * width + 2 * value[-1])


def _formulas() -> dict[Any, Any]:
    """A function, because looking operations up takes a while."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten.mv: lambda matrix, *_, **__: 2 * math.prod(matrix),
        aten.addmv: lambda _, matrix, *__, **___: 2 * math.prod(matrix),
        aten.dot: lambda x, *_, **__: 2 * math.prod(x),
        aten.vdot: lambda x, *_, **__: 2 * math.prod(x),
    }


# -- memory ----------------------------------------------------------------------------------------


def _memory(node: torch.fx.Node) -> torch.fx.Node:
    """The node that made the memory this one uses: an earlier one for a view and ``_PASSING``."""
    while node.target in _PASSING or is_view(node):
        node = node.all_input_nodes[0]
    return node


def _peak(graph: torch.fx.Graph, without: Collection[torch.fx.Node] = ()) -> int:
    """The most bytes that are alive at once, of all memory but that of ``without``."""
    nodes = list(graph.nodes)
    last_use = {
        _memory(source): k for k, node in enumerate(nodes) for source in node.all_input_nodes
    }
    ends: dict[int, list[torch.fx.Node]] = {}
    for node, k in last_use.items():
        if node.op != "placeholder":  # the caller holds them
            ends.setdefault(k, []).append(node)
    alive = peak = 0
    for k, node in enumerate(nodes):
        counts = node.op != "output" and _memory(node) is node and node not in without
        alive += _size(node) if counts else 0
        # what a step of a loop, or a branch, reads is held by the graph around it
        inside = (_peak(inner, set(placeholders(inner))) for inner in inner_graphs(node))
        peak = max(peak, alive + max(inside, default=0))
        alive -= sum(_size(done) for done in ends.get(k, []) if done not in without)
    return peak


def _size(node: torch.fx.Node) -> int:
    return bytes_of(node.meta.get("val"))
