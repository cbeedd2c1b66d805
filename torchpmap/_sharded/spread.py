"""From a graph of whole values to the graph of one device: the same operations on blocks.

    whole graph, cuts of its inputs --Spread--> device graph, cuts of its results

Operands are brought where an operation needs them (``_sharded/choice``).  Where devices have parts
of a sum, the sum waits: linear operations run on the parts, and sums are made when nothing else can
run, all that are alike in one message.  A sum that is wanted cut is scattered.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchpmap._base.errors import kind_of
from torchpmap._base.pytree import tree_flatten
from torchpmap._base.torch_internals import OpOverload
from torchpmap._layout.grid import Cut, block_shape, padded, trimmed
from torchpmap._sharded.arguments import Unsupported, is_by_columns, plain
from torchpmap._sharded.choice import chosen
from torchpmap._sharded.joined import (
    VIEWS,
    Joined,
    comes_apart,
    followed,
    in_order,
    is_taken_apart,
    joined_by,
    slots_of,
)
from torchpmap._sharded.layers import INSTEAD
from torchpmap._sharded.on_blocks import OnBlocks, described
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.spmd import WITHOUT_STRIDES, Emitter, added_and_cut, added_up
from torchpmap._sharded.summands import OF_SHAPES, Moved, Value, carried
from torchpmap._sharded.trial import Trial, masked, meta, on_meta
from torchpmap._sharded.unforeseen import name_of
from torchpmap._trace.graphs import placeholders, results_of
from torchpmap._trace.repetition import place_of

_aten = torch.ops.aten

BUCKET_BYTES = 25 * 2**20
"""Sums that are so large together wait no longer: whole gradients would fill the memory."""


class NotOnBlocks(Exception):  # a verdict: the front end decides what it means
    """The graph cannot be written for devices."""


class _Waits(Exception):  # not an error: the sweep goes on with other nodes
    """A node needs sums: of which nodes, and the cuts that it wants."""

    def __init__(self, sums: Iterable[tuple[Node, Cut]]) -> None:
        self.sums = list(sums)


@dataclass
class Spread:
    """A graph of whole values that is being written for a device."""

    module: GraphModule
    """Without writes; every node has its fake value as ``meta["val"]``."""
    emitter: Emitter
    wishes: Mapping[Node, Cut] = field(default_factory=dict)
    """Nodes whose values are those of their operands, in these cuts."""
    reshards: list[Moved] = field(default_factory=list)
    _values: dict[Node, Any] = field(default_factory=dict)
    _taken: dict[tuple[int, ...], Cut] = field(default_factory=dict)
    """Shape -> the cut of a value of which rows were taken: the gradient of rows gets the same."""
    _moved: dict[tuple[Node, Cut, tuple[int, ...]], Node] = field(default_factory=dict)
    """Blocks of values in other cuts, while they are parts of sums along the last dims."""

    def run(
        self,
        inputs: Sequence[Value],
        wanted: Sequence[Cut | None],
        cotangents: Sequence[tuple[Node, int]] = (),
    ) -> list[Value]:
        """The results of the graph.

        Args:
            inputs: one for each placeholder.
            wanted: the cut of each result; None where any will do.
            cotangents: for each further placeholder its block, and the result whose cut it has; all
                that needs none of them is written first.
        """
        results = list(results_of(self.module.graph))
        places = placeholders(self.module.graph)
        self._values |= zip(places, inputs, strict=False)
        late = set(places[len(inputs) :])
        for node in self.module.graph.nodes:
            if node.op != "output" and not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        self._write_all_but(late)
        early = [(node, cut) for node, cut in zip(results, wanted, strict=True) if node not in late]
        self._finish(early)
        for place, (block, k) in zip(places[len(inputs) :], cotangents, strict=True):
            like = self._result(results[k], wanted[k])
            self._values[place] = replace(like, block=block)
        self._write_all_but(set())
        wants = list(zip(results, wanted, strict=True))
        self._finish(wants)
        return [self._result(node, cut) for node, cut in wants]

    # -- the order ---------------------------------------------------------------------------------

    def _write_all_but(self, late: Container[Node]) -> None:
        nodes = self.module.graph.nodes
        waiting = [n for n in nodes if not (n.op == "output" or n in self._values or n in late)]
        first = self._first_of_weights(waiting)
        while waiting:
            waiting = self._sweep(waiting, first)

    def _first_of_weights(self, nodes: Sequence[Node]) -> set[Node]:
        """What is made of weights alone, and no view: it must not run ahead, and be kept for long,
        while others wait for sums.
        """
        weights = {n for n, value in self._values.items() if getattr(value, "is_weight", False)}
        for node in nodes:
            if all(source in weights for source in node.all_input_nodes):
                weights.add(node)
        views = {
            node for node in weights if isinstance(node.target, OpOverload) and node.target.is_view
        }
        return weights - views

    def _sweep(self, nodes: Sequence[Node], of_weights: set[Node]) -> list[Node]:
        """Write all nodes that can be, and the sums that the first of the others waits for; the
        others.
        """
        sums: dict[tuple[Node, Cut], None] = {}
        wished: dict[tuple[Node, Cut], None] = {}  # as gradients are: most have time
        later = []
        for node in nodes:
            is_ready = all(source in self._values for source in node.all_input_nodes)
            if not is_ready or (sums and node in of_weights):
                later.append(node)
                continue
            self.emitter.source = node
            try:
                self._values[node] = self._written(node)
            except _Waits as wait:
                later.append(node)
                waiting = wished if node in self.wishes else sums
                waiting |= dict.fromkeys(wait.sums)
                if self._num_bytes(waiting) > BUCKET_BYTES:
                    self._add_up(waiting)
                    waiting.clear()
        self._add_up([*sums, *wished])
        return later

    def _num_bytes(self, sums: Iterable[tuple[Node, Cut]]) -> int:
        return sum(self._values[node].num_bytes for node in {node for node, _ in sums})

    def _finish(self, wants: Sequence[tuple[Node, Cut | None]]) -> None:
        while True:
            sums = [
                (node, self._values[node].cut if cut is None else cut)
                for node, cut in wants
                if self._values[node].over
            ]
            if not sums:
                return
            self._add_up(sums)

    def _result(self, node: Node, wanted: Cut | None) -> Value:
        self.emitter.source = node
        self._bring_back([node])
        value: Value = self._values[node]
        cut = value.cut if wanted is None else wanted
        return replace(value, block=self._moved_to(node, cut), cut=cut)

    # -- sums --------------------------------------------------------------------------------------

    def _add_up(self, wants: Iterable[tuple[Node, Cut]]) -> None:
        """Make the first of some sums, and those like it; others may grow until they are needed.

        wants: values that are parts of sums, and the cut in which each sum is wanted.
        """
        chosen: dict[Node, Cut] = {}
        for node, cut in wants:
            chosen.setdefault(node, cut)
        alike: dict[Any, list[tuple[Node, int | None]]] = {}
        for node, cut in chosen.items():
            value: Value = self._values[node]
            dim = _scattered_dim(value, cut)
            alike.setdefault((value.over, value.dtype, dim is not None), []).append((node, dim))
        if not alike:
            return
        (over, _, is_cut), members = next(iter(alike.items()))
        nodes, dims = [node for node, _ in members], [dim for _, dim in members]
        self.emitter.source = nodes[0]
        size, group = self.emitter.group(over)
        blocks = [self._values[node].block for node in nodes]
        if is_cut:
            made = self.emitter.call(added_and_cut, blocks, dims, size, group)
        else:
            made = self.emitter.call(added_up, blocks, group)
        for place, (node, dim) in enumerate(members):
            value = self._values[node]
            block = self.emitter.call(operator.getitem, made, place)
            block = self.emitter.narrow(block, value.dtype)
            cut = value.cut if dim is None else _with(value.cut, dim, over)
            self._values[node] = replace(value, block=block, cut=cut, over=())

    # -- one node ----------------------------------------------------------------------------------

    def _written(self, node: Node) -> Any:
        if node.op == "get_attr":
            value = getattr(self.module, str(node.target))  # a tensor, or a graph inside
            shape, dtype = tuple(getattr(value, "shape", ())), getattr(value, "dtype", torch.bool)
            return Value(self.emitter.constant(value), shape, dtype)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return self._values[source][node.args[1]]
        if node.target in (_aten.alias.default, _aten.detach.default):
            source = node.args[0]
            return self._values[source]
        if node.target is _aten.as_strided.default:
            value = node.all_input_nodes[0].meta["val"]
            if not value.is_contiguous() or value.storage_offset():
                raise NotOnBlocks("it takes elements by their places in memory (as_strided)")
        if node in self.wishes:
            return self._constrained(node.args[0], self.wishes[node])
        if node.target in VIEWS:
            viewed = self._viewed(node, self._values[node.all_input_nodes[0]])
            if viewed is not None:
                return viewed
        if isinstance(node.target, OpOverload) and _tensors(node.meta.get("val")):
            with contextlib.suppress(Unsupported):
                return self._operation(node, node.target)
        return self._on_whole(node)

    def _constrained(self, source: Any, wanted: Cut) -> Value:
        self._bring_back([source])
        value: Value = self._values[source]
        if value.over:
            raise _Waits([(source, wanted)])
        return replace(value, block=self._brought(source, source, wanted), cut=wanted)

    def _on_whole(self, node: Node) -> Any:
        """Something that no rule is for: every device does it with whole operands."""
        sums = [(source, ()) for source in node.all_input_nodes if self._values[source].over]
        if sums:
            raise _Waits(sums)
        self._bring_back(node.all_input_nodes)
        given = {source: self._brought(node, source, ()) for source in node.all_input_nodes}
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        target: Any = node.target
        function = WITHOUT_STRIDES.get(target, target)
        made, whole = self.emitter.call(function, *args, **kwargs), node.meta.get("val", ())
        if isinstance(whole, torch.Tensor):
            return self._values_of(node, [made], [()])
        places = [place for place, x in enumerate(whole or ()) if isinstance(x, torch.Tensor)]
        blocks = [self.emitter.call(operator.getitem, made, place) for place in places]
        return self._values_of(node, blocks, [()] * len(blocks))

    def _operation(self, node: Node, func: Any) -> Any:
        slots, sources = slots_of(node)
        kept = {name: slots[name] for name in ("memory_format",) if name in slots}
        func, arguments = plain(func, slots)
        arguments |= kept  # a view may rely on it
        if name_of(func) in OF_SHAPES:  # parts of a sum may have another dtype
            arguments["dtype"] = node.meta["val"].dtype
        values: list[Value] = [self._values[source] for source in sources]
        joined = {s: v.joined for s, v in zip(sources, values, strict=True) if v.joined}
        is_fine, rows = followed(node, joined) if joined else (True, None)
        if not is_fine:
            self._bring_back(joined)
            return self._operation(node, node.target)
        by_columns = is_by_columns(func, [source.meta["val"] for source in sources])
        trial = _trial_of(node, func, arguments, values, by_columns)
        call, placement = chosen(
            partial(described, trial, self.emitter.grid.sizes),
            {k: value.cut for k, value in enumerate(values)},
            rule_of(func),
            weights=[k for k, value in enumerate(values) if value.is_weight],
            wish=self._taken.get(tuple(arguments.get("input_sizes", ())), ()),
            uses=sum(x.target is func for x in sources[0].users) if func in _PARTS else 1,
        )
        if placement.rows and not placement.rows.is_back:
            self._taken[values[0].shape] = placement.operands[0]
        stay = all(v.cut == placement.operands[k] for k, v in enumerate(values) if v.joined)
        if not stay or (rows and placement.results[0][rows.dim :][:1] != (rows.over,)):
            self._bring_back(joined)
            return self._operation(node, node.target)
        over = carried(call, values, trial.results)
        if over is None or not set(over).isdisjoint(placement.over):
            sums = [(s, placement.operands[k]) for k, s in enumerate(sources) if values[k].over]
            if sums:
                raise _Waits(sums)
            over = ()
        operation = OnBlocks(trial, call, placement)
        if not operation.fits():
            raise Unsupported
        blocks = [
            self._brought(node, source, placement.operands[k]) for k, source in enumerate(sources)
        ]
        made = self.emitter.parts(operation, blocks)
        is_weight = bool(values) and values[0].is_weight and (func.is_view or func in _COPIES)
        results = self._values_of(
            node,
            [part for part, _ in made],
            placement.results,
            [(*over, *more) for _, more in made],
            is_weight,
            trial.results,
        )
        return replace(results, joined=rows) if rows else results

    def _viewed(self, node: Node, value: Value) -> Value | None:
        """A view that joins rows as each device has them, or takes such rows apart; else None."""
        shape, before = tuple(node.meta["val"].shape), value.joined
        rows = None if before else joined_by(node, value.shape, value.cut)
        if before and is_taken_apart(node, before):
            rest = value.cut[1:]
            if shape[len(before.shape) :] != value.shape[1:] and any(rest):
                return None
            cut = (*before.cut, *rest)
        elif rows and comes_apart(node, rows, self._values):
            cut = (rows.over, *value.cut[len(rows.shape) :])  # of the rest, if it is the same
        else:
            return None
        own = block_shape(shape, cut, self.emitter.grid.sizes)
        block = self.emitter.call(_aten.reshape.default, value.block, own)
        return replace(value, block=block, shape=shape, cut=trimmed(cut), joined=rows)

    def _bring_back(self, nodes: Iterable[Node]) -> None:
        """Put the rows of values into their order."""
        for node in nodes:
            value = self._values[node]
            rows: Joined | None = getattr(value, "joined", None)
            if rows is not None:
                sizes, cut = rows.apart(value.shape, value.cut)
                parts = self.emitter.grid.parts(rows.over)
                first = rows.over if rows.shape[0] % parts == 0 else cut[0]
                wanted = (*padded((first,), len(rows.shape)), *cut[len(rows.shape) :])
                self._note(node, replace(value, shape=sizes, cut=cut), wanted)
                block, cut = in_order(self.emitter, value.block, rows, sizes, cut, wanted)
                self._values[node] = replace(value, block=block, cut=trimmed(cut), joined=None)

    def _brought(self, node: Node, source: Node, wanted: Cut) -> Node:
        value: Value = self._values[source]
        if self.emitter.sends(value.cut, wanted):
            self._note(node, value, wanted)
        return self._moved_to(source, wanted)

    def _note(self, node: Node, value: Value, wanted: Cut) -> None:
        before, after = map(self.emitter.grid.spec_of, (value.cut, wanted))
        what = kind_of(value.shape, value.dtype), before, after, value.num_bytes
        self.reshards.append(Moved(str(node.target), place_of(node), *what))

    def _moved_to(self, node: Node, wanted: Cut) -> Node:
        value: Value = self._values[node]
        if value.cut == wanted:
            return value.block
        key = node, wanted, value.over
        known = self._moved.get(key)
        if known is None:
            known = self.emitter.resharded(value.block, value.cut, wanted)
            self._moved[key] = known
        return known

    def _values_of(
        self,
        node: Node,
        made: Sequence[Node],
        cuts: Sequence[Cut],
        overs: Sequence[tuple[int, ...]] | None = None,
        is_weight: bool = False,
        kinds: Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """The values of a node's results, which are ``made`` on a device.

        ``kinds``: of these results, if they may have other dtypes than the trace says.
        """
        whole = node.meta.get("val", ())
        results = _tensors(whole) if kinds is None else kinds
        overs = [()] * len(results) if overs is None else overs
        values = [
            Value(block, tuple(x.shape), x.dtype, cut, tuple(sorted(set(over))), is_weight)
            for block, x, cut, over in zip(made, results, cuts, overs, strict=True)
        ]
        if isinstance(whole, torch.Tensor):
            return values[0]
        rest = iter(values)
        return [next(rest) if isinstance(x, torch.Tensor) else x for x in whole]


_PARTS = (_aten.select.int, _aten.slice.Tensor)
_COPIES = (_aten.clone.default, _aten._to_copy.default)


def _scattered_dim(value: Value, wanted: Cut) -> int | None:
    """The dim along which a sum is wanted cut over the devices that have parts of it."""
    for dim, over in enumerate(wanted):
        if over and over == value.over and not (dim < len(value.cut) and value.cut[dim]):
            return dim
    return None


def _with(cut: Cut, dim: int, over: tuple[int, ...]) -> Cut:
    entries = list(padded(cut, dim + 1))
    entries[dim] = over
    return trimmed(entries)


def _trial_of(
    node: Node, func: Any, arguments: dict[str, Any], values: Sequence[Value], by_columns: bool
) -> Trial:
    """What is known of a node's call: it was traced."""
    leaves, spec = tree_flatten(node.meta["val"])
    results = tuple(meta(x.shape, x.dtype) for x in leaves if isinstance(x, torch.Tensor))
    numbers = itertools.count()
    places = tuple(next(numbers) if isinstance(x, torch.Tensor) else None for x in leaves)
    given = [meta(v.shape, v.dtype) for v in values]
    if name_of(func) in INSTEAD:  # it keeps more digits of statistics than torch's fake kernels say
        made = _tensors(masked(on_meta(func, arguments, given), arguments))
        results = tuple(meta(x.shape, y.dtype) for x, y in zip(results, made, strict=False))
    return Trial(func, arguments, given, (), places, spec, results, True, by_columns)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor)]
