"""Random programs in all modes against plain torch, row by row (``fuzz.py`` runs more of them).

Covers: values and derivatives of whole programs; that the reference knows JAX's rules; and that a
defect would be found and made small.
"""

import itertools

import _fuzz_reference
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
from _fuzz_reference import LOOPS, run
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
@pytest.mark.parametrize(("number", "mesh"), [(7, (2, 2)), (38, (4,))])
def test_compiled_programs_of_blocks(pool: int, number: int, mesh: tuple[int, ...]) -> None:
    """Of four devices; with three arguments and several collectives."""
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


# --- the reference --------------------------------------------------------------------------------

X, W = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 10.0, 100.0, 1000.0])
PAIRS = (("axis_index_groups", [[0, 1], [2, 3]]),)


def _of_two(call: Map | Blocks, size: int) -> Program:
    """The call of two values, the second of a size."""
    inputs = (Input("x0", 0, (4,), "float32"), Input("x1", 1, (size,), "float32"))
    return Program(inputs, Body(("x0", "x1"), (call,), ("r",)))


def _gradient(*steps: Local | Collective) -> Program:
    """``pmap(grad(f))(x, w)`` of the steps from ``x`` and ``w`` to ``y``."""
    f = Derivative(("g",), "grad", "f", Body(("x",), steps, ("y",)), ("p",))
    row = Body(("p", "w"), (f,), ("g",))
    return _of_two(Map(("r",), "pmap", "row", "i", row, ("x0", "x1"), (0, 0), (0,)), 4)


def _local(out: str, code: str, *args: str) -> Local:
    return Local((out,), code, args)


def _over(out: str, name: str, x: str, *options: tuple[str, object]) -> Collective:
    return Collective((out,), name, (x,), "i", options)


def _inside(w_axes: tuple[str, ...], kind: str, *steps: Local | Collective) -> Program:
    """``shard_map`` of the gradient by ``w`` of the steps from ``x``, cut over ``i``, to ``y``."""
    gradient = Derivative(("g",), "grad", "f", Body(("w",), steps, ("y",)), ("q",))
    if kind == "twice":
        inner = Derivative(("h",), "grad", "f", Body(("w",), steps, ("y",)), ("u",))
        total = Local(("t",), "{0}.sum()", ("h",))
        gradient = Derivative(("g",), "grad", "f2", Body(("u",), (inner, total), ("t",)), ("q",))
    block = Body(("x", "q"), (gradient,), ("g",))
    specs = ((("i", "k"),), (w_axes,)) if not w_axes else ((("i",),), (w_axes,))
    mesh = (("i", 2), ("k", 2))
    return _of_two(Blocks(("r",), "block", mesh, block, ("x0", "x1"), specs, (specs[1],)), 2)


PRODUCT = _local("y", "({0}.sum() * {1}).sum()", "x", "w")
CUBES = _local("y", "({0}.sum() * {1} ** 3).sum()", "x", "w")


GATHERED = (  # of what is the same everywhere
    _local("s", "{0} * 0 + 10", "w"),
    Collective(("a",), "all_gather", ("s",), "i"),
    _local("y", "({0}[0] * {1}).sum() / 2", "a", "w"),
)


def _total(name: str, axes: object) -> tuple[Local, Collective]:
    return _local("a", "({0}.sum() * {1}).sum()", "x", "w"), Collective(("y",), name, ("a",), axes)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            _gradient(_local("a", "{0} * {1}", "x", "w"), _over("y", "psum", "a")),
            [4, 40, 400, 4000],
        ),
        (_gradient(_over("a", "psum", "x"), _local("y", "{0} * {1}", "w", "a")), [1111] * 4),
        (_gradient(_over("a", "psum", "x"), _local("y", "{0} ** 2", "a")), [80] * 4),
        (_gradient(_over("a", "psum", "x"), _local("y", "{0} * {1}", "x", "a")), [20] * 4),
        (
            _gradient(_local("a", "{0} * {1}", "x", "w"), _over("y", "pmean", "a")),
            [1, 10, 100, 1000],
        ),
        (
            _gradient(_over("a", "psum", "x", *PAIRS), _local("y", "{0} * {1}", "w", "a")),
            [11, 11, 1100, 1100],
        ),
        (
            _gradient(
                _over("a", "ppermute", "x", ("perm", [(0, 1), (1, 2)])),
                _local("y", "{0} * {1}", "w", "a"),
            ),
            [10, 100, 0, 0],
        ),
        (_inside((), "once", PRODUCT), [10, 10]),
        (_inside(("k",), "once", *_total("psum", "i")), [10, 10]),
        (_inside((), "once", *_total("pmean", ("i", "k"))), [2.5, 2.5]),
        (_inside((), "twice", CUBES), [60, 600]),
        (_inside((), "once", *GATHERED), [10, 10]),
    ],
)
def test_the_reference_has_the_gradients_of_jax(
    program: Program, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those inside shard_map were computed with jax 0.10.2."""
    known = {"x0": X, "x1": W[: program.inputs[1].shape[0]]}
    monkeypatch.setattr(_fuzz_reference, "made", lambda given: known[given.name])
    assert run(program)[0].tolist() == expected


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
