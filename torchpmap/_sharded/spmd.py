"""Writes what one device does with blocks: the graph, and the groups that it communicates in.

An operation (``_sharded/graphs``) is a node between blocks that are brought to the cuts it needs; a
move (``_sharded/redistribute``) is a block brought to another cut.  On a grid of (2, 2):

    P('x') to P(None, 'y')    device (r, c) keeps its columns c, and gathers along x
    P('x') to P(None, 'x')    gathers along x, and keeps its columns r

The graph is written down directly; there is nothing to trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._base.torch_internals import LazyGraphModule
from torchpmap._layout.axis_stack import group_name, subgroup_name
from torchpmap._layout.common_grid import CommonGrid
from torchpmap._layout.grid import Cut
from torchpmap._layout.layout import Layout
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.blocks import joined, own_block, place_along, stored
from torchpmap._trace.compile import EAGER, Definition, Kind


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
