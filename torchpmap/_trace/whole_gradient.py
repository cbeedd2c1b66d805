"""The ``backward()`` that may follow outside of a traced function, as a part of its graph.

    captured, arguments --graph--> results, effects
    captured, arguments, cotangents ----> results, effects, gradients of leaves

A cotangent that is not there is no zero: 0 * inf is NaN.  So ``given_only`` takes out of a graph
all that is computed from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import outside_modes, torch_function_off
from torchpmap._trace.graphs import copied_whole, is_kept, output_of, placeholders, results_of
from torchpmap._trace.trace import Untraceable
from torchpmap._trace.whole_capture import WholeCapture

Tensors = Sequence[torch.Tensor]


def is_differentiable(result: torch.Tensor) -> bool:
    """Whether ``backward()`` has not yet freed what a result was computed from."""
    waiting, seen = [result.grad_fn], set()
    if result.grad_fn is None:
        return False
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
        except RuntimeError:  # freed
            return False
        waiting += [source for source, _ in node.next_functions]
    return True


def refuse_others(results: Tensors, states: Tensors) -> None:
    """Raise if ``backward()`` could follow where no cotangent of a result comes by."""
    if any(is_differentiable(x) for x in states):
        raise Untraceable(
            "backward() may follow through a tensor that it writes",
            users_line(),
            "torch.no_grad() where it writes, or x.detach()",
        )
    if any(x.grad_fn is None and x.requires_grad for x in results):
        raise Untraceable("it returns a new leaf that requires grad", users_line(), "x.detach()")


def pulled_back(capture: WholeCapture, results: Tensors) -> tuple[list[Any], list[Any]]:
    """Real tensors that stand for the cotangents of results, and what the stand-ins of all leaves
    get from them: a gradient or None.
    """
    if not results:
        return [], []
    with torch_function_off():
        with outside_modes():
            kinds = [(tuple(x.shape), x.dtype) for x in results]
            cotangents = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]
        given = [capture.substitute(x) for x in cotangents]
    leaves = [leaf.stand_in for leaf in capture.leaves.values()]
    capture.is_outside = True
    try:
        gradients = list(torch.autograd.grad(results, leaves, given, allow_unused=True))
    except (RuntimeError, NotImplementedError) as error:
        why = f"its derivative cannot be traced ({error})"
        raise Untraceable(why, users_line(), "torch.no_grad() around the call") from error
    if all(gradient is None for gradient in gradients):
        raise Untraceable("its results require grad of new leaves", users_line(), "x.detach()")
    return cotangents, gradients


def split_off(
    graph: GraphModule, captured: Tensors, cotangents: Tensors
) -> tuple[list[Node], list[torch.Tensor]]:
    """Move the cotangents, which are among what is ``captured``, behind all other inputs: these,
    and the rest of what is captured.
    """
    ids, nodes, places = set(map(id, cotangents)), graph.graph.nodes, placeholders(graph.graph)
    last = {place for place, x in zip(places, captured, strict=False) if id(x) in ids}
    places = [place for place in places if place not in last]
    if last:
        for place in reversed(places):
            next(iter(nodes)).prepend(place)
    return places, [x for x in captured if id(x) not in ids]


def given_only(graph: GraphModule, count: int, given: Collection[int]) -> tuple[GraphModule, Any]:
    """The graph for those of its last ``count`` inputs that are ``given``, and its results; those
    that nothing gives a value are None, and left out.
    """
    graph = copied_whole(graph)
    cotangents = placeholders(graph.graph)[-count:]
    late = set(cotangents)
    missing = {place for k, place in enumerate(cotangents) if k not in given}
    for node in list(graph.graph.nodes):
        sources = [source for source in node.all_input_nodes if source in late]
        if not sources or node.op == "output":
            continue
        late.add(node)
        gone = [source for source in sources if source in missing]
        if len(gone) == len(sources):  # it is linear in what is computed from cotangents
            missing.add(node)
            continue
        for source in gone:
            node.replace_input_with(source, _zeros(graph.graph, source, node))
    results = [None if node in missing else node for node in results_of(graph.graph)]
    output_of(graph.graph).args = (tuple(node for node in results if node is not None),)
    graph.graph.eliminate_dead_code(is_impure_node=is_kept)
    for place in missing.intersection(cotangents):
        graph.graph.erase_node(place)
    graph.recompile()
    return graph, results


def _zeros(graph: Graph, like: Node, before: Node) -> Node:
    value = like.meta["val"]
    kind = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(before):
        node = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), kind)
    node.meta["val"] = value
    return node
