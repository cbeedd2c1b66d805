"""Running a program of the fuzzer in one of the ways that torchpmap has."""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from _fuzz_generate import is_mapped
from _fuzz_programs import Derivative, Map, Program, bodies
from _fuzz_reference import Expected, expectation, quiet, verdict
from _fuzz_source import source, standalone

import torchpmap as tp

MODES = {
    "graph": "dict(compile={'backend': 'eager'}, fullgraph=True)",
    "uncompiled": "dict(compile=False)",
    "inductor": "dict(fullgraph=True)",
    "inline": "dict()",
    "serial": "dict()",
}
"""The options of every ``pmap``, as source."""

AROUND = {"inline": "tp.debug.fake_pmap()", "serial": "tp.debug.fake_pmap(serial=True)"}

REFUSED = (
    # a captured value of an outer derivative or vmap, used under another one inside the function
    "meets function transforms both around the call and inside the function",
    # torch.func.jvp of an expanded argument that the function does not use, also without a pmap
    "more than one element of the written-to tensor refers to a single memory location",
    # a row's value written into what all rows of a device share, such as what a group gathers
    "doesn't match the broadcast shape",
    "This happened due to `other` being vmapped over but `self` not being vmapped over",
    # torch.func.vmap of index_fill_ on numbers, which changes the shape of a view in place
    "aten.unsqueeze_.default would change the shape of a ShardedTensor",
    # random numbers of each row, drawn into what all rows of a device share
    "draws other numbers for every row, but the rows of a device (or of a vmap) share the tensor",
    # a write to what a collective keeps for its derivative, as torch's own amax does
    "has been modified by an inplace operation",
    # uncompiled, a branch that some devices take uses a closure whose gradient is wanted
    "and whose gradient is wanted. Pass it to",
    # random numbers in a Jacobian around a pmap: it is torch's own vmap that refuses them
    "called random operation while in randomness error mode",
    # .backward() of what does not depend on the argument, also without a pmap
    "does not require grad and does not have a grad_fn",
    # a loop that batches its rows (``batch_size``), around a pmap whose rows run one by one
    "cannot be differentiated or batched from outside, because its rows run one after the other",
)
"""Errors that say clearly of a valid program that it is not supported."""


@dataclass(frozen=True)
class Failure:
    """What is wrong with a program in a mode."""

    mode: str
    text: str
    is_known: bool = False
    """Whether it is refused with a clear error."""

    @property
    def kind(self) -> str:
        """What stays the same while a program gets smaller: the words of the first line."""
        return f"{self.mode}: {re.sub(r'[^a-zA-Z_ ]+', '', self.text.splitlines()[0])[:60]}"


def applies(program: Program, mode: str) -> bool:
    """Whether a program means something in a mode."""
    steps = [step for body in bodies(program.body) for step in body.steps]
    around = [
        step
        for step in steps
        if isinstance(step, Derivative) or (isinstance(step, Map) and step.transform == "vmap")
    ]
    calls = [s for step in around for b in bodies(step.body) for s in b.steps if is_mapped(s)]
    return mode != "serial" or not calls  # one row after the other has no derivative from outside


def run(program: Program, mode: str) -> list[torch.Tensor]:
    """The results as plain tensors."""
    with quiet(), _around(mode):
        names = {"torch": torch, "tp": tp, "COMPILE": eval(MODES[mode])}
        exec(compile(source(program), "<program>", "exec"), names)
        results = names["program"](*names["inputs"])  # type: ignore[operator]
        return [_fetched(result) for result in results]


def _around(mode: str) -> AbstractContextManager[Any]:
    return eval(AROUND[mode], {"tp": tp}) if mode in AROUND else nullcontext()


def _fetched(result: Any) -> torch.Tensor:
    if isinstance(result, tp.ShardedTensor):
        copies: dict[str, torch.Tensor] = {}
        for shard in result.addressable_shards:
            data = shard.data.detach().cpu()
            first = copies.setdefault(str(shard.index), data)
            if not torch.equal(_numbers(first), _numbers(data)):
                raise AssertionError(f"copies on the devices differ: {first} and {data}")
    return result.detach().cpu()


def _numbers(x: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if x.is_complex() else x.dtype  # ComplexHalf has few operations
    return x.to(wide).nan_to_num()


def trial(program: Program, mode: str, expected: list[Expected] | None = None) -> Failure | None:
    """Run a program and judge it; None if it is right, or means nothing."""
    if expected is None:
        expected = expectation(program)
    if expected is None or not applies(program, mode):
        return None
    try:
        wrong = verdict(run(program, mode), expected)
    except Exception as error:
        is_known = any(text in str(error) for text in REFUSED)
        return Failure(mode, f"{type(error).__name__}: {error}", is_known)
    return Failure(mode, wrong) if wrong else None


def script(program: Program, mode: str, num_devices: int) -> str:
    """What a reader can paste to see a program run."""
    return standalone(program, num_devices, MODES[mode], AROUND.get(mode, ""))
