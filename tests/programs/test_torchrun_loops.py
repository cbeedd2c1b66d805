"""Covers: loops and branches under torchrun with 4 ranks against JAX: the stored programs of
parity/loop_cases.json.

Which runs what, and how, is in ``_torchrun_loops.py``.  Some programs by default, and all that map
a function; TORCHPMAP_TEST_ALL=1 runs all in every mode.
"""

from pathlib import Path
from typing import Any

import pytest
from _launched import Raised, answers, launch
from _support import TEST_ALL
from _torchrun_loops import CASES, NUM_RANKS, is_mapped
from parity import values
from parity.values import Case

pytestmark = pytest.mark.timeout(600)  # the first test waits for the job

COMPILED = ("lc_psum_carry",)
EVERY = 1 if TEST_ALL else 12


def _chosen() -> dict[str, Case]:
    found = {f"graph:{case['id']}": case for case in CASES if is_mapped(case)}
    found |= {f"graph:{case['id']}": case for case in CASES[::EVERY]}
    # after an error in a call that runs, a job ends: errors are left to graphs
    right = [case for case in CASES if "expected_error" not in case]
    found |= {f"uncompiled:{case['id']}": case for case in right[3::EVERY]}
    compiled = [case for case in right if case["id"] in COMPILED or TEST_ALL]
    return found | {f"inductor:{case['id']}": case for case in compiled}


CHOSEN = _chosen()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loops")
    script = str(Path(__file__).with_name("_torchrun_loops.py"))
    finished = launch(NUM_RANKS, script, str(folder), *CHOSEN, limit_s=500)
    assert finished.code == 0, finished.output
    return answers(NUM_RANKS, folder)


@pytest.mark.parametrize("name", CHOSEN)
def test_same_as_jax(results: list[dict[str, Any]], name: str) -> None:
    case = CHOSEN[name]
    expected = case.get("expected_error")
    for rank, result in enumerate(results):
        got = result[name]
        if expected is None:
            assert not isinstance(got, Raised), f"rank {rank}: {got}"
            values.check(got, values.expectation(case), values.widened(case))
        else:
            assert isinstance(got, Raised), f"rank {rank}: {got}"
            assert {expected["builtin"], "IndexError"} & set(got.kind.split()), (
                f"rank {rank}: {got}"
            )
            for word in expected["keywords"]:
                assert word.lower() in got.text.lower()
