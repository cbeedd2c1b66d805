"""Which ranks are waited for, and what follows when that takes long.  No clock and no processes
here: the numbers of ``progress`` go in, and what ``watch`` does about them comes out.

* A worker may be slow without limit: computing for an hour is no error.  The user is told, once.
* A worker whose process is stopped never answers, and is ended.
* The time of a call that has a timeout counts from when it is sent, or, if it is queued behind
  others, from when a rank begins it.  Compiling, on any rank, does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

STOPPED_S = 5.0
"""How long a process may be stopped while it is waited for."""
_SLOW_S = 30.0
"""How long a rank is waited for before the user is told."""

STOPPED = ("T", "t")
"""States of a process, as in ``/proc/PID/stat``: by a signal, by a debugger."""
_STATES = {
    "R": "computing",
    "S": "asleep, or waiting for another device",
    "D": "waiting for a disk or a device driver",
    "T": "stopped, by SIGSTOP",
    "t": "stopped, by a debugger",
    "Z": "ended",
}
_COMPILERS = re.compile(r"\+\+|cc1plus|clang|\b(gcc|collect2|as|ld)\b")


class Awaited(NamedTuple):
    """What a rank is doing while it is waited for, and how far it has come."""

    what: str
    progress: Any


class Rank(NamedTuple):
    """How far a rank has come; numbers of commands, 0 for none."""

    done: int
    """The last that it is done with."""
    at: int
    """The last that its device has begun."""
    host: int = 0
    """The last that its process has begun, if the device runs commands later."""
    compiles: bool = False
    """Whether it compiles, or loads, a plan or the compiler."""

    def is_before(self, seq: int) -> bool:
        """Whether it is at an earlier command."""
        return self.done < self.at < seq or self.done < self.host < seq


@dataclass
class Limit:
    """A call that may take only so long."""

    seq: int
    epoch: int
    ranks: Sequence[int]
    seconds: float
    name: str
    end: float | None
    """When its time is up; None while that does not count."""
    seen: Mapping[int, Rank] = field(default_factory=dict)
    """The ranks at the last look."""

    def counts(self, late: Mapping[int, Rank]) -> bool:
        """Whether one of the ranks that are not done with it has begun it, or begins nothing
        although it could: its process is stopped, or C code holds the GIL.
        """
        return not any(each.compiles for each in late.values()) and any(
            not each.is_before(self.seq) and (each.at >= self.seq or each == self.seen.get(rank))
            for rank, each in late.items()
        )


@dataclass
class _Wait:
    awaited: Awaited
    since: float
    stopped_since: float | None = None
    was_told: bool = False


class Waits:
    """``limits``: any thread adds, by the number of the call; the rest is for one thread."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}
        self.limits: dict[int, Limit] = {}

    def look(
        self, now: float, awaited: Mapping[int, Awaited], state: Callable[[int], str]
    ) -> tuple[list[int], list[tuple[int, str, float]]]:
        """The ranks that are stopped for good; and the slow ranks, once each, with the state of the
        process and for how many seconds they have been waited for.
        """
        before, self._waits = self._waits, {}
        stopped, slow = [], []
        for rank, what in awaited.items():
            wait = before.get(rank)
            if wait is None or wait.awaited != what:
                wait = _Wait(what, now)
            self._waits[rank] = wait
            letter = state(rank)
            if letter not in STOPPED:
                wait.stopped_since = None
            elif wait.stopped_since is None:
                wait.stopped_since = now
            elif now - wait.stopped_since >= STOPPED_S:
                stopped.append(rank)
            if now - wait.since >= _SLOW_S and not wait.was_told:
                wait.was_told = True
                slow.append((rank, letter, now - wait.since))
        return stopped, slow

    def overdue(
        self, now: float, rank: Callable[[int], Rank], has_ended: Callable[[int], bool]
    ) -> tuple[Limit, list[int]] | None:
        """A call whose time is up, and the ranks that are not done with it; it has no limit any
        more.  ``has_ended``: whether a rank is known to run nothing.
        """
        rank, has_ended = cache(rank), cache(has_ended)  # there may be thousands of calls
        for limit in tuple(self.limits.values()):
            late = {k: rank(k) for k in limit.ranks if rank(k).done < limit.seq}
            late = {k: each for k, each in late.items() if not has_ended(k)}
            if not limit.counts(late):
                limit.end = None
            elif limit.end is None:
                limit.end = now + limit.seconds
            limit.seen = late
            if not late or (limit.end is not None and now >= limit.end):
                self.limits.pop(limit.seq, None)
                if late:
                    return limit, [*late]
        return None


def helped(state: str, programs: Sequence[str]) -> str:
    """The state of a process that has started these programs: one that sleeps waits for them."""
    if state != "S" or not programs:
        return state
    is_compiling = _COMPILERS.search(" ".join(programs)) is not None
    return "the C++ compiler is running" if is_compiling else f"{programs[0]} is running"


def notice(ranks: Sequence[tuple[str, str, str]], seconds: float) -> str:
    """The line that tells the user of a long wait: for each rank its name, what it is doing, and
    the state of its process, as a letter or in words.

    Example:
        >>> notice([("cpu:1 (rank 1, pid 71)", "it runs step", "R")], 30.2)
        'torchpmap: waiting for 30 s for cpu:1 (rank 1, pid 71): it runs step (computing)'
        >>> notice([("cpu:1", "it compiles step", helped("S", ["cc1plus"]))], 30.2)
        'torchpmap: waiting for 30 s for cpu:1: it compiles step (the C++ compiler is running)'
    """
    unknown = "the state of its process is not known"
    parts = [
        f"{name}: {what} ({state if len(state) > 1 else _STATES.get(state, unknown)})"
        for name, what, state in ranks[:4]
    ]
    if len(ranks) > 4:
        parts.append(f"and {len(ranks) - 4} more")
    return f"torchpmap: waiting for {seconds:.0f} s for {'; '.join(parts)}"
