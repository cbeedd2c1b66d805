"""Operations on sharded tensors, and moves between layouts, run on the devices that hold the data.

    func, args --key--> Operation --> one frame to the workers --> handles
         +------------> _sharded/lower: rule -> placement -> graph of one operation -> workers

An ``Operation`` is a plan of a single ATen operation: it is made once per kind of call (operation,
layouts, structure, arguments that are not tensors, settings of torch as for mapped functions) and
reused from then on.  Python numbers of elementwise operations are inputs, so a new learning rate
makes no new plan.

A call that devices cannot run has no plan: it runs in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from torchpmap._base.ambient import keyed
from torchpmap._base.torch_internals import autograd_node, in_backward, next_node_number
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.current import refuse_to_wait_for
from torchpmap._sharded.arguments import Unsupported, facts_of, is_by_columns, number_slots, slotted
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.lower import Operation, lower_move, lower_operation
from torchpmap._sharded.transfer import (
    check_equal_everywhere,
    gather,
    is_whole_here,
    store,
    store_on,
    team_of,
)
from torchpmap._trace.pickling import number_of

_MAX_OPERATIONS = 1024
_MAX_NUMBERS = 1024
_MAX_REDUCED = 4096

_aten = torch.ops.aten
_lock = threading.RLock()
_keeping = threading.RLock()  # the end of an object may interrupt its holder
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_HOST = (torch.Tensor, torch.nn.Parameter)
_UNKNOWN: Any = object()


class _Known:
    """The caches of one team.

    What several processes hold has caches of its own: all processes must drop the same operations,
    whatever each does with values of its own.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.operations: dict[Hashable, Operation | None] = {}
        """None: known to run in this process.  Least recently used first."""
        self.numbers: dict[Hashable, Handle] = {}
        self.seen: dict[Hashable, int] = {}
        """Numbers that all processes have given to operations -> digest."""
        self.reduced: dict[Hashable, Layout] = {}
        """(number of the node of autograd, shape) -> layout of a value whose sum, or part, may be
        differentiated.  The gradient gets the same layout.
        """

    def number(self, value: bool | int | float | complex) -> Handle:
        """A Python number on the devices."""
        if self.team.runtime.has_losses:  # a restarted worker may lack the number
            self.numbers.clear()
        key = (type(value), repr(value))
        handle = self.numbers.get(key)
        if handle is None:
            tensor = torch.tensor(value, dtype=_DTYPES[type(value)], device="cpu")
            handle = self.team.runtime.put(self.team, [tensor] * len(self.team.ranks))
        return _keep(self.numbers, key, handle, _MAX_NUMBERS)

    def operation(self, key: Hashable, make: Callable[..., Operation | None], *given: Any) -> Any:
        """What is known for a key, else what ``make`` gives for ``given``."""
        found = self.operations.get(key, _UNKNOWN)
        if found is _UNKNOWN:
            refuse_to_wait_for()
            with _lock:
                found = make(*given)
        elif len(self.operations) <= _MAX_OPERATIONS // 2:  # the order matters only near the limit
            return found
        return _keep(self.operations, key, found, _MAX_OPERATIONS)


_known: dict[Team, _Known] = {}
"""Of one runtime."""


def _keep(kept: dict[Any, Any], key: Hashable, value: Any, most: int) -> Any:
    """Make ``key`` the most recently used of at most ``most``."""
    with _keeping:
        kept.pop(key, None)
        kept[key] = value
        dropped = []  # what ends with them may call this again
        while len(kept) > most:
            dropped.append(kept.pop(next(iter(kept))))
    return value


def _known_of(team: Team) -> _Known:
    known = _known.get(team)
    if known is None:
        with _keeping:
            for other in [each for each in _known if each.runtime is not team.runtime]:
                del _known[other]
            known = _known.setdefault(team, _Known(team))
    return known


# -- the key of a call -----------------------------------------------------------------------------


class _Scan:
    """Splits the arguments of a call: ``operands`` are the tensors and numbers that are inputs;
    ``argument`` returns the rest as part of a key.
    """

    def __init__(self, kind: Any, slots: frozenset[str]) -> None:
        self.kind = kind
        self.slots = slots
        self.operands: list[Any] = []

    def argument(self, name: str, value: Any) -> Hashable:
        if self.is_number(name, value):
            self.operands.append(value)
            return name, type(value)
        return name, self.part(value)

    def is_number(self, name: str, value: Any) -> bool:
        """Whether it is a number that is an input."""
        if type(value) not in _DTYPES or name not in self.slots:
            return False
        return type(value) is not int or -(2**63) <= value < 2**63

    def is_operand(self, name: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) or self.is_number(name, value)

    def part(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is self.kind:
            self.operands.append(value)
            return value._alive()[0]
        if kind in _HOST:
            if value.device.type != "cpu" or value.layout is not torch.strided:
                raise Unsupported
            self.operands.append(value)
            return "host", tuple(value.shape), value.dtype
        if kind is list or kind is tuple:
            return tuple([self.part(item) for item in value])
        if kind in _DTYPES:
            return kind, repr(value)  # 0.0 and -0.0 are equal, and so are 1 and True
        if value is None or kind in _PLAIN:
            return value
        raise Unsupported


_PLAIN = (str, torch.dtype, torch.device, torch.layout, torch.memory_format)


# -- making and starting operations ----------------------------------------------------------------


def operation_for(
    kind: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Operation, list[Any]] | None:
    """The plan of a call and its operands; None if it is for this process.

    Raises:
        RuntimeClosed: an operand belongs to a pool that is closed.
        What torch raises for such shapes, dtypes and arguments.
    """
    facts = facts_of(func)
    scan = _Scan(kind, number_slots(func, facts, args))
    try:
        parts = tuple(map(scan.argument, facts.names, args))
        named = tuple([scan.argument(*item) for item in kwargs.items()])
        parts += (is_by_columns(func, scan.operands),) if facts.asks_order else ()
    except Unsupported:
        return None
    known = _known_of(_team_of(kind, scan.operands))
    prefer = _preferred(known, func, args, scan)
    key = (func, keyed(), parts, named, prefer)
    operation = known.operation(key, _prepare, known.team, scan, func, args, kwargs, prefer)
    return None if operation is None else (operation, scan.operands)


def _team_of(kind: Any, operands: Sequence[Any]) -> Team:
    """The team that has the first of these values, all of which one runtime has; raises if one of
    them is gone.
    """
    teams = [x._handle.team for x in operands if type(x) is kind]
    (runtime, *others) = {team.runtime for team in teams}
    if others or runtime.closed or runtime.has_losses:
        for operand in operands:
            if type(operand) is kind:
                operand._handle.team.runtime.check(operand._handle)
    found: Team = teams[0]
    return found


def _prepare(
    team: Team,
    scan: _Scan,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    prefer: Layout | None,
) -> Operation | None:
    named = dict(zip(facts_of(func).names, args, strict=False)) | kwargs
    layouts = [o._layout if type(o) is scan.kind else None for o in scan.operands]
    try:
        arguments, operands = slotted(named, scan.is_operand)
        return lower_operation(team, func, arguments, operands, layouts, prefer)
    except Unsupported:
        return None


def start(operation: Operation, kind: Any, operands: Sequence[Any]) -> list[tuple[Layout, Handle]]:
    """Run an operation on the workers: layout and handle of every result; does not wait."""
    team = operation.team
    known = _known_of(team)
    if operation.checks_numbers:
        operation.trial.check_numbers(operands)
    if operation.moved:
        note_gather(operation.trial.func, operation.moved)
    if operation.spans:
        _compare(known, operation, kind, operands)
    if operation.trial.written:
        operation.trial.check_places(operands)
    held: list[Handle] = []
    for operand, layout in zip(operands, operation.inputs, strict=True):
        if type(operand) is kind:
            held.append(operand._handle)
        elif layout is None:
            held.append(known.number(operand))
        else:
            held.append(store_on(team, layout, operand))
    if operation.reduces and operands[0].requires_grad:
        layout = operands[0]._layout  # autograd has made the node before the operation runs
        _keep(known.reduced, (next_node_number() - 1, layout.shape), layout, _MAX_REDUCED)
    outputs = team.runtime.execute(team, operation.id, held, len(operation.outputs))
    return list(zip(operation.outputs, outputs, strict=True))


def move(layout: Layout, handle: Handle, wanted: Layout) -> Handle:
    """The handle of a value in another layout: its own, if all blocks are in place already.

    Raises:
        RuntimeError: no process has all blocks, and they are to move to other devices.
    """
    if layout.same_place(wanted):
        return handle
    if is_whole_here(layout):
        return store(wanted, gather(layout, handle))
    team = team_of(wanted)
    operation = _known_of(team).operation((layout, wanted), lower_move, team, layout, wanted)
    (result,) = team.runtime.execute(team, operation.id, [handle], 1)
    return result


def _compare(known: _Known, operation: Operation, kind: Any, operands: Sequence[Any]) -> None:
    """Raise, in all processes, unless all give an operation the same numbers and host tensors: else
    their copies of the results would differ from then on.

    Numbers that all have given before are compared later, when the processes next exchange
    something (see ``History``).
    """
    func, ranks = operation.trial.func, operation.team.ranks
    unseen: dict[str, Any] = {}
    numbers = []
    for operand, layout in zip(operands, operation.inputs, strict=True):
        if type(operand) is kind:
            continue
        if layout is None:
            key = type(operand), repr(operand)
            number = known.seen.get(key)
            if number is None:
                number = number_of(repr(key).encode())
                unseen[f"{func}: the number that it is given"] = operand
            _keep(known.seen, key, number, _MAX_NUMBERS)
            numbers.append((operand, number))
        else:
            unseen[f"{func}: the host tensor {len(unseen)} that it is given"] = operand
    if unseen:
        check_equal_everywhere(unseen, ranks)
    operation.team.runtime.note(operation.team, operation.id, numbers)


_LARGER = (_aten.expand.default, _aten.select_backward.default, _aten.slice_backward.default)


def _preferred(known: _Known, func: Any, args: Sequence[Any], scan: _Scan) -> Layout | None:
    """In a backward pass, the layout of a gradient that is larger than what it is made of."""
    node = autograd_node() if func in _LARGER and in_backward() else None
    if node is None:
        return None
    layout = known.reduced.get((node._sequence_nr(), tuple(args[1])))
    ranks = scan.operands[0]._layout.ranks
    return layout if layout is not None and layout.ranks == ranks else None
