"""A traced scan, and the scans that are its derivatives and its batched form.

The tensors of a scan are the constants that its body reads, the first carry, and ``xs``.

    transpose   scans in the other direction.  A step of it computes the body again, from the carry
                that the forward scan has kept of this step, and pulls the cotangents back.  The
                cotangents of the constants are summed up in its carry.
    jvp         scans over pairs of carries and tangents.
    vmap        scans with a body of batches.  Which carries are batched is found by trying: a
                batch may enter a carry in any step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from torchpmap._base.inexact import Kind, is_inexact, kinds_of
from torchpmap._collectives.varying import Axes, axes_of
from torchpmap._loops import emit
from torchpmap._trace.transformable import (
    Maybe,
    Tensors,
    Transformable,
    apply,
    expand_some,
    inexact,
    jvp_of,
    vjp_of,
    vmap_of,
    zeros_or,
)

Step = Callable[[Tensors, Tensors, Tensors], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""(constants, carry, row of xs) -> (next carry, row of ys)"""


@dataclass(frozen=True, eq=False)
class Scan(Transformable):
    step: Step
    num_constants: int
    num_carry: int
    length: int
    reverse: bool
    num_kept: int = 0

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, first carry, xs."""
        a, b = self.num_constants, self.num_constants + self.num_carry
        return list(tensors[:a]), list(tensors[a:b]), list(tensors[b:])

    def flat(self, tensors: Tensors) -> list[torch.Tensor]:
        """The step, on constants, carry and row in one list, and with one list of results."""
        carry, ys = self.step(*self.split(tensors))
        return [*carry, *ys]

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
        xs = emit.without_unused(inner, xs, len(init))
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
        nothing = [torch.zeros_like(constants[k]) for k in to_constants]
        rows = [*xs, *kept, *(of_ys[k] for k in given)]
        back = Scan(
            step,
            self.num_constants,
            len(last) + len(nothing),
            self.length,
            not self.reverse,
        )
        found = apply(back, [*constants, *last, *nothing, *rows])
        given_back = [x if k in reached else None for k, x in enumerate(found)]
        gradients = dict(zip(sources, given_back, strict=True))
        return [gradients[k] for k in wanted]

    def jvp(self, tensors: Tensors, tangents: Maybe) -> list[torch.Tensor | None]:
        constants, init, xs = self.split(tensors)
        of_constants, of_init, of_xs = self.split(tangents)
        carried = inexact(init)
        a = [k for k, x in enumerate(of_constants) if x is not None]
        c = [k for k, x in enumerate(of_xs) if x is not None]
        start = self.num_constants + self.num_carry
        places = [*a, *(self.num_constants + k for k in carried), *(start + k for k in c)]
        kinds: list[bool] = []

        def step(both: Tensors, carry: Tensors, row: Tensors) -> Any:
            own, beside = len(constants), len(xs)
            primals = [*both[:own], *carry[: len(init)], *row[:beside]]
            given = [*both[own:], *carry[len(init) :], *row[beside:]]
            results, derivatives = jvp_of(self.flat, primals, places, given)
            kinds[:] = map(is_inexact, results)
            after = results[: len(init)]
            return [*after, *derivatives[: len(carried)]], derivatives[len(carried) :]

        forward = Scan(
            step,
            len(constants) + len(a),
            len(init) + len(carried),
            self.length,
            self.reverse,
        )
        found = apply(
            forward,
            [
                *constants,
                *(of_constants[k] for k in a),
                *init,
                *(zeros_or(of_init[k], init[k]) for k in carried),
                *xs,
                *(of_xs[k] for k in c),
            ],
        )
        derivatives = iter(found[len(init) :])
        return [next(derivatives) if has else None for has in kinds]

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[list[torch.Tensor], list[int | None]]:
        size = info.batch_size
        constants, init, xs = self.split(tensors)
        of_constants, of_init, of_xs = self.split(dims)
        constants = [_moved(x, d, 0) for x, d in zip(constants, of_constants, strict=True)]
        init = [_moved(x, d, 0) for x, d in zip(init, of_init, strict=True)]
        xs = [_moved(x, d, 1) for x, d in zip(xs, of_xs, strict=True)]
        of_constants, of_xs = ([d is not None for d in each] for each in (of_constants, of_xs))
        carries = BatchedCarry([d is not None for d in of_init], size)
        outputs: list[bool] = []

        def batch() -> list[torch.Tensor]:
            which = [*of_constants, *carries.which, *of_xs]
            run = vmap_of(self.flat, which, info.randomness)

            def step(constants: Tensors, carry: Tensors, row: Tensors) -> Any:
                results, reached = run([*constants, *carry, *row])
                after = carries.next(results[: len(init)], reached[: len(init)])
                outputs[:] = reached[len(init) :]
                return after, results[len(init) :]

            loop = replace(self, step=step, num_kept=0)
            return apply(loop, [*constants, *carries.first(init), *xs])

        found = carries.settle(batch)
        after = [0 if has else None for has in carries.which]
        return found, after + [1 if has else None for has in outputs]


class BatchedCarry:
    """Which carries of a loop for a batch are batched.  It is found by trying: a batch may enter a
    carry in any step.
    """

    def __init__(self, given: Sequence[bool], size: int) -> None:
        """``given``: whether each first carry is batched."""
        self._given = given
        self._size = size
        self.which = list(given)

    def first(self, init: Tensors) -> list[torch.Tensor]:
        return expand_some(init, self._given, self.which, self._size)

    def next(self, tensors: Tensors, reached: Sequence[bool]) -> list[torch.Tensor]:
        """The next carry, of which those that are ``reached`` are batched."""
        if any(has and not had for had, has in zip(self.which, reached, strict=True)):
            self.restart([a or b for a, b in zip(self.which, reached, strict=True)])
        return expand_some(tensors, reached, self.which, self._size)

    def restart(self, which: list[bool]) -> NoReturn:
        self.which = which
        raise _Grown(self)

    def settle(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """What ``run`` returns, once it has not found more carries that are batched."""
        while True:
            try:
                return run()
            except _Grown as grown:
                if grown.carry is not self:
                    raise


class _Grown(Exception):
    """A step has made carries batched that were not: the loop starts again with these batched."""

    def __init__(self, carry: BatchedCarry) -> None:
        super().__init__("a carry became batched")
        self.carry = carry


def _moved(tensor: torch.Tensor, dim: int | None, to: int) -> torch.Tensor:
    return tensor if dim is None else tensor.movedim(dim, to)
