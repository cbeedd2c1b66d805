"""A traced branch, and the branches that are its derivatives and its batched form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.torch_internals import depth
from torchpmap._collectives.varying import axes_of
from torchpmap._layout import axis_stack
from torchpmap._loops import emit
from torchpmap._loops.operator import (
    Body,
    Construct,
    Maybe,
    Tensors,
    apply,
    batch,
    expanded,
    is_inexact,
    pull,
    push,
)


@dataclass(frozen=True, eq=False)
class Branch(Construct):
    """Its tensors are the predicate, and those that the branches read."""

    name: str
    branches: tuple[Body, Body]
    """For true and for false."""

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        pred, operands = tensors[0], tensors[1:]
        inner = [emit.inner(lambda body=body: body(operands), []) for body in self.branches]
        reads = emit.shared(inner)
        return emit.call(
            torch.ops.higher_order.cond,
            *emit.operands([pred]),
            *(each.module for each in inner),
            tuple(emit.operands(reads)),
            results=inner[0].results,
            axes=[a | b | axes_of(pred) for a, b in zip(*(x.axes for x in inner), strict=True)],
            name=self.name,
        )

    def keeping(self) -> Branch:
        return self

    def pulled(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> list[torch.Tensor | None]:
        given = [k for k, x in enumerate(cotangents) if x is not None]
        places = [k - 1 for k in wanted]
        count = len(tensors) - 1

        def back(body: Body) -> Body:
            return lambda xs: pull(body, xs[:count], places, given, xs[count:])

        first, second = self.branches
        found = Branch(self.name, (back(first), back(second)))
        return list(apply(found, [*tensors, *(x for x in cotangents if x is not None)]))

    def pushed(self, tensors: Tensors, tangents: Maybe) -> list[torch.Tensor | None]:
        given = [k - 1 for k, x in enumerate(tangents) if x is not None]
        count = len(tensors) - 1
        kinds: list[bool] = []

        def forward(body: Body) -> Body:
            def run(xs: Tensors) -> list[torch.Tensor]:
                results, derivatives = push(body, xs[:count], given, xs[count:])
                kinds[:] = map(is_inexact, results)
                return derivatives

            return run

        first, second = self.branches
        found = Branch(self.name, (forward(first), forward(second)))
        derivatives = iter(apply(found, [*tensors, *(x for x in tangents if x is not None)]))
        return [next(derivatives) if has else None for has in kinds]

    def batched(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[list[torch.Tensor], list[int | None]]:
        size = info.batch_size
        tensors = [x if d is None else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        which = [d is not None for d in dims]
        runs = [batch(body, which[1:], size, info.randomness) for body in self.branches]
        if which[0]:
            with axis_stack.parting(frozenset([depth() + 1]), self.name):
                both = [run(tensors[1:]) for run in runs]
            chosen = [
                torch.where(
                    tensors[0].reshape(size, *[1] * (expanded(a, has_a, size).dim() - 1)),
                    expanded(a, has_a, size),
                    expanded(b, has_b, size),
                )
                for a, has_a, b, has_b in zip(*both[0], *both[1], strict=True)
            ]
            return chosen, [0] * len(chosen)
        reached = [self._reached(run, tensors[1:]) for run in runs]
        either = [a or b for a, b in zip(*reached, strict=True)]

        def same(run: Any) -> Body:
            def body(xs: Tensors) -> list[torch.Tensor]:
                results, own = run(xs)
                return [
                    expanded(x, has, size) if any_has else x
                    for x, has, any_has in zip(results, own, either, strict=True)
                ]

            return body

        found = Branch(self.name, (same(runs[0]), same(runs[1])))
        return apply(found, tensors), [0 if has else None for has in either]

    @staticmethod
    def _reached(run: Any, tensors: Tensors) -> list[bool]:
        with emit.discarded():
            return list(run(tensors)[1])
