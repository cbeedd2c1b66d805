"""Move a value that no process has whole to another layout: a program on its devices.

This is for several controllers, whose processes all call it.  A single controller moves a value
through its own memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torchpmap._base.errors import kind_of
from torchpmap._collectives import backend as raw
from torchpmap._layout.common_grid import CommonGrid, common_grid
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.defining import define
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.blocks import listed
from torchpmap._sharded.spmd import Emitter
from torchpmap._trace.compile import Definition

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
        definition, groups = _written(layout, wanted)
        known = _Move(definition.plan_id, team)
        what = f"{kind_of(layout.shape, layout.dtype)} to {wanted.sharding.spec}"
        define(team, definition, groups, f"a move of {what}")
    _moves[key] = known
    while len(_moves) > _MAX_MOVES:
        _moves.pop(next(iter(_moves)), None)
    (result,) = team.runtime.execute(team, known.id, [handle], 1)
    return result


def _written(layout: Layout, wanted: Layout) -> tuple[Definition, dict[str, RankPartition]]:
    """The program of a move, and its groups."""
    grid = _grid_of(layout, wanted)
    emitter = Emitter(grid)
    block = emitter.input("block")
    places = tuple(layout.ranks.index(rank) for rank in wanted.ranks)
    is_turned = layout.ranks != wanted.ranks
    if is_turned:
        emitter.place = emitter.call(listed, emitter.index, list(places))
    block = emitter.resharded(block, grid.cut_of(layout), grid.cut_of(wanted))
    if is_turned:  # to the device that has this place in the wanted layout
        _, group = emitter.group(tuple(range(len(grid.sizes))))
        block = emitter.call(raw.permute, block, tuple(enumerate(places)), group)
    definition = emitter.finished(
        next(_ids),
        f"move to {wanted.sharding.spec}",
        [block],
        [wanted],
        wanted.ranks,
        [(layout.block_shape, layout.dtype)],
        kind_of(layout.shape, layout.dtype),
    )
    return definition, emitter.groups


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
