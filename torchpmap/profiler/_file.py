"""The records of all processes in one file that Perfetto and Chrome read.

    process of the file    controller, or one per device
    thread of it           as torch's profiler has it, of the CPU and for each stream of a GPU
    arrow                  from a call in the controller to its start on each device

Events are those of torch's profiler.  Here the ranges of this package and the collectives get their
names, and operations on fake tensors are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.errors import size_text
from torchpmap._base.whole_file import write_whole
from torchpmap._plan.collectives import name_of
from torchpmap._plan.cost import propagated
from torchpmap._plan.plan import Plan
from torchpmap._trace.graphs import met
from torchpmap.profiler._record import Event, Recorded, Span

Axes = dict[tuple[str, tuple[int, ...]], set[str]]
"""Of a plan: operation and shape of each collective -> the axes that it may run over."""

_SIZES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short int": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long int": 8,
    "double": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
"""Bytes of one element, by the profiler's names of dtypes."""
_COMPILED = re.compile(r"## Call CompiledFxGraph (\w+) ##")
"""Inductor's name of a run of compiled code; its key is as long as a sentence."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_LOST = {"ph": "i", "s": "p", "name": "its worker ended in the block: the record is lost", "ts": 0}


def events_of(
    name: str, pid: int, recorded: Recorded | None, plans: Mapping[int, Plan | None]
) -> list[Event]:
    """What one process of the file shows.

    Args:
        name: of the process.
        pid: its number in the file.
        recorded: None if its worker ended before it was asked.
        plans: number of each call that the controller sent -> its plan, if it has one.
    """
    found = [
        _about("process_name", pid, name=name),
        _about("process_sort_index", pid, sort_index=pid),
    ]
    if recorded is None:
        return [*found, {**_LOST, "pid": pid, "tid": pid}]
    threads = {f"thread {recorded.thread}": _Thread(pid, pid, "calls", plans)}
    for event in recorded.events:
        kind = "stream" if event.get("cat") in _ON_DEVICE else "thread"
        key = f"{kind} {event['tid']}"
        if key not in threads:
            threads[key] = _Thread(pid, pid + 1000 * len(threads), key, plans)
        found += threads[key].shown(event, recorded.spans.get(event["name"]))
    used = {event["tid"] for event in found if event["ph"] == "X"}
    return [*found, *(each.about() for each in threads.values() if each.tid in used)]


def write(path: Path, events: Sequence[Event], about: Mapping[str, Any]) -> None:
    """Write the whole file, or none.  Times become microseconds from the first event on: until then
    profilers were started.
    """
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    shown = [
        {**event, "ts": max(0, event["ts"] - first) / 1000} if "ts" in event else event
        for event in events
    ]
    told = {"traceEvents": shown, "displayTimeUnit": "ms", "otherData": about}
    write_whole(path, json.dumps(told))


def _about(kind: str, pid: int, tid: int | None = None, **details: Any) -> Event:
    tid = pid if tid is None else tid
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": details}


@dataclass
class _Thread:
    """What is known of a thread, on the way through its events by their begin."""

    pid: int
    tid: int
    """No two of the file are equal.  Viewers show that first which is equal to ``pid``."""
    name: str
    plans: Mapping[int, Plan | None]
    axes: dict[Plan, Axes] = field(default_factory=dict)
    plan: Plan | None = None
    plan_ns: int = 0
    """Until when ``plan`` runs."""
    faked_ns: int = 0
    """Until when operations are on fake tensors."""
    collective_ns: int = 0
    """Until when operations are parts of a collective."""

    def about(self) -> Event:
        return _about("thread_name", self.pid, self.tid, name=self.name)

    def shown(self, event: Event, span: Span | None) -> Iterator[Event]:
        """What is shown of an event, which may be a range of this package."""
        begin, end = event["ts"], event["ts"] + round(1000 * event["dur"])
        event = {**event, "pid": self.pid, "tid": self.tid}
        if span is not None:
            details = {"command": span.seq} if span.seq else {}
            yield {**event, "name": span.name, "cat": "call", "args": details}
            if span.seq in self.plans:
                ends = {"ph": "s"} if self.pid == 0 else {"ph": "f", "bp": "e"}
                arrow = {"name": "call", "cat": "call", "id": span.seq, "ts": begin}
                yield {**ends, **arrow, "pid": self.pid, "tid": self.tid}
            if span.seq or span.plan:
                self.plan, self.plan_ns = span.plan or self.plans.get(span.seq), end
            if span.is_faked:
                self.faked_ns = max(self.faked_ns, end)
        elif begin >= self.faked_ns:
            if begin >= self.collective_ns and _is_collective(event["name"]):
                self.collective_ns = end
                event = _named(event, self.plan if begin <= self.plan_ns else None, self.axes)
            elif compiled := _COMPILED.fullmatch(event["name"]):
                event |= {"name": "compiled code", "args": {"key": compiled[1]}}
            yield event


# -- collectives -----------------------------------------------------------------------------------


def _is_collective(name: str) -> bool:
    is_sent = name.startswith("_c10d_functional::") and "wait" not in name
    return is_sent or name == "torchpmap::ppermute"


def _named(event: Event, plan: Plan | None, axes: dict[Plan, Axes]) -> Event:
    """A collective, with its axis and its bytes."""
    # as in a graph, without what says where the result is written
    name = event["name"].partition("::")[2].removesuffix("_out").removesuffix("_")
    shape = tuple((event["args"].get("Input Dims") or [[]])[0])
    (dtype, *_) = event["args"].get("Input type") or [""]
    flat = all(isinstance(size, int) for size in shape)
    num_bytes = math.prod(shape) * _SIZES.get(dtype, 0) if flat else 0
    axis = _axis(name, shape, plan, axes)
    over = f" over {axis}" if axis else ""
    details = {"axis": axis, "bytes": num_bytes, **event["args"]}
    name = f"{name}{over}, {size_text(num_bytes)}"
    return {**event, "name": name, "cat": "collective", "args": details}


def _axis(name: str, shape: tuple[int, ...], plan: Plan | None, axes: dict[Plan, Axes]) -> str:
    """The axis of a collective; several if equal ones of the plan run over several."""
    if plan is None:
        return ""
    if plan not in axes:
        axes[plan] = _axes_of(plan)
    known = axes[plan]
    possible = known.get((name, shape)) or set().union(*known.values())
    return " or ".join(sorted(possible))


def _axes_of(plan: Plan) -> Axes:
    found: Axes = {}
    for node, group, _ in met(propagated(plan)):
        value = node.all_input_nodes[0].meta.get("val")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        found.setdefault((name_of(node), shape), set()).add(plan.axes.get(group, "?"))
    return found
