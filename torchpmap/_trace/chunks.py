"""Several steps of a scan as one graph.

A short scan of few operations becomes part of the graph around it.  Of a longer one, where Python
calls the compiled body for each step (_trace/compiled_loops), a call costs some 10 us, so a worker
compiles a body of several steps::

    body: carry, row -> carry, y          body4: carry, rows -> four times body, on rows[0], ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.torch_internals import LazyGraphModule
from torchpmap._trace.graphs import (
    SCAN,
    drop_dead,
    inner_graphs,
    inner_modules,
    kind_of_node,
    operations,
    placeholders,
    results_of,
)

_aten = torch.ops.aten
_MAX_NODES = 80
"""Of several steps."""
_CALLED = {"mm", "addmm", "bmm", "baddbmm", "convolution", "all_reduce", "all_gather_into_tensor"}


def steps_at_once(length: int, body: Graph) -> int:
    """How many steps of a body may be one: if possible a number that divides the length.

    A step with loops inside is alone: they take most of the time.
    """
    calls = operations(body)
    if any(map(inner_graphs, calls)):
        return 1
    most = max(1, min(length, _MAX_NODES // max(1, len(calls))))
    divisors = (k for k in range(most, (most + 1) // 2, -1) if length % k == 0)
    return next(divisors, most)


def calls_libraries(body: Graph) -> bool:
    """Whether Inductor's code of a body does more, most likely, than call kernels of its own."""
    return any(getattr(node.target, "_opname", "") in _CALLED for node in operations(body))


def unroll_short_scans(module: GraphModule) -> None:
    """Put scans of few operations into the graph around them, also inside loops and branches.  The
    nodes must still have their fake tensors.
    """
    for node in list(module.graph.nodes):
        for inner in inner_modules(node):
            unroll_short_scans(inner)
        if kind_of_node(node) == SCAN:
            _unroll_if_short(module.graph, node)
    drop_dead(module.graph)


def _unroll_if_short(graph: Graph, node: Node) -> None:
    (body,) = inner_modules(node)
    init, xs, reads = (list(each) for each in node.args[1:])  # type: ignore[arg-type]
    length = int(xs[0].meta["val"].shape[0])
    if not 1 < length == steps_at_once(length, body.graph):
        return
    with graph.inserting_before(node):
        results = _steps(graph, body.graph, init, xs, reads, length)
    for result, value in zip(results, node.meta["val"], strict=True):
        result.meta.setdefault("val", value)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def repeated(
    module: GraphModule, body: Graph, num_carry: int, num_xs: int, size: int
) -> GraphModule:
    """``size`` steps of a body as one; ``module`` has its attributes."""
    graph = Graph()
    own = [graph.placeholder(node.name) for node in placeholders(body)]
    carry, xs = own[:num_carry], own[num_carry : num_carry + num_xs]
    graph.output(tuple(_steps(graph, body, carry, xs, own[num_carry + num_xs :], size)))
    return LazyGraphModule(module, graph)


def _steps(
    graph: Graph,
    body: Graph,
    carry: list[Node],
    xs: Sequence[Node],
    reads: Sequence[Node],
    length: int,
) -> list[Node]:
    """Copies of the body, one for each step: the last carry, and the stacked outputs."""
    places = placeholders(body)
    count = len(carry)
    ys: list[list[Node]] = [[] for _ in results_of(body)[count:]]
    for k in range(length):
        rows = [graph.call_function(_aten.select.int, (x, 0, k)) for x in xs]
        for row, place in zip(rows, places[count:], strict=False):
            row.meta |= place.meta
        values: dict[Node, Any] = dict(zip(places, [*carry, *rows, *reads], strict=True))
        found: Any = graph.graph_copy(body, values)
        carry = list(found[:count])
        for y, value in zip(ys, found[count:], strict=True):
            y.append(value)
    return [*carry, *(graph.call_function(_aten.stack.default, (y,)) for y in ys)]
