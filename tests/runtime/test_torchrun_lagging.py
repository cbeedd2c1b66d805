"""Covers: processes of a launcher whose devices are asynchronous (``_base/lagging.py``): what is
known when, and late errors.

The jobs are in ``_lagging_ranks.py``.  Nothing may hang: a process that does not end is killed
there, and has no exit code.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from _launched import jobs_of, of_failed, outputs

pytestmark = pytest.mark.timeout(600)  # the first test waits for all jobs


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Job -> how each of its processes ended."""
    return jobs_of("_lagging_ranks.py", tmp_path_factory.mktemp("lagging"), TORCHPMAP_TEST_LAG="1")


def said(processes: Any) -> list[list[Any]]:
    """What each process said, where none has failed."""
    assert [code for code, _ in processes] == [0] * len(processes), outputs(processes)
    return [[json.loads(line) for line in text.splitlines()] for _, text in processes]


def test_nothing_hangs(ended):
    hung = [name for name, processes in ended.items() if any(code is None for code, _ in processes)]
    assert not hung


def test_a_call_is_a_launch_only(ended):
    before = [[3.0], True, False, False]
    assert said(ended["calls_run_later"]) == [[before, [True, True, [4.0], [8.0]]]] * 2


def test_a_plan_may_be_forgotten_before_it_runs(ended):
    assert said(ended["forgotten_before_it_runs"]) == [[[[4.0]]], [[[6.0]]]]


def test_what_the_processes_do_together_comes_after_the_calls(ended):
    spoken = said(ended["what_the_processes_do_together_comes_after_the_calls"])
    assert spoken == [[[True, [1.0, 2.0], [5.0]]]] * 2


def test_an_uncompiled_call_comes_after_the_others(ended):
    spoken = said(ended["an_uncompiled_call_comes_after_the_others"])
    assert spoken == [[[True, True, [5.0], [10.0]]]] * 2


def test_a_process_that_ends_completes_what_it_has_launched(ended):
    assert said(ended["one_ends_with_calls_in_flight"]) == [[[[10.0]]], []]


LATE = "linalg.cholesky: The factorization could not be completed"


@pytest.mark.parametrize(
    "name",
    ["late_error", "late_error_that_nobody_waits_for", "late_error_while_waiting_for_others"],
)
def test_a_late_error_is_the_cause_on_all_ranks(ended, name):
    other, culprit = of_failed(ended[name])
    assert f"LinAlgError: {LATE}" in culprit.strip().splitlines()[-1]
    assert "The above exception" not in culprit
    last = other.strip().splitlines()[-1]
    assert f"WorkerError: rank 1 failed first: torch._C._LinAlgError: {LATE}" in last
    assert "on rank 1:\nTraceback" in other


def test_a_call_that_fails_late_has_returned(ended):
    for name in ("late_error", "late_error_that_nobody_waits_for"):
        assert all(json.dumps(["launched"]) in text for text in outputs(ended[name]))


def test_shutdown_raises_what_nothing_has_raised(ended):
    names = ['["WorkerError"]', '["_LinAlgError"]']
    assert [text.splitlines()[0] for text in of_failed(ended["late_error_at_shutdown"])] == names


def test_after_a_late_error_no_value_is_given(ended):
    for output in of_failed(ended["late_error_is_raised_once"]):
        assert "RuntimeClosed: a mapped call failed in this process, so the others" in output


def test_an_assert_in_a_kernel_says_what_to_do(ended):
    other, culprit = of_failed(ended["assert_in_a_kernel"])
    assert "IndexError: index out of range" in culprit
    assert "CUDA_LAUNCH_BLOCKING=1 shows the call that fails." in culprit
    assert "WorkerError: rank 1 failed first: IndexError: index out of range" in other


@pytest.mark.parametrize("name", ["killed", "killed_without_shared_memory"])
def test_a_device_that_waits_for_a_killed_process(ended, name):
    waiting, victim = ended[name]
    assert (waiting.code, victim.code) == (1, -9)
    text = "WorkerDied: the connection to another process of this job broke off"
    assert text in outputs([waiting])[0]


def test_a_device_that_waits_for_a_process_that_has_ended(ended):
    waiting, gone = ended["ended_before_a_call"]
    assert (waiting.code, gone.code) == (1, 0)
    text = "CollectiveMismatch: rank 1 has ended its script and will not come."
    assert text in outputs([waiting])[0]


def test_calls_in_another_order(ended):
    """Gloo would add the numbers of one call to those of the other, and NCCL too."""
    for output in of_failed(ended["other_order_of_a_known_and_a_new_call"]):
        assert "CollectiveMismatch: the processes are about to run different programs" in output
        assert re.search(r"  rank 0: 2 calls before .*\n  rank 1: 1 calls before ", output), output


def test_a_call_that_takes_too_long(ended):
    """Its time begins when the device comes to it, which that of rank 1 never does."""
    late, other = of_failed(ended["takes_too_long"])
    text = r"CallTimeout: total\(.* did not end within its timeout of 3 s; rank 0 waits for rank 1"
    assert re.search(text, late)
    assert "WorkerError: rank 0 failed first: " in other
