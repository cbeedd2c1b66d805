"""Failures of calls that return before they end: the error stands in the values.  Row 8, and 2 and
11 of the matrix for compiled calls.  See docs/faults.md.
"""

import contextlib
import os
import threading
import time

import pytest
import torch
from _rig import (
    EAGER,
    N,
    assert_pool_works,
    busy,
    eagerly,
    rows,
    sharded,
    survivors,
    total,
    within,
)
from _support import DEVICE, LAGS, SCALE, beside, kill, live_tensors, running_pool, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def pick(x, index):
    return torch.index_select(x, 0, index)


def picked_sum(x, index):
    return tp.psum(pick(x, index), "i")


@pytest.mark.cpu_only("an index out of range ends the worker of a GPU")
@pytest.mark.skipif(LAGS, reason="an index out of range ends the worker: test_lagging.py")
@pytest.mark.parametrize(("function", "right"), [(pick, [0, 6, 12, 18]), (picked_sum, [36] * N)])
def test_row_11_error_in_a_compiled_call(function, right):
    table = torch.arange(20.0).reshape(N, 5)
    f = tp.pmap(function, "i", compile=EAGER)
    results = []

    def call():
        results.append(f(table, torch.tensor([[0], [1], [99], [2]])))
        results[0].cpu()

    with survivors():
        error = within(1, call).error
        (y,) = results
        assert isinstance(error, IndexError)
        assert "out of range" in str(error)
        assert f"on device {DEVICE}:2 (rank 2" in error.__notes__[0]
        with pytest.raises(IndexError):
            y.block_until_ready()
        with pytest.raises(IndexError):
            total(total(y[0] + rows) + 1)
        assert f(table, torch.tensor([[0], [1], [2], [3]])).flatten().tolist() == right


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's assert ends its worker, and the call after it")
def test_function_first_used_behind_a_failed_call():
    """What was skipped behind the failure (functions, plans, groups) must not be missing later."""
    slow = tp.pmap(_slow_then_pick, compile=EAGER)
    slow(torch.zeros(N, 1), torch.zeros(N, 1, dtype=torch.int64)).block_until_ready()
    compiled = tp.pmap(lambda x: tp.psum(x, "i") * 3, "i", compile=EAGER)
    uncompiled = eagerly(lambda x: tp.psum(x, "i") * 5)
    pairs = tp.pmap(
        lambda x: tp.psum(x, "i", axis_index_groups=[[0, 3], [1, 2]]), "i", compile=EAGER
    )
    for f, expected in ((compiled, [18.0] * N), (uncompiled, [30.0] * N), (pairs, [3.0] * N)):
        slow(torch.zeros(N, 1), torch.tensor([[0], [0], [7], [0]]))
        start = time.monotonic()
        with contextlib.suppress(IndexError):  # of the call before
            assert f(rows).tolist() == expected
        assert f(rows).tolist() == expected
        assert time.monotonic() - start < 10 * SCALE
    assert_pool_works()


def _slow_then_pick(x, index):
    for _ in range(20):
        x = x + (torch.ones(300, 300) @ torch.ones(300, 300)).mean() * 0
    return torch.index_select(x, 0, index)


def failing_backend(graph, examples):
    raise NotImplementedError("this backend compiles nothing")


def exiting_backend(graph, examples):
    os._exit(7)


def test_compile_error():
    f = tp.pmap(lambda x: x + 1, compile={"backend": failing_backend})
    with survivors():
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="compiles nothing") as caught:
                f(rows)
            assert "while compiling <lambda>" in caught.value.__notes__[0]


@pytest.mark.timeout(20)
def test_death_while_compiling():
    f = tp.pmap(lambda x: x + 2, compile={"backend": exiting_backend})
    with pytest.raises(tp.WorkerDied, match="exit code 7"):
        f(rows)
    assert_pool_works()


def test_killed_in_a_compiled_call():
    f = tp.pmap(lambda x: tp.psum(x @ x, "i") * 0 + x, "i", compile=EAGER)
    x = f(torch.eye(200).expand(N, 200, 200)).block_until_ready()
    pids = worker_pids()
    for _ in range(30):
        x = f(x)
    kill(pids[3])
    with pytest.raises(tp.WorkerDied, match="SIGKILL"):
        x.cpu()
    assert_pool_works()


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.tolist(),
        lambda y: total(y),
        lambda y: eagerly(lambda y: y)(y),
        lambda y: y.block_until_ready(),
    ],
    ids=["fetch", "call", "uncompiled call", "wait"],
)
def test_a_failure_just_before_a_value_is_used(use, tmp_path, monkeypatch):
    """The value was skipped behind another thread's failure, of which its user cannot know yet."""
    value = sharded()
    gate = tmp_path / "open"
    pool = running_pool()
    epoch = pool._supervisor.epoch
    with busy(gate, error=RuntimeError("not yours")) as thread:
        skipped = total(rows)

        def after_the_failure(proper):
            def call(*args):
                if threading.current_thread() is not thread and not gate.exists():
                    gate.touch()
                    thread.join()
                return proper(*args)

            return call

        for name in ("in_order", "wait_for"):
            monkeypatch.setattr(pool, name, after_the_failure(getattr(pool, name)))
        monkeypatch.setattr(pool, "has_reached", lambda *_: False)
        with pytest.raises(RuntimeError, match="not yours"):
            use(skipped)
    assert not pool.broken
    assert pool._supervisor.epoch == epoch + 1  # using it was no further failure
    assert value.tolist() == [0, 10, 20, 30]


def test_what_a_skipped_call_frees_is_freed(tmp_path):
    """What is no longer used travels with the next call, which may stand behind a failed one."""
    value = tp.device_put_sharded([torch.zeros(23456)] * N, tp.devices())
    assert min(live_tensors(23456)) == 1
    with busy(tmp_path / "open", error=RuntimeError("first")):
        held = tp.device_put_sharded(list(rows), tp.devices())
        del value
        total(held)
    assert max(live_tensors(23456)) == 0


def test_other_threads_get_their_own_results():
    """One thread's function fails again and again; the others are slowed down, never misled."""
    stop = threading.Event()

    def innocent(k):
        f = tp.pmap(lambda x: tp.psum(x, "i") * k, "i", compile=EAGER)
        while not stop.is_set():
            with contextlib.suppress(RuntimeError):  # behind the failed call
                assert f(rows).tolist() == [6.0 * k] * N

    def fail(x):
        raise RuntimeError("not yours")

    failing = eagerly(fail)
    with beside(innocent, 1), beside(innocent, 2):
        for _ in range(20):
            with pytest.raises(RuntimeError, match="not yours"):
                failing(rows)
        stop.set()
    assert_pool_works()
