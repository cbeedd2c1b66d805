"""A function of whole tensors -> its graph, with all that it does besides returning.

An ordinary training step writes: parameters, buffers, the state of its optimizer, ``.grad``.  Here
real tensors are replaced *above* autograd by stand-ins of their shape, so that gradients land on
the stand-ins, and what was written to one, or is its gradient, is a further result of the graph,
which itself writes nothing:

    opt.zero_grad(); loss = f(model(x)); loss.backward(); opt.step(); return loss

    (parameters, state of opt, x) --graph--> (loss, new parameters, new state, gradients)

Of results that ``backward()`` may go through later, the graph computes that, too, from cotangents
that it takes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from torchpmap._base.sources import users_line
from torchpmap._base.storages import own_strides
from torchpmap._base.torch_internals import FakeTensor
from torchpmap._trace.graphs import drop_dead, output_of, results_of, writes
from torchpmap._trace.optimizers import Numbers, Optimizers
from torchpmap._trace.passes import clean, protect_inputs
from torchpmap._trace.remat import without_writes
from torchpmap._trace.trace import recorded
from torchpmap._trace.traced_views import settle
from torchpmap._trace.transform_rules import TransformRules
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole_capture import Hook, Leaf, Replace, WholeCapture
from torchpmap._trace.whole_gradient import (
    given_are_leaves,
    is_differentiable,
    pull_back,
    refuse_others,
    split_off,
)
from torchpmap.random._streams import streams

Fun = Callable[[Sequence[torch.Tensor]], tuple[Any, Sequence[torch.Tensor]]]
"""Takes one tensor per argument; returns anything, and the tensors that are results."""


@dataclass(frozen=True, eq=False)
class WholeTrace:
    """What a function does with whole tensors."""

    graph: GraphModule
    """Takes what is captured, the arguments and ``cotangents``; returns the results, the new values
    of ``written`` and ``counted``, the gradients of ``graded`` and those of ``pulled``.  It writes
    nothing.
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
    counted: list[Numbers]
    """Of which it returns the vectors of the next call."""
    graded: list[torch.Tensor]
    """Leaves that it leaves another gradient on."""
    cleared: list[torch.Tensor]
    """Leaves on which it leaves none."""
    required: list[torch.Tensor]
    """Leaves that it lets require grad."""
    read_gradients: list[tuple[torch.Tensor, bool]]
    """Leaves of which it matters whether they had a gradient, and whether they had."""
    grad_of: dict[int, torch.Tensor]
    numbers: list[Numbers]
    """Of the optimizers that step."""
    cotangents: list[int]
    """The results that ``backward()`` may still go through."""
    overwritten: dict[int, str]
    """Others that require grad, and what torch says in their ``backward()``."""
    pulled: list[torch.Tensor]
    """Leaves, and arguments that were computed outside, that it reaches."""


def trace_whole(
    fun: Fun,
    arguments: Sequence[torch.Tensor],
    device: torch.device,
    seed: torch.Tensor,
    hook: Hook,
    known: Sequence[Optimizer] = (),
) -> WholeTrace:
    """Trace ``fun``; nothing runs.

    ``arguments``: real ones, for their kinds and gradients.  ``seed``: stands for the key of the
    random numbers of a call.  ``known``: optimizers that the function reaches.
    """
    capture = WholeCapture(device, hook)
    optimizers = Optimizers(capture, known)
    grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
    found: list[_Found] = []

    def flat(*given: torch.Tensor) -> list[torch.Tensor]:
        with ExitStack() as stack:
            for mode in (
                *(capture.views.entered(), Replace(capture), grad_mode),
                *(optimizers.watched(), streams(seed, None, "different")),
            ):
                stack.enter_context(mode)
            for real, x in zip(arguments, given, strict=True):
                capture.adopt(real, x, is_given=True)
            with given_are_leaves(capture), TransformRules():
                returned, results = fun(given)
            settle(results)
            results = [capture.substitute(x) for x in results]
            capture.check()
            optimizers.check()
            for numbers in optimizers.numbers:
                numbers.write_next()
            states = [*capture.tensors, *arguments]
            stand_ins = [capture.stand_ins[id(x)] for x in capture.tensors]
            leaves = list(capture.leaves.values())
            for leaf in leaves:
                leaf.after = leaf.gradient()
            refuse_others(results, [*stand_ins, *given, *(leaf.after for leaf in leaves)])
            answers = [is_differentiable(x) for x in results]
            ends = [x for x, answer in zip(results, answers, strict=True) if answer is True]
            cotangents = pull_back(capture, ends, given)
        capture.end()
        found.append(_Found(returned, answers, states, leaves, cotangents))
        kept = [x for leaf in leaves for x in (leaf.after, leaf.pulled) if x is not None]
        with torch.no_grad():
            return [x.detach() for x in (*results, *stand_ins, *given, *kept)]

    kinds = [(tuple(x.shape), x.dtype, own_strides(x)) for x in arguments]
    graph = recorded(flat, kinds, capture)
    graph = _functional(graph, capture)
    return _effects(graph, capture, optimizers, found[-1])


class _Found(NamedTuple):
    """What a function has done.  The graph returns the results, the values of ``states``, and of
    each leaf the gradients that there are: ``after`` and ``pulled``.
    """

    returned: Any
    answers: list[bool | str]
    """Whether each result is differentiable."""
    states: list[torch.Tensor]
    """What it closes over, and its arguments."""
    leaves: list[Leaf]
    cotangents: list[torch.Tensor]


def _functional(graph: GraphModule, capture: WholeCapture) -> GraphModule:
    """The graph without writes, with what is captured before the arguments."""
    nodes = graph.graph.nodes
    for node in reversed(list(nodes)):  # what Optimizer.step tells the profiler
        if getattr(node.target, "namespace", "") == "profiler" and not node.users:
            graph.graph.erase_node(node)
    drop_dead(graph.graph)
    _refuse_bodies(graph)
    capture.place(0)
    clean(graph)
    if writes(graph.graph):
        protect_inputs(graph)
        graph = without_writes(graph, capture.record)
        clean(graph)
    return graph


def _refuse_bodies(graph: GraphModule) -> None:
    """Raise if the graph uses a tensor of the body of a loop or branch, which is no part of it."""
    here = set(graph.graph.nodes)
    sources = {source for node in here for source in node.all_input_nodes}
    constants = graph.graph.find_nodes(op="get_attr")
    if not sources <= here or any(
        isinstance(getattr(graph, str(node.target)), FakeTensor) for node in constants
    ):
        raise Untraceable(
            "it uses a tensor of the body of a loop or branch outside of it",
            users_line(),
            "what the body returns",
        )


def _effects(
    graph: GraphModule, capture: WholeCapture, optimizers: Optimizers, found: _Found
) -> WholeTrace:
    """Of the results, keep those that tell of an effect; of what is captured, what is used."""
    outputs, num, states = results_of(graph.graph), len(found.answers), found.states
    places, closed_over = split_off(graph, capture.tensors, found.cotangents)
    given = places[len(closed_over) :]
    before = [*places[: len(states) - len(given)], *given]  # not what only the backward pass meets
    changed = _written(states, before, outputs[num:])
    vectors = {id(each.vector): each for each in optimizers.numbers}
    written = [pair for pair in changed if id(pair[0]) not in vectors]
    counted = [(vectors[id(x)], node) for x, node in changed if id(x) in vectors]
    new = iter(outputs[num + len(states) :])
    graded, pulled = [], []
    for leaf in found.leaves:
        if leaf.after is not None:  # it may be new, or be used, or be written to
            leaf.ask()
            node = next(new)
            graded += [] if leaf.after is leaf.before else [(leaf.real, node)]
        if leaf.pulled is not None:
            pulled.append((leaf.real, next(new)))
    gone = [leaf for leaf in found.leaves if leaf.after is None]
    effects = (*written, *counted, *graded, *pulled)
    kept = (*outputs[:num], *(node for _, node in effects))
    output_of(graph.graph).args = (kept,)
    drop_dead(graph.graph)
    captured = [x for x, place in zip(closed_over, places, strict=False) if place.users]
    for place in places[: len(closed_over)]:
        if not place.users:
            graph.graph.erase_node(place)
    graph.recompile()
    return WholeTrace(
        graph=graph,
        captured=captured,
        leaves=[leaf.real for leaf in found.leaves if leaf.is_stored],
        met=[x for x in closed_over if id(x) not in vectors],
        returned=found.returned,
        num_results=num,
        written=[real for real, _ in written],
        counted=[numbers for numbers, _ in counted],
        graded=[real for real, _ in graded],
        cleared=[leaf.real for leaf in gone if leaf.is_cleared or leaf.before is not None],
        required=[x.real for x in found.leaves if not (x.is_frozen() or x.real.requires_grad)],
        read_gradients=[(x.real, x.before is not None) for x in found.leaves if x.was_read],
        grad_of=capture.grad_of,
        numbers=optimizers.numbers,
        cotangents=[k for k, answer in enumerate(found.answers) if answer is True],
        overwritten={k: x for k, x in enumerate(found.answers) if isinstance(x, str)},
        pulled=[real for real, _ in pulled],
    )


def _written(
    states: Sequence[torch.Tensor], before: Sequence[Node], after: Sequence[Node]
) -> list[tuple[torch.Tensor, Node]]:
    """The states that have new values, and these."""
    each = zip(states, before, after, strict=False)
    written = [(real, node) for real, place, node in each if node is not place]
    for real, node in written:
        value = node.meta["val"]
        if value.shape != real.shape or value.dtype != real.dtype:
            raise Untraceable(
                "it gives a tensor from outside another shape or dtype",
                users_line(),
                "a new tensor",
            )
    return written
