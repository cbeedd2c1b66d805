"""The first call of a kind: choose devices, trace, make the plan, compile.

``_transforms/pmap`` keeps the result by key, and later calls look it up.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchpmap._base import log
from torchpmap._base.ambient import KEYED, ambient, keyed
from torchpmap._base.devices import Device
from torchpmap._base.errors import TraceError, kind_of, warn
from torchpmap._base.pytree import flatten_call
from torchpmap._base.torch_internals import is_transformed
from torchpmap._layout.grid import Cut, Grid
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.derivatives import MappedProgram
from torchpmap._plan.lower import Target, lower
from torchpmap._plan.plan import Plan
from torchpmap._plan.uncompiled import UncompiledPlan
from torchpmap._runtime.current import check_devices, process_count, process_index, runtime
from torchpmap._runtime.current import devices as all_devices
from torchpmap._sharded.tensor import ShardedTensor, check_open, spans_processes
from torchpmap._sharded.transfer import host_tensor
from torchpmap._trace.compile import EAGER
from torchpmap._trace.environment import Environment
from torchpmap._trace.kinds import insist
from torchpmap._trace.program import Constant, Input, Program
from torchpmap._trace.trace import Untraceable
from torchpmap._transforms.arguments import CallArguments, Options, Static, take_apart
from torchpmap._transforms.nesting import counts_of_list, cuts_of, device_counts, inner_call
from torchpmap._transforms.retraces import Retraces
from torchpmap.random._streams import new_seed

_DATA = (torch.Tensor, np.ndarray)
_MAX_DESCRIBED = 8
"""How many arguments a note or a log names."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """One key's answer: what to run and where each leaf of the call goes."""

    plan: Plan | UncompiledPlan
    positions: tuple[int, ...]
    """Leaves that travel as blocks."""
    layouts: tuple[Layout, ...]
    in_place: bool
    """Whether the key says that every block is where the plan wants it."""
    direct: Plan | None
    """The plan, if its outputs need nothing more (``Plan.has_final_outputs``)."""
    is_lone: bool
    """Whether ``direct`` returns one value, in no container."""
    donated: tuple[int, ...]
    paths: tuple[str, ...]
    program: Program
    grid: Grid
    arguments: str
    """As notes and logs name them."""


class Preparation:
    """The plans of one mapped function, by what they were made for."""

    def __init__(
        self, fun: Callable[..., Any], options: Options, inner: Preparation | None = None
    ) -> None:
        """``inner``: the preparation of ``fun``, if it is mapped itself."""
        self._fun = fun
        self.options = options
        self._inner = inner
        self._plans: dict[Hashable, Plan | UncompiledPlan] = {}
        self._differentiables: dict[Plan | UncompiledPlan, MappedProgram] = {}
        self._warned: set[str] = set()
        self._seed = new_seed()
        self._retraces = Retraces()
        self._cleared_because = ""

    def clear(self, because: str, *, in_new_pool: bool = False) -> None:
        """Forget all plans; ``because``: why, as logs say it."""
        if self._plans:
            self._cleared_because = because
        self._plans.clear()
        self._differentiables.clear()
        if in_new_pool:
            self._retraces.clear()

    def arguments_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_all_rows: bool = False
    ) -> CallArguments:
        """Check a call (statics already wrapped) against the options, and take it apart.

        ``has_all_rows``: whether the arguments have the rows of all processes in any case.
        """
        options = self.options
        leaves, _ = flatten_call(args, kwargs)
        spans = has_all_rows or any(map(spans_processes, leaves))
        size = options.axis_size
        if size is not None and not spans and process_count() > 1:  # it counts all processes' rows
            within = options.devices or all_devices(options.platform)
            processes = len({device.process_index for device in within})
            if size % processes:
                raise ValueError(
                    f"{options.prefix}: axis_size={size} counts the rows of all processes, but "
                    f"does not divide over {processes} of them. Make it a multiple of {processes}."
                )
            options = replace(options, axis_size=size // processes)
        chosen = options.devices
        num_devices = None if chosen is None else len(chosen if spans else _here(chosen))
        return take_apart(self._fun, options, args, kwargs, num_devices, spans)

    def prepare(self, call: CallArguments, *, has_numbers: bool = True) -> Prepared:
        """Find or make the plan of a call; ``has_numbers``: whether the call is to run, so that its
        arguments need numbers.
        """
        for path, leaf in zip(call.paths, call.leaves, strict=True):
            if type(leaf) is ShardedTensor:
                check_open(leaf)
            if has_numbers and isinstance(leaf, torch.Tensor):
                insist(leaf, f"{self.options.prefix}: argument {path}")
        levels = self._levels(call)
        return self._plan_for(levels, self._choose_devices(levels))

    def check_devices(self, call: CallArguments) -> None:
        """Raise the errors of choosing devices for a call."""
        self._choose_devices(self._levels(call))

    def _levels(self, call: CallArguments) -> list[_Level]:
        """This call, and those of mapped functions directly inside it that can share devices."""
        levels = [_Level(self, call)]
        inner = self._inner if process_count() == 1 else None
        while inner is not None:
            found = inner_call(inner._fun, inner.options, levels[-1].call)
            if found is None:
                break
            levels.append(_Level(inner, found))
            inner = inner._inner
        return levels

    def _choose_devices(self, levels: Sequence[_Level]) -> Grid:
        """As many devices as can have equally many rows each; a given list is taken as it is.

        With several processes, the rows are those of this process, on its devices, unless an
        argument has the rows of all processes.
        """
        options = self.options
        spans = levels[0].call.spans
        sizes = [level.call.size for level in levels]
        names = tuple(level.preparation.options.axis_name for level in levels)
        if options.devices is not None:
            mine = options.devices if spans else _here(options.devices)
            counts = counts_of_list(sizes, len(mine))
            if counts is None:
                raise ValueError(self._wrong_number(sizes, mine))
            check_devices(options.devices)
            if len(mine) < len(options.devices):
                counts = (len(options.devices),)
            return Grid(mine, options.devices, counts, names)
        available = tuple(all_devices(options.platform))
        if process_count() > 1 and not spans:
            return Grid(_here(available), available, (len(available),), names)
        counts = device_counts(sizes, len(available))
        devices = available[: math.prod(counts)]
        return Grid(devices, devices, counts, names)

    def _wrong_number(self, sizes: Sequence[int], devices: tuple[Device, ...]) -> str:
        text = (
            f"{self.options.prefix}: Leading axis size of input to pmapped function must "
            f"equal the number of local devices passed to pmap. Got axis_size={sizes[0]}, "
            f"num_local_devices={len(devices)} (devices={list(devices)})."
        )
        if len(sizes) == 1:
            return text
        product = " * ".join(map(str, sizes))
        return f"{text} For a pmap of a pmap, {product} = {math.prod(sizes)} devices will do too."

    def program(self, call: CallArguments, lanes: int) -> Program:
        options = self.options
        template = tuple(
            Constant(leaf.value if isinstance(leaf, Static) else None)
            if leaf is None or isinstance(leaf, Static)
            else Input(axis)
            for leaf, axis in zip(call.leaves, call.axes, strict=True)
        )
        return Program(
            self._fun,
            options.name,
            call.structure,
            template,
            options.out_axes,
            options.axis_name,
            options.check_replicated,
            lanes,
            options.randomness,
            self._seed,
        )

    def _plan_for(self, levels: Sequence[_Level], grid: Grid) -> Prepared:
        options, call = self.options, levels[0].call
        program = _program_of(levels, grid)
        leaves, paths = call.travelling(call.leaves), tuple(call.travelling(call.paths))
        refuse_aliased_donation(
            options.prefix, paths, call.donated, leaves
        )  # before anything is sent
        cuts = cuts_of([level.call for level in levels])
        layouts = tuple(_layout_of(leaf, cut, grid) for leaf, cut in zip(leaves, cuts, strict=True))
        in_place = all(
            type(leaf) is ShardedTensor and leaf._alive()[0].same_place(layout)
            for leaf, layout in zip(leaves, layouts, strict=True)
        )
        # arrays, tensors and ShardedTensors of one shape are different calls, but the same program
        constants = tuple(leaf for leaf in call.leaves if leaf is None or isinstance(leaf, Static))
        kind = (
            call.structure,
            keyed(),
            call.positions,
            constants,
            layouts,
            call.axes,
            grid.sizes,
            program.all_lanes,
        )
        arguments = _described(call)
        plan = self._plans.get(kind)
        if plan is None or not plan.holds():
            broken = "" if plan is None else plan.broken_by()
            if plan is not None:
                self._differentiables.pop(plan, None)
            self._note_trace(call, layouts, arguments, broken)
            plan = self._plans[kind] = self._make_plan(program, layouts, grid, arguments)
        direct = plan if isinstance(plan, Plan) and plan.has_final_outputs else None
        return Prepared(
            plan,
            call.positions,
            layouts,
            in_place,
            direct,
            direct is not None and direct.structure.root is None and not direct.nones,
            call.donated,
            paths,
            program,
            grid,
            arguments,
        )

    def differentiable(self, prepared: Prepared) -> MappedProgram:
        """The call as transforms see it."""
        found = self._differentiables.get(prepared.plan)
        if found is None:
            target = self._target(prepared.grid, prepared.arguments)
            found = MappedProgram(
                target,
                prepared.program,
                prepared.layouts,
                prepared.plan,
                Environment(self._fun, quiet=True),
                self._outside(),
            )
            self._differentiables[prepared.plan] = found
        return found

    def _target(self, grid: Grid, arguments: str) -> Target:
        options = self.options
        backend = EAGER if options.backend is None else options.backend
        return Target(
            options.prefix,
            options.name,
            grid,
            backend,
            self._seed,
            ambient(),
            self._timeout(),
            f"`{options.name}`",
            arguments,
        )

    def _timeout(self) -> float | None:
        given = self.options.timeout
        return runtime().timeout if given is None else given

    def _outside(self) -> frozenset[int]:
        """Ids of the tensors that the function can reach, if transforms trace the call; else
        empty.
        """
        if not is_transformed():
            return frozenset()
        environment = Environment(self._fun)
        environment.refresh()
        return frozenset(map(id, environment.tensors()))

    def _make_plan(
        self, program: Program, layouts: tuple[Layout, ...], grid: Grid, arguments: str
    ) -> Plan | UncompiledPlan:
        options = self.options
        if options.backend is not None:
            try:
                target = self._target(grid, arguments)
                return lower(target, program.run, layouts, self._outside())
            except Untraceable as verdict:
                if options.fullgraph:
                    raise TraceError(
                        f"{options.prefix}: fullgraph=True, but the function cannot be traced: at "
                        f"{verdict.where}: {verdict.reason}. Use torch.where, torch.cond or a "
                        "static argument, or drop fullgraph to run it without tracing."
                    ) from verdict.__cause__
                self._warn_once(
                    f"{options.prefix}: running without tracing (as compile=False), which is "
                    f"slower, because of {verdict.where}: {verdict.reason}. Use torch.where, "
                    "torch.cond or a static argument to compile it, or pass compile=False to "
                    "silence this warning."
                )
        return UncompiledPlan(program, grid, options.prefix, self._timeout())

    def _note_trace(
        self, call: CallArguments, layouts: Sequence[Layout], arguments: str, broken: str
    ) -> None:
        """Note and log a trace; ``broken``: why the plan for this kind of call does not hold."""
        kinds: dict[str, Hashable] = {
            f"argument {path}": _kind(leaf)
            for path, leaf in zip(call.paths, call.leaves, strict=True)
        }
        kinds |= {
            f"the place of argument {path}": f"{layout.sharding.spec} on {_names(layout.devices)}"
            for path, layout in zip(call.travelling(call.paths), layouts, strict=True)
        }
        kinds |= {f"torch's {s.name}": value for s, value in zip(KEYED, keyed(), strict=True)}
        if log.is_heard() and self.options.backend is not None:
            same = self._cleared_because if kinds in self._retraces else ""
            why = broken or same or self._retraces.why(kinds)
            log.tell("tracing `%s`%s: %s", self.options.name, arguments and f" ({arguments})", why)
        complaint = self._retraces.note(kinds)
        if complaint is not None:
            warn(f"{self.options.prefix}: {complaint}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)


@dataclass(frozen=True, eq=False)
class _Level:
    """A mapped call whose axis shares the devices with others."""

    preparation: Preparation
    call: CallArguments


def _program_of(levels: Sequence[_Level], grid: Grid) -> Program:
    """The program of a call, with the programs inside it."""
    inner: Program | None = None
    for depth in reversed(range(1, len(levels))):
        level = levels[depth]
        program = level.preparation.program(level.call, level.call.size // grid.sizes[depth])
        inner = replace(program, inner=inner, is_inner=True)
    outermost = levels[0]
    lanes = outermost.call.size // grid.sizes_here[0]
    program = outermost.preparation.program(outermost.call, lanes)
    return program if inner is None else replace(program, inner=inner, mesh=grid.sizes)


def _here(devices: Sequence[Device]) -> tuple[Device, ...]:
    mine = process_index()
    return tuple(device for device in devices if device.process_index == mine)


def _layout_of(leaf: Any, cut: Cut, grid: Grid) -> Layout:
    """Where an argument goes; an unmapped one that all devices are known to share stays shared."""
    shape, dtype = _shape_and_dtype(leaf)
    if cut:
        return grid.layout(shape, dtype, cut)
    is_known = type(leaf) is ShardedTensor and leaf.is_fully_replicated
    layout = replicated_layout(shape, dtype, grid.axis_devices)
    if is_known and leaf._alive()[0].same_place(layout):
        return layout
    return replicated_layout(shape, dtype, _here(grid.axis_devices))


def refuse_aliased_donation(
    prefix: str, paths: Sequence[str], donated: Sequence[int], leaves: Sequence[Any]
) -> None:
    """Raise if a donated tensor is passed twice; ``donated`` are places among ``leaves``."""
    if len(set(map(id, leaves))) == len(leaves):
        return
    for position in donated:
        for other, leaf in enumerate(leaves):
            if other != position and leaf is leaves[position] and isinstance(leaf, _DATA):
                raise ValueError(
                    f"{prefix}: argument {paths[position]} is donated, but the "
                    f"same tensor is also argument {paths[other]}. Donate it once and pass it "
                    "once, or pass a copy."
                )


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], torch.dtype]:
    tensor = leaf if isinstance(leaf, torch.Tensor) else host_tensor(leaf)
    return tuple(tensor.shape), tensor.dtype


def _names(devices: Sequence[Device]) -> str:
    return " ".join(map(str, devices))


def _kind(leaf: Any) -> str:
    if leaf is None:
        return "None"
    if isinstance(leaf, Static):
        return f"the static value {leaf.value!r}"
    shape, dtype = _shape_and_dtype(leaf)
    return kind_of(shape, dtype)


def _described(call: CallArguments) -> str:
    """The first arguments of a call, as the function sees them: "arguments x float32[3], n = 2"."""
    found = []
    leaves = list(zip(call.paths, call.leaves, call.axes, strict=True))
    for path, leaf, axis in leaves[:_MAX_DESCRIBED]:
        if leaf is None or isinstance(leaf, Static):
            found.append(f"{path} = {reprlib.repr(None if leaf is None else leaf.value)}")
        else:
            shape, dtype = _shape_and_dtype(leaf)
            row = [size for dim, size in enumerate(shape) if dim != axis]
            found.append(f"{path} {kind_of(row, dtype)}")
    if not found:
        return ""
    more = f" and {len(leaves) - len(found)} more" if len(leaves) > len(found) else ""
    return f"argument{'s' * (len(leaves) > 1)} {', '.join(found)}{more}"
