"""The records of all processes in one file that Perfetto and Chrome read.

    process of the file    controller, or one per device
    thread of it           calls; torch (operations, collectives with axis and bytes); streams
    arrow                  from a call in the controller to its start on each device

See "Trace Event Format": times are microseconds.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.errors import size_text
from torchpmap._plan.collectives import met, name_of
from torchpmap._plan.cost import propagated
from torchpmap._plan.plan import Plan
from torchpmap.profiler._record import Operation, Recorded, Span

Event = dict[str, Any]
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
_EARLY_NS = 20_000
"""How much earlier than its call an operation may seem to begin: the clocks differ a little."""
_ROUNDED_NS = 1_000
"""How much later than the operation around it an operation may seem to end."""


def events_of(
    name: str, pid: int, recorded: Recorded | None, start_ns: int, plans: Mapping[int, Plan | None]
) -> list[Event]:
    """What one process of the file shows.

    Args:
        name: of the process.
        pid: its number in the file.
        recorded: None if its worker ended before it was asked.
        start_ns: the time that counts as 0.
        plans: number of each call that the controller sent -> its plan, if it has one.
    """
    events = [
        _about("process_name", pid, name=name),
        _about("process_sort_index", pid, sort_index=pid),
    ]
    if recorded is None:
        lost = {
            "ph": "i",
            "s": "p",
            "name": "its worker ended in the block: the record is lost",
            "ts": 0,
        }
        return [*events, {**lost, "pid": pid, "tid": 0}]
    threads: dict[str, int] = {}
    for span in recorded.spans:
        thread = "calls" if span.thread == "MainThread" else f"calls of {span.thread}"
        tid = threads.setdefault(thread, _tid(pid, len(threads)))
        details: Event = {"command": span.seq} if span.seq else {}
        events.append(_event(span, "call", pid, tid, start_ns, details))
        if span.seq in plans:
            events.append(_arrow(span, pid, tid, start_ns, pid == 0))
    spans = sorted(recorded.spans, key=lambda span: span.begin_ns)
    faked = [each for each in spans if each.is_faked and each.thread == recorded.thread]
    axes: dict[Plan, Axes] = {}
    done_ns = 0  # when the last collective had ended: an operation in it is a part of it
    for operation in nested(recorded.operations):
        if _at(operation, faked) is not None:
            continue
        tid = threads.setdefault(operation.thread, _tid(pid, len(threads)))
        shown, details = operation, operation.details
        if operation.begin_ns >= done_ns and _is_collective(operation):
            shown, details = _shown(operation, spans, plans, axes)
            done_ns = operation.end_ns
        elif compiled := _COMPILED.fullmatch(operation.name):
            shown, details = operation._replace(name="compiled code"), {"key": compiled[1]}
        events.append(_event(shown, shown.category, pid, tid, start_ns, details))
    return [*events, *(_about("thread_name", pid, tid, name=each) for each, tid in threads.items())]


def _tid(pid: int, number: int) -> int:
    """A number that no other thread of the file has; viewers take one equal to ``pid`` for the main
    thread, and show it first.
    """
    return pid + 1000 * number


def moved(events: Sequence[Event], pid: int, by_us: float) -> list[Event]:
    """The events of another process, as number ``pid`` and by the clock of this one."""
    return [
        {**event, "pid": pid} | ({"ts": event["ts"] + by_us} if "ts" in event else {})
        for event in events
    ]


def nested(operations: Sequence[Operation]) -> list[Operation]:
    """The operations by their begin.  Of one thread, two are apart, or one is part of the other, as
    viewers need it.  Of two that overlap, the earlier one ends where the later one begins: torch
    ends some too late, such as the mode in which a range of the user's began.
    """
    found: list[Operation] = []
    around: dict[str, list[int]] = {}
    for each in sorted(operations, key=lambda each: (each.begin_ns, -each.end_ns)):
        outer = around.setdefault(each.thread, [])
        while outer and (last := found[outer[-1]]).end_ns < each.end_ns:
            if last.end_ns <= each.begin_ns:
                outer.pop()
            elif each.end_ns - last.end_ns <= _ROUNDED_NS:
                each = each._replace(end_ns=last.end_ns)
            else:
                found[outer.pop()] = last._replace(end_ns=each.begin_ns)
        outer.append(len(found))
        found.append(each)
    return found


def write(path: Path, events: Sequence[Event], about: Mapping[str, Any]) -> None:
    """Write the whole file, or none.  Times count from the first event: until then profilers were
    started.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    shown = [
        {**event, "ts": round(max(0, event["ts"] - first), 3)} if "ts" in event else event
        for event in events
    ]
    try:
        draft.write_text(
            json.dumps({"traceEvents": shown, "displayTimeUnit": "ms", "otherData": about})
        )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _about(kind: str, pid: int, tid: int = 0, **details: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": details}


def _event(
    what: Span | Operation, category: str, pid: int, tid: int, start: int, details: Event
) -> Event:
    begin, end = what.begin_ns, what.end_ns
    return {
        **{"ph": "X", "name": what.name, "cat": category, "pid": pid, "tid": tid},
        **{"ts": (begin - start) / 1000, "dur": (end - begin) / 1000, "args": details},
    }


def _arrow(span: Span, pid: int, tid: int, start: int, is_sender: bool) -> Event:
    """An end of the arrow from a call in the controller to what it starts on a device."""
    end = {"ph": "s"} if is_sender else {"ph": "f", "bp": "e"}
    ts = (span.begin_ns - start) / 1000
    return {**end, "name": "call", "cat": "call", "id": span.seq, "pid": pid, "tid": tid, "ts": ts}


# -- collectives -----------------------------------------------------------------------------------


def _name(operation: Operation) -> str:
    """As in a graph, without what says where the result is written."""
    return operation.name.partition("::")[2].removesuffix("_out").removesuffix("_")


def _is_collective(operation: Operation) -> bool:
    is_sent = operation.name.startswith("_c10d_functional::") and "wait" not in operation.name
    return is_sent or operation.name == "torchpmap::ppermute"


def _shown(
    operation: Operation,
    calls: Sequence[Span],
    plans: Mapping[int, Plan | None],
    axes: dict[Plan, Axes],
) -> tuple[Operation, Event]:
    """A collective, with its axis and its bytes."""
    name = _name(operation)
    call = _at(operation, calls)
    plan = None if call is None else call.plan or plans.get(call.seq)
    shape = tuple((operation.details.get("Input Dims") or [[]])[0])
    (dtype, *_) = operation.details.get("Input type") or [""]
    flat = all(isinstance(size, int) for size in shape)
    num_bytes = math.prod(shape) * _SIZES.get(dtype, 0) if flat else 0
    axis = _axis(name, shape, plan, axes)
    over = f" over {axis}" if axis else ""
    details = {"axis": axis, "bytes": num_bytes, **operation.details}
    name = f"{name}{over}, {size_text(num_bytes)}"
    return operation._replace(name=name, category="collective"), details


def _at(operation: Operation, spans: Sequence[Span]) -> Span | None:
    """The last of the spans, in the order of their begin, that an operation is part of."""
    for early in (0, _EARLY_NS):
        moment = operation.begin_ns + early
        after = bisect.bisect_right(spans, moment, key=lambda span: span.begin_ns)
        for span in reversed(spans[:after]):
            if span.end_ns >= operation.begin_ns:
                return span
    return None


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
