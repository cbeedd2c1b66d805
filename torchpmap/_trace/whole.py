"""A function of whole tensors -> its graph, with all that it does besides returning.

An ordinary training step writes: parameters, buffers, the state of its optimizer, ``.grad``.  Here
real tensors are replaced *above* autograd by stand-ins of their shape, so that gradients land on
the stand-ins, and what was written to one, or is its gradient, is a further result of the graph,
which itself writes nothing:

    opt.zero_grad(); loss = f(model(x)); loss.backward(); opt.step(); return loss

    (parameters, state of opt, x) --graph--> (loss, new parameters, new state, gradients)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import FakeTensorMode
from torchpmap._trace.capture import KeepData
from torchpmap._trace.graphs import is_kept, output_of, placeholders, results_of, writes
from torchpmap._trace.optimizers import Optimizers
from torchpmap._trace.passes import drop_copies, drop_detaches, drop_in_place_views, protect_inputs
from torchpmap._trace.remat import Record, without_writes
from torchpmap._trace.trace import Untraceable, recorded
from torchpmap._trace.whole_capture import Hook, Replace, WholeCapture
from torchpmap.random._streams import streams

Fun = Callable[[Sequence[torch.Tensor]], tuple[Any, Sequence[torch.Tensor]]]
"""Takes one tensor per argument; returns anything, and the tensors that are results."""


@dataclass(frozen=True, eq=False)
class WholeTrace:
    """What a function does with whole tensors."""

    graph: GraphModule
    """Takes what is captured and the arguments; returns the results, the new values of ``written``
    and the gradients of ``graded``.  It writes nothing.
    """
    captured: list[torch.Tensor]
    leaves: list[torch.Tensor]
    """Tensors that gradients are stored in."""
    met: list[torch.Tensor]
    """All that the function closes over, also what the graph does not take."""
    returned: Any
    num_results: int
    written: list[torch.Tensor]
    """Tensors that the function writes to, among them arguments of the first call."""
    graded: list[torch.Tensor]
    """Leaves that it leaves another gradient on."""
    cleared: list[torch.Tensor]
    """Leaves on which it leaves none."""
    asked: list[tuple[torch.Tensor, bool]]
    """Leaves of which it matters whether they had a gradient, and whether they had."""
    grad_of: dict[int, torch.Tensor]
    optimizers: Optimizers
    is_differentiable: bool
    """Whether ``backward()`` may still go through a result."""


def trace_whole(
    fun: Fun,
    arguments: Sequence[torch.Tensor],
    device: torch.device,
    seed: torch.Tensor,
    hook: Hook,
    known: Sequence[Optimizer] = (),
) -> WholeTrace:
    """Trace ``fun``; nothing runs.

    Args:
        arguments: real ones, for their kinds and gradients.
        seed: stands for the key of the random numbers of a call.
        known: optimizers that the function reaches.
    """
    record = Record()
    capture = WholeCapture(FakeTensorMode(allow_non_fake_inputs=True), device, record, hook)
    keep = KeepData(capture)
    optimizers = Optimizers(capture, known)
    grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
    found: dict[str, Any] = {}

    def flat(*given: torch.Tensor) -> list[torch.Tensor]:
        with ExitStack() as stack:
            for mode in (
                *(capture.views.entered(), record.entered(), capture, keep),
                *(Replace(capture, keep), grad_mode, optimizers.watched()),
                streams(seed, None, "different"),
            ):
                stack.enter_context(mode)
            for real, x in zip(arguments, given, strict=True):
                capture.adopt(real, x)
            returned, results = fun(given)
            results = [capture.substitute(x) for x in results]
        capture.check()
        optimizers.check()
        found["returned"], found["num"] = returned, len(results)
        found["states"] = [*capture.captured, *arguments]
        stand_ins = [capture.stand_ins[id(x)] for x in capture.captured]
        computed = [x for x in (*results, *stand_ins, *given) if x.grad_fn is not None]
        found["is_differentiable"] = any(map(_is_differentiable, computed))
        found["leaves"] = list(capture.leaves.values())
        grads = [leaf.gradient() for leaf in found["leaves"]]
        found["grads"] = grads
        kept = [grad for grad in grads if grad is not None]
        with torch.no_grad():
            return [x.detach() for x in (*results, *stand_ins, *given, *kept)]

    kinds = [(tuple(x.shape), x.dtype) for x in arguments]
    graph = recorded(flat, kinds, capture._fake_mode, device)
    graph = _functional(graph, capture, record)
    return _effects(graph, capture, optimizers, found)


def _functional(graph: GraphModule, capture: WholeCapture, record: Record) -> GraphModule:
    """The graph without writes, with what is captured before the arguments."""
    nodes = graph.graph.nodes
    for node in reversed(list(nodes)):  # what Optimizer.step tells the profiler
        if getattr(node.target, "namespace", "") == "profiler" and not node.users:
            graph.graph.erase_node(node)
    for node in reversed(capture.nodes):
        next(iter(nodes)).prepend(node)
    if writes(graph.graph):
        protect_inputs(graph)
        drop_in_place_views(graph)
        graph = without_writes(graph, record)
    drop_detaches(graph)
    drop_copies(graph)
    return graph


def _effects(
    graph: GraphModule, capture: WholeCapture, optimizers: Optimizers, found: dict[str, Any]
) -> WholeTrace:
    """Of the results, keep those that tell of an effect; of what is captured, what is used."""
    outputs, num, states = results_of(graph.graph), found["num"], found["states"]
    after = outputs[num : num + len(states)]
    places = placeholders(graph.graph)
    written = [
        (real, node)
        for real, node, place in zip(states, after, places, strict=True)
        if node is not place
    ]
    for real, node in written:
        value = node.meta["val"]
        if value.shape != real.shape or value.dtype != real.dtype:
            raise Untraceable(
                "it gives a tensor from outside another shape or dtype",
                users_line(),
                "a new tensor",
            )
    new = iter(outputs[num + len(states) :])
    graded, cleared, asked = [], [], []
    for leaf, grad in zip(found["leaves"], found["grads"], strict=True):
        node = None if grad is None else next(new)
        if grad is None and (leaf.is_cleared or leaf.before is not None):
            cleared.append(leaf.real)
        elif grad is not None and grad is not leaf.before:
            graded.append((leaf.real, node))
            leaf.ask()
        elif leaf.before is not None:  # which may be used, or written to
            leaf.ask()
        if leaf.was_asked:
            asked.append((leaf.real, leaf.before is not None))
    kept = (*outputs[:num], *(node for _, node in written), *(node for _, node in graded))
    output_of(graph.graph).args = (kept,)
    graph.graph.eliminate_dead_code(is_impure_node=is_kept)
    captured = []
    for place, real in zip(places, capture.captured, strict=False):
        if place.users:
            captured.append(real)
        else:
            graph.graph.erase_node(place)
    graph.recompile()
    return WholeTrace(
        graph=graph,
        captured=captured,
        leaves=[leaf.real for leaf in found["leaves"]],
        met=list(capture.captured),
        returned=found["returned"],
        num_results=num,
        written=[real for real, _ in written],
        graded=[real for real, _ in graded],
        cleared=cleared,
        asked=asked,
        grad_of=capture.grad_of,
        optimizers=optimizers,
        is_differentiable=found["is_differentiable"],
    )


def _is_differentiable(result: torch.Tensor) -> bool:
    """Whether ``backward()`` has not yet freed what a result was computed from."""
    waiting, seen = [result.grad_fn], set()
    if result.grad_fn is None:
        return result.requires_grad
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
