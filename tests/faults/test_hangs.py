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
    assert_pool_works,
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
from _support import DEVICE, running_pool, wait_for, worker_pids

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


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize(
    "hang",
    [endless_loop, long_sleep, deadlocked_lock, swallows_everything],
    ids=lambda f: f.__name__,
)
@pytest.mark.long("swallows_everything")
def test_row_18_hang_in_python(hang, others):
    """The call ends, and no worker does that can be interrupted."""
    dead, bound = ([2], 5) if hang is swallows_everything else ([], 3)
    error = failure(on_rank(2, hang, others), tp.CallTimeout, bound, dead=dead, timeout=0.5)
    assert f"in {hang.__name__}" in str(error.__cause__)
    assert f"{DEVICE}:2" in str(error)


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


def sleep_of_c():
    ctypes.PyDLL(None).sleep(1000)


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("hang", [sleep_of_c, loop_of_c], ids=lambda f: f.__name__)
@pytest.mark.long("loop_of_c")
def test_row_19_hang_with_the_interpreter_locked(hang, others):
    """A sleep ends with the signal that asks for the stack, so that its rank lives on."""

    dead = [] if hang is sleep_of_c else [2]
    error = failure(on_rank(2, hang, others), tp.CallTimeout, 5, dead=dead, timeout=0.5)
    assert f"is in C code that holds the GIL at {hang.__code__.co_filename}" in str(error)
    assert f"in {hang.__name__}" in str(error.__cause__)


@pytest.mark.parametrize(
    "hang",
    [loop_of_c, sleep_of_c, endless_loop, long_sleep, deadlocked_lock, swallows_everything],
    ids=lambda f: f.__name__,
)
@pytest.mark.long("loop_of_c", "swallows_everything", "endless_loop")
def test_row_19_a_hang_that_is_late_after_another_failure(hang):
    """The time of a call goes on while another failure is worked off."""

    def step(x):
        if int(tp.axis_index("i")) == 0:
            raise ValueError("first")
        return on_rank(2, hang, "alone")(x)

    with survivors(*([2] if hang in (loop_of_c, swallows_everything) else [])):
        error = within(6, lambda: eagerly(step, timeout=0.5)(rows)).error
        assert isinstance(error, ValueError), error
        assert within(8, lambda: total(rows).tolist()).value == [6.0] * N


def test_row_19_a_hang_that_is_late_after_a_death():
    die = on_rank(0, lambda: os.kill(os.getpid(), 9), "alone")

    def step(x):
        return on_rank(2, loop_of_c, "alone")(die(x))

    with survivors(0, 2):
        error = within(8, lambda: eagerly(step, timeout=0.5)(rows)).error
        assert isinstance(error, tp.WorkerDied), error
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


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("limit", [{"timeout": 0.5}, {}], ids=["timeout", "no timeout"])
@pytest.mark.parametrize("when", ["in a collective", "idle"])
@pytest.mark.long("no timeout")
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


@pytest.mark.long
def test_row_20_stopped_while_a_compiled_call_is_awaited():
    with survivors(1):
        os.kill(worker_pids()[1], signal.SIGSTOP)
        y = total(rows)
        error = within(10, y.tolist).error
        assert isinstance(error, tp.WorkerDied), error
        assert "stopped" in str(error)


@pytest.mark.long
def test_row_20_stopped_with_full_sockets_while_another_dies():
    """The thread that sends waits for room, and holds the send lock."""
    pids = worker_pids()
    os.kill(pids[1], signal.SIGSTOP)
    first = total(rows)

    def ahead():
        z = first
        while True:
            z = total(z)

    pool = running_pool()
    killer = threading.Thread(
        target=lambda: (wait_for(lambda: pool.outbox.unsent is not None, 10), os.kill(pids[0], 9))
    )
    killer.start()
    error = within(12, ahead).error
    killer.join()
    assert isinstance(error, tp.WorkerDied | tp.ShardLost), error
    assert_pool_works()


@pytest.mark.long
def test_row_21_a_slow_rank_is_no_error(tmp_path):
    """Nor does it end when another call fails to be sent meanwhile."""
    gate = tmp_path / "open"

    def step(x):
        while int(tp.axis_index("i")) == 1 and not gate.exists():
            pass
        return tp.psum(x, "i")

    timer = threading.Timer(8, gate.touch)
    with survivors():
        timer.start()
        assert within(20, lambda: eagerly(step)(rows).tolist()).value == [6.0] * N
    timer.join()
