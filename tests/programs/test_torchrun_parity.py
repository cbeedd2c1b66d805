"""torchpmap under torchrun with 4 ranks against JAX: the stored programs of tests/programs/parity.

Covers: the runtime of launched processes, through whole programs, loops and branches included;
which runs what, and how, is in ``_torchrun_parity.py``.  Named alone it runs some programs of every
family and all loops in mapped functions; TORCHPMAP_TEST_ALL=1 runs all, loops in every mode.
"""

from pathlib import Path
from typing import Any

import pytest
from _launched import Raised, answers, launch
from _support import TEST_ALL, names_to_run
from _torchrun_parity import NUM_RANKS
from parity import values
from parity.cases import LOOPS, PMAPS, is_mapped
from parity.values import Case

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # the first test waits for the job

STEP = 1 if TEST_ALL else 12
COMPILED = ("lc_psum_carry",)


def _chosen() -> dict[str, Case]:
    graphs = sorted(PMAPS, key=lambda case: case["family"])[::STEP]
    graphs += [case for case in LOOPS if is_mapped(case)] + LOOPS[::STEP]
    found = {f"graph:{case['id']}": case for case in graphs}
    # after an error in a call that runs, a job ends: errors are left to graphs
    right = [case for case in LOOPS if not values.must_raise(case)]
    found |= {f"uncompiled:{case['id']}": case for case in right[3::STEP]}
    compiled = [case for case in right if case["id"] in COMPILED or TEST_ALL]
    return found | {f"inductor:{case['id']}": case for case in compiled}


CHOSEN = _chosen()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parity")
    script = str(Path(__file__).with_name("_torchrun_parity.py"))
    names = names_to_run(request, "test_same_as_jax")
    finished = launch(NUM_RANKS, script, str(folder), *names, limit_s=500)
    assert finished.code == 0, finished.output
    return answers(NUM_RANKS, folder)


@pytest.mark.parametrize("name", CHOSEN)
def test_same_as_jax(results: list[dict[str, Any]], name: str) -> None:
    case = CHOSEN[name]
    for rank, result in enumerate(results):
        got = result[name]
        if case in PMAPS and isinstance(got, Raised) and got.kind == "Unfit":
            pytest.skip(f"{got.text} do not divide over {NUM_RANKS} ranks")
        if values.must_raise(case):
            assert isinstance(got, Raised), f"rank {rank}: {got}"
            values.check_raised(got.kind.split(), got.text, case)
        else:
            assert not isinstance(got, Raised), f"rank {rank}: {got}"
            values.check(got, values.expectation(case), values.widened(case))
