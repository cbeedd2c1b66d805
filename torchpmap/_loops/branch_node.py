"""A traced branch, and the branches that are its derivatives and its batched form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._loops import emit
from torchpmap._trace.transformable import (
    Body,
    Maybe,
    Tensors,
    Transformable,
    apply,
    batch_first,
    expand_some,
    jvp_of,
    vjp_of,
    vmap_of,
)


@dataclass(frozen=True, eq=False)
class Branch(Transformable):
    """Its tensors are the selector, and those that the branches read."""

    name: str
    branches: tuple[Body, ...]
    """Of two, the first is for true.  More are numbered; the selector may be beyond the last."""

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        return self._chosen(tensors[0], tensors[1:], range(len(self.branches)))

    def _chosen(
        self, selector: torch.Tensor, operands: Tensors, which: range
    ) -> list[torch.Tensor]:
        """Run one of some branches.  A node of the graph knows two, which may be halves of more."""
        if len(which) == 1:
            return self.branches[which[0]](operands)
        half = len(which) // 2
        first = selector if selector.dtype == torch.bool else selector < which[half]
        run = functools.partial(self._chosen, selector, operands)
        bodies = functools.partial(run, which[:half]), functools.partial(run, which[half:])
        return emit.branch(first, [emit.inner(body, []) for body in bodies], self.name)

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> list[torch.Tensor | None]:
        given = [k for k, x in enumerate(cotangents) if x is not None]
        places = [k - 1 for k in wanted]
        count = len(tensors) - 1
        reached: set[int] = set()

        def back(body: Body) -> Body:
            return lambda xs: vjp_of(body, xs[:count], places, given, xs[count:], reached)

        branches = Branch(self.name, tuple(map(back, self.branches)))
        found = apply(branches, [*tensors, *(x for x in cotangents if x is not None)])
        return [x if k in reached else None for k, x in enumerate(found)]

    def jvp(self, tensors: Tensors, tangents: Maybe) -> list[torch.Tensor | None]:
        given = [k - 1 for k, x in enumerate(tangents) if x is not None]
        count = len(tensors) - 1
        kinds: list[bool] = []

        def forward(body: Body) -> Body:
            def run(xs: Tensors) -> list[torch.Tensor]:
                results, derivatives = jvp_of(body, xs[:count], given, xs[count:])
                kinds[:] = map(is_inexact, results)
                return derivatives

            return run

        found = Branch(self.name, tuple(map(forward, self.branches)))
        derivatives = iter(apply(found, [*tensors, *(x for x in tangents if x is not None)]))
        return [next(derivatives) if has else None for has in kinds]

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[list[torch.Tensor], list[int | None]]:
        size = info.batch_size
        tensors = batch_first(tensors, dims)
        which = [d is not None for d in dims]
        parts = self.name if which[0] else None
        runs = [vmap_of(body, which[1:], info.randomness, parts) for body in self.branches]
        if which[0]:
            found = [run(tensors[1:]) for run in runs]
            every = [expand_some(xs, reached, [True] * len(xs), size) for xs, reached in found]
            results = [chosen(tensors[0], leaf) for leaf in zip(*every, strict=True)]
            return results, [0] * len(results)
        reached = [self._reached(run, tensors[1:]) for run in runs]
        any_reached = [any(leaf) for leaf in zip(*reached, strict=True)]

        def same(run: Any) -> Body:
            def body(xs: Tensors) -> list[torch.Tensor]:
                results, own = run(xs)
                return expand_some(results, own, any_reached, size)

            return body

        batches = Branch(self.name, tuple(map(same, runs)))
        return apply(batches, tensors), [0 if has else None for has in any_reached]

    @staticmethod
    def _reached(run: Any, tensors: Tensors) -> list[bool]:
        with emit.discarded():
            return list(run(tensors)[1])


def place_of(selector: bool | int, count: int) -> int:
    """The number of the branch that a selector means."""
    if isinstance(selector, bool):
        return 0 if selector else 1
    return min(max(selector, 0), count - 1)


def chosen(selector: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of the values of all branches, that of the selector; of each row, if the first dim is that of
    rows.
    """
    if selector.dtype == torch.bool:
        yes, no = values
        return torch.where(beside(selector, yes), yes, no)
    found = values[-1]
    for number in range(len(values) - 2, -1, -1):
        found = torch.where(beside(selector <= number, found), values[number], found)
    return found


def beside(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mask, with as many dims as the value."""
    return mask.reshape((*mask.shape, *[1] * (value.dim() - mask.dim())))
