"""What this process runs with the others, said to its watch and to the other processes.

Before anything runs for the first time, the processes compare it through the store.  From then on
it has a number, which is the same in all of them; its collectives carry the number along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from torchpmap._base.errors import kind_of
from torchpmap._base.torch_internals import (
    has_transforms,
    num_modes,
    outside_modes,
    outside_transforms,
)
from torchpmap._collectives.backend import c10d
from torchpmap._layout.axis_stack import group_name
from torchpmap._runtime import wire
from torchpmap._runtime.executor import Compiled
from torchpmap._runtime.groups.process_groups import Groups, RankPartition, is_communication
from torchpmap._runtime.groups.shared_memory import Occasion
from torchpmap._runtime.task import Task
from torchpmap._runtime.torchrun.history import History
from torchpmap._runtime.torchrun.rendezvous import Rendezvous, mismatch, shown
from torchpmap._runtime.torchrun.watch import Watch, Watched
from torchpmap._trace.agreement import is_equal
from torchpmap._trace.compile import Definition
from torchpmap._trace.pickling import number_of

Ranks = tuple[int, ...]


class Defined(NamedTuple):
    """A compiled plan, and what the other processes know of it."""

    compiled: Compiled
    name: str
    shown: str
    """With its inputs and the place of the function, as messages name it."""
    axis: Ranks
    """The ranks that its collectives wait for; empty if there are none."""
    number: int
    """Identifies the plan: the same number in all processes."""
    timeout: float | None
    """Its own; None: that of the runtime."""
    is_watched: bool
    """Whether a call of it may have to be ended, whatever the runtime's timeout is."""
    has_header: bool
    """Whether a call sends what it is, as its collectives do not tell."""


class Calls:
    """One per process."""

    def __init__(
        self, rendezvous: Rendezvous, groups: Groups, watch: Watch, timeout: float | None
    ) -> None:
        """``timeout``: how many seconds a call may take that has none of its own."""
        self.timeout = timeout
        self.history = History(rendezvous)
        self._rendezvous, self._groups, self._watch = rendezvous, groups, watch
        self._occasion = groups.occasion
        self._occasion.differ = self.history.refuse
        self._serials: dict[Ranks, dict[int, int]] = {}
        """Programs that run uncompiled over some ranks -> which of them it is: in all processes the
        same.
        """

    # -- agreement ---------------------------------------------------------------------------------

    def agree_on_plan(
        self, definition: Definition, groups: dict[str, RankPartition], device: torch.device
    ) -> int:
        """Raise unless all processes are about to run the same plan; its number."""
        ranks, text = definition.ranks, described(definition, device)
        turn = self._rendezvous.turn_of(ranks)  # tells two functions apart that do the same
        if len(ranks) > 1:
            self._rendezvous.agree(ranks, text, title(definition), definition.where)
        for name, partition in groups.items():
            self._groups.ensure(name, partition)
        return number_of(f"{turn} {text}".encode())

    def defined(
        self,
        definition: Definition,
        compiled: Compiled,
        number: int,
        groups: dict[str, RankPartition],
    ) -> Defined:
        """A plan on which all processes have agreed, and that is compiled."""
        ranks = definition.ranks
        communicating = compiled.communicates
        # on an asynchronous device nothing waits for a header
        has_header = communicating and self._groups.sends_plain_data(groups)
        if has_header:
            self._groups.ensure(group_name(ranks), (ranks,))
        name = self._groups.calls[number] = shown(title(definition), definition.where)
        return Defined(
            compiled,
            definition.name,
            name,
            ranks if communicating else (),
            number,
            definition.timeout,
            communicating or definition.timeout is not None,
            has_header,
        )

    def agree(self, ranks: Ranks, mine: bytes, what: str) -> bool:
        """Whether all processes of ``ranks`` give the same."""
        name, number = group_name(ranks), number_of(what.encode())
        self._groups.calls[number] = what
        with self._during(ranks, what, number, None):
            self._groups.ensure(name, (ranks,))
            return is_equal(mine, len(ranks), name)

    # -- running -----------------------------------------------------------------------------------

    def run(self, plan: Defined, blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a plan that waits for other processes, has a timeout, or is started in a transform or
        a mode.
        """
        axis, watch, occasion = plan.axis, self._watch, self._occasion
        timeout = self.timeout if plan.timeout is None else plan.timeout
        watch.begin(watch.announced(axis, plan.shown, timeout))
        occasion.begin(plan.number, self.history.of(axis), axis)
        header = None
        try:
            if plan.has_header:
                header = _Header(axis, occasion, self._groups.calls)
            try:
                with plain():
                    results = plan.compiled.run(blocks)
            except Exception as error:
                if header is not None and is_communication(error):
                    header.compare()  # it may tell the reason
                raise
            if header is not None:  # once: what has failed does not fail again, but is garbage
                header.compare()
            return results
        finally:
            occasion.end()
            watch.end()

    def watched(self, plan: Defined) -> Watched | None:
        """A plan that a device runs later, in its place among all calls; None if nothing can make
        it necessary to end it.
        """
        timeout = self.timeout if plan.timeout is None else plan.timeout
        if plan.axis or timeout is not None:
            return self._watch.announced(plan.axis, plan.shown, timeout)
        return None

    def run_later(
        self, plan: Defined, history: int, blocks: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run such a plan; ``history``: of its axis when it was called."""
        self._occasion.begin(plan.number, history, plan.axis)
        try:
            return plan.compiled.run(blocks)
        finally:
            self._occasion.end()

    def of_task(self, task: Task, blocks: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A block that runs a function uncompiled.  The processes agree on every such call: it has
        no plan that was compared.
        """
        ranks, inputs = task.ranks, ", ".join(kind_of(each.shape, each.dtype) for each in blocks)
        what = f"{task.name}({inputs}), compile=False"
        serials = self._serials.setdefault(ranks, {})
        which = serials.setdefault(task.serial, len(serials)) if task.serial else 0
        if len(ranks) > 1:
            text = f"{what}\nnumber {which} of the functions that run so"
            self._rendezvous.agree(ranks, text, what, task.where)
        self._groups.ensure(task.group, (ranks,))
        number, name = number_of(f"{which} {what}".encode()), shown(what, task.where)
        self._groups.calls[number] = name
        return self._during(ranks, name, number, task.timeout)

    @contextmanager
    def _during(
        self, ranks: Ranks, what: str, number: int, timeout: float | None
    ) -> Iterator[None]:
        self._watch.begin(self._watch.announced(ranks, what, timeout))
        self._occasion.begin(number, self.history.of(ranks), ranks)
        try:
            yield
        finally:
            self._occasion.end()
            self._watch.end()


def plain() -> AbstractContextManager[None]:
    """Leaves the caller's transforms and modes: a plan runs on the devices' own values."""
    return _plain() if has_transforms() or num_modes() else nullcontext()


@contextmanager
def _plain() -> Iterator[None]:
    with outside_transforms(), outside_modes():
        yield


class _Header:
    """Tells the other processes which call this one makes, if its collectives do not tell: Gloo
    carries only data, so two calls of equal shapes would exchange theirs.  It is under way from its
    making on, while the call runs, and so costs no time of waiting.
    """

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


def title(definition: Definition) -> str:
    """``"step(float32[1, 3]) on 2 devices"``."""
    inputs = definition.arguments or ", ".join(kind_of(*given) for given in definition.inputs)
    return f"{definition.name}({inputs}) on {len(definition.ranks)} devices"


def described(definition: Definition, device: torch.device) -> str:
    """A plan for ``device`` as text.  It has no place in a file: a function may be written down
    once for each process.
    """
    backend = definition.backend
    lines: Iterable[str] = [
        title(definition),
        f"compile: {backend.name} {backend.mode} {backend.options}",
        *str(definition.graph.graph).splitlines(),
    ]
    constants = definition.graph.named_buffers()
    text = "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in constants)])
    return text.replace(str(device), device.type)  # each process has a number of its own


def _value(constant: torch.Tensor) -> str:
    if constant.numel() <= 64:
        return str(constant.tolist())
    number = number_of(bytes(wire.bytes_of(constant.contiguous())))
    return f"{kind_of(constant.shape, constant.dtype)} number {number}"
