"""Optimizers whose ``step`` is part of a trace of whole values.

What changes from step to step without a change of the graph are the rates of the groups, which
schedules set, and the counters of steps, which are tensors of this process.  Both are inputs, as
one vector per optimizer:

    float64[rates of the groups..., counters...]

A graph that counts all steps alike writes to its vector, so that the devices have the numbers of
the next call.  The counters themselves are the caller's to advance, after each call.  The state
that a first step would make is made before the step is traced, so that the second call runs the
same graph.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchpmap._base.optimizers import TensorNumbers, state_maker
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import (
    FakeTensor,
    as_if_compiling,
    outside_modes,
    torch_function_off,
)
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.watched import Place, Watched
from torchpmap._trace.whole_capture import WholeCapture

_OPTIONS = ("capturable", "foreach", "fused")
"""They choose between ways to compute the same; the graph is of one way."""


class NotYet(Untraceable):
    """This call cannot be traced, but a later one may."""


class Numbers:
    """What changes from step to step of one optimizer, and what must not."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._rates = [k for k, group in enumerate(self._groups) if type(group.get("lr")) is float]
        entries = list(optimizer.state.values())
        self.counters = [x["step"] for x in entries if isinstance(x.get("step"), torch.Tensor)]
        self._are_alike = len({float(counter) for counter in self.counters}) <= 1
        self._steps: dict[int, int] = {}
        """Place of a counter -> how often a call of the function counts."""
        count = min(1, len(self.counters)) if self._are_alike else len(self.counters)
        self.vector = torch.zeros(len(self._rates) + count, dtype=torch.float64)
        """Stands for the numbers of a call."""
        self._count = count
        self._memory = [counter.numpy() for counter in self.counters]
        """The same numbers; an operation of torch takes five times as long."""
        self._ends = [(x, x.data_ptr()) for x in (*self.counters[:1], *self.counters[-1:])]
        """The first and the last counter, and where they lie: ``x.data = ...`` may change that."""
        self._watched = Watched()
        self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        place = Place(f"a setting of {type(optimizer).__name__}")
        self._watched.add_dict(optimizer, optimizer.__dict__, place.origin)
        for name in ("param_groups", "state"):
            self._watched.add_name(optimizer.__dict__, name, place)
        self._watched.add_size(optimizer.state, place)
        self._watched.add_view(self._groups, place)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._watched.add_view(getattr(optimizer, name).values(), place)
        for k, group in enumerate(self._groups):
            self._watched.add_view(group["params"], place)
            for name in group.keys() - {"params"}:
                if name != "lr" or k not in self._rates:
                    self._watched.add_name(group, name, place)
        for entries in optimizer.state.values():
            self._watched.add_view(entries.values(), place)
        self._watched.seal()

    def hold(self) -> bool:
        """Whether only numbers have changed."""
        groups, memory = self._groups, self._memory
        return (
            self._watched.same()
            and all(type(groups[k]["lr"]) is float for k in self._rates)
            and all(counter.data_ptr() == place for counter, place in self._ends)
            and (not self._are_alike or len(memory) < 2 or bool(memory[0] == memory[-1]))
        )

    def read(self) -> array[float]:
        """The values of the vector in this call."""
        rates = [self._groups[k]["lr"] for k in self._rates]
        return array("d", [*rates, *(float(each) for each in self._memory[: self._count])])

    def count(self) -> None:
        """In the trace, write to the vector what it is in the next call; else it is sent."""
        if self.steps:
            self.vector[len(self._rates) :].add_(self.steps)

    def after(self, values: array[float]) -> array[float]:
        """The vector after a call that began with ``values``."""
        rates = len(self._rates)
        return array("d", [*values[:rates], *(each + self.steps for each in values[rates:])])

    @property
    def steps(self) -> int:
        """By how much a call advances every counter; 0 if it is not the same for all."""
        alike = set(self._steps.values())
        return alike.pop() if len(alike) == 1 and len(self._steps) == len(self.counters) else 0

    def rates(self) -> dict[int, torch.Tensor]:
        """For groups, their rates in the trace."""
        return {k: self.vector[place].clone() for place, k in enumerate(self._rates)}

    def counter(self, place: int) -> torch.Tensor:
        """The counter at a place, in the trace."""
        return self.vector[len(self._rates) + (0 if self._are_alike else place)].clone()

    def note_step(self, counter: torch.Tensor) -> None:
        place = next(k for k, each in enumerate(self.counters) if each is counter)
        self._steps[place] = self._steps.get(place, 0) + 1

    def advance(self) -> None:
        """Count the steps of a call."""
        for place, steps in self._steps.items():
            self._memory[place] += steps
        if self._steps:
            increment_version([self.counters[place] for place in self._steps])


class Optimizers:
    """Those that step in one trace."""

    def __init__(self, capture: WholeCapture, reached: Sequence[Optimizer] = ()) -> None:
        """``reached``: optimizers that the function may change before they step."""
        self._capture = capture
        self._before_all = [(each, _rates(each)) for each in reached]
        self._thread = threading.get_ident()
        self._known: dict[int, tuple[Optimizer, Numbers, list[Any]]] = {}
        self._counters: dict[int, torch.Tensor] = {}
        """By the id of a real counter, its value in the trace."""
        self._rates: dict[tuple[int, int], torch.Tensor] = {}
        self._stepping: dict[int, ExitStack] = {}

    @property
    def numbers(self) -> list[Numbers]:
        return [numbers for _, numbers, _ in self._known.values()]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which steps work on unknown values."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before).remove)
            stack.callback(register_optimizer_step_post_hook(self._after).remove)
            try:
                yield
            finally:  # a step may have raised
                for each in self._stepping.values():
                    each.close()

    def finish(self) -> None:
        """Count the steps; raise if the function itself changes what is an input."""
        with torch.no_grad():
            for numbers in self.numbers:
                numbers.count()
        stepped = [(optimizer, before) for optimizer, _, before in self._known.values()]
        for optimizer, before in (*self._before_all, *stepped):
            if _rates(optimizer) != before:
                raise Untraceable(
                    f"it changes the rate of {type(optimizer).__name__}",
                    users_line(),
                    "scheduler.step() outside of the function",
                )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch_function_off(), outside_modes(), torch.no_grad():
            _make_state(optimizer, self._capture)
        if id(optimizer) not in self._known:
            with torch_function_off(), outside_modes():
                numbers = Numbers(optimizer)
            self._known[id(optimizer)] = optimizer, numbers, _rates(optimizer)
            for k, rate in numbers.rates().items():
                self._rates[id(optimizer), k] = rate
            for place, counter in enumerate(numbers.counters):
                self._counters[id(counter)] = numbers.counter(place)
        numbers = self._known[id(optimizer)][1]
        self._stepping[id(optimizer)] = stack = ExitStack()
        for k, group in enumerate(optimizer.param_groups):
            stack.callback(group.update, {x: group[x] for x in ("lr", *_OPTIONS) if x in group})
            group.update({x: x == "capturable" for x in _OPTIONS if x in group})
            if (id(optimizer), k) in self._rates:
                group["lr"] = self._rates[id(optimizer), k]
        for entries in optimizer.state.values():
            self._replace_counter(numbers, entries, stack)
        stack.enter_context(as_if_compiling())
        stack.enter_context(TensorNumbers(optimizer))

    def _replace_counter(self, numbers: Numbers, entries: dict[str, Any], stack: ExitStack) -> None:
        counter: Any = entries.get("step")
        traced = self._counters.get(id(counter))
        if traced is None:
            return

        def put_back() -> None:
            now = entries["step"]
            if now is not begin or now._version:
                numbers.note_step(counter)
            self._counters[id(counter)] = now
            entries["step"] = counter

        # in double precision: 1 - 0.999**step has four digits in the dtype of counters
        begin = entries["step"] = traced.clone()
        stack.callback(put_back)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._stepping.pop(id(optimizer)).close()
        made = [
            (entries, name)
            for entries in optimizer.state.values()
            for name, value in entries.items()
            if isinstance(value, FakeTensor)
        ]
        for entries, name in made:
            del entries[name]
        if made:  # as SGD with dampening does: its first step is another one
            raise NotYet(
                f"the first step of {type(optimizer).__name__} makes {made[0][1]!r}",
                users_line(),
                "the same call again",
            )


def _rates(optimizer: Optimizer) -> list[Any]:
    return [group.get("lr") for group in optimizer.param_groups]


def _make_state(optimizer: Optimizer, capture: WholeCapture) -> None:
    """Make the state that the step would make first, if there is none."""
    make = state_maker(optimizer)
    if make is None:
        return
    stepped = {id(leaf.real) for leaf in capture.leaves.values() if leaf.stand_in.grad is not None}
    for group in optimizer.param_groups:
        params = group["params"]
        new = {id(p) for p in params if id(p) in stepped and not optimizer.state.get(p)}
        if not new:
            continue
        before = [p.grad for p in params]
        try:
            for p in params:
                p.grad = torch.zeros_like(p) if id(p) in new else None
            make(group, [p for p in params if id(p) in new])
        finally:
            for p, grad in zip(params, before, strict=True):
                p.grad = grad
