"""What a program of the fuzzer should give: all rows in lock-step, in plain torch.

A value is a list with one tensor per row, row-major over the axes that are mapped around it.  An
operation of torch runs on one row after the other.  A collective is its definition, written over
the list of the rows that take part; nothing of torchpmap is used, nor ``torch.func``.  The
derivative rules then are none of their own: inside a mapped function JAX differentiates the sum of
all rows' results with respect to each row's argument, and that is one call of ``torch.autograd`` on
the rows of the whole program.  Forward mode is its transpose's transpose.

With ``noise``, whatever is computed is changed by about one rounding error of its dtype: how far
the results move says how exactly they can be known.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _fuzz_programs import Body, Collective, Derivative, Input, Local, Map, Program, Step

Rows = list[Any]
Env = dict[str, Rows]
Grid = tuple[tuple[str | None, int], ...]
Function = Callable[[list[Rows]], Rows]
"""Of the rows of some arguments: the rows of one result."""

HALVES = (torch.bfloat16, torch.float16)
NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16)


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


def made(given: Input) -> torch.Tensor:
    """The value of an input; strides do not matter here."""
    dtype = getattr(torch, given.dtype)
    shape = given.shape
    if given.layout == "transposed":
        return values(given.seed, shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if given.layout == "sliced":
        return values(given.seed, (*shape[:-1], 2 * shape[-1] + 1), dtype)[..., 1::2]
    if given.layout == "expanded":
        return values(given.seed, shape[1:], dtype).expand(shape)
    return values(given.seed, shape, dtype, given.layout == "special")


def values(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, special: bool = False
) -> torch.Tensor:
    """Small numbers: floats of a normal distribution, integers from about -6 to 6."""
    kind = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=kind)
    if special:
        for k, value in enumerate((math.inf, math.nan, 0.0, -math.inf)):
            x.view(-1)[seed % 3 + 3 * k :: 13] = value
    if dtype == torch.bool:
        return x > 0
    if not (dtype.is_floating_point or dtype.is_complex):
        x = (2 * x).round().abs() if dtype == torch.uint8 else (2 * x).round()
    return x.to(dtype)


class Reference:
    """Runs steps; ``env`` holds the rows of every name."""

    def __init__(self, noise: int | None = None) -> None:
        self._noise = noise
        self._depth = 0
        """Derivatives around."""

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
            operands: Sequence[str | None] = step.args or (None,)
            results = [collective(step, name, env, grid) for name in operands]
        elif isinstance(step, Map):
            results = self._map(step, env, grid)
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

    def _local(self, step: Local, env: Env, grid: Grid) -> list[Rows]:
        code = (step.code if step.model is None else step.model).format(*step.args)
        args = [spread(env[name], grid) for name in step.args]
        if not step.outs:
            for row in range(count(grid)):
                exec(code, _names(step, args, row))
            return []
        results = [eval(code, _names(step, args, row)) for row in range(count(grid))]
        if len(step.outs) == 1:
            return [results]
        return [list(column) for column in zip(*results, strict=True)]

    def _map(self, step: Map, env: Env, grid: Grid) -> list[Rows]:
        args = [spread(env[name], grid) for name in step.args]
        size = axis_size(step, [rows[0] for rows in args])
        inner: Grid = (*grid, (step.axis, size))
        inside = dict(env)
        for name, axis, rows in zip(step.body.params, step.in_axes, args, strict=True):
            inside[name] = [
                (row if axis is None else row.select(axis, k)).clone()
                for row in rows
                for k in range(size)
            ]
        stacked = []
        for axis, rows in zip(step.out_axes, self.body(step.body, inside, inner), strict=True):
            parts = [rows[k : k + size] for k in range(0, len(rows), size)]
            stacked.append([_first(p) if axis is None else torch.stack(p, axis) for p in parts])
        return stacked

    def _derivative(self, step: Derivative, env: Env, grid: Grid) -> list[Rows]:
        args = [spread(env[name], grid) for name in step.args]
        along = [spread(env[name], grid) for name in step.along]

        def function(xs: list[Rows]) -> Rows:
            inside = {**env, **dict(zip(step.body.params, xs, strict=True))}
            return self.body(step.body, inside, grid)[0]

        self._depth += 1
        results = KINDS[step.kind](function, args, along)
        self._depth -= 1
        if self._depth == 0:
            results = [[row.detach() for row in rows] for rows in results]
        return results


def _names(step: Local, args: list[Rows], row: int) -> dict[str, Any]:
    return {"torch": torch, **{n: rows[row] for n, rows in zip(step.args, args, strict=True)}}


def count(grid: Grid) -> int:
    return math.prod(size for _, size in grid)


def spread(rows: Rows, grid: Grid) -> Rows:
    """Rows of a value from outside: all rows within one of its own share it."""
    total = count(grid)
    return rows if len(rows) == total else [rows[k * len(rows) // total] for k in range(total)]


def axis_size(step: Map, args: Sequence[torch.Tensor]) -> int:
    """The size of a mapped axis: that of all mapped dims."""
    sizes = {x.shape[a] for x, a in zip(args, step.in_axes, strict=True) if a is not None}
    sizes |= set() if step.size is None else {step.size}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"the mapped axis has sizes {sizes}")
    return sizes.pop()


def _first(rows: Rows) -> torch.Tensor:
    """A value that is equal in all rows; its cotangent goes to all in equal parts."""
    if not rows[0].requires_grad and not any(row.requires_grad for row in rows):
        return rows[0].clone()
    mean = torch.stack(rows).mean(0)
    return rows[0].detach() + (mean - mean.detach())


# --- derivatives ----------------------------------------------------------------------------------


def _fresh(args: list[Rows]) -> list[Rows]:
    """Arguments to differentiate by, which outer derivatives reach through."""
    if not all(x.is_floating_point() for rows in args for x in rows):
        raise ValueError("an argument to differentiate by is not real")
    return [
        [x.clone() if x.requires_grad else x.detach().clone().requires_grad_() for x in rows]
        for rows in args
    ]


def _pull(ys: Rows, cotangents: Rows, xs: list[Rows]) -> list[Rows]:
    """Derivatives, by all arguments of all rows, of all results times their cotangents."""
    flat = [x for rows in xs for x in rows]
    weighted = [(y * c).sum() for y, c in zip(ys, cotangents, strict=True)]
    weighted = [w for w in weighted if w.requires_grad]
    grads: Sequence[torch.Tensor | None] = [None] * len(flat)
    if weighted:
        total = torch.stack(weighted).sum()
        grads = torch.autograd.grad(total, flat, create_graph=True, allow_unused=True)
    full = [torch.zeros_like(x) if g is None else g for x, g in zip(flat, grads, strict=True)]
    return [full[k : k + len(xs[0])] for k in range(0, len(full), len(xs[0]))]


def _ones(ys: Rows) -> Rows:
    return [torch.ones_like(y) for y in ys]


def _value_and_grad(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    xs = _fresh(args)
    ys = f(xs)
    if any(y.shape != () or not y.is_floating_point() for y in ys):
        raise ValueError("the function to differentiate gives no real scalar")
    return [ys, *_pull(ys, _ones(ys), xs)]


def _grad(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    return _value_and_grad(f, args, along)[1:]


def _backward(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    xs = _fresh(args)
    ys = f(xs)
    if not any(y.requires_grad for y in ys):
        raise ValueError("torch has nothing to differentiate")
    return _pull(ys, _ones(ys), xs)


def _vjp(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    xs = _fresh(args)
    ys = f(xs)
    if any(y.shape != c.shape or y.dtype != c.dtype for y, c in zip(ys, along[0], strict=True)):
        raise ValueError("the cotangent is unlike the result")
    return [ys, *_pull(ys, along[0], xs)]


def _jvp(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    xs = _fresh(args)
    ys = f(xs)
    return [ys, _push(ys, xs, along)]


def _push(ys: Rows, xs: list[Rows], tangents: list[Rows]) -> Rows:
    """How the results move with the arguments: the transpose, which is linear, transposed."""
    units = [torch.ones_like(y).requires_grad_() for y in ys]
    pulled = _pull(ys, units, xs)
    flat = [g for rows in pulled for g in rows]
    moved = [t for rows in tangents for t in rows]
    return _pull(flat, moved, [units])[0]


def _basis(rows: Rows) -> list[Rows]:
    """For every element the unit that points to it, the same in all rows."""
    shape, dtype, size = rows[0].shape, rows[0].dtype, rows[0].numel()
    units = torch.eye(size, dtype=dtype).reshape(size, *shape)
    return [[unit] * len(rows) for unit in units]


def _jacrev(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    xs = _fresh(args)
    ys = f(xs)
    columns = [_pull(ys, unit, xs)[0] for unit in _basis(ys)]
    return [_stacked(columns, 0, ys[0].shape + xs[0][0].shape)]


def _jacfwd(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    xs = _fresh(args)
    ys = f(xs)
    columns = [_push(ys, xs, [unit]) for unit in _basis(xs[0])]
    return [_stacked(columns, -1, ys[0].shape + xs[0][0].shape)]


def _hessian(f: Function, args: list[Rows], along: list[Rows]) -> list[Rows]:
    return _jacfwd(lambda xs: _jacrev(f, xs, [])[0], args, [])


def _stacked(columns: list[Rows], dim: int, shape: Sequence[int]) -> Rows:
    if not columns:
        raise ValueError("the Jacobian of nothing")
    return [torch.stack(row, dim).reshape(shape) for row in zip(*columns, strict=True)]


KINDS = {
    "grad": _grad,
    "torch_grad": _grad,
    "backward": _backward,
    "value_and_grad": _value_and_grad,
    "vjp": _vjp,
    "jvp": _jvp,
    "jacrev": _jacrev,
    "jacfwd": _jacfwd,
    "hessian": _hessian,
}

# --- collectives ----------------------------------------------------------------------------------


def collective(step: Collective, operand: str | None, env: Env, grid: Grid) -> Rows:
    """The rows of a collective's result for one of its operands."""
    options = dict(step.options)
    groups = options.pop("axis_index_groups", None)
    names = step.axes if isinstance(step.axes, tuple) else (step.axes,)
    dims = [name for name in names if isinstance(name, int)]
    teams = companions(grid, [name for name in names if isinstance(name, str)])
    out: dict[int, torch.Tensor] = {}
    rows = [None] * count(grid) if operand is None else spread(env[operand], grid)
    if dims and not rows[0].dim():  # torch sums a number over its dim 0, JAX does not
        raise ValueError("a number has no dims")
    for team in teams:
        for group in groups or [range(len(team))]:
            members = [team[k] for k in group]
            given = [rows[k] for k in members]
            model = MODELS[step.name]
            results = model(given, dims, **options) if dims else model(given, **options)
            out.update(zip(members, results, strict=True))
    return [out[k] for k in range(count(grid))]


def companions(grid: Grid, names: Sequence[str]) -> list[list[int]]:
    """The rows that differ only along the named axes, each list row-major in the order named."""
    places = [max(k for k, (axis, _) in enumerate(grid) if axis == name) for name in names]
    others = [k for k in range(len(grid)) if k not in places]
    order = [*others, *places]
    numbers = torch.arange(count(grid)).reshape([size for _, size in grid])
    team = math.prod(grid[k][1] for k in places)
    return numbers.permute(order).reshape(-1, team).tolist()


def _same(rows: Sequence[torch.Tensor], value: torch.Tensor) -> Rows:
    return [value.clone() for _ in rows]


def _psum(rows: Rows, dims: Sequence[int] = ()) -> Rows:
    dtype = torch.int32 if rows[0].dtype == torch.bool else rows[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = torch.stack([row.to(wide) for row in rows]).sum(0, dtype=wide)
    return _same(rows, _over(total, dims, lambda x, d: x.sum(d, dtype=wide)).to(dtype))


def _pmean(rows: Rows, dims: Sequence[int] = ()) -> Rows:
    if rows[0].dtype in NARROW:
        rows = [row.to(torch.int32) for row in rows]
    dtype = rows[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = torch.stack([row.to(wide) for row in rows]).sum(0, dtype=wide)
    total = _over(total, dims, lambda x, d: x.sum(d, dtype=wide))
    mean = total / (len(rows) * math.prod(rows[0].shape[d] for d in dims))
    return _same(rows, mean.to(dtype) if dtype in HALVES else mean)


def _pmax(rows: Rows, dims: Sequence[int] = ()) -> Rows:
    return _same(rows, torch.stack(rows).amax((0, *(d if d < 0 else d + 1 for d in dims))))


def _pmin(rows: Rows, dims: Sequence[int] = ()) -> Rows:
    return _same(rows, torch.stack(rows).amin((0, *(d if d < 0 else d + 1 for d in dims))))


def _over(
    x: torch.Tensor, dims: Sequence[int], reduce: Callable[[torch.Tensor, Any], torch.Tensor]
) -> torch.Tensor:
    return reduce(x, tuple(dims)) if dims else x


def _all_gather(rows: Rows, axis: int = 0, tiled: bool = False) -> Rows:
    return _same(rows, torch.cat(rows, axis) if tiled else torch.stack(rows, axis))


def _psum_scatter(rows: Rows, scatter_dimension: int = 0, tiled: bool = False) -> Rows:
    if rows[0].dtype == torch.bool:
        raise TypeError("JAX refuses it")
    return _slices(_psum(rows)[0], len(rows), scatter_dimension, tiled)


def _all_to_all(rows: Rows, split_axis: int, concat_axis: int, tiled: bool = False) -> Rows:
    sent = [_slices(row, len(rows), split_axis, tiled) for row in rows]
    join = torch.cat if tiled else torch.stack
    return [join([parts[k] for parts in sent], concat_axis) for k in range(len(rows))]


def _slices(x: torch.Tensor, size: int, dim: int, tiled: bool) -> Rows:
    if x.shape[dim] % size or (not tiled and x.shape[dim] != size):
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not cut into {size}")
    if tiled:
        return [part.clone() for part in x.chunk(size, dim)] if x.shape[dim] else [x] * size
    return [part.clone() for part in x.unbind(dim)]


def _ppermute(rows: Rows, perm: Sequence[tuple[int, int]]) -> Rows:
    out = [torch.zeros_like(row) for row in rows]
    for source, destination in perm:
        out[destination] = rows[source].clone()
    return out


def _pbroadcast(rows: Rows, source: int) -> Rows:
    return _same(rows, rows[source])


MODELS: dict[str, Callable[..., Rows]] = {
    "psum": _psum,
    "pmean": _pmean,
    "pmax": _pmax,
    "pmin": _pmin,
    "all_gather": _all_gather,
    "psum_scatter": _psum_scatter,
    "all_to_all": _all_to_all,
    "pswapaxes": lambda rows, axis: _all_to_all(rows, axis, axis),
    "ppermute": _ppermute,
    "pshuffle": lambda rows, perm: [rows[k].clone() for k in perm],
    "pbroadcast": _pbroadcast,
    "axis_index": lambda rows: [torch.tensor(k) for k in range(len(rows))],
}
