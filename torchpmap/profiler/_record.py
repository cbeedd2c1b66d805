"""What one process records: ``torch.profiler`` of its thread, and spans of this package.

Times are nanoseconds since 1970 by the system's clock, which all processes of a host share.  The
profiler's own clock is close to it; marks in its record tell how far apart they are.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._plan.plan import Plan
from torchpmap._runtime.task import Handler

_MARK = "torchpmap.mark "
_MARKS = 5
_QUIET = {"KINETO_LOG_LEVEL": "6"}
"""torch's profiler reads it when it is first used; else each start and stop prints a line."""


class Span(NamedTuple):
    """Something that this package did."""

    name: str
    begin_ns: int
    end_ns: int
    thread: str = ""
    seq: int = 0
    """Number of the command, by which a call is found again on the devices; 0: none."""
    plan: Plan | None = None
    """Of a call in the controller, if it is a mapped function's."""
    is_faked: bool = False
    """Whether what torch did meanwhile was on fake tensors, without numbers."""


class Operation(NamedTuple):
    """What torch's profiler has seen."""

    name: str
    category: str
    begin_ns: int
    end_ns: int
    thread: str
    details: dict[str, Any]


@dataclass
class Recorded:
    spans: list[Span] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    thread: str = ""
    """Whose operations these are."""


class Recorder:
    """Records from ``start`` to ``stop``, which the same thread must call."""

    def __init__(self, device: torch.device) -> None:
        # a device of the CPU must not touch an accelerator that the host may have
        kinds = {torch.profiler.ProfilerActivity.CPU}
        if device.type != "cpu":
            kinds = torch.profiler.supported_activities()
        # acc_events: torch 2.11 warns without it
        self._profile = torch.profiler.profile(
            activities=kinds, record_shapes=True, acc_events=True
        )
        self._spans: list[Span] = []

    def start(self) -> None:
        added = {name: value for name, value in _QUIET.items() if name not in os.environ}
        os.environ.update(added)
        try:
            self._profile.start()
        finally:
            for name in added:
                del os.environ[name]
        for _ in range(_MARKS):
            with torch.profiler.record_function(f"{_MARK}{time.time_ns()}"):
                pass

    def stop(self) -> Recorded:
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            found = json.loads(path.read_text())
        thread = threading.current_thread().name
        return Recorded(list(self._spans), _operations(found), thread)

    def cancel(self) -> None:
        """Stop, and forget what was recorded."""
        self._profile.stop()

    def add(self, name: str, begin_ns: int, **details: Any) -> None:
        """Add a span that ends now."""
        thread = threading.current_thread().name
        self._spans.append(Span(name, begin_ns, time.time_ns(), thread, **details))

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[None]:
        begin = time.time_ns()
        try:
            yield
        finally:
            self.add(name, begin, **details)

    def timed(self, handler: Handler, label: Callable[[], str], **details: Any) -> Handler:
        """A worker's handler of commands, with a span per command."""

        def run(seq: int, length: int) -> None:
            begin = time.time_ns()
            try:
                handler(seq, length)
            finally:
                self.add(label(), begin, seq=seq, **details)

        return run


def _operations(found: dict[str, Any]) -> list[Operation]:
    base = found.get("baseTimeNanoseconds", 0)
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]

    def begin(event: dict[str, Any]) -> int:
        return base + round(event["ts"] * 1000)

    marks = [event for event in events if event["name"].startswith(_MARK)]
    # a mark is a little older than its record says, the first by the time the profiler starts in
    late = min((begin(mark) - int(mark["name"][len(_MARK) :]) for mark in marks), default=0)
    return [
        Operation(
            event["name"],
            event["cat"],
            begin(event) - late,
            begin(event) - late + round(event.get("dur", 0) * 1000),
            _thread(event),
            {k: v for k, v in event.get("args", {}).items() if k in ("Input Dims", "Input type")},
        )
        for event in events
        if event.get("cat") != "Trace" and not event["name"].startswith(_MARK)
    ]


def _thread(event: dict[str, Any]) -> str:
    on_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    return f"stream {event['tid']}" if on_device else "torch"
