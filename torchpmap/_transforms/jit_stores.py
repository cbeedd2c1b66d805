"""Tensors that a jitted function stores where later calls find them, as in attributes.

    self.average = self.average * 0.9 + x

A trace finds the places, and is given up.  The next one takes the values that are there as
arguments, and has the values that the function leaves there as results:

    (values before, arguments) --program--> (results, values after)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch

from torchpmap._base.exact import exact
from torchpmap._base.pytree import flatten
from torchpmap._base.torch_internals import torch_function_off
from torchpmap._trace.reach import SIMPLE
from torchpmap._trace.snapshot import Slot, Snapshot
from torchpmap._trace.untraceable import Untraceable
from torchpmap._transforms.jit_containers import Changes, may_change
from torchpmap._transforms.jit_values import JitCall, leaf_keys

_MAX_TRACES = 6
"""To find all places: a list that is shifted shows one more in each."""


Look = Callable[[Sequence[Slot]], list[Slot]]
"""Finds where a function has stored values, besides places that are known."""


class _Found(Exception):
    """Other places than those that were known."""

    def __init__(self, slots: list[Slot]) -> None:
        super().__init__()
        self.slots = slots


class _Same:
    """Stands for what a call leaves as it is.  A class is the same object in a copy."""


class _Nth(NamedTuple):
    """Stands for a tensor in what is stored; two places may have the same."""

    place: int


class _State:
    """What is in the places now."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        leaves, self._structure = flatten([slot.read() for slot in slots])
        self.tensors: list[torch.Tensor] = []
        places: dict[int, _Nth] = {}
        self._template: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
                places[id(leaf)] = _Nth(len(self.tensors))
                self.tensors.append(leaf)
            self._template.append(places.get(id(leaf), leaf))

    def key(self) -> Hashable:
        """What must be the same for the same program."""
        structure, constants = self._structure, tuple(map(exact, self._template))
        return structure, structure.dict_order, constants, leaf_keys(self.tensors)

    def values(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same with other tensors."""
        leaves = [tensors[x.place] if isinstance(x, _Nth) else x for x in self._template]
        return self._structure.unflatten(leaves)


class Storing:
    """A program that takes what is in some places, and leaves other values there."""

    has_effects = True
    changes = Changes()

    def __init__(self, program: Any, slots: Sequence[Slot], state: _State) -> None:
        self._program, self.slots, self._key = program, slots, state.key()
        self.constants = _constants(slots)
        self.plan, self.resharded = program.plan, program.resharded

        self.refuses, self.tell = program.refuses, program.tell
        self._num_stored = len(state.tensors)

    def taken(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What is in the places, and the arguments; see ``Program``."""
        state = _State(self.slots)
        return self._program.taken([*state.tensors, *tensors]) if state.key() == self._key else None

    def again(self, tensors: Sequence[torch.Tensor]) -> Any:
        """``taken``, of what that has returned before."""
        return self.taken(tensors[self._num_stored :])

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        result, values = self._program.run(tensors)
        _write_all(self.slots, values)
        return result


def storing(
    make: Callable[[JitCall], Any],
    call: JitCall,
    snapshot: Snapshot,
    others: Sequence[Any],
    same: Sequence[Storing],
    look: Look,
    where: str,
) -> tuple[Any, Sequence[torch.Tensor]]:
    """What ``make`` makes of a call, that stores what the function does, and what it takes.

    others: programs for other calls, which may store tensors.  same: those for calls of this kind,
    if there are so many that none is to be added for another value of Python.
    """
    known = {x.key: x for each in others if isinstance(each, Storing) for x in each.slots}
    slots = [slot for slot in known.values() if snapshot.has(slot)]
    now = _constants(slots) if same else {}
    for slot in slots:
        value = now.get(slot.key)
        if value is not None and all(each.constants.get(slot.key) != value for each in same):
            raise Untraceable(
                f"it stores a new tensor, and changes what is none ({slot.text}) in each call, "
                "so that each would need another graph",
                where,
                "a tensor for that too, or return the new tensor",
            )
    for _ in range(_MAX_TRACES):
        state = _State(slots)
        given = _with_state(call, slots, state, look, snapshot, where)
        try:
            program = copy_context().run(make, given)
            return (Storing(program, slots, state) if slots else program), given.tensors
        except _Found as found:
            snapshot.restore()
            slots = found.slots
    raise slots[-1].refusal(where)


def _with_state(
    call: JitCall, slots: list[Slot], state: _State, look: Look, snapshot: Snapshot, where: str
) -> JitCall:
    """The call with the tensors in the slots as a first argument, and what is there afterwards as a
    second result.
    """
    fun = call.fun

    def run(tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        before, given = [slot.read() for slot in slots], state.values(tensors)
        trees = list(map(flatten, given))
        try:
            _write_all(slots, given)
            result = fun(*args, **kwargs)
            with torch_function_off():
                new = look(slots)
                stored = [
                    _Same if now is was and _is_same(flatten(now), tree) else now
                    for now, was, tree in zip((x.read() for x in slots), given, trees, strict=True)
                ]
                kept = {id(x) for x in may_change(given)}
                pairs = [
                    (slot, may_change(now) if slot.is_users else [])
                    for slot, now in zip(slots, stored, strict=True)
                ]
                moved = [slot for slot, held in pairs if kept.isdisjoint(map(id, held))]
            if new or len(moved) < len(slots):  # a container that stays has places of its own
                raise _Found([*moved, *new])
            seen: set[int] = set()
            for slot, held in pairs:  # each call would make two containers of one
                for x in held:
                    if id(x) in seen or snapshot.has(Slot(x, None)):
                        raise slot.refusal(where)
                    seen.add(id(x))
            leaves, structure = flatten(result)  # of containers that are as before from here on
            result = structure.unflatten(leaves)
            return (result, stored) if slots else result
        finally:
            _write_all(slots, before)

    if slots:
        args, kwargs = call.structure.unflatten(call.leaves)
        given = JitCall(run, (state.tensors, args, kwargs), {}, where)
        given.names = [*["a tensor that it stores"] * len(state.tensors), *call.names]
        return given
    other = copy.copy(call)
    other.fun = lambda *args, **kwargs: run((), args, kwargs)
    return other


def _constants(slots: Sequence[Slot]) -> dict[tuple[int, Any], Hashable]:
    """The numbers and the like that are in the places, by their keys."""
    values = [(slot.key, slot.read()) for slot in slots if not slot.is_mode]
    return {key: exact(x) for key, x in values if isinstance(x, SIMPLE)}


def _is_same(now: Any, before: Any) -> bool:
    (leaves, structure), (own, own_structure) = now, before
    is_alike = structure == own_structure and structure.dict_order == own_structure.dict_order
    return is_alike and all(x is y for x, y in zip(leaves, own, strict=True))


def _write_all(slots: Sequence[Slot], values: Sequence[Any]) -> None:
    for slot, value in zip(slots, values, strict=True):
        if value is not _Same:
            slot.write(value)
