"""torchpmap under torchrun with 4 ranks against JAX: the stored programs of tests/programs/parity.

Covers: the runtime of launched processes, through whole programs; which runs what, and how, is in
``_torchrun_parity.py``.  Some programs of every family by default; TORCHPMAP_TEST_ALL=1 runs all.
"""

from pathlib import Path
from typing import Any

import pytest
from _launched import Raised, answers, launch
from _support import TEST_ALL
from _torchrun_parity import CASES, NUM_RANKS
from parity import values
from parity.values import Case

pytestmark = pytest.mark.timeout(600)  # the first test waits for the job

STEP = 1 if TEST_ALL else 12
CHOSEN = sorted(CASES, key=lambda case: case["family"])[::STEP]

PENDING: dict[str, str] = {
    "go_axes_1_1": "a value that spans processes is not laid out anew (here: cut along dim 1)",
    "go_jvp": "forward-mode derivatives of values that span processes go by the host",
    "go_jacfwd": "forward-mode derivatives of values that span processes go by the host",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parity")
    names = [case["id"] for case in CHOSEN]
    script = str(Path(__file__).with_name("_torchrun_parity.py"))
    finished = launch(NUM_RANKS, script, str(folder), *names, limit_s=500)
    assert finished.code == 0, finished.output
    return answers(NUM_RANKS, folder)


def _params() -> list[Any]:
    params = []
    for case in CHOSEN:
        reason = PENDING.get(case["id"])
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        params.append(pytest.param(case, id=case["id"], marks=marks))
    return params


@pytest.mark.parametrize("case", _params())
def test_same_as_jax(results: list[dict[str, Any]], case: Case) -> None:
    for rank, result in enumerate(results):
        got = result[case["id"]]
        if isinstance(got, Raised) and got.kind == "Unfit":
            pytest.skip(f"{got.text} do not divide over {NUM_RANKS} ranks")
        if values.must_raise(case):
            assert isinstance(got, Raised), f"rank {rank}: {got}"
            kinds = {kind.__name__ for kind in values.acceptable_errors(case)}
            assert kinds & set(got.kind.split()), f"rank {rank}: {got}"
        else:
            assert not isinstance(got, Raised), f"rank {rank}: {got}"
            values.check(got, values.expectation(case), values.widened(case))


def test_every_pending_case_exists() -> None:
    assert set(PENDING) <= {case["id"] for case in CASES}
