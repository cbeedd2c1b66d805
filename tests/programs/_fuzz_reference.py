"""What a program of the fuzzer should give: all rows in lock-step, in plain torch.

A value is a list with one tensor per row, row-major over the axes that are mapped around it.  An
operation of torch runs on one row after the other.  A collective is its definition, written over
the list of the rows that take part; nothing of torchpmap is used, nor ``torch.func``.  The
derivative rules then are none of their own: inside a mapped function JAX differentiates the sum of
all rows' results with respect to each row's argument, and that is one call of ``torch.autograd`` on
the rows of the whole program.  Forward mode is its transpose's transpose.

With ``noise``, whatever is computed is changed by about one rounding error of its dtype: how far
the"""

import itertools
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from _collective_models import HALVES
from _fuzz_models import (
    Env,
    Grid,
    Rows,
    axis_size,
    check_differentiable,
    collective,
    companions,
    copied,
    count,
    cut,
    derivative,
    joined,
    places,
    pulled,
    spread,
    taken,
)
from _fuzz_programs import (
    Blocks,
    Body,
    Collective,
    Derivative,
    Input,
    Local,
    Loop,
    Map,
    Program,
    Step,
)
from _fuzz_source import MADE, MODULES, value

_DRAWN = re.compile("rand|bernoulli|dropout|normal_|uniform_")
"""Code that draws random numbers, which differ from row to row unless their range has but one."""
SHARING = ("psum", "pmean", "pmax", "pmin", "all_gather", "pbroadcast")
"""Collectives whose results are the same along the axes."""
LOOPS = {
    "scan": "scan",
    "map": "scan",  # of no carries
    "fori_loop": "fori_loop",
    "while_loop": "while_loop",
    "cond": "cond",
    "switch": "cond",
    "associative_scan": "associative_scan",
}


def run(program: Program, noise: int | None = None) -> list[torch.Tensor]:
    """The results of a program."""
    reference = Reference(noise)
    env = {given.name: [reference.blurred(given.name, made(given))] for given in program.inputs}
    with quiet():
        return [rows[0].detach() for rows in reference.body(program.body, env, ())]


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings, such as torch's about slow batching rules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_MADE: dict[str, Any] = {"torch": torch}
exec(MADE, _MADE)


def made(given: Input) -> torch.Tensor:
    """The value of an input."""
    return eval(value(given), _MADE)


class Reference:
    """Runs steps; ``env`` holds the rows of every name."""

    def __init__(self, noise: int | None = None) -> None:
        self._noise = noise
        self._depth = 0
        """Derivatives around."""
        self._typed: set[str] = set()
        """Axes of meshes along which the derivative is that of one value where none varies."""
        self.varies: dict[str, frozenset[int]] = {}
        """Along which axes of the grid a value may differ, by name; none if not said."""
        self.statics: dict[str, Any] = {}
        self._module: dict[str, Any] = {"torch": torch}
        exec(MODULES, self._module)

    def typed(self, names: Sequence[str]) -> None:
        """Say that these are axes of a mesh along which derivatives are those of one value."""
        self._typed.update(names)

    def shared_axes(self, grid: Grid) -> frozenset[int]:
        """Those along which derivatives are those of one value where none varies."""
        return frozenset(k for k, (name, _) in enumerate(grid) if name in self._typed)

    def varying(self, names: Sequence[str]) -> frozenset[int]:
        return frozenset().union(*(self.varies.get(name, frozenset()) for name in names))

    def body(self, body: Body, env: Env, grid: Grid) -> list[Rows]:
        """The rows of the results, for a body whose parameters are in ``env``."""
        env = dict(env)
        for step in body.steps:
            self.step(step, env, grid)
        return [spread(env[name], grid) for name in body.results]

    def step(self, step: Step, env: Env, grid: Grid) -> None:
        """Run a step, and put what it gives into ``env``."""
        if isinstance(step, Local):
            results = self._local(step, env, grid)
        elif isinstance(step, Collective):
            results = self._collective(step, env, grid)
        elif isinstance(step, Map):
            results = self._map(step, env, grid)
        elif isinstance(step, Blocks):
            results = self._blocks(step, env, grid)
        elif isinstance(step, Loop):
            results = getattr(self, f"_{LOOPS[step.kind]}")(step, env, grid)
        else:
            results = self._derivative(step, env, grid)
        for name, rows in zip(step.outs, results, strict=True):
            env[name] = [self.blurred(name, row) for row in rows]

    def blurred(self, name: str, row: Any) -> Any:
        """``row`` times 1 plus about a rounding error: the same for all rows."""
        if self._noise is None or not (row.is_floating_point() or row.is_complex()):
            return row
        if row._base is not None:
            return row  # a view is not rounded, and a write to it has to arrive
        seed = zlib.crc32(f"{self._noise} {name}".encode())
        generator = torch.Generator().manual_seed(seed)
        blur = torch.randn(row.shape, generator=generator, dtype=torch.float64)
        eps = torch.finfo(row.dtype).eps
        kind = torch.float64 if row.dtype.is_floating_point else torch.complex128
        return (row.to(kind) * (1 + eps * blur)).to(row.dtype)

    def _vary(self, names: Sequence[str], found: Sequence[frozenset[int]]) -> None:
        self.varies.update(zip(names, found, strict=True))

    def _local(self, step: Local, env: Env, grid: Grid) -> list[Rows]:
        code = (step.code if step.model is None else step.model).format(*step.args)
        args = [spread(env[name], grid) for name in step.args]
        own = frozenset(range(len(grid))) if _DRAWN.search(code) else frozenset[int]()
        self._vary(step.outs, [self.varying(step.args) | own] * len(step.outs))
        names = {**self._module, **self.statics}
        rows = [
            {**names, **{n: rows[row] for n, rows in zip(step.args, args, strict=True)}}
            for row in range(count(grid))
        ]
        if not step.outs:
            for row in rows:
                exec(code, row)
            return []
        results = [eval(code, row) for row in rows]
        if len(step.outs) == 1:
            return [results]
        return [list(column) for column in zip(*results, strict=True)]

    def _collective(self, step: Collective, env: Env, grid: Grid) -> list[Rows]:
        operands: Sequence[str | None] = step.args or (None,)
        names = step.axes if isinstance(step.axes, tuple) else (step.axes,)
        along = frozenset(places(grid, [name for name in names if isinstance(name, str)]))
        given = self.varying(step.args)
        groups = dict(step.options).get("axis_index_groups", ())
        kept = along if step.name in SHARING and len(groups) < 2 else frozenset()
        if step.name == "all_gather":  # to its derivative the copies are values of their own
            kept -= self.shared_axes(grid)
        self._vary(step.outs, [(given | along) - kept] * len(step.outs))
        return [collective(step, name, env, grid) for name in operands]

    # --- mapped functions -------------------------------------------------------------------------

    def _map(self, step: Map, env: Env, grid: Grid) -> list[Rows]:
        args = [spread(env[name], grid) for name in step.args]
        size = axis_size(step, [rows[0] for rows in args])
        inner: Grid = (*grid, (step.axis, size))
        self.statics.update({name: eval(text, {"torch": torch}) for name, text in step.statics})
        params = dict(zip(step.body.params, args, strict=True))
        for (param, rows), axis in zip(params.items(), step.in_axes, strict=True):
            params[param] = taken(rows, axis, size, grid)
        self._vary(
            step.body.params,
            [
                self.varying([name]) | (frozenset() if axis is None else {len(grid)})
                for name, axis in zip(step.args, step.in_axes, strict=True)
            ],
        )
        stacked = []
        results = self.body(step.body, {**env, **params}, inner)
        for axis, name, rows in zip(step.out_axes, step.body.results, results, strict=True):
            if axis is None and step.transform == "vmap" and len(grid) in self.varying([name]):
                raise ValueError("rows that may differ, if there are several, have an axis")
            parts = [rows[k : k + size] for k in range(0, len(rows), size)]
            stacked.append([copied(p) if axis is None else torch.stack(p, axis) for p in parts])
        found = [self.varying([name]) - {len(grid)} for name in step.body.results]
        self._vary(step.outs, found)
        return stacked

    def _blocks(self, step: Blocks, env: Env, grid: Grid) -> list[Rows]:
        inner: Grid = (*grid, *step.mesh)
        if step.check_vma:
            self.typed([name for name, _ in step.mesh if name is not None])
        params = {}
        for param, name, spec in zip(step.body.params, step.args, step.in_specs, strict=True):
            params[param] = cut(spread(env[name], grid), spec, step.mesh)
            along = frozenset(places(inner, [axis for entry in spec for axis in entry]))
            self.varies[param] = self.varying([name]) | along
        results = self.body(step.body, {**env, **params}, inner)
        mesh = set(range(len(grid), len(inner)))
        self._vary(step.outs, [self.varying([name]) - mesh for name in step.body.results])
        size = count(step.mesh)
        return [
            [joined(rows[k : k + size], spec, step.mesh) for k in range(0, len(rows), size)]
            for rows, spec in zip(results, step.out_specs, strict=True)
        ]

    # --- loops ------------------------------------------------------------------------------------

    def _called(self, body: Body, values: Sequence[Rows], env: Env, grid: Grid) -> list[Rows]:
        """Copies of the results of a body, which gets copies."""
        given = dict(zip(body.params, _copies(values), strict=True))
        return _copies(self.body(body, {**env, **given}, grid))

    def _settled(self, step: Loop, env: Env, grid: Grid, values: Sequence[Rows]) -> list[Rows]:
        """Run a body of ``(*carries, *others)`` until what its carries vary along stays."""
        body = step.bodies[0]
        carries = body.params[: step.carries]
        while True:
            results = self._called(body, values, env, grid)
            before = [self.varying([name]) for name in carries]
            after = [
                self.varying([param, result, *step.by])
                for param, result in zip(carries, body.results[: step.carries], strict=True)
            ]
            if after == before:
                break
            self._vary(carries, after)
        self._vary(step.outs, [*after, *map(self.varying, zip(body.results[step.carries :]))])
        return results

    def _begun(self, step: Loop, env: Env, grid: Grid) -> tuple[list[Rows], list[Rows]]:
        """The carries and the rows, or operands; the parameters vary as they do."""
        args = [spread(env[name], grid) for name in step.args]
        for body in step.bodies:
            self._vary(body.params, [self.varying([name]) for name in step.args])
        return _copies(args[: step.carries]), args[step.carries :]

    def _scan(self, step: Loop, env: Env, grid: Grid) -> list[Rows]:
        carry, xs = self._begun(step, env, grid)
        sizes = {row.shape[0] for rows in xs for row in rows} if xs else {step.length}
        if len(sizes) != 1:
            raise ValueError(f"scans over {sizes} rows")
        length = int(sizes.pop() or 0)

        def at(k: int) -> list[Rows]:
            return [[row[k] if length else row.new_ones(row.shape[1:]) for row in x] for x in xs]

        first = self._settled(step, env, grid, [*carry, *at(0)])
        _same_kinds(first[: step.carries], carry)
        outputs: dict[int, list[Rows]] = {}
        order = range(length)
        for k in reversed(order) if "reverse=True" in step.option else order:
            results = self._called(step.bodies[0], [*carry, *at(k)], env, grid)
            carry, outputs[k] = results[: step.carries], results[step.carries :]
        stacked = []
        for place, rows in enumerate(first[step.carries :]):
            ys = [
                [outputs[k][place][row] for k in order] or [rows[row].new_empty(0)]
                for row in range(count(grid))
            ]
            empty = (0, *rows[0].shape)
            stacked.append([torch.stack(y) if length else y[0].reshape(empty) for y in ys])
        return [*carry, *stacked]

    def _fori_loop(self, step: Loop, env: Env, grid: Grid) -> list[Rows]:
        carry, _ = self._begun(replace(step, bodies=()), env, grid)
        body = step.bodies[0]
        self._vary(body.params, [frozenset(), *(self.varying([name]) for name in step.args)])
        # The index is not carried: the others are.
        others = replace(step, bodies=(replace(body, params=(*body.params[1:], body.params[0])),))

        def at(k: int) -> list[Rows]:
            return [*carry, [torch.tensor(k)] * count(grid)]

        _same_kinds(self._settled(others, env, grid, at(0)), carry)
        for k in range(int(step.length or 0)):
            carry = self._called(others.bodies[0], at(k), env, grid)
        return carry

    def _while_loop(self, step: Loop, env: Env, grid: Grid) -> list[Rows]:
        carry, _ = self._begun(step, env, grid)
        steps = [int(row) for row in spread(env[step.by[0]], grid)]
        _same_kinds(self._settled(step, env, grid, carry), carry)
        for k in range(max(steps)):
            new = self._called(step.bodies[0], carry, env, grid)
            carry = [
                [rows[row] if k < n else old[row] for row, n in enumerate(steps)]
                for old, rows in zip(carry, new, strict=True)
            ]
        return carry

    def _cond(self, step: Loop, env: Env, grid: Grid) -> list[Rows]:
        self._begun(step, env, grid)
        values = [spread(env[name], grid) for name in step.args]
        chosen = [int(row) for row in spread(env[step.by[0]], grid)]
        last = len(step.bodies) - 1
        if step.kind == "cond":
            chosen = [0 if k else 1 for k in chosen]
        branches = [self._called(body, values, env, grid) for body in step.bodies]
        for branch in branches:
            _same_kinds(branch, branches[0])
            if self._depth:  # a trace differentiates the others too
                check_differentiable([row for rows in branch for row in rows])
        self._vary(
            step.outs,
            [
                self.varying([*step.by, *names])
                for names in zip(*(body.results for body in step.bodies), strict=True)
            ],
        )
        return [
            [branches[min(max(k, 0), last)][place][row] for row, k in enumerate(chosen)]
            for place in range(len(step.outs))
        ]

    def _associative_scan(self, step: Loop, env: Env, grid: Grid) -> list[Rows]:
        rows, body = spread(env[step.args[0]], grid), step.bodies[0]
        self._vary(body.params, [self.varying(step.args)] * 2)
        self._vary(step.outs, [self.varying(step.args)])
        length = rows[0].shape[0]
        order = list(range(length))
        if "reverse=True" in step.option:
            order.reverse()
        found = {k: [row[k] for row in rows] for k in order[:1]}
        for before, k in itertools.pairwise(order):
            found[k] = self._called(body, [found[before], [row[k] for row in rows]], env, grid)[0]
        return [[torch.stack([found[k][row] for k in range(length)]) for row in range(count(grid))]]

    # --- derivatives ------------------------------------------------------------------------------

    def _derivative(self, step: Derivative, env: Env, grid: Grid) -> list[Rows]:
        args = [spread(env[name], grid) for name in step.args]
        along = [spread(env[name], grid) for name in step.along]
        typed = self.shared_axes(grid)
        self._vary(step.body.params, [self.varying([name]) for name in step.args])

        def function(xs: list[Rows]) -> Rows:
            inside = {**env, **dict(zip(step.body.params, xs, strict=True))}
            return self.body(step.body, inside, grid)[0]

        def pull(ys: Rows, cotangents: Rows, xs: list[Rows]) -> list[Rows]:
            shared = typed - self.varying(step.body.results)
            copies = math.prod(grid[k][1] for k in shared)
            found = []
            for name, grads in zip(step.args, pulled(ys, cotangents, xs), strict=True):
                sums = dict[int, torch.Tensor]()
                for team in companions(grid, sorted(typed - self.varying([name]))):
                    total = torch.stack([grads[k] for k in team]).sum(0) / copies
                    sums.update(dict.fromkeys(team, total))
                found.append([sums[k] for k in range(len(grads))])
            return found

        self._depth += 1
        results = derivative(step.kind, function, args, along, pull if typed else pulled)
        self._depth -= 1
        if self._depth == 0:
            results = [[row.detach() for row in rows] for rows in results]
        value, untyped = self.varying(step.body.results), frozenset(range(len(grid))) - typed
        by_args = [untyped | self.varying([name]) for name in step.args]
        match step.kind:
            case "value_and_grad" | "vjp":
                self._vary(step.outs, [value, *by_args])
            case "jvp" | "jacfwd":
                self._vary(step.outs, [untyped | value] * len(step.outs))
            case _:
                self._vary(step.outs, by_args)
        return results


def _copies(values: Sequence[Rows]) -> list[Rows]:
    return [[row.clone() for row in rows] for rows in values]


def _same_kinds(found: Sequence[Rows], wanted: Sequence[Rows]) -> None:
    for new, old in zip(found, wanted, strict=True):
        for row, before in zip(new, old, strict=True):
            if row.shape != before.shape or row.dtype != before.dtype:
                raise ValueError("a carry or a branch is of another kind")


# --- the verdict ----------------------------------------------------------------------------------

NOISES = (1, 2, 3)


@dataclass(frozen=True)
class Expected:
    """A result and how far from it one may be."""

    value: torch.Tensor
    tolerance: float


def expectation(program: Program) -> list[Expected] | None:
    """What a program gives; None if a rounding error changes it much, or it is invalid."""
    try:
        clean = run(program)
        noisy = [run(program, noise) for noise in NOISES]
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, NotImplementedError):
        return None
    found = [_expected(value, others) for value, *others in zip(clean, *noisy, strict=True)]
    known = [expected for expected in found if expected is not None]
    return known if len(known) == len(found) and found else None


def _expected(value: torch.Tensor, others: Sequence[torch.Tensor]) -> Expected | None:
    if any(other.shape != value.shape or other.dtype != value.dtype for other in others):
        return None
    if not (value.is_floating_point() or value.is_complex()):
        return Expected(value, 0.0) if all(torch.equal(value, o) for o in others) else None
    if not value.numel():
        return Expected(value, 0.0)
    if not all(_is_finite_alike(value, other) for other in others):
        return None
    wide = _finite(value)
    moved = max(float((_finite(other) - wide).abs().max()) for other in others)
    size, eps = float(wide.abs().max()), torch.finfo(value.dtype).eps
    if value.dtype in HALVES:  # a few errors of a half are all of it
        tolerance, limit = 8 * moved + 4 * eps * size, 0.3 * size
    else:
        tolerance, limit = 32 * moved + 8 * eps * size, 1e-2 * size
    return Expected(value, tolerance + 1e-300) if tolerance <= limit else None


def _finite(value: torch.Tensor) -> torch.Tensor:
    """In the widest dtype, with zeros for what is not finite."""
    wide = value.to(torch.complex128)
    return torch.where(wide.isfinite(), wide, 0)


def _is_finite_alike(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether infinities and NaN are the same."""
    if value.is_complex():
        return _is_finite_alike(torch.view_as_real(value), torch.view_as_real(other))
    special, same = ~value.isfinite(), value.eq(other) | (value.isnan() & other.isnan())
    return torch.equal(special, ~other.isfinite()) and bool(same[special].all())


def verdict(got: Sequence[torch.Tensor], expected: Sequence[Expected]) -> str:
    """What is wrong with the results; empty if nothing is."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for k, (found, wanted) in enumerate(zip(got, expected, strict=True)):
        if found.dtype != wanted.value.dtype:
            return f"result {k} has dtype {found.dtype} instead of {wanted.value.dtype}"
        if found.shape != wanted.value.shape:
            return f"result {k} has shape {tuple(found.shape)}, not {tuple(wanted.value.shape)}"
        if not found.numel() or torch.equal(found, wanted.value):
            continue
        text = f"\ngot {found}\ninstead of {wanted.value}"
        if not _is_finite_alike(found, wanted.value):
            return f"result {k} is not finite where it should be, or the other way round:{text}"
        distance = float((_finite(found) - _finite(wanted.value)).abs().max())
        if distance > wanted.tolerance:
            return f"result {k} differs by {distance:.3g}, more than {wanted.tolerance:.3g}:{text}"
    return ""
