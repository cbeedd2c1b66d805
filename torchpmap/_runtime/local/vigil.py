"""Decides which awaited workers must be ended, and which the user should be told about.

A worker may be slow without limit: computing for an hour is no error.  A worker whose process is
stopped never answers, and the state of the process shows that.  No clock and no processes here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

STOPPED_S = 5.0
"""How long a process may be stopped while it is waited for."""
_SLOW_S = 30.0
"""How long a rank is waited for before the user is told."""

_COMPILERS = re.compile(r"\+\+|cc1plus|clang|\b(gcc|collect2|as|ld)\b")
_STATES = {
    "R": "computing",
    "S": "asleep, or waiting for another device",
    "D": "waiting for a disk or a device driver",
    "T": "stopped, by SIGSTOP",
    "t": "stopped, by a debugger",
    "Z": "ended",
}


class Awaited(NamedTuple):
    """What a rank is doing while it is waited for, and how far it has come."""

    what: str
    progress: Any


@dataclass
class _Wait:
    awaited: Awaited
    since: float
    stopped_since: float | None = None
    was_told: bool = False


class Vigil:
    """Compares the awaited ranks with those of the last ``look``."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}

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
            if letter not in ("T", "t"):
                wait.stopped_since = None
            elif wait.stopped_since is None:
                wait.stopped_since = now
            elif now - wait.stopped_since >= STOPPED_S:
                stopped.append(rank)
            if now - wait.since >= _SLOW_S and not wait.was_told:
                wait.was_told = True
                slow.append((rank, letter, now - wait.since))
        return stopped, slow


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
