"""A call of ``shard_map`` inside another one, over axes of the mesh that the other leaves alone.

Along such an axis all devices compute the same.  So a device has the whole arguments, takes its own
blocks, and gathers the results; and of every cotangent outside it has the whole.  Seen from outside
an axis along which it is followed which values vary: an argument is cast, so that the parts of its
gradient are summed, and results are values that the devices share again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.torch_internals import innermost, is_wrapped, tracing_mode
from torchpmap._collectives import all_gather, axis_index, pbroadcast
from torchpmap._collectives.groups import pick, varied, whole
from torchpmap._collectives.primitives import Same, apply
from torchpmap._collectives.varying import Tracking, axes_of, set_axes
from torchpmap._layout.axis_stack import Axis, bind, joined
from torchpmap._layout.grid import Cut, dim_of
from torchpmap._trace.block_program import Block, BlockProgram, Surrounding, inside
from torchpmap._trace.capture import Substitute
from torchpmap._trace.casts import is_tracked
from torchpmap._trace.environment import Environment
from torchpmap._trace.program import Claim, Outcome
from torchpmap.random._streams import are_active, within

Axes = Mapping[Hashable, Axis]


def run_inside(
    program: BlockProgram, values: Sequence[torch.Tensor], around: Surrounding
) -> Outcome:
    """Run on whole values of a device, along free axes of the call around; whole results."""
    cuts = [leaf.cut for leaf in program.leaves if isinstance(leaf, Block)]
    axes = {name: around.followed(name) for name in program.bound}
    with contextlib.ExitStack() as stack:
        stack.enter_context(program.surrounded(around.free))
        for name, axis in axes.items():
            stack.enter_context(bind(axis if program.check_vma else around.free[name]))
        own = [
            _own(program, x if program.check_vma else _cast(x, axes), cut, axes)
            for x, cut in zip(values, cuts, strict=True)
        ]
        captured = {} if program.check_vma else _captured(program, axes)
        if captured:
            stack.enter_context(Substitute(lambda x: captured.get(id(x), (x, x))[1]))
        if are_active():
            stack.enter_context(within(axis_index(program.bound), program.randomness))
        outcome = program.call(own)
        _note(program, outcome, around)
        for axis in axes.values():
            stack.enter_context(bind(axis))
        if not is_tracked():
            stack.enter_context(Tracking())
        whole = [
            None if block is None else _gathered(program, block, cut, axes)
            for block, cut in zip(outcome.blocks, outcome.cuts, strict=True)
        ]
    return replace(outcome, blocks=tuple(whole), checks=(), checked=())


def _cast(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    return varied(x, _all(axes)) if is_inexact(x) else x


def _all(axes: Axes) -> frozenset[Axis]:
    return frozenset().union(*(axis.tracked for axis in axes.values()))


def _captured(program: BlockProgram, axes: Axes) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that the function closes over and that may be differentiated, by id, each with
    what takes its place: they are arguments under P().

    Only in a trace, of which there is one at a time: elsewhere ``Substitute`` would meet others.
    """
    if tracing_mode() is None:
        return {}
    environment = Environment(program.fun, quiet=True)
    environment.refresh()
    return {
        id(x): (x, _cast(x, axes))
        for x in environment.tensors()
        if is_wrapped(x) or x.requires_grad
    }


def _own(program: BlockProgram, x: torch.Tensor, cut: Cut, axes: Axes) -> torch.Tensor:
    """The block of this device."""
    if any(cut):
        x = _cast(x, {program.names[k]: axes[program.names[k]] for over in cut for k in over})
    for dim, over in enumerate(cut):
        sizes = [program.sizes[k] for k in over]
        if sizes:
            x = x.unflatten(dim, (*sizes, x.shape[dim] // math.prod(sizes)))
        for k in over:
            x = pick(x.movedim(dim, 0), axes[program.names[k]].index)
    return x


def _gathered(program: BlockProgram, block: torch.Tensor, cut: Cut, axes: Axes) -> torch.Tensor:
    if not program.check_vma:  # each device has a value of its own, and no cast makes it one
        block = block.clone()
        set_axes(block, axes_of(block) | _all(axes))
    missing = tuple(
        name
        for k, name in enumerate(program.names)
        if name in program.manual and dim_of(cut, k) is None
    )
    if missing:
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


def _note(program: BlockProgram, outcome: Outcome, around: Surrounding) -> None:
    """Have it checked that results are the same along the axes that their specs do not mention."""
    found = inside()
    if found is None:
        return
    for claim, check in zip(outcome.checked, outcome.checks, strict=True):
        worst = innermost(check).amax()  # of all rows: vmaps around this call end before the check
        earlier = found.checks.get(claim)  # of another call
        found.checks[claim] = worst if earlier is None else torch.maximum(earlier, worst)
    if outcome.refuse is None or tracing_mode() is None:
        return
    for leaf, (block, cut) in enumerate(zip(outcome.blocks, outcome.cuts, strict=True)):
        same: tuple[Axis, ...] = tuple(
            around.free[name]
            for k, name in enumerate(program.names)
            if name in program.manual and dim_of(cut, k) is None
        )
        if block is not None and same:
            refuse = functools.partial(outcome.refuse, leaf)
            found.claims.append(Claim(innermost(block), same, refuse))
