"""What a traced function does with whole values -> the plan of a device.

    whole graph, layouts --Spread--> graph of a device --lower--> Plan

The layouts of what the function is given, closes over and writes are those that it has; a result
lies as it comes out, unless a layout is wanted for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from torchpmap._base.devices import Device
from torchpmap._base.pytree import flatten
from torchpmap._layout.axis_stack import Axis
from torchpmap._layout.common_grid import CommonGrid, common_grid
from torchpmap._layout.grid import Grid
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.lower import Body, Target, lower, lower_pair
from torchpmap._plan.plan import Plan
from torchpmap._sharded.constraints import wishes
from torchpmap._sharded.spmd import Emitter
from torchpmap._sharded.spread import Spread
from torchpmap._sharded.summands import Moved, Value
from torchpmap._trace.graphs import call, drop_dead
from torchpmap._trace.program import Outcome
from torchpmap._trace.remat import Following
from torchpmap._trace.repetition import keep_places


def grid_of(devices: tuple[Device, ...], layouts: Sequence[Layout]) -> Grid | None:
    """One grid for all values; None if their meshes have none in common."""
    return common_grid([*layouts, replicated_layout((), torch.float32, devices)])


class WholePlans(NamedTuple):
    """What runs a graph of whole values on the devices."""

    forward: Plan
    backward: Plan | None
    """Of a graph that takes cotangents: takes residuals of ``forward``, and these."""
    resharded: list[Moved]


def plans_of(
    target: Target,
    graph: GraphModule,
    inputs: Sequence[Layout],
    weights: Collection[int],
    wanted: Sequence[Layout | None],
    cotangents: Sequence[int] = (),
    num_gradients: int = 0,
) -> WholePlans:
    """The plans of a graph.

    Args:
        target: its grid is of ``grid_of``.
        inputs: layouts of what the graph takes first.
        weights: positions among them that are gathered where data is cut alike.
        wanted: layouts of what it returns; None where any will do.
        cotangents: the results whose cotangents it takes last.
        num_gradients: how many of its last results need these.
    """
    grid = target.grid
    assert isinstance(grid, CommonGrid)
    _write_norms_as_roots(graph)
    _take_for_copies(graph)
    emitter = Emitter(grid)
    wish = {node: grid.cut_of(layout) for node, layout in wishes(graph).items()}
    spread = Spread(graph, emitter, wish)
    values = [_value(emitter, k, layout, k in weights) for k, layout in enumerate(inputs)]
    results = spread.run(
        values,
        [None if layout is None else grid.cut_of(layout) for layout in wanted],
        [(emitter.input(f"cotangent_{k}"), k) for k in cotangents],
    )
    body = _body(target, emitter, results)

    def finished(plan: Plan, wanted: Sequence[Layout | None]) -> Plan:
        made = zip(plan.outputs, wanted, strict=True)
        return replace(plan, outputs=tuple(own if wish is None else wish for own, wish in made))

    if not cotangents:
        return WholePlans(finished(lower(target, body, inputs), wanted), None, spread.reshards)
    alike = [grid.layout(x.shape, x.dtype, x.cut) for x in (results[k] for k in cotangents)]
    count = len(results) - num_gradients
    pair = lower_pair(target, body, [*inputs, *alike], count, len(cotangents))
    forward = finished(pair.forward, wanted[:count])
    return WholePlans(forward, finished(pair.backward, wanted[count:]), spread.reshards)


def _value(emitter: Emitter, place: int, layout: Layout, is_weight: bool) -> Value:
    """An input of the graph."""
    block, cut = emitter.input(f"input_{place}"), emitter.grid.cut_of(layout)
    return Value(block, tuple(layout.shape), layout.dtype, cut, (), is_weight)


def _body(target: Target, emitter: Emitter, results: Sequence[Value]) -> Body:
    run = emitter.module([value.block for value in results])
    cuts = tuple(value.cut for value in results)
    places = {rank: place for place, rank in enumerate(target.ranks)}
    partitions = [
        tuple(tuple(places[rank] for rank in part) for part in partition)
        for name, partition in emitter.groups.items()
        if name != target.group
    ]

    def body(blocks: Sequence[torch.Tensor], axis: Axis) -> Outcome:
        for partition in partitions:
            assert axis.subgroup is not None
            axis.subgroup(partition)
        following = Following(run)
        with torch.no_grad():
            made = following.run(axis.index, *blocks)
        keep_places(following.made, instead=True)  # else it is the line of the call
        return Outcome(flatten(list(made))[1], tuple(made), cuts)

    return body


def _write_norms_as_roots(module: GraphModule) -> None:
    """The sums of squares of all gradients go in one message; norms would each be put together from
    those of the blocks.
    """
    for node in module.graph.find_nodes(op="call_function", target=_NORM):
        arguments: list[Any] = [*node.args, *_DEFAULTS[len(node.args) :]]
        x, order, dims, keepdim, dtype = arguments
        value = x.meta["val"]
        if order != 2 or dtype is not None or node.kwargs or not value.is_floating_point():
            continue
        with module.graph.inserting_before(node):
            made = call(module.graph, _aten.mul.Tensor, x, x)
            over = list(range(value.ndim)) if dims is None else dims
            made = call(module.graph, _aten.sum.dim_IntList, made, over, keepdim)
            made = call(module.graph, _aten.sqrt.default, made)
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)


def _take_for_copies(module: GraphModule) -> None:
    """Take what a part is overwritten with for its copy, which reads only shape, dtype and strides
    of the part: to have that, devices would exchange rows.
    """
    for node in module.graph.find_nodes(op="call_function", target=_aten.copy.default):
        source, kind = node.args[1], node.meta["val"]
        value = source.meta["val"]
        if (value.shape, value.dtype) == (kind.shape, kind.dtype):
            is_alike = value.stride() == kind.stride()
            # what is put into a tensor may have any strides
            node.replace_all_uses_with(source, lambda user, x=is_alike: x or user.target in _PUTS)
    drop_dead(module.graph)


_aten = torch.ops.aten
_NORM = _aten.linalg_vector_norm.default
_PUTS = (_aten.slice_scatter.default, _aten.select_scatter.default)
_DEFAULTS = (None, 2, None, False, None)
