"""Optimizers whose ``step`` is part of a trace of whole values.

What changes from step to step without a change of the graph are settings of the groups, which
schedules set, and the counters of steps, which are tensors of this process.  Both are inputs, as
one vector per optimizer:

    float64[settings of the groups..., counters...]

``lr`` is such a setting from the start.  ``momentum``, ``betas`` and ``weight_decay`` become one
when they have another value than in the trace before, as ``OneCycleLR`` gives them.

A graph that counts all steps alike writes to its vector, so that the devices have the numbers of
the next call.  The counters themselves are the caller's to advance, after each call.  The state
that a first step would make is made before the step is traced, so that the second call runs the
same graph.
"""

from __future__ import annotations

import operator
import threading
from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd.graph import increment_version
from torch.fx import Node
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchpmap._base.optimizers import Positive, TensorNumbers, state_maker
from torchpmap._base.sources import is_foreign, users_line
from torchpmap._base.torch_internals import (
    FakeTensor,
    as_if_compiling,
    outside_modes,
    torch_function_off,
)
from torchpmap._trace.capture import is_real
from torchpmap._trace.decisions import Skippable, decided, numbers_of, tracing
from torchpmap._trace.reach import SIMPLE, STEP_HOOKS
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.watched import Place, Watched
from torchpmap._trace.whole_capture import WholeCapture

_OPTIONS = ("capturable", "foreach", "fused")
"""They choose between ways to compute the same; the graph is of one way."""

_SCHEDULED = ("momentum", "betas", "weight_decay")
"""What a schedule may change beside ``lr``."""

_BY_TORCH = ("_opt_called", "_step_supports_amp_scaling")
"""Attributes that schedules and scalers set around steps."""

_MAX_CHANGES = 3
_EXACT = {"step", "eta", "mu"}
"""Entries of the state of a parameter that steps compute with as numbers of Python."""

_Setting = tuple[int, str]
"""A group, and a name in it."""

_aten = torch.ops.aten
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)
_COPIES = (_aten.alias.default, _aten.clone.default, _aten.detach.default)


class NotYet(Untraceable):
    """This call cannot be traced, but a later one may."""


class Numbers:
    """What changes from step to step of one optimizer, and what must not."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._settings = {
            (k, name): len(_parts(self._groups[k][name])) for k, name in _to_send(optimizer)
        }
        """Those that are inputs, and of how many numbers each is."""
        entries = list(optimizer.state.values())
        self.counters = [x["step"] for x in entries if type(x.get("step")) is torch.Tensor]
        if len(set(map(id, self.counters))) < len(self.counters):
            raise Untraceable("parameters share one counter", users_line(), "one for each")
        self._memory = [counter.numpy() for counter in self.counters]
        """The same numbers; an operation of torch takes five times as long."""
        self._places = [counter.data_ptr() for counter in self.counters]
        """Where they lie: ``x.data = ...`` and ``x.share_memory_()`` change that."""
        self._are_alike = self._are_equal()
        """Whether the vector has one counter for all."""
        self._num_sent = min(1, len(self.counters)) if self._are_alike else len(self.counters)
        self._steps: dict[int, float] = {}
        """Place of a counter -> by how much a call of the function advances it."""
        self._step: float = 0
        """The same for all counters; 0 if they differ, and so must be sent in each call."""
        self._num_settings = sum(self._settings.values())
        self.vector = torch.zeros(self._num_settings + self._num_sent, dtype=torch.float64)
        """Stands for the numbers of a call."""
        self._watched = Watched()
        self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        place = Place(f"a setting of {type(optimizer).__name__}")
        self._watched.add_attributes(optimizer, vars(optimizer), place.origin, names=False)
        for name in ("param_groups", "state"):
            self._watched.add_name(optimizer.__dict__, name, place)
        self._watched.add_view(optimizer.state.values(), place)
        self._watched.add_view(self._groups, place)
        for name in STEP_HOOKS:
            self._watched.add_view(getattr(optimizer, name).values(), place)
        for k, group in enumerate(self._groups):
            self._watched.add_view(group["params"], place)
            for name in group.keys() - {"params"}:
                if (k, name) not in self._settings:
                    self._watched.add_name(group, name, place)
        for entries in optimizer.state.values():
            self._watched.add_view(entries.values(), place)
        users = [kind for kind in type(optimizer).__mro__ if not is_foreign(kind.__module__)]
        for each in (optimizer, *users) if users else ():  # its own step may change its attributes
            for name, x in vars(each).items():
                if isinstance(x, SIMPLE) and name not in _BY_TORCH:
                    self._watched.add_name(optimizer.__dict__, name, place)
        self._watched.seal()

    def _are_equal(self) -> bool:
        return len({float(counter) for counter in self._memory}) <= 1

    def hold(self) -> bool:
        """Whether only numbers have changed."""
        return (
            self._watched.same()
            and all(
                _are_floats(now := self._groups[k][name])
                and len(_parts(now)) == num_parts
                and (name == "lr" or min(_parts(now)) > 0)  # steps ask whether one is zero
                for (k, name), num_parts in self._settings.items()
            )
            and list(map(torch.Tensor.data_ptr, self.counters)) == self._places
            and (not self._are_alike or self._are_equal())
        )

    def read(self) -> array[float]:
        """The values of the vector in this call."""
        settings = (part for k, name in self._settings for part in _parts(self._groups[k][name]))
        return array("d", [*settings, *map(float, self._memory[: self._num_sent])])

    def write_next(self) -> None:
        """At the end of a trace, let the graph make the vector of the next call, if it can."""
        steps = set(self._steps.values())
        if len(steps) == 1 and len(self._steps) == len(self.counters):
            (self._step,) = steps
            with torch.no_grad():
                self.vector[self._num_settings :].add_(self._step)

    def after(self, values: array[float]) -> array[float]:
        """What the graph makes of a vector."""
        begin, step = self._num_settings, self._step
        return array("d", [*values[:begin], *(each + step for each in values[begin:])])

    def settings(self) -> dict[_Setting, Any]:
        """What stands for them in the trace."""
        numbers = iter(self.vector[: self._num_settings].clone().unbind())
        parts = {key: tuple(islice(numbers, num)) for key, num in self._settings.items()}
        return {
            (k, name): own if isinstance(self._groups[k][name], tuple) else own[0]
            for (k, name), own in parts.items()
        }

    def counter(self, place: int) -> torch.Tensor:
        """The counter at a place, in the trace."""
        return self.vector[self._num_settings + (0 if self._are_alike else place)].clone()

    def note_step(self, counter: torch.Tensor, by: float) -> None:
        place = next(k for k, each in enumerate(self.counters) if each is counter)
        self._steps[place] = self._steps.get(place, 0) + by

    def advance(self, done: list[Any]) -> None:
        """Count the steps of a call, if ``done`` is empty, and leave something in it: in one
        builtin, which Ctrl-C does not interrupt.
        """
        if not done:
            counters = map(self._memory.__getitem__, self._steps)
            done.extend(map(operator.iadd, counters, self._steps.values()))
        if self._steps:
            increment_version([self.counters[place] for place in self._steps])


class Optimizers:
    """Those that step in one trace."""

    def __init__(self, capture: WholeCapture, reached: Sequence[Optimizer] = ()) -> None:
        """``reached``: optimizers that the function may change before they step."""
        self._capture = capture
        self._begin = {id(each): (each, _changeable(each)) for each in reached}
        """By id: optimizers, and what schedules may change of them, as it was before."""
        self._thread = threading.get_ident()
        self._known: dict[int, Numbers] = {}
        """By the id of an optimizer that has stepped; so are the next two."""
        self._settings: dict[int, dict[_Setting, Any]] = {}
        self._rewritten: set[int] = set()
        """Those whose own step changes one."""
        self._counters: dict[int, torch.Tensor] = {}
        """By the id of a real counter, its value in the trace."""
        self._stepping: list[tuple[Optimizer, ExitStack]] = []
        """The innermost last: the ``step`` of a subclass may call that of its class."""
        self.made: WeakSet[Optimizer] = WeakSet()
        """Those that the function has made."""
        self.condition: torch.Tensor | None = None
        """Steps change something only where it is true."""

    @property
    def numbers(self) -> list[Numbers]:
        return list(self._known.values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block in which steps work on unknown values."""
        with ExitStack() as stack:
            tracing[self._thread] = self
            stack.callback(tracing.pop, self._thread, None)
            stack.enter_context(decided)
            stack.callback(register_optimizer_step_pre_hook(self._before).remove)
            stack.callback(register_optimizer_step_post_hook(self._after).remove)
            try:
                yield
            finally:  # a step may have raised
                for _, each in reversed(self._stepping):
                    each.close()

    def check(self) -> None:
        """Raise if the function itself changes what is an input."""
        for optimizer, _ in self._begin.values():
            numbers = self._known.get(id(optimizer))
            counters = [] if numbers is None else numbers.counters
            if any(id(counter) in self._capture.stand_ins for counter in counters):
                name = type(optimizer).__name__
                reason = f"it reads a counter of {name}, which each call advances"
                raise Untraceable(reason, users_line(), "a counter of your own")
            self._check_settings(optimizer)

    def _check_settings(
        self, optimizer: Optimizer, inputs: Iterable[_Setting] | None = None
    ) -> None:
        """``inputs``: the only ones that matter before another step, which has its own of others;
        None for all.
        """
        now = _changeable(optimizer)
        _, before = self._begin.setdefault(id(optimizer), (optimizer, now))
        keys = list(now.keys() | before.keys() if inputs is None else inputs)
        has_changed = [now.get(key) for key in keys] != [before.get(key) for key in keys]
        if id(optimizer) in self._rewritten or has_changed:
            raise Untraceable(
                f"it changes a setting of {type(optimizer).__name__}",
                users_line(),
                "scheduler.step() outside of the function",
            )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise Untraceable(
                "LBFGS decides by the values of the loss how often to compute it",
                users_line(),
                "tp.jit for its closure, and step() outside",
            )
        if optimizer in self.made:
            raise Untraceable(f"it makes the {name} that steps", users_line(), "one made outside")
        if not self._is_stepping(optimizer):
            self._check_settings(optimizer, self._settings.get(id(optimizer)))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        with torch_function_off():
            leaves = [self._capture.leaf(self._capture.substitute(p)) for p in params]
        stepped = {id(x.real) for x in leaves if x is not None and x.gradient() is not None}
        with torch_function_off(), outside_modes(), torch.no_grad():
            _make_state(optimizer, stepped)
            if self.condition is not None:
                self._count_on_devices(optimizer)
        if id(optimizer) not in self._known:
            with torch_function_off(), outside_modes():
                numbers = self._known[id(optimizer)] = Numbers(optimizer)
            self._settings[id(optimizer)] = numbers.settings()
            for place, counter in enumerate(numbers.counters):
                self._counters[id(counter)] = numbers.counter(place)
        numbers = self._known[id(optimizer)]
        stack = ExitStack()
        if not self._stepping:
            stack.callback(_refuse_to_count, optimizer, numbers_of(optimizer))
        if self.condition is not None and not self._stepping:
            stack.callback(Skippable(optimizer, self.condition, self._capture).end)
        self._stepping.append((optimizer, stack))
        for group in optimizer.param_groups:
            stack.callback(group.update, {x: group[x] for x in _OPTIONS if x in group})
            group.update({x: x == "capturable" for x in _OPTIONS if x in group})
        settings = self._settings[id(optimizer)]
        for (k, name), value in settings.items():
            stack.callback(self._put_back, optimizer, k, name, optimizer.param_groups[k][name])
            optimizer.param_groups[k][name] = value
        for entries in optimizer.state.values():
            for name in _EXACT & entries.keys():
                self._widen(numbers, entries, name, stack)
        stack.enter_context(as_if_compiling())
        positive = [part for (_, x), own in settings.items() if x != "lr" for part in _parts(own)]
        stack.enter_context(TensorNumbers())
        stack.enter_context(Positive(positive))

    def _is_stepping(self, optimizer: Optimizer) -> bool:
        return any(each is optimizer for each, _ in self._stepping)

    def _put_back(self, optimizer: Optimizer, group: int, name: str, before: Any) -> None:
        given = self._settings[id(optimizer)][group, name]
        is_new = optimizer.param_groups[group][name] is not given
        if is_new or any(part._version for part in _parts(given)):
            self._rewritten.add(id(optimizer))
        optimizer.param_groups[group][name] = before

    def _widen(
        self, numbers: Numbers, entries: dict[str, Any], name: str, stack: ExitStack
    ) -> None:
        counter: Any = entries[name]
        traced = self._counters.get(id(counter))
        if traced is None and is_real(counter) and counter.is_floating_point():
            traced = counter.double()  # it is as any other state
        if traced is None:
            return

        def put_back() -> None:
            now, entries[name] = entries[name], counter
            if id(counter) not in self._counters:
                if now is not begin or now._version:
                    counter.copy_(now)
                return
            self._counters[id(counter)] = now
            if now is not begin or now._version:
                numbers.note_step(counter, self._advance(now, begin_node))

        # in double precision: 1 - 0.999**step has four digits in the dtype of counters
        begin = entries[name] = traced.clone()
        begin_node = self._capture.node_of(begin)
        stack.callback(put_back)

    def _count_on_devices(self, optimizer: Optimizer) -> None:
        """Move the counters to where the parameters are: only the devices know if a step counts."""
        if id(optimizer) in self._known and self._known[id(optimizer)].counters:
            reason = f"{type(optimizer).__name__} steps with and without a GradScaler"
            raise Untraceable(reason, users_line(), "one of the two")
        for p, entries in optimizer.state.items():
            if type(entries.get("step")) is torch.Tensor:
                none = torch.zeros_like(p.flatten()[:1], dtype=entries["step"].dtype).sum()
                entries["step"] = none + entries["step"]

    def _advance(self, now: torch.Tensor, begin: Node | None) -> float:
        """By how much a step has advanced a counter."""
        node, total = self._capture.node_of(now), 0.0
        while node is not begin and node is not None:
            more: Any = node.args[1] if node.target in _ADDITIONS else None
            if isinstance(more, int | float) and not node.kwargs:
                total += more
            elif node.target not in _COPIES:
                raise Untraceable(
                    "its optimizer does more to a counter than add a number",
                    users_line(),
                    "state['step'] += 1",
                )
            (node,) = node.all_input_nodes
        return total

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        each: Any = None
        while each is not optimizer:  # a step inside may have raised
            each, stack = self._stepping.pop()
            stack.close()
        if self._is_stepping(optimizer):
            return
        real_of = self._capture.reals()
        made = []
        for entries in optimizer.state.values():
            for name, value in list(entries.items()):
                if id(value) in real_of:  # state["sum"] += 1 stores what it has written to
                    entries[name] = real_of[id(value)]
                elif isinstance(value, FakeTensor):
                    made.append((entries, name))
        for entries, name in made:
            del entries[name]
        if made:  # as SGD with dampening does: its first step is another one
            _count(optimizer, f"makes {made[0][1]!r} anew", f"state[{made[0][1]!r}].copy_(value)")
            raise NotYet(
                f"the first step of {type(optimizer).__name__} makes {made[0][1]!r}",
                users_line(),
                "the same call again",
            )


def _refuse_to_count(optimizer: Optimizer, before: Hashable) -> None:
    if numbers_of(optimizer) != before:
        _count(optimizer, "changes a number of Python", "a tensor, such as torch.zeros(())")


def _count(optimizer: Optimizer, what: str, instead: str) -> None:
    """Raise if steps have done too often what makes another graph of each."""
    _changes[optimizer] = _changes.get(optimizer, 0) + 1
    if _changes[optimizer] > _MAX_CHANGES:
        name = type(optimizer).__name__
        raise Untraceable(f"each step of {name} {what} in its state", users_line(), instead)


_changes: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""How often traced steps have done what another graph follows from."""
_last: WeakKeyDictionary[Optimizer, dict[_Setting, Any]] = WeakKeyDictionary()
"""What schedules may change, as it was in the last trace; None: it has changed before."""


def _to_send(optimizer: Optimizer) -> list[_Setting]:
    """The settings that are inputs of a trace that begins now."""
    groups = dict(enumerate(optimizer.param_groups))
    rates = [(k, "lr") for k, group in groups.items() if type(group.get("lr")) is float]
    if state_maker(optimizer) is None:  # nothing is known of what its step asks of a setting
        return rates
    now = {(k, x): group[x] for k, group in groups.items() for x in _SCHEDULED if x in group}
    now = {key: value for key, value in now.items() if _are_floats(value)}
    before = _last.get(optimizer, now)
    changed = {key for key, value in now.items() if before.get(key, value) != value}
    _last[optimizer] = now | dict.fromkeys(changed)
    return [*rates, *(key for key in now if key in changed and min(_parts(now[key])) > 0)]


def _parts(setting: Any) -> tuple[Any, ...]:
    return setting if isinstance(setting, tuple) else (setting,)


def _are_floats(setting: Any) -> bool:
    return setting != () and all(type(part) is float for part in _parts(setting))


def _changeable(optimizer: Optimizer) -> dict[_Setting, Any]:
    groups = enumerate(optimizer.param_groups)
    return {(k, x): group.get(x) for k, group in groups for x in ("lr", *_SCHEDULED)}


def _make_state(optimizer: Optimizer, stepped: Collection[int]) -> None:
    """Make the state that the step of parameters, by their ids, would make first."""
    make = state_maker(optimizer)
    if make is None:
        return
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
