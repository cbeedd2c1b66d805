"""Covers: processes of one job that do different things, fail, end early, are killed, or read what
a stranger wrote, and what torchrun makes of it.
"""

import contextlib
import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from _jobs import Jobs, fails, mapped, misses_rank_1, total, warmed_up
from _launched import Job, Runs, free_port, jobs_of, launch, of_failed, outputs, succeed
from _support import EAGER, is_running, mostly_long, wait_for

import torchpmap as tp
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.platform import Platform
from torchpmap._runtime import current
from torchpmap._runtime.torchrun import watch
from torchpmap.checkpoint import _save

pytestmark = pytest.mark.timeout(600)  # the first test waits for all jobs

jobs = Jobs()


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """Job -> how each of its processes ended."""
    return jobs_of(request, tmp_path_factory.mktemp("failing"))


def largest(x):
    return tp.pmax(x, "i")


ONE = torch.ones(1)


def call(function=total, x=ONE, **options):
    return mapped(function, **options)(x)


barrier = tp.multihost.barrier


# -- different programs ----------------------------------------------------------------------------

DIFFERENT = (
    "CollectiveMismatch: the processes are about to run different programs, which would hang or "
    "give wrong numbers:\n"
)
RULE = (
    "All processes must make the same mapped calls, with arguments of the same shapes and dtypes, "
    "in the same order."
)
NEW = {
    "other_function": (3, lambda rank: call(largest if rank == 1 else total),
        "0, 2: total(float32[1]) on 3 devices @", "1: largest(float32[1]) on 3 devices @"),
    "other_shape": (2, lambda rank: call(x=torch.ones(1, 2 + rank)),
        "0: total(float32[1, 2]) on 2 devices @", "1: total(float32[1, 3]) on 2 devices @"),
    "other_number_of_rows": (2, lambda rank: call(x=torch.ones(1 + rank)),
        "0: total(float32[1]) on 2 devices @", "1: total(float32[2]) on 2 devices @"),
    "one_untraced": (2, lambda rank: call(compile=EAGER if rank == 0 else False),
        "0: total(float32[1]) on 2 devices @", "1: total(float32[1]), compile=False @"),
    "one_at_a_barrier": (2, lambda rank: call() if rank == 0 else barrier("loaded"),
        "0: total(float32[1]) on 2 devices @", "1: torchpmap.multihost.barrier('loaded')"),
    "other_barriers": (3, lambda rank: barrier("saved" if rank == 1 else "loaded"),
        "0, 2: torchpmap.multihost.barrier('loaded')", "1: torchpmap.multihost.barrier('saved')"),
    "other_shapes_gathered": (2, lambda rank: tp.multihost.all_gather({"x": torch.ones(1 + rank)}),
        "0: torchpmap.multihost.all_gather(tiled=False): tree['x'] is float32[1]",
        "1: torchpmap.multihost.all_gather(tiled=False): tree['x'] is float32[2]"),
}  # fmt: skip
"""Number of processes, what each does, and what the error says of the ranks."""
for _name, (_count, _run, *_rows) in NEW.items():
    _table = "".join(f"  rank {row}\n" for row in _rows)
    jobs.add(_count, fails(DIFFERENT + _table + RULE), _name)(_run)


def differ_in_line(first, second):
    """The first line of their graphs that differs, as patterns."""
    return fails(re.compile(f"{re.escape(DIFFERENT)}  {first}.*\n  {second}.*\n{re.escape(RULE)}"))


@jobs.add(
    3,
    differ_in_line(
        r"rank 0, 1: <lambda>\(float32\[1\]\) on 3 devices.*: .*aten\.mul.*, 1\.0\)",
        r"rank 2: <lambda>\(float32\[1\]\) on 3 devices.*: .*aten\.mul.*, 2\.0\)",
    ),
)
def other_body(rank):
    scale = 1.0 + (rank == 2)
    call(lambda x: tp.psum(scale * x, "i"))


REVERSED = differ_in_line(
    r"rank 0: total\(float32\[1\]\) on 2 devices.*: .*all_reduce.*ranks:0,1",
    r"rank 1: total\(float32\[1\]\) on 2 devices.*: .*all_reduce.*ranks:1,0",
)
jobs.add(2, REVERSED, "other_devices")(lambda rank: call(devices=tp.devices()[:: 1 - 2 * rank]))


def waits_elsewhere(other):
    """A known call here, and a new one there."""
    return fails(
        "CollectiveMismatch: total(float32[1]) on 2 devices @: "
        "rank 0 runs it, but rank 1 has not come to it, and waits for rank 0 in another call: "
        f"{other} @. {RULE}"
    )


jobs.add(2, waits_elsewhere("total(float32[1, 2]) on 2 devices"), "other_shape_later")(
    lambda rank: warmed_up()(torch.ones(1, 2) if rank else ONE)
)
jobs.add(2, waits_elsewhere("total(float32[1]), compile=False"), "one_untraced_later")(
    lambda rank: (warmed_up(), mapped(compile=False))[rank](ONE)
)


ORDER = (
    r"CollectiveMismatch: rank (\d) runs sum of torch.float32 x 1 in (\w+)\(.*, but rank (\d) "
    r"sum of torch.float32 x 1 in (\w+)\(.*. All devices must run the same collectives in "
    r"the same order."
)


def say_who_runs_what(processes):
    """Between processes that share memory; the one that sees it first says it for all."""
    for output in of_failed(processes):
        found = re.search(ORDER, output)
        assert found is not None, output
        said = {int(found[1]): found[2], int(found[3]): found[4]}
        assert said.pop(1) == "doubled"
        assert set(said.values()) == {"total"}


@jobs.add(3, say_who_runs_what)
def other_order(rank):
    def doubled(x):
        return 2 * tp.psum(x, "i")

    calls = [warmed_up(), mapped(doubled)]
    calls[1](ONE)
    for each in reversed(calls) if rank == 1 else calls:
        each(ONE)


def skip_a_call(rank, compile=EAGER):
    """Of two functions with equal bodies, on the same line."""

    def twin():
        def step(x):
            return tp.psum(x, "i")

        return mapped(step, compile=compile)

    first, second = twin(), twin()
    first(ONE)
    second(ONE)
    if rank == 0:
        first(ONE)
    second(5 * torch.ones(1))
    print("a value")


STEP = "step(float32[1]) on 2 devices @"
SUM = f"sum of torch.float32 x 1 in {STEP}"


def name_one_of_each(processes):
    fails()(processes)
    for output in outputs(processes):
        rows = re.findall(r"\n  rank \d: (step.*)", output)
        assert sorted(rows) == [STEP, f"{STEP} (another function)"]


UNTRACED = [
    re.compile(rf"rank {k}: step.*: number {k} of the functions that run so") for k in range(2)
]
jobs.add(2, fails(f"{SUM}, but rank", f"{SUM} (another function)"), "skipped_call")(skip_a_call)
jobs.add(2, name_one_of_each, "skipped_call_over_gloo", TORCHPMAP_SHARED_MEMORY="0")(skip_a_call)
jobs.add(2, fails(*UNTRACED), "skipped_call_untraced")(lambda rank: skip_a_call(rank, False))
DEVICES_DIFFER = "CollectiveMismatch: function: devices run different collectives"


@jobs.add(
    2,
    fails(
        DEVICES_DIFFER,
        re.compile(r"  rank 0: all_reduce sum \(\) .*\n  rank 1: all_reduce max \(\) .*\n"),
    ),
)
def other_collective_untraced(rank):
    def function(x):
        return tp.psum(x, "i") if rank == 0 else tp.pmax(x, "i")

    call(function, compile=False)


@jobs.add(2, fails(DEVICES_DIFFER, "in total, called at test_torchrun_failures.py"))
def other_order_untraced(rank):
    def total(x):
        return tp.psum(x, "i")

    def function(x):
        if rank:
            second = total(10 * x)
            return total(x) + second
        first = total(x)
        return first + total(10 * x)

    call(function, compile=False)
    print("a value")


# -- operations on a value that all have -----------------------------------------------------------


def differ_in_operation(*rows):
    title = "operations on values that span processes"
    table = "".join(f"  {row.replace('TITLE', title)}\n" for row in rows)
    return fails(
        "with values that all of them hold, which differ now:\n",
        f"{table}All processes must do the same operations",
    )


def drift(rank, use):
    """Known operations with known numbers, the last of which differs."""
    sums, weights = warmed_up(), tp.replicate(torch.ones(2))
    for number in (2.0, 3.0, 3.0 if rank == 1 else 2.0):
        weights.mul_(number)
    sums(ONE) if use == "sum" else barrier("saved")
    print("a value")


DRIFTED = differ_in_operation(
    "rank 0: TITLE: operation 3: aten.mul_.Tensor with 2.0",
    "rank 1: TITLE: operation 3: aten.mul_.Tensor with 3.0",
)
for _name, _use, _settings in (
    ("drifted_before_a_sum", "sum", {}),
    ("drifted_before_a_sum_over_gloo", "sum", {"TORCHPMAP_SHARED_MEMORY": "0"}),
    ("drifted_before_a_barrier", "barrier", {}),
):
    jobs.add(2, DRIFTED, _name, **_settings)(lambda rank, use=_use: drift(rank, use))


@jobs.add(
    3,
    differ_in_operation(
        "rank 0, 2: TITLE: operation 2: aten.mul_.Tensor with 2.0", "rank 1: TITLE: (nothing)"
    ),
)
def left_an_operation_out(rank):
    weights = tp.replicate(torch.ones(2))
    for _ in range(2 - (rank == 1)):
        weights.mul_(2.0)
    barrier("saved")
    print("a value")


NUMBERS = [re.compile(rf"rank {k}: aten._foreach_mul_.Scalar\(.*, {2 + k}.0\)") for k in range(2)]


@jobs.add(2, fails(*NUMBERS))
def other_numbers_of_foreach(rank):
    torch._foreach_mul_([tp.replicate(torch.ones(2))], 2.0 + rank)
    print("a value")


# -- devices ---------------------------------------------------------------------------------------


class OneDevice(Platform):
    """A host with devices for two processes, whose script puts both on the first one."""

    is_hardware = True

    def count(self):
        return 2

    def hardware(self, number):
        return "GPU-7"


@jobs.add(
    2,
    fails(
        "ValueError: rank 0 (device 0 of those that it sees, host ",
        "have the same device: GPU-7. Each process needs one of its own.",
    ),
)
def both_on_one_device(rank):
    PLATFORMS["cpu"] = OneDevice()
    tp.init()


@jobs.add(2, fails("destroy_process_group() was called before, which ends the groups of torchpmap"))
def destroys_the_groups(rank):
    sums = warmed_up()
    torch.distributed.destroy_process_group()
    sums(ONE)


# -- processes that are gone -----------------------------------------------------------------------


@jobs.add(2, misses_rank_1("CollectiveMismatch: total(float32[1]) on 2 devices @"))
def ended_before_a_new_plan(rank):
    call() if rank == 0 else tp.init()


@jobs.add(2, misses_rank_1("CollectiveMismatch: rank 1 has ended its script and will not"))
def ended_before_a_sum(rank):
    sums = warmed_up()
    if rank == 0:
        sums(ONE)


@jobs.add(2, misses_rank_1("CollectiveMismatch: rank 1 has ended its script and will not"))
def ended_after_a_call_without_collectives(rank):
    """Which is counted too, as there is a timeout, but over no ranks."""
    call(lambda x: 2 * x)
    ended_before_a_sum(rank)


@jobs.add(2, misses_rank_1("CollectiveMismatch: torchpmap.multihost.barrier('loaded'): rank 1 has"))
def ended_before_a_barrier(rank):
    call(lambda x: 2 * x)
    if rank == 0:
        tp.multihost.barrier("loaded")


def refuse_the_child(processes):
    for code, output in processes:
        assert (code, output.splitlines()) == (
            0,
            ["RuntimeClosed: this process was forked"] * 5 + ["2.0"],
        )


@jobs.add(2, refuse_the_child)
def forks_a_child(rank):
    """It has what connects its parent to the others, and ends as a script does."""
    sums, whole = warmed_up(), tp.replicate(ONE)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        print(sums(ONE).item())
        return
    barrier = tp.multihost.barrier
    for use in (lambda: sums(ONE), lambda: mapped()(ONE), lambda: whole + 1, whole.tolist, barrier):
        with pytest.raises(tp.RuntimeClosed) as caught:
            use()
        print(f"RuntimeClosed: {caught.value}"[:38])


def show_the_exception(culprit, place="script"):
    """It is the first thing that the others show too, with its traceback."""

    def check(processes):
        for rank, output in enumerate(of_failed(processes)):
            first, *rest = output.split("The above exception was the direct cause of")
            assert f"ValueError: boom in the {place}" in first
            assert f'raise ValueError("boom in the {place}")' in first  # its traceback
            assert bool(rest) == (rank != culprit)
            if rank != culprit:
                assert f"on rank {culprit}:\nTraceback" in first
                last = output.strip().splitlines()[-1]
                text = f"WorkerError: rank {culprit} failed first: ValueError: boom in the {place}"
                assert last.endswith(text)

    return check


def end_the_others(victim):
    def check(processes):
        processes = list(processes)
        assert processes.pop(victim).code == -9
        fails("WorkerDied: the connection to another process of this job broke off")(processes)

    return check


def fail_script():
    raise ValueError("boom in the script")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def lose(culprit, end, others):
    """A job of which one process ends, and the others go on."""

    def run(rank):
        sums = warmed_up() if others == "sum" else tp.init()
        if rank == culprit:
            end()
        if others == "sum":
            sums(ONE)
        elif others == "agree":
            call()
        else:
            barrier("loaded")

    return run


# (processes, the one that ends, how, what the others do); the first one keeps the store
LOST = {
    "raised_while_others_sum": (2, 1, fail_script, "sum"),
    "first_raised_while_others_sum": (2, 0, fail_script, "sum"),
    "raised_while_others_agree": (3, 2, fail_script, "agree"),
    "raised_while_others_wait": (3, 2, fail_script, "wait"),
    "killed_while_others_sum": (3, 1, kill, "sum"),
    "first_killed_while_others_sum": (3, 0, kill, "sum"),
}
for _name, (_count, _culprit, _end, _others) in LOST.items():
    _check = end_the_others if _end is kill else show_the_exception
    jobs.add(_count, _check(_culprit), _name)(lose(_culprit, _end, _others))


def succeed_all(processes):
    assert [code for code, _ in processes] == [0] * len(processes), processes


@jobs.add(3, end_the_others(1))
def killed_before_a_barrier(rank):
    warmed_up()
    if rank == 1:
        kill()
    barrier("loaded")


@jobs.add(2, end_the_others(1))
def killed_while_it_saves(rank):
    """The other one waits in a thread."""
    tree = {"w": warmed_up()(ONE)}
    if rank == 1:
        _save.write = lambda *_: kill()
    folder = Path(sys.argv[2], f"saved_{os.environ.get('TORCHPMAP_SHARED_MEMORY')}")
    tp.checkpoint.save(folder, tree, asynchronous=True).wait()


jobs.add(2, end_the_others(1), "killed_while_it_saves_over_gloo", TORCHPMAP_SHARED_MEMORY="0")(
    killed_while_it_saves
)


@jobs.add(2, succeed_all)
def raised_while_another_writes(rank):
    """What both have written becomes a checkpoint, also if the other one does not wait for it."""
    tree, rendezvous = {"w": warmed_up()(ONE)}, current.job_runtime().rendezvous
    folder, write = Path(sys.argv[2], "of_both"), _save.write

    def write_late(*arguments):
        assert wait_for(lambda: rendezvous.store.check(["cause"]))
        return write(*arguments)

    _save.write = write_late if rank == 1 else write
    saving = tp.checkpoint.save(folder, tree, asynchronous=True)
    if rank == 0:
        try:
            fail_script()
        except ValueError:
            sys.excepthook(*sys.exc_info())
        saving.wait()  # as Python does before the script ends
    else:
        with pytest.raises(tp.WorkerError, match="rank 0 failed first: ValueError: boom in the"):
            saving.wait()
        assert wait_for((folder / "torchpmap.json").exists)


LOOKS = []
"""What the thread that watches calls has found."""


def slow(x):
    """It waits until the end of rank 2 was seen, and was looked at twice."""
    assert wait_for(current.runtime()._groups.lost_peers)
    seen = len(LOOKS)
    assert wait_for(lambda: len(LOOKS) > seen + 1)
    return tp.psum(x, "i")


@jobs.add(3, succeed_all)
def ended_while_others_run(rank):
    watch._INTERVAL_S = 0.01
    warmed_up()
    if rank < 2:
        look = current.runtime()._watch._verdict_on
        current.runtime()._watch._verdict_on = lambda call: LOOKS.append(look(call)) or LOOKS[-1]
        found = mapped(slow, compile=False, devices=tp.devices()[:2])(ONE)
        assert (found.tolist(), set(LOOKS)) == ([2.0], {None})


@jobs.add(2, show_the_exception(1, "function"))
def raised_in_the_function(rank):
    def function(x):
        if tp.process_index() == 1:
            raise ValueError("boom in the function")
        return tp.psum(x, "i")

    call(function, compile=False)


def miss_it_in_time(what):
    """There is no connection that breaks off."""
    text = "rank 1 did not come within torchpmap.config.timeout (3 s)."
    pattern = f"{re.escape(f'CallTimeout: {what}')}.*: {re.escape(text)}"
    return misses_rank_1(re.compile(pattern), code=-9)


jobs.add(
    2,
    miss_it_in_time("total(float32[1]) on 2 devices"),
    "killed_while_others_agree",
    TORCHPMAP_TIMEOUT="3",
)(lose(1, kill, "agree"))


@jobs.add(2, miss_it_in_time("torchpmap.multihost.barrier('loaded')"))
def killed_while_others_wait(rank):
    tp.init()
    tp.config.timeout = 3  # the runtime has started with 60
    if rank == 1:
        kill()
    barrier("loaded")


@jobs.add(
    2, fails("the end", "torchpmap: exit code 1, as a call has failed: the processes are about")
)
def caught_and_ended(rank):
    with contextlib.suppress(tp.CollectiveMismatch):
        barrier(f"of rank {rank}")
    print("the end")


@jobs.add(
    2,
    fails(
        "RuntimeClosed: a mapped call failed in this process, so the others cannot",
        "End the script, and let the launcher restart it.",
    ),
)
def used_after_a_failure(rank):
    sums = warmed_up()
    try:
        barrier(f"of rank {rank}")
    except tp.CollectiveMismatch:
        sums(ONE)


# -- strangers -------------------------------------------------------------------------------------


def run_nothing(processes):
    """What a stranger writes to the store, which rank 0 reads."""
    assert processes[0].code == 1
    assert "PmapError: data from another process of this job is not in" in processes[0].output
    assert not any("EXECUTED" in output.splitlines() for output in outputs(processes))


@jobs.add(2, run_nothing)
def forged_message(rank):
    """That nothing else reads pickles: tests/test_security.py."""
    tp.init()
    if rank == 0:
        barrier("loaded")
    rendezvous = tp._runtime.current.runtime().rendezvous
    rendezvous.store.set("turn/0,1/0/1", pickle.dumps(Runs()))
    while True:
        rendezvous.raise_cause()
        time.sleep(0.01)


QUICK = (
    *("other_function", "other_order", "skipped_call", "drifted_before_a_sum"),
    *("ended_before_a_sum", "killed_while_others_wait", "raised_in_the_function", "forged_message"),
    *("killed_while_it_saves", "ended_while_others_run"),
)


@pytest.mark.cpu_only("on asynchronous devices no call is compared with those of other processes")
@pytest.mark.parametrize("name", mostly_long(jobs, *QUICK))
def test_the_processes_of_a_job(ended, name):
    jobs.check(name, ended[name])


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "text"), [("raise", "ValueError: boom"), ("kill", "Signal 9 (SIGKILL) received")]
)
def test_torchrun_reports_the_rank_that_failed_first(tmp_path, end, text):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    finished = launch(2, str(script), end)
    assert finished.code == 1, finished.output
    report = finished.output.split("Root Cause (first observed failure):")[1]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", report), finished.output
    assert text in report


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


@pytest.mark.long
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


@pytest.mark.long
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
