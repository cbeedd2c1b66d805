"""Rows 26 and 27 of the matrix: something runs out, or grows.  See docs/faults.md."""

import gc
import os
import pickle
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from _rig import EAGER, Canary, N, assert_pool_works, eagerly, press, rows, survivors, within
from _support import (
    DEVICE,
    anonymous_bytes,
    beside,
    num_fds,
    pool_with,
    rss_bytes,
    running_pool,
    wait_for,
    worker_pids,
)

import torchpmap as tp
from torchpmap._runtime import wire

LARGE = 272 << 20
"""Bytes of a block that a limited worker cannot hold."""


@pytest.fixture
def limited(pool):
    """The workers may have 256 MB more than now, enough for a repair; a new pool follows."""
    if DEVICE != "cpu":
        pytest.skip("the limit is one of the memory of processes")

    def limit(x):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        now = pages * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), resource.RLIM_INFINITY))
        return x

    eagerly(limit)(rows)
    yield
    tp.shutdown()


@pytest.fixture(params=[False, True], ids=["socket", "shared"])
def transport(request, pool):
    """How blocks travel."""
    with pool_with(N, shared_memory=request.param):
        yield


@pytest.mark.usefixtures("transport", "limited")
def test_row_26_a_worker_has_no_memory_for_a_block(tmp_path):
    """Whatever the block holds, none of it is read as a command."""
    body = pickle.dumps(Canary(str(tmp_path / "exploded")))
    attack = wire.frame(wire.DEFINE, 7, body)
    block = torch.zeros(2, LARGE, dtype=torch.uint8)
    block[:, : len(attack)] = torch.frombuffer(bytearray(attack), dtype=torch.uint8)
    first = tp.pmap(lambda x: x[0], compile=EAGER, devices=tp.devices()[:2])
    with survivors():
        for _ in range(2):
            error = within(10, lambda: first(block).cpu()).error
            assert isinstance(error, MemoryError)
            assert str(error) == (
                f"no memory on device {DEVICE}:0 for uint8[1, {LARGE}]: {LARGE} bytes"
            )
    lent = [len(worker.staging.taken()) for worker in running_pool().workers.values()]
    assert lent == [0] * N
    assert not running_pool().landing.taken()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("what", ["function", "result"])
def test_row_26_a_worker_has_no_memory_for_a_function_or_its_result(what, mode):
    constant = bytes(LARGE if what == "function" else 1)  # which travels with the function

    @torch.library.custom_op(f"torchpmap_tests::large_{what}_{bool(mode)}", mutates_args=())
    def large(x: torch.Tensor) -> torch.Tensor:
        return x + len(constant)

    large.register_fake(torch.empty_like)
    size = LARGE if what == "result" else 1
    devices = tp.devices() if what == "result" else tp.devices()[:1]
    call = tp.pmap(lambda x: large(x.expand(size)) + 1, compile=mode, devices=devices)
    with survivors():
        error = within(10, lambda: call(rows[: len(devices)]).block_until_ready()).error
        assert isinstance(error, MemoryError if what == "function" else MemoryError | RuntimeError)
        assert what == "function" or "can't allocate memory" in str(error)


def growth(function):
    """By how many bytes one of the processes has grown at most, after a call that leaves neither
    descriptors nor other workers.
    """
    pids = worker_pids()
    processes = ["self", *pids]
    fds, memory = [*map(num_fds, processes)], [*map(rss_bytes, processes)]
    assert within(60, function).error is None
    assert worker_pids() == pids
    assert [*map(num_fds, processes)] == fds
    return max(rss_bytes(pid) - old for pid, old in zip(processes, memory, strict=True))


@pytest.mark.cpu_only("the workers' memory is not that of their processes")
@pytest.mark.usefixtures("pool")
def test_row_27_four_thousand_calls_leave_nothing():
    chain = tp.pmap(lambda x: tp.psum(x, "i") / N, "i", compile=EAGER)

    def run(calls: int) -> None:
        y = rows
        for k in range(calls):
            y = chain(y)
            if k % 100 == 0:
                y.block_until_ready()
        y.cpu()

    run(1000)
    assert growth(lambda: run(4000)) < 1 << 18  # 64 bytes per call


@pytest.mark.long
@pytest.mark.cpu_only("the workers' memory is not that of their processes")
@pytest.mark.usefixtures("pool")
def test_row_27_two_hundred_failing_calls_leave_nothing():
    def step(x):
        if int(tp.axis_index("i")) == 2:
            raise ValueError("again" * 4000)
        return torch.zeros(54321)

    failing = eagerly(step)

    def fail(calls: int) -> None:
        for _ in range(calls):
            with pytest.raises(ValueError, match="again"):
                failing(rows)

    fail(20)
    assert growth(lambda: fail(200)) < 8 << 20, "the results alone are 43 MB"
    assert_pool_works()


def test_row_27_twenty_pools_leave_nothing():
    def once() -> None:
        tp.init(2)
        assert tp.pmap(lambda x: x + 1, compile=EAGER)(torch.zeros(2)).tolist() == [1.0, 1.0]
        tp.shutdown()

    tp.shutdown()
    once()
    before = num_fds()
    for _ in range(20):
        once()
    assert wait_for(lambda: num_fds() <= before)


@pytest.mark.long
def test_row_27_a_closed_pool_keeps_nothing_that_it_did_not_send():
    """Values and compiled functions keep their pool alive after ``shutdown``."""
    double = tp.pmap(lambda x: x * 2, "i", compile=EAGER)
    main = threading.main_thread().ident

    def interrupt() -> None:
        assert wait_for(lambda: sys._current_frames()[main].f_code.co_name == "wait_for_room", 20)
        press()

    with pool_with(N, shared_memory=False):  # the memory would have room
        value = double(rows).block_until_ready()
        before = anonymous_bytes()
        for pid in worker_pids():
            os.kill(pid, signal.SIGSTOP)
        with beside(interrupt), pytest.raises(KeyboardInterrupt):
            double(torch.ones(N, 16 << 20))
    with pytest.raises(tp.RuntimeClosed):
        value.cpu()
    gc.collect()
    assert anonymous_bytes() - before < 32 << 20, "the argument alone is 256 MB"
