"""Rows 8 to 12 of the matrix: the mapped function raises.  See docs/faults.md."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest
import torch
from _rig import N, assert_pool_works, eagerly, failure, on_rank, raising, rows, survivors, within
from _support import DEVICE

import torchpmap as tp
from torchpmap._base.config import Config
from torchpmap._base.errors import GroupLost
from torchpmap._runtime.groups.process_groups import Groups

pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_row_08_exception_on_one_rank(place):
    def may_fail(here):
        if int(tp.axis_index("i")) == 1 and place == here:
            raise ValueError("my message")

    def step(x):
        may_fail("before")
        x = tp.psum(x, "i")
        may_fail("between")
        x = tp.all_gather(x, "i").sum()
        may_fail("after")
        return x

    error = failure(step, ValueError, 0.5)
    assert str(error) == "my message"
    assert f"on device {DEVICE}:1 (rank 1, pid" in error.__notes__[0]
    assert 'raise ValueError("my message")' in str(error.__cause__)


class Disconnected(ConnectionResetError): ...


class MyError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


def of_a_class_in_a_function():
    class Local(LookupError):
        pass

    return Local("here")


EXCEPTIONS = [
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
    MyError(7, "seven"),
    of_a_class_in_a_function(),
]


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("raised", EXCEPTIONS, ids=lambda e: f"{type(e).__name__}-{e}")
def test_row_08_every_exception_keeps_its_type(raised, others):
    """No class and no word is taken for a failure of the connection or of a collective."""
    error = failure(on_rank(1, raising(lambda: raised), others), type(raised), 1)
    assert type(error) is type(raised)
    assert str(error) == str(raised)
    assert f"on device {DEVICE}:1" in error.__notes__[0]
    assert "raise make()" in str(error.__cause__)
    if isinstance(raised, MyError):
        assert error.code == 7


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_row_08_what_would_end_the_caller_is_wrapped(kind):
    def step(x):
        raise kind("from there")

    error = failure(step, tp.WorkerError, 1)
    assert f"{kind.__name__}: from there" in str(error)


def test_row_09_different_errors_on_all_ranks():
    def step(x):
        rank = int(tp.axis_index("i"))
        raise [ValueError, KeyError, TypeError, LookupError][rank](f"error of rank {rank}")

    error = failure(step, ValueError, 0.5)
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
    error = failure(on_rank(1, raising(make)), kind, 1, dead=[1] if kind is tp.WorkerDied else [])
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


def fails_on_rank_2(value):
    if int(tp.axis_index("i")) == 2:
        raise ArithmeticError("on the way back")
    return tp.psum(value, "i")


UNDER = {
    "backward": in_backward,
    "vmap": lambda x: torch.func.vmap(fails_on_rank_2)(x.expand(3)),
    "grad": lambda x: tp.grad(fails_on_rank_2)(x),
}


@pytest.mark.parametrize("function", UNDER.values(), ids=UNDER)
def test_row_11_error_under_a_transform(function):
    error = failure(function, ArithmeticError, 1)
    assert 'raise ArithmeticError("on the way back")' in str(error.__cause__)


def test_row_12_swallowed_communication_error():
    """A call does not go on with a wrong value after a rank caught another rank's failure."""

    def step(x):
        if int(tp.axis_index("i")) == 0:
            raise ValueError("cause")
        for _ in range(2):
            with contextlib.suppress(Exception):
                x = tp.psum(x, "i")
        return x

    error = failure(step, ValueError, 1)
    assert str(error) == "cause"


def test_row_12_a_healthy_rank_lives_through_the_failure_of_another():
    """It is busy with the failed call when that fails: it stops, and keeps what it holds."""

    def step(x):
        if int(tp.axis_index("i")) == 0:
            raise ValueError("cause")
        while True:
            pass

    failure(step, ValueError, 4)


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
