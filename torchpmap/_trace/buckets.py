"""Sums over the devices go in buckets, which start while the device still computes.

A step sums its gradients over the devices.  On an accelerator a collective is a launch: it runs
beside what the device computes, from ``all_reduce`` until ``wait_tensor``.  ``bucketed`` moves the
launch up, right after what it sends, and the wait down, in front of the first use::

    traced                            bucketed

    dw2 = mm(...)                     dw2 = mm(...)
    dh  = mm(...)                     s2 = all_reduce(dw2)
    dw1 = mm(...)                     dh  = mm(...)
    s1 = wait(all_reduce(dw1))        dw1 = mm(...)
    s2 = wait(all_reduce(dw2))        s1 = all_reduce(dw1)
    w1 - 0.1 * s1                     w1 - 0.1 * wait(s1)
    w2 - 0.1 * s2                     w2 - 0.1 * wait(s2)

Small sums share a message, as long as nothing waits for one of them before all are known: they are
put one after the other into a buffer.  (``all_reduce_coalesced`` would save the buffer, but
Inductor does not make its operands contiguous, and each result has a wait of its own.)

All devices run the same graph, and Inductor keeps the order of the collectives in a graph: each
depends on the one before (``comms.decide_global_ordering_of_comms``).  So no choice that Inductor
makes, however it measures, lets two devices launch in different orders.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.torch_internals import OpOverload
from torchpmap._collectives.backend import c10d
from torchpmap._trace.graphs import storages, written_by
from torchpmap._trace.repetition import keep_places

_aten = torch.ops.aten
_LIGHT = {
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.cat.default,
    operator.getitem,
}
"""Operations that go up with a launch, besides pointwise ones and views."""


@dataclass
class _Sum:
    """An ``all_reduce`` and its ``wait_tensor``."""

    launch: Node
    wait: Node
    ready: int
    """When its operand is known."""
    due: int
    """When its result is first used."""
    last: int
    """When it must have started: its result is used, or its operand is written to."""

    @property
    def operand(self) -> Node:
        node: Node = self.launch.args[0]  # type: ignore[assignment]
        return node

    @property
    def num_bytes(self) -> int:
        value = self.operand.meta["val"]
        return int(value.numel() * value.element_size())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for sums that one message can carry."""
        value = self.operand.meta["val"]
        return (*self.launch.args[1:], value.dtype, value.device)


@dataclass
class _Bucket:
    sums: list[_Sum]
    num_bytes: int = field(init=False)
    ready: int = field(init=False)
    due: int = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(each.num_bytes for each in self.sums)
        self.ready = max(each.ready for each in self.sums)
        self.due = min(each.due for each in self.sums)
        self.last = min(each.last for each in self.sums)


def bucketed(graph: GraphModule, limit: int) -> None:
    """Let sums over the devices run beside the computation, in buckets of at most ``limit`` bytes
    (a larger tensor goes alone).  The nodes must still have their fake tensors.
    """
    if not graph.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        return
    nodes = list(graph.graph.nodes)
    moments = _Moments(nodes)
    buckets = _fill(moments.sums, limit)
    _Rewrite(graph.graph, nodes, moments.ready, buckets).run()


# -- when -----------------------------------------------------------------------------------------


class _Moments:
    """When each value of a graph is known, if light operations run as early as they can.

    A moment is an even number for a node that stays where it is.  An odd one is the wait for a sum,
    in front of the node that uses it first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        position = {node: 2 * k for k, node in enumerate(nodes)}
        begin = max((position[n] for n in nodes if n.op == "placeholder"), default=0)
        self.ready: dict[Node, int] = {}
        self.sums: list[_Sum] = []
        written: dict[int, int] = {}  # storage -> when it was last written to
        readers: dict[int, list[_Sum]] = {}  # storage -> sums of what was last written
        for node in nodes:
            here = position[node]
            known = [self.ready[source] for source in node.all_input_nodes]
            known += [
                written.get(s, 0) for source in node.all_input_nodes for s in storages(source)
            ]
            if _is_light(node) or _is_sum(node):
                self.ready[node] = max([begin, *known])
            else:
                self.ready[node] = max(begin, here) if node.op != "get_attr" else begin
            if node.target is c10d.wait_tensor.default and _is_sum(node.args[0]):
                due = min((position[user] for user in node.users), default=here) - 1
                self.ready[node] = due
                launch: Node = node.args[0]  # type: ignore[assignment]
                self.sums.append(_Sum(launch, node, self.ready[launch], due, due))
                for storage in storages(self.sums[-1].operand):
                    readers.setdefault(storage, []).append(self.sums[-1])
            for storage in {s for x in written_by(node) for s in storages(x)}:
                written[storage] = here
                for each in readers.pop(storage, ()):
                    each.last = min(each.last, here)


def _is_sum(node: Any) -> bool:
    """Whether it sums over the devices, and may be moved: only the wait for it uses it."""
    return (
        isinstance(node, Node)
        and node.target is c10d.all_reduce.default
        and node.args[1] == "sum"
        and [user.target for user in node.users] == [c10d.wait_tensor.default]
    )


def _is_light(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return target in _LIGHT
    tags = target.tags
    return (
        torch.Tag.nondeterministic_seeded not in tags
        and not target._schema.is_mutable
        and (torch.Tag.pointwise in tags or target.is_view or target in _LIGHT)
    )


# -- which ----------------------------------------------------------------------------------------


def _fill(sums: Sequence[_Sum], limit: int) -> list[_Bucket]:
    """The sums in buckets, in the order in which they become known."""
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[Any, ...], int] = {}
    for each in sorted(sums, key=lambda each: each.ready):
        place = open_ones.get(each.kind)
        if place is not None:
            bucket = buckets[place]
            fits = bucket.num_bytes + each.num_bytes <= limit
            if fits and each.ready < min(bucket.last, each.last):
                buckets[place] = _Bucket([*bucket.sums, each])
                continue
        open_ones[each.kind] = len(buckets)
        buckets.append(_Bucket([each]))
    return sorted(buckets, key=lambda bucket: bucket.ready)


# -- the graph ------------------------------------------------------------------------------------


class _Rewrite:
    """Puts the nodes of a graph in their new order."""

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], ready: dict[Node, int], buckets: list[_Bucket]
    ) -> None:
        self._graph = graph
        self._nodes = nodes
        self._ready = ready
        self._launches: dict[int, list[_Bucket]] = {}
        self._waits: dict[int, list[_Bucket]] = {}
        for bucket in buckets:
            self._launches.setdefault(bucket.ready, []).append(bucket)
            self._waits.setdefault(bucket.due, []).append(bucket)
        self._own = {n for b in buckets for each in b.sums for n in (each.launch, each.wait)}
        self._running: dict[int, Node] = {}
        """``all_reduce`` of a bucket, by its id."""
        self._placed: set[Node] = set()
        self._cursor = nodes[0]

    def run(self) -> None:
        for k, node in enumerate(self._nodes):
            for moment in (2 * k - 1, 2 * k):
                if moment == 2 * k and node not in self._own:
                    self._place(node)
                for bucket in self._waits.get(moment, ()):
                    self._wait(bucket)
                for bucket in self._launches.get(moment, ()):
                    self._launch(bucket)

    def _place(self, node: Node) -> None:
        if node not in self._placed:
            self._placed.add(node)
            if node is not self._cursor:
                self._cursor.append(node)
                self._cursor = node

    def _add(self, target: Any, *args: Any) -> Node:
        with self._graph.inserting_after(self._cursor):
            self._cursor = self._graph.call_function(target, args)
        self._placed.add(self._cursor)
        return self._cursor

    def _launch(self, bucket: _Bucket) -> None:
        for each in bucket.sums:
            self._place_with_sources(each.operand)
        if len(bucket.sums) == 1:
            (each,) = bucket.sums
            self._place(each.launch)
            self._running[id(bucket)] = each.launch
            return
        flat = [self._add(_aten.view.default, each.operand, [-1]) for each in bucket.sums]
        how = bucket.sums[0].launch.args[1:]
        launch = self._add(c10d.all_reduce.default, self._add(_aten.cat.default, flat), *how)
        keep_places({each.launch: [launch] for each in bucket.sums})
        self._running[id(bucket)] = launch

    def _place_with_sources(self, node: Node) -> None:
        """Place a node that is not placed yet, after those that it is computed from."""
        waiting = [node]
        while waiting:
            node = waiting[-1]
            missing = [source for source in node.all_input_nodes if source not in self._placed]
            if missing:
                waiting += missing
            else:
                self._place(waiting.pop())

    def _wait(self, bucket: _Bucket) -> None:
        if len(bucket.sums) == 1:
            self._place(bucket.sums[0].wait)
            return
        whole = self._add(c10d.wait_tensor.default, self._running[id(bucket)])
        values = [each.operand.meta["val"] for each in bucket.sums]
        parts = self._add(
            _aten.split_with_sizes.default, whole, [value.numel() for value in values]
        )
        for k, (each, value) in enumerate(zip(bucket.sums, values, strict=True)):
            part = self._add(_aten.view.default, self._add(operator.getitem, parts, k), value.shape)
            # a view would keep the whole buffer alive
            result = self._add(_aten.clone.default, part)
            result.meta = dict(each.wait.meta)
            each.wait.replace_all_uses_with(result)
            for old in (each.wait, each.launch):
                self._graph.erase_node(old)
