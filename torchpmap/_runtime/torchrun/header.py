"""Tells the other processes which call this one makes, if its collectives do not tell.

In shared memory every collective carries the call that it belongs to.  Gloo carries only data, so
two calls of equal shapes would exchange theirs.  A header travels while the call runs: it costs no
time of waiting.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchpmap._collectives.backend import c10d
from torchpmap._layout.axis_stack import group_name
from torchpmap._runtime.groups.shared_memory import Occasion
from torchpmap._runtime.torchrun.rendezvous import mismatch


class Header:
    """The header of one call, under way from its making on."""

    def __init__(
        self, ranks: tuple[int, ...], occasion: Occasion, calls: Mapping[int, str]
    ) -> None:
        """``calls``: names of calls, by the numbers of their occasions."""
        self._ranks, self._occasion, self._calls = ranks, occasion, calls
        sent = torch.tensor([[occasion.number, occasion.history]], device="cpu")
        group = group_name(ranks)
        self._received = c10d.all_gather_into_tensor(sent, len(ranks), group)

    def compare(self) -> None:
        """Wait for the headers of the others; raises, on all, if one makes another call."""
        given = [tuple(row) for row in c10d.wait_tensor(self._received).tolist()]
        numbers = [number for number, _ in given]
        if len(set(numbers)) > 1:
            raise mismatch(self._ranks, [self._name_of(number) for number in numbers])
        if len(set(given)) > 1:
            self._occasion.differ(self._ranks, self._ranks)

    def _name_of(self, number: int) -> str:
        mine = self._calls[self._occasion.number]
        name = self._calls.get(number, "another call")
        is_other = number != self._occasion.number and name == mine
        return f"{name} (another function)" if is_other else name
