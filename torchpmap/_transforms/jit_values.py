"""Where the values of a jitted call come from, and where its effects go.

A ``Place`` is a tensor of the caller's.  An input of the program is a ``Value`` (what such a tensor
holds on the devices), ``Kept`` (a tensor of this process), or ``StepNumbers``.
"""

from __future__ import annotations

import copy
import weakref
from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchpmap._base.exact import exact
from torchpmap._base.storages import own_strides
from torchpmap._layout.layout import Layout
from torchpmap._plan.plan import Captured, Drawn
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.device_put import handle_of
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._trace.optimizers import Numbers
from torchpmap.random._streams import peek_key


def leaf_key(leaf: Any) -> Hashable:
    """What must be the same of an argument for the same program."""
    if not isinstance(leaf, torch.Tensor):
        return exact(leaf)
    grad = leaf.requires_grad and (leaf.is_leaf or "computed")
    if type(leaf) is ShardedTensor:
        return leaf._alive()[0], own_strides(leaf), grad
    return tuple(leaf.shape), leaf.dtype, own_strides(leaf), grad


class Argument(NamedTuple):
    """A tensor that the function was given."""

    place: int

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tensors[self.place]


class ClosedOver(NamedTuple):
    """A tensor that the function closes over."""

    tensor: torch.Tensor

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.tensor


class GradientOf(NamedTuple):
    """The gradient of another."""

    leaf: Argument | ClosedOver

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.leaf.of(tensors).grad


_CLOSED_OVER = "a tensor that it closes over"
Place = Argument | ClosedOver | GradientOf


class Again(NamedTuple):
    """The same as an earlier result."""

    place: int


class Copied(NamedTuple):
    """A result that the caller may change."""

    value: Any

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return copy.copy(self.value)


RESULT = object()
"""Stands for what the graph returns."""


def returned(
    values: Sequence[Any], results: Iterable[Any], tensors: Sequence[torch.Tensor]
) -> list[Any]:
    """What a call returns; ``values``: of the first one, with ``RESULT`` for each of these."""
    rest, found = iter(results), []
    for value in values:
        if value is RESULT:
            found.append(next(rest))
        elif isinstance(value, Again):
            found.append(found[value.place])
        else:
            is_place = isinstance(value, Argument | ClosedOver | Copied)
            found.append(value.of(tensors) if is_place else value)
    return found


class Value(NamedTuple):
    """A tensor on the devices, as an input.  It keeps no blocks: these may be donated."""

    place: Place
    layout: Layout

    def closed_over(self) -> Any:
        """The tensor, if it is the same in each call, and lies as it did in the first."""
        return self.place.tensor if isinstance(self.place, ClosedOver) else None

    def given(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[str, Any]:
        """What a message calls it, and its value; ``paths``: of the tensors."""
        place = self.place
        name = paths[place.place] if isinstance(place, Argument) else _CLOSED_OVER
        return name, place.of(tensors)

    def handle(self, tensors: Sequence[torch.Tensor]) -> Handle:
        return handle_of(self.place.of(tensors), self.layout)


class Kept(NamedTuple):
    """A tensor of this process, or the key of random numbers, as an input."""

    captured: Captured

    def closed_over(self) -> None:
        return None

    def given(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[str, Any]:
        if isinstance(self.captured, Drawn):
            return "the seed of its random numbers", peek_key()
        return _CLOSED_OVER, self.captured.value()

    def handle(self, tensors: Sequence[torch.Tensor]) -> Handle:
        return self.captured.handle()


class StepNumbers:
    """The rates and counters of an optimizer, as an input.

    A call leaves those of the next one on the devices.  They are sent only where these differ from
    what the optimizer has: in the first call, and when a schedule has changed a rate.
    """

    def __init__(self, numbers: Numbers, layout: Layout) -> None:
        self.numbers = numbers
        self._layout = layout
        self._held: tuple[bytes, Handle] | None = None
        """Values, and where the devices have them."""
        _holders.add(self)

    def closed_over(self) -> None:
        return None

    def given(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[str, Any]:
        values = torch.tensor(self.numbers.read(), dtype=torch.float64)
        return "the rates and counters of an optimizer", values

    def handle(self, tensors: Sequence[torch.Tensor]) -> Handle:
        if current_runtime().has_losses:
            for each in tuple(_holders):  # one that is called no more must hold nothing either
                each.forget_lost()
        values, held = self.numbers.read().tobytes(), self._held
        if held is None or held[0] != values:
            sent = torch.frombuffer(bytearray(values), dtype=torch.float64)
            self._held = held = values, handle_of(sent, self._layout)
        return held[1]

    def follow(self, before: Handle, after: Handle) -> None:
        """Hear that a call has made the values ``after`` from those ``before``.

        If another thread has begun a call meanwhile, nothing is known, and they are sent again.
        """
        held = self._held
        if held is not None and held[1] is before:
            self._held = self.numbers.after(array("d", held[0])).tobytes(), after

    def forget_lost(self) -> None:
        """Drop what a call that has failed should have made, or a worker that has died had."""
        if self._held is not None:
            try:
                self._held[1].team.runtime.check(self._held[1])
            except Exception:  # it says what has failed, which the caller's own values tell too
                self._held = None


_holders: weakref.WeakSet[StepNumbers] = weakref.WeakSet()
