"""Programs of the fuzzer: data that can be printed, run, judged and made smaller.

A program is one ``Body`` in the caller's process. Its steps are operations of torch, collectives,
functions that are mapped, and derivatives; the last two have a body again. So a derivative around
a call and one inside it, a result that goes into the next call, and a captured value are all the
same thing at another depth. Every name is bound once in a program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = [
    "Body",
    "Collective",
    "Derivative",
    "Input",
    "Local",
    "Map",
    "Program",
    "Step",
    "bodies",
    "is_mesh",
    "source",
    "standalone",
    "used",
]


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
    size: int | None
    """``axis_size=``, where no argument has the axis."""
    body: Body
    args: tuple[str, ...]
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    form: str = "plain"
    """How arguments and results travel: ``plain``, in a ``dict``, in a ``tree``, by ``name``."""
    option: str = ""
    """One more option of ``pmap``, which changes no value."""


@dataclass(frozen=True)
class Derivative:
    """``kind`` of ``body``, which has one result, at ``args``; ``along`` tangents or cotangents."""

    outs: tuple[str, ...]
    kind: str
    name: str
    body: Body
    args: tuple[str, ...]
    along: tuple[str, ...] = ()


Step = Local | Collective | Map | Derivative


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


def bodies(body: Body) -> Iterator[Body]:
    """A body and all within it."""
    yield body
    for step in body.steps:
        if isinstance(step, Map | Derivative):
            yield from bodies(step.body)


def is_mesh(step: Map) -> bool:
    """Whether the mapped function is itself a pmapped one: the devices are shared among both."""
    body = step.body
    if step.transform != "pmap" or step.form != "plain" or len(body.steps) != 1:
        return False
    inner = body.steps[0]
    return (
        isinstance(inner, Map)
        and inner.transform == "pmap"
        and (inner.args, inner.outs) == (body.params, body.results)
        and inner.form == "plain"
        and not set(body.params) & used(inner.body)
    )


def used(body: Body) -> set[str]:
    """The names that a body and those within it mention."""
    names: set[str] = set()
    for inner in bodies(body):
        names.update(inner.results)
        for step in inner.steps:
            names.update(step.args, getattr(step, "along", ()))
    return names


# --- source ---------------------------------------------------------------------------------------

PREAMBLE = """
def made(seed, shape, dtype, special=False):
    kind = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=kind)
    if special:
        for k, value in enumerate([float("inf"), float("nan"), 0.0, -float("inf")]):
            x.view(-1)[seed % 3 + 3 * k :: 13] = value
    if dtype == torch.bool:
        return x > 0
    if not (dtype.is_floating_point or dtype.is_complex):
        x = (2 * x).round().abs() if dtype == torch.uint8 else (2 * x).round()
    return x.to(dtype)
"""


def source(program: Program) -> str:
    """Python source of ``made``, ``inputs`` and ``program(*inputs)``.

    It names ``COMPILE``, a dict of options of every ``pmap``.
    """
    inputs = "".join(f"    {_made(given)},\n" for given in program.inputs)
    lines = _function("program", program.body, set(), give=_tuple)
    return f"{PREAMBLE}\n\ninputs = [\n{inputs}]\n\n\n" + "\n".join(lines) + "\n"


def standalone(program: Program, num_devices: int, options: str, inline: str = "") -> str:
    """A script that runs the program and prints what it gives."""
    around = f"with {inline}:\n    " if inline else ""
    return (
        "import torch\nimport torchpmap as tp\n\n"
        f"tp.init(num_devices={num_devices})\nCOMPILE = {options}\n\n{_renumbered(source(program))}"
        f"\n\n{around}print(program(*inputs))\n"
    )


def _renumbered(text: str) -> str:
    """Names with the smallest numbers."""
    known: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def small(match: re.Match[str]) -> str:
        name, letter = match.group(0), match.group(1)
        if name not in known:
            known[name] = f"{letter}{counts[letter]}"
            counts[letter] += 1
        return known[name]

    return re.sub(r"(?<![a-zA-Z0-9])(axis|[fpvx])\d+", small, text)


def _made(given: Input) -> str:
    dtype, shape = f"torch.{given.dtype}", given.shape
    match given.layout:
        case "transposed":
            order = tuple(reversed(range(len(shape))))
            return f"made({given.seed}, {shape[::-1]}, {dtype}).permute({order})"
        case "sliced":
            wide = (*shape[:-1], 2 * shape[-1] + 1)
            return f"made({given.seed}, {wide}, {dtype})[..., 1::2]"
        case "expanded":
            return f"made({given.seed}, {shape[1:]}, {dtype}).expand({shape})"
        case "special":
            return f"made({given.seed}, {shape}, {dtype}, special=True)"
    return f"made({given.seed}, {shape}, {dtype})"


def _function(
    name: str, body: Body, known: set[str], head: str = "", give: Callable[..., str] | None = None
) -> list[str]:
    """``def name(...)``; ``known`` are functions that are there already."""
    known = set(known)
    lines = [line for step in body.steps for line in _statements(step, known)]
    return [
        f"def {name}({head or ', '.join(body.params)}):",
        *(f"    {line}" for line in lines),
        f"    return {(give or ', '.join)(body.results)}",
    ]


def _statements(step: Step, known: set[str]) -> list[str]:
    if isinstance(step, Map):
        return [*_mapped(step, known), f"{_tuple(step.outs)} = {_call(step)}"]
    if isinstance(step, Derivative):
        return [*_function(step.name, step.body, known), *_derivative(step)]
    if isinstance(step, Local):
        code = step.code.format(*step.args)
        return [f"{', '.join(step.outs)} = {code}" if step.outs else code]
    given = [_tuple(step.args)] if len(step.args) > 1 else list(step.args)
    given += [repr(step.axes), *(f"{name}={value!r}" for name, value in step.options)]
    return [f"{', '.join(step.outs)} = tp.{step.name}({', '.join(given)})"]


def _mapped(step: Map, known: set[str]) -> list[str]:
    """Lines that define ``{name}_mapped``."""
    if step.name in known:
        return []
    known.add(step.name)
    if is_mesh(step):
        inner = step.body.steps[0]
        assert isinstance(inner, Map)
        lines, function = _mapped(inner, known), f"{inner.name}_mapped"
    else:
        lines, function = _row_function(step, known), step.name
    options = [function]
    if step.axis is not None:
        options.append(f"axis_name={step.axis!r}")
    options += [f"in_axes={_in_axes(step)}", f"out_axes={_out_axes(step)}"]
    if step.size is not None:
        options.append(f"axis_size={step.size}")
    if step.transform == "pmap":
        options += ["**COMPILE", step.option][: 2 if step.option else 1]
    return [*lines, f"{step.name}_mapped = tp.{step.transform}({', '.join(options)})"]


def _row_function(step: Map, known: set[str]) -> list[str]:
    body = step.body
    if step.form not in ("dict", "tree"):
        return _function(step.name, body, known, give=_tuple)
    lines = _function(step.name, body, known, "tree")
    values = "tree" if step.form == "tree" else "tree.values()"
    results = ", ".join(f"'{name}': {name}" for name in body.results)
    give = f"{{{results}}}" if step.form == "dict" else f"[{', '.join(body.results)}]"
    return [lines[0], f"    {_unpacking(step)} = {values}", *lines[1:-1], f"    return {give}"]


def _unpacking(step: Map) -> str:
    first, *rest = step.body.params
    return f"{first}, {_tuple(tuple(rest))}" if step.form == "tree" else _tuple(step.body.params)


def _in_axes(step: Map) -> str:
    axes, params = step.in_axes, step.body.params
    match step.form:
        case "dict":
            return f"({dict(zip(params, axes, strict=True))!r},)"
        case "tree":
            return f"(({axes[0]}, {axes[1:]!r}),)"
        case "name":
            return repr(dict(zip(params, axes, strict=True)))
    return repr(axes[0]) if len(set(axes)) == 1 else repr(axes)


def _out_axes(step: Map) -> str:
    axes = step.out_axes
    if len(set(axes)) == 1:
        return repr(axes[0])
    if step.form == "dict":
        return repr(dict(zip(step.body.results, axes, strict=True)))
    return repr(list(axes) if step.form == "tree" else axes)


def _call(step: Map) -> str:
    params, args = step.body.params, step.args
    match step.form:
        case "dict":
            pairs = ", ".join(f"'{p}': {a}" for p, a in zip(params, args, strict=True))
            return f"{step.name}_mapped({{{pairs}}}).values()"
        case "tree":
            return f"{step.name}_mapped(({args[0]}, {_tuple(args[1:])}))"
        case "name":
            pairs = ", ".join(f"{p}={a}" for p, a in zip(params[1:], args[1:], strict=True))
            return f"{step.name}_mapped({args[0]}, {pairs})"
    return f"{step.name}_mapped({', '.join(args)})"


def _derivative(step: Derivative) -> list[str]:
    f, args = step.name, ", ".join(step.args)
    numbers = repr(tuple(range(len(step.args))))
    outs, rest = _tuple(step.outs), _tuple(step.outs[1:])
    match step.kind:
        case "grad":
            return [f"{outs} = tp.grad({f}, {numbers})({args})"]
        case "torch_grad":
            return [f"{outs} = torch.func.grad({f}, {numbers})({args})"]
        case "value_and_grad":
            return [f"{step.outs[0]}, {rest} = tp.value_and_grad({f}, {numbers})({args})"]
        case "vjp":
            pull = f"{f}_pull"
            lines = [f"{step.outs[0]}, {pull} = torch.func.vjp({f}, {args})"]
            return [*lines, f"{rest} = {pull}({step.along[0]})"]
        case "jvp":
            given = f"{_tuple(step.args)}, {_tuple(step.along)}"
            return [f"{step.outs[0]}, {step.outs[1]} = torch.func.jvp({f}, {given})"]
        case "backward":
            leaves = [f"{f}_{arg}" for arg in step.args]
            pairs = list(zip(leaves, step.args, strict=True))
            return [
                *(f"{leaf} = {arg}.detach().requires_grad_()" for leaf, arg in pairs),
                f"{f}({', '.join(leaves)}).backward()",
                *(
                    f"{out} = torch.zeros_like({leaf}) if {leaf}.grad is None else {leaf}.grad"
                    for out, leaf in zip(step.outs, leaves, strict=True)
                ),
            ]
    return [f"{step.outs[0]} = torch.func.{step.kind}({f})({args})"]


def _tuple(names: tuple[str, ...]) -> str:
    if not names:
        return "()"
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


# --- names ----------------------------------------------------------------------------------------


def renamed(value: Any, names: dict[str, str]) -> Any:
    """A step or body with other names for the values it uses."""
    if isinstance(value, Body):
        results = tuple(names.get(name, name) for name in value.results)
        steps = tuple(renamed(step, names) for step in value.steps)
        return replace(value, steps=steps, results=results)
    changes: dict[str, Any] = {}
    for field in fields(value):
        now = getattr(value, field.name)
        if field.name in ("args", "along"):
            changes[field.name] = tuple(names.get(name, name) for name in now)
        elif field.name == "body":
            changes[field.name] = renamed(now, names)
    return replace(value, **changes)
