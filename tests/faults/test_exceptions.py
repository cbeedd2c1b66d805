"""Rows 8 to 12 of the matrix: the mapped function raises.  See docs/faults.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import pytest
import torch
from _rig import (
    EAGER,
    N,
    assert_pool_works,
    eagerly,
    on_rank,
    raising,
    rows,
    sharded,
    survivors,
    within,
)
from _support import DEVICE, LAGS

import torchpmap as tp
from torchpmap._base.config import Config
from torchpmap._base.errors import GroupLost
from torchpmap._runtime.groups.process_groups import Groups

pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_row_08_exception_on_one_rank(place):
    def step(x):
        fails = int(tp.axis_index("i")) == 1
        if fails and place == "before":
            raise ValueError("my message")
        x = tp.psum(x, "i")
        if fails and place == "between":
            raise ValueError("my message")
        x = tp.all_gather(x, "i").sum()
        if fails and place == "after":
            raise ValueError("my message")
        return x

    with survivors():
        error = within(0.5, lambda: eagerly(step)(rows)).error
        assert isinstance(error, ValueError)
        assert str(error) == "my message"
        assert f"on device {DEVICE}:1 (rank 1, pid" in error.__notes__[0]
        assert 'raise ValueError("my message")' in str(error.__cause__)


class Disconnected(ConnectionResetError): ...


OF_STREAMS_AND_CONTROL = [
    EOFError("Ran out of input"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError(104, "Connection reset by peer"),
    ConnectionAbortedError("aborted"),
    Disconnected("mine"),
    StopIteration("no more"),
    StopAsyncIteration("no more"),
    TimeoutError("timed out"),
    InterruptedError("interrupted"),
    MemoryError("no memory"),
    RecursionError("too deep"),
    AssertionError("no"),
    UserWarning("careful"),
    ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    RuntimeError("Connection closed by the database"),
    RuntimeError("cannot read NCCL tuning table: timed out"),
    RuntimeError("no process group named 7 in /etc/group"),
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc] Connection closed by peer"),
    torch.distributed.DistBackendError("of mine"),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("raised", OF_STREAMS_AND_CONTROL, ids=lambda e: f"{type(e).__name__}-{e}")
def test_row_08_every_exception_keeps_its_type(raised, others):
    """No class and no word is taken for a failure of the connection or of a collective."""
    with survivors():
        step = on_rank(1, raising(lambda: raised), others)
        error = within(1, lambda: eagerly(step)(rows)).error
        assert type(error) is type(raised)
        assert str(error) == str(raised)
        assert f"on device {DEVICE}:1" in error.__notes__[0]
        assert "raise make()" in str(error.__cause__)


class MyError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


def test_row_08_exceptions_keep_what_they_hold():
    with survivors():
        step = on_rank(1, raising(lambda: MyError(7, "seven")))
        error = within(1, lambda: eagerly(step)(rows)).error
        assert isinstance(error, MyError)
        assert error.code == 7


def test_row_08_class_defined_in_a_function():
    class Local(LookupError):
        pass

    def step(x):
        raise Local("here")

    with survivors():
        error = within(1, lambda: eagerly(step)(rows)).error
        assert isinstance(error, Local)
        assert str(error) == "here"


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_row_08_what_would_end_the_caller_is_wrapped(kind):
    def step(x):
        raise kind("from there")

    with survivors():
        error = within(1, lambda: eagerly(step)(rows)).error
        assert isinstance(error, tp.WorkerError)
        assert f"{kind.__name__}: from there" in str(error)


def test_row_09_different_errors_on_all_ranks():
    def step(x):
        rank = int(tp.axis_index("i"))
        raise [ValueError, KeyError, TypeError, LookupError][rank](f"error of rank {rank}")

    with survivors():
        error = within(0.5, lambda: eagerly(step)(rows)).error
        assert isinstance(error, ValueError)
        assert "error of rank 0" in str(error)
        notes = "\n".join(error.__notes__)
        assert all(f"error of rank {rank}" in notes for rank in (1, 2, 3))


class HoldsALock(OSError):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class TwoArguments(Exception):
    def __init__(self, value, limit):
        super().__init__(f"{value} is above {limit}")


class Huge(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.payload = bytes(100 << 20)


class Unpicklable(Exception):
    def __reduce__(self):
        raise ValueError("not to be pickled")


class Exits(Exception):
    def __reduce__(self):
        raise SystemExit(9)


class BadOverThere(Exception):
    def __reduce__(self):
        return os.abort, ()


class NotRebuilt(Exception):
    def __setstate__(self, state):
        raise KeyError(state)

    def __reduce__(self):
        return type(self), self.args, {"a": 1}


HOSTILE = {
    "holds a lock": (lambda: HoldsALock("mine"), tp.WorkerError, "mine"),
    "no text": (lambda: NoText("mine"), tp.WorkerError, "NoText"),
    "two arguments": (lambda: TwoArguments(3, 2), tp.WorkerError, "3 is above 2"),
    "100 MB": (lambda: Huge("mine"), tp.WorkerError, "mine"),
    "long text": (lambda: ValueError("x" * 10_000_000), tp.WorkerError, "characters left out"),
    "cannot be pickled": (lambda: Unpicklable("mine"), tp.WorkerError, "mine"),
    "exits while it is pickled": (lambda: Exits("mine"), tp.WorkerError, "mine"),
    "cannot be rebuilt": (lambda: NotRebuilt("mine"), tp.WorkerError, "mine"),
    "aborts while it is rebuilt": (lambda: BadOverThere("mine"), tp.WorkerDied, "SIGABRT"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_row_10_exceptions_that_cannot_travel(name):
    make, kind, text = HOSTILE[name]
    with survivors(*([1] if kind is tp.WorkerDied else [])):
        error = within(1, lambda: eagerly(on_rank(1, raising(make)))(rows)).error
        assert isinstance(error, kind), error
        assert text in str(error)
        assert len(str(error)) < 200_000


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on the way back")


def in_backward(x):
    x = x.detach().requires_grad_()
    y = tp.psum(x, "i")
    if int(tp.axis_index("i")) == 2:
        y = FailsBackward.apply(y)
    tp.psum(y, "i").backward()
    return x.grad


def under_vmap(x):
    def lane(value):
        if int(tp.axis_index("i")) == 2:
            raise ArithmeticError("on the way back")
        return tp.psum(value, "i")

    return torch.func.vmap(lane)(x.expand(3))


def under_grad(x):
    def loss(value):
        if int(tp.axis_index("i")) == 2:
            raise ArithmeticError("on the way back")
        return tp.psum(value, "i")

    return tp.grad(loss)(x)


@pytest.mark.parametrize(
    "function", [in_backward, under_vmap, under_grad], ids=lambda f: f.__name__
)
def test_row_11_error_under_a_transform(function):
    with survivors():
        error = within(1, lambda: eagerly(function)(rows)).error
        assert isinstance(error, ArithmeticError)
        assert 'raise ArithmeticError("on the way back")' in str(error.__cause__)


@pytest.mark.skipif(LAGS, reason="an index out of range ends the worker: test_lagging.py")
def test_row_11_error_in_a_compiled_call():
    pick = tp.pmap(lambda x, k: tp.psum(torch.index_select(x, 0, k), "i"), "i", compile=EAGER)
    table = torch.arange(20.0).reshape(N, 5)
    with survivors():
        error = within(1, lambda: pick(table, torch.tensor([[0], [1], [99], [2]])).cpu()).error
        assert isinstance(error, IndexError)
        assert f"on device {DEVICE}:2 (rank 2" in error.__notes__[0]


def test_row_12_swallowed_communication_error():
    """A call does not go on with a wrong value after a rank caught another rank's failure."""

    def step(x):
        if int(tp.axis_index("i")) == 0:
            raise ValueError("cause")
        for _ in range(2):
            with contextlib.suppress(Exception):
                x = tp.psum(x, "i")
        return x

    with survivors():
        error = within(1, lambda: eagerly(step)(rows)).error
        assert isinstance(error, ValueError)
        assert str(error) == "cause"


def test_row_12_a_healthy_rank_lives_through_the_failure_of_another():
    """It is busy with the failed call when that fails: it stops, and keeps what it holds."""
    value = sharded()

    def step(x):
        if int(tp.axis_index("i")) == 0:
            raise ValueError("cause")
        while True:
            pass

    with survivors():
        error = within(4, lambda: eagerly(step)(rows)).error
        assert isinstance(error, ValueError)
        assert value.tolist() == [0, 10, 20, 30]


def test_row_12_a_forked_child_makes_no_group():
    """It would wait for the other members, and outlive the pool."""
    groups = Groups(0, torch.device("cpu"), torch.distributed.HashStore(), Config(timeout=1.0))
    groups.forsake()
    with pytest.raises(GroupLost, match="this process was forked"):
        groups.ensure("pair", ((0, 1),))


def test_connecting_the_devices_ends_in_time(monkeypatch):
    """NCCL waits without end for a rank that has died meanwhile."""
    settings = Config(timeout=0.1, shared_memory=False)
    groups = Groups(0, torch.device("cpu"), torch.distributed.HashStore(), settings)
    connected = threading.Event()
    monkeypatch.setattr(groups, "_make", lambda *_: connected.wait())
    with pytest.raises(GroupLost, match="not all were connected within"):
        groups.ensure("alone", ((0,),))
    connected.set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("end", ["returns", "raises", "is killed", "uses a collective"])
def test_row_12_a_child_that_comes_back_from_the_function(end):
    """A copy of a worker must not read its commands."""

    def step(x):
        if int(tp.axis_index("i")) == 1 and os.fork() == 0:
            if end == "raises":
                raise ValueError("in the child")
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "uses a collective":
                return tp.psum(x, "i")
        return tp.psum(x, "i")

    with survivors():
        assert within(2, lambda: eagerly(step)(rows).tolist()).value == [6.0] * N
        for k in range(20):
            assert eagerly(lambda x: tp.psum(x, "i"))(rows + k).tolist() == [6.0 + N * k] * N
    assert_pool_works()
