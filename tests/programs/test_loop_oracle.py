"""Covers: loops and branches give what JAX gives, in every mode.

``parity/loop_cases.json`` holds programs in JAX source text and JAX's exact results;
``parity/lookalike`` runs the same text on torchpmap.  A program that maps nothing runs as it is,
and whole in a mapped function.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parity import lookalike, values
from parity.values import Case

import torchpmap as tp

CASES: list[Case] = json.loads((Path(__file__).parent / "parity" / "loop_cases.json").read_text())[
    "cases"
]
MODES: dict[str, Any] = {"graph": {"backend": "eager"}, "uncompiled": False, "inductor": True}
SAMPLE = {"sc_int_counter", "wh_newton", "sw_vmap_grad", "gr_rnn", "lc_psum_carry", "gr_sgd_pmap"}


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    tp.init(num_devices=4)
    yield
    tp.shutdown()


def _is_mapped(case: Case) -> bool:
    return "pmap" in case["jax_expr"] or "shard_map" in case["jax_expr"]


def _params() -> list[Any]:
    found = []
    for case in CASES:
        modes = ["graph", "uncompiled", "inline"]
        modes += [] if _is_mapped(case) else ["plain"]
        modes += ["inductor"] if case["id"] in SAMPLE else []
        for mode in modes:
            marks = [pytest.mark.inductor] if mode == "inductor" else []
            found.append(pytest.param(case, mode, id=f"{case['id']}-{mode}", marks=marks))
    return found


def _run(case: Case, mode: str) -> Any:
    inputs = {name: values.decode(value) for name, value in case["inputs"].items()}
    compiled = MODES.get(mode, True)
    pmap = lookalike.pmap_in_mode(compiled)
    shard_map = functools.partial(tp.shard_map, compile=compiled)
    fake = tp.debug.fake_pmap() if mode == "inline" else contextlib.nullcontext()

    def whole(given: dict[str, Any]) -> Any:
        return lookalike.run(case["jax_expr"], given, pmap, shard_map)

    with fake:
        if mode == "plain" or _is_mapped(case):
            return values.fetch(whole(inputs))
        mapped = pmap(whole, in_axes=None, out_axes=None, axis_size=1)
        return values.fetch(mapped(inputs))


@pytest.mark.parametrize(("case", "mode"), _params())
def test_same_as_jax(case: Case, mode: str) -> None:
    expected = case.get("expected_error")
    if expected is None:
        values.check(_run(case, mode), values.expectation(case), values.widened(case))
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011  (compared below)
        _run(case, mode)
    kinds = {"ValueError": (ValueError, IndexError), "TypeError": TypeError, "KeyError": KeyError}
    assert isinstance(caught.value, kinds[expected["builtin"]]), repr(caught.value)
    for word in expected["keywords"]:
        assert word.lower() in str(caught.value).lower()
