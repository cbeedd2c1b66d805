"""A body and the layouts of its inputs -> a ``Plan`` that the workers hold.

A *body* is what one device does, as a function of its blocks: a ``Program``, or a derivative of one
(see ``_plan/autograd``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchpmap._base import log
from torchpmap._base.ambient import Ambient, applied, for_graph, in_force
from torchpmap._base.busy import waiting
from torchpmap._base.devices import Device
from torchpmap._base.errors import warn
from torchpmap._base.pytree import flatten
from torchpmap._base.torch_internals import is_wrapped
from torchpmap._layout.axis_stack import Axis, group_name
from torchpmap._layout.grid import Grid
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.plan import Captured, Drawn, Pinned, Plan
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.device_put import handles_of
from torchpmap._trace.compile import EAGER, Backend, Definition, Kind, only_communicates
from torchpmap._trace.custom_ops import Implementations
from torchpmap._trace.escaped import EscapeWatch
from torchpmap._trace.program import Outcome
from torchpmap._trace.replication import Demand
from torchpmap._trace.toolchain import missing_compiler
from torchpmap._trace.trace import Traced, TracedInput, trace
from torchpmap._trace.untraceable import Untraceable

Body = Callable[[Sequence[torch.Tensor], Axis], Outcome]


def during(name: str) -> AbstractContextManager[None]:
    """What is entered around tracing the function ``name``; a profiler replaces it."""
    return nullcontext()


_plan_ids = itertools.count(1)
_missing_compiler_warned = False


@dataclass(frozen=True)
class Target:
    """The devices and options that a body is lowered for."""

    prefix: str
    """The call as messages name it."""
    name: str
    grid: Grid
    backend: Backend
    seed: torch.Tensor
    """Stands for the key of a call (see ``random/_streams``)."""
    ambient: Ambient
    """The settings of torch around the call; also for what is traced later, in a backward pass."""
    timeout: float | None = None
    what: str = ""
    """What is traced, as notes and logs name it: "`step`", "a derivative of `step`"."""
    arguments: str = ""
    """Its arguments, as the function sees them: "argument x float32[64, 10]"."""
    where: str = ""
    """``file:line`` of the function."""
    names: tuple[str, ...] = ()
    """Of its results, if the body returns them in another order or structure."""

    @property
    def described(self) -> str:
        """As logs name it."""
        return f"{self.what} ({self.arguments})" if self.arguments else self.what

    @property
    def of_derivative(self) -> Target:
        """The target for a derivative of what is traced for this one."""
        return replace(self, what=f"a derivative of {self.what}", names=())

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.grid.devices

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.grid.ranks

    @property
    def group(self) -> str:
        return group_name(self.ranks)

    @property
    def team(self) -> Team:
        return current_runtime().team(tuple(device.id for device in self.devices))

    def settings(self) -> AbstractContextManager[None]:
        """Apply the call's settings of torch, for plans that run in this process: they may have
        changed since the call, as before a backward pass.
        """
        if not current_runtime().runs_here or in_force(self.ambient):
            return nullcontext()
        return applied(for_graph(self.ambient))


class Pair(NamedTuple):
    """A function and its gradient, in two plans: the first leaves residuals for the second."""

    forward: Plan
    backward: Plan
    """Takes the residuals, then the cotangents."""

    def run(self, held: list[Handle]) -> tuple[list[Handle], list[Handle]]:
        """The outputs, and the residuals."""
        handles, count = self.forward.run(held), len(self.forward.outputs)
        return handles[:count], handles[count:]

    def gradients(
        self, residuals: list[Handle], cotangents: Sequence[Any], layouts: Sequence[Layout]
    ) -> list[tuple[Layout, Handle]]:
        handles = self.backward.run([*residuals, *handles_of(cotangents, layouts)])
        return list(zip(self.backward.outputs, handles, strict=True))


def lower(
    target: Target, body: Body, layouts: Sequence[Layout], outside: Collection[int] = ()
) -> Plan:
    """Trace and compile; ``outside``: ids of tensors that transforms around the call trace."""
    traced, outcome, requires_grad = _trace(target, body, layouts, outside, None)
    captured = tuple(
        (Drawn if tensor is target.seed else Captured)(
            tensor, replicated_layout(tensor.shape, tensor.dtype, target.devices)
        )
        for tensor in traced.captured
    )
    runs_here = target.team.runtime.runs_here
    implementations = None if runs_here else Implementations(traced.graph)
    pinned = (*traced.pinned, *(implementations.tensors() if implementations else ()))
    return _plan(
        target,
        traced,
        traced.graph,
        traced.inputs,
        _output_layouts(target, outcome, traced),
        structure=outcome.structure,
        captured=captured,
        pinned=tuple(map(Pinned, pinned)),
        held=traced.held,
        implementations=implementations or None,
        nones=tuple(k for k, block in enumerate(outcome.blocks) if block is None),
        requires_grad=requires_grad and any(t.requires_grad for t in traced.captured),
        num_checks=len(outcome.checks),
        checked=outcome.checked,
        writes_inputs=traced.writes_inputs,
        repeated=traced.repeated,
        is_passing=any(map(is_wrapped, traced.captured)),
    )


def lower_pair(
    target: Target, body: Body, layouts: Sequence[Layout], num_outputs: int, num_cotangents: int
) -> Pair:
    """Lower a body that takes cotangents as its last inputs, and returns outputs and then
    gradients, to two plans.
    """
    traced, outcome, _ = _trace(target, body, layouts, (), (num_outputs, num_cotangents))
    halves = traced.halves
    assert halves is not None
    if traced.captured:
        raise RuntimeError(f"{target.prefix}: a closure is not among its inputs")
    outputs = _output_layouts(target, outcome, traced)
    residuals = halves.backward_inputs[: halves.num_residuals]
    inputs = traced.inputs[: len(traced.inputs) - num_cotangents]
    mine, rest = outputs[:num_outputs], outputs[num_outputs:]
    forward = _plan(target, traced, halves.forward, inputs, mine, residuals)
    target, traced = replace(target, names=()), replace(traced, uses_index=False)
    return Pair(forward, _plan(target, traced, halves.backward, halves.backward_inputs, rest))


def _trace(
    target: Target,
    body: Body,
    layouts: Sequence[Layout],
    outside: Collection[int],
    split_at: tuple[int, int] | None,
) -> tuple[Traced, Outcome, bool]:
    """What tracing found, what the body returned, and whether that requires grad."""
    outcomes: list[Outcome] = []
    watch = EscapeWatch(target.name, is_traced=True)

    def demands(blocks: Sequence[torch.Tensor], axis: Axis) -> list[Demand]:
        with watch.entered():
            outcome = body(blocks, axis)
        outcomes.append(outcome)
        refuse = outcome.refuse
        outputs = [
            Demand(
                block,
                target.grid.shared_along(cut, axis),
                None if refuse is None else functools.partial(refuse, leaf),
            )
            for leaf, (block, cut) in enumerate(zip(outcome.blocks, outcome.cuts, strict=True))
            if block is not None
        ]
        checks = (Demand(check, ()) for check in outcome.checks)
        return [*outputs, *checks, *outcome.demands]

    inputs = [
        TracedInput(layout.block_shape, layout.dtype, target.grid.blocks_of(layout))
        for layout in layouts
    ]
    begin = time.monotonic()
    try:
        with _tracing(target):
            traced = trace(
                demands,
                inputs,
                axis_name=target.grid.names[0],
                axis_size=len(target.ranks),
                group=target.group,
                device=current_runtime().device,
                same_closures=target.grid.is_one_process,
                outside=outside,
                split_at=split_at,
                ordered=target.backend == EAGER,
            )
        requires_grad = any(outcome.requires_grad for outcome in outcomes)
    finally:
        watch.end()
    (outcome,) = outcomes
    if log.is_heard():
        lowering = time.monotonic() - begin - traced.seconds
        stages = "traced %s in %.3f s, lowered in %.3f s"
        log.tell(stages, target.described, traced.seconds, lowering)
    return traced, outcome, requires_grad


@contextlib.contextmanager
def _tracing(target: Target) -> Iterator[None]:
    """A block that traces: the user sees that it takes long, and an error tells where it arose."""
    what = f"tracing {target.described}"
    try:
        with applied(target.ambient), during(target.name), waiting(what):
            yield
    except Untraceable:  # a verdict, which may be no error
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # the class may refuse notes
            where = ": ".join(filter(None, (target.what, target.arguments)))
            error.add_note(f"while tracing {where}")
            if type(error).__name__ == "UncapturedHigherOrderOpError":  # torch.cond and relatives
                error.add_note(
                    "torch's cond, while_loop and scan cannot hold a collective of torchpmap; "
                    "torchpmap.cond, while_loop and scan can."
                )
        raise


def _plan(
    target: Target,
    traced: Traced,
    graph: torch.fx.GraphModule,
    inputs: Sequence[Kind],
    outputs: tuple[Layout, ...],
    residuals: Sequence[Kind] = (),
    **known: Any,
) -> Plan:
    """The plan of a graph that returns outputs, and then residuals; ``known``: fields of it."""
    ranks = target.ranks
    groups = {target.group: (tuple(range(len(ranks))),)} | traced.groups
    backend = _usable(target.backend, target.devices)
    if backend.is_inductor and target.devices[0].platform == "cpu" and only_communicates(graph):
        backend = EAGER
    definition = Definition(
        next(_plan_ids),
        target.name,
        graph,
        traced.uses_index,
        ranks,
        tuple(inputs),
        (*((layout.block_shape, layout.dtype) for layout in outputs), *residuals),
        backend,
        target.ambient,
        target.timeout,
        where=target.where,
        num_residuals=len(residuals),
    )
    return Plan(
        definition=definition,
        groups={
            name: tuple(tuple(ranks[k] for k in part) for part in partition)
            for name, partition in groups.items()
        },
        axes={name: target.grid.axes_along(partition) for name, partition in groups.items()},
        prefix=target.prefix,
        described=target.described,
        team=target.team,
        outputs=outputs,
        names=target.names,
        **{"structure": flatten(list(outputs))[1]} | known,
    )


def _output_layouts(target: Target, outcome: Outcome, traced: Traced) -> tuple[Layout, ...]:
    grid = target.grid
    cuts = [cut for _, cut in outcome.outputs]
    cuts += [()] * len(outcome.checks)
    return tuple(
        grid.stacked(shape, dtype, cut)
        for shape, dtype, cut in zip(traced.shapes, traced.dtypes, cuts, strict=True)
    )


def _usable(backend: Backend, devices: tuple[Device, ...]) -> Backend:
    global _missing_compiler_warned
    missing = missing_compiler(devices[0].platform) if backend.is_inductor else None
    if missing is None:
        return backend
    if not _missing_compiler_warned:
        _missing_compiler_warned = True
        warn(
            f"torchpmap: no {missing}, so mapped functions run as traced graphs, without Inductor: "
            "right, but slower. Install one, or pass compile={'backend': 'eager'} to silence this.",
        )
    return EAGER
