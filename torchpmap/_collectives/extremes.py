"""Max and min over axes, with derivatives of any order.

The derivative of an extreme goes to the members that hold it.  Over an axis along which it is
followed which values vary, the members share the result and its cotangent; over another one, each
has a cotangent of its own, and the holders get the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.inexact import filled_tangents, kinds_of
from torchpmap._base.torch_internals import set_forward_grad
from torchpmap._collectives import backend as raw
from torchpmap._collectives.primitives import (
    AllReduce,
    IndexedScope,
    Scope,
    Tensors,
    along_axis,
    apply,
    naming,
    note_place,
    noted,
    pass_through,
    save,
)
from torchpmap._collectives.varying import Axes
from torchpmap._layout import axis_stack


@dataclass(frozen=True)
class _Extremum:
    """Max or min over the leading ``lead`` dims of a tensor and over every scope."""

    op: raw.ReduceOp
    lead: int
    scopes: tuple[Scope, ...]

    def reduce_lead(self, x: torch.Tensor) -> torch.Tensor:
        if not self.lead:
            return x
        take = torch.amax if self.op == "max" else torch.amin
        dims = tuple(range(self.lead))
        return raw.reduced(x, self.op, lambda wide: take(wide, dims))

    def across(self, scope: Scope, xs: Tensors) -> Tensors:
        """Run over a process axis."""
        with axis_stack.over(scope.tracked):
            return raw.all_reduce_many(xs, self.op, scope.process_group())

    def summed(self, xs: Tensors, indices: Tensors) -> Tensors:
        """The sums over the dims and scopes of the extreme, not narrowed yet."""
        xs = _widened(xs)
        if self.lead:
            xs = [x.sum(tuple(range(self.lead))) for x in xs]
        for scope, index in zip(self.scopes, indices, strict=True):
            xs = apply(AllReduce(scope), index, xs)
        return xs

    def totals(self, cotangents: Tensors, indices: Tensors) -> Tensors:
        """The cotangents of the result as all members together have them, not narrowed yet."""
        xs: Tensors = _widened(cotangents)
        for scope, index in zip(self.scopes, indices, strict=True):
            xs = apply(AllReduce(scope).transposed(), index, xs)
        return xs

    def varying(self, axes: Axes) -> Axes:
        """The axes along which the result varies."""
        for scope in self.scopes:
            axes = AllReduce(scope).varying(axes)
        return axes

    def shares(self, xs: Tensors, extremes: Tensors, indices: Tensors) -> Tensors:
        """The weight of every element in the derivative: 1 / holders for a holder, else 0."""
        holds = _widened(
            [
                ((x == y) | (torch.isnan(x) & torch.isnan(y))).to(x.dtype)
                for x, y in zip(xs, extremes, strict=True)
            ]
        )
        return [h / n for h, n in zip(holds, self.summed(holds, indices), strict=True)]


def extreme(
    op: raw.ReduceOp, scopes: Sequence[IndexedScope], xs: Tensors, lead: int = 0
) -> list[torch.Tensor]:
    """Max or min of every tensor over its leading ``lead`` dims and all scopes at once.

    The derivative of an extreme goes to the elements that hold it; where several tie, each gets an
    equal part. All scopes belong to one operation because ties are shared among the holders on all
    axes together: taken one axis after the other, two holders on device 0 and one on device 1 would
    get 1/4, 1/4 and 1/2.
    """
    if not scopes and not lead:
        return list(xs)
    how = _Extremum(op, lead, tuple(scope for scope, _ in scopes))
    return list(_Extreme.apply(how, *(index for _, index in scopes), *xs))


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(how: _Extremum, *tensors: Any) -> Any:
        xs = [how.reduce_lead(x) for x in tensors[len(how.scopes) :]]
        for scope in how.scopes:
            xs = [x.clone() for x in xs] if scope.is_alone else list(how.across(scope, xs))
        return tuple(noted(how.varying, tensors[len(how.scopes) :], xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        note_place(ctx)
        ctx.how = inputs[0]
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[1:], *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        def pulled(how: _Extremum, gs: Tensors, shares: Tensors, indices: Tensors) -> Tensors:
            totals = how.totals(gs, indices)
            return [share * total for share, total in zip(shares, totals, strict=True)]

        skipped = [None] * (1 + len(ctx.how.scopes))
        with naming(ctx, cotangents):
            return *skipped, *_Extreme._derivative(ctx, cotangents, pulled)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        def pushed(how: _Extremum, ts: Tensors, shares: Tensors, indices: Tensors) -> Tensors:
            wide = _widened(ts)
            return how.summed([s * t for s, t in zip(shares, wide, strict=True)], indices)

        count = len(ctx.how.scopes)
        given = tangents[1 + count :]
        xs = ctx.saved_tensors[count : count + len(given)]
        filled = filled_tangents(given, kinds_of(xs))
        # torch 2.13 turns forward mode off here: a jvp around this one would see constants
        with set_forward_grad(True):
            return _Extreme._derivative(ctx, filled, pushed)

    @staticmethod
    def _derivative(
        ctx: Any, values: Sequence[Any], rule: Callable[..., Tensors]
    ) -> tuple[Any, ...]:
        """Apply ``rule`` to the derivatives that exist."""
        how, count = ctx.how, len(ctx.how.scopes)
        indices, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        present = [k for k, value in enumerate(values) if value is not None]
        xs, extremes = ([saved[k + start] for k in present] for start in (0, len(values)))
        shares = how.shares(xs, extremes, indices)
        results = rule(how, [values[k] for k in present], shares, indices)
        found = {k: y.to(values[k].dtype) for k, y in zip(present, results, strict=True)}
        return tuple(found.get(k) for k in range(len(values)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], how: _Extremum, *tensors: Any) -> Any:
        count = len(how.scopes)
        indices, xs, dims = tensors[:count], tensors[count:], in_dims[1 + count :]
        scopes = list(zip(how.scopes, indices, strict=True))
        mine = [scope for scope, dim in zip(scopes, in_dims[1:], strict=False) if dim is not None]
        if not mine:
            return pass_through(lambda moved: extreme(how.op, scopes, moved, how.lead), xs, dims)
        ((scope, _),) = mine
        others = [each for each in scopes if each is not mine[0]]

        def along(rows: torch.Tensor) -> torch.Tensor:
            (result,) = extreme(how.op, others, [rows], how.lead + 1)
            return result

        results, out_dims = along_axis(along, scope, info.batch_size, xs, dims, replicates=True)
        return tuple(noted(how.varying, xs, results)), out_dims


def _widened(xs: Tensors) -> list[torch.Tensor]:
    return [raw.widened(x, "sum") for x in xs]
