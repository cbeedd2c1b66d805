"""``trace``: where the time of a program goes, on all devices and in the controller."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.data import not_ours, packed, unpacked
from torchpmap._base.devices import Device
from torchpmap._base.torch_internals import is_profiled
from torchpmap._runtime import inline_mode, wire
from torchpmap._runtime.base import Runtime
from torchpmap._runtime.current import (
    devices,
    is_launched,
    job_runtime,
    local_devices,
    process_index,
    refuse_inside,
    runtime,
)
from torchpmap._runtime.everywhere import ask_devices
from torchpmap._runtime.task import Handler, Rank
from torchpmap.profiler._file import Event, events_of, moved, write
from torchpmap.profiler._record import Recorded, Recorder
from torchpmap.profiler._watch import watching

_WHAT = "torchpmap.profiler.trace"
_running = threading.Lock()
"""Held while a trace is taken."""
_MEETINGS = 3
_MOST_BYTES = 1 << 31
"""Of the record of another process."""


@contextmanager
def trace(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Record what the ``with`` block does on every device and in the controller, in one file.

    The file is JSON, for https://ui.perfetto.dev or ``chrome://tracing``.  It shows a process for
    the controller (its calls, tracing, compiling, sending and waiting) and one for each device
    (calls, operations of torch, kernels); collectives have names such as "all_reduce over i,
    40 kB".  Clocks agree within some microseconds.  Recording slows the block; without a trace
    nothing is slower.

    At the end of the block all earlier calls are waited for.  The file is also written if the block
    raises.  If a worker dies in the block, its track says that its record is lost.

    Under a launcher all processes must enter and leave the block, and process 0 writes the file.  A
    process whose block raises does not wait for the others: it writes a file of its own.

    Args:
        folder: where to write; it is made if need be.  Files that are there stay.

    Returns:
        A context manager that gives the path of the file.

    Raises:
        RuntimeError: a trace, or ``torch.profiler``, is recording already; or it was called inside
            a mapped function.

    Example:
        >>> import json, tempfile, torch, torchpmap as tp
        >>> step = tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i")
        >>> with tp.profiler.trace(tempfile.mkdtemp()) as path:
        ...     y = step(torch.ones(4, 1000))
        >>> names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        >>> sorted(name for name in names if " over " in name)
        ['all_reduce over i, 4 kB']

    Source: ``jax.profiler.trace``; checked in tests/profiler/test_profiler.py.
    """
    refuse_inside("profiler.trace")
    if not _running.acquire(blocking=False):
        raise RuntimeError(
            "profiler.trace: a trace is being recorded already, and there can be one at a time. "
            "End its block first."
        )
    try:
        taken = _Launched(folder) if _has_several_processes() else _Here(folder)
        with taken.recorded():
            yield taken.path
    finally:
        _running.release()


def _has_several_processes() -> bool:
    return not inline_mode.active() and is_launched()


def _new_path(folder: str | os.PathLike[str]) -> Path:
    """A path that is not in use."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path, number = Path(folder, "trace.json"), 1
    while path.exists():
        number += 1
        path = Path(folder, f"trace-{number}.json")
    return path


def _started(device: torch.device) -> Recorder:
    if is_profiled():
        raise RuntimeError(
            "profiler.trace: torch.profiler is recording this thread already, and there can be one "
            "profiler at a time. End it first: a trace has what it records, too."
        )
    recorder = Recorder(device)
    recorder.start()
    return recorder


def _about() -> dict[str, Any]:
    return {"torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M:%S")}


class _Here:
    """A trace by the only controller."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = _new_path(folder)
        self._start_ns = time.time_ns()
        self._devices = [] if inline_mode.active() else local_devices()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        running = runtime() if self._devices else None
        recorder = _started(torch.device("cpu"))
        try:
            if running is not None:
                ask_devices(_WHAT, _Start())
            with watching(recorder, running):
                yield
        except BaseException:
            self._end(recorder, running)
            raise
        self._end(recorder, running)

    def _end(self, recorder: Recorder, running: Runtime | None) -> None:
        theirs: dict[Device, Recorded | None] = dict.fromkeys(self._devices)
        try:
            if running is not None and not running.closed:
                theirs = self._stopped()
        except BaseException:
            recorder.cancel()
            raise
        mine = recorder.stop()
        plans = {span.seq: span.plan for span in mine.spans if span.seq}
        tracks: dict[str, Recorded | None] = {"controller": mine}
        tracks |= {str(device): recorded for device, recorded in theirs.items()}
        events = [
            events_of(name, pid, recorded, self._start_ns, plans)
            for pid, (name, recorded) in enumerate(tracks.items())
        ]
        write(self.path, list(chain.from_iterable(events)), _about())

    def _stopped(self) -> dict[Device, Recorded | None]:
        """What each device has recorded; None if its worker is younger than the trace."""
        try:
            return ask_devices(_WHAT, _Stop())
        except BaseException as error:
            # a call that failed, or a worker that died, is told of once; Ctrl-C must not leave the
            # profilers of workers on
            found = ask_devices(_WHAT, _Stop())
            if not isinstance(error, Exception):
                raise
            return found


class _Launched:
    """A trace by one of several processes, each with a device of its own."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._rank = process_index()
        path = str(_new_path(folder)) if self._rank == 0 else ""
        (first, *_), self._late_ns = self._meet({"path": path, "start_ns": time.time_ns()})
        self.path, self._start_ns = Path(first["path"]), first["start_ns"]

    def _meet(self, mine: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
        """What each process tells, and by how much its clock is ahead of that of process 0.

        Processes leave an exchange at the same moment, within the time of a message.
        """
        stamps = []
        for _ in range(_MEETINGS):
            self._exchange({})
            stamps.append(time.time_ns())
        told = self._exchange({**mine, "host": socket.gethostname(), "stamps": stamps})
        ahead = [
            0 if each["host"] == told[0]["host"] else ahead_of(each["stamps"], told[0]["stamps"])
            for each in told
        ]
        return told, ahead

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        ranks = range(len(devices()))
        return [unpacked(data) for data in job_runtime().exchange(ranks, packed(mine), _WHAT)]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        running = job_runtime()
        recorder = _started(running.device)
        try:
            with watching(recorder, running):
                yield
        except BaseException:  # the others may never come to the end of the block
            name = f"{self.path.stem}-process-{self._rank}.json"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path.with_name(name), self._events(recorder.stop()), _about())
            raise
        running.together(lambda _: None)  # waits for the device
        data = zlib.compress(json.dumps(self._events(recorder.stop())).encode(), level=1)
        told = self._exchange({"events": data})
        if self._rank == 0:
            tracks = [
                moved(_read(each["events"]), pid, -self._late_ns[pid] / 1000)
                for pid, each in enumerate(told)
            ]
            write(self.path, list(chain.from_iterable(tracks)), _about())

    def _events(self, recorded: Recorded) -> list[Event]:
        name = str(local_devices()[0])
        return events_of(name, self._rank, recorded, self._start_ns, {})


def ahead_of(stamps: Sequence[int], others: Sequence[int]) -> int:
    """By how much a clock is ahead of another, from what both showed at the same moments."""
    found = sorted(mine - theirs for mine, theirs in zip(stamps, others, strict=True))
    return found[len(found) // 2]  # some messages are late


def _read(data: bytes) -> list[Event]:
    """The events that another process sent."""
    reader = zlib.decompressobj()
    events = json.loads(reader.decompress(data, _MOST_BYTES))
    if type(events) is not list or not all(type(event) is dict for event in events):
        raise not_ours("a trace")
    return events


# -- in the workers --------------------------------------------------------------------------------

_recorder: Recorder | None = None
_plain: dict[int, Handler] = {}
"""The handlers of the worker's commands while others are in their place."""

_TIMED = (wire.CALL, wire.PUT, wire.PLACE, wire.FETCH, wire.DEFINE, wire.TASK)


class _Start:
    def answer(self, rank: Rank) -> None:
        global _recorder
        _Stop().answer(rank)  # of a trace whose end was interrupted
        _recorder = _started(rank.index.device)
        _plain.update(rank.handlers)
        for kind in _TIMED:
            label = _sending if kind == wire.FETCH else rank.doing
            rank.handlers[kind] = _recorder.timed(_plain[kind], label, is_faked=kind == wire.DEFINE)


class _Stop:
    def answer(self, rank: Rank) -> Recorded | None:
        global _recorder
        rank.handlers.update(_plain)
        _plain.clear()
        recorder, _recorder = _recorder, None
        return None if recorder is None else recorder.stop()


def _sending() -> str:
    return "sending a value"
