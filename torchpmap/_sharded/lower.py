"""From a call of one operation, or a move of a value, to what every device runs.

    an operation and its operands --trial--> rule -> placement -> a graph of one node
    two layouts of a value ------------------------------------> a graph of none

The call is tried first (``_sharded/trial``), so shapes and dtypes of the results are known.  On
meta blocks it shows that blocks come out as the layouts say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchpmap._base.ambient import ambient
from torchpmap._base.errors import kind_of
from torchpmap._collectives import backend as raw
from torchpmap._layout.common_grid import CommonGrid, common_grid
from torchpmap._layout.layout import Layout, spread_layout
from torchpmap._runtime.base import Team
from torchpmap._runtime.defining import define
from torchpmap._sharded.arguments import Unsupported, filled, plain
from torchpmap._sharded.choice import chosen
from torchpmap._sharded.on_blocks import OnBlocks, described
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.spmd import Emitter, listed
from torchpmap._sharded.transfer import places_here
from torchpmap._sharded.trial import tried
from torchpmap._sharded.unforeseen import has_unforeseen_results, is_random, name_of

_aten = torch.ops.aten
_SMALLER = ("mean", "nansum", "select", "slice", "sum")
_ids = itertools.count(-1, -1)  # negative, unlike those of mapped functions


@dataclass(frozen=True, eq=False)
class Operation:
    """One kind of operation, or of move, known to the workers."""

    team: Team
    id: int
    inputs: tuple[Layout | None, ...]
    """Where an operand on the host goes; None for a Python number."""
    outputs: tuple[Layout, ...]
    spans: bool
    """Whether several processes, each of which makes the call, hold the results."""
    trial: Any = None
    """The ``Trial`` of its call; None: it is a move."""
    moved: int = 0
    """Bytes of the operands that devices need more of than they have."""
    reduces: bool = False
    """Whether its derivative makes a gradient as large as the first operand of a smaller one."""
    checks_numbers: bool = False
    """Whether a number may be out of range of an integer dtype."""

    def __del__(self) -> None:
        self.team.runtime.forget(self.id)


def _defined(
    team: Team,
    emitter: Emitter,
    name: str,
    results: Sequence[torch.fx.Node],
    layouts: tuple[tuple[Layout | None, ...], tuple[Layout, ...]],
    **facts: Any,
) -> Operation:
    """What devices run for a graph with these results, of which they are told.

    ``layouts``: those of what it takes, and of what it returns.
    """
    inputs, outputs = layouts
    shapes = ", ".join(kind_of(layout.shape, layout.dtype) for layout in inputs if layout)
    definition = emitter.finished(
        next(_ids),
        name,
        results,
        outputs,
        team.ranks,
        arguments=f"ShardedTensors {shapes}",
        ambient=ambient(),
    )
    define(team, definition, emitter.groups, f"{name} of ShardedTensors {shapes}")
    spans = bool(outputs) and len(places_here(outputs[0])) < len(team.ranks)
    return Operation(team, definition.plan_id, inputs, outputs, spans, **facts)


# -- a move ----------------------------------------------------------------------------------------


def lower_move(team: Team, layout: Layout, wanted: Layout) -> Operation:
    """Bring a value to another layout, without a process that has it whole.

    ``team``: of the wanted layout.

    Raises:
        RuntimeError: the layouts are on different devices, or their meshes do not fit each other.
    """
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
    name = f"move to {wanted.sharding.spec}"
    return _defined(team, emitter, name, [block], ((layout,), (wanted,)))


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


# -- an operation ----------------------------------------------------------------------------------


def lower_operation(
    team: Team,
    func: Any,
    arguments: dict[str, Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout | None],
    prefer: Layout | None,
) -> Operation:
    """Decide how a call runs on the devices.

    Args:
        team: of the operands that are on devices.
        func: the ATen operation.
        arguments: by name, with a ``Slot`` for each operand.
        operands: tensors, and numbers.
        layouts: per operand; None if it is not on the devices.
        prefer: layout for the first result, where those of the operands allow it.

    Raises:
        Unsupported: it is for this process.
        What torch raises for such arguments.
    """
    present = [layout for layout in layouts if layout]
    grid = common_grid([*present, prefer or present[0]]) or common_grid(present)
    if grid is None or any(layout.ranks != team.ranks for layout in present):
        raise Unsupported
    given = filled(arguments, operands)
    if is_random(func, given) or has_unforeseen_results(func, given, operands, present[0]):
        raise Unsupported
    func, arguments = plain(func, arguments)
    on_cpu = grid.devices[0].platform == "cpu"
    trial = tried(func, arguments, operands, on_cpu=on_cpu)
    if any(layouts[position] is None for position in trial.written):
        raise Unsupported  # it writes to a tensor on the host
    call_with = partial(described, trial, grid.sizes)
    cuts = {k: grid.cut_of(layout) for k, layout in enumerate(layouts) if layout}
    wish = grid.cut_of(prefer) if prefer and prefer.sharding.mesh in grid.meshes else ()
    is_row = trial.row is not None
    on_blocks = OnBlocks(trial, *chosen(call_with, cuts, rule_of(func), wish=wish, is_row=is_row))
    if not _runs(on_blocks, on_cpu):
        on_blocks = OnBlocks(trial, *chosen(call_with, {}, None))
        if not _runs(on_blocks, on_cpu):
            raise Unsupported
    wanted = on_blocks.placement.operands
    inputs = tuple(
        layout or (None if k in trial.numbers else grid.layout(x.shape, x.dtype, wanted[k]))
        for k, (x, layout) in enumerate(zip(trial.values, layouts, strict=True))
    )
    if None in inputs:
        trial.check_numbers(operands)
    return _emitted(team, Emitter(grid), on_blocks, inputs, layouts)


def _runs(on_blocks: OnBlocks, on_cpu: bool) -> bool:
    """Whether it runs on the blocks that it is given, and results come out as they should."""
    if not on_blocks.trial.makes_new and any(on_blocks.placement.combine):
        return False  # what it writes would be parts of a sum
    return not (on_cpu and on_blocks.is_refused()) and on_blocks.fits()


def _emitted(
    team: Team,
    emitter: Emitter,
    on_blocks: OnBlocks,
    inputs: tuple[Layout | None, ...],
    layouts: Sequence[Layout | None],
) -> Operation:
    """``inputs``: as ``layouts``, and where operands on the host go."""
    grid, trial, wanted = emitter.grid, on_blocks.trial, on_blocks.placement.operands
    nodes = [emitter.input(f"operand_{k}") for k in range(len(inputs))]
    blocks, moved = [], 0
    for k, (node, layout) in enumerate(zip(nodes, inputs, strict=True)):
        if layout is None:  # a number
            blocks.append(node)
            continue
        cut = grid.cut_of(layout)
        moved += emitter.sends(cut, wanted[k]) * math.prod(layout.shape) * layout.dtype.itemsize
        blocks.append(emitter.resharded(node, cut, wanted[k]))
    outputs = tuple(layout for k in trial.written if (layout := inputs[k]))
    if trial.makes_new:
        cuts = on_blocks.placement.results
        if moved:  # each device keeps only its block of what all compute whole
            wholes = [spread_layout(x.shape, x.dtype, grid.devices) for x in trial.results]
            cuts = tuple(cut or grid.cut_of(x) for cut, x in zip(cuts, wholes, strict=True))
        pairs = zip(trial.results, cuts, strict=True)
        outputs += tuple(grid.layout(result.shape, result.dtype, cut) for result, cut in pairs)
    made = zip(emitter.parts(on_blocks, blocks), on_blocks.cuts, outputs, strict=True)
    results = [
        emitter.resharded(
            emitter.sum(part, over, layout.dtype) if over else part, cut, grid.cut_of(layout)
        )
        for (part, over), cut, layout in made
    ]
    return _defined(
        team,
        emitter,
        str(trial.func),
        results,
        (inputs, outputs),
        trial=trial,
        moved=moved,
        reduces=name_of(trial.func) in _SMALLER and layouts[0] is not None,
        checks_numbers=None in inputs and (trial.has_integers or trial.row is not None),
    )
