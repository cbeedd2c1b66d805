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
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchpmap._base.torch_internals import OpOverload
from torchpmap._collectives.backend import c10d
from torchpmap._trace.graphs import storages, written_storages
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
class _Bucket:
    """Sums in one message: each an ``all_reduce`` and its ``wait_tensor``."""

    sums: list[tuple[Node, Node]]
    ready: int
    """When the operands are known."""
    due: int
    """When a result is first used."""
    last: int
    """When they must have started: a result is used, or an operand is written to."""
    num_bytes: int
    launch: Node | None = None
    """The ``all_reduce`` in the new order."""

    @classmethod
    def of(cls, launch: Node, wait: Node, ready: int, due: int) -> _Bucket:
        value = _operand(launch).meta["val"]
        return cls([(launch, wait)], ready, due, due, value.numel() * value.element_size())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for sums that one message can carry."""
        launch = self.sums[0][0]
        value = _operand(launch).meta["val"]
        return (*launch.args[1:], value.dtype, value.device)

    def add(self, other: _Bucket) -> None:
        self.sums += other.sums
        self.ready = max(self.ready, other.ready)
        self.due, self.last = min(self.due, other.due), min(self.last, other.last)
        self.num_bytes += other.num_bytes


def _operand(launch: Node) -> Node:
    node: Node = launch.args[0]  # type: ignore[assignment]
    return node


def bucketed(graph: GraphModule, limit: int) -> None:
    """Let sums over the devices run beside the computation, in buckets of at most ``limit`` bytes
    (a larger tensor goes alone).  The nodes must still have their fake tensors.
    """
    if graph.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        nodes = list(graph.graph.nodes)
        _Rewrite(graph.graph, nodes, _filled(_sums(nodes), limit)).run()


# -- when -----------------------------------------------------------------------------------------


def _sums(nodes: Sequence[Node]) -> list[_Bucket]:
    """Each sum by itself, with the moments when its values are known, if light operations run as
    early as they can.

    A moment is an even number for a node that stays where it is.  An odd one is the wait for a sum,
    in front of the node that uses it first.
    """
    position = {node: 2 * k for k, node in enumerate(nodes)}
    begin = max((position[n] for n in nodes if n.op == "placeholder"), default=0)
    ready: dict[Node, int] = {}
    sums: list[_Bucket] = []
    written: dict[int, int] = {}  # storage -> when it was last written to
    readers: dict[int, list[_Bucket]] = {}  # storage -> sums of what was last written
    for node in nodes:
        here, sources = position[node], node.all_input_nodes
        if _is_light(node) or _is_sum(node):
            known = [ready[source] for source in sources]
            known += [written.get(s, 0) for source in sources for s in storages(source)]
            ready[node] = max([begin, *known])
        else:
            ready[node] = max(begin, here) if node.op != "get_attr" else begin
        if node.target is c10d.wait_tensor.default and _is_sum(node.args[0]):
            ready[node] = due = min((position[user] for user in node.users), default=here) - 1
            (launch,) = sources
            sums.append(_Bucket.of(launch, node, ready[launch], due))
            for storage in storages(_operand(launch)):
                readers.setdefault(storage, []).append(sums[-1])
        for storage in written_storages([node]):
            written[storage] = here
            for each in readers.pop(storage, ()):
                each.last = min(each.last, here)
    return sums


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


def _filled(sums: Sequence[_Bucket], limit: int) -> list[_Bucket]:
    """Buckets, in the order in which they become known."""
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[Any, ...], _Bucket] = {}
    for each in sorted(sums, key=lambda each: each.ready):
        bucket = open_ones.get(each.kind)
        if (
            bucket is not None
            and bucket.num_bytes + each.num_bytes <= limit
            and each.ready < min(bucket.last, each.last)
        ):
            bucket.add(each)
        else:
            open_ones[each.kind] = each
            buckets.append(each)
    return sorted(buckets, key=lambda bucket: bucket.ready)


# -- the graph ------------------------------------------------------------------------------------


class _Rewrite:
    """Puts the nodes of a graph in their new order."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], buckets: list[_Bucket]) -> None:
        self._graph = graph
        self._nodes = nodes
        self._launches: dict[int, list[_Bucket]] = {}
        self._waits: dict[int, list[_Bucket]] = {}
        for bucket in buckets:
            self._launches.setdefault(bucket.ready, []).append(bucket)
            self._waits.setdefault(bucket.due, []).append(bucket)
        self._own = {node for bucket in buckets for pair in bucket.sums for node in pair}
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
        launches = [launch for launch, _ in bucket.sums]
        for launch in launches:
            self._place_with_sources(_operand(launch))
        bucket.launch = launches[0]
        if len(launches) == 1:
            self._place(launches[0])
            return
        flat = [self._add(_aten.view.default, _operand(launch), [-1]) for launch in launches]
        how = launches[0].args[1:]
        bucket.launch = self._add(c10d.all_reduce.default, self._add(_aten.cat.default, flat), *how)
        keep_places({launch: [bucket.launch] for launch in launches})

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
            self._place(bucket.sums[0][1])
            return
        whole = self._add(c10d.wait_tensor.default, bucket.launch)
        values = [_operand(launch).meta["val"] for launch, _ in bucket.sums]
        sizes = [value.numel() for value in values]
        parts = self._add(_aten.split_with_sizes.default, whole, sizes)
        for k, ((launch, wait), value) in enumerate(zip(bucket.sums, values, strict=True)):
            part = self._add(_aten.view.default, self._add(operator.getitem, parts, k), value.shape)
            # a view would keep the whole buffer alive
            result = self._add(_aten.clone.default, part)
            result.meta = dict(wait.meta)
            wait.replace_all_uses_with(result)
            for old in (wait, launch):
                self._graph.erase_node(old)
