"""Move a value that no process has whole to another layout: a program on its devices.

Each device takes what it needs of its own block, gathers the blocks that its new block has parts
of, and takes its part of these.  On a grid of (2, 2):

    P('x') to P(None, 'y')    device (r, c) keeps its columns c, and gathers along x
    P('x') to P(None, 'x')    gathers along x, and keeps its columns r

This is for several controllers, whose processes all call it.  A single controller moves a value
through its own memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from torchpmap._base.errors import kind_of
from torchpmap._base.torch_internals import LazyGraphModule
from torchpmap._collectives import backend as raw
from torchpmap._layout.axis_stack import group_name, subgroup_name
from torchpmap._layout.common_grid import CommonGrid, common_grid
from torchpmap._layout.grid import Cut
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.defining import define
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.blocks import joined, listed, own_block, place_along, stored
from torchpmap._trace.compile import EAGER, Definition

_MAX_MOVES = 256

_ids = itertools.count(-(2**40), -1)  # apart from those of mapped functions and of operations


@dataclass(frozen=True, eq=False)
class _Move:
    """A program that is known to the devices."""

    id: int
    team: Team

    def __del__(self) -> None:
        self.team.runtime.forget(self.id)


_moves: dict[tuple[Team, Layout, Layout], _Move] = {}
"""Least recently used first."""


def redistributed(team: Team, layout: Layout, handle: Handle, wanted: Layout) -> Handle:
    """The handle of the same value in another layout; ``team``: of the wanted layout.

    Raises:
        RuntimeError: the layouts are on different devices, or their meshes do not fit each other.
    """
    key = (team, layout, wanted)
    known = _moves.pop(key, None)
    if known is None:
        drawn = _Drawing(layout, wanted).finished()
        known = _Move(drawn.definition.plan_id, team)
        what = f"{kind_of(layout.shape, layout.dtype)} to {wanted.sharding.spec}"
        define(team, drawn.definition, drawn.groups, f"a move of {what}")
    _moves[key] = known
    while len(_moves) > _MAX_MOVES:
        _moves.pop(next(iter(_moves)), None)
    (result,) = team.runtime.execute(team, known.id, [handle], 1)
    return result


@dataclass(frozen=True)
class _Drawn:
    definition: Definition
    groups: dict[str, RankPartition]


class _Drawing:
    """Writes the graph of a move."""

    def __init__(self, layout: Layout, wanted: Layout) -> None:
        self.layout, self.wanted = layout, wanted
        self.grid = _grid_of(layout, wanted)
        self.groups: dict[str, RankPartition] = {}
        self.graph = torch.fx.Graph()
        self.index = self.graph.placeholder("index")
        self.block = self.graph.placeholder("block")
        self.place = self.index
        """Of the device among those of the value."""
        if layout.ranks != wanted.ranks:
            places = [layout.ranks.index(rank) for rank in wanted.ranks]
            self.place = self.graph.call_function(listed, (self.index, places))

    def finished(self) -> _Drawn:
        self._rearrange(self.grid.cut_of(self.layout), self.grid.cut_of(self.wanted))
        if self.layout.ranks != self.wanted.ranks:
            self._send()
        self.graph.output((self.graph.call_function(stored, (self.block,)),))
        uses_index = bool(self.index.users)
        if not uses_index:
            self.graph.erase_node(self.index)
        definition = Definition(
            next(_ids),
            f"move to {self.wanted.sharding.spec}",
            LazyGraphModule({}, self.graph),
            uses_index,
            self.wanted.ranks,
            ((self.layout.block_shape, self.layout.dtype),),
            ((self.wanted.block_shape, self.wanted.dtype),),
            EAGER,
            arguments=kind_of(self.layout.shape, self.layout.dtype),
        )
        return _Drawn(definition, self.groups)

    def _rearrange(self, cut: Cut, wanted: Cut) -> None:
        """From the block of one cut to that of another, at the same place of the grid."""
        pairs = list(itertools.zip_longest(cut, wanted, fillvalue=()))
        kept = [_shared(*pair) for pair in pairs]
        gathered = [over[n:] for (over, _), n in zip(pairs, kept, strict=True)]
        taken = [over[n:] for (_, over), n in zip(pairs, kept, strict=True)]
        joins = set(itertools.chain(*gathered))
        early = [
            not over and joins.isdisjoint(more) for over, more in zip(gathered, taken, strict=True)
        ]
        for dim, more in enumerate(taken):  # first, so that less is sent
            if early[dim]:
                self._take(dim, more)
        for dim, over in enumerate(gathered):
            self._gather(dim, over)
        for dim, more in enumerate(taken):
            if not early[dim]:
                self._take(dim, more)

    def _take(self, dim: int, over: tuple[int, ...]) -> None:
        if over:
            place = self.graph.call_function(place_along, (self.place, self.grid.sizes, over))
            arguments = (self.block, dim, self.grid.parts(over), place)
            self.block = self.graph.call_function(own_block, arguments)

    def _gather(self, dim: int, over: tuple[int, ...]) -> None:
        if over:
            arguments = (self.block, dim, self.grid.parts(over), self._group(over))
            self.block = self.graph.call_function(joined, arguments)

    def _send(self) -> None:
        """To the device that has this place in the wanted layout."""
        pairs = tuple(
            (source, self.layout.ranks.index(rank)) for source, rank in enumerate(self.wanted.ranks)
        )
        group = self._group(tuple(range(len(self.grid.sizes))))
        self.block = self.graph.call_function(raw.permute, (self.block, pairs, group))

    def _group(self, over: tuple[int, ...]) -> str:
        lines, ranks = self.grid.lines(over), self.layout.ranks
        name = group_name(ranks)
        if len(lines) > 1 or lines[0] != tuple(range(len(ranks))):
            name = subgroup_name(name, lines)
        self.groups[name] = tuple(tuple(ranks[k] for k in line) for line in lines)
        return name


def _shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many dims of the grid two entries of cuts begin with alike."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in alike)


def _grid_of(layout: Layout, wanted: Layout) -> CommonGrid:
    grid = common_grid([layout, wanted])
    if grid is not None and set(layout.ranks) == set(wanted.ranks):
        return grid
    where = " ".join(map(str, layout.devices)), " ".join(map(str, wanted.devices))
    raise RuntimeError(
        f"a ShardedTensor with blocks in several processes ({layout.sharding.spec} over "
        f"{layout.sharding.mesh} on {where[0]}) cannot be moved to {wanted.sharding.spec} over "
        f"{wanted.sharding.mesh} on {where[1]}: the devices must be the same, and one mesh a "
        "refinement of the other. Get its value into every process with "
        "torchpmap.multihost.all_gather, and put that where it belongs."
    )
