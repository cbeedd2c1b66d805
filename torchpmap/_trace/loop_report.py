"""How the loops of a graph will run, in words."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchpmap._base.errors import size_text
from torchpmap._trace.inner import (
    SCAN,
    WHILE,
    inner_graphs,
    inner_modules,
    kind_of_node,
)

CHUNKS_OF = "chunks of"
"""In the ``meta`` of a loop that does several steps at once: the loop that it replaces, and their
number.
"""

IN_CPP = "in C++"
"""In the ``meta`` of a loop that Inductor makes kernels of, which C++ repeats."""


@dataclass(frozen=True)
class Loop:
    """A loop of a traced function; ``str`` gives a line about it."""

    kind: str
    """``"scan"`` or ``"while_loop"``."""
    line: str
    """Where it is called."""
    length: int | None
    """The number of steps; None if it is not known before."""
    carry_bytes: int
    """Of the values that a step hands to the next."""
    steps_at_once: int
    """How many steps are started at once; 0 if all of them are part of the graph around."""
    num_operations: int
    """How many operations these steps are, before a compiler fuses them."""
    is_in_cpp: bool = False
    """Whether C++ runs the steps, and not Python."""

    def __str__(self) -> str:
        steps = "" if self.length is None else f"{self.length} step{'s' * (self.length != 1)}, "
        where = f" at {self.line}" if self.line else ""
        return f"{self.kind}{where}: {steps}carry {size_text(self.carry_bytes)}; {self._way()}"

    def _way(self) -> str:
        operations = f"{self.num_operations} operation{'s' * (self.num_operations != 1)}"
        if not self.steps_at_once:
            return f"unrolled into the graph, {operations}"
        if self.is_in_cpp:
            return f"C++ runs it step by step, {operations} each"
        if self.steps_at_once == 1 or self.length is None:
            return f"Python runs it step by step, {operations} each"
        count, rest = divmod(self.length, self.steps_at_once)
        behind = f", and {rest} more behind them" if rest else ""
        return (
            f"Python runs {count} chunks of {self.steps_at_once} steps, {operations} each{behind}"
        )


def loops_of(module: GraphModule) -> dict[Node, Loop]:
    """The loops of a graph, and those inside its loops and branches.  The nodes must still have
    their fake tensors.
    """
    found: dict[Node, Loop] = {}
    for node in module.graph.nodes:
        kind = kind_of_node(node)
        if kind in (SCAN, WHILE):
            carry: Any = node.args[1] if kind == SCAN else node.args[2]
            xs: Any = node.args[2] if kind == SCAN else ()
            length = int(xs[0].meta["val"].shape[0]) if xs else None
            size = sum(_bytes(each.meta["val"]) for each in carry)
            line = node.meta.get("line", "")
            found[node] = Loop(kind, line, length, size, 1, _num_operations([node]))
        for inner in inner_modules(node) if kind else ():
            found |= loops_of(inner)
    return found


def in_chunks(module: GraphModule, before: Mapping[Node, Loop]) -> tuple[Loop, ...]:
    """The loops that were there ``before`` compilers got chunks of steps, as they are now."""
    now: dict[Node, Loop] = {}

    def look(module: GraphModule) -> None:
        for node in module.graph.nodes:
            if kind_of_node(node):
                original, size = node.meta.get(CHUNKS_OF, (node, 1))
                if original in before:
                    operations = _num_operations([node])
                    now[original] = replace(
                        before[original],
                        steps_at_once=size,
                        num_operations=operations,
                        is_in_cpp=IN_CPP in node.meta,
                    )
                for inner in inner_modules(node):
                    look(inner)

    look(module)
    return tuple(
        now.get(node)
        or replace(loop, steps_at_once=0, num_operations=loop.num_operations * (loop.length or 1))
        for node, loop in before.items()
    )


def _bytes(value: Any) -> int:
    return math.prod(value.shape) * value.element_size()


def _num_operations(nodes: Sequence[Node]) -> int:
    graphs = [graph for node in nodes for graph in inner_graphs(node)]
    return sum(
        node.op == "call_function" and node.target not in _NOTHING
        for graph in graphs
        for node in graph.nodes
    )


_NOTHING = (operator.getitem, torch.ops.aten.detach.default)
"""What computes nothing."""
