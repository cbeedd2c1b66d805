"""Which values of a traced graph may differ between devices.

A value is *replicated* when it depends on nothing that differs between devices, or has passed
through a collective that gives every device the same.  A value that ``out_axes=None`` declares
replicated, but that may differ, is broadcast.  JAX instead returns the first device's value and
silently leaves the others different.  ``shard_map`` refuses such a value, as JAX does there.

The question is asked along an axis, whose *lines* are the groups of devices that differ in the
index along this axis only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchpmap._base.torch_internals import OpOverload
from torchpmap._collectives import pbroadcast
from torchpmap._collectives.backend import c10d
from torchpmap._layout.axis_stack import Axis, Partition, bind, joined, peers

_EQUALISING = (c10d.all_reduce.default, c10d.all_gather_into_tensor.default)
_DISTRIBUTING = (
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
    torch.ops.torchpmap.ppermute.default,  # who receives nothing has zeros
)

_aten = torch.ops.aten
_CONSTANT = (
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
)
"""What takes only the shape of its argument."""
_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    _aten.floor_divide.default: np.floor_divide,
    _aten.remainder.Scalar: np.remainder,
    _aten.mul.Tensor: np.multiply,
    _aten.add.Tensor: np.add,
    _aten.sub.Tensor: np.subtract,
    _aten.eq.Scalar: np.equal,
    _aten.ne.Scalar: np.not_equal,
    _aten.lt.Scalar: np.less,
    _aten.gt.Scalar: np.greater,
    _aten.clone.default: np.copy,
    _aten.detach.default: np.copy,
}
"""What the index along one axis is computed with, from that of the device."""


class Demand(NamedTuple):
    """An output of a device."""

    block: torch.Tensor
    same_along: tuple[Axis, ...]
    """It must be the same on all devices along these axes."""
    refuse: Callable[[Sequence[Hashable]], Exception] | None = None
    """The error if it may differ along some of them; None: it is broadcast."""
    is_output: bool = True
    """Whether it is returned, and not only looked at."""


def varying_nodes(
    graph: torch.fx.Graph,
    varying_inputs: Collection[torch.fx.Node],
    *groups: str,
    distributing: Collection[str] = (),
    known: Mapping[torch.fx.Node, bool] | None = None,
) -> set[torch.fx.Node]:
    """The nodes whose value may differ along an axis; the graph may still be under construction.

    Args:
        graph: of one device.
        varying_inputs: placeholders that differ.
        groups: process groups that hold whole lines of the axis.
        distributing: process groups that hold several devices of a line.
        known: nodes of which it is known whether they differ.
    """
    varying = set(varying_inputs)
    known = known or {}
    bases: dict[torch.fx.Node, torch.fx.Node] = {}
    written: set[torch.fx.Node] = set()  # bases of what varying values were written into
    for node in graph.nodes:
        base = bases[node] = _base(node, bases)
        if node in known:
            if known[node]:
                varying.add(node)
            continue
        if node.target in _EQUALISING and node.args[-1] in groups:
            continue
        if node.target in _CONSTANT:
            continue
        if (
            is_random(node)
            or base in written
            or (node.target in _DISTRIBUTING and node.args[-1] in distributing)
            or any(source in varying or bases[source] in written for source in node.all_input_nodes)
        ):
            varying.add(node)
            written.update(bases[target] for target in _written_by(node))
    return varying | {node for node, base in bases.items() if base in written}


def _base(node: torch.fx.Node, bases: Mapping[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node:
    """The node whose memory a node's value is in; its own unless it is a view."""
    if node.target is operator.getitem:
        return bases[node.all_input_nodes[0]]
    shared = _arguments(node, lambda argument: argument.alias_info is not None)
    return bases[shared[0]] if shared else node


def _written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments that a node writes into."""
    return _arguments(node, lambda argument: argument.alias_info and argument.alias_info.is_write)


def _arguments(node: torch.fx.Node, chosen: Callable[[Any], Any]) -> list[torch.fx.Node]:
    if not isinstance(node.target, OpOverload):
        return []
    found: list[torch.fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if chosen(argument):
            given = node.kwargs.get(argument.name)
            if position < len(node.args):
                given = node.args[position]
            torch.fx.node.map_arg(given, found.append)
    return found


def index_values(
    graph: torch.fx.Graph, index: torch.fx.Node, count: int
) -> dict[torch.fx.Node, Sequence[int]]:
    """What is computed from the index of the device alone: per node, the value on every device."""
    values: dict[torch.fx.Node, Any] = {index: np.arange(count)}
    for node in graph.nodes:
        rule = _ARITHMETIC.get(node.target)
        if rule and not node.kwargs and all(s in values for s in node.all_input_nodes):
            values[node] = rule(*torch.fx.node.map_arg(node.args, values.__getitem__))
    return {node: value.tolist() for node, value in values.items()}


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws from a random generator."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):  # attention and RNNs draw only for this
            given = node.args[position:] or [node.kwargs.get(argument.name, argument.default_value)]
            return bool(given[0] != 0)
    return True


def replicated(
    demands: Sequence[Demand],
    held: Sequence[Sequence[int]],
    varying_closures: Collection[torch.fx.Node],
    groups: Mapping[str, Partition],
) -> list[torch.Tensor]:
    """In a trace, broadcast from the first device blocks that must be the same but may differ, or
    refuse them.

    Args:
        demands: the blocks that a device returns.
        held: per argument of the trace, after the index of the device: a number for every device,
            equal for devices that hold equal blocks.
        varying_closures: nodes of closures that may differ.
        groups: the process groups by name, as indices of devices.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    index, *arguments = (node for node in tracer.graph.nodes if node.op == "placeholder")
    found: dict[Partition, set[torch.fx.Node]] = {}

    def varying(lines: Partition) -> set[torch.fx.Node]:
        values = index_values(tracer.graph, index, sum(map(len, lines)))
        values |= dict(zip(arguments, held, strict=False))  # closures follow
        known = {node: _differ(value, lines) for node, value in values.items()}
        whole = [name for name, parts in groups.items() if _is_within(lines, parts)]
        distributing = [name for name, parts in groups.items() if _meet(lines, parts)]
        return varying_nodes(
            tracer.graph, varying_closures, *whole, distributing=distributing, known=known
        )

    def varies(node: torch.fx.Node, axis: Axis) -> bool:
        lines = peers(axis)
        if lines not in found:
            found[lines] = varying(lines)
        return node in found[lines]

    def settle(demand: Demand) -> torch.Tensor:
        block = demand.block
        slot: Any = get_proxy_slot(block, tracer, None)
        if slot is None:  # no traced input was touched
            return block
        differing = [a for a in demand.same_along if a.size > 1 and varies(slot.proxy.node, a)]
        if differing and demand.refuse is not None:
            raise demand.refuse([axis.name for axis in differing])
        for axis in joined(differing):
            with bind(axis):
                block = pbroadcast(block.detach(), axis.name, 0)
        return block

    settled = [(settle(demand), demand.is_output) for demand in demands]
    return [block for block, is_output in settled if is_output]


def _differ(values: Sequence[int], lines: Partition) -> bool:
    """Whether some devices of a line have different values."""
    return any(len({values[k] for k in line}) > 1 for line in lines)


def _meet(lines: Partition, parts: Partition) -> bool:
    """Whether some devices of a line are in one part."""
    return any(len(set(line) & set(part)) > 1 for line in lines for part in parts)


def _is_within(lines: Partition, parts: Partition) -> bool:
    """Whether every line is in one of the parts."""
    return all(any(set(line) <= set(part) for part in parts) for line in lines)
