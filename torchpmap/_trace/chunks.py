"""Several steps of a scan at once, for compilers.

Where Python calls the compiled body of a loop (_trace/compiled_loops), a call costs some 10 us.  So
the body of a short step is put into its graph several times, and the loop runs that many times
less::

    scan(body, [c], [xs])                  scan(body4, [c], [xs[:1000].unflatten(0, (250, 4))])
                                           body4: c, rows -> four times body, on rows[0] ... rows[3]

Steps that are left over are put behind the loop.  Values do not change.  A body of which Inductor
makes kernels only stays as it is: C++ runs its steps (_trace/replay).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.torch_internals import LazyGraphModule, OpOverload
from torchpmap._trace.inner import (
    SCAN,
    inner_graphs,
    inner_modules,
    is_kept,
    kind_of_node,
    operations,
    results_of,
)
from torchpmap._trace.loop_report import CHUNKS_OF, IN_CPP
from torchpmap.random import _threefry

_aten = torch.ops.aten
_MAX_NODES = 80
"""Of the body of a loop."""

_KERNELS = frozenset(
    {
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
        *(_aten.amax.default, _aten.amin.default, _aten.var.correction, _aten._softmax.default),
        *(_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.stack.default),
        *(_aten.full.default, _aten.full_like.default, _aten.zeros_like.default),
        *(_aten.ones_like.default, _aten.arange.default, _aten.arange.start_step),
        *(_aten.index.Tensor, _aten.gather.default, _aten.flip.default),
        *(_aten.select_scatter.default, _aten.slice_scatter.default),
        *_threefry.decompositions(),
    }
)
"""What becomes kernels, besides pointwise operations and views."""

_CALLS = frozenset({"angle", "digamma", "gcd", "igamma", "igammac", "polygamma"})
"""Pointwise operations that Inductor calls, besides those of ``torch.special``."""


def chunk(module: GraphModule, *, inductor: bool = False) -> None:
    """Let the scans of a graph, and those inside its loops, do several steps at once.  The nodes
    must still have their fake tensors.  ``inductor``: whether it compiles the graph.
    """
    for node in list(module.graph.nodes):
        for inner in inner_modules(node):
            chunk(inner, inductor=inductor)
        if kind_of_node(node) == SCAN:
            _chunk(module, node, inductor)
    module.graph.eliminate_dead_code(is_impure_node=is_kept)
    module.graph.lint()
    module.recompile()


def steps_at_once(length: int, num_nodes: int) -> int:
    """How many steps of a body of so many nodes: if possible a number that divides the length."""
    most = min(length, max(1, _MAX_NODES // max(1, num_nodes)))
    divisors = (k for k in range(most, (most + 1) // 2, -1) if length % k == 0)
    return next(divisors, most)


def _chunk(module: GraphModule, node: Node, inductor: bool) -> None:
    (body,) = inner_modules(node)
    init, xs, reads = node.args[1:]
    length = int(xs[0].meta["val"].shape[0])  # type: ignore[union-attr, index]
    calls = operations(body.graph)
    # where there are loops inside, they take most of the time
    size = 1 if any(map(inner_graphs, calls)) else steps_at_once(length, len(calls))
    if inductor and size < length and all(map(becomes_kernels, calls)):
        node.meta[IN_CPP] = True
    elif size > 1:
        _Chunks(module, node, body.graph, size, length).run(
            list(init),  # type: ignore[arg-type]
            list(xs),  # type: ignore[arg-type]
            list(reads),  # type: ignore[arg-type]
        )


def becomes_kernels(node: Node) -> bool:
    """Whether Inductor makes C++ of an operation, and does not leave it to a library."""
    if node.target is operator.getitem:
        return True
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(value, torch.Tensor):
        return False
    name = target._opname
    if name in _CALLS or name.startswith("special_"):
        return False
    schema = target._schema
    is_view = schema.returns[0].alias_info is not None and not schema.is_mutable
    is_plain = is_view or torch.Tag.pointwise in target.tags or target in _KERNELS
    return is_plain and value.device.type == "cpu" and not value.is_complex()


class _Chunks:
    def __init__(
        self, module: GraphModule, node: Node, body: Graph, size: int, length: int
    ) -> None:
        self._module = module
        self._node = node
        self._body = body
        self._size = size
        self._length = length

    def run(self, init: list[Node], xs: list[Node], reads: list[Node]) -> None:
        graph = self._module.graph
        count = self._length // self._size
        whole = count * self._size
        with graph.inserting_before(self._node):
            carry = init
            ys: list[Node] = []
            if count > 1:
                carry, ys = self._loop(init, xs, reads, count, whole)
            else:
                whole = 0
            carry, rest = _steps(graph, self._body, carry, xs, reads, range(whole, self._length))
            results = [*carry, *self._joined(ys, rest)]
        for user in list(self._node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(self._node)

    def _loop(
        self, init: list[Node], xs: list[Node], reads: list[Node], count: int, whole: int
    ) -> tuple[list[Node], list[Node]]:
        graph = self._module.graph
        call = graph.call_function
        cut = [
            call(_aten.slice.Tensor, (x, 0, 0, whole)) if whole < self._length else x for x in xs
        ]
        rows = [call(_aten.unflatten.int, (x, 0, [count, self._size])) for x in cut]
        body = repeated(self._module, self._body, len(init), len(xs), self._size)
        name = f"{self._node.args[0].target}_by_{self._size}"  # type: ignore[union-attr]
        self._module.register_module(name, body)
        loop = call(self._node.target, (graph.get_attr(name), init, rows, tuple(reads)))  # type: ignore[arg-type]
        num_ys = len(results_of(self._body)) - len(init)
        loop.meta[CHUNKS_OF] = self._node, self._size
        found = [call(operator.getitem, (loop, k)) for k in range(len(init) + num_ys)]
        ys = [call(_aten.flatten.using_ints, (y, 0, 1)) for y in found[len(init) :]]
        return found[: len(init)], ys

    def _joined(self, ys: list[Node], rest: list[list[Node]]) -> list[Node]:
        call = self._module.graph.call_function
        if not rest or not rest[0]:
            return ys
        stacked = [call(_aten.stack.default, (y,)) for y in rest]
        if not ys:
            return stacked
        return [call(_aten.cat.default, ([a, b],)) for a, b in zip(ys, stacked, strict=True)]


def repeated(
    module: GraphModule, body: Graph, num_carry: int, num_xs: int, size: int
) -> GraphModule:
    """``size`` steps of a body as one; ``module`` has its attributes."""
    graph = Graph()
    places = [node for node in body.nodes if node.op == "placeholder"]
    own = [graph.placeholder(node.name) for node in places]
    carry, rows = own[:num_carry], own[num_carry : num_carry + num_xs]
    carry, ys = _steps(graph, body, carry, rows, own[num_carry + num_xs :], range(size))
    stacked = [graph.call_function(_aten.stack.default, (y,)) for y in ys]
    graph.output((*carry, *stacked))
    return LazyGraphModule(module, graph)


def _steps(
    graph: Graph,
    body: Graph,
    carry: list[Node],
    xs: Sequence[Node],
    reads: Sequence[Node],
    numbers: range,
) -> tuple[list[Node], list[list[Node]]]:
    """Copies of the body: the last carry, and for each output its values."""
    places = [node for node in body.nodes if node.op == "placeholder"]
    ys: list[list[Node]] = [[] for _ in results_of(body)[len(carry) :]]
    for k in numbers:
        rows = [graph.call_function(_aten.select.int, (x, 0, k)) for x in xs]
        values: dict[Node, Any] = dict(zip(places, [*carry, *rows, *reads], strict=True))
        found: Any = graph.graph_copy(body, values)
        carry, own = list(found[: len(carry)]), found[len(carry) :]
        for y, value in zip(ys, own, strict=True):
            y.append(value)
    return carry, ys
