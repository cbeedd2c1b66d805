"""shard_map against JAX, program by program.

Covers: shard_map, make_mesh, set_mesh, pcast and the collectives over meshes of several axes,
through whole programs, as test_jax_parity.py does for pmap.

``parity/shard_map_cases.json`` holds the programs with JAX's exact results, and
``parity/shard_map_gradient_cases.json`` those of jax 0.10.2 for gradients inside; a program may
have statements before the expression whose value is compared.  For an error, the built-in type and
the words that a message must have are given.
"""

import builtins
import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _support import TEST_ALL
from parity import lookalike, values
from parity.values import Case

import torchpmap as tp

CASES: list[Case] = [
    case
    for name in ("shard_map_cases.json", "shard_map_gradient_cases.json")
    for case in json.loads((Path(__file__).parent / "parity" / name).read_text())["cases"]
]
MODES: dict[str, Any] = {
    "eager": False,
    "graph": {"backend": "eager"},
    "inline": True,
    "serial": True,
    "inductor": True,
}
NUM_DEVICES = 8
TRANSFORMED = {
    "pr_ring_attention_grads",
    "go_psum_replicated__vma_true",
    "go_psum_stays_sharded__vma_true",
    "go_replicated_w__vma_false",
    "go_psum_replicated__vma_false",
    "go_psum_stays_sharded__vma_false",
    "go_jacobians",
    "go_grad_of_grad",
    "go_all_to_all",
    "go_psum_scatter",
    "go_ppermute_partial",
    "go_stop_gradient",
    "go_through_two_maps",
    "go_varying_out_replicated",
    "gi_grad_inside_and_outside",
    "vm_of_grad",
    "vm_nested",
    "va_custom_vjp",
    "gj_outside_of_inside",
    "gj_outside_local",
    "gj_outside_tp",
}
"""Programs with transforms around the mapped function."""
EVERY = 12
"""One in so many programs is compiled by Inductor."""


def _params() -> list[Any]:
    params = []
    for mode in MODES:
        chosen = CASES if mode != "inductor" or TEST_ALL else CASES[::EVERY]
        for case in chosen:
            marks = [pytest.mark.inductor] if mode == "inductor" else []
            if mode == "serial" and case["id"] in TRANSFORMED:
                reason = "devices that run one after the other have no outside derivative"
                marks = [pytest.mark.xfail(strict=True, reason=reason, raises=NotImplementedError)]
            params.append(pytest.param(case, mode, id=f"{case['id']}-{mode}", marks=marks))
    return params


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    tp.init(num_devices=NUM_DEVICES)
    yield
    tp.shutdown()


def _run(case: Case, mode: str) -> Any:
    inputs = {name: values.decode(value, values.to_torch) for name, value in case["inputs"].items()}
    compiled = {"compile": MODES[mode]}
    pmap, shard_map = (
        functools.partial(tp.pmap, **compiled),
        functools.partial(tp.shard_map, **compiled),
    )
    fake = tp.debug.fake_pmap(serial=mode == "serial")
    with fake if mode in ("inline", "serial") else contextlib.nullcontext():
        return values.fetch(lookalike.run(case["jax_expr"], inputs, pmap, shard_map))


def _kinds(builtin: str) -> tuple[type[BaseException], ...]:
    kind = getattr(builtins, builtin)
    return (ValueError, IndexError) if kind in (ValueError, IndexError) else (kind,)


@pytest.mark.filterwarnings("ignore:p(sum|mean). this gradient is already summed:UserWarning")
@pytest.mark.parametrize(("case", "mode"), _params())
def test_same_as_jax(case: Case, mode: str) -> None:
    if not values.must_raise(case):
        values.check(_run(case, mode), values.expectation(case), values.widened(case))
        return
    expected = case["expected_error"]
    with pytest.raises(_kinds(expected["builtin"])) as caught:
        _run(case, mode)
    text = str(caught.value).lower()
    assert not [word for word in expected["keywords"] if word.lower() not in text], text
