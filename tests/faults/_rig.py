"""What the tests of faults share: a pool, ways to break it, and a look at what is left."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _leftovers import MARK, marked
from _support import DEVICE, EAGER, SCALE, eagerly, known_pids, running_pool, wait_for, worker_pids

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


def kill(pid: int) -> None:
    """End a worker and wait until the controller knows it."""
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)


@contextlib.contextmanager
def survivors(*dead: int) -> Iterator[None]:
    """Of the values on ``dead`` ranks the block costs those shards, of the others nothing."""
    value, pids = sharded(), worker_pids()
    yield
    assert_pool_works()
    alive = [rank for rank in range(N) if rank not in dead]
    assert [value[rank].item() for rank in alive] == [10.0 * rank for rank in alive]
    now = worker_pids()
    assert [rank for rank in range(N) if now[rank] == pids[rank]] == alive
    for rank in dead:
        with pytest.raises(tp.ShardLost, match=f"{DEVICE}:{rank}"):
            value[rank].item()


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
    gate: Path, ranks: Iterable[int] = range(N), error: Exception | None = None
) -> Iterator[threading.Thread]:
    """``ranks`` do nothing until there is a file ``gate``; then all raise ``error``, if any.

    Yields the thread that called them; calls made meanwhile stand behind this one.
    """

    def wait(x: Any) -> Any:
        while not gate.exists() and int(tp.axis_index("i")) in ranks:
            pass
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
    assert wait_for(lambda: running_pool()._monitor.pending)
    try:
        yield thread
    finally:
        gate.touch()
        thread.join()


# -- programs of their own -------------------------------------------------------------------------

_HEAD = """
import os, signal, sys, threading, time
import torch, torchpmap as tp
EAGER = {"backend": "eager"}
def pids():
    ask = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)
    return ask(torch.zeros(tp.device_count())).tolist()
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it left running."""

    code: int | None
    """As of ``subprocess``: negative for a signal; None if the program hung and was killed."""
    output: str
    left: list[str]
    """Command lines of its processes that still run."""
    folders: list[str]
    """What it made in the folder for temporary files."""
    seconds: float
    """After which nothing was left, or all patience."""


class Script:
    """A controller of its own, in a session of its own; ``pids()`` asks for its workers."""

    def __init__(self, *parts: str) -> None:
        self._mark = str(uuid.uuid4())
        self._folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [sys.executable, "-c", "\n".join([_HEAD, *map(textwrap.dedent, parts)])],
            env={
                **os.environ,
                "TORCHPMAP_WARM": "0",
                "TMPDIR": self._folder.name,
                MARK: self._mark,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, seconds: float = 30.0, *, patience: float = 2.0) -> Ended:
        """Wait for its end; what is still there ``patience`` seconds later is left behind."""
        code: int | None
        try:
            output, _ = self.process.communicate(timeout=seconds * SCALE)
            code = self.process.returncode
        except subprocess.TimeoutExpired:
            self._end()
            output, _ = self.process.communicate()
            code = None
        over = time.monotonic()
        wait_for(lambda: not self._alive() and not self._folders(), patience)
        seconds = time.monotonic() - over
        folders = self._folders()
        left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in self._alive()]
        self._end()
        self._folder.cleanup()
        return Ended(code, output, left, folders, seconds)

    def _alive(self) -> list[int]:
        """Processes of this program, also orphans."""
        return marked(self._mark)

    def _folders(self) -> list[str]:
        """But for the compiler's cache, which is to stay."""
        found = os.listdir(self._folder.name)
        return [name for name in found if not name.startswith("torchinductor")]

    def _end(self) -> None:
        for pid in self._alive():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def new_pids(old: list[int]) -> list[int]:
    """Workers of the present pool that are not among ``old``."""
    return [pid for pid in known_pids() if pid is not None and pid not in old]
