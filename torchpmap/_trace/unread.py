"""Outputs of scans that nothing reads.

A scan that a gradient may be taken of returns the carry of each step too (_loops/scan_node.py).
For most scans of a backward pass no operation reads it: what is summed up over the steps, such as
the gradients of weights, would be stored once for each step::

    carry, ys, kept = scan(body, ...)       ->      carry, ys = scan(body, ...)
    return carry, ys                                return carry, ys

What a body computed for such outputs alone goes as well, and so do inputs that only this used.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from torchpmap._trace.graphs import (
    SCAN,
    inner_modules,
    is_kept,
    kind_of_node,
    output_of,
    placeholders,
    results_of,
)


def drop_unread(module: GraphModule) -> None:
    """Remove dead code, and outputs of scans that nothing reads, in a graph and those inside it."""
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        if not node.users and not is_kept(node):
            graph.erase_node(node)
            continue
        is_scan = kind_of_node(node) == SCAN
        if is_scan:
            _drop_outputs(node)
        for inner in inner_modules(node) if node.op == "call_function" else ():
            drop_unread(inner)
        if is_scan:
            drop_unused_inputs(node)


def _drop_outputs(node: Node) -> None:
    (body,) = inner_modules(node)
    results, num_carry = results_of(body.graph), len(node.args[1])  # type: ignore[arg-type]
    read = {user.args[1] for user in node.users}
    kept = [k for k in range(len(results)) if k < num_carry or k in read]
    kept = (
        kept or list(range(len(results)))[:1]
    )  # a loop of torch has a result, if its body has one
    output_of(body.graph).args = (tuple(results[k] for k in kept),)
    for user in list(node.users):
        user.args = (node, kept.index(user.args[1]))  # type: ignore[arg-type]
    node.meta["val"] = tuple(node.meta["val"][k] for k in kept)


def drop_unused_inputs(node: Node) -> None:
    """Remove rows and reads of a scan that its body does not use."""
    (body,) = inner_modules(node)
    init, xs, reads = (list(each) for each in node.args[1:])  # type: ignore[arg-type]
    places = placeholders(body.graph)[len(init) :]
    for_xs, for_reads = places[: len(xs)], places[len(xs) :]
    used = [k for k, place in enumerate(for_xs) if place.users] or [0]  # one gives the length
    read = [k for k, place in enumerate(for_reads) if place.users]
    kept = {*(for_xs[k] for k in used), *(for_reads[k] for k in read)}
    for place in places:
        if place not in kept:
            body.graph.erase_node(place)
    body.recompile()
    node.args = (node.args[0], init, [xs[k] for k in used], tuple(reads[k] for k in read))
