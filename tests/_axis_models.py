"""The collectives in NumPy, over rows of one array; and the axes that can hold eight such rows.

``Case(run, model, shape)``: ``run(x, axis_name)`` on each of eight devices, of which each has one
row ``x`` of that shape, must give the rows of ``model(rows)``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap import _collectives as c
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis

Rows = np.ndarray
Groups = Sequence[Sequence[int]] | None
N = 8


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.float64)


# --- axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Eight rows as a grid, row-major over the axes in ``axis_name``."""

    axis_name: Any
    grid: tuple[int, ...]
    process: int | None
    """Which dim of the grid is the process axis; the others are vmapped."""
    folded: bool = False
    """Whether both dims are parts of one axis."""

    def block(self, rows: torch.Tensor, rank: int) -> torch.Tensor:
        """What one process holds: dims of the vmapped axes first."""
        shaped = rows.reshape(*self.grid, *rows.shape[1:])
        return shaped if self.process is None else shaped.select(self.process, rank)

    def rows(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Undo ``block``."""
        whole = blocks[0] if self.process is None else torch.stack(tuple(blocks), self.process)
        return whole.reshape(N, *whole.shape[len(self.grid) :])

    def mapped(
        self, f: Callable[..., Any], process_axis: Axis | None, *blocks: torch.Tensor
    ) -> Any:
        """Run ``f`` on every row of a process's blocks."""
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        vmapped = [k for k in range(len(self.grid)) if k != self.process]

        def level(depth: int, axes: tuple[Axis, ...], *xs: torch.Tensor) -> Any:
            if depth == len(vmapped):
                return self._bound(f, process_axis, axes, xs)
            k = vmapped[depth]
            name = names[0] if self.folded else names[k]

            def row(index: torch.Tensor, *ys: torch.Tensor) -> Any:
                axis = Axis(name, self.grid[k], index, None)
                return level(depth + 1, (*axes, axis), *ys)

            return torch.func.vmap(row)(torch.arange(self.grid[k]), *xs)

        return level(0, (), *blocks)

    def _bound(
        self,
        f: Callable[..., Any],
        process_axis: Axis | None,
        vmapped: tuple[Axis, ...],
        xs: tuple[torch.Tensor, ...],
    ) -> Any:
        if self.folded and process_axis is not None:
            with axis_stack.bind(process_axis, *vmapped):
                return f(*xs)
        parts = [(axis,) for axis in vmapped]
        if process_axis is not None:
            parts.append((process_axis,))

        def enter(rest: list[tuple[Axis, ...]]) -> Any:
            if not rest:
                return f(*xs)
            with axis_stack.bind(*rest[0]):
                return enter(rest[1:])

        return enter(parts)


ON_PROCESSES = {
    "folded": World("i", (4, 2), 0, folded=True),
    "process_vmapped": World(("i", "j"), (4, 2), 0),
    "vmapped_process": World(("j", "i"), (2, 4), 1),
}
VMAPPED = {
    "one": World("j", (8,), None),
    "two": World(("j", "k"), (4, 2), None),
    "three": World(("j", "k", "l"), (2, 2, 2), None),
}

# --- models ---------------------------------------------------------------------------------------


def grouped(model: Callable[[Rows], Sequence[Rows]], groups: Groups) -> Callable[[Rows], Rows]:
    """A model of one group, from its rows to theirs, as one of all rows."""

    def run(rows: Rows) -> Rows:
        out: dict[int, Rows] = {}
        for group in groups or [range(N)]:
            out.update(zip(group, model(rows[list(group)]), strict=True))
        return np.stack([out[k] for k in range(N)])

    return run


def everyone(reduce: Callable[[Rows], Rows]) -> Callable[[Rows], Sequence[Rows]]:
    return lambda rows: [reduce(rows)] * len(rows)


def concatenated(axis: int) -> Callable[[Rows], Rows]:
    return lambda rows: np.concatenate(list(rows), axis)


def scattered(dim: int, tiled: bool) -> Callable[[Rows], Sequence[Rows]]:
    def model(rows: Rows) -> Sequence[Rows]:
        parts = np.split(rows.sum(0), len(rows), dim)
        return parts if tiled else [part.squeeze(dim) for part in parts]

    return model


def exchanged(split: int, concat: int, tiled: bool) -> Callable[[Rows], Sequence[Rows]]:
    def model(rows: Rows) -> Sequence[Rows]:
        parts = [np.split(row, len(rows), split) for row in rows]
        join = concatenated(concat) if tiled else (lambda got: np.stack(got, concat))
        got = [[part[k] for part in parts] for k in range(len(rows))]
        return [join(g if tiled else [part.squeeze(split) for part in g]) for g in got]

    return model


def permuted(pairs: Sequence[tuple[int, int]]) -> Callable[[Rows], Rows]:
    def model(rows: Rows) -> Rows:
        out = np.zeros_like(rows)
        for source, destination in pairs:
            out[destination] = rows[source]
        return out

    return model


# --- cases ----------------------------------------------------------------------------------------

EVEN = {
    "whole": None,
    "reversed": [list(range(7, -1, -1))],
    "singles": [[k] for k in range(N)],
    "neighbours": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "strided": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "halves": [[4, 5, 6, 7], [0, 1, 2, 3]],
    "backwards_pairs": [[2, 0], [3, 1], [6, 4], [7, 5]],
    "scattered": [[5, 0], [1, 7], [6, 2], [3, 4]],
    "bricks": [[0, 1], [2, 4], [3, 5], [6, 7]],
    "two_orders": [[0, 1], [3, 2], [4, 5], [7, 6]],
}
UNEVEN = {
    "uneven": [[0, 1], [7, 6, 5, 4, 3, 2]],
    "uneven_scattered": [[0, 1, 2], [3], [4, 5, 6, 7]],
    "uneven_mixed": [[0, 3, 6], [1, 2], [4, 5, 7]],
}
PERMUTATIONS = {
    "ring": [(k, (k + 1) % N) for k in range(N)],
    "by_two": [(k, (k + 2) % N) for k in range(N)],
    "back": [(k, (k - 3) % N) for k in range(N)],
    "mirrored": [(k, N - 1 - k) for k in range(N)],
    "any": list(zip(range(N), [3, 7, 0, 5, 1, 2, 6, 4], strict=True)),
    "stays": [(2, 3), (3, 2), (6, 6)],
    "partial": [(0, 5), (1, 4), (7, 0), (2, 6)],
    "negative": [(-1, 0), (3, -2)],
    "nothing": [],
}


@dataclass(frozen=True)
class Case:
    run: Callable[[Any, Any], Any]
    model: Callable[[Rows], Rows]
    shape: tuple[int, ...]


def _reductions(groups: Groups) -> dict[str, Case]:
    g: Any = {"axis_index_groups": groups}
    return {
        "psum": Case(
            lambda x, i: c.psum(x, i, **g), grouped(everyone(lambda r: r.sum(0)), groups), (2, 3)
        ),
        "pmean": Case(
            lambda x, i: c.pmean(x, i, **g), grouped(everyone(lambda r: r.mean(0)), groups), (3,)
        ),
    }


def _exchanges(groups: Groups) -> dict[str, Case]:
    g: Any = {"axis_index_groups": groups}
    m = len(groups[0]) if groups else N

    def stacked(axis: int) -> Callable[[Rows], Rows]:
        return grouped(everyone(lambda r: np.stack(list(r), axis)), groups)

    return {
        "all_gather": Case(lambda x, i: c.all_gather(x, i, **g), stacked(0), (2,)),
        "all_gather_last": Case(lambda x, i: c.all_gather(x, i, axis=-1, **g), stacked(-1), (2,)),
        "all_gather_tiled": Case(lambda x, i: c.all_gather(x, i, axis=-1, tiled=True, **g),
            grouped(everyone(concatenated(-1)), groups), (2, 2)),
        "psum_scatter": Case(
            lambda x, i: c.psum_scatter(x, i, **g), grouped(scattered(0, False), groups), (m, 2)),
        "psum_scatter_tiled": Case(
            lambda x, i: c.psum_scatter(x, i, scatter_dimension=-1, tiled=True, **g),
            grouped(scattered(-1, True), groups), (2, 2 * m)),
        "all_to_all": Case(lambda x, i: c.all_to_all(x, i, -2, -1, **g),
            grouped(exchanged(-2, -1, False), groups), (m, 2)),
        "all_to_all_tiled": Case(lambda x, i: c.all_to_all(x, i, 1, 0, tiled=True, **g),
            grouped(exchanged(1, 0, True), groups), (2, 2 * m)),
        "pswapaxes": Case(
            lambda x, i: c.pswapaxes(x, i, 0, **g), grouped(exchanged(0, 0, False), groups), (m,)),
    }  # fmt: skip


def _linear() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, groups in {**EVEN, **UNEVEN}.items():
        made = _reductions(groups) | (_exchanges(groups) if name in EVEN else {})
        cases |= {f"{op}-{name}": case for op, case in made.items()}
    for name, pairs in PERMUTATIONS.items():
        cases[f"ppermute-{name}"] = Case(
            lambda x, i, pairs=pairs: c.ppermute(x, i, pairs), permuted(pairs), (2,)
        )
    order = [4, 2, 7, 0, 5, 1, 6, 3]
    cases["pshuffle"] = Case(lambda x, i: c.pshuffle(x, i, order), lambda rows: rows[order], (2,))
    for source in (5, -1):
        cases[f"pbroadcast{source}"] = Case(
            lambda x, i, source=source: c.pbroadcast(x, i, source),
            lambda rows, source=source: np.stack([rows[source]] * N),
            (2,),
        )
    cases["positional"] = Case(
        lambda x, i: c.psum(x, (*(i if isinstance(i, tuple) else (i,)), -1)),
        lambda rows: np.stack([rows.sum((0, 2))] * N),
        (2, 3),
    )
    return cases


LINEAR = _linear()
"""Cases whose derivative follows from their values."""


def transposed(case: Case, cotangents: Rows) -> Rows:
    """What a linear model's transpose makes of cotangents: column k is what it does to unit k."""
    shape = (N, *case.shape)
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    return np.array([(cotangents * case.model(unit)).sum() for unit in units]).reshape(shape)


def extreme_shares(rows: Rows, groups: Groups, take: Any) -> Rows:
    """Every element's part in the derivative of its group's extreme: ties share it evenly."""

    def model(members: Rows) -> Sequence[Rows]:
        holds = (members == take(members, 0)).astype(rows.dtype)
        return list(holds / holds.sum(0))

    return grouped(model, groups)(rows)
