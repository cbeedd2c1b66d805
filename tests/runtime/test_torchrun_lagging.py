"""Covers: processes of a launcher whose devices are asynchronous (``_platforms.py``): what is
known when, and late errors.
"""

import json
import os
import re
import signal
import threading
import time

import pytest
import torch
from _jobs import TOGETHER, Jobs, fails, mapped, misses_rank_1, total, warmed_up
from _launched import jobs_of, of_failed, outputs

import torchpmap as tp

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # the first test waits for all jobs

jobs = Jobs()


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """Job -> how each of its processes ended."""
    folder = tmp_path_factory.mktemp("lagging")
    return jobs_of(request, folder, TORCHPMAP_TEST_PLATFORM="_platforms:Lagging")


opened = threading.Event()
"""Lets the device of this process go on."""


@torch.library.custom_op("lagging_ranks::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    opened.wait()
    return x + 1


@torch.library.custom_op("lagging_ranks::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    threading.Event().wait(0.3 * TOGETHER)  # in which time the other process makes its call
    return x + 1


for _operation in (gated, slow):
    _operation.register_fake(torch.empty_like)


def own(rank):
    return torch.tensor([1.0 + rank])


def say(*values):
    print(json.dumps(values))


# -- values ----------------------------------------------------------------------------------------


def say_each(*expected):
    """What each process says, where none fails."""

    def check(processes):
        assert [process.code for process in processes] == [0] * len(processes), outputs(processes)
        said = [[json.loads(line) for line in process.output.splitlines()] for process in processes]
        assert said == list(expected)

    return check


@jobs.add(2, say_each(*[[[[3.0], True, False, False], [True, True, [4.0], [8.0]]]] * 2))
def a_call_is_a_launch_only(rank):
    sums = mapped()
    early = sums(own(rank))
    late = mapped(gated)(early)
    later = sums(late)
    say(early.tolist(), early.is_ready(), late.is_ready(), later.is_ready())
    opened.set()
    say(later.block_until_ready().is_ready(), late.is_ready(), late.tolist(), later.tolist())


@jobs.add(2, say_each([[[4.0]]], [[[6.0]]]))
def a_plan_may_be_forgotten_before_it_runs(rank):
    late = mapped(lambda x: gated(x) * 2)(own(rank))
    opened.set()
    say(late.tolist())


@jobs.add(2, say_each(*[[[True, [1.0, 2.0], [5.0]]]] * 2))
def what_the_processes_do_together_comes_after_the_calls(rank):
    late = mapped(lambda x: total(slow(x)))(own(rank))
    gathered = tp.multihost.all_gather(own(rank), tiled=True)
    say(late.is_ready(), gathered.tolist(), late.tolist())


@jobs.add(2, say_each(*[[[True, True, [5.0], [10.0]]]] * 2))
def an_uncompiled_call_comes_after_the_others(rank):
    late = mapped(lambda x: total(slow(x)))(own(rank))
    result = mapped(compile=False)(late)
    say(late.is_ready(), result.is_ready(), late.tolist(), result.tolist())


@jobs.add(2, say_each([[[10.0]]], []))
def a_process_that_ends_completes_what_it_has_launched(rank):
    sums = mapped()
    value = sums(sums(mapped(slow)(own(rank))))
    if rank == 0:
        say(value.tolist())


# -- failures --------------------------------------------------------------------------------------

LATE = "linalg.cholesky: The factorization could not be completed"


def fail_on_rank_1(rank):
    """On rank 1 a value that cannot be computed; elsewhere a sum, to which rank 1 does not come."""

    def root(x):
        return torch.linalg.cholesky(slow(x).reshape(1, 1)).reshape(())

    sums = warmed_up()
    value = mapped(root)(torch.tensor([3.0 - 6.0 * rank]))
    return value if rank == 1 else sums(value)


def have_one_cause(*said):
    def check(processes):
        fails(*said)(processes)
        other, culprit = outputs(processes)
        assert f"LinAlgError: {LATE}" in culprit.strip().splitlines()[-1]
        assert "The above exception" not in culprit
        text = f"WorkerError: rank 1 failed first: torch._C._LinAlgError: {LATE}"
        assert text in other.strip().splitlines()[-1]
        assert "on rank 1:\nTraceback" in other

    return check


@jobs.add(2, have_one_cause('["launched"]'))
def late_error(rank):
    value = fail_on_rank_1(rank)
    say("launched")
    value.tolist()


@jobs.add(2, have_one_cause('["launched"]'))
def late_error_that_nobody_waits_for(rank):
    fail_on_rank_1(rank)
    say("launched")


@jobs.add(2, have_one_cause())
def late_error_while_waiting_for_others(rank):
    value = fail_on_rank_1(rank)
    if rank == 1:
        mapped(lambda x: 2 * total(x))(own(rank))
    store = tp._runtime.current.runtime().rendezvous.store
    try:
        value.tolist()
    except tp.WorkerError:
        while not store.check(["left/1"]):  # it does not wait for this process to end
            time.sleep(0.01)
        raise


def raise_what_nothing_has_raised(processes):
    first = [output.splitlines()[0] for output in of_failed(processes)]
    assert first == ['["WorkerError"]', '["_LinAlgError"]']


@jobs.add(2, raise_what_nothing_has_raised)
def late_error_at_shutdown(rank):
    fail_on_rank_1(rank)
    try:
        tp.shutdown()
    except (torch.linalg.LinAlgError, tp.WorkerError) as error:
        say(type(error).__name__)


@jobs.add(2, fails("RuntimeClosed: a mapped call failed in this process, so the others"))
def after_a_late_error_no_value_is_given(rank):
    value = fail_on_rank_1(rank)
    try:
        value.tolist()
    except (torch.linalg.LinAlgError, tp.WorkerError):
        value.tolist()


def say_what_to_do(processes):
    other, culprit = of_failed(processes)
    assert "IndexError: index out of range" in culprit
    assert "CUDA_LAUNCH_BLOCKING=1 shows the call that fails." in culprit
    assert "WorkerError: rank 1 failed first: IndexError: index out of range" in other


@jobs.add(2, say_what_to_do)
def assert_in_a_kernel(rank):
    sums = warmed_up()
    pick = mapped(lambda x, k: x.index_select(0, k).sum())
    sums(pick(torch.ones(1, 5), torch.tensor([[99 * rank]]))).tolist()


def killed(rank):
    sums = warmed_up()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sums(own(rank)).tolist()


BROKEN = misses_rank_1("WorkerDied: the connection to another process of this job broke off", -9)
jobs.add(2, BROKEN)(killed)
jobs.add(2, BROKEN, "killed_without_shared_memory", TORCHPMAP_SHARED_MEMORY="0")(killed)


@jobs.add(2, misses_rank_1("CollectiveMismatch: rank 1 has ended its script and will not come."))
def ended_before_a_call(rank):
    sums = warmed_up()
    if rank == 0:
        sums(own(rank))


# Gloo would add the numbers of one call to those of the other, and NCCL too
@jobs.add(
    2,
    fails(
        "CollectiveMismatch: the processes are about to run different programs",
        re.compile(r"  rank 0: 2 calls before .*\n  rank 1: 1 calls before "),
    ),
    TORCHPMAP_SHARED_MEMORY="0",
)
def other_order_of_a_known_and_a_new_call(rank):
    calls = [warmed_up(), mapped(lambda x: 2 * total(x))]
    for call in calls if rank == 0 else reversed(calls):
        call(own(rank))


def limit_the_device(processes):
    """Its time begins when the device comes to it, which that of rank 1 never does."""
    late, other = of_failed(processes)
    text = r"CallTimeout: total\(.* did not end within its timeout of 3 s; rank 0 waits for rank 1"
    assert re.search(text, late)
    assert "WorkerError: rank 0 failed first: " in other


@jobs.add(2, limit_the_device)
def takes_too_long(rank):
    if rank == 0:
        opened.set()
    value = mapped(total, timeout=3)(mapped(gated)(own(rank)))
    while rank == 1:  # until the other says why it fails, which is raised
        tp._runtime.current.runtime().rendezvous.raise_cause()
        time.sleep(0.01)
    value.tolist()


@pytest.mark.parametrize("name", jobs)
def test_the_processes_of_a_job(ended, name):
    jobs.check(name, ended[name])
