"""Covers: _base/errors.py."""

import inspect
import pickle
import sys
import threading
import traceback

import pytest
import torch

import torchpmap as tp
from torchpmap._base import errors
from torchpmap._base.errors import (
    CallTimeout,
    CollectiveMismatch,
    PmapError,
    RemoteTraceback,
    RuntimeClosed,
    ShardLost,
    TraceError,
    WorkerDied,
    WorkerError,
    call_prefix,
    exit_reason,
    pack_exception,
    unpack_exception,
)

WHERE = "on device cpu:2 (rank 2, pid 71) while running step"


def caught(exc: BaseException) -> BaseException:
    """Raise it, so that it has a traceback."""
    try:
        raise exc
    except BaseException as e:
        return e


def send(exc: BaseException, **kwargs) -> BaseException:
    return unpack_exception(pack_exception(caught(exc), **kwargs), where=WHERE)


def remote_text(exc: BaseException) -> str:
    assert type(exc.__cause__) is RemoteTraceback
    return str(exc.__cause__)


# The tree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls",
    [
        *(WorkerError, WorkerDied, ShardLost, RuntimeClosed, TraceError, CollectiveMismatch),
        CallTimeout,
    ],
)
def test_tree(cls):
    assert cls.__bases__ == (PmapError,)
    assert issubclass(cls, RuntimeError)
    exc = cls("text")
    copy = pickle.loads(pickle.dumps(exc))
    assert type(copy) is cls
    assert str(copy) == "text"


def test_tree_in_module_docstring_is_complete():
    classes = {
        name for name, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, PmapError)
    }
    documented = {line.split()[0] for line in errors.__doc__.splitlines() if line[:6] == " " * 6}
    assert classes == documented


def test_worker_died_pickles_with_its_fields():
    exc = pickle.loads(pickle.dumps(WorkerDied(rank=2, exitcode=-11)))
    assert (exc.rank, exc.exitcode) == (2, -11)
    assert str(exc) == "the worker of rank 2 died (SIGSEGV)"
    assert str(WorkerDied()) == "a worker died (unknown exit code)"
    assert str(WorkerDied("both died", rank=0)) == "both died"
    assert [exit_reason(k) for k in (-9, 0, -200)] == ["SIGKILL", "exit code 0", "signal 200"]


def test_call_prefix():
    mapped = call_prefix("pmap", "step", (None, 0), "i")
    assert mapped == "pmap(step, in_axes=(None, 0), axis_name='i')(<inputs>)"
    assert call_prefix("vmap", "<lambda>", 0, None) == "vmap(<lambda>, in_axes=0)(<inputs>)"
    assert len(call_prefix("pmap", "f", ({str(i): 0 for i in range(1000)},), "i")) < 200


# Exceptions that can be rebuilt -------------------------------------------------------------------


class Custom(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.code = 7


class ReadOnly(Exception):
    def __setattr__(self, name, value):
        raise AttributeError("read only")


class Formats(Exception):
    """Unpickling formats the text a second time."""

    def __init__(self, code, extra="none"):
        super().__init__(f"code {code} extra {extra}")


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("boom"),
        KeyError("boom"),
        FileNotFoundError(2, "No such file", "x.txt"),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"),
        ZeroDivisionError(),
        ExceptionGroup("group", [ValueError("a"), TypeError("b")]),
        StopIteration(3),
        CollectiveMismatch("ranks differ"),
        Custom("mine"),
        Formats(3, "x"),
        ReadOnly("boom"),
        torch.OutOfMemoryError("no memory"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_own_type_comes_back(exc):
    copy = send(exc)
    assert type(copy) is type(exc)
    assert str(copy) == str(exc)
    assert copy.args == exc.args or isinstance(exc, ExceptionGroup)
    assert copy.__notes__ == [WHERE]
    assert "in caught" in remote_text(copy)


def test_attributes_come_back():
    assert send(Custom("mine")).code == 7
    assert send(WorkerDied(rank=1, exitcode=3)).rank == 1
    assert send(FileNotFoundError(2, "No such file", "x.txt")).filename == "x.txt"


@pytest.mark.parametrize(("notes", "kept"), [(["mine"], ["mine"]), (3, [])])
def test_notes_come_first_and_once(notes, kept):
    exc = ValueError("boom")
    exc.__notes__ = notes
    copy = send(exc)
    assert str(copy) == "boom"
    assert copy.__notes__ == [*kept, WHERE]


def test_remote_traceback_looks_like_that_of_concurrent_futures():
    exc = ValueError("boom")
    exc.__cause__ = caught(KeyError("inner"))
    exc.add_note("a note")
    copy = send(exc)
    text = remote_text(copy)
    assert text.startswith('\n"""\nTraceback (most recent call last):\n')
    assert text.endswith('ValueError: boom\na note\n"""')
    assert "KeyError: 'inner'" in text
    printed = "".join(traceback.format_exception(copy))
    assert "RemoteTraceback: \n" in printed
    assert printed.index("in caught") < printed.rindex("direct cause of the following exception")
    assert pickle.loads(pickle.dumps(copy.__cause__)).args == copy.__cause__.args
    twice = send(copy)
    assert type(twice) is ValueError
    assert "RemoteTraceback" in remote_text(twice)


def test_class_defined_in_main_is_the_same_class_again(pool, monkeypatch):
    """It travels by value; coming back, it must be the caller's class, not a look-alike."""

    class OfMain(Exception):
        pass

    OfMain.__module__, OfMain.__qualname__ = "__main__", "OfMain"
    monkeypatch.setattr(sys.modules["__main__"], "OfMain", OfMain, raising=False)

    def f(x):
        raise OfMain("boom")

    with pytest.raises(OfMain) as raised:
        tp.pmap(f, compile=False)(torch.ones(4))
    assert type(raised.value) is OfMain
    assert str(raised.value) == "boom"


# Exceptions that cannot ---------------------------------------------------------------------------


class NeedsTwo(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class HoldsLock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class Huge(Exception):
    def __init__(self):
        super().__init__("huge")
        self.data = bytearray(10**6)


class Reduces(Exception):
    """Pickled as it is told."""

    def __init__(self, reduce):
        super().__init__("x")
        self.reduce = reduce

    def __reduce__(self):
        return self.reduce()


class StrSubclass(str):
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


class OddStr(Exception):
    def __str__(self):
        return StrSubclass("odd")


class HoldsMetaTensor(Exception):
    def __init__(self, message="meta"):
        super().__init__(message)
        self.tensor = torch.empty(3, device="meta")


@pytest.mark.parametrize(
    ("exc", "text"),
    [
        (NeedsTwo(1, 2), "tests.NeedsTwo: 1 and 2"),
        (HoldsLock(), "tests.HoldsLock: locked"),
        (Huge(), "tests.Huge: huge"),
        (Reduces(lambda: (sys.exit, (3,))), "tests.Reduces: x"),
        (Reduces(lambda: (ValueError, ("other",))), "tests.Reduces: x"),
        (Reduces(lambda: (print, ())), "tests.Reduces: x"),
        (HoldsMetaTensor(), "tests.HoldsMetaTensor: meta"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), "BaseExceptionGroup: g (1 sub-exception)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_falls_back_to_worker_error(exc, text):
    """Others, from a device: test_row_10_exceptions_that_cannot_travel in faults/."""
    copy = send(exc)
    assert type(copy) is WorkerError
    assert str(copy) == text.replace("tests.", f"{__name__}.")
    assert copy.__notes__ == [WHERE]
    assert "in caught" in remote_text(copy)


def test_text_of_a_str_subclass():
    assert str(send(OddStr())) == "odd"


def test_caller_that_cannot_import_the_class(monkeypatch):
    packed = pack_exception(caught(Custom("mine")))
    monkeypatch.setitem(sys.modules, __name__, None)
    copy = unpack_exception(packed, where="there")
    assert type(copy) is WorkerError
    assert str(copy) == f"{__name__}.Custom: mine"


@pytest.mark.parametrize("message", ["x" * 10**6, "x" * 65537])
def test_text_is_capped(message):
    packed = pack_exception(caught(ValueError(message)))
    assert len(packed) < 4 * 64 * 1024
    copy = unpack_exception(packed, where=WHERE)
    assert type(copy) is WorkerError
    assert str(copy).startswith("ValueError: xxx")
    assert "characters left out" in str(copy)
    assert "Traceback" in remote_text(copy)
    assert type(send(ValueError("x" * 100), limit=50)) is WorkerError
    assert type(send(ValueError("x" * 100), limit=500)) is ValueError


def test_pickling_stops_at_the_limit():
    pickled = []

    class Counted:
        def __reduce__(self):
            pickled.append(self)
            return bytes, (bytes(bytearray(100)),)

    exc = ValueError("many", [Counted() for _ in range(10_000)])
    assert type(send(exc)) is WorkerError
    assert len(pickled) < 5_000
