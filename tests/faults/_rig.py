"""What the tests of faults share: a pool, ways to break it, and a look at what is left."""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from _support import (
    DEVICE,
    EAGER,
    SCALE,
    eagerly,
    gated,
    running_pool,
    wait_for,
    worker_pids,
)

import torchpmap as tp

N = 4
rows = torch.arange(float(N))
total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
quarter = tp.pmap(lambda x: tp.psum(x, "i") / 4, "i", compile=EAGER)


def endless_loop() -> None:
    while True:
        pass


def long_sleep() -> None:
    time.sleep(1e6)


def loop_of_c() -> None:
    sum(itertools.repeat(0))


def on_rank(
    rank: int, act: Callable[[], object], others: str = "others wait"
) -> Callable[[Any], Any]:
    """A function that acts on one rank; the others wait for it, or each ends "alone"."""

    def step(x: Any) -> Any:
        if int(tp.axis_index("i")) == rank:
            act()
        return x if others == "alone" else tp.psum(x, "i")

    return step


def raising(make: Callable[[], BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise make()

    return act


class Canary:
    """Unpickling it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def sharded() -> tp.ShardedTensor:
    """A value that lives on all devices, computed."""
    return tp.pmap(lambda x: x * 10, compile=EAGER)(rows).block_until_ready()


def assert_pool_works() -> None:
    assert total(rows).tolist() == [6.0] * N
    assert eagerly(lambda x: tp.pmax(x, "i"))(rows).tolist() == [3.0] * N


@contextlib.contextmanager
def survivors(*dead: int) -> Iterator[None]:
    """Of the values on ``dead`` ranks the block costs those shards, of the others nothing."""
    value, pids = sharded(), worker_pids()
    yield
    assert_pool_works()
    alive = [rank for rank in range(N) if rank not in dead]
    assert [value.addressable_data(rank).item() for rank in alive] == [10.0 * k for k in alive]
    now = worker_pids()
    assert [rank for rank in range(N) if now[rank] == pids[rank]] == alive
    for rank in dead:
        with pytest.raises(tp.ShardLost, match=f"{DEVICE}:{rank}"):
            value.addressable_data(rank)


def failure(
    step: Callable[[Any], Any],
    kind: type[BaseException],
    seconds: float,
    dead: Iterable[int] = (),
    **options: Any,
) -> Any:
    """What an uncompiled call raises in time, which is of this kind and costs ``dead`` only."""
    with survivors(*dead):
        error = within(seconds, lambda: eagerly(step, **options)(rows)).error
        assert isinstance(error, kind), error
    return error


def note_time(seconds: float, bound: float) -> None:
    """For ``report.py``: how long the row that runs now took, of how much."""
    path = os.environ.get("TORCHPMAP_FAULT_TIMES")
    if path:
        row = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]
        with open(path, "a") as file:
            file.write(json.dumps({"row": row, "seconds": seconds, "bound": bound}) + "\n")


class Hung(Exception):
    """A call did not end in time."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended, and after how long."""

    value: Any
    error: BaseException | None
    seconds: float


_HANG_S = 20.0
"""What a busy machine may add to a bound; ``report.py`` tells what a call took."""


def within(seconds: float, function: Callable[[], Any]) -> Outcome:
    """Call in a thread; a call that hangs is a failure, and ends with its pool."""
    limit = seconds * SCALE + _HANG_S
    ended: list[Outcome] = []

    def run() -> None:
        start = time.perf_counter()
        value = error = None
        try:
            value = function()
        except BaseException as raised:
            error = raised
        ended.append(Outcome(value, error, time.perf_counter() - start))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    if not ended:
        stacks = sys._current_frames()
        tp.shutdown()
        raise Hung(f"no answer after {limit:.0f} s: {stacks.get(thread.ident)}")
    thread.join()
    note_time(ended[0].seconds, seconds)
    return ended[0]


@contextlib.contextmanager
def busy(
    gate: Path, ranks: Container[int] = range(N), error: Exception | None = None
) -> Iterator[threading.Thread]:
    """``ranks`` do nothing until there is a file ``gate``; then all raise ``error``, if any.

    Yields the thread that called them; calls made meanwhile stand behind this one.
    """

    def wait(x: Any) -> Any:
        x = gated(gate, ranks)(x)
        if error is not None:
            raise error
        return x

    def call() -> None:
        raises = pytest.raises(type(error), match=str(error)) if error else contextlib.nullcontext()
        with raises:
            eagerly(wait)(rows)

    for f in (total, quarter):
        f(rows).block_until_ready()  # compiled: that would wait at the gate too
    thread = threading.Thread(target=call)
    thread.start()
    assert wait_for(lambda: running_pool().monitor.pending)
    try:
        yield thread
    finally:
        gate.touch()
        thread.join()


def press() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def until_interrupted(
    presser: Callable[[threading.Event], None], function: Callable[[], Any]
) -> None:
    """Call ``function`` in the main thread until a Ctrl-C of ``presser``, which runs beside it.

    ``presser`` presses until its argument is set: Python drops a Ctrl-C that falls into a
    finalizer.  One that comes after the calls have ended is ignored.
    """
    over = threading.Event()
    thread = threading.Thread(target=presser, args=(over,))

    def call() -> None:
        thread.start()
        while True:
            function()

    def handle(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is call.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGINT, handle)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def interrupted_after(seconds: float, function: Callable[[], Any]) -> None:
    """Call ``function`` again and again, until Ctrl-C interrupts this thread, the main one."""

    def presser(over: threading.Event) -> None:
        pause = seconds
        while not over.wait(pause):
            press()
            pause = 0.5

    until_interrupted(presser, function)
