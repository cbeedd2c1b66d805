"""What scans and while loops have in common: their jvp, and their batched form.

jvp         loops over pairs of carries and tangents.
vmap        loops with a body of batches.  Which carries are batched is found by trying: a batch
            may enter a carry in any step.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._trace.transformable import (
    Maybe,
    Tensors,
    Transformable,
    apply,
    expand_some,
    inexact,
    jvp_of,
    vmap_of,
    zeros_or,
)

Step = Callable[[Tensors, Tensors, Tensors], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""(constants, carry, row of xs) -> (next carry, row of ys)"""


@dataclass(frozen=True, eq=False)
class Loop(Transformable):
    """Its tensors are the constants that its body reads, the first carry, and those with rows."""

    step: Step
    num_constants: int
    num_carry: int

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, first carry, xs."""
        a, b = self.num_constants, self.num_constants + self.num_carry
        return list(tensors[:a]), list(tensors[a:b]), list(tensors[b:])

    def flat(self, tensors: Tensors) -> list[torch.Tensor]:
        """The step, on constants, carry and row in one list, and with one list of results."""
        carry, ys = self.step(*self.split(tensors))
        return [*carry, *ys]

    @abstractmethod
    def over_more(self, step: Step, num_constants: int, num_carry: int) -> Self:
        """The loop with a step that takes more constants and carries, after its own."""

    @abstractmethod
    def over_batches(self, step: Step, batched: Callable[..., Any], carries: BatchedCarry) -> Self:
        """The loop with a step on batches; ``batched`` makes such functions of others."""

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
            after = [*results[: len(init)], *derivatives[: len(carried)]]
            return after, derivatives[len(carried) :]

        forward = self.over_more(step, len(constants) + len(a), len(init) + len(carried))
        of_carry = [zeros_or(of_init[k], init[k]) for k in carried]
        both = [*constants, *(of_constants[k] for k in a)]
        found = apply(forward, [*both, *init, *of_carry, *xs, *(of_xs[k] for k in c)])
        derivatives = iter(found[len(init) :])
        return [next(derivatives) if has else None for has in kinds]

    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[list[torch.Tensor], list[int | None]]:
        of_constants, of_init, of_xs = self.split([dim is not None for dim in dims])
        places = [*[0] * (self.num_constants + self.num_carry), *[1] * len(of_xs)]
        each = zip(tensors, dims, places, strict=True)
        constants, init, xs = self.split(
            [x if d is None else x.movedim(d, to) for x, d, to in each]
        )
        carries = BatchedCarry(of_init, info.batch_size)
        outputs: list[bool] = []

        def batch() -> list[torch.Tensor]:
            which = [*of_constants, *carries.which, *of_xs]
            batched = functools.partial(
                vmap_of, which=which, randomness=info.randomness, parts=carries.parts
            )
            run = batched(self.flat)

            def step(constants: Tensors, carry: Tensors, row: Tensors) -> Any:
                results, reached = run([*constants, *carry, *row])
                after = carries.next(results[: len(init)], reached[: len(init)])
                outputs[:] = reached[len(init) :]
                return after, results[len(init) :]

            loop = self.over_batches(step, batched, carries)
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
        self.size = size
        self.which = list(given)
        self.parts: str | None = None
        """The loop, once it is known that its rows take different numbers of steps."""

    def first(self, init: Tensors) -> list[torch.Tensor]:
        return expand_some(init, self._given, self.which, self.size)

    def next(self, tensors: Tensors, reached: Sequence[bool]) -> list[torch.Tensor]:
        """The next carry, of which those that are ``reached`` are batched."""
        if any(has and not had for had, has in zip(self.which, reached, strict=True)):
            self.restart([a or b for a, b in zip(self.which, reached, strict=True)])
        return expand_some(tensors, reached, self.which, self.size)

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
