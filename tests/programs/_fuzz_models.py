"""Values as lists with one tensor per row, in plain torch: cut, shared and put together again, and
what derivatives and collectives are.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _collective_models import MODELS, Rows, in_groups
from _fuzz_programs import Collective, Map, Spec

Env = dict[str, Rows]
Grid = tuple[tuple[str | None, int], ...]
Function = Callable[[list[Rows]], Rows]
"""Of the rows of some arguments: the rows of one result."""
Pull = Callable[[Rows, Rows, list[Rows]], list[Rows]]
"""Of results, cotangents and arguments: the derivatives by the arguments."""


def count(grid: Grid) -> int:
    return math.prod(size for _, size in grid)


def places(grid: Grid, names: Sequence[str]) -> list[int]:
    """Where the axes of these names stand in the grid; the innermost one of a name."""
    return [max(k for k, (axis, _) in enumerate(grid) if axis == name) for name in names]


def companions(grid: Grid, chosen: Sequence[int]) -> list[list[int]]:
    """The rows that differ only along the chosen axes, each list row-major in the order chosen."""
    others = [k for k in range(len(grid)) if k not in chosen]
    numbers = torch.arange(count(grid)).reshape([size for _, size in grid])
    team = math.prod(grid[k][1] for k in chosen)
    return numbers.permute([*others, *chosen]).reshape(-1, team).tolist()


# --- rows ----------------------------------------------------------------------------------------


def spread(rows: Rows, grid: Grid) -> Rows:
    """Rows of a value from outside: all rows within one of its own share it."""
    total = count(grid)
    return rows if len(rows) == total else [rows[k * len(rows) // total] for k in range(total)]


def taken(rows: Rows, axis: int | None, size: int, grid: Grid) -> Rows:
    """What a mapped function gets in each row."""
    return [
        (row if axis is None else row.select(axis, k)).clone()
        for row in spread(rows, grid)
        for k in range(size)
    ]


def axis_size(step: Map, args: Sequence[torch.Tensor]) -> int:
    """The size of a mapped axis: that of all mapped dims."""
    sizes = {x.shape[a] for x, a in zip(args, step.in_axes, strict=True) if a is not None}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"the mapped axis has sizes {sizes}")
    return sizes.pop()


def cut(rows: Rows, spec: Spec, mesh: Grid) -> Rows:
    """The block of each device of a mesh, for every row."""
    return [
        _block(row, spec, dict(zip(dict(mesh), place, strict=True)), dict(mesh)).clone()
        for row in rows
        for place in itertools.product(*(range(size) for _, size in mesh))
    ]


def _block(x: torch.Tensor, spec: Spec, place: dict[Any, int], sizes: dict[Any, int]) -> Any:
    for dim, axes in enumerate(spec):
        pieces, number = math.prod(sizes[axis] for axis in axes), 0
        for axis in axes:
            number = number * sizes[axis] + place[axis]
        if x.shape[dim] % pieces:
            raise ValueError(f"dim {dim} of {tuple(x.shape)} is not cut into {pieces}")
        each = x.shape[dim] // pieces
        x = x.narrow(dim, number * each, each)
    return x


def joined(blocks: Rows, spec: Spec, mesh: Grid) -> torch.Tensor:
    """The whole of which the blocks are parts; copies along the axes that cut nothing."""
    axes = [axis for entry in spec for axis in entry]
    unnamed = [k for k, (name, _) in enumerate(mesh) if name not in axes]
    pieces = {}
    for team in companions(mesh, unnamed):
        pieces[team[0]] = copied([blocks[k] for k in team])
    numbers = list(itertools.product(*(range(size) for _, size in mesh)))
    order = [places(mesh, [axis])[0] for axis in axes]
    ordered = [pieces[k] for k in sorted(pieces, key=lambda k: [numbers[k][a] for a in order])]
    sizes = dict(mesh)
    for dim in reversed(range(len(spec))):
        number = math.prod(sizes[axis] for axis in spec[dim])
        ordered = [torch.cat(ordered[k : k + number], dim) for k in range(0, len(ordered), number)]
    return ordered[0]


def copied(rows: Rows) -> torch.Tensor:
    """A value that is equal in all rows; its cotangent goes to all in equal parts."""
    if not any(row.requires_grad for row in rows):
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


def pulled(ys: Rows, cotangents: Rows, xs: list[Rows]) -> list[Rows]:
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


def check_differentiable(ys: Rows) -> None:
    """Raise if what the derivative of values needs was written to."""
    roots = [y for y in ys if y.requires_grad]
    if roots:
        torch.autograd.backward(roots, list(map(torch.ones_like, roots)), retain_graph=True)


def _ones(ys: Rows) -> Rows:
    return [torch.ones_like(y) for y in ys]


def derivative(kind: str, f: Function, args: list[Rows], along: list[Rows], pull: Pull) -> Any:
    """The results of a derivative of ``f``; ``along``: tangents, or a cotangent."""
    if kind == "hessian":
        inner = lambda xs: derivative("jacrev", f, xs, [], pull)[0]  # noqa: E731
        return derivative("jacfwd", inner, args, [], pull)
    xs = _fresh(args)
    ys = f(xs)
    match kind:
        case "grad" | "torch_grad" | "value_and_grad":
            if any(y.shape != () or not y.is_floating_point() for y in ys):
                raise ValueError("the function to differentiate gives no real scalar")
            grads = pull(ys, _ones(ys), xs)
            return [ys, *grads] if kind == "value_and_grad" else grads
        case "backward":
            if not any(y.requires_grad for y in ys):
                raise ValueError("torch has nothing to differentiate")
            return pull(ys, _ones(ys), xs)
        case "vjp":
            pairs = list(zip(ys, along[0], strict=True))
            if any(y.shape != c.shape or y.dtype != c.dtype for y, c in pairs):
                raise ValueError("the cotangent is unlike the result")
            return [ys, *pull(ys, along[0], xs)]
        case "jvp":
            return [ys, _push(ys, xs, along)]
    forward = kind == "jacfwd"
    columns = [
        _push(ys, xs, [x]) if forward else pull(ys, x, xs)[0]
        for x in _basis(xs[0] if forward else ys)
    ]
    return [_stacked(columns, -1 if forward else 0, ys[0].shape + xs[0][0].shape)]


def _push(ys: Rows, xs: list[Rows], tangents: list[Rows]) -> Rows:
    """How the results move with the arguments: the transpose, which is linear, transposed."""
    units = [torch.ones_like(y).requires_grad_() for y in ys]
    flat = [g for rows in pulled(ys, units, xs) for g in rows]
    moved = [t for rows in tangents for t in rows]
    return pulled(flat, moved, [units])[0]


def _basis(rows: Rows) -> list[Rows]:
    """For every element the unit that points to it, the same in all rows."""
    shape, dtype, size = rows[0].shape, rows[0].dtype, rows[0].numel()
    units = torch.eye(size, dtype=dtype).reshape(size, *shape)
    return [[unit] * len(rows) for unit in units]


def _stacked(columns: list[Rows], dim: int, shape: Sequence[int]) -> Rows:
    if not columns:
        raise ValueError("the Jacobian of nothing")
    return [torch.stack(row, dim).reshape(shape) for row in zip(*columns, strict=True)]


# --- collectives ----------------------------------------------------------------------------------


def collective(step: Collective, operand: str | None, env: Env, grid: Grid) -> Rows:
    """The rows of a collective's result for one of its operands."""
    options = dict(step.options)
    groups = options.pop("axis_index_groups", None)
    names = step.axes if isinstance(step.axes, tuple) else (step.axes,)
    dims = [name for name in names if isinstance(name, int)]
    teams = companions(grid, places(grid, [name for name in names if isinstance(name, str)]))
    rows = [None] * count(grid) if operand is None else spread(env[operand], grid)
    if dims:
        if not rows[0].dim():  # torch sums a number over its dim 0, JAX does not
            raise ValueError("a number has no dims")
        options["dims"] = dims
    members = [[team[k] for k in group] for team in teams for group in groups or [range(len(team))]]
    return in_groups(functools.partial(MODELS[step.name], **options), rows, members)
