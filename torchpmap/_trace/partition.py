"""A graph of a function and its gradient -> a forward and a backward graph.

The forward graph computes all that depends on no cotangent.  The values of it that the backward
graph reads are *residuals*: further outputs of the forward graph, which stay on the devices.  So
nothing is computed twice, as in ``jax.linearize``.

functorch's ``default_partition`` is not used: here views are remade in the backward graph, because
blocks are stored contiguous, and effects come as a set of nodes that belong to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.storages import memory_order
from torchpmap._base.torch_internals import LazyGraphModule
from torchpmap._trace.graphs import (
    call,
    copied_whole,
    drop_dead,
    placeholders,
    results_of,
    storages,
    value_of,
)

_aten = torch.ops.aten
_CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True)
class Halves:
    """The two graphs; ``backward`` takes the residuals, then the cotangents."""

    forward: GraphModule
    backward: GraphModule
    num_residuals: int
    backward_inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shape and dtype of each input of ``backward``."""


def split(
    joint: GraphModule, num_outputs: int, num_cotangents: int, backward: Collection[Node] = ()
) -> Halves:
    """Split ``joint``, which must not write to tensors.  Its first ``num_outputs`` outputs belong
    to the forward graph, and its last ``num_cotangents`` inputs to the backward graph.

    ``backward``: nodes of the backward graph that depend on no cotangent.
    """
    nodes = list(joint.graph.nodes)
    cotangents = placeholders(joint.graph)[-num_cotangents:]
    results = results_of(joint.graph)
    outputs, gradients = results[:num_outputs], results[num_outputs:]
    own = set(backward) - _sources(outputs)
    # what the forward graph computes together is taken apart there: a tuple cannot be stored
    own -= {x for x in own if x.target is operator.getitem and x.all_input_nodes[0] not in own}
    late = {*cotangents, *own}
    for node in nodes:
        if node.op != "output" and any(source in late for source in node.all_input_nodes):
            late.add(node)
    assert not late.intersection(outputs)
    wanted = [source for node in nodes if node in late for source in node.all_input_nodes]
    computed = [node for node in gradients if isinstance(node, Node)]
    attributes = {node for node in nodes if node.op == "get_attr"}  # constants, bodies of loops
    here = late | attributes
    crossing = [node for node in dict.fromkeys([*wanted, *computed]) if node not in here]
    crossings = _cross(joint.graph, crossing, late)
    again, residuals = crossings.again, crossings.stored
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    forward = _graph([node for node in nodes if node not in late], [], [*outputs, *residuals])
    backward_graph = _graph(
        [node for node in nodes if node in here | again and node not in cotangents],
        [*residuals, *cotangents],
        [crossings.restored.get(node, node) for node in gradients],
    )
    kinds = tuple((tuple(v.shape), v.dtype) for v in map(value_of, [*residuals, *cotangents]))
    # each with loops of its own: what is done with those of one graph is not done with the others
    first, second = (
        copied_whole(LazyGraphModule(joint, half)) for half in (forward, backward_graph)
    )
    return Halves(first, second, len(residuals), kinds)


def _sources(nodes: Sequence[Node]) -> set[Node]:
    """The nodes, and all nodes that they are computed from."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


@dataclass
class _Crossings:
    """How nodes of the forward graph reach the backward graph."""

    stored: list[Node]
    """The residuals."""
    again: set[Node]
    """Views that the backward graph makes for itself."""
    restored: dict[Node, Node]
    """The node that replaces one in the backward graph, if that is not stored as it is."""


def _cross(graph: Graph, crossing: Sequence[Node], late: set[Node]) -> _Crossings:
    """Choose what is stored so that the backward graph can read ``crossing``.

    A stored block is contiguous, but the backward graph was traced with the strides of the original
    value: views in it would fail, or read other elements.  So the backward graph makes its views
    again, from their base.  A block that is dense in another order of its dims is stored with its
    dims permuted to memory order, and permuted back.
    """
    chains = [_views_of(node) for node in crossing]
    exact = any("as_strided" in str(node.target) for node in late)  # may read beyond its operand
    smallest = {chain[-1] if exact else min(reversed(chain), key=_size) for chain in chains}
    kept: dict[Node, None] = {}
    again: set[Node] = set()
    for chain in chains:
        at_hand = [k for k, n in enumerate(chain) if n in smallest or n.op == "placeholder"]
        kept[chain[at_hand[-1]]] = None
        again.update(chain[: at_hand[-1]])
    stored: list[Node] = []
    restored: dict[Node, Node] = {}
    for node in kept:
        if value_of(node).is_contiguous() and _viewed(node) is None:
            stored.append(node)
            continue
        block, restored[node] = _dense(graph, node)
        stored.append(block)
        readers = late | again
        node.replace_all_uses_with(restored[node], readers.__contains__)
    again.update(restored.values())
    return _Crossings(stored, again, restored)


def _size(node: Node) -> float:
    """Number of elements; infinite for a node of several tensors, which cannot be stored as one."""
    value = value_of(node)
    return value.numel() if isinstance(value, torch.Tensor) else math.inf


def _views_of(node: Node) -> list[Node]:
    """A node, what it is a view of, and so on."""
    chain = [node]
    while (source := _viewed(chain[-1])) is not None:
        chain.append(source)
    return chain


def _viewed(node: Node) -> Node | None:
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if not storages(source) & storages(node):
        return None
    if node.target is operator.getitem and _viewed(source) is None:
        return None  # one of the results of an operation that makes no views
    return source


def _dense(graph: Graph, node: Node) -> tuple[Node, Node]:
    """(the elements of a node in memory order, the node made of them again)."""
    order = memory_order(value_of(node))
    with graph.inserting_after(node):
        stored = call(graph, _aten.permute.default, node, order)
    if _viewed(node) is not None or not value_of(stored).is_contiguous():
        # a view of a block that need not be kept, or one with gaps
        with graph.inserting_after(stored):
            stored = call(graph, _aten.clone.default, stored, memory_format=_CONTIGUOUS)
    with graph.inserting_after(stored):
        inverse = [order.index(dim) for dim in range(len(order))]
        return stored, call(graph, _aten.permute.default, stored, inverse)


def _graph(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> Graph:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    drop_dead(graph)
    return graph
