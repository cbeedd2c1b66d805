"""What is asked of a graph: its nodes by their part, the memory of their values, what writes, what
communicates, and the graphs inside it: bodies of loops, and branches.

These are attributes of the module that owns the graph, and arguments of torch's operations
``scan``, ``while_loop`` and ``cond``:

    scan(body, [init...], [xs...], (reads...))                  body: init, row of xs, reads
    while_loop(test, body, (init...), (reads...))               both: init, reads
    cond(pred, on_true, on_false, (reads...))                   both: reads
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from torchpmap._base.torch_internals import (
    LazyGraphModule,
    OpOverload,
    outside_modes,
    outside_transforms,
    tracing_mode,
)
from torchpmap._base.writes import written_values
from torchpmap._collectives.backend import NAMESPACES

GRAPHS = "graphs"
"""In the ``meta`` of such a node: its graphs, for a graph that no module owns yet."""

SCAN, WHILE, COND = "scan", "while_loop", "cond"

PRINT = "debug_print"
"""An ordered print, for which devices send their lines to the first of them."""


class Closure:
    """What a graph takes from outside: every tensor that meets an operation, and is none of the
    graph, becomes an input of it.
    """

    def __init__(self, capture: Any) -> None:
        """``capture``: the ``Capture`` of the trace, of which the graph is a part, or None."""
        self.capture = capture
        self.tracer: Any = None
        """That of the graph, once it is being made."""
        self.nodes: list[Node] = []
        self.tensors: list[torch.Tensor] = []
        """What they stand for."""

    @property
    def graph(self) -> Graph:
        """The graph that is being made."""
        found: Graph = self.tracer.graph
        return found

    def substitute(self, value: Any) -> Any:
        """What stands in the graph for a tensor from outside; anything else is left alone."""
        raise NotImplementedError

    def place(self, count: int) -> None:
        """Move the inputs made here after the first ``count`` inputs of the graph."""
        made = set(self.nodes)
        given = [node for node in placeholders(self.graph) if node not in made][:count]
        for node in reversed(self.nodes):
            (given[-1] if given else self.graph._root).append(node)


def current_closure() -> Closure | None:
    """That of the graph that is being traced; torch's own tracer has none."""
    return getattr(tracing_mode(), "closure", None)


def current_capture() -> Any:
    """The ``Capture`` of the trace that runs in this thread, or None."""
    closure = current_closure()
    return None if closure is None else closure.capture


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


def all_modules(module: GraphModule) -> list[GraphModule]:
    """A graph and those inside it."""
    return [each for each in module.modules() if isinstance(each, GraphModule)]


def all_nodes(module: GraphModule) -> list[Node]:
    """The nodes of a graph and of those inside it."""
    return [node for each in all_modules(module) for node in each.graph.nodes]


def nested(graph: Graph, outer: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Every node of a graph and of the graphs inside it, in program order, with those around it."""
    for node in graph.nodes:
        yield node, outer
        for inner in inner_graphs(node):
            yield from nested(inner, (*outer, node))


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


@contextmanager
def added(graph: Graph) -> Iterator[list[Node]]:
    """The nodes that the block adds to a graph, once it has ended."""
    root = graph._root
    last, nodes = root.prev, list[Node]()
    try:
        yield nodes
    finally:
        while last.next is not root:
            last = last.next
            nodes.append(last)


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
    return any(_shows(node) for node, outer in nested(graph) if outer)


def _shows(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return not target._schema.returns or target._opname == "scan_in_order"


def acts(graph: Graph) -> bool:
    """Whether a graph does something besides computing its results."""
    return any(map(is_kept, operations(graph)))


def is_view(node: Node) -> bool:
    """Whether an operation gives views of its first argument."""
    return getattr(node.target, "is_view", False)


def views_to(node: Node) -> list[Node]:
    """A node, what it is a view of, and so on."""
    found = [node]
    while True:
        source: Any = node.args[0] if node.args else None
        is_part = node.target is operator.getitem and is_view(source)
        if not is_part and not is_view(node):
            return found
        node = source
        found.append(node)


def storages(node: Node) -> set[int]:
    """The memory of the values of a node."""
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else [values]
    return {x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)}


def value_of(node: Node) -> Any:
    """The fake value of a node that was traced."""
    return node.meta["val"]


def call(graph: Graph, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
    """Add an operation, with its fake value."""
    node = graph.call_function(target, args, kwargs)
    compute(node)
    return node


def compute(node: Node) -> None:
    """Let the fake value of a node be what it computes from those of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    with outside_modes(), outside_transforms():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


class Met(NamedTuple):
    """A node that communicates in a group."""

    node: Node
    group: str
    outer: tuple[Node, ...]
    """The loops and branches that it is in, the outermost first."""


def met(graph: Graph) -> list[Met]:
    """The nodes that communicate, once for each group."""
    return [Met(node, group, outer) for node, outer in nested(graph) for group in groups_of(node)]


def groups_of(node: Node) -> list[str]:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES:
        return []
    given = arguments(node)
    if target._opname == PRINT:
        return list(given["groups"])
    last = target._schema.arguments[-1].name
    return [str(given[last])] if last.startswith("group") else []


def arguments(node: Node) -> dict[str, Any]:
    """Of an operation of torch, by name."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def texts_in(node: Node) -> list[str]:
    """The texts among the arguments of a node, and in lists of them."""
    found: list[str] = []
    waiting: list[Any] = [*node.args, *node.kwargs.values()]
    for value in waiting:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return found


def written_by(node: Node) -> list[Node]:
    """The values that an operation writes to."""
    if not isinstance(node.target, OpOverload):
        return []
    written = written_values(node.target, node.args, node.kwargs)
    return [x for x in written if isinstance(x, Node)]


def written_storages(nodes: Iterable[Node]) -> dict[int, Node]:
    """Storage -> first node that writes to it."""
    written: dict[int, Node] = {}
    for node in nodes:
        for target in written_by(node):
            for storage in storages(target):
                written.setdefault(storage, node)
    return written


def writes(graph: Graph) -> bool:
    """Whether an operation of a graph writes to a tensor."""
    targets = [node.target for node in graph.nodes]
    return any(isinstance(t, OpOverload) and t._schema.is_mutable for t in targets)


def operations(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]
