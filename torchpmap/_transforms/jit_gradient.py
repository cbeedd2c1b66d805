"""``backward()`` outside of a jitted function, through what a call has returned.

The forward plan leaves residuals on the devices, and the backward plan takes them and cotangents.
The first call expects cotangents of all results; each later one those that there were before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from torchpmap._base.boundary import boundary
from torchpmap._layout.layout import Layout
from torchpmap._plan.autograd import without_derivative
from torchpmap._plan.lower import Pair, Target
from torchpmap._plan.plan import Plan
from torchpmap._plan.whole_plan import WholePlans, plans_of
from torchpmap._runtime.base import Handle
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import gather
from torchpmap._trace.whole_gradient import given_only

Start = Callable[[Plan, list[Handle]], tuple[Sequence[torch.Tensor], list[Handle]]]
"""Runs a forward plan on blocks, with its effects: the results, and its residuals."""


class _Way(NamedTuple):
    """How gradients follow from the cotangents of certain results."""

    plans: WholePlans
    reached: list[bool]
    """For each leaf, whether it gets a gradient."""


@dataclass(eq=False)
class Derivable:
    """A graph of whole values with cotangents, and the plans for those that are given."""

    target: Target
    graph: GraphModule
    """Returns results, effects, and the gradients of ``layouts``."""
    inputs: Sequence[Layout]
    """This and the next two: see ``plans_of``, for all but the gradients."""
    weights: Collection[int]
    wanted: Sequence[Layout | None]
    cotangents: tuple[int, ...]
    """The results that have cotangents."""
    layouts: Sequence[Layout]
    """Of the leaves."""

    def __post_init__(self) -> None:
        self._ways: dict[tuple[int, ...], _Way] = {}
        self._expected = self.cotangents

    def way(self, given: tuple[int, ...]) -> _Way:
        """The one from the cotangents of the results ``given``."""
        if given not in self._ways:
            places = [k for k, result in enumerate(self.cotangents) if result in given]
            graph, results = given_only(self.graph, len(self.cotangents), places)
            reached = [x is not None for x in results[len(self.wanted) :]]
            layouts = [x for x, has in zip(self.layouts, reached, strict=True) if has]
            wanted = [*self.wanted, *layouts]
            plans = plans_of(
                self.target, graph, self.inputs, self.weights, wanted, given, len(layouts)
            )
            self._ways[given] = _Way(plans, reached)
        return self._ways[given]

    def first(self) -> WholePlans:
        return self.way(self.cotangents).plans

    def call(
        self, start: Start, held: list[Handle], leaves: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Call it so that ``backward()`` reaches the leaves."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())  # results require grad as in the trace
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with contextlib.suppress(RuntimeError):  # hooks are forbidden here, so there are none
                stack.enter_context(hooks)
            return list(_Call.apply(self, start, held, *leaves))

    def forward(self, ctx: Any, start: Start, held: list[Handle]) -> tuple[torch.Tensor, ...]:
        expected = self._expected
        results, residuals = start(self.way(expected).plans.forward, list(held))
        token = torch.empty(0, device="cpu")  # autograd frees it, and with it what it holds
        token.pull_back = functools.partial(  # type: ignore[attr-defined]
            self._gradients, expected, held, residuals
        )
        ctx.save_for_backward(token)
        others = [x for k, x in enumerate(results) if k not in self.cotangents]
        ctx.mark_non_differentiable(*others)
        return tuple(results)

    def _gradients(
        self,
        expected: tuple[int, ...],
        held: list[Handle],
        residuals: list[Handle],
        cotangents: Sequence[torch.Tensor | None],
    ) -> list[tuple[Layout, Handle] | None]:
        given = tuple(k for k, x in enumerate(cotangents) if x is not None)
        if not given:
            return [None] * len(self.layouts)
        plans, reached = self.way(given)
        assert plans.backward is not None
        pair = Pair(plans.forward, plans.backward)
        with self.target.settings():
            if given != expected:  # its effects are those of the call, which has had them
                _, residuals = pair.run(list(held))
                self._expected = given
            tensors = [x for x in cotangents if x is not None]
            layouts = [pair.forward.outputs[k] for k in given]
            found = iter(pair.gradients(residuals, tensors, layouts))
        return [next(found) if has else None for has in reached]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, derivable: Derivable, start: Start, held: list[Handle], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.prefix = derivable.target.prefix
        ctx.are_sharded = [type(leaf) is ShardedTensor for leaf in leaves]
        return derivable.forward(ctx, start, held)

    @staticmethod
    @boundary
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        (token,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{ctx.prefix}: create_graph=True: its gradient has no derivative outside of it. "
                "Compute the gradient in the function (torch.autograd.grad, torch.func.grad), or "
                "pass compile=False to jit."
            )
        gradients = [
            None if found is None else make_sharded(*found) if is_sharded else gather(*found)
            for found, is_sharded in zip(token.pull_back(cotangents), ctx.are_sharded, strict=True)
        ]
        return (None, None, None, *gradients)


def overwritten(result: Any, text: str) -> torch.Tensor:
    """A result that requires grad, and raises in ``backward()`` as torch does: the function has
    written to what it was computed from, as an optimizer does.
    """
    with torch.enable_grad():
        return without_derivative([make_sharded(*result._alive())], RuntimeError, text)[0]
