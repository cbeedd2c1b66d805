"""Rows 1 to 7 of the matrix: a worker ends.  See docs/faults.md."""

import contextlib
import ctypes
import os
import signal
import sys
import threading

import pytest
import torch
from _launched import run_program
from _rig import (
    EAGER,
    N,
    assert_pool_works,
    eagerly,
    failure,
    on_rank,
    rows,
    sharded,
    survivors,
    total,
    within,
)
from _support import (
    DEVICE,
    beside,
    is_running,
    kill,
    known_pids,
    running_pool,
    wait_for,
    worker_pids,
)

import torchpmap as tp
from torchpmap._runtime.local.forkserver import server

pytestmark = pytest.mark.usefixtures("pool")

LARGE = 1 << 22
"""Elements of a block of 16 MB, which no socket buffer holds."""


def test_row_01_idle_worker_killed():
    with survivors(2):
        kill(worker_pids()[2])
        assert within(1, lambda: total(rows).tolist()).value == [6.0] * N


@pytest.mark.parametrize("victim", range(N))
def test_row_02_killed_while_the_others_wait_in_a_collective(victim):
    step = on_rank(victim, lambda: os.kill(os.getpid(), signal.SIGKILL))
    error = failure(step, tp.WorkerDied, 1, dead=[victim])
    assert (error.rank, error.exitcode) == (victim, -signal.SIGKILL)


@pytest.mark.parametrize("direction", ["feed", "fetch"])
def test_row_03_killed_in_the_middle_of_a_transfer(direction):
    """The worker is stopped while the bytes fill its socket, so that it dies with half of them."""
    same = tp.pmap(lambda x: x + 0, compile=EAGER)
    block = torch.ones(N, LARGE)
    stored = same(block).block_until_ready()
    victim = worker_pids()[1]
    with survivors(1):
        os.kill(victim, signal.SIGSTOP)

        def use():
            return stored.cpu() if direction == "fetch" else same(block).cpu()

        def strike():
            pool = running_pool()
            wait_for(lambda: pool.monitor.pending or pool.outbox.unsent is not None)
            os.kill(victim, signal.SIGKILL)

        with beside(strike):
            outcome = within(1, use)
        if outcome.error is None:  # the block was sent again to the new worker
            assert torch.equal(outcome.value, block)
        else:
            assert isinstance(outcome.error, tp.WorkerDied | tp.ShardLost)


def segfault():
    ctypes.string_at(0)


def c_exit():
    ctypes.CDLL(None)._exit(4)


CRASH = ["SIGSEGV", "Fatal Python error: Segmentation fault", "in segfault"]
ENDS = {
    "SIGSEGV": (segfault, tp.WorkerDied, CRASH),
    "SIGABRT": (os.abort, tp.WorkerDied, ["SIGABRT"]),
    "os._exit(0)": (lambda: os._exit(0), tp.WorkerDied, ["exit code 0"]),
    "exit of C": (c_exit, tp.WorkerDied, ["exit code 4"]),
    "sys.exit(3)": (lambda: sys.exit(3), tp.WorkerError, ["SystemExit: 3"]),
}


@pytest.mark.parametrize("place", ["alone", "others wait"])
@pytest.mark.parametrize("name", ENDS)
def test_row_04_how_a_worker_can_end(name, place):
    end, kind, texts = ENDS[name]
    error = failure(on_rank(1, end, place), kind, 1, dead=[1] if kind is tp.WorkerDied else [])
    assert all(text in str(error) for text in texts), error


def test_row_05_workers_die_while_the_pool_starts():
    """Each as soon as there is one, so that every attempt fails; then the pool is closed."""
    tp.shutdown()
    tp.init(N)
    stop = threading.Event()

    def strike():
        killed: list[int] = []
        while not stop.is_set():
            for pid in set(known_pids()) - {None, *killed}:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    with beside(strike):
        error = within(5, lambda: total(rows).tolist()).error
        stop.set()
    assert isinstance(error, tp.WorkerDied | tp.RuntimeClosed)
    assert "SIGKILL" in str(error)
    tp.shutdown()
    tp.init(N)
    assert_pool_works()


@pytest.mark.parametrize("dead", [(1, 3), tuple(range(N))], ids=["two", "all"])
def test_row_06_several_workers_die_together(dead):
    def step(x):
        tp.psum(x, "i")  # all have begun
        if int(tp.axis_index("i")) in dead:
            os._exit(5)
        return tp.psum(x, "i")

    error = failure(step, tp.WorkerDied, 2, dead=dead)
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert all(f"device {DEVICE}:{rank}" in text for rank in dead)


def test_row_07_death_again_during_the_repair():
    pids = worker_pids()

    def strike_again():
        assert wait_for(lambda: known_pids()[1] not in (None, pids[1]))
        os.kill(known_pids()[1], signal.SIGKILL)

    kill(pids[1])
    with beside(strike_again):
        outcome = within(5, lambda: total(rows).tolist())
    # the second blow falls into the repair, on a call after it, or between that and the fetch
    assert outcome.value == [6.0] * N or isinstance(outcome.error, tp.WorkerDied | tp.ShardLost)
    with contextlib.suppress(tp.WorkerDied):
        total(rows).tolist()
    assert_pool_works()


def test_row_05_the_fork_server_is_killed():
    forks = server.pid
    with survivors(1):
        os.kill(forks, signal.SIGKILL)
        assert wait_for(lambda: not is_running(forks))
        assert_pool_works()
        kill(worker_pids()[1])  # it is noticed, and replaced
        assert within(20, lambda: total(rows).tolist()).value == [6.0] * N
    assert server.pid not in (None, forks)
    tp.shutdown()  # how workers end that have outlived it is not known


def test_values_of_a_dead_worker_are_named_in_the_error():
    value = sharded()
    kill(worker_pids()[2])
    for use in (value.cpu, lambda: value[2], value.block_until_ready, lambda: total(value).cpu()):
        with pytest.raises(tp.ShardLost, match=rf"shard on device {DEVICE}:2 is lost: .*SIGKILL"):
            use()
    assert_pool_works()


def test_row_01_lost_value_used_at_once():
    """Without a call in between that notices: the error must not be about handles or keys."""
    for victim, use in ((1, lambda x: total(x).cpu()), (3, eagerly(lambda x: x))):
        value = sharded()
        os.kill(worker_pids()[victim], signal.SIGKILL)
        with pytest.raises((tp.ShardLost, tp.WorkerDied), match=f"{DEVICE}:{victim}"):
            use(value)
        with pytest.raises(tp.ShardLost, match=f"{DEVICE}:{victim}"):
            value.cpu()
    assert_pool_works()


def test_row_06_one_dies_and_another_raises():
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
    assert any(f"{DEVICE}:1" in note and "exit code 1" in note for note in caught.value.__notes__)
    assert_pool_works()


SLOW_IMPORT = """
import os, sys
if "SLOW" in os.environ:  # the process from which workers are forked
    class Slow:
        def find_spec(self, name, *_):
            if name == "torchpmap._api" and not os.path.exists("go on"):
                open("begun", "w").close()
                while not os.path.exists("go on"):
                    pass
    sys.meta_path.insert(0, Slow())
"""
KILLED = """
import os, signal
os.environ["SLOW"] = "1"  # of the processes to come
import torch, torchpmap as tp
from torchpmap._runtime import current

def wait_for(condition):
    while not condition():
        pass

tp.init(2)
double = tp.pmap(lambda x: x * 2, compile=False)
double(torch.ones(2)).tolist()
pool = current.runtime()._pool
wait_for(lambda: os.path.exists("begun"))
os.kill(pool.workers[0].pid, signal.SIGKILL)
wait_for(lambda: pool._verdict.deaths)
print(pool._verdict.deaths[0].exitcode)
open("go on", "w").close()
"""


def test_an_exit_code_is_known_while_the_fork_server_imports(tmp_path, monkeypatch):
    """The process that reports it has one thread."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_program("-c", KILLED, PYTHONPATH=path)
    assert done.stdout == f"{-signal.SIGKILL}\n"
