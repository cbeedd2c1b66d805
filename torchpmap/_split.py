"""A graph of a function and its gradient -> a forward and a backward graph.

What depends on no cotangent is computed by the forward graph; what the backward graph reads of it
are its *residuals*, further outputs of the forward graph that stay on the devices.  So nothing is
computed twice, as in ``jax.linearize``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["Halves", "split"]


@dataclass(frozen=True)
class Halves:
    """The two graphs; ``backward`` takes the residuals, then the cotangents."""

    forward: GraphModule
    backward: GraphModule
    num_residuals: int
    backward_inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shape and dtype of what ``backward`` takes."""


def split(joint: GraphModule, num_outputs: int, num_cotangents: int) -> Halves:
    """Split ``joint``, whose first ``num_outputs`` outputs belong to the forward graph, and whose
    last ``num_cotangents`` inputs to the backward graph.
    """
    if any(_writes(node) for node in joint.graph.nodes):
        joint = _without_writes(joint)
    nodes = list(joint.graph.nodes)
    cotangents = [node for node in nodes if node.op == "placeholder"][-num_cotangents:]
    late = set(cotangents)
    for node in nodes:
        if node.op != "output" and any(source in late for source in node.all_input_nodes):
            late.add(node)
    (output,) = (node for node in nodes if node.op == "output")
    outputs, gradients = output.args[0][:num_outputs], output.args[0][num_outputs:]
    assert not late.intersection(outputs)
    wanted = [source for node in nodes if node in late for source in node.all_input_nodes]
    residuals = [
        node
        for node in dict.fromkeys([*wanted, *gradients])
        if isinstance(node, Node) and node not in late
    ]
    residuals = [_contiguous(joint.graph, node) for node in residuals]
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    outputs, gradients = output.args[0][:num_outputs], output.args[0][num_outputs:]
    early = [node for node in nodes if node not in late]
    forward = _graph(early, [], [*outputs, *residuals])
    backward = _graph(
        [node for node in nodes if node in late and node not in cotangents],
        [*residuals, *cotangents],
        gradients,
    )
    kinds = tuple((tuple(v.shape), v.dtype) for v in map(_value, [*residuals, *cotangents]))
    return Halves(GraphModule(joint, forward), GraphModule(joint, backward), len(residuals), kinds)


def _value(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _without_writes(graph: GraphModule) -> GraphModule:
    """In two graphs, writes would no longer be in order with the reads of what they change."""
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    graph.recompile()
    functional = torch.func.functionalize(lambda *xs: graph.forward(*xs), remove="mutations")
    with examples[0].fake_mode:
        result: GraphModule = make_fx(functional)(*examples)
    result.graph.eliminate_dead_code()
    return result


def _contiguous(graph: Graph, node: Node) -> Node:
    """What is compiled later takes blocks to be contiguous."""
    value = _value(node)
    if value.is_contiguous():
        return node
    with graph.inserting_after(node):
        copy = graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    copy.meta = {**node.meta, "val": value.contiguous()}
    node.replace_all_uses_with(copy)
    copy.replace_input_with(copy, node)
    return copy


def _graph(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> Graph:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph.eliminate_dead_code()
    return graph
