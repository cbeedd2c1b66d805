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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Graph, Node

from torchpmap._base.storages import storage_number
from torchpmap._base.torch_internals import (
    batched_levels,
    innermost,
    level_of,
)
from torchpmap._collectives import pbroadcast
from torchpmap._collectives.backend import c10d
from torchpmap._collectives.varying import is_by_element
from torchpmap._layout.axis_stack import Axis, Partition, Parts, bind, joined, parted, peers
from torchpmap._trace.graphs import (
    COND,
    PRINT,
    WHILE,
    Met,
    current_capture,
    inner_graphs,
    is_view,
    kind_of_node,
    met,
    placeholders,
    results_of,
    written_by,
)

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


class Along(NamedTuple):
    """An axis, as the process groups of a graph lie on it."""

    whole: tuple[str, ...]
    """Groups that hold whole lines of the axis."""
    distributing: tuple[str, ...] = ()
    """Groups that hold several devices of a line."""


def varying_nodes(
    graph: Graph,
    varying_inputs: Collection[Node],
    along: Along,
    known: Mapping[Node, bool] | None = None,
) -> set[Node]:
    """The nodes whose value may differ along an axis; the graph may still be under construction.

    Of a node with several results, those that take one out of it are told apart.

    Args:
        graph: of one device.
        varying_inputs: placeholders that differ.
        along: the axis.
        known: nodes of which it is known whether they differ.
    """
    varying = set(varying_inputs)
    known = known or {}
    bases: dict[Node, Hashable] = {}
    written: set[Hashable] = set()  # memory that varying values were written into
    parts: dict[Node, Sequence[bool]] = {}
    for node in graph.nodes:
        base = bases[node] = _memory(node, bases)
        if node in known and base not in written:
            if known[node]:
                varying.add(node)
            continue
        if node.target in _EQUALISING and node.args[-1] in along.whole:
            continue
        if node.target in _CONSTANT:
            continue
        inside = _inside(node, varying, along)
        flags = None if inside is None else inside.results
        if flags is None and is_by_element(node.target):
            flags = [
                any(x in varying or bases[x] in written for x in row) for row in _elements(node)
            ]
        if flags is not None:
            parts[node] = flags
            differs = any(flags)
        elif node.target is operator.getitem and node.args[0] in parts:
            differs = parts[node.args[0]][node.args[1]]
        else:
            differs = (
                base in written
                or (node.target in _DISTRIBUTING and node.args[-1] in along.distributing)
                or any(x in varying or bases[x] in written for x in node.all_input_nodes)
            )
        if differs:
            varying.add(node)
            targets = written_by(node)
            if flags is not None:  # of lists, those places that vary
                targets = [x for k, x in enumerate(targets) if flags[k % len(flags)]]
            written.update(bases[target] for target in targets)
    return varying | {node for node, base in bases.items() if base in written}


def _memory(node: Node, bases: Mapping[Node, Hashable]) -> Hashable:
    """The memory that a node's value is in: one of its own, unless it is a view."""
    value = node.meta.get("val")
    number = storage_number(value) if isinstance(value, torch.Tensor) else None
    if number is not None:
        return number
    if node.target is operator.getitem:
        return bases[node.all_input_nodes[0]]
    shared = written_by(node) or (node.all_input_nodes if is_view(node) else [])
    return bases[shared[0]] if shared else node


def _elements(node: Node) -> list[list[Node]]:
    """The operands for each place of the lists that an operation computes by element."""
    given = [*node.args, *node.kwargs.values()]
    lists = [x for x in given if isinstance(x, list | tuple)]
    alone = [x for x in given if isinstance(x, Node)]
    rows = zip(*(x for x in lists if len(x) == len(lists[0])), strict=True)
    return [[*(x for x in row if isinstance(x, Node)), *alone] for row in rows]


def index_values(graph: Graph, index: Node, count: int) -> dict[Node, Sequence[int]]:
    """What is computed from the index of the device alone: per node, the value on every device."""
    if not index.users:
        return {index: range(count)}
    values: dict[Node, Any] = {index: np.arange(count)}
    bases: dict[Node, Hashable] = {}
    written: set[Hashable] = set()
    for node in graph.nodes:
        bases[node] = _memory(node, bases)
        written.update(bases[target] for target in written_by(node))
        sources = node.all_input_nodes
        if not written.isdisjoint(bases[source] for source in sources):
            continue
        rule = _ARITHMETIC.get(node.target)
        if rule and not node.kwargs and all(s in values for s in sources):
            values[node] = rule(*torch.fx.node.map_arg(node.args, values.__getitem__))
    return {node: value.tolist() for node, value in values.items()}


def along_lines(lines: Partition, groups: Mapping[str, Partition]) -> Along:
    return Along(
        tuple(name for name, parts in groups.items() if _is_within(lines, parts)),
        tuple(name for name, parts in groups.items() if _meet(lines, parts)),
    )


def differing(
    graph: Graph,
    values: Mapping[Node, Sequence[int]],
    lines: Partition,
    groups: Mapping[str, Partition],
    varying_inputs: Collection[Node] = (),
) -> set[Node]:
    """The nodes whose value may differ between the devices of a line.

    Args:
        graph: of one device.
        values: nodes of which it is known which devices have equal values: a number for each.
        lines: groups of devices, by their indices.
        groups: the process groups by name.
        varying_inputs: placeholders that differ.
    """
    known = {node: _differ(value, lines) for node, value in values.items()}
    return varying_nodes(graph, varying_inputs, along_lines(lines, groups), known)


@dataclass
class Replication:
    """In a trace: which of its values are known to be the same on which devices."""

    graph: Graph
    """Under construction."""
    held: Sequence[Sequence[int]]
    """Per argument of the trace, after the index of the device: a number for every device, equal
    for devices that hold equal blocks.
    """
    varying_closures: Callable[[], Collection[Node]]
    """Gives the nodes of closures that may differ."""
    groups: Mapping[str, Partition]
    """The process groups by name, as indices of devices."""
    node_of: Callable[[torch.Tensor], Node | None]
    """Gives the node of a value; None for one that is not computed in the graph."""
    known: dict[Partition, tuple[int, set[Node]]] = field(default_factory=dict)
    """Per lines: the length of the graph, and the nodes that may differ."""

    def settle(self, demands: Sequence[Demand]) -> list[torch.Tensor]:
        """The outputs.  Blocks that must be the same but may differ are broadcast from the first
        device, or refused.
        """
        inside = (each.group for node in self.graph.nodes for each in _met_in(node))
        for group in dict.fromkeys(inside):
            if group in self.groups:
                lines = self.groups[group]
                varying = self._varying_along(lines)
                _refuse_deadlocks(self.graph, group, varying, along_lines(lines, self.groups))
        nodes = [self.node_of(demand.block) for demand in demands]
        # before broadcasts make the graph longer
        differing = [
            [a for a in demand.same_along if node is not None and self.varies(node, a)]
            for demand, node in zip(demands, nodes, strict=True)
        ]
        outputs = [_settle(each, axes) for each, axes in zip(demands, differing, strict=True)]
        return [x for x, demand in zip(outputs, demands, strict=True) if demand.is_output]

    def is_same(self, value: torch.Tensor, axis: Axis) -> bool:
        """Whether a value is proved to be the same along an axis of devices."""
        node = self.node_of(value)
        return node is None or not self.varies(node, axis)

    def varies(self, node: Node, axis: Axis) -> bool:
        return axis.size > 1 and node in self._varying_along(peers(axis))

    def _varying_along(self, lines: Partition) -> set[Node]:
        length, found = self.known.get(lines, (-1, set()))
        if length != len(self.graph.nodes):
            index, *arguments = placeholders(self.graph)
            values = index_values(self.graph, index, sum(map(len, lines)))
            values |= dict(zip(arguments, self.held, strict=False))  # closures follow
            found = differing(self.graph, values, lines, self.groups, self.varying_closures())
            self.known[lines] = len(self.graph.nodes), found
        return found


def is_same(value: torch.Tensor, parts: Parts) -> bool:
    """Whether it is proved, before anything runs, that a value is the same along a bound axis."""
    capture = current_capture()
    known: Replication | None = None if capture is None else capture.replication
    for part in parts:
        if part.group is None:
            if level_of(part.index) in batched_levels(value):
                return False
        elif part.size > 1 and (known is None or not known.is_same(innermost(value), part)):
            return False
    return True


def _settle(demand: Demand, differing: Sequence[Axis]) -> torch.Tensor:
    if differing and demand.refuse is not None:
        raise demand.refuse([axis.name for axis in differing])
    return of_first(demand.block, differing)


def of_first(block: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """The block of the first device along some axes."""
    for axis in joined(axes):
        with bind(axis):
            block = pbroadcast(block.detach(), axis.name, 0)
    return block


def _differ(values: Sequence[int], lines: Partition) -> bool:
    """Whether some devices of a line have different values."""
    return any(len({values[k] for k in line}) > 1 for line in lines)


def _meet(lines: Partition, parts: Partition) -> bool:
    """Whether some devices of a line are in one part."""
    return any(len(set(line) & set(part)) > 1 for line in lines for part in parts)


def _is_within(lines: Partition, parts: Partition) -> bool:
    """Whether every line is in one of the parts."""
    return all(any(set(line) <= set(part) for part in parts) for line in lines)


# -- loops and branches ----------------------------------------------------------------------------


class _Inside(NamedTuple):
    """What may differ between devices in a loop or branch."""

    inputs: list[bool]
    """Of each graph in it."""
    results: list[bool]
    parts: bool
    """Whether devices may go through it in different ways."""


def _inside(node: Node, varying: Collection[Node], along: Along) -> _Inside | None:
    """None for a node that is no loop or branch.

    A value inside a loop may differ if the value that it starts from may, or what the step before
    made of it: so a loop is looked at until nothing changes.
    """
    kind = kind_of_node(node)
    graphs = inner_graphs(node) if kind else []
    if not graphs:
        return None
    operands: list[Any] = [x for x in node.args if isinstance(x, list | tuple)]
    inputs = [x in varying for each in operands for x in each]
    bodies, count = (graphs, 0) if kind == COND else (graphs[-1:], len(operands[0]))
    parts = kind == COND and node.args[0] in varying
    while True:
        if kind == WHILE:  # devices may stop after different numbers of steps
            (parts,) = _through(graphs[0], inputs, along)
        found = zip(*(_through(body, inputs, along) for body in bodies), strict=True)
        results = [parts or any(flags) for flags in found]
        carry = [a or b for a, b in zip(inputs[:count], results[:count], strict=True)]
        if carry == inputs[:count]:
            return _Inside(inputs, [*carry, *results[count:]], parts)
        inputs[:count] = carry


def _marked(graph: Graph, flags: Sequence[bool]) -> list[Node]:
    return [node for node, flag in zip(placeholders(graph), flags, strict=True) if flag]


def _through(graph: Graph, flags: Sequence[bool], along: Along) -> list[bool]:
    varying = varying_nodes(graph, _marked(graph, flags), along)
    return [result in varying for result in results_of(graph)]


def _refuse_deadlocks(graph: Graph, group: str, varying: Collection[Node], along: Along) -> None:
    """Raise if devices of a group may take different ways in a branch, or run different numbers of
    steps of a loop, that contains a collective of theirs.
    """
    for node in parting(graph, varying, along):
        targets = [each.node.target for each in _met_in(node) if each.group == group]
        if targets:
            axes = [name for name, other in node.meta.get("axes", ()) if other == group]
            axes += [name for name, _ in node.meta.get("axes", ())]
            line = node.meta.get("line", "")
            name = node.meta.get("called", str(node.target))
            axis = repr(axes[0] if axes else group)
            prints = all(getattr(target, "_opname", "") == PRINT for target in targets)
            told = parted(name, axis if axis != "None" else "None (without a name)", prints=prints)
            raise ValueError(f"at {line}: {told}")


def _met_in(node: Node) -> list[Met]:
    """What communicates in a loop or branch."""
    return [each for inner in inner_graphs(node) for each in met(inner)]


def parting(graph: Graph, varying: Collection[Node], along: Along) -> Iterator[Node]:
    """The loops and branches that devices may go through in different ways, at any depth."""
    for node in graph.nodes:
        inside = _inside(node, varying, along)
        if inside is None:
            continue
        if inside.parts:
            yield node
        for inner in inner_graphs(node):
            yield from parting(
                inner, varying_nodes(inner, _marked(inner, inside.inputs), along), along
            )
