"""The ``backward()`` that may follow outside of a traced function, as a part of its graph.

    captured, arguments --graph--> results, effects
    captured, arguments, cotangents ----> results, effects, gradients of leaves

A cotangent that is not there is no zero: 0 * inf is NaN.  So ``given_only`` takes out of a graph
all that is computed from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.ambient import ambient, applied, for_graph
from torchpmap._base.inexact import is_inexact
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import outside_modes, torch_function_off
from torchpmap._trace.capture import autograd_nodes
from torchpmap._trace.graphs import copied_whole, drop_dead, output_of, placeholders, results_of
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole_capture import WholeCapture

Tensors = Sequence[torch.Tensor]


def is_differentiable(result: torch.Tensor) -> bool | str:
    """Whether ``backward()`` has not yet freed what a result was computed from; what torch says if
    that was written to.
    """
    answer: bool | str = result.grad_fn is not None
    for node in autograd_nodes([result]):
        refusal = _refusal(node)
        if "freed" in refusal:
            return False
        answer = refusal or answer
    return answer


def _refusal(node: Any) -> str:
    """Why ``backward()`` could not use what a node has saved; empty if it could."""
    try:
        for name in dir(node):
            # a checkpoint allows one look at what a torch.autograd.Function has saved: not here
            if name.startswith("_saved_") or name == "_raw_saved_tensors":
                getattr(node, name)
    except RuntimeError as error:
        return str(error)
    return ""


def refuse_others(results: Tensors, states: Sequence[torch.Tensor | None]) -> None:
    """Raise if ``backward()`` could follow where no cotangent of a result comes by.

    states: what the function leaves behind: tensors of the caller, and gradients.
    """
    if any(x is not None and is_differentiable(x) is True for x in states):
        raise Untraceable(
            "backward() may follow through a tensor or a gradient that it writes",
            users_line(),
            "torch.no_grad() where it writes, or x.detach()",
        )
    if any(x.grad_fn is None and x.requires_grad for x in results):
        raise Untraceable("it returns a new leaf that requires grad", users_line(), "x.detach()")


@contextlib.contextmanager
def given_are_leaves(capture: WholeCapture) -> Iterator[None]:
    """A block that calls the function: arguments that were computed outside are leaves in it, which
    torch lets no operation write to.
    """
    try:
        yield
    except RuntimeError as error:
        computed = [leaf for leaf in capture.leaves.values() if not leaf.is_stored]
        if not computed or "a leaf Variable that requires grad" not in str(error):
            raise
        what = "it writes to an argument that requires grad"
        raise Untraceable(what, users_line(), "x.clone()") from error


def pull_back(capture: WholeCapture, results: Tensors, arguments: Tensors) -> list[torch.Tensor]:
    """Real tensors that stand for the cotangents of results; each leaf hears what it gets from
    them.
    """
    if not results:
        return []
    with torch_function_off():
        with outside_modes():
            kinds = [(tuple(x.shape), x.dtype) for x in results]
            cotangents = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]
        given = [capture.substitute(x) for x in cotangents]
    if len(results) > 1 and any(map(_may_mix, autograd_nodes(results))):
        raise Untraceable(
            "several results require grad, and a torch.autograd.Function of several results is "
            "among what they are computed by: what it does with a cotangent that is not there is "
            "not known",
            users_line(),
            "one result, or x.detach() for others",
        )
    leaves = list(capture.leaves.values())
    stand_ins = [leaf.stand_in for leaf in leaves]
    frozen = [leaf.is_frozen() and is_inexact(leaf.stand_in) for leaf in leaves]
    before = {id(x): x._version for x in (*capture.stand_ins.values(), *arguments)}
    capture.is_outside = True
    try:
        # autocast around the call is not around the backward pass
        with applied(for_graph(ambient())):
            for stand_in, is_frozen in zip(stand_ins, frozen, strict=True):
                stand_in.requires_grad_(stand_in.requires_grad or is_frozen)
            gradients = torch.autograd.grad(results, stand_ins, given, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        why = f"its derivative cannot be traced ({error})"
        raise Untraceable(why, users_line(), "torch.no_grad() around the call") from error
    if any(is_frozen and x is not None for is_frozen, x in zip(frozen, gradients, strict=True)):
        raise Untraceable(
            "backward() may follow to a parameter that it freezes",
            users_line(),
            "x.detach() for its results",
        )
    after = [*capture.stand_ins.values(), *arguments]
    if any(x._version != before.get(id(x), 0) for x in after):
        raise Untraceable(
            "its backward pass, which runs outside of it, writes to a tensor",
            users_line(),
            "loss.backward() in the function",
        )
    if all(gradient is None for gradient in gradients):
        raise Untraceable("its results require grad of new leaves", users_line(), "x.detach()")
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.pulled = gradient
    return cotangents


def _may_mix(node: Any) -> bool:
    """Whether a node is a ``torch.autograd.Function`` of several results: its formula need not be
    linear in their cotangents.
    """
    is_users = isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_users and len(getattr(node, "_input_metadata", (0, 0))) > 1


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
    if len(given) == count:
        return graph, results_of(graph.graph)
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
    drop_dead(graph.graph)
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
