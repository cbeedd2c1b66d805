"""Covers: processes of one job that do different things, fail, end early or are killed.

The jobs are in ``_failing_ranks.py``.  Nothing may hang: a process that does not end is killed
there, and has no exit code.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from _launched import Job, free_port, jobs_of, launch, of_failed, outputs, succeed
from _support import TEST_ALL, is_running, wait_for

pytestmark = pytest.mark.timeout(600)  # the first test waits for all jobs

DIFFERENT = (
    "CollectiveMismatch: the processes are about to run different programs, which would hang or "
    "give wrong numbers:\n"
)
RULE = (
    "All processes must make the same mapped calls, with arguments of the same shapes and dtypes, "
    "in the same order."
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Job -> how each of its processes ended."""
    return jobs_of("_failing_ranks.py", tmp_path_factory.mktemp("failing"))


def without_lines(output: str) -> str:
    """With " @" for the places of functions in ``_failing_ranks.py``, whose numbers change."""
    return re.sub(r", defined at _failing_ranks.py:\d+", " @", output)


def test_nothing_hangs(ended):
    hung = [name for name, processes in ended.items() if any(code is None for code, _ in processes)]
    assert not hung


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("other_function", ["rank 0, 2: total(float32[1]) on 3 devices @",
         "rank 1: largest(float32[1]) on 3 devices @"]),
        ("other_shape", ["rank 0: total(float32[1, 2]) on 2 devices @",
         "rank 1: total(float32[1, 3]) on 2 devices @"]),
        ("other_number_of_rows",
         ["rank 0: total(float32[1]) on 2 devices @",
          "rank 1: total(float32[2]) on 2 devices @"]),
        ("one_untraced", ["rank 0: total(float32[1]) on 2 devices @",
         "rank 1: total(float32[1]), compile=False @"]),
        ("one_at_a_barrier", ["rank 0: total(float32[1]) on 2 devices @",
         "rank 1: torchpmap.multihost.barrier('loaded')"]),
        ("other_barriers", ["rank 0, 2: torchpmap.multihost.barrier('loaded')",
         "rank 1: torchpmap.multihost.barrier('saved')"]),
        ("other_shapes_gathered",
         ["rank 0: torchpmap.multihost.all_gather(tiled=False): tree['x'] is float32[1]",
         "rank 1: torchpmap.multihost.all_gather(tiled=False): tree['x'] is float32[2]"]),
    ],
)  # fmt: skip
def test_different_programs_are_the_same_error_everywhere(ended, name, rows):
    table = "".join(f"  {row}\n" for row in rows)
    for output in of_failed(ended[name]):
        assert DIFFERENT + table + RULE in without_lines(output)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        (
            "other_body",
            r"rank 0, 1: <lambda>\(float32\[1\]\) on 3 devices.*: .*aten\.mul.*, 1\.0\)",
            r"rank 2: <lambda>\(float32\[1\]\) on 3 devices.*: .*aten\.mul.*, 2\.0\)",
        ),
        (
            "other_devices",
            r"rank 0: total\(float32\[1\]\) on 2 devices.*: .*all_reduce.*ranks:0,1",
            r"rank 1: total\(float32\[1\]\) on 2 devices.*: .*all_reduce.*ranks:1,0",
        ),
    ],
)
def test_different_graphs_show_the_first_line_that_differs(ended, name, first, second):
    pattern = re.escape(DIFFERENT) + f"  {first}.*\n  {second}.*\n" + re.escape(RULE)
    for output in of_failed(ended[name]):
        assert re.search(pattern, output), output


def test_two_processes_on_one_device(ended):
    for output in of_failed(ended["both_on_one_device"]):
        assert "ValueError: rank 0 (device 0 of those that it sees, host " in output
        assert "have the same device: GPU-7. Each process needs one of its own." in output


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("one_untraced_later", "total(float32[1]), compile=False"),
        ("other_shape_later", "total(float32[1, 2]) on 2 devices"),
    ],
)
def test_a_known_call_here_and_a_new_one_there(ended, name, other):
    text = (
        "CollectiveMismatch: total(float32[1]) on 2 devices @: "
        "rank 0 runs it, but rank 1 has not come to it, and waits for rank 0 in another call: "
        f"{other} @. {RULE}"
    )
    for output in of_failed(ended[name]):
        assert text in without_lines(output)


def test_a_skipped_call_is_not_paired_with_another(ended):
    """The two have equal bodies, on the same line."""
    step = "step(float32[1]) on 2 devices @"
    for output in of_failed(ended["skipped_call"]):
        assert f"sum of torch.float32 x 1 in {step}, but rank" in without_lines(output)
        assert f"sum of torch.float32 x 1 in {step} (another function)" in without_lines(output)
        assert "a value" not in output
    for output in of_failed(ended["skipped_call_over_gloo"]):
        rows = re.findall(r"\n  rank (\d): (step.*)", without_lines(output))
        assert sorted(row for _, row in rows) == [step, f"{step} (another function)"]
        assert "a value" not in output
    for output in of_failed(ended["skipped_call_untraced"]):
        assert re.search(r"rank 0: <lambda>.*: number 0 of the functions that run so", output)
        assert re.search(r"rank 1: <lambda>.*: number 1 of the functions that run so", output)
        assert "a value" not in output


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("drifted_before_a_sum", ["rank 0: TITLE: operation 3: aten.mul_.Tensor with 2.0",
         "rank 1: TITLE: operation 3: aten.mul_.Tensor with 3.0"]),
        ("drifted_before_a_sum_over_gloo", ["rank 0: TITLE: operation 3: aten.mul_.Tensor with 2.0",
         "rank 1: TITLE: operation 3: aten.mul_.Tensor with 3.0"]),
        ("drifted_before_a_barrier", ["rank 0: TITLE: operation 3: aten.mul_.Tensor with 2.0",
         "rank 1: TITLE: operation 3: aten.mul_.Tensor with 3.0"]),
        ("left_an_operation_out", ["rank 0, 2: TITLE: operation 2: aten.mul_.Tensor with 2.0",
         "rank 1: TITLE: (nothing)"]),
    ],
)  # fmt: skip
def test_other_operations_on_a_value_that_all_have(ended, name, rows):
    table = "".join(f"  {row}\n" for row in rows)
    title = "operations on values that span processes"
    for output in of_failed(ended[name]):
        assert "with values that all of them hold, which differ now:\n" in output
        assert table.replace("TITLE", title) + "All processes must do the same operations" in output
        assert "a value" not in output.splitlines()


def test_other_numbers_in_the_graph_of_an_operation(ended):
    for output in of_failed(ended["other_numbers_of_foreach"]):
        assert re.search(r"rank 0: aten._foreach_mul_.Scalar\(.*, 2.0\)", output)
        assert re.search(r"rank 1: aten._foreach_mul_.Scalar\(.*, 3.0\)", output)
        assert "a value" not in output.splitlines()


def test_known_calls_of_equal_shapes_in_another_order(ended):
    """Between processes that share memory; the one that sees it first says it for all."""
    text = (
        r"CollectiveMismatch: rank (\d) runs sum of torch.float32 x 1 in (\w+)\(.*, but rank (\d) "
        r"sum of torch.float32 x 1 in (\w+)\(.*. All devices must run the same collectives in "
        r"the same order."
    )
    for output in of_failed(ended["other_order"]):
        found = re.search(text, output)
        assert found is not None, output
        said = {int(found[1]): found[2], int(found[3]): found[4]}
        assert said.pop(1) == "doubled"
        assert set(said.values()) == {"total"}


def test_different_collectives_of_an_untraced_function(ended):
    table = r"  rank 0: all_reduce sum \(\) .*\n  rank 1: all_reduce max \(\) .*\n"
    for output in outputs(ended["other_collective_untraced"]):
        assert "CollectiveMismatch: function: devices run different collectives" in output
        assert re.search(table, output)


def test_equal_collectives_of_an_untraced_function_in_another_order(ended):
    for output in of_failed(ended["other_order_untraced"]):
        assert "CollectiveMismatch: function: devices run different collectives" in output
        assert "in total, called at _failing_ranks.py" in output
        assert "a value" not in output


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "ended_before_a_new_plan",
            "CollectiveMismatch: total(float32[1]) on 2 devices, defined at ",
        ),
        ("ended_before_a_sum", "CollectiveMismatch: rank 1 has ended its script and will not"),
    ],
)
def test_a_process_that_ended_early(ended, name, text):
    waiting, gone = ended[name]
    assert gone.code == 0
    assert waiting.code == 1
    assert text in outputs([waiting])[0]


@pytest.mark.parametrize(
    ("name", "culprit", "place"),
    [
        ("raised_while_others_sum", 1, "script"),
        ("first_raised_while_others_sum", 0, "script"),
        ("raised_while_others_agree", 2, "script"),
        ("raised_while_others_wait", 2, "script"),
        ("raised_in_the_function", 1, "function"),
    ],
)
def test_an_exception_on_one_process_is_the_first_thing_the_others_show(
    ended, name, culprit, place
):
    for rank, output in enumerate(of_failed(ended[name])):
        first, *rest = output.split("The above exception was the direct cause of")
        assert f"ValueError: boom in the {place}" in first
        assert f'raise ValueError("boom in the {place}")' in first  # its traceback
        assert bool(rest) == (rank != culprit)
        if rank != culprit:
            assert f"on rank {culprit}:\nTraceback" in first
            last = output.strip().splitlines()[-1]
            text = f"WorkerError: rank {culprit} failed first: ValueError: boom in the {place}"
            assert last.endswith(text)


@pytest.mark.parametrize(
    ("name", "victim"), [("killed_while_others_sum", 1), ("first_killed_while_others_sum", 0)]
)
def test_a_killed_process_ends_the_others(ended, name, victim):
    for rank, ((code, _), output) in enumerate(zip(ended[name], outputs(ended[name]), strict=True)):
        if rank == victim:
            assert code == -9
        else:
            assert code == 1
            assert "WorkerDied: the connection to another process of this job broke off" in output


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("killed_while_others_agree", "total(float32[1]) on 2 devices"),
        ("killed_while_others_wait", "torchpmap.multihost.barrier('loaded')"),
    ],
)
def test_a_killed_process_without_a_connection_is_missed_in_time(ended, name, what):
    """Also if the timeout was set when the runtime had started."""
    waiting, killed = ended[name]
    assert killed.code == -9
    assert waiting.code == 1
    text = "rank 1 did not come within torchpmap.config.timeout (3 s)."
    assert re.search(re.escape(f"CallTimeout: {what}") + ".*: " + re.escape(text), waiting.output)


def test_a_caught_failure_is_in_the_exit_code(ended):
    for output in of_failed(ended["caught_and_ended"]):
        assert "the end" in output
        assert "torchpmap: exit code 1, as a call has failed: the processes are about" in output


def test_after_a_failure_no_call_is_taken(ended):
    for output in outputs(ended["used_after_a_failure"]):
        assert "RuntimeClosed: a mapped call failed in this process, so the others cannot" in output
        assert "End the script, and let the launcher restart it." in output


@pytest.mark.parametrize(
    "name", ["forged_message", "forged_cause", "forged_posting", "forged_tree", "forged_report"]
)
def test_what_a_stranger_writes_to_the_store_runs_nothing(ended, name):
    reader = ended[name][0]
    assert reader.code == 1
    assert "PmapError: data from another process of this job is not in" in reader.output
    assert not any("EXECUTED" in output.splitlines() for output in outputs(ended[name]))


# -- what torchrun makes of it ---------------------------------------------------------------------

FAILING = """
import os, signal, sys
import torch, torchpmap as tp
add = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile={"backend": "eager"})
add(torch.ones(1))
if tp.process_index() == 1:
    if sys.argv[1] == "raise":
        raise ValueError("boom")
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(1000):
    add(torch.ones(1))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return str(path)


def test_torchrun_reports_the_rank_that_failed_first(script):
    finished = launch(2, script, "raise")
    assert finished.code == 1, finished.output
    report = finished.output.split("Root Cause (first observed failure):")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", report), finished.output
    assert "ValueError: boom" in report


@pytest.mark.skipif(not TEST_ALL, reason="TORCHPMAP_TEST_ALL=1: one more launch")
def test_torchrun_reports_the_rank_that_was_killed(script):
    finished = launch(2, script, "kill")
    assert finished.code == 1, finished.output
    report = finished.output.split("Root Cause (first observed failure):")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", report), finished.output
    assert "Signal 9 (SIGKILL) received" in report


ORPHANED = """
import os, pathlib, sys, time
import torch, torchpmap as tp
add = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile={"backend": "eager"})
add(torch.ones(1))
pathlib.Path(sys.argv[1], f"pid{tp.process_index()}").write_text(f"{os.getpid()}\\n")
if tp.process_index() == 1:
    add(torch.ones(1))  # no other rank comes
time.sleep(1000)
"""


def test_a_killed_agent_takes_its_processes_along(tmp_path):
    """One of them is in a collective then."""
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    job = Job(2, str(script), str(tmp_path))
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    begun = wait_for(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files), 100)
    output = job.kill()  # the agent alone: its processes are in sessions of their own
    assert begun, output
    pids = [int(file.read_text()) for file in files]
    try:
        assert wait_for(lambda: not any(map(is_running, pids)), 20)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
    assert output.count("the agent of torchrun that started this process has ended") == 2


# -- restarts of several agents --------------------------------------------------------------------

RESTARTED = """
import os, pathlib, signal, sys, time
import torch, torchpmap as tp
torch.set_num_threads(1)
begun = pathlib.Path(sys.argv[1], f"begun{tp.process_index()}")
is_first = not begun.exists()
begun.touch()
add = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile={"backend": "eager"})
total = add(torch.ones(1) + tp.process_index()).item()
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
if is_first:
    if tp.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)  # not in a collective: only the other agent sees a process fail
pathlib.Path(sys.argv[1], f"rank{tp.process_index()}").write_text(f"{total} {count}")
"""


def test_restart_of_two_agents(tmp_path):
    """Torchrun tells the processes of the two that they are of different attempts."""
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    options = ("--nnodes=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=restarted")
    options = (*options, f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")
    each = [(*options, f"--rdzv-conf=is_host={is_host}") for is_host in (1, 0)]
    succeed(*(Job(1, str(script), str(tmp_path), options=options) for options in each))
    written = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(2)]
    assert [total for total, _ in written] == ["3.0", "3.0"]
    assert {count for _, count in written} == {"0", "1"}
