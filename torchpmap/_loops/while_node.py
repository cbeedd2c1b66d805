"""A traced while loop.

It has no transpose: how many steps it runs, and so how much a backward pass must store, is known
only when it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchpmap._base.inexact import kinds_of
from torchpmap._collectives.varying import Axes
from torchpmap._loops import emit
from torchpmap._loops.branch_node import beside
from torchpmap._loops.loop_node import BatchedCarry, Loop, Step
from torchpmap._trace.transformable import Maybe, Tensors, expanded

Test = Callable[[Tensors, Tensors], torch.Tensor]
"""(constants, carry) -> whether the loop goes on"""


@dataclass(frozen=True, eq=False)
class While(Loop):
    """It has no rows, and its test reads the same constants as its body."""

    name: str
    test: Test

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        constants, init, _ = self.split(tensors)
        init = emit.operands(init)
        kinds = kinds_of(init)

        def trace(axes: list[Axes]) -> tuple[tuple[emit.Inner, emit.Inner], list[Axes]]:
            test = emit.inner(lambda *carry: [self.test(constants, carry)], kinds, axes)
            body = emit.inner(lambda *carry: self.flat([*constants, *carry]), kinds, axes)
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

    def over_more(self, step: Step, num_constants: int, num_carry: int) -> While:
        own, count = self.num_constants, self.num_carry

        def test(constants: Tensors, carry: Tensors) -> torch.Tensor:
            return self.test(constants[:own], carry[:count])

        return While(step, num_constants, num_carry, self.name, test)

    def over_batches(self, step: Step, batched: Callable[..., Any], carries: BatchedCarry) -> While:
        """Where the test differs from row to row, the loop goes on until all rows are done, and
        rows that are done keep their carry.
        """
        run_test = batched(lambda xs: [self.test(*self.split(xs)[:2])])

        def test(constants: Tensors, carry: Tensors) -> torch.Tensor:
            (result,), (has,) = run_test([*constants, *carry])
            if has and carries.parts is None:
                carries.parts = self.name
                carries.restart([True] * self.num_carry)
            return result.any() if has else result

        def kept_if_done(constants: Tensors, carry: Tensors, row: Tensors) -> Any:
            after, ys = step(constants, carry, row)
            if carries.parts is None:
                return after, ys
            (goes_on,), (has,) = run_test([*constants, *carry])
            goes_on = expanded(goes_on, has, carries.size)
            pairs = zip(after, carry, strict=True)
            return [torch.where(beside(goes_on, new), new, old) for new, old in pairs], ys

        return replace(self, step=kept_if_done, test=test)


def no_reverse(name: str) -> str:
    return (
        f"{name}: reverse-mode differentiation does not work for while_loop, or for fori_loop "
        "whose bounds are tensors: how many steps they run, and so what a backward pass would need "
        "to store, is not known before. Use scan, or fori_loop with Python numbers as bounds; "
        "forward mode (torch.func.jvp) works."
    )
