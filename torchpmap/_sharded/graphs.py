"""From a call of one operation to the graph that every device runs on its blocks.

The call is tried first (``_sharded/trial``), so shapes and dtypes of the results are known.  On
meta blocks it shows that blocks come out as the layouts say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import TreeSpec, tree_unflatten
from torchpmap._base.torch_internals import outside_modes
from torchpmap._layout.common_grid import CommonGrid, common_grid
from torchpmap._layout.grid import Cut
from torchpmap._layout.layout import Layout, spread_layout
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.arguments import (
    Unsupported,
    call,
    filled,
    plain,
    slotted,
)
from torchpmap._sharded.choice import chosen
from torchpmap._sharded.on_blocks import OnBlocks, described
from torchpmap._sharded.rules.signature import placement_of
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.spmd import Emitter
from torchpmap._sharded.trial import is_refused_here, tried
from torchpmap._sharded.unforeseen import has_unforeseen_results, is_random, name_of
from torchpmap._trace.compile import Definition

_aten = torch.ops.aten
_EXPANDED = ("mean", "nansum", "sum")


@dataclass(frozen=True)
class Blueprint:
    """What is known of a kind of call before it runs."""

    definition: Definition
    groups: dict[str, RankPartition]
    inputs: tuple[Layout | None, ...]
    """Where an operand on the host goes; None for a Python number."""
    outputs: tuple[Layout, ...]
    written: tuple[int, ...]
    """If the operation writes: of the first outputs, the operands whose new values they are."""
    leaves: tuple[int | None, ...]
    """Output number, or None, per leaf of what the operation returns."""
    spec: TreeSpec
    reduces: bool
    """Whether its derivative expands a gradient to the shape of the first operand."""
    func: Any
    arguments: dict[str, Any]
    checks_numbers: bool
    """Whether a number may be out of range of an integer dtype."""
    moved: int
    """Bytes of the operands that devices need more of than they have."""

    def check_numbers(self, operands: Sequence[Any]) -> None:
        """Raise what torch raises for numbers that do not suit integers, such as 300 for uint8."""
        values = [
            torch.ones((1,) * value.ndim, dtype=value.dtype)
            if isinstance(value, torch.Tensor)
            else value
            for value in operands
        ]
        with outside_modes(), torch.no_grad():
            call(self.func, filled(self.arguments, values))

    def result(self, values: Sequence[Any]) -> Any:
        """What the operation returns, made of its outputs."""
        if self.leaves == (0,) and self.spec.is_leaf():  # faster than tree_unflatten
            return values[0]
        leaves = [None if k is None else values[k] for k in self.leaves]
        return tree_unflatten(leaves, self.spec)


def blueprint(
    func: Any,
    named: dict[str, Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout | None],
    slots: frozenset[str],
    prefer: Layout | None,
    *,
    spans: bool,
) -> Blueprint:
    """Decide how a call runs on the devices.

    Args:
        func: the ATen operation.
        named: its arguments by name.
        operands: tensors, and numbers given to arguments in ``slots``, in the order of ``named``.
        layouts: per operand; None if it is not on the devices.
        slots: names of arguments whose numbers are operands.
        prefer: layout for the first result, where those of the operands allow it.
        spans: whether no process has the whole of an operand, so that it cannot be gathered.

    Raises:
        Unsupported: the call must be gathered.
        What torch raises for such arguments.
    """
    present = [layout for layout in layouts if layout is not None]
    wanted = [] if prefer is None else [prefer]
    grid = common_grid([*present, *wanted]) or common_grid(present)
    if grid is None or any(layout.ranks != present[0].ranks for layout in present):
        raise Unsupported
    if is_random(func, named):
        raise Unsupported
    func, arguments = plain(func, slotted(named, operands, slots))
    if has_unforeseen_results(func, named, operands, present[0]):
        raise Unsupported
    trial = tried(func, arguments, operands)
    on_cpu = present[0].devices[0].platform == "cpu"
    if on_cpu and is_refused_here(func, arguments, operands):
        raise Unsupported  # torch's error comes from the operation on the host
    cuts = {k: grid.cut_of(layout) for k, layout in enumerate(layouts) if layout is not None}
    call = described(func, arguments, trial, cuts, grid.sizes)
    wish = grid.cut_of(prefer) if prefer and prefer.sharding.mesh in grid.meshes else ()
    placement = placement_of(call, rule_of(func), wish)
    if placement is None and spans:
        call, placement = chosen(
            call, lambda cuts: described(func, arguments, trial, cuts, grid.sizes), rule_of(func)
        )
    if placement is None or (any(placement.combine) and not trial.makes_new):
        raise Unsupported
    operation = OnBlocks(arguments, trial, call, placement)
    if (on_cpu and operation.is_refused()) or not operation.fits():
        raise Unsupported
    return _written(operation, operands, layouts, grid)


def _written(
    operation: OnBlocks,
    operands: Sequence[Any],
    layouts: Sequence[Layout | None],
    grid: CommonGrid,
) -> Blueprint:
    trial, func, wanted = operation.trial, operation.call.func, operation.placement.operands
    inputs = tuple(
        layout or (_layout(grid, value, wanted[k]) if isinstance(value, torch.Tensor) else None)
        for k, (value, layout) in enumerate(zip(operands, layouts, strict=True))
    )
    emitter = Emitter(grid)
    nodes = [emitter.input(f"operand_{k}") for k in range(len(inputs))]
    blocks, moved = [], 0
    for k, (node, layout) in enumerate(zip(nodes, inputs, strict=True)):
        if layout is None:
            blocks.append(emitter.call(_aten._local_scalar_dense.default, node))
            continue
        cut = grid.cut_of(layout)
        moved += emitter.sends(cut, wanted[k]) * math.prod(layout.shape) * layout.dtype.itemsize
        blocks.append(emitter.resharded(node, cut, wanted[k]))
    outputs = _output_layouts(operation, layouts, grid, is_moved=moved > 0)
    results = [
        emitter.resharded(node, cut, grid.cut_of(layout))
        for node, cut, layout in zip(
            emitter.results(operation, blocks), operation.cuts, outputs, strict=True
        )
    ]
    ranks = [device.id for device in grid.devices]
    integers = any(
        isinstance(x, torch.Tensor) and not is_inexact(x) for x in (*trial.values, *trial.results)
    )
    return Blueprint(
        definition=emitter.finished(0, str(func), results, outputs, ranks),
        groups=emitter.groups,
        inputs=inputs,
        outputs=outputs,
        written=trial.written,
        leaves=trial.leaves,
        spec=trial.spec,
        reduces=name_of(func) in _EXPANDED and layouts[0] is not None,
        func=func,
        arguments=operation.arguments,
        checks_numbers=integers and None in inputs,
        moved=moved,
    )


def _output_layouts(
    operation: OnBlocks, layouts: Sequence[Layout | None], grid: CommonGrid, *, is_moved: bool
) -> tuple[Layout, ...]:
    """``is_moved``: whether devices got more of operands than they had, so that each keeps only its
    block of what it computes whole.
    """
    trial = operation.trial
    kept = [layouts[position] for position in trial.written]
    written = tuple(layout for layout in kept if layout is not None)
    if len(written) < len(kept):
        raise Unsupported  # it writes to a tensor on the host
    if not trial.makes_new:
        return written
    cuts = [
        grid.cut_of(spread_layout(result.shape, result.dtype, grid.devices))
        if is_moved and not cut
        else cut
        for result, cut in zip(trial.results, operation.placement.results, strict=True)
    ]
    return written + tuple(
        _layout(grid, result, cut) for result, cut in zip(trial.results, cuts, strict=True)
    )


def _layout(grid: CommonGrid, value: torch.Tensor, cut: Cut) -> Layout:
    layout = grid.layout(value.shape, value.dtype, cut)
    if layout is None:
        raise Unsupported
    return layout
