"""What one device does in a call of ``shard_map``: call the function on its blocks, and lay out
what it returns.

Without devices, in the calling process, every axis of the mesh is a ``torch.func.vmap`` over the
blocks of the whole values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from torchpmap._base.axis_spec import broadcast_axes
from torchpmap._base.context import assigned
from torchpmap._base.pytree import Structure, flatten
from torchpmap._base.torch_internals import (
    forward_level,
    is_vmap_wrapper,
    layers,
    tracing_mode,
)
from torchpmap._collectives import axis_index
from torchpmap._collectives.groups import varied
from torchpmap._collectives.varying import NONE, Axes, axes_of, set_axes
from torchpmap._layout.axis_stack import Axis, bind, bound, lookup, mesh_axes
from torchpmap._layout.grid import Cut, dim_of, trimmed
from torchpmap._layout.mesh import Mesh, PartitionSpec, names_of
from torchpmap._trace.casts import tracked
from torchpmap._trace.effects import difference
from torchpmap._trace.escaped import watched
from torchpmap._trace.kinds import as_result
from torchpmap._trace.program import Claim, Constant, Outcome, called
from torchpmap._trace.replication import is_same
from torchpmap.random._streams import streams


class Surrounding(NamedTuple):
    """The call of ``shard_map`` that runs, as mapped functions inside it see it."""

    mesh: Mesh
    free: dict[Hashable, Axis]
    """The axes of the mesh that it leaves to them."""
    known: dict[Axis, Axis]
    """Of each axis that one of them has used: the one along which it is followed which values vary.
    Backward passes of several calls meet, so these have the same.
    """

    def followed(self, name: Hashable) -> Axis:
        """A free axis, as one along which it is followed which values vary."""
        axis = self.free[name]
        if axis not in self.known:
            self.known[axis] = followed(axis)
        return self.known[axis]


class Inside(NamedTuple):
    """What mapped functions inside the call declare."""

    claims: list[Claim]
    checks: dict[str, torch.Tensor]


# Per thread, as the bound axes are.
_surrounding: ContextVar[Surrounding | None] = ContextVar("torchpmap_surrounding", default=None)
_inside: ContextVar[Inside | None] = ContextVar("torchpmap_inside", default=None)

surrounding = _surrounding.get
inside = _inside.get


def surrounded_by(around: Surrounding | None) -> AbstractContextManager[None]:
    """In the block, ``surrounding`` returns this."""
    return assigned(_surrounding, around)


@dataclass(frozen=True)
class Block:
    """A leaf that arrives as a block."""

    cut: Cut


@dataclass(frozen=True)
class BlockProgram:
    """A function of blocks, and how they are cut from its arguments."""

    fun: Callable[..., Any]
    name: str
    prefix: str
    """The mapped function, as messages name it."""
    structure: Structure
    """Of ``(args, kwargs)``."""
    leaves: tuple[Block | Constant, ...]
    out_specs: Any
    mesh: Mesh
    manual: frozenset[Hashable]
    """The axes that are bound inside; along the others all devices do the same."""
    check_vma: bool
    randomness: str
    seed: torch.Tensor
    """Stands for the key of a call."""
    otherwise: ClassVar[str] = (
        "mention the axis in its entry of out_specs; or pass check_vma=False, and the value of the "
        "first device is returned"
    )

    @property
    def names(self) -> tuple[Hashable, ...]:
        """Of the axes of the mesh."""
        return self.mesh.axis_names

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes of the mesh."""
        return tuple(self.mesh.devices.shape)

    @property
    def bound(self) -> tuple[Hashable, ...]:
        """The axes that are bound inside, in their order."""
        return tuple(name for name in self.names if name in self.manual)

    @property
    def axis_name(self) -> Hashable:
        """Of the axis of all devices, if they form one."""
        return self.names[0]

    def axes(self, process_axis: Axis) -> tuple[Axis | None, ...]:
        """The axes of the mesh; None for one of size 1."""
        return mesh_axes(process_axis, self.sizes, self.names)

    def run(
        self,
        blocks: Sequence[torch.Tensor],
        process_axis: Axis | None,
        key: torch.Tensor | None = None,
    ) -> Outcome:
        """Run on one device's blocks; without a ``process_axis``, on whole values.

        ``key``: the random key of this call; replaces ``seed``.
        """
        if key is not None:
            return replace(self, seed=key).run(blocks, process_axis)
        if process_axis is None:
            return self._run_lanes(blocks)
        index = process_axis.index
        axes = {
            name: self.followed(axis or Axis(name, 1, torch.zeros_like(index), None))
            for name, axis in zip(self.names, self.axes(process_axis), strict=True)
        }
        with self.surrounded(axes), contextlib.ExitStack() as stack:
            for name in self.bound:
                stack.enter_context(bind(axes[name]))
            outcome = self._run(blocks, axes)
        tracked = tuple(axes[name].tracked for name in self.names) if self.check_vma else None
        unbound = tuple(k for k, name in enumerate(self.names) if name not in self.manual)
        return replace(outcome, tracked=tracked, unbound=unbound)

    def followed(self, axis: Axis) -> Axis:
        """The axis, along which it is followed which values vary if outputs are to be checked."""
        if not self.check_vma or axis.name not in self.manual:
            return axis
        return followed(axis)

    @contextlib.contextmanager
    def surrounded(self, axes: Mapping[Hashable, Axis]) -> Iterator[None]:
        """A block in which the function runs; the axes that are not bound are left for mapped
        functions inside it.
        """
        free = {name: axis for name, axis in axes.items() if name not in self.manual}
        around = surrounding()
        known = {} if around is None else around.known
        with (
            surrounded_by(Surrounding(self.mesh, free, known)),
            tracked() if self.check_vma else contextlib.nullcontext(),
        ):
            yield

    def _run(self, blocks: Sequence[torch.Tensor], axes: Mapping[Hashable, Axis]) -> Outcome:
        cuts = [leaf.cut for leaf in self.leaves if isinstance(leaf, Block)]
        for block, cut in zip(blocks, cuts, strict=True):
            along = axes_of(block).union(
                *(axes[self.names[k]].tracked for over in cut for k in over)
            )
            set_axes(block, along)
            for tangent in _tangents(block):
                set_axes(tangent, along)
        token = _inside.set(found := Inside([], {}))
        try:
            with streams(self.seed, axis_index(self.bound), self.randomness) as active:
                outcome = self.call(blocks)
        finally:
            _inside.reset(token)
        return replace(
            outcome,
            draws=0 if active is None else active.draws,
            claims=tuple(found.claims),
            checks=(*outcome.checks, *found.checks.values()),
            checked=(*outcome.checked, *found.checks),
        )

    def call(self, blocks: Sequence[torch.Tensor]) -> Outcome:
        """Call the function, where its axes are bound."""
        return self._lay_out(called(self.fun, self.structure, self.leaves, blocks))

    def _lay_out(self, returned: Any) -> Outcome:
        values, structure = flatten(returned)
        specs: list[Any] = broadcast_axes(
            self.out_specs, returned, what="shard_map out_specs", hint=_OUT_SPECS_HINT
        )
        paths = structure.paths(f"the output of {self.name}")
        blocks: list[torch.Tensor | None] = []
        cuts: list[Cut] = []
        checks: dict[str, torch.Tensor] = {}
        for value, spec, path in zip(values, specs, paths, strict=True):
            tensor = None if value is None else as_result(value, path)
            cuts.append(() if tensor is None else self._cut(tensor, spec, path))
            if tensor is not None:
                tensor = varied(tensor, NONE.union(*map(_tracked, mentioned(spec))))
            blocks.append(tensor)
            if tensor is not None and self.check_vma and tracing_mode() is None:
                checks |= self._compared(tensor.detach(), spec, path)
        refuse = self._refuse(paths) if self.check_vma else None
        if refuse is not None and tracing_mode() is not None:
            for leaf, (block, cut) in enumerate(zip(blocks, cuts, strict=True)):
                varying = [] if block is None else self._varying_lanes(block, cut)
                if varying:
                    raise refuse(leaf, varying)
        return Outcome(
            structure,
            tuple(blocks),
            tuple(cuts),
            tuple(checks.values()),
            tuple(checks),
            first_counts=True,
            refuse=refuse,
        )

    def _cut(self, tensor: torch.Tensor, spec: Any, path: str) -> Cut:
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"{self.prefix}: out_specs is None for {path}, which is a tensor. Give it a "
                "PartitionSpec: P() for a value that all devices share."
            )
        if len(spec) > tensor.dim():
            advice = "" if tensor.dim() else " To return one number per device, add a dim: x[None]."
            raise ValueError(
                f"{self.prefix}: out_specs has {spec} for {path}, which is of rank {tensor.dim()} "
                f"(its shape is {list(tensor.shape)}), fewer than the {len(spec)} entries of the "
                f"spec.{advice}"
            )
        return cut_of_spec(spec, self.names)

    def _compared(self, x: torch.Tensor, spec: PartitionSpec, path: str) -> dict[str, torch.Tensor]:
        """How much the copies of a result differ; also along the axes that are not bound, which
        functions mapped inside may have used.
        """
        around = surrounding()
        free = {} if around is None else {n: a for n, a in around.free.items() if a.size > 1}
        cut = mentioned(spec)
        same = tuple(n for n in self.names if n not in cut and (n in self.manual or n in free))
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
            for k, name in enumerate(self.names)
            if name in self.manual and dim_of(cut, k) is None
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

    # -- without devices ---------------------------------------------------------------------------

    def _run_lanes(self, blocks: Sequence[torch.Tensor]) -> Outcome:
        """Run on whole values, with a vmap for every axis of the mesh."""
        cuts = [leaf.cut for leaf in self.leaves if isinstance(leaf, Block)]
        # copies: one value may be given twice, and be cut in two ways
        apart = [self._apart(x.clone(), cut) for x, cut in zip(blocks, cuts, strict=True)]
        outcomes: list[Outcome] = []
        axes: dict[Hashable, Axis] = {}

        def level(k: int, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            if k == len(self.sizes):
                with self.surrounded(axes):
                    outcomes.append(self._run(values, axes))
                outcome = outcomes[-1]
                return (*(block for block, _ in outcome.outputs), *outcome.checks)
            devices = {x.device for x in values}
            index = torch.arange(self.sizes[k], device=devices.pop() if devices else None)

            def along(own: torch.Tensor, *inner: torch.Tensor) -> tuple[torch.Tensor, ...]:
                axis = self.followed(Axis(self.names[k], self.sizes[k], own, None))
                axes[axis.name] = axis
                with bind(axis) if axis.name in self.manual else contextlib.nullcontext():
                    return level(k + 1, inner)

            dims = tuple(None if dim_of(cut, k) is None else 0 for cut in cuts)
            over: Any = torch.func.vmap(along, (0, *dims), randomness=self.randomness)
            found: tuple[torch.Tensor, ...] = over(index, *values)
            return found

        with watched(self.name):
            lanes_first = iter(level(0, apart))
        (outcome,) = outcomes
        together = [
            None if block is None else self._together(next(lanes_first), cut)
            for block, cut in zip(outcome.blocks, outcome.cuts, strict=True)
        ]
        checks = tuple(check.max() for check in lanes_first)
        return replace(outcome, blocks=tuple(together), checks=checks)

    def own(self, values: Sequence[torch.Tensor], device: int) -> list[torch.Tensor]:
        """The blocks that a device, by its row-major number, has of whole values."""
        place = np.unravel_index(device, self.sizes)
        cuts = [leaf.cut for leaf in self.leaves if isinstance(leaf, Block)]
        return [
            self._apart(x, cut)[
                tuple(int(place[k]) for k in range(len(place)) if dim_of(cut, k) is not None)
            ]
            for x, cut in zip(values, cuts, strict=True)
        ]

    def whole(self, blocks: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
        """The whole value that devices have blocks of."""
        return self._together(torch.stack(list(blocks)).unflatten(0, self.sizes), cut)

    def place(self, device: int) -> str:
        """The coordinates of a device: "x=0, y=1"."""
        place = np.unravel_index(device, self.sizes)
        return ", ".join(f"{name}={k}" for name, k in zip(self.names, place, strict=True))

    def _apart(self, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        """A whole value with the dims of the mesh that cut it in front, in their order."""
        for dim in reversed(range(len(cut))):
            sizes = [self.sizes[k] for k in cut[dim]]
            x = x.unflatten(dim, (*sizes, x.shape[dim] // math.prod(sizes))) if sizes else x
        front: dict[int, int] = {}
        place = 0
        for over in cut:
            front |= {k: place + i for i, k in enumerate(over)}
            place += len(over) + 1
        return x.movedim([front[k] for k in sorted(front)], list(range(len(front))))

    def _together(self, lanes: torch.Tensor, cut: Cut) -> torch.Tensor:
        """[*mesh, *block] -> the whole value; the first of equal blocks."""
        axes = [k for k in range(len(self.sizes)) if dim_of(cut, k) is not None]
        for k in reversed(range(len(self.sizes))):
            if k not in axes:
                lanes = lanes.select(k, 0)
        for dim, over in enumerate(cut):  # the dims before this one are whole: they are in front
            for i, k in enumerate(over):
                lanes = lanes.movedim(dim + i + axes.index(k), dim + i)
                axes.remove(k)
            lanes = _merged(lanes, dim, len(over), len(axes))
        return lanes


def _merged(x: torch.Tensor, dim: int, count: int, num_before: int) -> torch.Tensor:
    """Merge ``count`` dims at ``dim`` with that of the block; ``num_before`` others are between."""
    x = x.movedim(dim + count + num_before, dim + count)
    return x.flatten(dim, dim + count) if count else x


def followed(axis: Axis) -> Axis:
    """The axis, as one along which it is followed which values vary."""
    if axis.size == 1:
        return axis
    axis = replace(axis, is_tracked=True)
    set_axes(axis.index, axis.tracked)
    return axis


def mentioned(spec: PartitionSpec) -> set[Hashable]:
    """The axes over which a spec cuts a value."""
    return {name for entry in spec for name in names_of(entry)}


def _tracked(name: Hashable) -> Axes:
    parts = next((parts for parts in reversed(bound()) if parts[0].name == name), ())
    return NONE.union(*(axis.tracked for axis in parts))


def _tangents(block: torch.Tensor) -> Iterator[torch.Tensor]:
    """What forward-mode derivatives push along with a value."""
    if forward_level() >= 0:
        for x in layers(block):
            if not is_vmap_wrapper(x):
                tangent = forward_ad.unpack_dual(x).tangent
                if tangent is not None:
                    yield tangent


def cut_of_spec(spec: PartitionSpec, names: Sequence[Hashable]) -> Cut:
    """The cut that a spec makes, on a grid whose dims are the axes of the mesh."""
    return trimmed(tuple(map(names.index, names_of(entry))) for entry in spec)


def claim_of(axes: Sequence[Hashable], path: str) -> str:
    names = " and ".join(map(repr, axes))
    return f"out_specs does not mention ax{'i' if len(axes) == 1 else 'e'}s {names} for {path}"


_OUT_SPECS_HINT = (
    "\n\nThe full pytree is the output of the mapped function. Ensure that the `out_specs` "
    "argument to `shard_map` is a pytree prefix of the function's output."
)
