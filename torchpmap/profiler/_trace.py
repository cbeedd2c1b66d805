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
from torchpmap.profiler._file import events_of, write
from torchpmap.profiler._record import Event, Recorded, Recorder
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
        is_job = not inline_mode.active() and is_launched()
        with _of_job(folder) if is_job else _of_devices(folder) as path:
            yield path
    finally:
        _running.release()


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


@contextmanager
def _of_devices(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """By the only controller."""
    path = _new_path(folder)
    held = [] if inline_mode.active() else local_devices()
    running = runtime() if held else None
    recorder = _started(torch.device("cpu"))
    tracks: dict[str, Recorded | None] = dict.fromkeys(["controller", *map(str, held)])
    try:
        if running is not None:
            ask_devices(_WHAT, _Start())
        with watching(recorder, running):
            yield path
    finally:
        try:
            if running is not None and not running.closed:
                tracks |= {str(device): theirs for device, theirs in _stopped().items()}
        finally:
            mine = tracks["controller"] = recorder.stop()
        plans = {span.seq: span.plan for span in mine.spans.values() if span.seq}
        events = [events_of(name, k, each, plans) for k, (name, each) in enumerate(tracks.items())]
        write(path, list(chain.from_iterable(events)), _about())


def _stopped() -> dict[Device, Recorded | None]:
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


@contextmanager
def _of_job(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """By one of several processes, each with a device of its own."""
    rank, running = process_index(), job_runtime()
    path = Path(_exchange({"path": str(_new_path(folder)) if rank == 0 else ""})[0]["path"])
    ahead_ns = _ahead_ns()
    recorder = _started(running.device)

    def events() -> list[Event]:
        return events_of(str(local_devices()[0]), rank, recorder.stop(), {})

    try:
        with watching(recorder, running):
            yield path
    except BaseException:  # the others may never come to the end of the block
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path.with_name(f"{path.stem}-process-{rank}.json"), events(), _about())
        raise
    running.together(lambda _: None)  # waits for the device
    told = _exchange({"events": zlib.compress(json.dumps(events()).encode(), level=1)})
    if rank == 0:
        tracks = [moved(_read(each["events"]), -ahead_ns[k]) for k, each in enumerate(told)]
        write(path, list(chain.from_iterable(tracks)), _about())


def _exchange(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process tells."""
    ranks = range(len(devices()))
    return [unpacked(data) for data in job_runtime().exchange(ranks, packed(mine), _WHAT)]


def _ahead_ns() -> list[int]:
    """By how much the clock of each process is ahead of that of process 0.

    Processes leave an exchange at the same moment, within the time of a message.
    """
    stamps = []
    for _ in range(_MEETINGS):
        _exchange({})
        stamps.append(time.time_ns())
    first, *others = _exchange({"host": socket.gethostname(), "stamps": stamps})
    return [0] + [
        0 if each["host"] == first["host"] else ahead_of(each["stamps"], first["stamps"])
        for each in others
    ]


def ahead_of(stamps: Sequence[int], others: Sequence[int]) -> int:
    """By how much a clock is ahead of another, from what both showed at the same moments."""
    found = sorted(mine - theirs for mine, theirs in zip(stamps, others, strict=True))
    return found[len(found) // 2]  # some messages are late


def moved(events: Sequence[Event], by_ns: int) -> list[Event]:
    """The events of another process, by the clock of this one."""
    return [{**event, "ts": event["ts"] + by_ns} if "ts" in event else event for event in events]


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

_TIMED = (wire.CALL, wire.PUT, wire.FETCH, wire.DEFINE, wire.TASK)


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
