"""What one device does in a mapped call: take its rows, call the function, lay out what it returns.

A device with several rows runs the function once, under ``torch.func.vmap`` over its rows: its
*lanes*.  A mapped axis is then a process axis (the devices) times a vmapped axis (the lanes).  With
no process axis all rows are lanes of the calling process.

If the function is itself mapped, the two may share the devices, which then form a mesh with one dim
per axis.  Its program is the ``inner`` one, and each device takes a part of the rows of both.

The same ``Program`` is traced in the controller (``_trace/trace``) and, with ``compile=False``, run
as it is on every worker, so all modes follow the same rules and raise the same errors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from torchpmap._base.axis_spec import OUT_AXES_HINT, broadcast_axes, canonical_axis
from torchpmap._base.pytree import Structure, flatten
from torchpmap._base.torch_errors import is_limit_of_vmap
from torchpmap._base.torch_internals import set_forward_grad
from torchpmap._collectives import axis_index, pbroadcast, pmax
from torchpmap._layout.axis_stack import Axis, bind, lookup, mesh_axes
from torchpmap._layout.grid import Cut, cut_at, dim_of, nested
from torchpmap._trace.effects import difference
from torchpmap._trace.escaped import note, watched
from torchpmap._trace.idioms import translate
from torchpmap._trace.kinds import as_result
from torchpmap._trace.replication import is_same
from torchpmap._trace.traced_views import in_lanes, settle
from torchpmap._trace.transform_rules import TransformRules
from torchpmap.random._streams import Streams, streams, within


@dataclass(frozen=True)
class Input:
    """A leaf that arrives as a block; ``dim`` is the mapped dim (its size: the number of lanes),
    None for an unmapped leaf.
    """

    dim: int | None


@dataclass(frozen=True)
class Constant:
    """A leaf that is the same Python value on every device."""

    value: Any


GIVE_AN_AXIS = "give it an out axis"
"""What to do with an output that is not replicated, as messages say it."""


class Claim(NamedTuple):
    """A value declared to be the same along some axes."""

    value: torch.Tensor
    same_along: tuple[Axis, ...]
    refuse: Callable[[Sequence[Hashable]], Exception]


@dataclass(frozen=True)
class Outcome:
    """What a program returned, as blocks; a None leaf stays None and has no block."""

    structure: Structure
    blocks: tuple[torch.Tensor | None, ...]
    cuts: tuple[Cut, ...]
    """Per leaf; devices along axes that are not in it return the same."""
    checks: tuple[torch.Tensor, ...]
    """How far values declared replicated differ between devices (``check_replicated``)."""
    checked: tuple[str, ...]
    """What was declared of each."""
    draws: int = 0
    """How often random numbers were drawn."""
    first_counts: bool = False
    """Whether only the first of equal copies gets a cotangent; else each gets an equal part."""
    unbound: tuple[int, ...] = ()
    """Dims of the grid that no axis is bound for: devices along them do the same, and each has the
    whole of every cotangent.
    """
    tracked: tuple[frozenset[Axis], ...] | None = None
    """Of a program in which it is followed which values vary: per dim of the grid, its axis, if it
    is followed along it.  There what does not vary has one cotangent, which all devices hold.
    """
    claims: tuple[Claim, ...] = ()
    """Of values inside that are no outputs."""
    refuse: Callable[[int, Sequence[Hashable]], Exception] | None = None
    """The error for a leaf that may differ along axes that are not in its cut; None if that is
    allowed.
    """

    @property
    def dims(self) -> tuple[int | None, ...]:
        """Per leaf, its cut along the outermost axis."""
        return tuple(dim_of(cut, 0) for cut in self.cuts)

    @property
    def outputs(self) -> list[tuple[torch.Tensor, Cut]]:
        """Every block that is an output."""
        pairs = zip(self.blocks, self.cuts, strict=True)
        return [(block, cut) for block, cut in pairs if block is not None]

    @property
    def requires_grad(self) -> bool:
        return any(block is not None and block.requires_grad for block in self.blocks)


@dataclass(frozen=True)
class Program:
    """A function and how its arguments are made from blocks."""

    fun: Callable[..., Any]
    name: str
    structure: Structure
    """Of ``(args, kwargs)``."""
    leaves: tuple[Input | Constant, ...]
    out_axes: Any
    axis_name: Hashable
    check_replicated: bool
    lanes: int
    """Rows per device."""
    randomness: str
    seed: torch.Tensor
    """Stands for the key of a call."""
    inner: Program | None = None
    """The program of ``fun``, if it is mapped itself and shares the devices."""
    mesh: tuple[int, ...] = ()
    """With an inner program: devices along this axis, and along those inside."""
    is_inner: bool = False
    otherwise: ClassVar[str] = GIVE_AN_AXIS

    @property
    def levels(self) -> tuple[Program, ...]:
        """This program and those inside it."""
        return (self,) if self.inner is None else (self, *self.inner.levels)

    @property
    def all_lanes(self) -> tuple[int, ...]:
        """Rows per device along every axis."""
        return tuple(level.lanes for level in self.levels)

    def axes(self, process_axis: Axis) -> tuple[Axis | None, ...]:
        """The axis of all devices, split into one per level; None for a level with one device."""
        names = [level.axis_name for level in self.levels]
        return mesh_axes(process_axis, self.mesh or (process_axis.size,), names)

    def run(
        self,
        blocks: Sequence[torch.Tensor],
        process_axis: Axis | None,
        key: torch.Tensor | None = None,
    ) -> Outcome:
        """Run on one device's blocks.  ``process_axis``: the axis of the devices, if there is one;
        ``key``: the random key of this call; replaces ``seed``.
        """
        if key is not None:
            return replace(self, seed=key).run(blocks, process_axis)
        if process_axis is None:
            return self._run_lanes(blocks, None, ())
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
        dims = [leaf.dim for leaf in self.leaves if isinstance(leaf, Input)]
        rows = [
            block if dim is None else block.squeeze(dim)
            for block, dim in zip(blocks, dims, strict=True)
        ]
        with bind(process_axis):
            outcome = self._run_row(rows, inside)
        stacked = [
            value if value is None or dim is None else value.unsqueeze(dim)
            for value, dim in zip(outcome.blocks, outcome.dims, strict=True)
        ]
        return replace(outcome, blocks=tuple(stacked))

    def _run_lanes(
        self,
        blocks: Sequence[torch.Tensor],
        process_axis: Axis | None,
        inside: Sequence[Axis | None],
    ) -> Outcome:
        outer = () if process_axis is None else (process_axis,)
        outcomes: list[Outcome] = []

        def run_row(index: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
            with bind(*outer, Axis(self.axis_name, self.lanes, index, None)):
                outcome = self._run_row(rows, inside)
            outcomes.append(outcome)
            return [*(block for block, _ in outcome.outputs), *outcome.checks]

        devices = [tensor.device for tensor in (*blocks, *(axis.index for axis in outer))]
        index = torch.arange(self.lanes, device=devices[0] if devices else None)
        dims = [leaf.dim for leaf in self.leaves if isinstance(leaf, Input)]
        over_lanes = torch.func.vmap(run_row, (0, *dims), randomness=self.randomness)
        with watched(self.name):
            lanes_first = iter(over_lanes(index, *blocks))
        (outcome,) = outcomes
        stacked: list[torch.Tensor | None] = []
        for value, dim in zip(outcome.blocks, outcome.dims, strict=True):
            rows = None if value is None else next(lanes_first)
            if rows is not None:  # a value for all devices is that of the first row
                rows = _FirstRow.apply(rows) if dim is None else rows.movedim(0, dim)
            stacked.append(rows)
        checks = tuple(rows[0] for rows in lanes_first)
        return replace(outcome, blocks=tuple(stacked), checks=checks)

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
        outcome = self._lay_out(called(self.fun, self.structure, self.leaves, rows))
        found = self._compared(outcome)
        claims = self._claims(outcome, found)
        return replace(outcome, checks=tuple(found.values()), checked=claims)

    def _run_inner(self, rows: Sequence[torch.Tensor], inside: Sequence[Axis | None]) -> Outcome:
        assert self.inner is not None
        outcome = self.inner._run_level(rows, inside)
        returned = outcome.structure.unflatten(list(outcome.blocks))
        laid_out = self._lay_out(returned)
        found = self._compared(laid_out)
        checks = [_of_all(found[leaf], outcome.cuts[leaf], inside) for leaf in found]
        checks += [pmax(check, self.axis_name) for check in outcome.checks]
        return replace(
            laid_out,
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
        paths = outcome.structure.paths(f"the output of {self.name}")
        return tuple(f"out_axes is None for {paths[leaf]}" for leaf in leaves)

    def _lay_out(self, returned: Any) -> Outcome:
        values, structure = flatten(returned)
        axes = broadcast_axes(self.out_axes, returned, what="pmap out_axes", hint=OUT_AXES_HINT)
        paths = structure.paths(f"the output of {self.name}")
        blocks: list[torch.Tensor | None] = []
        cuts: list[Cut] = []
        for value, axis, path in zip(values, axes, paths, strict=True):
            tensor = None if value is None else as_result(value, path)
            dim = None
            if tensor is not None and axis is not None:
                dim = canonical_axis(axis, tensor.dim() + 1, what="pmap out_axes", path=path)
            blocks.append(tensor)
            cuts.append(cut_at(dim))
        return Outcome(structure, tuple(blocks), tuple(cuts), (), ())


def called(
    fun: Callable[..., Any],
    structure: Structure,
    leaves: Sequence[Any],
    given: Sequence[torch.Tensor],
) -> Any:
    """What a function returns for a call of this structure; a leaf that is no ``Constant`` is the
    next of the given tensors.
    """
    tensors = iter(given)
    values = [leaf.value if isinstance(leaf, Constant) else next(tensors) for leaf in leaves]
    args, kwargs = structure.unflatten(values)
    note(given, fun)
    with in_lanes():
        try:
            with TransformRules():
                result = fun(*args, **kwargs)
        except AttributeError as error:
            translate(error)
            raise
        settle(result)
    return result


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


class _FirstRow(torch.autograd.Function):
    """[lanes, *s] -> [*s]: the first of rows that are declared equal.

    Each row gets an equal part of the cotangent, as each device does when it has one row.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: torch.Tensor) -> torch.Tensor:
        return rows[0].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.lanes = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return (cotangent / ctx.lanes).expand(ctx.lanes, *cotangent.shape)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        with set_forward_grad(True):  # as in _Extreme.jvp
            return tangent[0].clone()


def unequal_results(
    prefix: str, whose: str, first: tuple[object, str], other: tuple[object, str]
) -> str:
    """``whose``: "rows" or "devices"; ``first``, ``other``: which one returned which kinds."""
    return (
        f"{prefix}: {whose} returned different kinds of results: {first[0]} returned {first[1]}, "
        f"{other[0]} returned {other[1]}. All {whose} must return the same structure, shapes and "
        "dtypes to be stacked."
    )


def not_replicated(prefix: str, claim: str, difference: float | str, otherwise: str) -> str:
    """``claim``: what was declared of an output; ``otherwise``: how to declare it as it is;
    ``difference``: a number, or a placeholder for it.
    """
    told = difference if isinstance(difference, str) else f"{difference:g}"
    return (
        f"{prefix}: {claim}, but its value differs between devices (largest difference "
        f"{told}). Reduce it over the axis (for example with pmean), or {otherwise}."
    )
