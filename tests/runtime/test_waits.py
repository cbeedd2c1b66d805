"""Covers: that every wait of the local runtime ends, whatever a worker, the fork server, a thread
of ours or the operating system does: _runtime/local/pool.py, workers.py, forkserver.py, watch.py.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from _launched import script
from _support import (
    DEVICE,
    EAGER,
    SCALE,
    beside,
    eagerly,
    gated,
    in_threads,
    num_fds,
    running_pool,
    stat,
    wait_for,
    worker_pids,
)

import torchpmap as tp
from torchpmap._runtime.local import forkserver, waits
from torchpmap._runtime.local import output as _output
from torchpmap._runtime.local import pool as _pool
from torchpmap._runtime.local.forkserver import command, server

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.parametrize("pool", [2], indirect=True),
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*traced 16 times"),  # once for each new pool
]

total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
double = tp.pmap(lambda x: x * 2, compile=EAGER)
largest = tp.pmap(lambda x: tp.pmax(x, "i"), "i", compile=False)
rows = torch.arange(2.0)


def assert_pool_works():
    assert total(rows).tolist() == [1.0, 1.0]
    assert largest(rows).tolist() == [1.0, 1.0]


def test_its_owner_may_take_long_to_be_ready(monkeypatch):
    """The thread that reads answers runs before the pool is there."""
    watch = _pool.Watch

    def slow(workers, supervisor):
        wait_for(lambda: not workers.monitor.threads[0].is_alive(), 0.7 / SCALE)
        return watch(workers, supervisor)

    tp.shutdown()
    monkeypatch.setattr(_pool, "Watch", slow)
    tp.init(2)
    assert_pool_works()


def run_ahead_until_it_fails(function=double, x=rows):
    while True:
        x = function(x)


def run_ahead():
    with contextlib.suppress(tp.PmapError):
        run_ahead_until_it_fails()


@contextlib.contextmanager
def lives_on(*ranks):
    """The workers of these ranks and what they hold live on, and then the pool works.

    Gives the process ids of all workers, and the value.
    """
    assert_pool_works()
    pids, held = worker_pids(2), double(rows).block_until_ready()
    yield pids, held
    assert_pool_works()
    assert [worker_pids(2)[rank] for rank in ranks] == [pids[rank] for rank in ranks]
    assert [held.addressable_data(rank).item() for rank in ranks] == [2 * rank for rank in ranks]


def run_far_ahead():
    results = [double(rows) for _ in range(5000)]
    return results[0].tolist()


# -- stopped processes -----------------------------------------------------------------------------

WAITS = {
    "for a value": lambda: double(rows).tolist(),
    "for a collective": lambda: total(rows).block_until_ready(),
    "for an uncompiled call": lambda: eagerly(lambda x: x)(rows),
    "for a plan": lambda: tp.pmap(lambda x: x - 1, compile=EAGER)(rows).tolist(),
    "for room": run_far_ahead,
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_stopped_worker_is_ended(wait, monkeypatch):
    monkeypatch.setattr(waits, "STOPPED_S", 0.2)
    with lives_on(1) as (pids, _):
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(tp.WorkerDied, match=r"had been stopped for .* while it was waited for"):
            wait()


def test_a_stopped_worker_that_no_call_waits_for_lives(monkeypatch):
    monkeypatch.setattr(waits, "STOPPED_S", 0.0)
    with lives_on(0, 1) as (pids, _):
        monitor = running_pool().monitor
        os.kill(pids[0], signal.SIGSTOP)
        ticks = monitor._next_tick
        assert wait_for(lambda: monitor._next_tick > ticks + 1, 5)
        os.kill(pids[0], signal.SIGCONT)


def test_a_worker_that_dies_while_the_socket_of_another_is_full(tmp_path):
    """The repair does not wait for room."""
    gate = tmp_path / "open"

    def call():
        with contextlib.suppress(tp.PmapError):
            eagerly(gated(gate, [1]))(rows)

    with lives_on(1) as (pids, _), beside(call):
        pool = running_pool()
        assert wait_for(lambda: pool.monitor.pending)
        with beside(run_ahead):
            assert wait_for(lambda: pool.outbox.blocked)
            os.kill(pids[0], signal.SIGKILL)
        gate.touch()


# -- healthy ranks live ----------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["computes", "sleeps"])
@pytest.mark.parametrize("end", ["exception", "death"])
@pytest.mark.long("exception-sleeps", "death-computes")
def test_a_rank_that_goes_on_after_a_failure_is_cancelled(loop, end):
    def step(x):
        if x == 1:
            while True:
                time.sleep(1000 if loop == "sleeps" else 0)
        if end == "death":
            os._exit(3)
        raise LookupError("mine")

    expected, text = (tp.WorkerDied, "exit code 3") if end == "death" else (LookupError, "mine")
    with lives_on(1), pytest.raises(expected, match=text):
        eagerly(step)(rows)


def test_an_exception_does_not_wait_for_a_rank_that_cannot_be_cancelled(tmp_path, monkeypatch):
    """It holds the GIL, in C code; the next call waits for it."""
    monkeypatch.setattr(_pool, "_EARLY_S", 0.1)
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def step(x):
        if x == 1:
            ctypes.PyDLL(None).open(os.fsencode(gate), os.O_RDONLY)  # until there is a writer
        raise LookupError("mine")

    with lives_on(0, 1):
        with pytest.raises(LookupError, match="mine"):
            eagerly(step)(rows)
        assert running_pool().broken
        with open(gate, "w"):
            assert_pool_works()


def test_a_user_is_told_who_is_waited_for(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(waits, "_SLOW_S", 0.1)
    gate = tmp_path / "open"
    pids = worker_pids(2)
    said = []

    def is_told():
        said.append(capfd.readouterr().err)
        return "waiting" in said[-1]

    with beside(eagerly(gated(gate, [1])), rows):
        assert wait_for(is_told, 10)
        gate.touch()
    text = "".join(said)
    assert text.startswith("torchpmap: waiting for ")
    assert text.count(f"{DEVICE}:1 (rank 1, pid {pids[1]}): it runs step (") == 1


# -- no descriptors --------------------------------------------------------------------------------


@contextlib.contextmanager
def descriptors_left(count):
    """Let this process open ``count`` files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filler = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while filler[-1] <= highest:
            filler.append(os.dup(filler[0]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (filler[-1] + 1 + count, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in filler:
            os.close(fd)


def lacks_descriptors(function):
    """Whether it raises an error that says so."""
    try:
        function()
    except OSError as error:
        if "ulimit -n" not in str(error):
            raise
        return True
    return False


def test_no_descriptors_left_for_a_repair():
    """However many there are: an error that says so, nothing left open, and later it works."""
    failed = 0
    for count in (0, 1, 4, 9, 12, 13, 14, 40):
        with lives_on(0) as (pids, _):
            fds = num_fds()
            os.kill(pids[1], signal.SIGKILL)
            assert wait_for(lambda: running_pool().broken)
            for _ in range(2):
                with descriptors_left(count):
                    failed += lacks_descriptors(assert_pool_works)
                assert num_fds() <= fds
            assert_pool_works()
            assert num_fds() == fds
    assert failed >= 5


def test_no_descriptors_left_for_a_start():
    assert_pool_works()
    tp.shutdown()
    before, failed = num_fds(), 0

    def start():
        tp.init(2)
        assert_pool_works()

    for count in (0, 3, 6, 12, 20, 30, 60):
        with descriptors_left(count):
            failed += lacks_descriptors(start)
        tp.shutdown()
        assert wait_for(lambda: num_fds() == before)
        start()
        tp.shutdown()
    assert failed >= 4
    tp.init(2)


def test_other_errors_of_the_system_say_what_they_are():
    with pytest.raises(OSError, match="no memory") as caught, forkserver.explained():
        raise OSError(errno.ENOMEM, "no memory")
    assert caught.value.__cause__ is None


# -- the fork server -------------------------------------------------------------------------------


SIGPIPE = """
    from torchpmap._runtime import current
    from torchpmap._runtime.local.forkserver import server
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    tp.init(num_devices=2, device_type="cpu")
    f = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
    for _ in range(3):
        y = f(torch.ones(2))
        pool = current.runtime()._pool
        y.block_until_ready()
        victim = pids()[1]
        pool._workers.monitor.soon(lambda: os.kill(victim, 9))
        for _ in range(2000):
            try:
                f(torch.ones(2)); tp.device_put(torch.ones(2, 9), tp.devices()[1])
            except tp.PmapError:
                break
        while True:
            try:
                assert f(torch.ones(2)).tolist() == [2, 2]
                break
            except tp.PmapError:
                pass
    os.kill(server.pid, 9)
    tp.shutdown()
    print(f(torch.ones(2)).tolist())
"""


@pytest.mark.long
def test_a_script_that_lets_sigpipe_end_it_goes_on_when_a_worker_dies():
    assert script(SIGPIPE).wait().clean() == "[2.0, 2.0]\n"


@pytest.fixture
def interrupted(monkeypatch):
    """Makes a call that Ctrl-C interrupts when its message is to be sent."""

    def post(*args):
        raise KeyboardInterrupt

    def run(call, *args):
        with monkeypatch.context() as patched:
            patched.setattr(running_pool().outbox, "post", post)
            with pytest.raises(KeyboardInterrupt):
                call(*args)

    return run


def test_ctrl_c_in_a_call_frees_what_the_call_was_to_free(monkeypatch, interrupted):
    x = double(rows).block_until_ready()
    team, handle = x._handle.team, x._handle.id
    wait_for(lambda: not team.released)
    monkeypatch.setattr(running_pool(), "_tick", lambda: None)
    del x
    assert handle in team.released
    interrupted(double, rows)
    assert handle in team.released
    assert double(rows).tolist() == [0, 2]
    assert handle not in team.released


def test_ctrl_c_while_a_fetch_is_sent_frees_its_memory(interrupted):
    pool = running_pool()
    large = double(torch.ones(2, 300_000)).block_until_ready()
    interrupted(tp.device_get, large)
    assert pool.landing.taken()
    assert not pool.monitor.pending
    total(rows).block_until_ready()
    assert wait_for(lambda: not pool.landing.taken())
    assert tp.device_get(large).sum() == 1_200_000


def test_a_stopped_fork_server_is_replaced(monkeypatch):
    monkeypatch.setattr(forkserver, "_STOPPED_S", 0.2)
    with lives_on(0) as (pids, _):
        forks = server.pid
        os.kill(forks, signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        assert wait_for(lambda: running_pool().broken)
    assert stat(forks) is None


PLANTED = ("torch", "torchpmap", "numpy", "multiprocessing", "socket", "sitecustomize", "json")


@pytest.mark.parametrize("python_path", [None, ".", "", f".{os.pathsep}/nowhere"])
@pytest.mark.parametrize("here", [True, False], ids=["here is on the path", "here is not"])
def test_it_imports_from_where_this_process_does(here, python_path, tmp_path, monkeypatch):
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"print('planted {name}')")
    monkeypatch.chdir(tmp_path)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    if here:
        monkeypatch.setattr(sys, "path", ["", *sys.path])
    args, environment = command("print(ascii(sys.path)); import json")
    done = subprocess.run(args, env=environment, capture_output=True, text=True)
    planted = "planted json\n" if here else ""
    assert (done.stdout, done.stderr) == (f"{sys.path!a}\n{planted}", "")


# -- the user's stream, and threads of ours --------------------------------------------------------


def test_answers_come_although_stdout_is_not_read(monkeypatch):
    monkeypatch.setattr(_output, "_STUCK_S", 0.0)
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as full:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        monkeypatch.setattr(sys, "stdout", full)
        for k in range(3):
            assert eagerly(lambda x, k=k: print("lost") or x + k)(rows).tolist() == [k, k + 1]
        tp.shutdown()
        monkeypatch.undo()
    tp.init(2)


def test_a_worker_that_prints_without_end_stops_no_call(monkeypatch):
    """What it prints is read in turns with the answers of others."""

    class Slow:
        def write(self, text):
            time.sleep(0.001)

        def flush(self):
            pass

    def flood(x):
        if x == 0:
            line = b"x" * 1023 + b"\n"
            for _ in range(64):
                os.write(1, line * 64)
        return x

    monkeypatch.setattr(sys, "stdout", Slow())
    printer = running_pool().monitor.printer
    most = []
    flooded = tp.pmap(flood, compile=False, devices=tp.devices())
    with beside(flooded, rows) as ended:
        while not ended.done():
            most.append(sum(len(each[1]) for each in tuple(printer._queue) if type(each) is tuple))
            time.sleep(0.001)
    assert max(most) < 1 << 20  # of 4 MB
    assert_pool_works()


def test_a_monitor_that_fails_closes_the_pool():
    """An exception that was not expected is told, and no caller waits for ever."""
    assert_pool_works()
    old = double(rows)

    def fail():
        raise ZeroDivisionError("unexpected")

    def wait():
        with pytest.raises(tp.RuntimeClosed, match="ZeroDivisionError: unexpected") as caught:
            eagerly(lambda x: time.sleep(1000))(rows)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    monitor = running_pool().monitor
    with beside(wait, seconds=30):
        assert wait_for(lambda: monitor.pending)
        monitor.soon(fail)
    with pytest.raises(tp.RuntimeClosed):
        old.tolist()
    assert_pool_works()


# -- shutdown --------------------------------------------------------------------------------------


def from_a_signal_handler():
    before = signal.signal(signal.SIGUSR1, lambda *_: tp.shutdown())
    pressed = threading.Timer(0.02, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    value = double(rows)
    try:
        pressed.start()
        with pytest.raises(tp.RuntimeClosed):
            run_ahead_until_it_fails(x=value)
    finally:
        pressed.join()
        signal.signal(signal.SIGUSR1, before)


def from_a_finalizer():
    class Ends:
        def __del__(self):
            tp.shutdown()

    pool = running_pool()
    pool.in_order(lambda: [Ends()].clear())  # the send lock is held
    pool.close("again")


def shutdown_ends(errors, function, *args):
    """A thread runs this, which the shutdown in the block ends with one of the errors."""

    def run():
        with pytest.raises(errors):
            function(*args)

    return beside(run, seconds=5)


def with_queued_calls():
    """Also when the sockets are full: a thread runs ahead until sending blocks."""
    tp.init(4)
    square = tp.pmap(lambda x: x @ x, compile=EAGER)
    x = square(torch.eye(768).expand(4, 768, 768))
    pool = running_pool()
    errors = tp.RuntimeClosed, ValueError  # ValueError: the next pool may be smaller
    with shutdown_ends(errors, run_ahead_until_it_fails, lambda _: square(x)):
        assert wait_for(lambda: pool.outbox.unsent is not None, 10)
        start = time.monotonic()
        tp.shutdown()
        assert time.monotonic() - start < 3 * SCALE


def while_a_thread_waits():
    tp.init(4)
    assert worker_pids(4)
    sleeps = eagerly(lambda x: time.sleep(30) or x)
    with shutdown_ends(tp.RuntimeClosed, sleeps, torch.zeros(4)):
        assert wait_for(lambda: running_pool().monitor.pending)
        tp.shutdown()


def from_several_threads():
    in_threads(8, lambda k: tp.shutdown(), 30)


def with_stopped_workers():
    for pid in worker_pids(2):
        os.kill(pid, signal.SIGSTOP)
    tp.shutdown()


def while_workers_start():
    tp.shutdown()
    os.kill(server.pid or 0, signal.SIGSTOP)
    tp.init(2)
    tp.shutdown()
    os.kill(server.pid or 0, signal.SIGCONT)


def while_another_thread_repairs():
    pids = worker_pids(2)
    os.kill(server.pid or 0, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    pool = running_pool()
    assert wait_for(lambda: pool.broken)
    with beside(run_ahead, seconds=30):
        assert wait_for(lambda: pool._repair_in_progress)
        tp.shutdown()
    os.kill(server.pid or 0, signal.SIGCONT)


SHUTDOWNS = [
    *(from_a_signal_handler, from_a_finalizer, from_several_threads, with_stopped_workers),
    *(while_workers_start, while_another_thread_repairs, with_queued_calls, while_a_thread_waits),
]


@pytest.mark.parametrize("end", SHUTDOWNS, ids=lambda f: f.__name__)
@pytest.mark.long("with_stopped_workers", "while_another_thread_repairs")
def test_shutdown(end):
    assert_pool_works()
    pids = worker_pids(2)
    end()
    assert wait_for(lambda: not any(map(stat, pids)))
    tp.init(2)
    assert_pool_works()
