"""A traced scan, and the scan that is its transpose.

transpose   scans in the other direction.  A step of it computes the body again, from the carry
            that the forward scan has kept of this step, and pulls the cotangents back.  The
            cotangents of the constants are summed up in its carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchpmap._base.inexact import Kind, kinds_of
from torchpmap._collectives.varying import Axes, axes_of
from torchpmap._loops import emit
from torchpmap._loops.loop_node import BatchedCarry, Loop, Step
from torchpmap._trace.transformable import Maybe, Tensors, apply, inexact, vjp_of, zeros_or


@dataclass(frozen=True, eq=False)
class Scan(Loop):
    length: int
    reverse: bool
    num_kept: int = 0

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        constants, init, xs = self.split(tensors)
        init = emit.operands(init)
        xs = emit.operands(xs, init)
        if self.reverse:
            xs = [x.flip(0) for x in xs]
        rows: list[Kind] = [(x.shape[1:], x.dtype, x.device) for x in xs]

        def body(*given: torch.Tensor) -> list[torch.Tensor]:
            carry, row = given[: len(init)], given[len(init) :]
            return self.flat([*constants, *carry, *row])

        def trace(carry: list[Axes]) -> tuple[emit.Inner, Sequence[Axes]]:
            found = emit.inner(body, [*kinds_of(init), *rows], [*carry, *map(axes_of, xs)])
            return found, found.axes[: len(init)]

        inner, carried = emit.trace_until_axes_stay(trace, init)
        ys: list[Kind] = [
            ((self.length, *shape), dtype, device)
            for shape, dtype, device in inner.results[len(init) :]
        ]
        results = emit.call(
            torch.ops.higher_order.scan,
            inner.module,
            init,
            xs,
            tuple(emit.read(inner.reads, [*init, *xs])),
            results=[*kinds_of(init), *ys],
            axes=[*carried, *inner.axes[len(init) :]],
            name="scan",
        )
        if self.reverse:
            results[len(init) :] = [y.flip(0) for y in results[len(init) :]]
        return results

    def keeping(self) -> Scan:
        if self.num_kept == self.num_carry:
            return self

        def step(constants: Tensors, carry: Tensors, row: Tensors) -> Any:
            after, ys = self.step(constants, carry, row)
            return after, [*ys, *carry]

        return replace(self, step=step, num_kept=self.num_carry)

    def over_more(self, step: Step, num_constants: int, num_carry: int) -> Scan:
        return Scan(step, num_constants, num_carry, self.length, self.reverse)

    def over_batches(self, step: Step, batched: Any, carries: BatchedCarry) -> Scan:
        return replace(self, step=step, num_kept=0)

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> list[torch.Tensor | None]:
        if self.num_kept < self.num_carry:
            keeping = self.keeping()
            results = list(apply(keeping, tensors))
            more: Maybe = [*cotangents, *[None] * self.num_carry]
            return keeping.vjp(tensors, results[-self.num_carry :], more, wanted)
        constants, init, xs = self.split(tensors)
        carried = inexact(init)
        of_carry, of_ys = cotangents[: len(init)], cotangents[len(init) :]
        given = [k for k, x in enumerate(of_ys) if x is not None]
        places = [self.num_constants + k for k in carried]
        to_constants = [k for k in wanted if k < self.num_constants]
        to_xs = [k for k in wanted if k >= self.num_constants + self.num_carry]
        sources = [*places, *to_constants, *to_xs]
        results_of = [*carried, *(self.num_carry + k for k in given)]
        reached: set[int] = set()

        def step(constants: Tensors, carry: Tensors, row: Tensors) -> Any:
            sums = carry[len(carried) :]
            count = len(row) - len(given)
            before, mine = row[count - self.num_carry : count], row[: count - self.num_carry]
            primals = [*constants, *before, *mine]
            arrived = [*carry[: len(carried)], *row[count:]]
            pulled = vjp_of(self.flat, primals, sources, results_of, arrived, reached)
            after, rest = pulled[: len(carried)], pulled[len(carried) :]
            added = [a + b for a, b in zip(sums, rest, strict=False)]
            return [*after, *added], rest[len(sums) :]

        last = [zeros_or(of_carry[k], init[k]) for k in carried]
        last += [torch.zeros_like(constants[k]) for k in to_constants]
        rows = [*xs, *kept, *(of_ys[k] for k in given)]
        back = Scan(step, self.num_constants, len(last), self.length, not self.reverse)
        found = apply(back, [*constants, *last, *rows])
        given_back = [x if k in reached else None for k, x in enumerate(found)]
        gradients = dict(zip(sources, given_back, strict=True))
        return [gradients[k] for k in wanted]
