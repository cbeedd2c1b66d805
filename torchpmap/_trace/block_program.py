"""A function of blocks: what ``shard_map`` maps, over the axes of a mesh or some of them.

``run_inside`` is for a call inside another one, over axes of the mesh that the other leaves alone.
Along such an axis all devices compute the same.  So a device has the whole arguments, takes its own
blocks, and gathers the results; and of every cotangent outside it has the whole.  Seen from outside
an axis along which it is followed which values vary: an argument is cast, so that the parts of its
gradient are summed, and results are values that the devices share again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import forward_ad

from torchpmap._base.context import assigned
from torchpmap._base.inexact import is_inexact
from torchpmap._base.torch_internals import (
    at_depth,
    forward_level,
    innermost,
    is_vmap_wrapper,
    is_wrapped,
    layers,
    level_of,
    tracing_mode,
)
from torchpmap._collectives import all_gather, axis_index, pbroadcast
from torchpmap._collectives.groups import pick, varied, whole
from torchpmap._collectives.primitives import Same, apply
from torchpmap._collectives.varying import NONE, Axes, Tracking, axes_of, set_axes
from torchpmap._layout.axis_stack import Axis, bind, bound, joined, lookup
from torchpmap._layout.grid import Cut, dim_of, trimmed
from torchpmap._layout.mesh import Mesh, PartitionSpec, names_of
from torchpmap._trace.capture import Exchange
from torchpmap._trace.casts import is_tracked, tracked
from torchpmap._trace.effects import difference
from torchpmap._trace.environment import tensors_of
from torchpmap._trace.program import Outcome, Program, join, split
from torchpmap._trace.replication import Demand, is_same
from torchpmap.random._streams import are_active, streams, within


class Surrounding(NamedTuple):
    """The call of ``shard_map`` that runs, as mapped functions inside it see it."""

    mesh: Mesh
    free: dict[Hashable, Axis]
    """The axes of the mesh that it leaves to them."""
    known: dict[Axis, Axis]
    """Of each axis that one of them has used: the one along which it is followed which values vary.
    Backward passes of several calls meet, so these have the same.
    """
    demands: list[Demand]
    """What they declare."""
    checks: dict[str, torch.Tensor]
    """By what they declare."""

    def followed(self, name: Hashable) -> Axis:
        """A free axis, as one along which it is followed which values vary."""
        axis = self.free[name]
        if axis not in self.known:
            self.known[axis] = followed(axis)
        return self.known[axis]


# Per thread, as the bound axes are.
_surrounding: ContextVar[Surrounding | None] = ContextVar("torchpmap_surrounding", default=None)

surrounding = _surrounding.get


def surrounded_by(outer: Surrounding | None) -> AbstractContextManager[None]:
    """In the block, ``surrounding`` returns this."""
    return assigned(_surrounding, outer)


@dataclass(frozen=True)
class BlockProgram(Program):
    """A function of blocks."""

    mesh: Mesh
    manual: frozenset[Hashable]
    """The axes that are bound inside; along the others all devices do the same."""
    check_vma: bool
    what_is_out: ClassVar[str] = "shard_map out_specs"
    out_hint: ClassVar[str] = (
        "\n\nThe full pytree is the output of the mapped function. Ensure that the `out_specs` "
        "argument to `shard_map` is a pytree prefix of the function's output."
    )
    otherwise: ClassVar[str] = (
        "mention the axis in its entry of out_specs; or pass check_vma=False, and the value of the "
        "first device is returned"
    )
    part: ClassVar[str] = "device"

    @property
    def bound(self) -> tuple[Hashable, ...]:
        """The axes that are bound inside, in their order."""
        return tuple(name for name in self.names if name in self.manual)

    def shared(self, cut: Cut, names: Sequence[Hashable] | None = None) -> tuple[Hashable, ...]:
        """Those of the bound axes, or of others, along which a value is not cut."""
        names = self.bound if names is None else names
        cut_over = {self.names[k] for over in cut for k in over}
        return tuple(name for name in self.names if name in names and name not in cut_over)

    def run(self, blocks: Sequence[torch.Tensor], process_axis: Axis | None) -> Outcome:
        if process_axis is None:
            outer = surrounding()
            return self._run_lanes(blocks) if outer is None else run_inside(self, blocks, outer)
        index = process_axis.index
        axes = {
            name: self.followed(axis or Axis(name, 1, torch.zeros_like(index), None))
            for name, axis in zip(self.names, self.axes(process_axis), strict=True)
        }
        with contextlib.ExitStack() as stack:
            for name in self.bound:
                stack.enter_context(bind(axes[name]))
            outcome = self._run(blocks, axes)
        tracked = tuple(axes[name].tracked for name in self.names) if self.check_vma else None
        unbound = tuple(k for k, name in enumerate(self.names) if name not in self.manual)
        return replace(outcome, tracked=tracked, unbound=unbound)

    def _run_lanes(self, values: Sequence[torch.Tensor]) -> Outcome:
        """Run on whole values, with a vmap for every axis of the mesh."""
        axes: dict[Hashable, Axis] = {}

        def level(k: int, values: Sequence[torch.Tensor]) -> Outcome:
            if k == len(self.sizes):
                return self._run(values, axes)
            name, size = self.names[k], self.sizes[k]

            def lane(index: torch.Tensor, inner: Sequence[torch.Tensor]) -> Outcome:
                axes[name] = self.followed(Axis(name, size, index, None))
                with bind(axes[name]) if name in self.manual else contextlib.nullcontext():
                    return level(k + 1, inner)

            def stack(lanes: torch.Tensor, cut: Cut) -> torch.Tensor:
                return lanes[0] if dim_of(cut, k) is None else lanes

            dims = [None if dim_of(cut, k) is None else 0 for cut in self.cuts]
            return self.over_lanes(lane, size, values, dims, stack)

        # copies: one value may be given twice, and be cut in two ways
        pairs = zip(values, self.cuts, strict=True)
        return level(0, [split(x.clone(), cut, self.sizes) for x, cut in pairs]).change_blocks(join)

    def followed(self, axis: Axis) -> Axis:
        """The axis, along which it is followed which values vary if outputs are to be checked."""
        if not self.check_vma or axis.name not in self.manual:
            return axis
        return followed(axis)

    @contextlib.contextmanager
    def surrounded(
        self, axes: Mapping[Hashable, Axis], outer: Surrounding | None = None
    ) -> Iterator[Surrounding]:
        """A block in which the function runs; the axes that are not bound are left for mapped
        functions inside it, which ``outer``, if this is one, hears of.
        """
        free = {name: axis for name, axis in axes.items() if name not in self.manual}
        others = ({}, [], {}) if outer is None else outer[2:]
        found = Surrounding(self.mesh, free, *others)
        with surrounded_by(found), tracked() if self.check_vma else contextlib.nullcontext():
            yield found

    def _run(self, blocks: Sequence[torch.Tensor], axes: Mapping[Hashable, Axis]) -> Outcome:
        with self.surrounded(axes) as found:
            for block, cut in zip(blocks, self.cuts, strict=True):
                over = (axes[self.names[k]].tracked for dims in cut for k in dims)
                enter(block, axes_of(block).union(*over))
            with streams(self.seed, axis_index(self.bound), self.randomness) as active:
                outcome = self.call(blocks)
        return replace(
            outcome,
            draws=0 if active is None else active.draws,
            demands=tuple(found.demands),
            checks=(*outcome.checks, *found.checks.values()),
            checked=(*outcome.checked, *found.checks),
        )

    def call(self, blocks: Sequence[torch.Tensor]) -> Outcome:
        """Call the function, where its axes are bound."""
        outcome = replace(self.call_function(blocks).change_blocks(self._varied), first_counts=True)
        if not self.check_vma:
            return outcome
        paths = self.paths(outcome.structure)
        refuse = self._refuse(paths)
        checks: dict[str, torch.Tensor] = {}
        for leaf, (block, cut) in enumerate(zip(outcome.blocks, outcome.cuts, strict=True)):
            if block is None:
                continue
            if tracing_mode() is None:
                checks |= self._compared(block.detach(), cut, paths[leaf])
            elif varying := self._varying_lanes(block, cut):
                raise refuse(leaf, varying)
        found = tuple(checks.values())
        return replace(outcome, checks=found, checked=tuple(checks), refuse=refuse)

    def _varied(self, block: torch.Tensor, cut: Cut) -> torch.Tensor:
        """The block, which varies along the axes that cut it."""
        return varied(block, NONE.union(*(_tracked(self.names[k]) for over in cut for k in over)))

    def _cut(self, block: torch.Tensor, out: Any, path: str) -> Cut:
        if not isinstance(out, PartitionSpec):
            raise TypeError(
                f"{self.prefix}: out_specs is None for {path}, which is a tensor. Give it a "
                "PartitionSpec: P() for a value that all devices share."
            )
        if len(out) > block.dim():
            advice = "" if block.dim() else " To return one number per device, add a dim: x[None]."
            raise ValueError(
                f"{self.prefix}: out_specs has {out} for {path}, which is of rank {block.dim()} "
                f"(its shape is {list(block.shape)}), fewer than the {len(out)} entries of the "
                f"spec.{advice}"
            )
        return cut_of_spec(out, self.names)

    def _compared(self, x: torch.Tensor, cut: Cut, path: str) -> dict[str, torch.Tensor]:
        """How much the copies of a result differ; also along the axes that are not bound, which
        functions mapped inside may have used.
        """
        outer = surrounding()
        free = {} if outer is None else {n: a for n, a in outer.free.items() if a.size > 1}
        same = self.shared(cut, (*self.bound, *free))
        if not same:
            return {}
        with contextlib.ExitStack() as stack:
            for axis in free.values():
                stack.enter_context(bind(axis))
            return {claim_of(same, path): difference(x, same)}

    def _varying_lanes(self, block: torch.Tensor, cut: Cut) -> list[Hashable]:
        """The axes on this device alone along which an output may differ, but is not cut."""
        return [
            name
            for name in self.shared(cut)
            for parts in [lookup(name)]
            if parts[0].group is None and parts[0].size > 1 and not is_same(block, parts)
        ]

    def _refuse(self, paths: Sequence[str]) -> Callable[[int, Sequence[Hashable]], Exception]:
        def refuse(leaf: int, axes: Sequence[Hashable]) -> Exception:
            manual = tuple(name for name in axes if name in self.manual)
            claim = f"{self.prefix}: {claim_of(axes, paths[leaf])}, but its value may differ along "
            if not manual:
                return ValueError(
                    f"{claim}{'it' if len(axes) == 1 else 'them'}, which is not in axis_names. A "
                    "shard_map inside maps it: pass that one what it differentiates as an "
                    "argument, not as a captured value."
                )
            over = repr(manual[0] if len(manual) == 1 else manual)
            return ValueError(
                f"{claim}{'it' if len(axes) == 1 else 'them'}. Reduce it inside, for example "
                f"psum(x, {over}) or pmean(x, {over}), or mention {over} in its spec; or pass "
                "check_vma=False, and the value of the first device is returned."
            )

        return refuse


def followed(axis: Axis) -> Axis:
    """The axis, as one along which it is followed which values vary."""
    if axis.size == 1:
        return axis
    axis = replace(axis, is_tracked=True)
    set_axes(axis.index, axis.tracked)
    return axis


def _tracked(name: Hashable) -> Axes:
    parts = next((parts for parts in reversed(bound()) if parts[0].name == name), ())
    return NONE.union(*(axis.tracked for axis in parts))


def enter(block: torch.Tensor, axes: Axes) -> None:
    """Note along which axes a value varies that enters a program, and its tangents with it."""
    set_axes(block, axes)
    if forward_level() < 0:
        return
    for x in layers(block):
        if not is_vmap_wrapper(x):
            with at_depth(max(level_of(x), 0)):  # where the tangent is that another transform wraps
                tangent = forward_ad.unpack_dual(x).tangent
                if tangent is not None:
                    enter(tangent, axes)


def cut_of_spec(spec: PartitionSpec, names: Sequence[Hashable]) -> Cut:
    """The cut that a spec makes, on a grid whose dims are the axes of the mesh."""
    return trimmed(tuple(map(names.index, names_of(entry))) for entry in spec)


def claim_of(axes: Sequence[Hashable], path: str) -> str:
    names = " and ".join(map(repr, axes))
    return f"out_specs does not mention ax{'i' if len(axes) == 1 else 'e'}s {names} for {path}"


# -- inside another call ---------------------------------------------------------------------------


def run_inside(
    program: BlockProgram, values: Sequence[torch.Tensor], outer: Surrounding
) -> Outcome:
    """Run on whole values of a device, along free axes of the call around; whole results."""
    axes = {name: outer.followed(name) for name in program.bound}
    with contextlib.ExitStack() as stack:
        stack.enter_context(program.surrounded(outer.free, outer))
        for name, axis in axes.items():
            stack.enter_context(bind(axis if program.check_vma else outer.free[name]))
        own = [
            _own(program, x if program.check_vma else _cast(x, axes), cut, axes)
            for x, cut in zip(values, program.cuts, strict=True)
        ]
        captured = [] if program.check_vma else _captured(program)
        if captured:
            stack.enter_context(Exchange(captured, [_cast(x, axes) for x in captured]))
        if are_active():
            stack.enter_context(within(axis_index(program.bound), program.randomness))
        outcome = program.call(own)
        _note(program, outcome, outer)
        for axis in axes.values():
            stack.enter_context(bind(axis))
        if not is_tracked():
            stack.enter_context(Tracking())
        whole = outcome.change_blocks(lambda block, cut: _gathered(program, block, cut, axes))
    return replace(whole, checks=(), checked=())


def _cast(x: torch.Tensor, axes: Mapping[Hashable, Axis]) -> torch.Tensor:
    return varied(x, _all(axes)) if is_inexact(x) else x


def _all(axes: Mapping[Hashable, Axis]) -> frozenset[Axis]:
    return frozenset().union(*(axis.tracked for axis in axes.values()))


def _captured(program: BlockProgram) -> list[torch.Tensor]:
    """The tensors that the function closes over and that may be differentiated: they are arguments
    under P().

    Only in a trace, of which there is one at a time: elsewhere ``Exchange`` would meet others.
    """
    if tracing_mode() is None:
        return []
    return [x for x in tensors_of(program.fun) if is_wrapped(x) or x.requires_grad]


def _own(
    program: BlockProgram, x: torch.Tensor, cut: Cut, axes: Mapping[Hashable, Axis]
) -> torch.Tensor:
    """The block of this device."""
    over = {program.names[k]: axes[program.names[k]] for k in sorted(itertools.chain(*cut))}
    x = split(_cast(x, over) if over else x, cut, program.sizes)
    for axis in over.values():
        x = pick(x, axis.index)
    return x


def _gathered(
    program: BlockProgram, block: torch.Tensor, cut: Cut, axes: Mapping[Hashable, Axis]
) -> torch.Tensor:
    if not program.check_vma:  # each device has a value of its own, and no cast makes it one
        block = block.clone()
        set_axes(block, axes_of(block) | _all(axes))
    if missing := program.shared(cut):
        block = pbroadcast(block, missing, 0)
    for dim, over in enumerate(cut):
        if over:
            names = tuple(program.names[k] for k in over)
            block = all_gather(block, names, axis=dim, tiled=True)
            for axis in joined([axes[name] for name in names]):
                along = whole(axis)
                (block,) = apply(Same(along.scope), along.index, [block])
    set_axes(block, axes_of(block) - _all(axes))
    return block


def _note(program: BlockProgram, outcome: Outcome, outer: Surrounding) -> None:
    """Have it checked that results are the same along the axes that their specs do not mention."""
    for claim, check in zip(outcome.checked, outcome.checks, strict=True):
        worst = innermost(check).amax()  # of all rows: vmaps around this call end before the check
        claim = f"{program.prefix}: {claim}"  # the error names the outermost map
        earlier = outer.checks.get(claim)  # of another call
        outer.checks[claim] = worst if earlier is None else torch.maximum(earlier, worst)
    if outcome.refuse is None or tracing_mode() is None:
        return
    for leaf, (block, cut) in enumerate(zip(outcome.blocks, outcome.cuts, strict=True)):
        same = tuple(outer.free[name] for name in program.shared(cut))
        if block is not None and same:
            refuse = functools.partial(outcome.refuse, leaf)
            outer.demands.append(Demand(innermost(block), same, refuse, False))
