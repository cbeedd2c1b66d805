"""A mapped call in the calling process.

``run_here``: inside a mapped function, where all rows of the call are lanes of the device that it
is made on.  ``run_inline``: without devices (``debug.fake_pmap``); its rows are lanes of
``torch.func.vmap``, or run one after the other.

``run_inline`` keeps the promises of a call on devices: the caller's tensors stay as they are,
whatever the function writes; results share no memory with anything; lost writes raise; random
numbers are the same.

Lanes have the limits of ``torch.func.vmap``: no Python value of one row (``.item()``, ``if x > 0``)
and no ``.backward()``.  torch raises an error, to which ``_HINT`` adds what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpmap._base.ambient import ambient, applied
from torchpmap._base.errors import lost_write
from torchpmap._base.refuse_writes import RefuseWrites
from torchpmap._base.torch_errors import is_limit_of_vmap
from torchpmap._base.torch_internals import (
    innermost,
    is_wrapped,
    outside_transforms,
)
from torchpmap._layout.axis_stack import Axis
from torchpmap._layout.grid import Cut
from torchpmap._plan.autograd import without_derivative
from torchpmap._runtime.inline_mode import note_replicated, serial
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import host_tensor
from torchpmap._trace.effects import check_equal
from torchpmap._trace.program import (
    Outcome,
    Program,
    check_replicated,
    check_same_kinds,
    not_replicated,
)
from torchpmap._transforms.call import CallArguments
from torchpmap._transforms.preparation import Preparation, refuse_aliased_donation
from torchpmap._transforms.rows import run_rows
from torchpmap.random._streams import are_active, draw_key, no_stream, peek_key

_HINT = (
    "This call runs in the calling process (torchpmap.debug.fake_pmap, or the runtime 'inline'), "
    "all rows at once under torch.func.vmap, where a value of a single row does not exist. Write "
    "torch.where for `if`, torchpmap.grad or torch.func for .backward(), torchpmap.debug.print to "
    "look at values, y = y + x for an in-place write to what all rows share; or run the rows one "
    "after the other with torchpmap.debug.fake_pmap(serial=True)."
)


def run_here(preparation: Preparation, call: CallArguments) -> Any:
    """Run a call with all its rows on the device it is made on, inside a mapped function."""
    program = preparation.whole_program(call)
    # copies: the function may write to its arguments, and return views of them
    blocks = [_copied(leaf) for leaf in call.travelling(call.leaves)]

    def run(program: Program) -> Outcome:
        return program.run(blocks, None)

    outcome = run(program) if are_active() else _with_key(program, run)
    for claim, check in zip(outcome.checked, outcome.checks, strict=True):
        text = not_replicated(program.prefix, claim, "{distance}", program.otherwise)
        check_equal(check, text)
    return outcome.returned


def _with_key(program: Program, run: Callable[[Program], Outcome]) -> Outcome:
    """Run with a key from torch's generator, one for each row of a vmap around the call; the
    generator stays as it is if no number is drawn.
    """
    before = torch.default_generator.get_state()
    forbidden: RuntimeError | None = None
    try:
        key = draw_key()
    except RuntimeError as error:  # a vmap around the call forbids random numbers
        forbidden = error
        with outside_transforms():
            key = peek_key()
    torch.default_generator.set_state(before)
    outcome = run(replace(program, seed=key))
    if outcome.draws:
        if forbidden is not None:
            raise forbidden
        draw_key()  # the next call gets another one
    return outcome


def run_inline(preparation: Preparation, call: CallArguments) -> Any:
    """Run a call in this process, after the checks that the devices' own calls get."""
    prefix = preparation.options.prefix
    preparation.check_devices(call)
    program = preparation.whole_program(call)
    leaves = call.travelling(call.leaves)
    refuse_aliased_donation(prefix, call.travelling(call.paths), call.donated, leaves)
    records = torch.set_grad_enabled(torch.is_grad_enabled())  # stays off in inference mode
    # settings that the function changes are restored; its tensors are ordinary, as on the devices
    with applied(ambient()), torch.inference_mode(False), records:
        blocks = list(map(_own, leaves))
        outcome = _with_key(program, functools.partial(_run_whole, blocks))
        found = zip(outcome.checked, map(_largest, outcome.checks), strict=True)
        check_replicated(prefix, found, program.otherwise)
        return outcome.change_blocks(_result).returned


def _run_whole(blocks: Sequence[torch.Tensor], program: Program) -> Outcome:
    generator = torch.default_generator.get_state()
    outcome = (_one_by_one if serial() else _as_lanes)(program, blocks)
    if not torch.equal(generator, torch.default_generator.get_state()):
        torch.default_generator.set_state(generator)
        raise NotImplementedError(no_stream(program.prefix))
    return outcome


def _result(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    own = whole.clone(memory_format=torch.contiguous_format)
    return own if cut else note_replicated(own)


def _as_lanes(program: Program, blocks: Sequence[torch.Tensor]) -> Outcome:
    try:
        # single-threaded: axes are bound per thread
        with torch.autograd.set_multithreading_enabled(False), keep_captured(blocks):
            return program.run(blocks, None)
    except Exception as error:
        if is_limit_of_vmap(error):
            error.add_note(_HINT)
        raise


def _one_by_one(program: Program, values: Sequence[torch.Tensor]) -> Outcome:
    """Run every row, or the block of every device, one after the other."""
    prefix, part = program.prefix, program.part
    if any(map(is_wrapped, (*values, program.seed))):
        raise NotImplementedError(_not_differentiable(prefix))
    of_one = program.of_one

    def run_part(number: int, axis: Axis) -> Outcome:
        mine = [x.detach().clone() for x in program.own(values, number)]
        with keep_captured(mine):
            return of_one.run(mine, axis)

    outcomes = run_rows(program, run_part)
    first = outcomes[0]
    kinds = [
        (f"{part} {k}", outcome.structure, _kinds(program, outcome))
        for k, outcome in enumerate(outcomes)
    ]
    check_same_kinds(prefix, f"{part}s", kinds)
    wants_grad = torch.is_grad_enabled() and (
        first.requires_grad or any(x.requires_grad for x in values)
    )
    columns = zip(*([x for x, _ in outcome.outputs] for outcome in outcomes), strict=True)
    whole = first.change_blocks(lambda _, cut: program.whole(next(columns), cut).detach())
    if wants_grad:
        results, text = [x for x, _ in whole.outputs], _not_differentiable(prefix)
        made = iter(without_derivative(results, NotImplementedError, text))
        whole = whole.change_blocks(lambda *_: next(made))
    checks = zip(*(outcome.checks for outcome in outcomes), strict=True)
    return replace(whole, checks=tuple(torch.stack(each).max() for each in checks))


def _kinds(program: Program, outcome: Outcome) -> list[tuple[Any, ...] | None]:
    return [
        None if block is None else (tuple(program.seen_shape(block, cut)), block.dtype)
        for block, cut in zip(outcome.blocks, outcome.cuts, strict=True)
    ]


def _not_differentiable(prefix: str) -> str:
    return (
        f"{prefix}: under fake_pmap(serial=True) a mapped function cannot be differentiated or "
        "batched from outside, because its rows run one after the other. Use fake_pmap() without "
        "serial, or differentiate (use vmap) inside the mapped function."
    )


def _own(leaf: Any) -> torch.Tensor:
    """A copy of an argument: the function may write to it."""
    if type(leaf) is ShardedTensor:
        return leaf.cpu()
    return _copied(leaf)


def _copied(leaf: Any) -> torch.Tensor:
    return (leaf if isinstance(leaf, torch.Tensor) else host_tensor(leaf)).clone()


def _largest(check: torch.Tensor) -> float:
    """The number in a tensor that function transforms around the call may have wrapped; of a batch,
    the largest.
    """
    return float(innermost(check).max())


def keep_captured(own: Sequence[torch.Tensor]) -> RefuseWrites:
    """A block that may write in place to its own tensors, but to none that was made before."""

    def refuse(tensor: torch.Tensor, operation: str) -> Exception:
        return RuntimeError(lost_write(tensor, f" ({operation})"))

    return RefuseWrites(own, refuse)
