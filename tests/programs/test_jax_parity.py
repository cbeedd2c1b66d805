"""torchpmap against JAX, program by program.

Covers: pmap, shard_map, meshes, vmap, grad, every collective, loops and branches, through whole
programs, of which ``ported_cases.json`` has those of JAX's own ``tests/pmap_test.py``: with 4, 8
and 3 rows on four devices, so one row on each, two on each, and one device idle.

Each case of ``parity/*_cases.json`` is a small program in JAX source text, its inputs, and the
exact result that JAX gave (or the right one where JAX raises or is wrong; ``parity/values.py``).
``parity/lookalike.py`` evaluates that same text with torchpmap in JAX's place. So no expectation
here was worked out by the code that it judges, and the tests do not need jax;
``parity/generate.py`` asks it for the results.

dtypes are JAX's, except that JAX ran with 32-bit defaults: int64 is right for its int32, and
float64 for its float32, where the program's own inputs or constants were that wide. Inputs are
torch tensors, and numpy arrays for a third of the programs.

Programs run op by op in the workers (``uncompiled``), traced (``graph``), in this process
(``inline``: all rows at once, ``serial``: one after the other), and a few through Inductor: all of
them with ``TORCHPMAP_TEST_ALL=1`` in the environment, which takes twenty minutes.  Loops that map
nothing also run as they are (``plain``).
"""

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from _support import TEST_ALL
from parity import values
from parity.cases import LOOPS, PMAPS, PORTED, SHARD_MAPS, is_mapped, run
from parity.values import Case

import torchpmap as tp

CASES = [*PMAPS, *PORTED, *LOOPS, *SHARD_MAPS]

# Families whose arrays go straight into a pmapped function, which takes numpy arrays too.
TAKES_NUMPY = {"pmap_args", "collectives", "grad_inside", "errors"}

COMPILED = {
    *("collectives_halo_exchange", "gj_psum_scatter"),
    *("lc_psum_carry", "gr_rnn", "me_grad_outside"),
}
OUTSIDE = "rows or blocks that run one after the other have no outside transforms"
ESCAPED = "a row's function uses a captured value of a vmap around, which torch says has ended"


SUMMED = "ignore:p(sum|mean). this gradient is already summed:UserWarning"


def params() -> list[Any]:
    found = []
    for case in CASES:
        modes = ["graph", "uncompiled", "inline"]
        if case in LOOPS:
            modes += [] if is_mapped(case) else ["plain"]
        else:
            modes += ["serial"]
        found += [(case, mode) for mode in modes]
    found += [(case, "inductor") for case in CASES if TEST_ALL or case["id"] in COMPILED]
    return [param(case, mode) for case, mode in found]


def param(case: Case, mode: str) -> Any:
    marks = [pytest.mark.inductor, pytest.mark.always] if mode == "inductor" else []
    if case in SHARD_MAPS:
        marks.append(pytest.mark.filterwarnings(SUMMED))
    if mode == "serial" and case.get("outside"):
        mark = pytest.mark.xfail(strict=True, reason=OUTSIDE, raises=NotImplementedError)
        marks.append(mark)
    if (case["id"], mode) == ("vp_captured_batch", "serial"):
        marks.append(pytest.mark.xfail(strict=True, reason=ESCAPED, raises=RuntimeError))
    return pytest.param(case, mode, id=f"{case['id']}-{mode}", marks=marks)


def result(case: Case, mode: str) -> Any:
    """Every pmap fits on 4 devices; what must fail for want of devices fails on 4 as it does on 8.
    Meshes are of some of 8 devices.
    """
    tp.init(8 if case in SHARD_MAPS else 4)
    sampled = zlib.crc32(case["id"].encode()) % 3 == 0
    make = values.to_numpy if sampled and case["family"] in TAKES_NUMPY else values.to_torch
    inputs = {name: values.decode(value, make) for name, value in case["inputs"].items()}
    return run(case, mode, inputs)


@pytest.mark.product
@pytest.mark.parametrize(("case", "mode"), params())
def test_same_as_jax(case: Case, mode: str) -> None:
    if values.must_raise(case):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (the types are compared below)
            result(case, mode)
        values.check_error(caught.value, case)
    else:
        values.check(result(case, mode), values.expectation(case), values.widened(case))


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


def test_programs_have_names_of_their_own() -> None:
    assert len({case["id"] for case in CASES}) == len(CASES)
