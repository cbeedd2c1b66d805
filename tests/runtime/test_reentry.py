"""Covers: _runtime/local/reentry.py: calls and dropped values of signal handlers and finalizers."""

import contextlib
import gc
import os
import signal
import threading
import weakref

import pytest
import torch
from _support import EAGER, beside, running_pool, wait_for, worker_pids

import torchpmap as tp
from torchpmap._sharded import operations

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)
REFUSED = "sends another call, and would wait for itself"

add = tp.pmap(lambda x: x + 1, compile=EAGER)
total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
eagerly = tp.pmap(lambda x: x + 2, compile=False)


class Cyclic:
    """Calls ``then`` when it is collected, in the thread that collects it."""

    def __init__(self, then):
        self.me = self
        self.then = then

    def __del__(self):
        self.then()


def by_signal(then):
    signal.signal(signal.SIGUSR1, lambda *_: then())
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)


def by_collection(then):
    Cyclic(then)
    gc.collect()


def by_finalizer(then):
    weakref.finalize(type("Dropped", (), {})(), then)


INTERRUPTIONS = {"signal": by_signal, "__del__": by_collection, "finalize": by_finalizer}


@pytest.fixture(params=INTERRUPTIONS)
def while_sending(request, monkeypatch):
    """Runs a call, and something else in the middle of the sending of its first message."""
    before = signal.getsignal(signal.SIGUSR1)
    gc.collect()

    def run(call, then):
        outbox = running_pool().outbox
        post, remaining, caller = outbox.post, [then], threading.get_ident()

        def interrupted(*args):
            while remaining and threading.get_ident() == caller:  # the monitor frees values
                INTERRUPTIONS[request.param](remaining.pop())
            return post(*args)

        monkeypatch.setattr(outbox, "post", interrupted)
        result = call()
        monkeypatch.setattr(outbox, "post", post)
        assert not remaining
        return result

    yield run
    signal.signal(signal.SIGUSR1, before)


CALLS = {
    "a call": lambda: add(X),
    "a call that is waited for": lambda: add(X).tolist(),
    "an uncompiled call": lambda: eagerly(X),
    "an operation": lambda: VALUES[0] * 2,
    "another operation": lambda: VALUES[0].sum().item(),
    "putting": lambda: tp.device_put(X, tp.devices()[:4]),
    "fetching": lambda: VALUES[0].cpu(),
}
VALUES = []


@pytest.fixture(autouse=True)
def values(pool):
    VALUES[:] = [add(X).block_until_ready(), add(X)]
    eagerly(X), VALUES[0] * 2, VALUES[0].sum()
    yield
    VALUES.clear()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_the_middle_of_one_is_refused(name, while_sending):
    errors = []

    def then():
        try:
            CALLS[name]()
        except RuntimeError as error:
            errors.append(str(error))

    assert while_sending(lambda: total(X), then).tolist() == [6.0] * 4
    assert len(errors) == 1
    assert REFUSED in errors[0]
    assert total(X).tolist() == [6.0] * 4


def test_an_operation_in_the_middle_of_a_call_waits_for_no_other_that_is_prepared(while_sending):
    refused, is_over = [], threading.Event()

    def prepare():
        with operations._lock:
            is_over.wait()

    def then():
        with pytest.raises(RuntimeError) as caught:
            VALUES[0].cumprod(0)  # the first one of the test
        refused.append(str(caught.value))

    with beside(prepare):
        try:
            assert while_sending(lambda: total(X), then).tolist() == [6.0] * 4
        finally:
            is_over.set()
    assert REFUSED in refused[0]


def test_values_and_functions_dropped_in_the_middle_of_a_call(while_sending):
    functions = [tp.pmap(lambda x: x * 3, compile=EAGER)]
    functions[0](X).tolist()
    for dropped in (VALUES, functions):
        assert while_sending(lambda: total(X), dropped.clear).tolist() == [6.0] * 4
    assert add(X).tolist() == [1, 2, 3, 4]


def test_shutdown_in_the_middle_of_a_call(while_sending):
    with contextlib.suppress(tp.RuntimeClosed):
        while_sending(lambda: total(X).tolist(), tp.shutdown)
    tp.init(num_devices=4)
    assert total(X).tolist() == [6.0] * 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_raises_is_the_caller_s(while_sending):
    def then():
        raise LookupError("in the handler")

    with contextlib.suppress(LookupError):  # a finalizer's is printed
        while_sending(lambda: total(X), then)
    assert total(X).tolist() == [6.0] * 4


def test_calls_of_a_timer_between_calls():
    """Wherever it strikes, both go on: the handler's call is made, or refused."""
    made, refused, is_over = [], [], False
    add(VALUES[0])  # traced before: a call of the handler in the middle of a trace is a part of it
    total(X)

    def handler(*_):
        try:
            made.append(add(VALUES[0]))
        except RuntimeError as error:
            refused.append(str(error))
        # not at fixed times, or handlers interrupt handlers without end on a slow machine
        signal.setitimer(signal.ITIMER_REAL, 0 if is_over else 0.0007)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        value = VALUES[0]
        for _ in range(3000):
            value = add(value)
        waited = [total(X).tolist() for _ in range(200)]
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert value.tolist() == (X + 3001).tolist()
    assert waited == [[6.0] * 4] * 200
    assert made
    assert all(REFUSED in text for text in refused)
    assert all(each.tolist() == (X + 2).tolist() for each in made)


@pytest.mark.parametrize("use", [lambda x: x.cpu(), lambda x: add(x).cpu()], ids=["fetch", "call"])
def test_a_value_that_was_collected_before_the_finalizer_that_uses_it(use):
    """Python calls the finalizers of a cycle in any order; CPython begins with the oldest."""
    said = []

    def drop(value):
        def then():
            with pytest.raises(tp.ShardLost) as caught:
                use(value)
            said.append(str(caught.value))

        Cyclic(then)

    drop(add(X))
    gc.collect()
    (text,) = said
    assert "Python had collected it, with a cycle of objects" in text
    assert add(X).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "call", [lambda: add(X).tolist(), lambda: VALUES[0].cpu(), lambda: eagerly(X)]
)
def test_a_thread_of_the_pool_s_own_does_not_wait(call):
    """... for what only itself could bring."""
    said = []

    def then():
        try:
            said.append(call())
        except RuntimeError as error:
            said.append(str(error))

    monitor = running_pool().monitor
    monitor.soon(lambda: by_collection(then))
    assert wait_for(lambda: said)
    assert "in one of torchpmap's own threads" in said[0]
    assert total(X).tolist() == [6.0] * 4


def test_a_call_while_another_begins_a_repair(monkeypatch):
    errors = []
    start = threading.Thread.start

    def interrupted(thread):
        if thread.name == "torchpmap-repair" and not errors:
            try:
                add(X)
            except RuntimeError as error:
                errors.append(str(error))
        start(thread)

    os.kill(worker_pids(4)[0], signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert total(X).tolist() == [6.0] * 4
    assert len(errors) == 1
    assert REFUSED in errors[0]
