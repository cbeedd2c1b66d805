"""Making a failing program smaller, as long as it fails in the same way."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from _fuzz_programs import (
    Blocks,
    Body,
    Collective,
    Derivative,
    Local,
    Loop,
    Map,
    Program,
    Step,
    inside,
    renamed,
    used,
    with_inside,
)


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest program found for which ``fails`` still holds."""
    end = time.monotonic() + seconds
    seen: set[str] = set()
    found = True
    while found:
        found = False
        for candidate in smaller(program):
            if time.monotonic() > end:
                return program
            if repr(candidate) in seen:
                continue
            seen.add(repr(candidate))
            if fails(candidate):
                program, found = candidate, True
                break
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs that have a little less; not all of them mean something."""
    whole, results = program.body, program.body.results
    fewer = [replace(whole, results=_less(results, k)) for k in range(len(results))]
    edited = (fewer if len(results) > 1 else [], _edited(whole, _shorter), _edited(whole, _simpler))
    for body in itertools.chain(*edited):
        yield _used(replace(program, body=body))
    yield from _simpler_inputs(program)
    yield from _narrower(program)


def _used(program: Program) -> Program:
    """Without the inputs that nothing uses."""
    names = used(program.body)
    kept = tuple(given for given in program.inputs if given.name in names)
    body = replace(program.body, params=tuple(given.name for given in kept))
    return replace(program, inputs=kept, body=body)


def _edited(body: Body, edit: Callable[[Body], Iterator[Body]]) -> Iterator[Body]:
    """Every way to edit a body or one within it, outer ones first."""
    yield from edit(body)
    for k, step in enumerate(body.steps):
        within = inside(step)
        for place, one in enumerate(within):
            for inner in _edited(one, edit):
                yield _with(
                    body, k, with_inside(step, (*within[:place], inner, *within[place + 1 :]))
                )


def _with(body: Body, k: int, *steps: Step) -> Body:
    """With other steps in place of the ``k``-th."""
    return replace(body, steps=(*body.steps[:k], *steps, *body.steps[k + 1 :]))


# --- fewer steps ----------------------------------------------------------------------------------


def _shorter(body: Body) -> Iterator[Body]:
    """Without a step, whose result another value takes the place of; or with a function opened."""
    for k in reversed(range(len(body.steps))):
        step = body.steps[k]
        rest = _with(body, k)
        if used(rest).isdisjoint(step.outs):
            yield rest
            continue
        for name in dict.fromkeys([*getattr(step, "args", ()), *body.params]):
            yield renamed(rest, dict.fromkeys(step.outs, name))
        for inner in _openable(step):
            opened = renamed(inner, dict(zip(inner.params, step.args, strict=True)))
            copies = len(step.outs) if isinstance(step, Derivative) else 1
            through = renamed(rest, dict(zip(step.outs, opened.results * copies, strict=True)))
            steps = (*through.steps[:k], *opened.steps, *through.steps[k:])
            yield replace(through, steps=steps)
        yield from (_with(body, k, fewer) for fewer in _fewer_values(step))


def _openable(step: Step) -> tuple[Body, ...]:
    """The bodies of which one can take the place of a step."""
    is_branch = isinstance(step, Loop) and step.kind in ("cond", "switch")
    return inside(step) if is_branch or isinstance(step, Map | Derivative) else ()


COLUMNS = (
    ("outs", "out_axes", "out_specs", "results"),
    ("args", "in_axes", "in_specs", "params"),
)
"""Fields of a step, and the last of its body, that have an entry for each value."""


def _fewer_values(step: Step) -> Iterator[Step]:
    """A step without one of its results, or of its parameters."""
    if isinstance(step, Collective):
        for r in range(len(step.args) if len(step.args) > 1 else 0):
            yield replace(step, args=_less(step.args, r), outs=_less(step.outs, r))
    if not isinstance(step, Map | Blocks | Derivative):
        return
    for *names, of_body in COLUMNS[1:] if isinstance(step, Derivative) else COLUMNS:
        there = [name for name in names if hasattr(step, name)]
        values = getattr(step.body, of_body)
        for k in range(len(values) if len(values) > 1 else 0):
            body = replace(step.body, **{of_body: _less(values, k)})
            changes = {name: _less(getattr(step, name), k) for name in there}
            yield replace(step, body=body, **changes)


def _less(values: tuple[Any, ...], k: int) -> tuple[Any, ...]:
    return (*values[:k], *values[k + 1 :])


# --- simpler steps --------------------------------------------------------------------------------


def _simpler(body: Body) -> Iterator[Body]:
    for k, step in enumerate(body.steps):
        for other in _simpler_step(step):
            yield _with(body, k, other)


def _simpler_step(step: Step) -> Iterator[Step]:
    """In its simplest form; with fewer options and axes, with axis 0."""
    for name, simplest in {"form": "plain", "option": "", "options": ()}.items():
        if getattr(step, name, simplest) != simplest:
            yield replace(step, **{name: simplest})
    if isinstance(step, Collective):
        yield from (replace(step, options=_less(step.options, k)) for k in range(len(step.options)))
        if isinstance(step.axes, tuple):
            yield from (replace(step, axes=axis) for axis in step.axes)
    elif isinstance(step, Map):
        for name in ("in_axes", "out_axes"):
            axes = getattr(step, name)
            for k, axis in enumerate(axes):
                if axis:
                    yield replace(step, **{name: (*axes[:k], 0, *axes[k + 1 :])})
    elif isinstance(step, Loop):
        yield from (replace(step, length=less) for less in range(step.length or 0))
    elif isinstance(step, Local) and step.model is not None:
        yield replace(step, code="{0}.clone()", model=None)


# --- simpler inputs -------------------------------------------------------------------------------


def _simpler_inputs(program: Program) -> Iterator[Program]:
    def changed(k: int, **changes: Any) -> Program:
        inputs = list(program.inputs)
        inputs[k] = replace(inputs[k], **changes)
        return replace(program, inputs=tuple(inputs))

    for k, given in enumerate(program.inputs):
        if given.layout != "plain":
            yield changed(k, layout="plain")
        if given.dtype not in ("float32", "float64"):
            yield changed(k, dtype="float32")
        for d in range(len(given.shape)):
            yield changed(k, shape=_less(given.shape, d))


def _narrower(program: Program) -> Iterator[Program]:
    """All dims of one size made smaller."""
    for size in sorted({size for given in program.inputs for size in given.shape}, reverse=True):
        for less in dict.fromkeys((1, 2, size // 2, size - 1)):
            if 0 < less < size:
                shapes = [[less if s == size else s for s in x.shape] for x in program.inputs]
                inputs = [
                    replace(x, shape=tuple(s)) for x, s in zip(program.inputs, shapes, strict=True)
                ]
                yield replace(program, inputs=tuple(inputs))
