"""Covers: what happens when a worker raises, dies or disagrees: _runtimes/, _errors.py, _groups.py.

The promise: a call gives the right value or raises the first cause; the next call works; lost is
only what lived on a dead worker.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time

import pytest
import torch
from _support import EAGER, SCALE, known_pids, num_fds, wait_for, worker_pids

import torchpmap as tp
from torchpmap import _current

N = 4
pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
quarter = tp.pmap(lambda x: tp.psum(x, "i") / 4, "i", compile=EAGER)
rows = torch.arange(float(N))


class MyError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


def sharded():
    """A value that lives on all devices, computed."""
    return tp.pmap(lambda x: x * 10, compile=EAGER)(rows).block_until_ready()


def assert_pool_works():
    assert total(rows).tolist() == [6.0] * N
    assert tp.pmap(lambda x: tp.pmax(x, "i"), "i", compile=False)(rows).tolist() == [3.0] * N


def eagerly(function):
    return tp.pmap(function, "i", compile=False)


@contextlib.contextmanager
def busy(gate, ranks=range(N), error=None):
    """``ranks`` do nothing until there is a file ``gate``; then all raise ``error``, if any.

    Yields the thread that called them; calls made meanwhile stand behind this one.
    """

    def wait(x):
        while not gate.exists() and int(tp.axis_index("i")) in ranks:
            pass
        if error is not None:
            raise error
        return x

    def call():
        raises = pytest.raises(type(error), match=str(error)) if error else contextlib.nullcontext()
        with raises:
            eagerly(wait)(rows)

    for f in (total, quarter):
        f(rows).block_until_ready()  # compiled: that would wait at the gate too
    thread = threading.Thread(target=call)
    thread.start()
    assert wait_for(lambda: _current.runtime()._pool._monitor.pending)
    yield thread
    gate.touch()
    thread.join()


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_exception_on_one_device(place, rank):
    def step(x):
        mine = int(tp.axis_index("i")) == rank
        if mine and place == "before":
            raise ValueError("my message")
        x = tp.psum(x, "i")
        if mine and place == "between":
            raise ValueError("my message")  # with this line in the traceback
        x = tp.all_gather(x, "i").sum()
        if mine and place == "after":
            raise ValueError("my message")
        return x

    value, pids = sharded(), worker_pids()
    start = time.monotonic()
    with pytest.raises(ValueError, match="my message") as caught:
        eagerly(step)(rows)
    assert time.monotonic() - start < 10 * SCALE
    assert str(caught.value) == "my message"
    note = caught.value.__notes__[0]
    assert note == f"on device cpu:{rank} (rank {rank}, pid {pids[rank]}) while running step"
    remote = str(caught.value.__cause__)
    assert 'raise ValueError("my message")' in remote
    assert "test_faults.py" in remote
    assert worker_pids() == pids
    assert value.tolist() == [0, 10, 20, 30]
    assert_pool_works()


def test_exception_class_of_the_caller_is_caught():
    def step(x):
        if int(tp.axis_index("i")) == 1:
            raise MyError(7, "seven")
        return tp.psum(x, "i")

    with pytest.raises(MyError, match="7") as caught:
        eagerly(step)(rows)
    assert caught.value.code == 7
    assert_pool_works()


def test_exception_class_defined_in_a_function():
    class Local(LookupError):
        pass

    def step(x):
        raise Local("here")

    with pytest.raises(Local, match="here"):
        eagerly(step)(rows)


def test_exception_that_cannot_be_pickled():
    def step(x):
        error = OSError("holds a lock")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(tp.WorkerError, match=r"OSError: holds a lock") as caught:
        eagerly(step)(rows)
    assert "in step" in str(caught.value.__cause__)
    assert_pool_works()


def test_exception_whose_str_fails():
    def step(x):
        class Bad(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        raise Bad()

    with pytest.raises(tp.WorkerError, match=r"Bad"):
        eagerly(step)(rows)
    assert_pool_works()


def test_different_exceptions_on_all_devices():
    def step(x):
        rank = int(tp.axis_index("i"))
        raise [ValueError, KeyError, TypeError, LookupError][rank](f"error of rank {rank}")

    with pytest.raises(ValueError, match="error of rank 0") as caught:
        eagerly(step)(rows)
    notes = "\n".join(caught.value.__notes__)
    for rank in (1, 2, 3):
        assert f"error of rank {rank}" in notes
    assert_pool_works()


def test_sys_exit_does_not_end_the_worker():
    pids = worker_pids()
    with pytest.raises(tp.WorkerError, match=r"SystemExit: 3"):
        eagerly(lambda x: sys.exit(3))(rows)
    assert worker_pids() == pids
    assert_pool_works()


def test_keyboard_interrupt_in_a_worker():
    def step(x):
        raise KeyboardInterrupt

    with pytest.raises(tp.WorkerError, match="KeyboardInterrupt"):
        eagerly(step)(rows)
    assert_pool_works()


def test_swallowed_communication_error_still_fails_the_call():
    """Whoever catches what another device's failure caused does not go on with a wrong value."""

    def step(x):
        if int(tp.axis_index("i")) == 0:
            raise ValueError("cause")
        for _ in range(2):
            with contextlib.suppress(Exception):
                x = tp.psum(x, "i")
        return x

    with pytest.raises(ValueError, match="cause"):
        eagerly(step)(rows)
    assert_pool_works()


def test_many_failing_calls_leave_nothing():
    def step(x):
        if int(tp.axis_index("i")) == 2:
            raise ValueError("again")
        return torch.zeros(54321)  # which nobody will ever ask for

    def count(x):
        return torch.tensor([o.numel() for o in gc.get_objects() if type(o) is torch.Tensor])

    def fail(times):
        for _ in range(times):
            with pytest.raises(ValueError, match="again"):
                failing(rows)

    failing, ask = eagerly(step), eagerly(lambda x: (count(x) == 54321).sum())
    fail(5)
    fds = [num_fds(), *map(num_fds, worker_pids())]
    fail(40)
    assert [num_fds(), *map(num_fds, worker_pids())] == fds
    assert max(ask(rows).tolist()) <= 2


# -- failures of compiled calls, which nobody awaits -----------------------------------------------


def pick(x, index):
    return torch.index_select(x, 0, index)


def test_runtime_error_inside_a_graph():
    table = torch.arange(20.0).reshape(N, 5)
    f = tp.pmap(pick, compile=EAGER)
    value, pids = sharded(), worker_pids()
    y = f(table, torch.tensor([[0], [1], [99], [2]]))
    with pytest.raises(IndexError, match="out of range") as caught:
        y.cpu()
    assert "on device cpu:2 (rank 2" in caught.value.__notes__[0]
    with pytest.raises(IndexError):
        y.block_until_ready()
    with pytest.raises(IndexError):
        total(y[0] + rows)
    assert value.tolist() == [0, 10, 20, 30]
    assert f(table, torch.tensor([[0], [1], [2], [3]])).flatten().tolist() == [0, 6, 12, 18]
    assert worker_pids() == pids


def test_calls_behind_a_failed_one_are_poisoned():
    f = tp.pmap(pick, compile=EAGER)
    g = tp.pmap(lambda x: tp.psum(x, "i") + 1, "i", compile=EAGER)
    g(torch.zeros(N, 1)).block_until_ready()
    f(torch.zeros(N, 1), torch.zeros(N, 1, dtype=torch.int64)).block_until_ready()
    y = f(torch.zeros(N, 1), torch.tensor([[0], [7], [0], [0]]))

    def use():
        value = y
        for _ in range(5):
            value = g(value)
        value.cpu()

    with pytest.raises(IndexError, match="out of range"):  # here at the latest
        use()
    assert_pool_works()


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
    value, pids = sharded(), worker_pids()
    f = tp.pmap(lambda x: x + 1, compile={"backend": failing_backend})
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="compiles nothing") as caught:
            f(rows)
        assert "while compiling <lambda>" in caught.value.__notes__[0]
    assert value.tolist() == [0, 10, 20, 30]
    assert worker_pids() == pids
    assert_pool_works()


@pytest.mark.timeout(20)
def test_death_while_compiling():
    f = tp.pmap(lambda x: x + 2, compile={"backend": exiting_backend})
    with pytest.raises(tp.WorkerDied, match="exit code 7"):
        f(rows)
    assert_pool_works()


# -- deaths ----------------------------------------------------------------------------------------


def kill(pid):
    """End a worker and wait until the controller knows it."""
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: _current.runtime()._pool.broken)


def test_idle_worker_killed():
    value, pids = sharded(), worker_pids()
    subset = tp.pmap(lambda x: x + 1, devices=tp.devices()[:2], compile=EAGER)(torch.zeros(2))
    subset.block_until_ready()
    kill(pids[2])
    start = time.monotonic()
    assert_pool_works()
    assert time.monotonic() - start < 10 * SCALE
    after = worker_pids()
    assert [a == b for a, b in zip(after, pids, strict=True)] == [True, True, False, True]
    assert subset.tolist() == [1, 1]
    for use in (value.cpu, lambda: value[2], value.block_until_ready, lambda: total(value).cpu()):
        with pytest.raises(tp.ShardLost, match=r"shard on device cpu:2 is lost: .*SIGKILL"):
            use()
    assert_pool_works()


def test_lost_value_used_at_once():
    """Without a call in between that notices: the error must not be about handles or keys."""
    value, pids = sharded(), worker_pids()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises((tp.ShardLost, tp.WorkerDied), match="cpu:1"):
        total(value).cpu()
    with pytest.raises(tp.ShardLost, match="cpu:1"):
        value.cpu()
    value, pids = sharded(), worker_pids()
    kill(pids[1])
    with pytest.raises(tp.ShardLost, match="cpu:1"):
        total(value).cpu()
    value, pids = sharded(), worker_pids()
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises((tp.ShardLost, tp.WorkerDied), match="cpu:3"):
        eagerly(lambda x: x)(value)
    assert_pool_works()


@pytest.mark.parametrize("victim", range(N))
def test_killed_while_the_others_wait_in_a_collective(victim):
    value, pids = sharded(), worker_pids()

    def step(x):
        if int(tp.axis_index("i")) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            x = tp.psum(x, "i")
        return x

    start = time.monotonic()
    with pytest.raises(tp.WorkerDied, match="SIGKILL") as caught:
        eagerly(step)(rows)
    assert time.monotonic() - start < 10 * SCALE
    assert caught.value.rank == victim
    assert caught.value.exitcode == -9
    assert f"device cpu:{victim} (rank {victim}, pid {pids[victim]})" in str(caught.value)
    assert_pool_works()
    with pytest.raises(tp.ShardLost, match=f"cpu:{victim}"):
        value.cpu()
    survivors = [rank for rank in range(N) if rank != victim]
    assert [value[rank].item() for rank in survivors] == [10.0 * rank for rank in survivors]
    assert [worker_pids()[rank] for rank in survivors] == [pids[rank] for rank in survivors]


def test_killed_in_a_compiled_call_that_nobody_awaits():
    f = tp.pmap(lambda x: tp.psum(x @ x, "i") * 0 + x, "i", compile=EAGER)
    x = f(torch.eye(200).expand(N, 200, 200)).block_until_ready()
    pids = worker_pids()
    for _ in range(30):
        x = f(x)
    kill(pids[3])
    with pytest.raises(tp.WorkerDied, match="SIGKILL"):
        x.cpu()
    assert_pool_works()


def test_killed_while_the_caller_waits_in_fetch():
    f = tp.pmap(_slow_then_pick, compile=EAGER)
    pids = worker_pids()
    y = f(torch.zeros(N, 1), torch.zeros(N, 1, dtype=torch.int64))
    for _ in range(50):
        y = f(y, torch.zeros(N, 1, dtype=torch.int64))
    pending = _current.runtime()._pool._monitor.pending

    def kill_when_waiting():
        assert wait_for(lambda: pending)
        kill(pids[0])

    killer = threading.Thread(target=kill_when_waiting)
    killer.start()
    with pytest.raises(tp.WorkerDied, match="SIGKILL"):
        y.cpu()
    killer.join()
    assert_pool_works()


def test_all_workers_killed():
    value, pids = sharded(), worker_pids()
    for pid in pids:
        kill(pid)
    assert_pool_works()
    assert not set(worker_pids()) & set(pids)
    with pytest.raises(tp.ShardLost):
        value.cpu()


def test_all_workers_die_in_a_call():
    def die(x):
        try:
            tp.psum(x, "i")  # all have begun: who had not when the first dies would not do so
        finally:
            os._exit(5)

    with pytest.raises(tp.WorkerDied, match="exit code 5") as caught:
        eagerly(die)(rows)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    for rank in range(N):
        assert f"device cpu:{rank}" in text
    assert_pool_works()


def test_one_dies_and_another_raises():
    """The exception is the cause: the death may be its consequence, and the user can act on it."""

    def step(x):
        rank = int(tp.axis_index("i"))
        if rank == 1:
            os._exit(1)
        if rank == 2:
            raise ValueError("on two")
        return tp.psum(x, "i")

    with pytest.raises(ValueError, match="on two") as caught:
        eagerly(step)(rows)
    assert any("cpu:1" in note and "exit code 1" in note for note in caught.value.__notes__)
    assert_pool_works()


def test_segmentation_fault_shows_where():
    def crash(x):
        if int(tp.axis_index("i")) == 1:
            ctypes.string_at(0)
        return tp.psum(x, "i")

    with pytest.raises(tp.WorkerDied, match="SIGSEGV") as caught:
        eagerly(crash)(rows)
    text = str(caught.value)
    assert "Fatal Python error: Segmentation fault" in text
    assert "in crash" in text
    assert_pool_works()


@pytest.mark.parametrize("second", [0, 2])
def test_killed_again_during_the_repair(second):
    pids = worker_pids()
    os.kill(pids[1], signal.SIGKILL)

    def kill_successor():
        assert wait_for(lambda: known_pids()[1] not in (None, pids[1]))
        os.kill(known_pids()[second], signal.SIGKILL)

    killer = threading.Thread(target=kill_successor)
    killer.start()
    start = time.monotonic()
    assert wait_for(lambda: _current.runtime()._pool.broken)
    try:
        assert_pool_works()
    except (tp.WorkerDied, tp.ShardLost):  # the second blow fell on the call after the repair
        assert_pool_works()
    killer.join()
    assert time.monotonic() - start < 10 * SCALE
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
    pool = _current.runtime()._pool
    epoch = pool._supervisor.epoch
    with busy(gate, error=RuntimeError("not yours")) as thread:
        skipped = total(rows)
        proper = pool.in_order

        def in_order(*args):
            if threading.current_thread() is not thread and not gate.exists():
                gate.touch()
                thread.join()
            return proper(*args)

        monkeypatch.setattr(pool, "in_order", in_order)
        monkeypatch.setattr(pool, "has_reached", lambda *_: False)
        with pytest.raises(RuntimeError, match="not yours"):
            use(skipped)
    assert not pool.broken
    assert pool._supervisor.epoch == epoch + 1  # using it was no further failure
    assert value.tolist() == [0, 10, 20, 30]


def test_what_a_skipped_call_frees_is_freed(tmp_path):
    """What nobody uses any more travels with the next call, which may stand behind a failed one."""

    def count(x):
        return torch.tensor(
            sum(type(o) is torch.Tensor and o.numel() == 23456 for o in gc.get_objects())
        )

    value = tp.device_put_sharded([torch.zeros(23456)] * N, tp.devices())
    assert min(eagerly(count)(rows).tolist()) == 1
    with busy(tmp_path / "open", error=RuntimeError("first")):
        held = tp.device_put_sharded(list(rows), tp.devices())
        del value
        total(held)
    assert max(eagerly(count)(rows).tolist()) == 0


def test_other_threads_get_their_own_results():
    """One thread's function fails again and again; the others are slowed down, never misled."""
    stop = threading.Event()
    wrong = []

    def innocent(k):
        f = tp.pmap(lambda x: tp.psum(x, "i") * k, "i", compile=EAGER)
        while not stop.is_set():
            try:
                result = f(rows).tolist()
            except RuntimeError:
                continue  # behind the failed call
            except BaseException as error:
                wrong.append(error)
                return
            if result != [6.0 * k] * N:
                wrong.append(result)

    def fail(x):
        raise RuntimeError("not yours")

    threads = [threading.Thread(target=innocent, args=(k,)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    failing = eagerly(fail)
    for _ in range(20):
        with pytest.raises(RuntimeError, match="not yours"):
            failing(rows)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert_pool_works()


# -- Ctrl-C ----------------------------------------------------------------------------------------


def call_until_interrupted():
    """Press Ctrl-C when there is no room for a further call; the last result."""
    x, calls = rows, 0
    pool = _current.runtime()._pool
    seen = collections.deque(maxlen=8)

    def is_stuck():
        seen.append((calls, pool.outbox.is_empty))
        return seen.count((calls, False)) == seen.maxlen

    def press():
        assert wait_for(is_stuck)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            x = quarter(x)
            calls += 1
    thread.join()
    return x


@pytest.mark.parametrize("ranks", [range(N), [2]], ids=["no rank has it", "some ranks have it"])
def test_ctrl_c_while_a_call_is_sent(ranks, tmp_path):
    """The next one must not meet the half of this one."""
    with busy(tmp_path / "open", ranks):
        x = call_until_interrupted()
    assert within(5, lambda: total(rows * 2).tolist()) == [12.0] * N
    assert within(5, lambda: x.tolist()) == [1.5] * N
    assert_pool_works()


def test_what_ctrl_c_left_unsent_is_sent_although_no_call_follows(tmp_path):
    """Others wait for it in a collective."""
    pool = _current.runtime()._pool
    with busy(tmp_path / "open", [2]):
        x = call_until_interrupted()
        assert not pool.outbox.is_empty
    assert wait_for(lambda: pool.outbox.is_empty)
    assert wait_for(x.is_ready)


def interrupted_after(seconds, function):
    """Call ``function`` again and again, until Ctrl-C."""
    stopped = threading.Event()

    def press():
        pause = seconds
        while not stopped.wait(pause):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            pause = 0.5  # Python drops what is raised while it runs a finalizer: then, once more

    thread = threading.Thread(target=press)
    try:
        thread.start()
        while True:
            function()
    except KeyboardInterrupt:
        stopped.set()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment():
    """Also while a large block is sent; after each, everything works and nothing is lost."""
    large = torch.ones(N, 300_000)
    value = quarter(large).block_until_ready()

    def calls():
        quarter(large)
        quarter(value)
        quarter(value)

    for microseconds in range(10, 4000, 80):
        interrupted_after(microseconds * 1e-6, calls)
    assert within(20, lambda: quarter(value)[0, 0].item()) == 1
    assert within(20, lambda: quarter(large)[1, -1].item()) == 1
    assert_pool_works()


def test_ctrl_c_during_a_repair():
    quarter(rows).block_until_ready()
    for milliseconds in (1, 2, 4, 8, 16, 32, 64):
        pool = _current.runtime()._pool
        kill(worker_pids()[1])
        assert wait_for(lambda pool=pool: pool.broken)
        interrupted_after(milliseconds * 1e-3, lambda: quarter(rows))
        assert within(5, lambda: quarter(rows).tolist()) == [1.5] * N
    assert_pool_works()


# -- collectives that do not match -----------------------------------------------------------------


def mismatch_shape(x, rank):
    return tp.psum(torch.ones(3 if rank == 1 else 2), "i").sum()


def mismatch_dtype(x, rank):
    return tp.psum(torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32), "i").sum()


def mismatch_reduction(x, rank):
    return tp.pmax(x, "i") if rank == 1 else tp.psum(x, "i")


def mismatch_order(x, rank):
    a, b = x, x + 1
    if rank == 1:
        b = tp.pmax(b, "i")
        a = tp.psum(a, "i")
    else:
        a = tp.psum(a, "i")
        b = tp.pmax(b, "i")
    return a + b


def mismatch_collective(x, rank):
    return tp.all_gather(x, "i").sum() if rank == 1 else tp.psum(x, "i")


def mismatch_count(x, rank):
    x = tp.psum(x, "i")
    return x if rank == 1 else tp.psum(x, "i")


MISMATCHES = [
    mismatch_dtype,
    mismatch_reduction,
    mismatch_order,
    mismatch_shape,
    mismatch_collective,
    mismatch_count,
]


@pytest.mark.parametrize("function", MISMATCHES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_mismatch_never_returns_a_value(pool, function):
    def step(x):
        return function(x, int(tp.axis_index("i")))

    x = torch.arange(float(pool))
    outcome = within(3, lambda: eagerly(step)(x).tolist())
    assert isinstance(outcome, tp.PmapError), outcome
    assert eagerly(lambda x: tp.psum(x, "i"))(x).tolist() == [float(x.sum())] * pool


# -- the same where processes do not share memory --------------------------------------------------


def shares_memory(x):
    x = tp.psum(x, "i")
    with open("/proc/self/maps") as maps:
        return x * 0 + ("memfd:torchpmap-group" in maps.read())


@pytest.fixture
def over_gloo():
    assert eagerly(shares_memory)(rows).tolist() == [1.0] * N
    tp.shutdown()
    tp.config.shared_memory = False
    tp.init(N)
    assert eagerly(shares_memory)(rows).tolist() == [0.0] * N
    yield
    tp.shutdown()
    tp.config.reset()


OVER_GLOO = {
    "exception": lambda: test_exception_on_one_device("between", 2),
    "death": lambda: test_killed_while_the_others_wait_in_a_collective(1),
    "death in a compiled call": lambda: test_killed_in_a_compiled_call_that_nobody_awaits(),
    "mismatch": lambda: test_mismatch_never_returns_a_value(N, mismatch_collective),
}


@pytest.mark.usefixtures("over_gloo")
@pytest.mark.parametrize("check", OVER_GLOO.values(), ids=OVER_GLOO)
def test_over_gloo(check):
    check()


def within(seconds, function):
    """What ``function`` returns or raises; a call that hangs is ended with its pool."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(seconds * SCALE)
    if thread.is_alive():
        tp.shutdown()
        thread.join()
        return f"hung for {seconds} s"
    return outcome[0]
