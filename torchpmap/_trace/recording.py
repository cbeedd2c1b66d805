"""The calls that ``torchpmap.debug.record`` keeps: what the devices ran, and on which values.

A call is a plan and the handles of its inputs.  A handle keeps its value on the devices, also one
that the call was given for good (donated), and no value is ever changed.  So to keep a call copies
nothing, and costs the memory of its inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from typing import Any, NamedTuple


class Run(NamedTuple):
    number: int
    """Of this call among those on its devices, counted from 1: equal in all their processes."""
    ranks: tuple[int, ...] | None
    """These devices; None: all that there were."""
    plan: Any
    held: tuple[Any, ...]
    """Handles of its inputs, in the order of the graph."""


class Ring:
    """The latest calls (any thread)."""

    def __init__(self, last: int) -> None:
        self.runs: deque[Run] = deque(maxlen=last)
        self.unrecorded: dict[str, str] = {}
        """Calls without a graph, and how they ran instead."""
        # threads never get the same one
        self._numbers = defaultdict[Any, Any](functools.partial(itertools.count, 1))

    def keep(self, plan: Any, held: list[Any]) -> None:
        ranks = plan.definition.ranks
        own = None if len(ranks) == len(plan.team.runtime.devices) else ranks
        self.runs.append(Run(next(self._numbers[own]), own, plan, tuple(held)))


def lacks(call: str, how: str) -> None:
    """Note a call that has no graph; ``how`` it runs instead."""
    if ring is not None:
        ring.unrecorded[call] = how


ring: Ring | None = None
"""None: nothing is recorded.  While there is one, graphs keep the line of every operation."""
