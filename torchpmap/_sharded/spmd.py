"""Writes what one device does with blocks: the graph, and the groups that it communicates in.

An operation (``_sharded/graphs``) is a node between blocks that are brought to the cuts it needs; a
move (``_sharded/redistribute``) is a block brought to another cut.  On a grid of (2, 2):

    P('x') to P(None, 'y')    device (r, c) keeps its columns c, and gathers along x
    P('x') to P(None, 'x')    gathers along x, and keeps its columns r

The graph is written down directly; there is nothing to trace.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._base.torch_internals import LazyGraphModule
from torchpmap._collectives.backend import summable
from torchpmap._layout.axis_stack import group_name, subgroup_name
from torchpmap._layout.common_grid import CommonGrid
from torchpmap._layout.grid import Cut
from torchpmap._layout.layout import Layout
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.arguments import filled, positional
from torchpmap._sharded.blocks import (
    added_once,
    combined,
    joined,
    own_block,
    place_along,
    stored,
)
from torchpmap._sharded.layers import INSTEAD, run_on_blocks
from torchpmap._sharded.on_blocks import OnBlocks
from torchpmap._sharded.unforeseen import ROUNDED, name_of
from torchpmap._trace.compile import EAGER, Definition, Kind

_aten = torch.ops.aten


class Emitter:
    """The graph of a device of a grid, as far as it is written."""

    def __init__(self, grid: CommonGrid) -> None:
        self.grid = grid
        self.groups: dict[str, RankPartition] = {}
        self._ranks = tuple(device.id for device in grid.devices)
        self._graph = torch.fx.Graph()
        self.index = self._graph.placeholder("index")
        """Of the device among those that run the graph."""
        self.place = self.index
        """Of the device on the grid."""

    def input(self, name: str) -> torch.fx.Node:
        """A block that the device has; all come before anything is done with one."""
        return self._graph.placeholder(name)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self._graph.call_function(function, args, kwargs)

    def finished(
        self,
        number: int,
        name: str,
        results: Sequence[torch.fx.Node],
        outputs: Sequence[Layout],
        ranks: Sequence[int],
        inputs: Sequence[Kind] = (),
        arguments: str = "",
    ) -> Definition:
        """The definition of a plan with these results, which are kept as ``outputs`` say."""
        self._graph.output(tuple(self.call(stored, block) for block in results))
        uses_index = bool(self.index.users)
        if not uses_index:
            self._graph.erase_node(self.index)
        return Definition(
            number,
            name,
            LazyGraphModule({}, self._graph),
            uses_index,
            tuple(ranks),
            tuple(inputs),
            tuple((layout.block_shape, layout.dtype) for layout in outputs),
            EAGER,
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

    def results(self, operation: OnBlocks, blocks: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        """What an operation gives: the new values of what it writes, then its results, whole along
        the dims of the grid along which devices have parts of them.

        ``blocks``: of its operands, in the cuts that it needs.
        """
        trial = operation.trial
        given = [self._given(operation, k, block) for k, block in enumerate(blocks)]
        parts = self.parts(operation, given)
        written = [given[position] for position in trial.written]
        if not trial.makes_new:
            return written
        order = operation.call.arguments.get("ord", operation.call.arguments.get("p"))
        results = [
            part
            if how is None or not operation.is_sent(how)
            else self.call(combined, part, how.kind, *self.group(how.over), order)
            for part, how in zip(parts, operation.placement.combine, strict=True)
        ]
        if not operation.rounds_parts:
            return written + results
        return [
            self.call(_aten.to.dtype, node, result.dtype)
            for node, result in zip(results, trial.results, strict=True)
        ]

    def _given(self, operation: OnBlocks, position: int, block: torch.fx.Node) -> torch.fx.Node:
        """What an operation takes for an operand that a device has."""
        if not isinstance(operation.trial.values[position], torch.Tensor):
            return block
        if position in operation.placement.once and operation.added_along:
            block = self.call(added_once, block, self.place_along(operation.added_along))
        if position in operation.trial.written:  # the stored value may be used again
            block = self.call(_aten.clone.default, block)
        return self.call(summable, block) if operation.rounds_parts else block

    def parts(self, operation: OnBlocks, blocks: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
        """The results of an operation on blocks, which may be parts of those of the whole."""
        func, arguments = operation.block_call()
        if operation.rounds_parts and arguments.get("dtype") in ROUNDED:
            arguments = arguments | {"dtype": ROUNDED[arguments["dtype"]]}
        args, kwargs = positional(func, filled(arguments, blocks))
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

    # -- from cut to cut ---------------------------------------------------------------------------

    def resharded(self, block: torch.fx.Node, cut: Cut, wanted: Cut) -> torch.fx.Node:
        """The block of another cut.  A device takes what it needs of its own, gathers the blocks
        that the new one has parts of, and takes its part of these.
        """
        pairs = list(itertools.zip_longest(self._real(cut), self._real(wanted), fillvalue=()))
        kept = [_alike(*pair) for pair in pairs]
        gathered = [over[n:] for (over, _), n in zip(pairs, kept, strict=True)]
        taken = [over[n:] for (_, over), n in zip(pairs, kept, strict=True)]
        joins = set(itertools.chain(*gathered))
        early = [
            not over and joins.isdisjoint(more) for over, more in zip(gathered, taken, strict=True)
        ]
        for dim, more in enumerate(taken):  # first, so that less is sent
            if more and early[dim]:
                block = self._own(block, dim, more)
        for dim, over in enumerate(gathered):
            if over:
                block = self.call(joined, block, dim, *self.group(over))
        for dim, more in enumerate(taken):
            if more and not early[dim]:
                block = self._own(block, dim, more)
        return block

    def _real(self, cut: Cut) -> list[tuple[int, ...]]:
        """A cut without the dims of the grid that have one device."""
        return [tuple(k for k in over if self.grid.sizes[k] > 1) for over in cut]

    def _own(self, block: torch.fx.Node, dim: int, over: tuple[int, ...]) -> torch.fx.Node:
        return self.call(own_block, block, dim, self.grid.parts(over), self.place_along(over))


def _alike(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many dims of the grid two entries of cuts begin with alike."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in alike)
