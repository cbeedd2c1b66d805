"""A function of rows: what ``pmap`` maps.

A device with several rows runs the function once, under ``torch.func.vmap`` over its rows, its
*lanes*.  A mapped axis is then a process axis (the devices) times a vmapped axis (the lanes).  With
no process axis all rows are lanes of the calling process.

If the function is itself mapped, the two may share the devices, which then form a mesh with one dim
per axis.  Its program is the ``inner`` one, and each device takes a part of the rows of both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from torchpmap._base.axis_spec import OUT_AXES_HINT, canonical_axis
from torchpmap._base.torch_errors import is_limit_of_vmap
from torchpmap._collectives import axis_index, pbroadcast, pmax
from torchpmap._layout.axis_stack import Axis, bind, lookup, mesh_axes
from torchpmap._layout.grid import Cut, cut_at, dim_of, nested
from torchpmap._trace.effects import difference
from torchpmap._trace.program import GIVE_AN_AXIS, Outcome, Program
from torchpmap._trace.replication import is_same
from torchpmap._trace.transformable import Maybe, Tensors, Transformable, apply
from torchpmap.random._streams import Streams, streams, within


@dataclass(frozen=True)
class RowProgram(Program):
    """A function of rows, along one axis, and perhaps that of the mapped function inside it."""

    check_replicated: bool
    inner: RowProgram | None = None
    """The program of ``fun``, if it is mapped itself and shares the devices."""
    mesh: tuple[int, ...] = ()
    """With an inner program: devices along this axis, and along those inside."""
    is_inner: bool = False
    what_is_out: ClassVar[str] = "pmap out_axes"
    out_hint: ClassVar[str] = OUT_AXES_HINT
    otherwise: ClassVar[str] = GIVE_AN_AXIS
    part: ClassVar[str] = "row"

    def of(self, inner: RowProgram, mesh: tuple[int, ...]) -> RowProgram:
        """This program, whose function has the program ``inner``."""
        names, sizes = (*self.names, *inner.names), (*self.sizes, *inner.sizes)
        inner = replace(inner, is_inner=True)
        return replace(self, inner=inner, mesh=mesh, names=names, sizes=sizes)

    @property
    def of_one(self) -> RowProgram:
        return replace(self, sizes=(1,))

    @property
    def axis_name(self) -> Hashable:
        """Of the rows."""
        return self.names[0]

    @property
    def lanes(self) -> int:
        """Rows per device."""
        return self.sizes[0]

    @property
    def all_cuts(self) -> list[Cut]:
        """Of the blocks, along the axes of all levels, which have the same leaves."""
        inside = [()] * len(self.cuts) if self.inner is None else self.inner.all_cuts
        return list(map(nested, self._dims, inside))

    @property
    def _dims(self) -> list[int | None]:
        """Per block, the dim of the rows."""
        return [dim_of(cut, 0) for cut in self.cuts]

    def place(self, number: int) -> str:
        return f"in row {number} of {self.lanes}, axis {self.axis_name!r}"

    def axes(self, process_axis: Axis) -> tuple[Axis | None, ...]:
        return mesh_axes(process_axis, self.mesh or (process_axis.size,), self.names)

    def seen_shape(self, block: torch.Tensor, cut: Cut) -> Sequence[int]:
        dim = dim_of(cut, 0)
        return (block if dim is None else block.select(dim, 0)).shape

    def run(self, blocks: Sequence[torch.Tensor], process_axis: Axis | None) -> Outcome:
        if process_axis is None:
            return self._run_lanes(blocks, None, (), are_devices=False)
        return self._run_level(blocks, self.axes(process_axis))

    def _run_level(self, blocks: Sequence[torch.Tensor], axes: Sequence[Axis | None]) -> Outcome:
        process_axis, *inside = axes
        if process_axis is None:
            return self._run_lanes(blocks, None, inside)
        if self.lanes > 1:
            try:
                outer = None if process_axis.size == 1 else process_axis
                return self._run_lanes(blocks, outer, inside)
            except RuntimeError as error:
                if is_limit_of_vmap(error):
                    error.add_note(_LANES_NOTE.format(lanes=self.lanes))
                raise
        rows = [
            block if dim is None else block.squeeze(dim)
            for block, dim in zip(blocks, self._dims, strict=True)
        ]
        with bind(process_axis):
            return self._run_row(rows, inside).change_blocks(_as_block)

    def _run_lanes(
        self,
        blocks: Sequence[torch.Tensor],
        process_axis: Axis | None,
        inside: Sequence[Axis | None],
        *,
        are_devices: bool = True,
    ) -> Outcome:
        outer = () if process_axis is None else (process_axis,)

        def run_row(index: torch.Tensor, rows: Sequence[torch.Tensor]) -> Outcome:
            lanes = Axis(self.axis_name, self.lanes, index, None, is_lanes=are_devices)
            with bind(*outer, lanes):
                return self._run_row(rows, inside)

        return self.over_lanes(run_row, self.lanes, blocks, self._dims, _stacked, outer)

    def _run_row(self, rows: Sequence[torch.Tensor], inside: Sequence[Axis | None]) -> Outcome:
        """Call the function on one row; the result has no stacked dims yet."""
        row = axis_index(self.axis_name)
        numbers: AbstractContextManager[Streams | None] = (
            within(row, self.randomness)
            if self.is_inner
            else streams(self.seed, row, self.randomness)
        )
        with numbers as active:
            outcome = self._call(rows) if self.inner is None else self._run_inner(rows, inside)
        return replace(outcome, draws=0 if active is None else active.draws)

    def _call(self, rows: Sequence[torch.Tensor]) -> Outcome:
        outcome = self.call_function(rows)
        found = self._compared(outcome)
        claims = self._claims(outcome, found)
        return replace(outcome, checks=tuple(found.values()), checked=claims)

    def _run_inner(self, rows: Sequence[torch.Tensor], inside: Sequence[Axis | None]) -> Outcome:
        assert self.inner is not None
        outcome = self.inner._run_level(rows, inside)
        laid_out = self.lay_out(outcome.returned)
        found = self._compared(laid_out)
        checks = [_of_all(found[leaf], outcome.cuts[leaf], inside) for leaf in found]
        checks += [pmax(check, self.axis_name) for check in outcome.checks]
        return replace(
            laid_out,
            bound=outcome.bound,
            cuts=tuple(map(nested, laid_out.dims, outcome.cuts)),
            checks=tuple(checks),
            checked=(*self._claims(laid_out, found), *outcome.checked),
        )

    def _compared(self, outcome: Outcome) -> dict[int, torch.Tensor]:
        """How much the values of leaves declared replicated differ, by leaf; without those that are
        proved to be the same.
        """
        if not self.check_replicated:
            return {}
        parts = lookup(self.axis_name)
        pairs = enumerate(zip(outcome.blocks, outcome.dims, strict=True))
        declared = {k: x for k, (x, dim) in pairs if x is not None and dim is None}
        # before comparisons make the graph longer
        unproved = {k: x for k, x in declared.items() if not is_same(x, parts)}
        return {k: difference(x.detach(), self.axis_name) for k, x in unproved.items()}

    def _claims(self, outcome: Outcome, leaves: Iterable[int]) -> tuple[str, ...]:
        paths = self.paths(outcome.structure)
        own = f"{self.prefix}: " if self.is_inner else ""  # the error names the outermost map
        return tuple(f"{own}out_axes is None for {paths[leaf]}" for leaf in leaves)

    def _cut(self, block: torch.Tensor, out: Any, path: str) -> Cut:
        if out is None:
            return ()
        return cut_at(canonical_axis(out, block.dim() + 1, what=self.what_is_out, path=path))


def _as_block(row: torch.Tensor, cut: Cut) -> torch.Tensor:
    dim = dim_of(cut, 0)
    return row if dim is None else row.unsqueeze(dim)


def _stacked(lanes: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The rows of an output; a value for all devices is that of the first row."""
    dim = dim_of(cut, 0)
    return apply(_FirstRow(), [lanes])[0] if dim is None else lanes.movedim(0, dim)


def _of_all(check: torch.Tensor, cut: Cut, axes: Sequence[Axis | None]) -> torch.Tensor:
    """The largest check of the devices along inner axes; along an axis that returns the value of
    its first device, the check of that device.
    """
    for k, axis in enumerate(axes):
        if axis is not None:
            same = dim_of(cut, k) is None
            with bind(axis):
                check = pbroadcast(check, axis.name, 0) if same else pmax(check, axis.name)
    return check


_LANES_NOTE = (
    "{lanes} rows run at once on each device, under torch.func.vmap, because there are more rows "
    "than devices. What vmap cannot do (.item(), .backward(), requires_grad_(), writing a row's "
    "value into a shared tensor) works with one row per device, or with torchpmap.grad."
)


class _FirstRow(Transformable):
    """[lanes, *s] -> [*s]: the first of rows that are declared equal.

    Each row gets an equal part of the cotangent, as each device does when it has one row.
    """

    def run(self, tensors: Tensors) -> Tensors:
        return [tensors[0][0].clone()]

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> Maybe:
        (cotangent,), (rows,) = cotangents, tensors
        return [None if cotangent is None else (cotangent / len(rows)).expand(rows.shape)]

    def jvp(self, tensors: Tensors, tangents: Maybe) -> Maybe:
        return [None if x is None else x[0].clone() for x in tangents]

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[Tensors, Sequence[int | None]]:
        return apply(self, [tensors[0].movedim(dims[0] or 0, 1)]), [0]
