"""Rows 8 to 12 of the matrix: the mapped function raises.  See docs/faults.md."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest
import torch
from _rig import N, eagerly, failure, on_rank, raising, rows, survivors, within
from _support import DEVICE, stat, wait_for, worker_pids

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


def chained(cause):
    error = ValueError("effect")
    error.__cause__ = cause
    return error


def circular():
    error = ValueError("circular")
    error.__context__ = chained(error)
    return error


PLAIN = [
    EOFError("Ran out of input"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionResetError(104, "Connection reset by peer"),
    Disconnected("mine"),
    TimeoutError("timed out"),
    RuntimeError("Connection closed by the database"),
    RuntimeError("cannot read NCCL tuning table: timed out"),
    RuntimeError("no process group named 7 in /etc/group"),
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc] Connection closed by peer"),
    torch.distributed.DistBackendError("of mine"),
    torch.distributed.DistError("of a group of the user's own"),
    tp.CallTimeout("mine"),
    tp.CollectiveMismatch("mine"),
    MyError(7, "seven"),
    of_a_class_in_a_function(),
]
KEPT = [
    *(lambda error=error: error for error in PLAIN),
    circular,
    lambda: chained(ConnectionError("first")),
    lambda: chained(RuntimeError("process group: another process has ended")),
]


@pytest.mark.parametrize("others", ["alone", "others wait"])
@pytest.mark.parametrize("make", KEPT, ids=lambda make: f"{type(make()).__name__}-{make()}")
def test_row_08_every_exception_keeps_its_type(make, others):
    """No class and no word is taken for a failure of the connection or of a collective.

    Every exception of Python's: base/test_tracebacks.py.
    """
    raised = make()
    error = failure(on_rank(1, raising(make), others), type(raised), 1)
    assert type(error) is type(raised)
    assert str(error) == str(raised)
    assert f"on device {DEVICE}:1" in error.__notes__[0]
    assert "raise make()" in str(error.__cause__)
    if isinstance(raised, MyError):
        assert error.code == 7


def test_row_09_different_errors_on_all_ranks():
    def step(x):
        rank = int(tp.axis_index("i"))
        raise [ValueError, KeyError, TypeError, LookupError][rank](f"error of rank {rank}")

    error = failure(step, ValueError, 0.5)
    assert "error of rank 0" in str(error)
    notes = "\n".join(error.__notes__)
    assert all(f"error of rank {rank}" in notes for rank in (1, 2, 3))


class BadOverThere(Exception):
    def __reduce__(self):
        return os.abort, ()


class NotRebuilt(Exception):
    def __setstate__(self, state):
        raise KeyError(state)

    def __reduce__(self):
        return type(self), self.args, {"a": 1}


def evil(kind):
    """An exception of a class that is made here, so that nothing of it was shipped."""

    def fail(*_):
        raise SystemExit("evil")

    bad = property(fail)
    members = {
        "class": {"__class__": bad},
        "cause": {"__cause__": bad},
        "notes": {"__notes__": bad},
        "text": {"__str__": fail},
        "pickle": {"__reduce__": fail},
        "attributes": {"__getattribute__": fail},
    }
    if kind == "metaclass":
        return type("Meta", (type,), {"__module__": bad})("Evil", (Exception,), {})("text")
    return type("Evil", (Exception,), members[kind])("text")


HOSTILE = {
    "CancelledError": (
        lambda: asyncio.CancelledError("mine"), "asyncio.exceptions.CancelledError: mine"),
    "cannot be rebuilt": (lambda: NotRebuilt("mine"), "mine"),
    "aborts while it is rebuilt": (lambda: BadOverThere("mine"), "SIGABRT"),
    "evil class": (lambda: evil("class"), "Evil: text"),
    "evil cause": (lambda: evil("cause"), "Evil: text"),
    "evil notes": (lambda: evil("notes"), "Evil: text"),
    "evil text": (lambda: evil("text"), "Evil: <exception str() failed>"),
    "evil pickle": (lambda: evil("pickle"), "Evil: text"),
    "evil attributes": (lambda: evil("attributes"), "Evil: text"),
    "evil metaclass": (lambda: evil("metaclass"), "an exception: text"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_row_10_exceptions_that_cannot_travel(name):
    """What would end the caller's program, or cannot be rebuilt, travels as text."""
    make, text = HOSTILE[name]
    kind, dead = (tp.WorkerDied, [1]) if text == "SIGABRT" else (tp.WorkerError, [])
    error = failure(on_rank(1, raising(make)), kind, 1, dead=dead)
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


def test_row_12_a_forked_child_makes_no_group():
    """It would wait for the other members, and outlive the pool."""
    groups = Groups(0, torch.device("cpu"), torch.distributed.HashStore(), Config(timeout=1.0))
    groups.in_forked_child()
    with pytest.raises(GroupLost, match="this process was forked"):
        groups.ensure("pair", ((0, 1),))


def test_connecting_the_devices_ends_in_time(monkeypatch):
    """NCCL waits without end for a rank that has died meanwhile."""
    settings = Config(timeout=0.1, shared_memory=False)
    groups = Groups(0, torch.device("cpu"), torch.distributed.HashStore(), settings)
    connected = threading.Event()
    monkeypatch.setattr(groups, "_make", lambda *_: connected.wait())
    with pytest.raises(GroupLost, match="not all came, and were connected, within"):
        groups.ensure("alone", ((0,),))
    connected.set()


def children_of_workers():
    """How many processes of each worker have not ended."""
    found = filter(None, [stat(pid) for pid in os.listdir("/proc") if pid.isdigit()])
    parents = [parent for state, parent, _ in found if state not in "ZX"]
    return [parents.count(pid) for pid in worker_pids()]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("end", ["returns", "raises", "is killed", "uses a collective"])
def test_row_12_a_child_that_comes_back_from_the_function(end):
    """A copy of a worker must not read its commands, and ends."""

    def step(x):
        if os.fork() == 0:
            if end == "raises":
                raise ValueError("in the child")
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "uses a collective":
                return tp.psum(1000 * x, "i")
            return x
        return tp.psum(x, "i")

    before = children_of_workers()
    with survivors():
        for _ in range(3):
            assert within(2, lambda: eagerly(step)(rows).tolist()).value == [6.0] * N
        for k in range(20):
            assert eagerly(lambda x: tp.psum(x, "i"))(rows + k).tolist() == [6.0 + N * k] * N
    assert wait_for(lambda: children_of_workers() == before)
