"""torchpmap against JAX, program by program.

Covers: pmap, vmap, grad, value_and_grad and every collective, through whole programs.

Each case of ``parity/cases.json`` and ``parity/more_cases.json`` is a small program in JAX source
text, its inputs, and the exact result that JAX gave (or the right one where JAX raises or is
wrong: ``ideal``). ``parity/lookalike.py`` evaluates that same text with torchpmap in JAX's place,
and ``parity/values.py`` compares structure, shapes, dtypes and values. So no expectation here was
worked out by the code that it judges, and the tests do not need jax. ``parity/programs.py`` is the
text of ``more_cases.json``; ``parity/generate.py`` asks JAX for its results.

dtypes are JAX's, except that JAX ran with 32-bit defaults: int64 is right for its int32, and
float64 for its float32, where the program's own inputs or constants were that wide. Inputs are
torch tensors, and numpy arrays for a third of the programs.

Programs run op by op in the workers (``eager``), traced (``graph``), in this process (``inline``:
all rows at once, ``serial``: one after the other), and a few through Inductor: all of them with
``TORCHPMAP_TEST_ALL=1`` in the environment, which takes twenty minutes.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import TEST_ALL
from parity import lookalike, values
from parity.values import Case

import torchpmap as tp

HERE = Path(__file__).parent / "parity"
CASES: list[Case] = [
    case
    for file in ("cases.json", "more_cases.json")
    for case in json.loads((HERE / file).read_text())["cases"]
]
MODES: dict[str, Any] = {
    "eager": False,
    "graph": {"backend": "eager"},
    "inductor": True,
    "inline": True,
    "serial": True,
}

IN_PROCESS = ("inline", "serial")
IN_FULL = ("eager", "graph", *IN_PROCESS)

# Every program fits on 4 devices; what must fail for want of devices fails on 4 as it does on 8.
NUM_DEVICES = 4

# Families whose arrays go straight into a pmapped function, which takes numpy arrays too.
TAKES_NUMPY = {"pmap_args", "collectives", "grad_inside", "errors"}
NUM_INDUCTOR = 8

# What does not pass yet: "case id" in every mode on the devices, or "case id[mode]", and why.
PENDING: dict[str, str] = {}

# The same for the modes in this process, "case id[mode]".
PENDING_IN_PROCESS: dict[str, str] = {
    **{
        f"{case['id']}[serial]": "rows that run one after the other have no outside derivative"
        for case in CASES
        if case["family"] == "grad_outside"
    },
    **dict.fromkeys(
        ("vp_in1_out1[serial]", "vp_in_None[serial]", "vp_axes11[serial]"),
        "rows that run one after the other cannot be vmapped from outside",
    ),
}


def _compiled_sample() -> list[Case]:
    """Every so many of the programs that give a value; the traced graphs are tested already."""
    values_only = [
        case for case in CASES if case["family"] in TAKES_NUMPY and not values.must_raise(case)
    ]
    return values_only[:: -(-len(values_only) // NUM_INDUCTOR)]


def _params(cases: list[Case], mode: str) -> list[Any]:
    params = []
    for case in cases:
        key = f"{case['id']}[{mode}]"
        if mode in IN_PROCESS:
            reason = PENDING_IN_PROCESS.get(key)
        else:
            reason = PENDING.get(key) or PENDING.get(case["id"])
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        if mode == "inductor":
            marks.append(pytest.mark.inductor)
        params.append(pytest.param(case, mode, id=f"{case['id']}-{mode}", marks=marks))
    return params


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    tp.init(num_devices=NUM_DEVICES)
    yield
    tp.shutdown()


def _inputs(case: Case) -> dict[str, Any]:
    sampled = zlib.crc32(case["id"].encode()) % 3 == 0
    make = values.to_numpy if sampled and case["family"] in TAKES_NUMPY else values.to_torch
    return {name: values.decode(value, make) for name, value in case["inputs"].items()}


def _run(case: Case, mode: str) -> Any:
    """The program's result, fetched: what goes wrong on a worker must show here."""
    fake = tp.debug.fake_pmap(serial=mode == "serial")
    with fake if mode in IN_PROCESS else contextlib.nullcontext():
        result = lookalike.run(case["jax_expr"], _inputs(case), lookalike.pmap_in_mode(MODES[mode]))
    return values.fetch(result)


def _everything() -> list[Any]:
    full = [p for mode in IN_FULL for p in _params(CASES, mode)]
    return full + _params(CASES if TEST_ALL else _compiled_sample(), "inductor")


@pytest.mark.parametrize(("case", "mode"), _everything())
def test_same_as_jax(case: Case, mode: str) -> None:
    if values.must_raise(case):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (the types are compared below)
            _run(case, mode)
        assert not isinstance(caught.value, tp.PmapError)
        assert isinstance(caught.value, values.acceptable_errors(case)), repr(caught.value)
    else:
        values.check(_run(case, mode), values.expectation(case), values.widened(case))


GOOD = {"a": np.array([1.0, 2.0], np.float32), "b": (np.array(3, np.int32), None)}
BAD = {
    "value": ({"a": np.array([1.0, 2.001], np.float32), "b": GOOD["b"]}, "Not equal"),
    "nan": ({"a": np.array([1.0, np.nan], np.float32), "b": GOOD["b"]}, "nan location"),
    "int value": ({"a": GOOD["a"], "b": (np.array(4, np.int32), None)}, "Not equal"),
    "shape": ({"a": np.array([[1.0, 2.0]], np.float32), "b": GOOD["b"]}, "shape"),
    "broadcast shape": ({"a": GOOD["a"], "b": (np.array([3], np.int32), None)}, "shape"),
    "dtype": ({"a": np.array([1.0, 2.0], np.float16), "b": GOOD["b"]}, "float16"),
    "wider dtype": ({"a": np.array([1.0, 2.0], np.float64), "b": GOOD["b"]}, "float64"),
    "missing key": ({"a": GOOD["a"]}, "keys"),
    "list for tuple": ({"a": GOOD["a"], "b": list(GOOD["b"])}, "got list, expected tuple"),
    "value for None": ({"a": GOOD["a"], "b": (GOOD["b"][0], GOOD["a"])}, "expected None"),
    "None for value": ({"a": None, "b": GOOD["b"]}, "got NoneType"),
    "too long": ({"a": GOOD["a"], "b": (*GOOD["b"], None)}, "3 items"),
    "bare scalar": ({"a": 1.0, "b": GOOD["b"]}, "got float"),
}


@pytest.mark.parametrize("wrong", BAD)
def test_comparison_can_fail(wrong: str) -> None:
    actual, message = BAD[wrong]
    with pytest.raises(AssertionError, match=message):
        values.check(actual, values.encode(GOOD))


def test_comparison_accepts_equal_values() -> None:
    as_tensors = {"a": torch.tensor([1.0, 2.0]), "b": (torch.tensor(3), None)}
    values.check(GOOD, values.encode(GOOD))
    values.check(as_tensors, values.encode(GOOD), {"int32": "int64"})
    for case in CASES:
        if not values.must_raise(case):
            expected = values.expectation(case)
            values.check(values.decode(expected), expected)


def test_every_pending_case_exists() -> None:
    known = {case["id"] for case in CASES}
    assert len(known) == len(CASES)
    assert {key.partition("[")[0] for key in (*PENDING, *PENDING_IN_PROCESS)} <= known
