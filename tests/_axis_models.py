"""Collectives over eight rows of one array, and the axes that can hold eight such rows.

``case.run(x, axis_name)`` on each of eight devices, of which each has one row ``x`` of
``case.shape``, must give the rows of ``case.model(rows)``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _collective_models import MODELS, in_groups
from _support import EAGER
from torch.utils._pytree import tree_map

import torchpmap as tp

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
    on_devices: int | None
    """Which dim of the grid is the axis of the devices; the others are vmapped."""

    def mapped(self, f: Callable[..., Any], compile: Any = EAGER) -> Any:
        """``f`` of a row as a function of grids of rows."""
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        k = self.on_devices
        for place in reversed(range(len(names))):
            if place != k:
                f = tp.vmap(f, axis_name=names[place])
        if k is not None:
            f = tp.pmap(f, names[k], in_axes=k, out_axes=k, compile=compile)
        return f

    def grid_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(*self.grid, *rows.shape[1:])

    def __call__(self, f: Callable[..., Any], *rows: Any, compile: Any = EAGER) -> Any:
        """What ``f`` of every row gives, as rows."""
        results = self.mapped(f, compile)(*tree_map(self.grid_of, rows))
        return tree_map(lambda y: y.cpu().reshape(N, *y.shape[len(self.grid) :]), results)


ON_DEVICES = {
    "folded": World("i", (8,), 0),
    "vmap inside": World(("i", "j"), (4, 2), 0),
    "vmap first": World(("j", "i"), (2, 4), 1),
}
VMAPPED = {
    "one": World("j", (8,), None),
    "two": World(("j", "k"), (4, 2), None),
    "three": World(("j", "k", "l"), (2, 2, 2), None),
}

# --- models ---------------------------------------------------------------------------------------


def grouped(model: Callable[[Rows], Sequence[Rows]], groups: Groups) -> Callable[[Rows], Rows]:
    """A model of one group, from its rows to theirs, as one of all rows."""
    return lambda rows: np.stack(in_groups(lambda own: model(np.stack(own)), list(rows), groups))


def everyone(reduce: Callable[[Rows], Rows]) -> Callable[[Rows], Sequence[Rows]]:
    return lambda rows: [reduce(rows)] * len(rows)


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
    """A collective with its options; ``dims``: beside the axes, those of each row."""

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    groups: Groups = None
    dims: tuple[int, ...] = ()

    def run(self, x: Any, axis_name: Any) -> Any:
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        options = self.options | ({} if self.groups is None else {"axis_index_groups": self.groups})
        axes = (*names, *self.dims) if self.dims else axis_name
        return getattr(tp, self.name)(x, axes, **options)

    def of_tensor(self, x: torch.Tensor) -> torch.Tensor:
        options = self.options | ({"dims": self.dims} if self.dims else {})
        model = functools.partial(MODELS[self.name], **options)
        return torch.stack(in_groups(model, list(x), self.groups))

    def model(self, rows: Rows) -> Rows:
        return self.of_tensor(torch.from_numpy(rows)).numpy()


def _linear() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, groups in {**EVEN, **UNEVEN}.items():
        m = len(groups[0]) if groups else N
        made: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
            "psum": ("psum", (2, 3), {}),
            "pmean": ("pmean", (3,), {}),
        }
        if name in EVEN:
            tiled = {"tiled": True}
            made |= {
                "all_gather": ("all_gather", (2,), {}),
                "all_gather_last": ("all_gather", (2,), {"axis": -1}),
                "all_gather_tiled": ("all_gather", (2, 2), {"axis": -1, **tiled}),
                "psum_scatter": ("psum_scatter", (m, 2), {}),
                "psum_scatter_tiled": (
                    "psum_scatter", (2, 2 * m), {"scatter_dimension": -1, **tiled}),
                "all_to_all": ("all_to_all", (m, 2), {"split_axis": -2, "concat_axis": -1}),
                "all_to_all_tiled": (
                    "all_to_all", (2, 2 * m), {"split_axis": 1, "concat_axis": 0, **tiled}),
                "pswapaxes": ("pswapaxes", (m,), {"axis": 0}),
            }  # fmt: skip
        cases |= {f"{key}-{name}": Case(*case, groups) for key, case in made.items()}
    for name, pairs in PERMUTATIONS.items():
        cases[f"ppermute-{name}"] = Case("ppermute", (2,), {"perm": pairs})
    cases["pshuffle"] = Case("pshuffle", (2,), {"perm": [4, 2, 7, 0, 5, 1, 6, 3]})
    for source in (5, -1):
        cases[f"pbroadcast{source}"] = Case("pbroadcast", (2,), {"source": source})
    cases["positional"] = Case("psum", (2, 3), {}, dims=(-1,))
    return cases


LINEAR = _linear()
"""Cases whose derivative follows from their values."""


def transposed(case: Case, cotangents: Rows) -> Rows:
    """What a linear model's transpose makes of cotangents."""
    pull = torch.func.vjp(case.of_tensor, torch.zeros(N, *case.shape, dtype=torch.float64))[1]
    return pull(torch.from_numpy(cotangents))[0].numpy()


def extreme_shares(rows: Rows, groups: Groups, take: Any) -> Rows:
    """Every element's part in the derivative of its group's extreme: ties share it evenly."""

    def model(members: Rows) -> Sequence[Rows]:
        holds = (members == take(members, 0)).astype(rows.dtype)
        return list(holds / holds.sum(0))

    return grouped(model, groups)(rows)
