"""Programs of the fuzzer: data that can be printed, run, judged and made smaller.

A program is one ``Body`` in the caller's process. Its steps are operations of torch, collectives,
functions that are mapped, loops and branches, and derivatives; all but the first two have bodies
again. So a derivative around a call and one inside it, a loop in a branch, a result that goes into
the next call, and a captured value are all the same thing at another depth. Every name is bound
once in a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

Spec = tuple[tuple[str, ...], ...]
"""For each dim, the axes of a mesh by which it is cut."""


@dataclass(frozen=True)
class Local:
    """``outs = code``, an expression or a statement in which ``{0}`` is the first of ``args``."""

    outs: tuple[str, ...]
    code: str
    args: tuple[str, ...]
    model: str | None = None
    """What the reference computes, if that is not ``code``."""


@dataclass(frozen=True)
class Collective:
    """``outs = tp.name(args, axes, **options)``; several args are a tuple."""

    outs: tuple[str, ...]
    name: str
    args: tuple[str, ...]
    axes: Any
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Body:
    """A function of ``params``; it can use all names around it."""

    params: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Map:
    """``outs = tp.pmap(name, axis, ...)(args)``, or ``tp.vmap``; ``name`` again: called again."""

    outs: tuple[str, ...]
    transform: str
    name: str
    axis: str | None
    body: Body
    args: tuple[str, ...]
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    form: str = "plain"
    """How arguments and results travel: ``plain``, in a ``dict``, in a ``tree``, by ``name``; or
    ``torch``: plain, by ``torch.func.vmap``.
    """
    option: str = ""
    """One more option of ``pmap``, which changes no value."""
    statics: tuple[tuple[str, str], ...] = ()
    """Static arguments, after the others: a name, and the value as source."""


@dataclass(frozen=True)
class Blocks:
    """``outs = tp.shard_map(name, mesh=..., ...)(args)``."""

    outs: tuple[str, ...]
    name: str
    mesh: tuple[tuple[str, int], ...]
    body: Body
    args: tuple[str, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    check_vma: bool = True
    form: str = "plain"
    """How specs are written: ``plain``, ``short``, in ``tuples``; or all travels in a ``tree``."""


@dataclass(frozen=True)
class Loop:
    """A loop, or a choice among branches.

    ==================  ============================================  =========================
    ``kind``            the bodies                                    ``by``
    ==================  ============================================  =========================
    scan                (*carries, *rows) -> (*carries, *outputs)
    map                 (*rows) -> results
    fori_loop           (index, *carries) -> carries
    while_loop          (*carries) -> carries                         how many steps
    cond, switch        (*operands) -> results                        predicate, or index
    associative_scan    (row, row) -> row
    ==================  ============================================  =========================
    """

    outs: tuple[str, ...]
    kind: str
    name: str
    bodies: tuple[Body, ...]
    args: tuple[str, ...]
    carries: int = 0
    """How many of ``args`` are carries; the others are rows, or operands."""
    by: tuple[str, ...] = ()
    length: int | None = None
    option: str = ""
    """One more argument, which changes no value unless it is ``reverse=True``."""


@dataclass(frozen=True)
class Derivative:
    """``kind`` of ``body``, which has one result, at ``args``; ``along`` tangents or cotangents."""

    outs: tuple[str, ...]
    kind: str
    name: str
    body: Body
    args: tuple[str, ...]
    along: tuple[str, ...] = ()


Step = Local | Collective | Map | Blocks | Loop | Derivative


@dataclass(frozen=True)
class Input:
    """A tensor that the caller has."""

    name: str
    seed: int
    shape: tuple[int, ...]
    dtype: str
    layout: str = "plain"
    """``plain``, or strides that are not: ``transposed``, ``sliced`` or ``expanded``; or
    ``special``: with infinities, NaN and zeros.
    """


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    body: Body
    """Its parameters are the inputs."""


def inside(step: Step) -> tuple[Body, ...]:
    """The bodies of a step."""
    if isinstance(step, Loop):
        return step.bodies
    return () if isinstance(step, Local | Collective) else (step.body,)


def with_inside(step: Step, inner: tuple[Body, ...]) -> Step:
    """A step with other bodies."""
    if isinstance(step, Loop):
        return replace(step, bodies=inner)
    assert not isinstance(step, Local | Collective)
    return replace(step, body=inner[0])


def bodies(body: Body) -> Iterator[Body]:
    """A body and all within it."""
    yield body
    for step in body.steps:
        for inner in inside(step):
            yield from bodies(inner)


def is_mesh(step: Map) -> bool:
    """Whether the mapped function is itself a pmapped one: the devices are shared among both."""
    body = step.body
    if step.transform != "pmap" or step.form != "plain" or len(body.steps) != 1 or step.statics:
        return False
    inner = body.steps[0]
    return (
        isinstance(inner, Map)
        and inner.transform == "pmap"
        and (inner.args, inner.outs) == (body.params, body.results)
        and inner.form == "plain"
        and not inner.statics
        and not set(body.params) & used(inner.body)
    )


def used(body: Body) -> set[str]:
    """The names that a body and those within it mention."""
    names: set[str] = set()
    for inner in bodies(body):
        names.update(inner.results)
        for step in inner.steps:
            names.update(step.args, getattr(step, "along", ()), getattr(step, "by", ()))
    return names


def renamed(value: Any, names: dict[str, str]) -> Any:
    """A step or body with other names for the values it uses."""
    if isinstance(value, Body):
        results = tuple(names.get(name, name) for name in value.results)
        steps = tuple(renamed(step, names) for step in value.steps)
        return replace(value, steps=steps, results=results)
    changes: dict[str, Any] = {}
    for field in fields(value):
        now = getattr(value, field.name)
        if field.name in ("args", "along", "by"):
            changes[field.name] = tuple(names.get(name, name) for name in now)
    step = replace(value, **changes)
    inner = tuple(renamed(body, names) for body in inside(step))
    return with_inside(step, inner) if inner else step
