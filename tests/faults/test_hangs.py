"""Rows 18 to 21 of the matrix: a rank does not come to an end.  See docs/faults.md."""

import contextlib
import ctypes
import os
import signal
import threading
import time

import pytest
from _rig import (
    N,
    eagerly,
    endless_loop,
    failure,
    long_sleep,
    loop_of_c,
    on_rank,
    raising,
    rows,
    survivors,
    total,
    within,
)
from _support import DEVICE, gated, running_pool, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def deadlocked_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def swallows_everything():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1e6)


def sleep_of_c():
    ctypes.PyDLL(None).sleep(1000)


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


SLEEPS = "sleeps or waits in step at "
IN_C = "is in C code that holds the GIL at "
STOPPED = "is stopped (SIGSTOP, or a debugger)"
HANGS = {
    "row_18_loop": (endless_loop, "runs step at ", True),
    "row_18_sleep": (long_sleep, SLEEPS, True),
    "row_18_lock": (deadlocked_lock, SLEEPS, True),
    "row_18_exceptions_swallowed": (swallows_everything, SLEEPS, False),
    # a sleep ends with the signal that asks for the stack
    "row_19_sleep_of_c": (sleep_of_c, IN_C, True),
    "row_19_loop_of_c": (loop_of_c, IN_C, False),
    "row_20_stopped": (stop_oneself, STOPPED, False),
}
"""What a rank does, what the error says of it, and whether it can be interrupted."""


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("name", HANGS)
@pytest.mark.long("row_18_exceptions_swallowed", "row_19_loop_of_c")
def test_a_rank_that_hangs(name, others):
    """The call ends, and no worker does that can be interrupted."""
    hang, does, obeys = HANGS[name]
    ranks = [f"  {DEVICE}:{k} (rank {k}, pid {pid})" for k, pid in enumerate(worker_pids())]
    dead, bound = ([], 3) if obeys else ([2], 5)
    error = failure(on_rank(2, hang, others), tp.CallTimeout, bound, dead=dead, timeout=0.5)
    head, *lines = str(error).splitlines()
    assert head == "step did not end within its timeout of 0.5 s:"
    assert [line[: len(rank)] for line, rank in zip(lines, ranks, strict=True)] == ranks
    late = lines[2].removeprefix(f"{ranks[2]} ")
    assert late.startswith(does)
    assert error.__notes__ == ["while running step"]
    if does != STOPPED:
        assert f" at {hang.__code__.co_filename}:" in late
        assert f"{ranks[2].strip()}, innermost frame first:" in str(error.__cause__)
        assert f"in {hang.__name__}" in str(error.__cause__)


class PickledForever(Exception):
    def __reduce__(self):
        endless_loop()


class ToldForever(Exception):
    def __str__(self):
        endless_loop()


class NotedForever(Exception):
    @property
    def __notes__(self):
        endless_loop()


FOREVER = [PickledForever, ToldForever, NotedForever]


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("kind", FOREVER, ids=lambda kind: kind.__name__)
@pytest.mark.long("PickledForever", "NotedForever")
def test_row_18_an_exception_that_cannot_be_reported(kind, others):
    """The exception's text is computed by user code too."""
    step = on_rank(2, raising(lambda: kind("mine")), others)
    error = failure(step, tp.WorkerError, 4)
    assert f"{kind.__name__}: it took too long to get its text" in str(error)


@pytest.mark.parametrize("kind", FOREVER, ids=lambda kind: kind.__name__)
def test_row_18_an_exception_that_cannot_be_reported_in_time(kind):
    """There is no other rank that would notice that it is late."""

    def step(x):
        raise kind("mine")

    with survivors():
        call = eagerly(step, timeout=0.5, devices=tp.devices()[:1])
        error = within(3, lambda: call(rows[:1])).error
        assert isinstance(error, tp.CallTimeout), error
        assert "in endless_loop" in str(error.__cause__)


@pytest.mark.parametrize(
    ("hang", "first"),
    [
        *((hang, ValueError) for hang, *_ in HANGS.values() if hang is not stop_oneself),
        (loop_of_c, tp.WorkerDied),
    ],
    ids=lambda value: value.__name__,
)
@pytest.mark.long("loop_of_c-ValueError", "swallows_everything", "endless_loop")
def test_row_19_a_hang_that_is_late_after_another_fault(hang, first):
    """The time of a call goes on while the other fault is worked off."""

    def step(x):
        if int(tp.axis_index("i")) == 0:
            if first is tp.WorkerDied:
                os._exit(3)
            raise ValueError("first")
        return on_rank(2, hang, "alone")(x)

    dead = [0] if first is tp.WorkerDied else []
    with survivors(*dead, *([2] if hang in (loop_of_c, swallows_everything) else [])):
        error = within(8 if dead else 6, lambda: eagerly(step, timeout=0.5)(rows)).error
        assert isinstance(error, first), error
        assert within(8, lambda: total(rows).tolist()).value == [6.0] * N


def test_row_19_compiling_on_another_rank_does_not_count(tmp_path):
    """One rank begins the call, and waits for those that still compile."""
    gate, seen = tmp_path / "open", tmp_path / "first"

    def slowly(graph, examples):
        if seen.exists():
            while not gate.exists():
                pass
        seen.touch()
        return graph.forward

    with survivors():
        step = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile={"backend": slowly}, timeout=0.5)
        y = step(rows)
        timer = threading.Timer(3, gate.touch)
        timer.start()
        assert within(10, y.tolist).value == [6.0] * N
        timer.join()


@pytest.mark.parametrize(
    ("when", "limit"),
    [("idle", {"timeout": 0.5}), ("idle", {}), ("in a collective", {})],
    ids=["idle, timeout", "idle", "in a collective"],
)
@pytest.mark.long("idle", "in a collective")
def test_row_20_stopped_process(when, limit):
    """Without a timeout too: a stopped process is no slow one."""
    with survivors(2):
        if when == "idle":
            os.kill(worker_pids()[2], signal.SIGSTOP)
        stopping = N if when == "idle" else 2
        call = eagerly(on_rank(stopping, stop_oneself), **limit)
        error = within(10, lambda: call(rows)).error
        assert isinstance(error, tp.CallTimeout if limit else tp.WorkerDied), error
        assert "stopped" in str(error)


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(3, id="row_16_late"), pytest.param(8, id="row_21_slow", marks=pytest.mark.long)],
)
def test_a_slow_rank_is_no_error(seconds, tmp_path):
    """It joins only after the others have waited for it for some time."""
    gate = tmp_path / "open"

    def step(x):
        return tp.psum(gated(gate, [1])(x), "i")

    pool, timer = running_pool(), threading.Timer(seconds, gate.touch)
    epoch = pool._supervisor.epoch
    with survivors():
        timer.start()
        assert within(20, lambda: eagerly(step)(rows).tolist()).value == [6.0] * N
    timer.join()
    assert pool._supervisor.epoch == epoch
