"""The collectives of a graph, in program order, also those in loops and branches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from torchpmap._collectives.backend import NAMESPACES, Pairs
from torchpmap._layout.axis_stack import Partition
from torchpmap._plan.plan import Plan
from torchpmap._trace.graphs import PRINT, SCAN, Met, arguments, kind_of_node, nested
from torchpmap._trace.repetition import place_of

_KNOWN = frozenset({"aten", "prims", "torchpmap_random", "higher_order", *NAMESPACES})


@dataclass(frozen=True)
class Inside:
    """A loop or branch around a collective."""

    name: str
    """What the function calls: ``"while_loop"``."""
    line: str
    """The user's line; empty if it is not known."""
    steps: int | None
    """Of a ``scan``; None if values decide."""

    def __str__(self) -> str:
        steps = "" if self.steps is None else f" of {self.steps} steps"
        return f"{self.name}{steps}" + (f" at {self.line}" if self.line else "")


@dataclass(frozen=True)
class Collective:
    """One collective of a call, as all devices run it."""

    name: str
    """The operation in the graph: several leaves of a tree may travel in one."""
    num_bytes: int
    """What the device sends into it, each time."""
    axis: str
    """Names of the axes that it runs over."""
    times: int = field(default=1, repr=False)
    """How often it runs in a call.  A ``while_loop`` counts as one step, and a branch as taken."""
    line: str = field(default="", repr=False)
    """The user's line that asks for it, also for its derivative; empty if it is not known."""
    groups: Partition = field(default=(), repr=False)
    """Ids of the devices that communicate with each other; empty if the call has no such groups."""
    size: int | None = field(default=None, repr=False)
    """Of the group that the operation counts on; None if it does with any."""
    pairs: Pairs | None = field(default=None, repr=False)
    """Of a permutation: places in each group that send and receive."""
    inside: tuple[Inside, ...] = field(default=(), repr=False)
    """The loops and branches around it, the outermost first."""

    @property
    def moves(self) -> Pairs:
        """(source, destination) of a permutation, as ids of devices."""
        return tuple(
            (group[source], group[destination])
            for group in self.groups
            for source, destination in self.pairs or ()
            if {source, destination} <= {*range(len(group))}
        )

    @property
    def zeros(self) -> tuple[int, ...]:
        """Ids of the devices that a permutation sends nothing, and so gives zeros."""
        if self.pairs is None:
            return ()
        fed = {destination for _, destination in self.pairs}
        return tuple(x for group in self.groups for k, x in enumerate(group) if k not in fed)


def users_operations(graph: Graph) -> tuple[str, ...]:
    """The names of operations of the user's own."""
    names = {
        str(node.target).removesuffix(".default"): None  # "aten.mm.default"
        for node, _ in nested(graph)
        if getattr(node.target, "namespace", "aten") not in _KNOWN
    }
    return tuple(names)


def name_of(node: Node) -> str:
    """``"all_reduce"``."""
    target: Any = node.target
    return str(target._schema.name.split("::")[1])


def collective(plan: Plan, found: Met) -> Collective:
    """What a node of a plan does; it has its fake value as ``meta["val"]``, and so have others."""
    node, given = found.node, arguments(found.node)
    inside = tuple(map(_inside, found.outer))
    sources = given.get("sources")
    splits, size = given.get("output_split_sizes"), given.get("group_size")
    is_print = name_of(node) == PRINT  # the length of its text is not known
    return Collective(
        name=name_of(node),
        num_bytes=0 if is_print else sum(bytes_of(x.meta.get("val")) for x in node.all_input_nodes),
        axis=plan.axes.get(found.group, "?"),
        times=math.prod(each.steps or 1 for each in inside),
        line=place_of(node),
        groups=plan.groups.get(found.group, ()),
        size=len(splits) if splits is not None else size,
        pairs=None if sources is None else tuple(zip(sources, given["destinations"], strict=True)),
        inside=inside,
    )


def _inside(node: Node) -> Inside:
    kind = kind_of_node(node)
    steps = steps_of(node) if kind == SCAN else None
    return Inside(node.meta.get("called", kind), place_of(node), steps)


def steps_of(node: Node) -> int:
    """Of a loop; 1 if values decide."""
    xs: Any = node.args[2] if kind_of_node(node) == SCAN else ()
    return int(xs[0].meta["val"].shape[0]) if xs else 1


def bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0
