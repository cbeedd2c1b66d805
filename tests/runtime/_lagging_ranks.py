"""Jobs of test_torchrun_lagging.py, whose devices are asynchronous (see ``_failing_ranks.py``)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _failing_ranks import GRAPH, JOBS, job, run_all, total, warmed_up

import torchpmap as tp

opened = threading.Event()
"""Lets the device of this process go on."""


@torch.library.custom_op("lagging_ranks::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    opened.wait()
    return x + 1


@gated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lagging_ranks::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    threading.Event().wait(0.3)
    return x + 1


@slow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def mapped(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return tp.pmap(function, "i", compile=GRAPH, **options)


def own(rank: int) -> torch.Tensor:
    return torch.tensor([1.0 + rank])


def say(*values: Any) -> None:
    print(json.dumps(values))


def wait_for_a_cause() -> None:
    """Until another process says why it fails; raises that."""
    while True:
        tp._runtime.current.runtime().rendezvous.raise_cause()
        time.sleep(0.01)


# -- values ----------------------------------------------------------------------------------------


@job(2)
def calls_run_later(rank: int) -> None:
    sums = mapped(total)
    early = sums(own(rank))
    late = mapped(gated)(early)
    later = sums(late)
    say(early.tolist(), early.is_ready(), late.is_ready(), later.is_ready())
    opened.set()
    say(later.block_until_ready().is_ready(), late.is_ready(), late.tolist(), later.tolist())


@job(2)
def forgotten_before_it_runs(rank: int) -> None:
    late = mapped(lambda x: gated(x) * 2)(own(rank))
    opened.set()
    say(late.tolist())


@job(2)
def what_the_processes_do_together_comes_after_the_calls(rank: int) -> None:
    late = mapped(lambda x: total(slow(x)))(own(rank))
    gathered = tp.multihost.all_gather(own(rank), tiled=True)
    say(late.is_ready(), gathered.tolist(), late.tolist())


@job(2)
def an_uncompiled_call_comes_after_the_others(rank: int) -> None:
    late = mapped(lambda x: total(slow(x)))(own(rank))
    result = tp.pmap(total, "i", compile=False)(late)
    say(late.is_ready(), result.is_ready(), late.tolist(), result.tolist())


@job(2)
def one_ends_with_calls_in_flight(rank: int) -> None:
    sums = mapped(total)
    value = sums(sums(mapped(slow)(own(rank))))
    if rank == 0:
        say(value.tolist())


# -- failures --------------------------------------------------------------------------------------


def _root(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(slow(x).reshape(1, 1)).reshape(())


def _fail_on_rank_1(rank: int) -> torch.Tensor:
    """On rank 1 a value that cannot be computed; elsewhere a sum, to which rank 1 does not come."""
    sums = warmed_up()
    root: torch.Tensor = mapped(_root)(torch.tensor([3.0 - 6.0 * rank]))
    return root if rank == 1 else sums(root)  # type: ignore[no-any-return]


@job(2)
def late_error(rank: int) -> None:
    value = _fail_on_rank_1(rank)
    say("launched")
    value.tolist()


@job(2)
def late_error_that_nobody_waits_for(rank: int) -> None:
    _fail_on_rank_1(rank)
    say("launched")


@job(2)
def late_error_at_shutdown(rank: int) -> None:
    _fail_on_rank_1(rank)
    try:
        tp.shutdown()
    except (torch.linalg.LinAlgError, tp.WorkerError) as error:
        say(type(error).__name__)


@job(2)
def late_error_is_raised_once(rank: int) -> None:
    value = _fail_on_rank_1(rank)
    try:
        value.tolist()
    except (torch.linalg.LinAlgError, tp.WorkerError):
        value.tolist()


@job(2)
def late_error_while_waiting_for_others(rank: int) -> None:
    value = _fail_on_rank_1(rank)
    if rank == 1:
        mapped(lambda x: 2 * total(x))(own(rank))
    store = tp._runtime.current.runtime().rendezvous.store
    try:
        value.tolist()
    except tp.WorkerError:
        while not store.check(["left/1"]):  # it does not wait for this process to end
            time.sleep(0.01)
        raise


@job(2)
def assert_in_a_kernel(rank: int) -> None:
    sums = warmed_up()
    pick = mapped(lambda x, k: x.index_select(0, k).sum())
    value = sums(pick(torch.ones(1, 5), torch.tensor([[99 * rank]])))
    value.tolist()


def _kill_rank_1(rank: int) -> None:
    sums = warmed_up()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sums(own(rank)).tolist()


@job(2)
def killed(rank: int) -> None:
    _kill_rank_1(rank)


@job(2, TORCHPMAP_SHARED_MEMORY="0")
def killed_without_shared_memory(rank: int) -> None:
    _kill_rank_1(rank)


@job(2)
def ended_before_a_call(rank: int) -> None:
    sums = warmed_up()
    if rank == 0:
        sums(own(rank))


@job(2, TORCHPMAP_SHARED_MEMORY="0")
def other_order_of_a_known_and_a_new_call(rank: int) -> None:
    calls = [warmed_up(), mapped(lambda x: 2 * total(x))]
    for call in calls if rank == 0 else reversed(calls):
        call(own(rank))


@job(2)
def takes_too_long(rank: int) -> None:
    if rank == 0:
        opened.set()
    value = mapped(total, timeout=3)(mapped(gated)(own(rank)))
    if rank == 1:
        wait_for_a_cause()
    value.tolist()


if __name__ == "__main__":
    for name in [
        name for name, (_, function, _) in JOBS.items() if function.__module__ != __name__
    ]:
        del JOBS[name]
    run_all(Path(sys.argv[1]), sys.argv[2:])
