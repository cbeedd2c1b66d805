"""A call of ``shard_map`` inside another one, over axes of the mesh that the other leaves alone.

Along such an axis all devices compute the same.  So a device has the whole arguments, takes its own
blocks, and gathers the results.

Derivatives are right in two situations.  For a derivative inside the outer call each device has the
whole cotangent of the result; for one from outside it has a part, and the sum over the devices is
the cotangent.  Gathering sums what the devices have: the whole many times, or its parts once.  An
argument gets the mean over the devices of what they find: the whole, or equal parts of it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpmap._base.torch_internals import (
    innermost,
    is_wrapped,
    set_forward_grad,
    tracing_mode,
)
from torchpmap._collectives import all_gather, axis_index, pbroadcast
from torchpmap._collectives.cast import split
from torchpmap._collectives.groups import pick
from torchpmap._collectives.operands import resolve
from torchpmap._layout.axis_stack import Axis, bind
from torchpmap._layout.grid import Cut, dim_of
from torchpmap._trace.block_program import Block, BlockProgram, Surrounding, inside
from torchpmap._trace.capture import Substitute
from torchpmap._trace.environment import Environment
from torchpmap._trace.program import Claim, Outcome
from torchpmap.random._streams import are_active, within


def run_inside(
    program: BlockProgram, values: Sequence[torch.Tensor], around: Surrounding
) -> Outcome:
    """Run on whole values of a device, along free axes of the call around; whole results."""
    cuts = [leaf.cut for leaf in program.leaves if isinstance(leaf, Block)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(program.surrounded(around.free))
        for name in program.bound:
            stack.enter_context(bind(around.free[name]))
        own = [
            _own(program, _with_mean_of_cotangents(program, x), cut, around)
            for x, cut in zip(values, cuts, strict=True)
        ]
        captured = _captured(program)
        if captured:
            stack.enter_context(Substitute(lambda x: captured.get(id(x), (x, x))[1]))
        if are_active():
            stack.enter_context(within(axis_index(program.bound), program.randomness))
        outcome = program.call(own)
        _note(program, outcome, around)
        whole = [
            None if block is None else _gathered(program, block, cut)
            for block, cut in zip(outcome.blocks, outcome.cuts, strict=True)
        ]
    return replace(outcome, blocks=tuple(whole), checks=(), checked=())


def _with_mean_of_cotangents(program: BlockProgram, x: torch.Tensor) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return x
    count = math.prod(program.mesh.shape[name] for name in program.bound)
    result: torch.Tensor = split(resolve("shard_map", program.bound), _Shared.apply(x, count))
    return result


def _captured(program: BlockProgram) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that the function closes over and that may be differentiated, by id, each with
    what takes its place: they are arguments under P().

    Only in a trace, of which there is one at a time: elsewhere ``Substitute`` would meet others.
    """
    if tracing_mode() is None:
        return {}
    environment = Environment(program.fun, quiet=True)
    environment.refresh()
    return {
        id(x): (x, _with_mean_of_cotangents(program, x))
        for x in environment.tensors()
        if is_wrapped(x) or x.requires_grad
    }


def _own(program: BlockProgram, x: torch.Tensor, cut: Cut, around: Surrounding) -> torch.Tensor:
    """The block of this device."""
    for dim, over in enumerate(cut):
        sizes = [program.sizes[k] for k in over]
        if sizes:
            x = x.unflatten(dim, (*sizes, x.shape[dim] // math.prod(sizes)))
        for k in over:
            x = pick(x.movedim(dim, 0), around.free[program.names[k]].index)
    return x


def _gathered(program: BlockProgram, block: torch.Tensor, cut: Cut) -> torch.Tensor:
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


class _Shared(torch.autograd.Function):
    """A value whose cotangent is divided by the number of devices that add theirs to it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: Any) -> None:
        ctx.count = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent / ctx.count, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        with set_forward_grad(True):  # as in _Extreme.jvp
            return tangent.clone()
