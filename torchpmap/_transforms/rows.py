"""The rows of a mapped call one after the other, as plain Python, with collectives between them.

Every row has a thread of its own, and one thread runs at a time, always the first that can: a row
runs until it reaches a collective, then the next row does, and the last to arrive lets all go on.

    row 0  ....all_reduce              ......return
    row 1                ....all_reduce            ......return
                                       | values of all rows are known: each gets its result

The collectives have the same derivative rules as on devices, but nothing else is shared: no vmap,
no trace, no compiler, no process group.  ``_collectives/meanings`` does with the values of all rows
what the documentation of each process-group operation says.  So results are an independent check of
the other ways to run a function, and the function can do everything that Python can.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from torchpmap._base.ambient import Ambient, ambient, applied
from torchpmap._base.errors import CollectiveMismatch, kind_of
from torchpmap._base.torch_internals import TorchDispatchMode, forward_level, jvp_level
from torchpmap._collectives.backend import NAMESPACES, c10d
from torchpmap._collectives.meanings import MEANINGS
from torchpmap._layout.axis_stack import Axis, Partition, subgroup_name
from torchpmap._trace.agreement import ADVICE, Fingerprint
from torchpmap._trace.effects import emit, lines_of
from torchpmap._trace.environment import parameters
from torchpmap._trace.program import Program
from torchpmap._transforms import nans

_GROUP = "rows"

T = TypeVar("T")


class _Abandoned(BaseException):
    """Ends a row because another one failed; no ``except Exception`` of the user's may stop it."""


def run_rows(program: Program, run_row: Callable[[int, Axis], T]) -> list[T]:
    """The results of ``run_row(index, axis)`` for every place of a program's grid, in order;
    ``run_row`` must bind the axis.  Each has a ``.grad`` of its own of what the program's function
    closes over, None at first.

    Raises:
        CollectiveMismatch: rows wait for each other in different collectives.
        What a row raises, with a note that names the row.
    """
    size, leaves = math.prod(program.sizes), parameters(program.fun)
    meeting = _Meeting(size, leaves, {_GROUP: (tuple(range(size)),)})
    results: dict[int, T] = {}
    settings = ambient()

    def subgroup(partition: Partition) -> str:
        name = subgroup_name(_GROUP, partition)
        meeting.groups[name] = partition
        return name

    def run(row: int) -> None:
        with meeting.turn:
            try:
                meeting.await_turn(row)
                meeting.grads = [None] * len(leaves)
                with _around_a_row(meeting, row, settings):
                    axis = Axis(program.names[0], size, torch.tensor(row), _GROUP, subgroup)
                    results[row] = run_row(row, axis)
            except _Abandoned:
                pass
            except BaseException as error:
                meeting.fail(error, program.place(row))
            else:
                meeting.end(row)

    threads = [
        # a thread begins without context variables: those of the caller are copied
        threading.Thread(
            target=contextvars.copy_context().run, args=(run, row), name=f"row-{row}", daemon=True
        )
        for row in range(size)
    ]
    grads = meeting.grads
    with _forward_mode():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    meeting.grads = grads
    if meeting.failure is not None:
        raise meeting.failure
    return [results[row] for row in range(size)]


@contextlib.contextmanager
def _around_a_row(meeting: _Meeting, row: int, settings: Ambient) -> Iterator[None]:
    """Apply the settings that belong to a thread."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(applied(settings))
        # single-threaded: axes are bound per thread
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Collectives(meeting, row))
        stack.enter_context(nans.look())
        yield


@contextlib.contextmanager
def _forward_mode() -> Iterator[None]:
    """Keep torch's level of forward-mode derivatives open while rows run.

    There is one level per process.  The outermost ``jvp`` opens it, and closes it at its end, while
    other rows are still inside theirs.  If the level is open already, ``jvp`` leaves it alone.
    """
    with jvp_level(), forward_ad.dual_level() if forward_level() < 0 else contextlib.nullcontext():
        yield


@dataclass
class _Meeting:
    """Where rows wait for each other; ``turn``, which the running row holds, guards everything."""

    size: int
    leaves: Sequence[torch.Tensor]
    groups: dict[str, Partition]
    turn: threading.Condition = field(default_factory=threading.Condition)
    failure: BaseException | None = None
    _waiting: dict[int, tuple[str, Fingerprint, Any]] = field(default_factory=dict)
    """Row -> group, what it wants to do, and its operand."""
    _given: dict[int, list[Any]] = field(default_factory=dict)
    """Row -> the operands of its group."""
    _ended: set[int] = field(default_factory=set)

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """The gradients of the row that runs."""
        return [leaf.grad for leaf in self.leaves]

    @grads.setter
    def grads(self, grads: list[torch.Tensor | None]) -> None:
        for leaf, grad in zip(self.leaves, grads, strict=True):
            leaf.grad = grad

    def members(self, row: int, group: str) -> tuple[int, ...]:
        """The rows of a group, in the order of their ranks in it."""
        return next(part for part in self.groups[group] if row in part)

    def exchange(self, row: int, group: str, what: Fingerprint, value: Any) -> list[Any]:
        """Wait until all members want to do ``what``; returns their operands, in rank order."""
        self._waiting[row] = (group, what, value)
        members = self.members(row, group)
        present = [self._waiting.get(member, ("", None, value)) for member in members]
        if all(waiting[:2] == (group, what) for waiting in present):
            for member in members:
                del self._waiting[member]
                self._given[member] = [operand for _, _, operand in present]
        grads = self.grads
        self._pass_on()
        self.await_turn(row)
        self.grads = grads
        return self._given.pop(row)

    def await_turn(self, row: int) -> None:
        """Wait until ``row`` is the first of the rows that can run."""

        def can_run(other: int) -> bool:
            return other not in self._waiting and other not in self._ended

        self.turn.wait_for(
            lambda: self.failure is not None or (can_run(row) and not any(map(can_run, range(row))))
        )
        if self.failure is not None:
            raise _Abandoned

    def end(self, row: int) -> None:
        self._ended.add(row)
        self._pass_on()

    def fail(self, error: BaseException, where: str) -> None:
        if self.failure is None:
            error.add_note(where)
            self.failure = error
        self.turn.notify_all()

    def _pass_on(self) -> None:
        """Let another row run; fail if no row can ever run."""
        self.turn.notify_all()
        if not self._waiting or len(self._waiting) + len(self._ended) < self.size:
            return
        table = "\n".join(f"  row {row}: {self._doing(row)}" for row in range(self.size))
        self.failure = CollectiveMismatch(
            f"rows run different collectives, so the result would be wrong:\n{table}\nEvery row "
            f"{ADVICE} a row's own values or axis index."
        )

    def _doing(self, row: int) -> str:
        return str(self._waiting[row][1]) if row in self._waiting else "returned"


class _Collectives(TorchDispatchMode):
    """Runs process-group operations between the rows."""

    def __init__(self, meeting: _Meeting, row: int) -> None:
        super().__init__()
        self._meeting = meeting
        self._row = row

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in NAMESPACES:
            return func(*args, **(kwargs or {}))
        if func is c10d.wait_tensor.default:  # results are there already
            return args[0]
        if func is torch.ops.torchpmap.debug_print.default:
            return self._print(args)
        if func is torch.ops.torchpmap.debug_check.default:
            return func(*args)
        if func not in MEANINGS:
            raise NotImplementedError(f"{func} between rows that run one after the other")
        value, *how, group = args
        place = self._meeting.members(self._row, group).index(self._row)
        name = func._schema.name.partition("::")[2]
        what = f"{name} {' '.join(map(str, how))} of {kind_of(value.shape, value.dtype)}"
        # a copy: this row may write to its operand before another row reads it
        operands = self._exchange(group, what, value.clone())
        return MEANINGS[func](operands, [place], *how)[0]

    def _exchange(self, group: str, what: str, value: Any) -> list[Any]:
        return self._meeting.exchange(self._row, group, Fingerprint(what), value)

    def _print(self, args: Any) -> None:
        text = lines_of(*args)
        for group in args[4]:
            texts = self._exchange(group, "print", text)
            if self._row != self._meeting.members(self._row, group)[0]:
                return
            text = "\n".join(texts)
        emit(text)
