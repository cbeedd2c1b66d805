"""From a call of one operation to the graph that every device runs on its blocks.

The call is tried first (``_sharded/trial``), so shapes and dtypes of the results are known.  On
meta blocks it shows that blocks come out as the layouts say.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import TreeSpec, tree_leaves, tree_unflatten
from torchpmap._base.torch_internals import outside_modes
from torchpmap._collectives.backend import summable
from torchpmap._layout.common_grid import CommonGrid, common_grid
from torchpmap._layout.grid import Cut
from torchpmap._layout.layout import Layout
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._sharded.arguments import (
    Slot,
    Unsupported,
    call,
    filled,
    plain,
    positional,
    slotted,
)
from torchpmap._sharded.blocks import added_once, combined
from torchpmap._sharded.layers import INSTEAD, run_on_blocks
from torchpmap._sharded.rules.signature import Call, Combination, Operand, Placement, placement_of
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.spmd import Emitter
from torchpmap._sharded.trial import Trial, is_refused_here, masked, meta, on_meta, tried
from torchpmap._sharded.unforeseen import ROUNDED, has_unforeseen_results, is_random, name_of
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
) -> Blueprint:
    """Decide how a call runs on the devices.

    Args:
        func: the ATen operation.
        named: its arguments by name.
        operands: tensors, and numbers given to arguments in ``slots``, in the order of ``named``.
        layouts: per operand; None if it is not on the devices.
        slots: names of arguments whose numbers are operands.
        prefer: layout for the first result, where those of the operands allow it.

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
    call = _described(func, arguments, trial, layouts, grid)
    wish = grid.cut_of(prefer) if prefer and prefer.sharding.mesh in grid.meshes else ()
    placement = placement_of(call, rule_of(func), wish)
    if placement is None or (any(placement.combine) and not trial.makes_new):
        raise Unsupported
    writing = _Writing(func, arguments, operands, layouts, trial, call, placement, grid)
    if on_cpu and writing.refuses_blocks():
        raise Unsupported
    return writing.finished()


def _described(
    func: Any,
    arguments: dict[str, Any],
    trial: Trial,
    layouts: Sequence[Layout | None],
    grid: CommonGrid,
) -> Call:
    described = {
        position: Operand(
            position,
            tuple(value.shape),
            () if layout is None else grid.cut_of(layout),
            position in trial.written,
            value.itemsize,
        )
        for position, (value, layout) in enumerate(zip(trial.values, layouts, strict=True))
        if isinstance(value, torch.Tensor)
    }
    defaults = {
        argument.name: argument.default_value
        for argument in func._schema.arguments
        if argument.has_default_value()
    }
    values = [described.get(position, value) for position, value in enumerate(trial.values)]
    return Call(
        func,
        defaults | filled(arguments, values),
        tuple(described.values()),
        tuple(tuple(result.shape) for result in trial.results),
        grid.sizes,
    )


class _Writing:
    """Writes the graph of a call."""

    def __init__(
        self,
        func: Any,
        arguments: dict[str, Any],
        operands: Sequence[Any],
        layouts: Sequence[Layout | None],
        trial: Trial,
        call: Call,
        placement: Placement,
        grid: CommonGrid,
    ) -> None:
        self.func, self.arguments, self.trial = func, arguments, trial
        self.call, self.placement, self.layouts = call, placement, layouts
        self.grid = grid
        self.emitter = Emitter(grid)
        self.instead = name_of(func) in INSTEAD
        self.outputs = self._output_layouts()
        self.inputs = self._input_layouts(operands)

    def finished(self) -> Blueprint:
        self._check_blocks()
        results = self._results(self._blocks())
        ranks = [device.id for device in self.grid.devices]
        integers = any(
            isinstance(x, torch.Tensor) and not is_inexact(x)
            for x in (*self.trial.values, *self.trial.results)
        )
        return Blueprint(
            definition=self.emitter.finished(0, str(self.func), results, self.outputs, ranks),
            groups=self.emitter.groups,
            inputs=self.inputs,
            outputs=self.outputs,
            written=self.trial.written,
            leaves=self.trial.leaves,
            spec=self.trial.spec,
            reduces=name_of(self.func) in _EXPANDED and self.layouts[0] is not None,
            func=self.func,
            arguments=self.arguments,
            checks_numbers=integers and None in self.inputs,
        )

    # -- layouts

    def _output_layouts(self) -> tuple[Layout, ...]:
        written: tuple[Layout, ...] = ()
        if self.trial.written:
            kept = [self.layouts[position] for position in self.trial.written]
            if any(layout is None for layout in kept):
                raise Unsupported  # it writes to a tensor on the host
            written = tuple(layout for layout in kept if layout is not None)
            if not self.trial.makes_new:
                return written
        return written + tuple(
            self._layout(result.shape, result.dtype, cut)
            for result, cut in zip(self.trial.results, self.placement.results, strict=True)
        )

    def _input_layouts(self, operands: Sequence[Any]) -> tuple[Layout | None, ...]:
        return tuple(
            layout
            or (
                self._layout(value.shape, value.dtype, self.placement.operands[position])
                if isinstance(value, torch.Tensor)
                else None
            )
            for position, (value, layout) in enumerate(zip(operands, self.layouts, strict=True))
        )

    def _layout(self, shape: Sequence[int], dtype: torch.dtype, cut: Cut) -> Layout:
        layout = self.grid.layout(shape, dtype, cut)
        if layout is None:
            raise Unsupported
        return layout

    # -- the graph

    def _block_shape(self, shape: Sequence[int], cut: Cut) -> list[int]:
        block = list(shape)
        for dim, over in enumerate(cut):
            block[dim] //= self.grid.parts(over)
        return block

    def _block_call(self) -> tuple[Any, dict[str, Any]]:
        """The same operation with the sizes of blocks."""
        placement = self.placement
        shape = self._block_shape(self.call.results[0], placement.results[0])
        if placement.as_view:
            return _aten.view.default, {"self": Slot(0), "size": shape}
        if placement.size is not None:
            return self.func, self.arguments | {placement.size: shape}
        return self.func, self.arguments

    @property
    def _rounds_parts(self) -> bool:
        """Whether partial results would be rounded before they are added up."""
        combinations = zip(self.trial.results, self.placement.combine, strict=True)
        return not self.trial.written and any(
            result.dtype in ROUNDED and self._is_sent(how) and how.kind not in ("max", "min")
            for result, how in combinations
            if how is not None
        )

    def _is_sent(self, how: Combination) -> bool:
        """Whether putting a result together takes communication."""
        return how.kind != "equal" and self.grid.parts(how.over) > 1

    def refuses_blocks(self) -> bool:
        """Whether the kernel of CPUs refuses what it takes as a whole: some refuse one element."""
        try:
            return is_refused_here(*self._block_call(), self._meta_blocks())
        except Exception:
            return True

    def _meta_blocks(self) -> list[Any]:
        return [
            meta(self._block_shape(value.shape, self.placement.operands[k]), value.dtype)
            if isinstance(value, torch.Tensor)
            else value
            for k, value in enumerate(self.trial.values)
        ]

    def _check_blocks(self) -> None:
        func, arguments = self._block_call()
        blocks = self._meta_blocks()
        try:
            made = masked(on_meta(func, arguments, blocks), arguments)
        except Exception as error:
            raise Unsupported from error
        if not self.trial.makes_new:
            made = [blocks[position] for position in self.trial.written]
        leaves = [leaf for leaf in tree_leaves(made) if leaf is not None]
        expected = [
            (self._block_shape(result.shape, cut), result.dtype)
            for result, cut in zip(self.trial.results, self._result_cuts(), strict=True)
        ]
        if [(list(leaf.shape), leaf.dtype) for leaf in leaves] != expected:
            raise Unsupported

    def _result_cuts(self) -> Sequence[Cut]:
        if not self.trial.makes_new:
            return [self.placement.operands[position] for position in self.trial.written]
        return self.placement.results

    def _blocks(self) -> list[Any]:
        """Per operand, what the operation gets on a device."""
        emitter, blocks = self.emitter, list[Any]()
        inputs = [emitter.input(f"operand_{k}") for k in range(len(self.inputs))]
        for k, (node, layout) in enumerate(zip(inputs, self.inputs, strict=True)):
            if layout is None:
                blocks.append(emitter.call(_aten._local_scalar_dense.default, node))
                continue
            node = emitter.resharded(node, self.grid.cut_of(layout), self.placement.operands[k])
            if k in self.placement.once:
                node = self._added_once(node)
            if k in self.trial.written:  # the stored value may be used again
                node = emitter.call(_aten.clone.default, node)
            if self._rounds_parts and isinstance(self.trial.values[k], torch.Tensor):
                node = emitter.call(summable, node)
            blocks.append(node)
        return blocks

    def _added_once(self, node: torch.fx.Node) -> torch.fx.Node:
        over = next((how.over for how in self.placement.combine if how and self._is_sent(how)), ())
        if not over:
            return node
        return self.emitter.call(added_once, node, self.emitter.place_along(over))

    def _results(self, blocks: Sequence[Any]) -> list[torch.fx.Node]:
        func, arguments = self._block_call()
        if self._rounds_parts and arguments.get("dtype") in ROUNDED:
            arguments = arguments | {"dtype": ROUNDED[arguments["dtype"]]}
        args, kwargs = positional(func, filled(arguments, blocks))
        if self.instead:
            args = (name_of(func), *self.emitter.group(self.placement.over), *args)
            func = run_on_blocks
        node = self.emitter.call(func, *args, **kwargs)
        written = [blocks[position] for position in self.trial.written]
        if not self.trial.makes_new:
            return written
        parts = [node]
        if not self.trial.spec.is_leaf():
            parts = [
                self.emitter.call(operator.getitem, node, place)
                for place, leaf in enumerate(self.trial.leaves)
                if leaf is not None
            ]
        arguments = self.call.arguments
        order = arguments.get("ord", arguments.get("p"))
        results = [
            part
            if how is None or not self._is_sent(how)
            else self.emitter.call(combined, part, how.kind, *self.emitter.group(how.over), order)
            for part, how in zip(parts, self.placement.combine, strict=True)
        ]
        if not self._rounds_parts:
            return written + results
        return [
            self.emitter.call(_aten.to.dtype, node, result.dtype)
            for node, result in zip(results, self.trial.results, strict=True)
        ]
