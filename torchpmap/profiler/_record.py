"""What one process records: ``torch.profiler`` of all its threads.

What this package does meanwhile is in the same record: as a range with a number for a name, since
some of it is known only when the range has ended (``Span``).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._base.torch_internals import ALL_THREADS, has_record, profiled_range
from torchpmap._plan.plan import Plan
from torchpmap._runtime.task import Handler

Event = dict[str, Any]
"""Of the "Trace Event Format"; here ``ts`` is in nanoseconds since 1970, and ``dur`` in
microseconds.
"""

_RANGE = "torchpmap "
_NAME = re.compile(r'(?<=^    "name": ")(.*)(?=",$)', re.MULTILINE)
"""Kineto (torch 2.13) writes the double quotes of a name of the user's as they are."""
_QUIET = {"KINETO_LOG_LEVEL": "6"}
"""torch's profiler reads it when it is first used; else each start and stop prints a line."""


@dataclass
class Span:
    """Something that this package did."""

    name: str
    seq: int = 0
    """Number of the command, by which a call is found again on the devices; 0: none."""
    plan: Plan | None = None
    """Of a call in the controller, if it is a mapped function's."""
    is_faked: bool = False
    """Whether what torch did meanwhile was on fake tensors, without numbers."""


class Recorded(NamedTuple):
    events: list[Event]
    """By their begin."""
    spans: dict[str, Span]
    """Name of an event -> what it was."""
    thread: int
    """The one that recorded."""


def _escaped(name: re.Match[str]) -> str:
    return re.sub(r'(?<!\\)"', r'\\"', name[1])


class Recorder:
    """Records from ``start`` to ``stop``."""

    def __init__(self, device: torch.device) -> None:
        # a device of the CPU must not touch an accelerator that the host may have
        kinds = {torch.profiler.ProfilerActivity.CPU}
        if device.type != "cpu":
            kinds = torch.profiler.supported_activities()
        # acc_events: torch 2.11 warns without it
        self._profile = torch.profiler.profile(
            activities=kinds, record_shapes=True, acc_events=True, experimental_config=ALL_THREADS
        )
        self._spans: dict[str, Span] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        added = {name: value for name, value in _QUIET.items() if name not in os.environ}
        os.environ.update(added)
        try:
            self._profile.start()
        finally:
            for name in added:
                del os.environ[name]

    def stop(self) -> Recorded:
        self._profile.stop()
        if not has_record(self._profile):
            raise RuntimeError(
                "profiler.trace: torch.profiler was used inside of the block, and has taken the "
                "record with it. Leave it out: a trace has what it records, too."
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            found = json.loads(_NAME.sub(_escaped, path.read_text()))
        base = found.get("baseTimeNanoseconds", 0)
        events = [
            {**event, "ts": base + round(event["ts"] * 1000)}
            for event in found["traceEvents"]
            if event["ph"] == "X" and event.get("cat") != "Trace"
            if event["name"] in self._spans or not event["name"].startswith(_RANGE)  # has ended
        ]
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        return Recorded(events, dict(self._spans), threading.get_native_id())

    @contextmanager
    def span(self, name: str, **details: Any) -> Iterator[Span]:
        """What it gives may be changed until the block ends."""
        key = f"{_RANGE}{next(self._numbers)}"
        span = Span(name, **details)
        with profiled_range(key):
            try:
                yield span
            finally:
                self._spans[key] = span

    def timed(self, handler: Handler, label: Callable[[], str], **details: Any) -> Handler:
        """A worker's handler of commands, with a span per command."""

        def run(seq: int, body: memoryview) -> None:
            with self.span("", seq=seq, **details) as span:
                try:
                    handler(seq, body)
                finally:
                    span.name = label()

        return run
