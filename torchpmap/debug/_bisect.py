"""The first operation where two runs of a graph differ."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.pytree import tree_leaves, tree_map_only
from torchpmap._base.torch_internals import LazyGraphModule, OpOverload, gives_views
from torchpmap._layout.axis_stack import Partition
from torchpmap._trace.boxed import Boxed
from torchpmap._trace.compile import Definition, compile_definition, parse_compile
from torchpmap._trace.effects import distance, wide
from torchpmap._trace.graphs import all_modules, copied_whole, groups_of, written_by
from torchpmap._trace.repetition import place_of
from torchpmap.debug._lockstep import (
    Lockstep,
    Place,
    Step,
    Steps,
    Values,
    has_own_numbers,
    operation_of,
)

_LEAST = 1e-3
"""Smaller numbers may be what is left of larger ones that cancel: the gradient of a bias before a
norm.  Their differences are compared with this.
"""


@dataclass(frozen=True)
class Difference(Place):
    """The first operation where two runs differ, and where it is."""

    node: str
    """Its name in the graph, for ``replay(file, at=...)``."""
    values: tuple[Any, Any]
    """What both runs give there."""
    distance: float
    """The largest difference of two numbers."""
    inputs: float
    """The same of what the operation takes: 0 if the operation alone makes the difference."""

    def __str__(self) -> str:
        where = self.described(f"{self.operation} ({self.node})")
        return f"{where}: they differ by {self.distance:g}, and what it takes by {self.inputs:g}"


def differing(mine: Steps, theirs: Steps, tolerance: float) -> Difference | None:
    """Run both side by side, until they differ."""
    for one in mine:
        other = next(theirs, None)
        if other is None or (one.node.name, one.steps) != (other.node.name, other.steps):
            there = "the end" if other is None else f"{other.node.name}, step {other.steps}"
            raise ValueError(
                f"bisect: one run comes to {one.node.name}, step {one.steps}, and the other to "
                f"{there}. They run different graphs, or other numbers of steps."
            )
        found = _first(one, other, tolerance)
        if found is not None:
            return found
    return None


def _first(one: Step, other: Step, tolerance: float) -> Difference | None:
    node = one.node
    for rank in one.values if has_own_numbers(node) else ():
        values = one.values[rank], other.values[rank]
        apart, largest = _apart(*values)
        if apart > tolerance * max(largest, _LEAST):
            pairs = zip(one.inputs, other.inputs, strict=True)
            given = [_apart(mine[rank], theirs[rank])[0] for mine, theirs in pairs]
            return Difference(
                *(operation_of(node), place_of(node), rank, one.steps),
                *(node.name, values, apart, max(given, default=0.0)),
            )
    return None


def _apart(one: Any, other: Any) -> tuple[float, float]:
    """The largest difference, and the largest number."""
    apart = largest = 0.0
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if isinstance(a, torch.Tensor) and a.numel():
            apart = max(apart, float(distance(a, b)))
            largest = max(largest, float(wide(a).abs().nan_to_num().max()))
    return apart, largest


# -- in another dtype ------------------------------------------------------------------------------


def precision_of(dtype: torch.dtype) -> float:
    if dtype not in _REAL:
        raise ValueError(f"bisect: dtype must be one of {_REAL}, but got {dtype!r}.")
    return torch.finfo(dtype).eps


class InDtype(Lockstep):
    """All floating-point numbers are of this dtype (complex numbers, of two of them)."""

    def __init__(self, dtype: torch.dtype, groups: Mapping[str, Partition]) -> None:
        super().__init__(groups)
        self._dtype = dtype
        self._instead = dict.fromkeys(_REAL, dtype) | dict.fromkeys(_COMPLEX, dtype.to_complex())

    def start(self, graph: GraphModule, inputs: list[Values], ranks: Sequence[int]) -> Steps:
        graph = copied_whole(graph)
        for module in all_modules(graph):
            for node in module.graph.nodes:
                if node.op == "get_attr":
                    setattr(module, node.target, self._changed(getattr(module, node.target)))
                elif node.target is _BITS:
                    node.target = functools.partial(_bits, self._dtype)
                else:
                    node.args, node.kwargs = self._changed((node.args, dict(node.kwargs)))
        return super().start(graph, list(map(self._changed, inputs)), ranks)

    def computed(
        self, node: Node, env: dict[Node, Values], ranks: Sequence[int], steps: tuple[int, ...]
    ) -> Generator[Step, None, Values]:
        """Its results too: some operations take their dtype from the settings."""
        found = yield from super().computed(node, env, ranks, steps)
        changed: Values = self._changed(found)
        return changed

    def _changed(self, tree: Any) -> Any:
        return tree_map_only((torch.Tensor, torch.dtype), self._instead_of, tree)

    def _instead_of(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(self._instead.get(x.dtype, x.dtype))
        return self._instead.get(x, x)


_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_BITS = torch.ops.aten.view.dtype
_SAME_SIZE = {torch.int32: torch.float32, torch.int64: torch.float64}


def _bits(wide: torch.dtype, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x.view(dtype)``, where the bits of a number are those of its own dtype."""
    if x.dtype not in (*_REAL, *_COMPLEX):
        return x.view(dtype)
    if dtype not in _SAME_SIZE or x.is_complex():
        raise NotImplementedError(f"bisect: the bits of a number as {dtype} in another dtype")
    return x.to(_SAME_SIZE[dtype]).view(dtype)


# -- compiled --------------------------------------------------------------------------------------


@dataclass
class _Segment:
    """Operations that are compiled together."""

    nodes: list[Node]
    given: list[Node]
    """What they take from outside."""
    code: Boxed | None = None
    left: dict[Node, Values] = field(default_factory=dict)
    """Values that the run has not come to yet."""


class Compiled(Lockstep):
    """All operations between two collectives, loops or branches are compiled together; those that
    give several tensors run alone.
    """

    def __init__(self, backend: str, groups: Mapping[str, Partition]) -> None:
        super().__init__(groups)
        self._backend: Any = parse_compile({"backend": backend})
        self._segments: dict[Node, _Segment] = {}
        self._cut: set[Graph] = set()

    def computed(
        self, node: Node, env: dict[Node, Values], ranks: Sequence[int], steps: tuple[int, ...]
    ) -> Generator[Step, None, Values]:
        if node.graph not in self._cut:
            self._cut.add(node.graph)
            self._segments |= {each: s for s in _segments(node.graph) for each in s.nodes}
        segment = self._segments.get(node)
        if segment is None:
            return (yield from super().computed(node, env, ranks, steps))
        if node not in segment.left:
            # compiled code takes it that its inputs are contiguous, as those of a plan
            given = {rank: [env[x][rank].contiguous() for x in segment.given] for rank in ranks}
            segment.code = segment.code or self._code(segment, given[ranks[0]])
            results = {rank: segment.code(given[rank]) for rank in ranks}
            for k, each in enumerate(segment.nodes):
                segment.left[each] = {rank: results[rank][k] for rank in ranks}
        return segment.left.pop(node)

    def _code(self, segment: _Segment, examples: Sequence[torch.Tensor]) -> Boxed:
        graph, made = Graph(), dict[Node, Node]()
        for each in segment.given:
            made[each] = graph.placeholder(each.name)
        for each in segment.nodes:
            made[each] = graph.node_copy(each, made.__getitem__)
        graph.output(tuple(made[each] for each in segment.nodes))
        kinds = tuple((tuple(x.shape), x.dtype) for x in examples)
        module = LazyGraphModule({}, graph)
        definition = Definition(0, "bisect", module, False, (0,), kinds, (), self._backend)
        return compile_definition(definition, torch.tensor(0))


def _segments(graph: Graph) -> list[_Segment]:
    found: list[list[Node]] = [[]]
    for node in graph.nodes:
        if any(map(_has_views, written_by(node))):
            raise NotImplementedError(
                f"bisect: {node.name} writes to memory that other values share, so operations "
                "cannot be compiled apart. Compare with dtype=torch.float64."
            )
        if _is_computed(node):
            found[-1].append(node)
        elif found[-1]:
            found.append([])
    return [_Segment(nodes, _outside(nodes)) for nodes in found if nodes]


def _is_computed(node: Node) -> bool:
    """Whether it gives one tensor and does nothing else."""
    target = node.target
    if not isinstance(target, OpOverload) or groups_of(node) or node.is_impure():
        return False
    if written_by(node):
        return False
    return [str(each.type) for each in target._schema.returns] == ["Tensor"]


def _has_views(value: Any) -> bool:
    """Whether a value is a view, or has one."""
    near = (value, *value.users) if isinstance(value, Node) else ()
    return any(isinstance(each.target, OpOverload) and gives_views(each.target) for each in near)


def _outside(nodes: Sequence[Node]) -> list[Node]:
    inside = set(nodes)
    return list(dict.fromkeys(x for each in nodes for x in each.all_input_nodes if x not in inside))
