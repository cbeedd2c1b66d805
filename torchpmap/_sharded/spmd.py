"""Writes what one device does with blocks: the graph, and the groups that it communicates in.

An operation is a node between blocks that are brought to the cuts it needs (``_sharded/lower``;
many of them, ``_sharded/spread``); a move is a block brought to another cut.  On a grid of (2, 2):

    P('x') to P(None, 'y')    device (r, c) keeps its columns c, and gathers along x
    P('x') to P(None, 'x')    sends each device of its column the columns that it keeps
    P('x') to P('y')          gathers along x, and keeps its rows c

The graph is written down directly; there is nothing to trace.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from torchpmap._base.ambient import Ambient
from torchpmap._base.torch_internals import FakeTensor, LazyGraphModule
from torchpmap._collectives import backend as raw
from torchpmap._collectives.groups import pick
from torchpmap._layout.axis_stack import group_name, subgroup_name
from torchpmap._layout.common_grid import CommonGrid
from torchpmap._layout.grid import Cut
from torchpmap._layout.layout import Layout
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.arguments import filled, positional
from torchpmap._sharded.layers import INSTEAD, promoted, run_on_blocks
from torchpmap._sharded.on_blocks import OnBlocks
from torchpmap._sharded.rules.signature import Combine
from torchpmap._sharded.unforeseen import ROUNDED, name_of
from torchpmap._trace.compile import EAGER, Definition, Kind
from torchpmap._trace.repetition import keep_places

_aten = torch.ops.aten

Steps = list[tuple[int, ...]]

WITHOUT_STRIDES = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
}
"""Operations that rely on strides, which blocks that were sent do not keep -> those that do not."""


class Emitter:
    """The graph of a device of a grid, as far as it is written."""

    def __init__(self, grid: CommonGrid) -> None:
        self.grid = grid
        self.groups: dict[str, RankPartition] = {}
        self._ranks = grid.ranks
        self._graph = torch.fx.Graph()
        self._constants: dict[str, Any] = {}
        self.index = self._graph.placeholder("index")
        """Of the device among those that run the graph."""
        self.place = self.index
        """Of the device on the grid."""
        self.source: torch.fx.Node | None = None
        """What is written now, in a graph of whole values: its line is that of what is called."""

    def input(self, name: str) -> torch.fx.Node:
        """A block that the device has; all come before anything is done with one."""
        return self._graph.placeholder(name)

    def constant(self, value: Any) -> torch.fx.Node:
        """A tensor, or a graph inside, that all devices have."""
        name = f"constant_{len(self._constants)}"
        self._constants[name] = value
        return self._graph.get_attr(name)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self._graph.call_function(function, args, kwargs)
        if self.source is not None:
            keep_places({self.source: [node]})
        return node

    def module(self, results: Sequence[torch.fx.Node]) -> GraphModule:
        """The graph that returns these results, of the index of a device and its blocks."""
        self._graph.output(tuple(results))
        return LazyGraphModule(self._constants, self._graph)

    def finished(
        self,
        number: int,
        name: str,
        results: Sequence[torch.fx.Node],
        outputs: Sequence[Layout],
        ranks: Sequence[int],
        inputs: Sequence[Kind] = (),
        arguments: str = "",
        ambient: Ambient = (),
    ) -> Definition:
        """The definition of a plan with these results, which are kept as ``outputs`` say."""
        blocks = [self.call(stored, block) for block in results]
        uses_index = bool(self.index.users)
        if not uses_index:
            self._graph.erase_node(self.index)
        return Definition(
            number,
            name,
            self.module(blocks),
            uses_index,
            tuple(ranks),
            tuple(inputs),
            tuple((layout.block_shape, layout.dtype) for layout in outputs),
            EAGER,
            ambient,
            arguments=arguments,
        )

    # -- where a device is -------------------------------------------------------------------------

    def place_along(self, over: tuple[int, ...]) -> torch.fx.Node:
        """Its place along some dims of the grid."""
        if over == tuple(range(len(self.grid.sizes))):
            return self.place
        return self.call(place_along, self.place, self.grid.sizes, over)

    def group(self, over: tuple[int, ...]) -> tuple[int, str]:
        """Size and name of the group of a device and those that lie along some dims with it."""
        lines = self.grid.lines(over)
        name = group_name(self._ranks)
        if lines != (tuple(range(len(self._ranks))),):
            name = subgroup_name(name, lines)
        if len(lines[0]) > 1:
            self.groups[name] = tuple(tuple(self._ranks[k] for k in line) for line in lines)
        return len(lines[0]), name

    # -- an operation ------------------------------------------------------------------------------

    def parts(
        self, operation: OnBlocks, blocks: Sequence[torch.fx.Node]
    ) -> list[tuple[torch.fx.Node, tuple[int, ...]]]:
        """What an operation gives: the new values of what it writes, then its results; with each,
        the dims of the grid along which devices have parts of it, which are still to be added up.

        ``blocks``: of its operands, in the cuts that it needs.
        """
        given = [self._given(operation, k, block) for k, block in enumerate(blocks)]
        made = self._on_blocks(operation, given)
        written = [(given[position], ()) for position in operation.trial.written]
        return [*written, *(self._combined(operation, made) if operation.trial.makes_new else ())]

    def sum(self, part: torch.fx.Node, over: tuple[int, ...], dtype: torch.dtype) -> torch.fx.Node:
        """The sum of what the devices along some dims of the grid have."""
        return self.narrow(self.call(raw.all_reduce, part, "sum", self.group(over)[1]), dtype)

    def narrow(self, whole: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        """A sum in its dtype, of which the parts may have more digits."""
        return self.call(_aten.to.dtype, whole, dtype) if dtype in ROUNDED else whole

    def _given(self, operation: OnBlocks, position: int, block: torch.fx.Node) -> torch.fx.Node:
        """What an operation takes for an operand that a device has."""
        if not isinstance(operation.trial.values[position], torch.Tensor):
            is_row = operation.placement.rows is not None  # to read it would wait
            return block if is_row else self.call(_aten._local_scalar_dense.default, block)
        if position == 0 and operation.trial.by_columns:
            block = self.call(in_columns, block)
        if position in operation.placement.signature.once and operation.added_along:
            block = self.call(added_once, block, self.place_along(operation.added_along))
        if position in operation.trial.written:  # the stored value may be used again
            block = self.call(_aten.clone.default, block)
        return self.call(raw.summable, block) if operation.rounds_parts else block

    def _on_blocks(
        self, operation: OnBlocks, blocks: Sequence[torch.fx.Node]
    ) -> list[torch.fx.Node]:
        """What an operation returns for blocks."""
        rows = operation.placement.rows
        if rows is not None:
            shape = operation.block_shape(operation.call.results[0], operation.placement.results[0])
            function = rows_put if rows.is_back else rows_taken
            start: Any = rows.start
            if operation.trial.row is not None:
                *blocks, row = blocks
                start = self.call(torch.remainder, row, operation.trial.num_rows)
            given = (rows.dim, start, rows.step, rows.length)
            return [self.call(function, self.place_along(rows.over), given, shape, *blocks)]
        func, arguments = operation.block_call()
        if operation.rounds_parts and arguments.get("dtype") in ROUNDED:
            arguments = arguments | {"dtype": ROUNDED[arguments["dtype"]]}
        args, kwargs = positional(func, filled(arguments, blocks))
        func = WITHOUT_STRIDES.get(func, func)
        name = name_of(operation.call.func)
        if name in INSTEAD:
            args = (name, *self.group(operation.placement.over), *args)
            func = run_on_blocks
        node = self.call(func, *args, **kwargs)
        if operation.trial.spec.is_leaf():
            return [node]
        return [
            self.call(operator.getitem, node, place)
            for place, leaf in enumerate(operation.trial.leaves)
            if leaf is not None
        ]

    def _combined(
        self, operation: OnBlocks, made: Sequence[torch.fx.Node]
    ) -> Iterator[tuple[torch.fx.Node, tuple[int, ...]]]:
        """Each result, whole but for a sum along some dims, and those dims."""
        order = operation.call.arguments.get("ord", operation.call.arguments.get("p"))
        combine = operation.placement.combine
        for part, how, result in zip(made, combine, operation.trial.results, strict=True):
            if how is None or not operation.is_sent(how):
                yield self._as(operation, part, result), ()
            elif how.kind == "sum":
                yield part, how.over
            elif how.kind == "mean":
                parts = self.grid.parts(how.over)
                yield self.call(_aten.div.Tensor, part, parts), how.over
            else:
                whole = self.call(combined, part, how.kind, *self.group(how.over), order)
                yield self._as(operation, whole, result), ()

    def _as(self, operation: OnBlocks, node: torch.fx.Node, result: torch.Tensor) -> torch.fx.Node:
        return self.narrow(node, result.dtype) if operation.rounds_parts else node

    # -- from cut to cut ---------------------------------------------------------------------------

    def resharded(self, block: torch.fx.Node, cut: Cut, wanted: Cut) -> torch.fx.Node:
        """The block of another cut.  A device takes what it needs of its own, gathers the blocks
        that the new one has parts of, and takes its part of these.
        """
        gathered, taken = self._steps(cut, wanted)
        joins = set(itertools.chain(*gathered))
        early = [
            not over and joins.isdisjoint(more) for over, more in zip(gathered, taken, strict=True)
        ]
        for dim, more in enumerate(taken):  # first, so that less is sent
            if more and early[dim]:
                block = self._own(block, dim, more)
        sent = [dim for dim, over in enumerate(gathered) if over]
        late = [dim for dim, more in enumerate(taken) if more and not early[dim]]
        if len(sent) == len(late) == 1 and gathered[sent[0]] == taken[late[0]]:
            return self.call(exchanged, block, sent[0], late[0], *self.group(gathered[sent[0]]))
        for dim in sent:
            block = self.call(joined, block, dim, *self.group(gathered[dim]))
        for dim in late:
            block = self._own(block, dim, taken[dim])
        return block

    def sends(self, cut: Cut, wanted: Cut) -> bool:
        """Whether devices need more than they have, to bring a value to another cut."""
        return any(self._steps(cut, wanted)[0])

    def _steps(self, cut: Cut, wanted: Cut) -> tuple[Steps, Steps]:
        """Per dim, the dims of the grid along which blocks are joined, and then cut."""
        pairs = list(itertools.zip_longest(self._real(cut), self._real(wanted), fillvalue=()))
        kept = [_alike(*pair) for pair in pairs]
        gathered = [over[n:] for (over, _), n in zip(pairs, kept, strict=True)]
        return gathered, [over[n:] for (_, over), n in zip(pairs, kept, strict=True)]

    def _real(self, cut: Cut) -> list[tuple[int, ...]]:
        """A cut without the dims of the grid that have one device."""
        return [tuple(k for k in over if self.grid.sizes[k] > 1) for over in cut]

    def _own(self, block: torch.fx.Node, dim: int, over: tuple[int, ...]) -> torch.fx.Node:
        return self.call(own_block, block, dim, self.grid.parts(over), self.place_along(over))


def _alike(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many dims of the grid two entries of cuts begin with alike."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in alike)


# -- what the graph calls --------------------------------------------------------------------------


def place_along(index: torch.Tensor, sizes: Sequence[int], over: Sequence[int]) -> torch.Tensor:
    """The place of device ``index`` of a grid along some of its dims, the first the slowest."""
    place = torch.zeros_like(index)
    for k in over:  # device 5 of a grid of (2, 4): 5 // 4 = 1 along dim 0, 5 % 4 along dim 1
        place = place * sizes[k] + index // math.prod(sizes[k + 1 :]) % sizes[k]
    return place


def added_once(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """``x`` on the first of the devices that add up partial results, zeros on the others."""
    return torch.where(place == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))


def own_block(whole: torch.Tensor, dim: int, size: int, index: torch.Tensor) -> torch.Tensor:
    """The block at place ``index`` of a value that this device holds whole, contiguous as stored
    blocks are.

    Some kernels ignore strides: ``native_layer_norm_backward`` reads ``mean`` and ``rstd`` as if
    they were contiguous, because torch's own always are.
    """
    rows = whole.shape[dim] // size
    if index.is_cpu and not isinstance(index, FakeTensor):  # else it is traced
        return whole.narrow(dim, int(index) * rows, rows).contiguous()
    # reading the index would wait for all that the device has to do
    return pick(whole.unflatten(dim, (size, rows)).movedim(dim, 0), index).contiguous()


def rows_taken(
    place: torch.Tensor, rows: Sequence[int], shape: Sequence[int], block: torch.Tensor
) -> torch.Tensor:
    """The rows that the block at ``place`` has, and in place of the others -0.0: to add it to a
    number changes no bit.
    """
    dim, start, step, count = rows
    at = torch.arange(count, device=place.device) * step + start - place * block.shape[dim]
    nothing = block.new_full((), complex(-0.0, -0.0) if block.is_complex() else -0.0)
    return promoted(_rows_at(block, dim, at, nothing)).reshape(shape)


def rows_put(
    place: torch.Tensor, rows: Sequence[int], shape: Sequence[int], *blocks: torch.Tensor
) -> torch.Tensor:
    """The block at ``place`` of the first of two, or of zeros, with the last as these rows."""
    dim, start, step, count = rows
    at = torch.arange(shape[dim], device=place.device) + place * shape[dim] - start
    at = torch.where(at % step == 0, at // step, -1)
    part = blocks[-1].reshape(*shape[:dim], count, *shape[dim + 1 :])
    return _rows_at(part, dim, at, blocks[0] if len(blocks) > 1 else part.new_zeros(()))


def _rows_at(x: torch.Tensor, dim: int, at: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The rows of ``x`` at these places, and ``other`` where it has no such row."""
    size = x.shape[dim]
    known = ((at >= 0) & (at < size)).view(-1, *[1] * (x.dim() - dim - 1))
    if size > 1:  # else it is broadcast
        x = _aten.index.Tensor(x, [*[None] * dim, at.clamp(0, size - 1)])
    return torch.where(known, x, other)


def listed(index: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """``numbers[index]`` as a tensor."""
    return pick(index.new_tensor(numbers), index)


def joined(block: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """The blocks of a group put together along a dim, on every device of it; contiguous."""
    return raw.all_gather(block, size, group).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def combined(
    part: torch.Tensor, kind: Combine, size: int, group: str, order: float | None
) -> torch.Tensor:
    """Combine partial results into the whole, on every device; ``order`` is that of a norm."""
    if kind == "max" or kind == "min":
        return raw.all_reduce(part, kind, group)
    parts = raw.all_gather(part, size, group)
    if kind == "prod":
        return parts.prod(0, dtype=part.dtype)
    if kind == "logsumexp":
        return parts.logsumexp(0)
    assert kind == "norm", kind
    return torch.linalg.vector_norm(parts, 2 if order is None else order, dim=0)


def stored(block: torch.Tensor) -> torch.Tensor:
    """A block as it is kept: contiguous, and not a part of a larger memory.

    It may share its memory with another value, for example after a reshape: values are immutable.
    """
    block = block.resolve_conj().resolve_neg()
    alone = block.untyped_storage().nbytes() == block.numel() * block.itemsize
    if alone and block.is_contiguous():
        return block
    return block.clone(memory_format=torch.contiguous_format)


def in_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrices, stored by columns."""
    return matrix.mT.contiguous().mT


def exchanged(block: torch.Tensor, dim: int, other: int, size: int, group: str) -> torch.Tensor:
    """The blocks of a group joined along ``dim``, and cut along ``other``: a device sends each of
    the others the part that it keeps.  Contiguous.
    """
    rows = block.unflatten(other, (size, block.shape[other] // size)).movedim(other, 0)
    parts = raw.all_to_all(rows, size, group)
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def added_up(parts: Sequence[torch.Tensor], group: str) -> list[torch.Tensor]:
    """The sums of the parts of a group, on every device of it."""
    return raw.all_reduce_many(parts, "sum", group)


def added_and_cut(
    parts: Sequence[torch.Tensor], dims: Sequence[int], size: int, group: str
) -> list[torch.Tensor]:
    """Of the sum of each part over a group, this device's block along its dim; one message."""
    rows = [
        x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0)
        for x, dim in zip(parts, dims, strict=True)
    ]
    flat = torch.cat([x.reshape(size, -1) for x in rows], 1)
    own = raw.reduce_scatter(flat, size, group).split([x[0].numel() for x in rows])
    return [x.reshape(row.shape[1:]) for x, row in zip(own, rows, strict=True)]
