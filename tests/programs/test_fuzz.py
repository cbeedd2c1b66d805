"""Random programs in all modes against plain torch, row by row (``fuzz.py`` runs more of them).

Covers: values and derivatives of whole programs; and that a defect would be found and made small.
The reference has JAX's rules as long as torchpmap has: test_jax_parity.py compares that with JAX.
"""

import itertools

import pytest
import torch
from _collective_models import MODELS
from _fuzz_generate import BLOCKS, DONATES, generate, generated
from _fuzz_loops import LARGE
from _fuzz_modes import script, trial
from _fuzz_programs import (
    Blocks,
    Body,
    Collective,
    Derivative,
    Input,
    Local,
    Loop,
    Map,
    Program,
    Step,
    bodies,
)
from _fuzz_reference import LOOPS, expectation
from _fuzz_shrink import shrink
from _fuzz_source import source
from _support import TEST_ALL, mostly_long

NUM_PROGRAMS, PARTS = 200, 40
ROTA = ("graph", "uncompiled", "serial", "inline")
"""How programs run in turn."""
NUM_OF_BLOCKS = 400 if TEST_ALL else 40
ROTA_OF_BLOCKS = ("graph", "uncompiled", "graph", "inline")
REFUSED = {22}
"""It writes to what a derivative keeps, which torch refuses; the others of the first 40 run."""
SHARED = (
    *("psum", "pmean", "pmax", "pmin", "pbroadcast", "ppermute"),
    *("all_gather", "psum_scatter", "all_to_all", "axis_index"),
)
"""What blocks share, over one axis of a mesh and over several."""


def check(seed: str, mode: str, num_devices: int, can_be_refused: bool = True) -> None:
    program, expected = generated(seed)
    failure = trial(program, mode, expected)
    is_fine = failure is None or (failure.is_known and can_be_refused)
    assert is_fine, f"{script(program, mode, num_devices)}\n{failure}"


def check_blocks(number: int, num_devices: int) -> None:
    mode = ROTA_OF_BLOCKS[(number // 10 + number % 10) % 4]
    check(f"{BLOCKS}{number}", mode, num_devices, number in REFUSED or number >= 40)


@pytest.mark.parametrize("part", mostly_long(range(PARTS), 0, 3))
def test_programs(pool: int, part: int) -> None:
    for number in range(part, NUM_PROGRAMS, PARTS):
        check(f"ci:{number}", ROTA[number % len(ROTA)], pool)


@pytest.mark.parametrize("pool", [8], indirect=True)
@pytest.mark.parametrize("part", mostly_long(range(10), 0, 1))
def test_programs_of_blocks(pool: int, part: int) -> None:
    for number in range(part, NUM_OF_BLOCKS, 10):
        check_blocks(number, pool)


@pytest.mark.inductor
@pytest.mark.parametrize("seed", ["inductor:0", "inductor:1"])
def test_compiled_programs(pool: int, seed: str) -> None:
    check(seed, "inductor", pool)


@pytest.mark.inductor
@pytest.mark.parametrize(("number", "mesh"), [(7, (2, 2)), (67, (4,))])
def test_compiled_programs_of_blocks(pool: int, number: int, mesh: tuple[int, ...]) -> None:
    """Of four devices; with several arguments and collectives."""
    assert {sizes(step) for step in blocks_of(generate(f"{BLOCKS}{number}"))} == {mesh}
    check(f"{BLOCKS}{number}", "inductor", pool, can_be_refused=False)


def steps_of(body: Body) -> list[Step]:
    return [step for inner in bodies(body) for step in inner.steps]


def blocks_of(program: Program) -> list[Blocks]:
    return [step for step in steps_of(program.body) if isinstance(step, Blocks)]


def sizes(step: Blocks) -> tuple[int, ...]:
    return tuple(size for _, size in step.mesh)


def test_same_seed_same_program() -> None:
    again, _ = generated.__wrapped__("same")  # without the memory of programs that were made
    assert again == generate("same")
    assert source(generate("same")) != source(generate("other"))


@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_may_differ_need_an_axis(size: int) -> None:
    """As in JAX, also if there is only one."""
    copy = Body(("row",), (Local(("y",), "row * 1", ("row",)),), ("y",))
    for axis in (0, None):
        step = Map(("z",), "vmap", "f", None, copy, ("x",), (0,), (axis,))
        program = Program((Input("x", 1, (size,), "float32"),), Body(("x",), (step,), ("z",)))
        assert (expectation(program) is None) == (axis is None)


@pytest.mark.long
@pytest.mark.timeout(300)  # alone it makes all programs
def test_the_programs_have_something_of_everything() -> None:
    programs = [generate(f"ci:{number}") for number in range(NUM_PROGRAMS)]
    steps = [step for program in programs for step in steps_of(program.body)]
    loops = [step for step in steps if isinstance(step, Loop)]
    assert {step.kind for step in loops} == set(LOOPS)
    assert any(isinstance(s, Loop) for step in loops for body in step.bodies for s in body.steps)
    blocks = [step for step in steps if isinstance(step, Blocks)]
    assert {len(step.mesh) for step in blocks} == {1, 2}
    assert {step.check_vma for step in blocks} == {False, True}
    maps = [step for step in steps if isinstance(step, Map)]
    assert sum(bool(step.statics) for step in maps) > 10
    assert sum(step.option == DONATES for step in maps) > 10
    codes = "".join(step.code for step in steps if isinstance(step, Local))
    assert all(word in codes for word in ("MODULE", "debug.print", "bernoulli", "one_hot", ".mul_"))


@pytest.mark.long
def test_the_programs_of_blocks_have_something_of_everything() -> None:
    programs = [generate(f"{BLOCKS}{number}") for number in range(40)]
    blocks = [step for program in programs for step in blocks_of(program)]
    assert len(blocks) > 70
    assert {step.form for step in blocks} == {"plain", "short", "tuples", "tree"}
    assert {len(step.args) for step in blocks} >= {1, 2, 3}
    cut = [step for step in blocks if any(map(any, step.in_specs))]
    assert set(map(sizes, cut)) == set(LARGE)
    assert sum(any(len(e) > 1 for spec in step.in_specs for e in spec) for step in cut) > 5
    collectives = [s for block in blocks for s in steps_of(block.body) if isinstance(s, Collective)]
    over = {(s.name, len(s.axes) if isinstance(s.axes, tuple) else 1) for s in collectives}
    assert over >= set(itertools.product(SHARED, (1, 2)))
    assert len({name for name, number in over if number == 3}) > 4
    around = [
        step
        for program in programs
        for step in steps_of(program.body)
        if isinstance(step, Map | Derivative)
        and any(isinstance(inner, Blocks) for inner in steps_of(step.body))
    ]
    kinds = {step.kind for step in around if isinstance(step, Derivative)}
    assert kinds >= {"grad", "torch_grad", "backward", "jvp"}
    assert {step.form for step in around if isinstance(step, Map)} >= {"plain", "torch"}


# --- that it finds --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("pool")
def test_a_defect_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ``ppermute`` sent everything to the next row but one: it is the reference that errs."""

    def astray(rows: list[torch.Tensor], perm: list[tuple[int, int]]) -> list[torch.Tensor]:
        out = [torch.zeros_like(row) for row in rows]
        for start, end in perm:
            out[(end + 1) % len(rows)] = rows[start].clone()
        return out

    monkeypatch.setitem(MODELS, "ppermute", astray)
    for number in range(200):
        program, expected = generated(f"defect:{number}")
        failure = trial(program, "inline", expected)
        if failure is not None and failure.text.startswith("result"):
            break
    assert failure is not None

    def fails(candidate: Program) -> bool:
        again = trial(candidate, "inline")
        return again is not None and again.kind == failure.kind

    small = shrink(program, fails)
    steps = steps_of(small.body)
    assert any(isinstance(s, Collective) and s.name == "ppermute" for s in steps), source(small)
    assert len(steps) <= 8, source(small)
