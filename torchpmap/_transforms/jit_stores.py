"""Tensors that a jitted function stores where later calls find them, as in attributes.

    self.average = self.average * 0.9 + x

A trace finds the places, and is given up.  The next one takes the values that are there as
arguments, and has the values that the function leaves there as results:

    (values before, arguments) --program--> (results, values after)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from torchpmap._base.pytree import flatten
from torchpmap._base.torch_internals import torch_function_off
from torchpmap._trace.snapshot import Slot, Snapshot
from torchpmap._trace.untraceable import Untraceable
from torchpmap._transforms.jit_program import JitCall
from torchpmap._transforms.jit_values import leaf_key

_MAX_TRACES = 4
"""To find all places: a list that is shifted shows one more in each."""


class _Found(Exception):
    def __init__(self, slots: list[Slot]) -> None:
        super().__init__()
        self.slots = slots


def storing(
    make: Callable[[JitCall], Any],
    call: JitCall,
    snapshot: Snapshot,
    known: Sequence[Slot],
    where: str,
) -> tuple[Any, list[Slot]]:
    """What ``make`` makes of a call, and the places whose values it takes and replaces.

    known: places where other calls store tensors.
    """
    slots = [slot for slot in known if snapshot.has(slot)]
    for _ in range(_MAX_TRACES):
        try:
            program = make(_with_state(call, slots, snapshot, where))
            return (Storing(program, slots) if slots else program), slots
        except _Found as found:
            snapshot.restore()
            slots += found.slots
    reason = "it stores new tensors in other places each time"
    raise Untraceable(reason, where, "the same attributes in each call")


def _with_state(call: JitCall, slots: list[Slot], snapshot: Snapshot, where: str) -> JitCall:
    """The call with what is in the slots as a first argument and a second result."""
    fun = call.fun

    def run(state: Sequence[Any], args: Any, kwargs: Any) -> Any:
        before = [slot.read() for slot in slots]
        try:
            _write_all(slots, state)
            result = fun(*args, **kwargs)
            with torch_function_off():
                new = snapshot.stored(slots, where)
            if new:
                raise _Found(new)
            return (result, [slot.read() for slot in slots]) if slots else result
        finally:
            _write_all(slots, before)

    if slots:
        args, kwargs = call.structure.unflatten(call.leaves)
        return JitCall(run, ([slot.read() for slot in slots], args, kwargs), {})
    other = copy.copy(call)
    other.fun = lambda *args, **kwargs: run((), args, kwargs)
    return other


def _write_all(slots: Sequence[Slot], values: Sequence[Any]) -> None:
    for slot, value in zip(slots, values, strict=True):
        slot.write(value)


class Storing:
    """A program that takes what is in some places, and leaves other tensors there."""

    has_effects = True

    def __init__(self, program: Any, slots: Sequence[Slot]) -> None:
        self._program, self._slots = program, slots
        self.plan, self.resharded = program.plan, program.resharded
        self._key, _ = self._state()

    def _state(self) -> tuple[Hashable, list[torch.Tensor]]:
        """The kind of what is in the places, and its tensors."""
        leaves, structure = flatten([slot.read() for slot in self._slots])
        key = structure, structure.dict_order, tuple(map(leaf_key, leaves))
        return key, [x for x in leaves if isinstance(x, torch.Tensor)]

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        key, state = self._state()
        return key == self._key and bool(self._program.holds([*state, *tensors]))

    def refuses(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._program.refuses([*self._state()[1], *tensors]))

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        result, values = self._program.run([*self._state()[1], *tensors])
        _write_all(self._slots, values)
        return result
