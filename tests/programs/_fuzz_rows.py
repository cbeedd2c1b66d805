"""Values as lists with one tensor per row: cut, shared and put together again, in plain torch."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from _fuzz_models import MODELS, Grid, Rows, companions, count, places
from _fuzz_programs import Collective, Map, Spec

Env = dict[str, Rows]


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
    sizes |= set() if step.size is None else {step.size}
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


def collective(step: Collective, operand: str | None, env: Env, grid: Grid) -> Rows:
    """The rows of a collective's result for one of its operands."""
    options = dict(step.options)
    groups = options.pop("axis_index_groups", None)
    names = step.axes if isinstance(step.axes, tuple) else (step.axes,)
    dims = [name for name in names if isinstance(name, int)]
    teams = companions(grid, places(grid, [name for name in names if isinstance(name, str)]))
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
