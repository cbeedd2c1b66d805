"""``torch.utils.checkpoint`` in mapped functions: the gradient computes its contents again.

In PyTorch a checkpoint is a pair of hooks on the tensors that autograd saves, which ``torch.func``
refuses.  Here the trace records the operations of a checkpointed function (a ``Region``), and those
of its backward pass; in the finished graph, copies of the former are put before the latter.  So
values and gradients are the same as without a checkpoint under every transform, and so are random
numbers, which are computed from keys.

Without a graph (``compile=False``) torch's own hooks do the work, except under a transform of
``torch.func``: there nothing is computed again.
"""

from __future__ import annotations

import contextlib
import operator
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.fx import Graph, GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    fake_mode,
    has_transforms,
    next_node_number,
    tracing_mode,
)
from torchpmap._base.torch_versions import checkpoint_bracket
from torchpmap._trace.graphs import (
    WHILE,
    added,
    call,
    current_capture,
    drop_dead,
    inner_graphs,
    is_kept,
    is_view,
    kind_of_node,
    nested,
    operations,
    placeholders,
)
from torchpmap._trace.repetition import keep_places
from torchpmap.random._streams import active_streams, repeated

_aten = torch.ops.aten
_SAVED = (
    torch_checkpoint.CheckpointPolicy.MUST_SAVE,
    torch_checkpoint.CheckpointPolicy.PREFER_SAVE,
)

# -- while a function runs -------------------------------------------------------------------------


@dataclass
class Region:
    """A checkpointed function in a graph."""

    nodes: list[Node]
    first: int
    """Number of the first autograd node made in it."""
    end: int = 0
    """Number of the first one after it."""
    inside: list[Region] = field(default_factory=list)

    def follow(self, made: dict[Node, list[Node]]) -> None:
        for node in self.nodes:
            for new in made.get(node, ()):
                if "recompute" in node.meta:
                    new.meta["recompute"] = node.meta["recompute"]
        self.nodes = [new for node in self.nodes for new in made.get(node, ())]
        for region in self.inside:
            region.follow(made)


class Record:
    """The checkpoints of a traced function, and the operations of its backward passes."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.backward: dict[Node, int] = {}
        """Operations of a backward pass -> number of the autograd node that they belong to."""
        self._open: list[Region] = []

    @contextlib.contextmanager
    def operation(self, graph: Graph) -> Iterator[None]:
        """Record, if it is that of a backward pass, what the block adds to the graph."""
        node = autograd_node()
        if node is None:
            yield
            return
        with added(graph) as made:
            yield
        self.backward |= dict.fromkeys(made, node._sequence_nr())

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Record what is traced in the block as a region that is to be computed again."""
        with added(tracing_mode().tracer.graph) as made:
            region = Region(made, next_node_number())
            (self._open[-1].inside if self._open else self.regions).append(region)
            self._open.append(region)
            try:
                yield
            finally:
                self._open.pop()
                region.end = next_node_number()

    def follow(self, made: dict[Node, list[Node]]) -> None:
        """Replace every node by those that it became when the graph was traced again."""
        self.backward = {
            new: number for node, number in self.backward.items() for new in made.get(node, ())
        }
        for region in self.regions:
            region.follow(made)


# torch 2.13 has no way to replace what a checkpoint does, and scripts import ``checkpoint`` by
# name: so the two names that it looks up in its module are replaced while a mapped function runs.
# Where no mapped function runs in the calling thread, the replacements call torch's own.
_own_function = torch_checkpoint.CheckpointFunction


class _Reentrant(_own_function):
    @classmethod
    def apply(cls, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """In a mapped function, ``use_reentrant=True`` means the same as False."""
        if active_streams() is None:
            return _own_function.apply(function, preserve, *args)
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve
        )


def _bracket(own: Callable[..., Generator[None]], context_fn: Callable[[], Any]) -> Generator[None]:
    """Replaces the generator in which ``checkpoint`` runs a function and sets up its second run."""
    streams = active_streams()
    if streams is None:
        return own()
    capture = current_capture()
    if capture is not None:
        return _traced(capture.record, context_fn)
    if tracing_mode() is not None or has_transforms():
        return _plain(context_fn)

    def contexts() -> Any:
        first, second = context_fn()
        return first, _entered(repeated(streams, streams.draws), second)

    return own(context_fn=contexts, debug=False)


_BRACKET_NAME, _replacement = checkpoint_bracket(_bracket)

checkpoints_replaced = Replaced(
    [
        Replacement(torch_checkpoint, _BRACKET_NAME, lambda own: _replacement),
        Replacement(torch_checkpoint, "CheckpointFunction", lambda own: _Reentrant),
    ]
)
"""A block in which mapped functions use the checkpoints of this module."""


def _traced(record: Record, context_fn: Callable[[], Any]) -> Generator[None]:
    # torch 2.11 notes what a policy says of a node only where metadata is kept
    with record.region(), preserve_node_meta(), context_fn()[0]:
        yield


def _plain(context_fn: Callable[[], Any]) -> Generator[None]:
    context = context_fn()[0]
    if isinstance(context, TorchDispatchMode):  # it would keep values for a second run
        context = contextlib.nullcontext()
    with context:
        yield


@contextlib.contextmanager
def _entered(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


# -- in the finished graph -------------------------------------------------------------------------


def rematerialize(graph: GraphModule, record: Record, *, ordered: bool, split: bool) -> set[Node]:
    """Compute again, in front of each backward pass, what it needs of a checkpoint.

    ``ordered``: whether operations run in the order of the graph.  If not, the copies are made to
    depend on the backward pass: a compiler would compute them once, early, and keep the values.
    ``split``: whether the backward pass gets a graph of its own, without the function's outputs.

    Returns the nodes of backward passes: the copies, and the operations they are for.
    """
    if not record.regions:
        return set()
    alive = set(operations(graph.graph))
    backward = sorted((number, node) for node, number in record.backward.items() if node in alive)
    again = _Again(graph.graph, backward, {node for _, node in backward}, ordered, split)
    for region in reversed(record.regions):
        again.run(region, set(region.nodes) & alive)
    return again.late


@dataclass
class _Again:
    """Puts copies of regions before their backward passes."""

    graph: Graph
    backward: list[tuple[int, Node]]
    """The operations of backward passes, with the numbers of their autograd nodes, in order."""
    late: set[Node]
    ordered: bool
    split: bool

    def run(self, region: Region, own: set[Node]) -> None:
        """``own``: the nodes of the region, or copies of them in the region around it."""
        first, end = (
            bisect_left(self.backward, number, key=operator.itemgetter(0))
            for number in (region.first, region.end)
        )
        backward = sorted(node for _, node in self.backward[first:end] if node not in own)
        inside = own.union(backward)
        pending = [source for node in backward for source in node.all_input_nodes]
        wanted: set[Node] = set()
        while pending:
            node = pending.pop()
            if node in own and node not in wanted and not self._is_at_hand(node, inside):
                wanted.add(node)
                pending += node.all_input_nodes
        if not wanted:
            return
        readers = [node for node in backward if wanted.intersection(node.all_input_nodes)]
        copies = self._copy(sorted(wanted), readers[0])
        for node in readers:
            for source in wanted.intersection(node.all_input_nodes):
                node.replace_input_with(source, copies[source])
        for inner in reversed(region.inside):
            self.run(inner, {copies[node] for node in inner.nodes if node in copies})

    def _is_at_hand(self, node: Node, inside: set[Node]) -> bool:
        """Whether a node is kept for a reader that is not ``inside``, the region or its backward
        pass, must be saved, or has an effect.
        """
        if node.meta.get("recompute") in _SAVED or is_kept(node):
            return True
        others = [user for user in node.users if user not in inside]
        return any(not self.split if user.op == "output" else user in self.late for user in others)

    def _copy(self, nodes: Sequence[Node], before: Node) -> dict[Node, Node]:
        copies: dict[Node, Node] = {}
        tied: set[Node] = set()
        with self.graph.inserting_before(before):
            never = None if self.ordered else self._never(before)
            for node in nodes:
                copy = self.graph.node_copy(node, lambda source: copies.get(source, source))
                copies[node] = copy
                self.late.add(copy)
                is_tied = not tied.isdisjoint(copy.all_input_nodes)
                if not is_tied and never is not None and not is_view(copy):
                    is_tied = self._tie(copy, never)
                if is_tied:
                    tied.add(copy)
        return copies

    def _never(self, before: Node) -> Node | None:
        """A node that is always false, but depends on the backward pass up to ``before``."""
        latest = before.prev
        while latest not in self.late or not _has_elements(latest.meta.get("val")):
            if latest.op == "root":
                return None
            latest = latest.prev
        for _ in range(latest.meta["val"].dim()):
            latest = self._call(_aten.select.int, latest, 0, 0)
        unequal, equal = (
            self._call(op, latest, latest) for op in (_aten.ne.Tensor, _aten.eq.Tensor)
        )
        return self._call(_aten.bitwise_and.Tensor, unequal, equal)

    def _tie(self, copy: Node, never: Node) -> bool:
        """Let a node depend on ``never``, by its smallest operand; False if no operand fits."""
        operands = [
            node
            for node in copy.all_input_nodes
            if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_contiguous()
        ]
        if not operands:
            return False
        operand = min(operands, key=lambda node: node.meta["val"].numel())
        value = operand.meta["val"]
        with self.graph.inserting_before(copy):
            zero = self._call(_aten.full.default, [], 0, dtype=value.dtype, device=value.device)
            copy.replace_input_with(operand, self._call(_aten.where.self, never, zero, operand))
        return True

    def _call(self, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        node = call(self.graph, target, *args, **kwargs)
        self.late.add(node)
        return node


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


# -- graphs with writes ----------------------------------------------------------------------------


def without_writes(graph: GraphModule, record: Record) -> GraphModule:
    """The graph without operations that write to a tensor: these cannot be moved or copied."""
    from torchpmap._trace.graph_mode import graph_of

    examples = [node.meta["val"] for node in placeholders(graph.graph)]

    def replayed(interpreter: Following) -> GraphModule:
        functional = torch.func.functionalize(interpreter.run, remove="mutations")
        with examples[0].fake_mode:
            return graph_of(functional, examples)

    interpreter = Following(graph)
    try:
        result = replayed(interpreter)
    except ValueError as error:  # torch 2.11 to 2.15: what replaces a write may have other strides
        if "Cannot view" not in str(error):
            raise
        interpreter = _Copying(graph)
        result = replayed(interpreter)
    drop_dead(result.graph)
    record.follow(interpreter.made)
    keep_places(interpreter.made)
    return result


class Following(torch.fx.Interpreter):
    """Runs a graph while it is traced again, and records the nodes that each node became."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.made: dict[Node, list[Node]] = {}

    def run_node(self, n: Node) -> Any:
        with added(tracing_mode().tracer.graph) as self.made[n], _ready_for(n):
            return super().run_node(n)


@contextlib.contextmanager
def _ready_for(node: Node) -> Iterator[None]:
    """torch's rule for a loop (2.13) needs something that hears of shapes that depend on values."""
    inside = (each for graph in inner_graphs(node) for each, _ in nested(graph))
    if not any(kind_of_node(each) == WHILE for each in (node, *inside)):
        yield
        return
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = fake_mode()
    before, mode.shape_env = mode.shape_env, ShapeEnv()
    try:
        yield
    finally:
        mode.shape_env = before


class _Copying(Following):
    """An operation in place is one that is not, and a copy, which keeps the strides."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "_opname", "")
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = getattr(packet, getattr(target, "_overloadname", ""), None)
        if not name.endswith("_") or name == "copy_" or overload is None:
            return super().call_function(target, args, kwargs)
        return args[0].copy_(overload(*args, **kwargs))
