"""A traced while loop, and the loops that are its jvp and its batched form.

It has no transpose: how many steps it runs, and so how much a backward pass must store, is known
only when it has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchpmap._base.inexact import kinds_of
from torchpmap._collectives.varying import Axes
from torchpmap._loops import emit
from torchpmap._loops.scan_node import BatchedCarry
from torchpmap._trace.transformable import (
    Body,
    Maybe,
    Tensors,
    Transformable,
    apply,
    batch_first,
    expanded,
    inexact,
    jvp_of,
    vmap_of,
    zeros_or,
)

Test = Callable[[Tensors], torch.Tensor]


@dataclass(frozen=True, eq=False)
class While(Transformable):
    """Its tensors are the constants that test and body read, and the first carry."""

    name: str
    test: Test
    body: Body
    """(constants and carry) -> next carry"""
    num_constants: int

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return list(tensors[: self.num_constants]), list(tensors[self.num_constants :])

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        constants, init = self.split(tensors)
        init = emit.operands(init)
        kinds = kinds_of(init)

        def trace(axes: list[Axes]) -> tuple[tuple[emit.Inner, emit.Inner], list[Axes]]:
            test = emit.inner(lambda *carry: [self.test([*constants, *carry])], kinds, axes)
            body = emit.inner(lambda *carry: self.body([*constants, *carry]), kinds, axes)
            return (test, body), [along | test.axes[0] for along in body.axes]

        (test, body), axes = emit.trace_until_axes_stay(trace, init)
        emit.with_one_result(test)
        reads = emit.shared([test, body], num_own=len(init))
        return emit.call(
            torch.ops.higher_order.while_loop,
            test.module,
            body.module,
            tuple(init),
            tuple(emit.read(reads, init)),
            results=kinds,
            axes=axes,
            name=self.name,
        )

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> list[torch.Tensor | None]:
        raise ValueError(no_reverse(self.name))

    def jvp(self, tensors: Tensors, tangents: Maybe) -> list[torch.Tensor | None]:
        constants, init = self.split(tensors)
        of_constants, of_init = self.split(tangents)
        carried = inexact(init)
        a = [k for k, x in enumerate(of_constants) if x is not None]
        places = [*a, *(self.num_constants + k for k in carried)]
        own, count = len(constants), len(init)
        first = own + len(a)

        def primals(xs: Tensors) -> list[torch.Tensor]:
            return [*xs[:own], *xs[first : first + count]]

        def body(xs: Tensors) -> list[torch.Tensor]:
            given = [*xs[own:first], *xs[first + count :]]
            results, derivatives = jvp_of(self.body, primals(xs), places, given)
            return [*results, *derivatives]

        forward = While(self.name, lambda xs: self.test(primals(xs)), body, first)
        start = [zeros_or(of_init[k], init[k]) for k in carried]
        given = [of_constants[k] for k in a]
        found = apply(forward, [*constants, *given, *init, *start])
        derivatives = dict(zip(carried, found[count:], strict=True))
        return [derivatives.get(k) for k in range(count)]

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[list[torch.Tensor], list[int | None]]:
        size = info.batch_size
        constants, init = self.split(batch_first(tensors, dims))
        of_constants, given = self.split([d is not None for d in dims])
        carries = BatchedCarry(given, size)
        differs = False
        """Whether the test does from row to row: then the loop goes on until all rows are done, and
        rows that are done keep their carry.
        """

        def batch() -> list[torch.Tensor]:
            which = [*of_constants, *carries.which]
            batched = functools.partial(
                vmap_of,
                which=which,
                randomness=info.randomness,
                parts=self.name if differs else None,
            )
            run, run_test = batched(self.body), batched(lambda xs: [self.test(xs)])

            def test(xs: Tensors) -> torch.Tensor:
                nonlocal differs
                (result,), (has,) = run_test(xs)
                if has and not differs:
                    differs = True
                    carries.restart([True] * len(init))
                return result.any() if has else result

            def body(xs: Tensors) -> list[torch.Tensor]:
                after = carries.next(*run(xs))
                if not differs:
                    return after
                (goes_on,), (has,) = run_test(xs)
                goes_on = expanded(goes_on, has, size)
                return [
                    torch.where(goes_on.reshape(-1, *[1] * (new.dim() - 1)), new, old)
                    for new, old in zip(after, self.split(xs)[1], strict=True)
                ]

            loop = replace(self, test=test, body=body)
            return apply(loop, [*constants, *carries.first(init)])

        found = carries.settle(batch)
        return found, [0 if has else None for has in carries.which]


def no_reverse(name: str) -> str:
    return (
        f"{name}: reverse-mode differentiation does not work for while_loop, or for fori_loop "
        "whose bounds are tensors: how many steps they run, and so what a backward pass would need "
        "to store, is not known before. Use scan, or fori_loop with Python numbers as bounds; "
        "forward mode (torch.func.jvp) works."
    )
