"""What is asked of a graph: its nodes by their part, the memory of their values, what writes, and
the graphs inside it: bodies of loops, and branches.

These are attributes of the module that owns the graph, and arguments of torch's operations
``scan``, ``while_loop`` and ``cond``:

    scan(body, [init...], [xs...], (reads...))                  body: init, row of xs, reads
    while_loop(test, body, (init...), (reads...))               both: init, reads
    cond(pred, on_true, on_false, (reads...))                   both: reads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.torch_internals import LazyGraphModule, OpOverload, written_values

GRAPHS = "graphs"
"""In the ``meta`` of such a node: its graphs, for a graph that no module owns yet."""

SCAN, WHILE, COND = "scan", "while_loop", "cond"


def kind_of_node(node: Node) -> str:
    """``SCAN``, ``WHILE``, ``COND``, or empty for any other node."""
    name = getattr(node.target, "_name", "")
    is_loop = node.op == "call_function" and name in (SCAN, WHILE, COND)
    return name if is_loop and getattr(node.target, "namespace", "") == "higher_order" else ""


def inner_modules(node: Node) -> list[GraphModule]:
    if GRAPHS in node.meta:
        return list(node.meta[GRAPHS])
    owner = node.graph.owning_module
    if node.op != "call_function" or owner is None:
        return []
    sources = [x for x in node.args if isinstance(x, Node) and x.op == "get_attr"]
    values = [getattr(owner, str(source.target), None) for source in sources]
    return [value for value in values if isinstance(value, GraphModule)]


def copied(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def copied_whole(module: GraphModule) -> GraphModule:
    """A copy of a graph with copies of the graphs inside it."""
    copy = LazyGraphModule(module, copied(module.graph))
    for name, child in copy.named_children():
        if isinstance(child, GraphModule):
            setattr(copy, name, copied_whole(child))
    for node in copy.graph.nodes:
        node.meta.pop(GRAPHS, None)  # they are attributes now
    return copy


def inner_graphs(node: Node) -> list[Graph]:
    return [module.graph for module in inner_modules(node)]


def placeholders(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def output_of(graph: Graph) -> Node:
    """The node that returns the results."""
    (output,) = graph.find_nodes(op="output")
    return output


def results_of(graph: Graph) -> list[Any]:
    found = output_of(graph).args[0]
    return list(found) if isinstance(found, list | tuple) else [found]


def is_kept(node: Node) -> bool:
    """Whether a node has an effect, or a graph inside it has one, so that it stays if its results
    are not used.
    """
    if getattr(node.target, "namespace", None) == "_c10d_functional":
        return False  # torch says it of waiting for a collective
    return node.is_impure() or has_effects(node)


def drop_dead(graph: Graph) -> None:
    """Remove what nothing uses; torch's own also checks the graph, which takes longer than this."""
    for node in reversed(graph.nodes):
        if not node.users and not is_kept(node):
            graph.erase_node(node)


def has_effects(node: Node) -> bool:
    """Whether a graph inside a node has effects."""
    return any(map(acts, inner_graphs(node)))


def shows(graph: Graph) -> bool:
    """Whether graphs inside a graph print or check: an operation in them has no result, or is a
    scan of such (_trace/compiled_loops).
    """
    return any(
        shows(inside) or any(map(_shows, inside.nodes))
        for node in graph.nodes
        for inside in inner_graphs(node)
    )


def _shows(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return not target._schema.returns or target._opname == "scan_in_order"


def acts(graph: Graph) -> bool:
    """Whether a graph does something besides computing its results."""
    return any(map(is_kept, operations(graph)))


def storages(node: Node) -> set[int]:
    """The memory of the values of a node."""
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else [values]
    return {x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)}


def written_storages(graph: Graph) -> dict[int, Node]:
    """Storage -> first node that writes to it."""
    written: dict[int, Node] = {}
    for node in operations(graph):
        if isinstance(node.target, OpOverload):
            for target in written_values(node.target, node.args, node.kwargs):
                if isinstance(target, Node):
                    written.setdefault(target.meta["val"].untyped_storage()._cdata, node)
    return written


def writes(graph: Graph) -> bool:
    """Whether an operation of a graph writes to a tensor."""
    targets = [node.target for node in graph.nodes]
    return any(isinstance(t, OpOverload) and t._schema.is_mutable for t in targets)


def copy_written(graph: Graph, inputs: Sequence[Node], last: Node) -> bool:
    """Let writes to inputs go to copies, after the node ``last``; whether there are any."""
    written, found = written_storages(graph), False
    for node in inputs:
        if not storages(node).isdisjoint(written):
            with graph.inserting_after(last):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copy)
            copy.replace_input_with(copy, node)
            found = True
    return found


def operations(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]
