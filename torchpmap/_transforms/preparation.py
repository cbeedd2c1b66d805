"""The first call of a kind: choose devices, trace, make the plan, compile.

``_transforms/pmap`` keeps the result by key, and later calls look it up.
"""

from __future__ import annotations

import functools
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchpmap._base.ambient import ambient, keyed
from torchpmap._base.errors import kind_of, warn
from torchpmap._base.sources import defined_at
from torchpmap._base.torch_internals import innermost, is_transformed, outside_transforms
from torchpmap._layout.grid import Grid
from torchpmap._layout.layout import Layout
from torchpmap._plan.lower import Target, lower
from torchpmap._plan.mapped_program import MappedProgram
from torchpmap._plan.plan import Drawn, Plan
from torchpmap._plan.uncompiled import UncompiledPlan
from torchpmap._runtime.current import process_count
from torchpmap._sharded.global_view import check_host_values
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import check_open
from torchpmap._trace.environment import Environment, Surroundings, named_tensors, tensors_of
from torchpmap._trace.kinds import absence, insist, oddity
from torchpmap._trace.program import Program
from torchpmap._trace.repetition import unrolled
from torchpmap._trace.untraceable import Untraceable
from torchpmap._transforms.call import CallArguments, MapOptions, Static, listed, told
from torchpmap._transforms.retraces import Retraces
from torchpmap.random._streams import new_seed, peek_key

_EQUAL = (
    "Make them equal (torchpmap.multihost.broadcast; for a seed, torch.manual_seed with one "
    "number)."
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """One key's answer: what to run and where each leaf of the call goes."""

    plan: Plan | UncompiledPlan
    surroundings: Surroundings
    in_place: bool
    """Whether the key says that every block is where the plan wants it."""
    positions: tuple[int, ...]
    """Leaves that travel as blocks."""
    layouts: tuple[Layout, ...]
    donated: tuple[int, ...]
    paths: tuple[str, ...]
    program: Program
    target: Target
    uncompared: list[bool]
    """Empty once the processes have compared what they give to the plan, or if they need not."""

    @functools.cached_property
    def direct(self) -> Plan | None:
        """The plan, if its outputs need nothing more (``Plan.has_final_outputs``)."""
        return self.plan if isinstance(self.plan, Plan) and self.plan.has_final_outputs else None

    @functools.cached_property
    def is_lone(self) -> bool:
        """Whether ``direct`` returns one value, in no container."""
        direct = self.direct
        return direct is not None and direct.structure.root is None and not direct.nones


@dataclass(frozen=True, eq=False)
class Decided:
    """What a front end makes of a call: where its parts go, and what runs on each of them."""

    program: Program
    grid: Grid
    layouts: tuple[Layout, ...]
    """Of the leaves that travel."""
    key: Hashable
    """What the plan depends on, besides the layouts and the leaves that stay."""
    is_whole: bool = False
    """Whether each process has all of each value, as in a ``shard_map``: these, and what the
    function closes over, are to be the same in all.  In a ``pmap`` each has its own, as in JAX.
    """


class Preparation:
    """The plans of one mapped function, by what they were made for.  A front end says what a call
    is (``arguments_of``), and how it lies on the devices (``decide``).
    """

    def __init__(self, fun: Callable[..., Any], options: MapOptions) -> None:
        self._fun = fun
        self.options = options
        self.environment = Environment(fun)
        """As of the traces of all plans."""
        self.prepared: dict[Hashable, Prepared] = {}
        """By the keys of calls, and by what their plans depend on, which is less."""
        self._differentiables: dict[Plan | UncompiledPlan, MappedProgram] = {}
        self._told_of_loops = False
        self._seed = new_seed()
        self._retraces = Retraces()

    def clear(self, because: str, *, in_new_pool: bool = False) -> None:
        """Forget all plans; ``because``: why, as logs say it."""
        if self.prepared:
            self._retraces.because = because
        self.prepared.clear()
        self._differentiables.clear()
        if in_new_pool:
            self._retraces.clear()

    def arguments_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Check a call (statics already wrapped) against the options, and take it apart."""
        raise NotImplementedError

    def decide(self, call: CallArguments) -> Decided:
        """Choose devices and layouts, or raise what is wrong with a call; nothing is sent."""
        raise NotImplementedError

    def whole_program(self, call: CallArguments) -> Program:
        """The program of a call that runs in the calling process, on whole arguments."""
        raise NotImplementedError

    def check_devices(self, call: CallArguments) -> None:
        """Raise the errors of choosing devices for a call."""
        self.decide(call)

    def prepare(self, call: CallArguments, *, has_numbers: bool = True) -> Prepared:
        """Find or make the plan of a call; ``has_numbers``: whether the call is to run, so that its
        arguments need numbers.
        """
        for path, leaf in zip(call.paths, call.leaves, strict=True):
            if type(leaf) is ShardedTensor:
                check_open(leaf)
            if has_numbers and isinstance(leaf, torch.Tensor):
                insist(leaf, f"{self.options.prefix}: argument {path}")
        decided = self.decide(call)
        statics = [leaf for leaf in call.leaves if isinstance(leaf, Static)]
        own = filter(None, [static.environment(self._fun) for static in statics])
        intact = [static.is_intact for static in statics]
        surroundings = Surroundings([self.environment, *own], intact)
        with surroundings.tracing():
            return self._plan_for(call, decided, surroundings)

    def _plan_for(
        self, call: CallArguments, decided: Decided, surroundings: Surroundings
    ) -> Prepared:
        program, layouts = decided.program, decided.layouts
        leaves, paths = call.travelling(call.leaves), tuple(call.travelling(call.paths))
        # before anything is sent
        refuse_aliased_donation(self.options.prefix, paths, call.donated, leaves)
        in_place = all(
            type(leaf) is ShardedTensor and leaf._alive()[0].same_place(layout)
            for leaf, layout in zip(leaves, layouts, strict=True)
        )
        # arrays, tensors and ShardedTensors of one shape are different calls, but the same program
        constants = tuple(leaf for leaf in call.leaves if leaf is None or isinstance(leaf, Static))
        kind = (
            call.structure,
            call.structure.dict_order,
            keyed(),
            call.positions,
            constants,
            layouts,
            decided.key,
        )
        found = self.prepared.get(kind)
        if found is None or not found.plan.holds():
            broken = ""
            if found is not None:
                self._differentiables.pop(found.plan, None)
                broken = found.plan.broken_by() if isinstance(found.plan, Plan) else ""
            given = decided.grid, self._seed, ambient(), defined_at(self._fun), _described(call)
            target = self.options.target(*given)
            self._note_trace(call, layouts, target.arguments, broken)
            plan = self._make_plan(target, program, layouts)
            uncompared = [True] if decided.is_whole else []
            known = call.positions, layouts, call.donated, paths, program, target, uncompared
            found = self.prepared[kind] = Prepared(plan, surroundings, in_place, *known)
        return replace(found, surroundings=surroundings, in_place=in_place)

    def check_equal(self, prepared: Prepared, leaves: Sequence[Any]) -> None:
        """Raise if processes give different host values where all devices are to have the same.
        Once for each kind of call, as it waits for all of them.
        """
        if not prepared.uncompared:
            return
        if process_count() > 1:
            target, devices = prepared.target, prepared.target.grid.axis_devices
            kinds = (kind_of(each.block_shape, each.dtype) for each in prepared.layouts)
            title = f"{target.name}({', '.join(kinds)}) on {len(devices)} devices"
            with outside_transforms():
                named = self._given(prepared, leaves)
                check_host_values(named, devices, (title, target.where), _EQUAL)
        prepared.uncompared.clear()

    def _given(self, prepared: Prepared, leaves: Sequence[Any]) -> dict[str, Any]:
        """What is to be the same in all processes, as messages name it."""
        prefix, plan = self.options.prefix, prepared.plan
        given = [leaves[position] for position in prepared.positions]
        pairs = zip(prepared.paths, given, strict=True)
        named = {f"argument {path}": innermost(x) for path, x in pairs}
        statics = tuple(leaf.value for leaf in leaves if isinstance(leaf, Static))
        reached = named_tensors(self._fun) + (named_tensors(self._fun, statics) if statics else [])
        if isinstance(plan, Plan):
            names = {id(x): name for name, x in reached}
            tensors = [each.tensor for each in plan.captured if not isinstance(each, Drawn)]
            reached = [(names.get(id(x), "unnamed"), x) for x in tensors]
            draws = len(tensors) < len(plan.captured)
        else:
            draws = True  # for all that is known before it has run
        counts: Counter[str] = Counter()
        for name, x in reached:
            counts[name] += 1
            which = f", number {counts[name]}" if counts[name] > 1 else ""
            if oddity(x) is None and absence(x) is None:
                named[f"a tensor that it closes over ({name}{which})"] = innermost(x)
        if draws and self.options.randomness == "same":
            named["the seed of its random numbers"] = peek_key()
        return {f"{prefix}: {name}": x for name, x in named.items()}

    def differentiable(self, prepared: Prepared) -> MappedProgram:
        """The call as transforms see it."""
        found = self._differentiables.get(prepared.plan)
        if found is None:
            found = MappedProgram(
                prepared.target,
                prepared.program,
                prepared.layouts,
                prepared.plan,
                prepared.surroundings.copy(),
                self._outside(),
            )
            self._differentiables[prepared.plan] = found
        return found

    def _outside(self) -> frozenset[int]:
        """Ids of the tensors that the function can reach, if transforms trace the call; else
        empty.
        """
        return frozenset(map(id, tensors_of(self._fun)) if is_transformed() else ())

    def _make_plan(
        self, target: Target, program: Program, layouts: tuple[Layout, ...]
    ) -> Plan | UncompiledPlan:
        options = self.options
        if options.backend is not None:
            try:
                plan = lower(target, program.run, layouts, self._outside())
            except Untraceable as verdict:
                self._retraces.untraced(options, verdict, "without tracing (as compile=False)")
            else:
                if plan.repeated is not None and not self._told_of_loops:
                    self._told_of_loops = True
                    warn(f"{options.prefix}: {unrolled(plan.repeated)}")
                return plan
        return UncompiledPlan(program, target.grid, target.prefix, target.timeout, target.where)

    def _note_trace(
        self, call: CallArguments, layouts: Sequence[Layout], arguments: str, broken: str
    ) -> None:
        """Note and log a trace; ``broken``: why the plan for this kind of call does not hold."""
        names = [f"argument {path}" for path in call.paths]
        kinds = dict(zip(names, map(told, call.of_kinds().leaves), strict=True))
        places = dict(zip(call.travelling(names), layouts, strict=True))
        self._retraces.tell(self.options, kinds, places, arguments, broken)


def refuse_aliased_donation(
    prefix: str, paths: Sequence[str], donated: Sequence[int], leaves: Sequence[Any]
) -> None:
    """Raise if a donated tensor is passed twice; ``donated`` are places among ``leaves``.  What is
    on the host is copied to the devices, and not given up: it may be passed as often as one likes.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return
    for position in donated:
        for other, leaf in enumerate(leaves):
            if other != position and leaf is leaves[position] and type(leaf) is ShardedTensor:
                raise ValueError(
                    f"{prefix}: argument {paths[position]} is donated, but the "
                    f"same tensor is also argument {paths[other]}. Donate it once and pass it "
                    "once, or pass a copy."
                )


def _described(call: CallArguments) -> str:
    """The arguments of a call, as the function sees them."""

    def seen(each: tuple[int, Any]) -> str:
        position, kind = each
        if kind is None or isinstance(kind, Static):
            return f"= {reprlib.repr(kind and kind.value)}"
        shape, dtype = kind
        return kind_of(call.seen_shape(position, shape), dtype)

    return listed(call.paths, map(seen, enumerate(call.of_kinds().leaves)))
