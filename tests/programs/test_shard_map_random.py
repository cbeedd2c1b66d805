"""Random ``shard_map`` programs against the same computed by hand, block by block.

Covers: specs of all kinds on meshes of one to three axes; collectives over one axis and several in
any order; trees; closures; derivatives from outside; ``vmap`` around.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from _shard_map_cases import Program, by_hand, generate, mapped
from _support import EAGER, TEST_ALL

import torchpmap as tp

NUM_PROGRAMS = 400 if TEST_ALL else 40
PARTS = 40 if TEST_ALL else 10
ROTA = ("graph", "python", "graph", "inline")
"""How programs run in turn."""
OPTIONS: dict[str, dict[str, Any]] = {
    "graph": {"compile": EAGER},
    "python": {"compile": False},
    "inline": {},
    "inductor": {},
}


@pytest.fixture(autouse=True)
def devices() -> None:
    tp.init(8)


def around(mode: str) -> AbstractContextManager[Any]:
    return tp.debug.fake_pmap() if mode == "inline" else nullcontext()


def check_values(program: Program, mode: str) -> None:
    captured = torch.tensor(1.5, dtype=torch.float64)
    args = program.arguments()
    with around(mode):
        found = mapped(program, captured, **OPTIONS[mode])(*args)
        found = [x.cpu() for x in found]
    for got, expected in zip(found, by_hand(program, args, captured), strict=True):
        assert got.shape == expected.shape, program
        torch.testing.assert_close(got, expected, msg=lambda m: f"{m}\n{mode} {program}")


def check_gradients(program: Program, mode: str) -> None:
    """Of a weighted sum of the results, for the arguments and the captured number."""
    args = program.arguments()
    leaves = [*args, torch.tensor(1.5, dtype=torch.float64)]
    results = by_hand(program, args, leaves[-1])
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in results]
    grads = []
    for is_mapped in (False, True):
        inputs = [x.clone().requires_grad_() for x in leaves]
        *mine, captured = inputs
        with around(mode if is_mapped else ""):
            if is_mapped:
                found = mapped(program, captured, **OPTIONS[mode])(*mine)
            else:
                found = by_hand(program, mine, captured)
            loss = sum((w * x).sum() for w, x in zip(weights, found, strict=True))
            if not loss.requires_grad:
                return
            loss.backward()
        grads.append([torch.zeros_like(x) if x.grad is None else x.grad.cpu() for x in inputs])
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, msg=lambda m: f"{m}\n{mode} {program}")


def check_vmap(program: Program, mode: str) -> None:
    """Batches of the first argument."""
    captured = torch.tensor(1.5, dtype=torch.float64)
    first, *others = program.arguments()
    batch = torch.stack([first, first.cos(), first - 1], dim=-1)
    with around(mode):
        function = mapped(program, captured, **OPTIONS[mode])
        in_dims = (-1, *(None for _ in others))
        found = torch.func.vmap(function, in_dims)(batch, *others)
        found = tuple(x.cpu() for x in found)
    rows = [by_hand(program, [row, *others], captured) for row in batch.unbind(-1)]
    for got, *expected in zip(found, *rows, strict=True):
        torch.testing.assert_close(
            got, torch.stack(expected), msg=lambda m: f"{m}\n{mode} {program}"
        )


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int) -> None:
    for number in range(part, NUM_PROGRAMS, PARTS):
        program = generate(f"blocks:{number}")
        mode = ROTA[(number // PARTS + part) % len(ROTA)]
        check_values(program, mode)
        if program.is_smooth and number % 2:
            check_gradients(program, mode)
        elif number % 4 == 0:
            check_vmap(program, mode)


@pytest.mark.inductor
def test_compiled_random_programs() -> None:
    programs = [generate(f"compiled:{number}") for number in range(20)]
    for program in [p for p in programs if math.prod(p.sizes) == 4][:2]:  # two meshes
        check_values(program, "inductor")


def test_the_programs_have_something_of_everything() -> None:
    programs = [generate(f"blocks:{number}") for number in range(40)]
    kinds = {step.kind for p in programs for chain in (*p.chains, p.after) for step in chain}
    assert len(kinds) > 20
    assert len({p.sizes for p in programs}) == 6
    assert any(isinstance(e, tuple) and len(e) > 1 for p in programs for s in p.in_specs for e in s)
    assert sum(p.is_smooth for p in programs) > 20


def test_a_wrong_result_would_be_found() -> None:
    program = generate("blocks:1")
    args = program.arguments()
    captured = torch.tensor(1.5, dtype=torch.float64)
    right = by_hand(program, args, captured)
    wrong = by_hand(program, [args[0] + 1, *args[1:]], captured)
    assert not all(torch.allclose(a, b) for a, b in zip(right, wrong, strict=True))
