"""The primitives behind the public collectives: how each one runs, transposes and batches.

A linear collective is a frozen value (``AllReduce``, ``AllGather``, ``ReduceScatter``,
``AllToAll``, ``Permute``) with

* ``across``     its run over a process axis, on plain tensors;
* ``along``      the same over a vmapped axis, whose indices are the rows of a tensor;
* ``transposed`` the primitive that carries cotangents back.

One ``torch.autograd.Function``, ``_Linear``, interprets them all under every nesting of
torch.func's transforms: forward runs the primitive, jvp applies it to tangents, backward applies
its transpose to cotangents, and vmap either consumes the batch dimension (the vmapped axis itself)
or passes it through (any other vmap). As all three rules apply primitives again, every order of
derivative works.

    user          apply(AllGather, index, xs)
    grad level    backward: apply(ReduceScatter, index, cotangents)
    vmap level    is the index batched here?  yes: along(rows), and done
                                              no: batch dim to the end, apply again below
    bottom        across(xs): process-group operations

``pmax`` and ``pmin`` are not linear; ``_collectives/extremes`` interprets those, with a derivative
made of linear primitives.

Two things that do not work, and are therefore absent: a ``torch.library`` operator with
``register_autograd`` (torch 2.13 refuses it under torch.func, and drops its tangents), and letting
Dynamo look inside (it ignores the jvp and vmap rules of an autograd.Function without an error).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from torchpmap._base.inexact import filled_tangents, kinds_of
from torchpmap._base.torch_internals import depth
from torchpmap._collectives import backend as raw
from torchpmap._collectives.varying import NONE, Axes, axes_of, set_axes
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Partition

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scope:
    """The members that take part in a collective."""

    size: int
    """Members of one group."""
    group: str | None
    """Process group name; None over a vmapped axis."""
    partition: Partition | None = None
    """Groups of a vmapped axis, None for all of it (a process group is already the right one)."""
    tracked: Axes = NONE
    """The axes in it along which it is followed which values vary."""
    is_part: bool = False
    """Whether the members are those of a group, and not all of the axis."""

    @property
    def is_alone(self) -> bool:
        """Whether it is an axis of one member, without a process group.  (Of groups of different
        sizes, ``size`` is that of the first.)
        """
        return self.size == 1 and self.group is None and self.partition is None

    def process_group(self) -> str:
        if self.group is None:
            raise RuntimeError(
                "a collective over a vmapped axis ran outside the vmap that binds it: "
                "the function it belongs to left the mapped function"
            )
        return self.group


IndexedScope = tuple[Scope, torch.Tensor | None]
"""A scope and, over a vmapped axis, the index of that axis."""


# --- linear primitives ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Primitive(ABC):
    """A collective that is linear in every tensor it is given."""

    scope: Scope

    elementwise: ClassVar[bool] = False
    """The shape is kept and dims do not matter, so another vmap's batch dim may stay in place."""
    is_sent: ClassVar[bool] = True
    """Whether members take part at the same time."""
    replicates: ClassVar[bool] = False
    """Every member gets the same, so ``along`` gives it once, without the row dim."""

    @abstractmethod
    def across(self, xs: Tensors) -> Tensors:
        """Run over the process axis."""

    @abstractmethod
    def along(self, rows: torch.Tensor) -> torch.Tensor:
        """Run over the rows of a tensor; gives rows again unless ``replicates``."""

    @abstractmethod
    def transposed(self) -> Primitive:
        """The primitive for cotangents."""

    def varying(self, axes: Axes) -> Axes:
        """The axes along which the result varies."""
        return axes | self.scope.tracked


@dataclass(frozen=True)
class AllReduce(Primitive):
    """[*s] -> [*s], the sum. Every member's result depends on every member's operand.

    Self-dual, where every member counts its result.  Over tracked axes the members share one
    result, and one cotangent of it.
    """

    elementwise = True
    replicates = True

    def across(self, xs: Tensors) -> Tensors:
        return raw.all_reduce_many(xs, "sum", self.scope.process_group())

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return _sum_rows(rows)

    def transposed(self) -> Primitive:
        return Copy(self.scope) if self._is_shared else self

    def varying(self, axes: Axes) -> Axes:
        return axes - self.scope.tracked if self._is_shared else super().varying(axes)

    @property
    def _is_shared(self) -> bool:
        return bool(self.scope.tracked) and not self.scope.is_part


@dataclass(frozen=True)
class Copy(Primitive):
    """[*s] -> [*s], a value that members share as one of each; their cotangents are summed."""

    elementwise = True
    is_sent = False

    def across(self, xs: Tensors) -> Tensors:
        return [x.clone() for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def transposed(self) -> Primitive:
        return AllReduce(self.scope)


@dataclass(frozen=True)
class Same(Copy):
    """[*s] -> [*s], a value of each member that is the same on all, as one that members share."""

    replicates = True

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[0].clone()

    def transposed(self) -> Primitive:
        return _Share(self.scope)

    def varying(self, axes: Axes) -> Axes:
        return axes - self.scope.tracked


@dataclass(frozen=True)
class _Share(Copy):
    """[*s] -> [*s], an equal part for each member of a value that they share."""

    def across(self, xs: Tensors) -> Tensors:
        return [x / self.scope.size for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return rows / self.scope.size

    def transposed(self) -> Primitive:
        return _Mean(self.scope)


@dataclass(frozen=True)
class _Mean(AllReduce):
    """[*s] -> [*s], the mean as a value that members share."""

    def across(self, xs: Tensors) -> Tensors:
        return [x / self.scope.size for x in super().across(xs)]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return super().along(rows) / self.scope.size

    def transposed(self) -> Primitive:
        return _Share(self.scope)


@dataclass(frozen=True)
class AllGather(Primitive):
    """[*s] -> [n, *s], the operands of all members."""

    replicates = True

    def across(self, xs: Tensors) -> Tensors:
        return [raw.all_gather(x, self.scope.size, self.scope.process_group()) for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def transposed(self) -> Primitive:
        return ReduceScatter(self.scope)


@dataclass(frozen=True)
class ReduceScatter(Primitive):
    """[n, *s] -> [*s], member k's row k of the sum."""

    def across(self, xs: Tensors) -> Tensors:
        return [raw.reduce_scatter(x, self.scope.size, self.scope.process_group()) for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return _sum_rows(rows)

    def transposed(self) -> Primitive:
        return AllGather(self.scope)


@dataclass(frozen=True)
class AllToAll(Primitive):
    """[n, *s] -> [n, *s], row j of the result is row k of member j."""

    def across(self, xs: Tensors) -> Tensors:
        return [raw.all_to_all(x, self.scope.size, self.scope.process_group()) for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(0, 1).clone()

    def transposed(self) -> Primitive:
        return self


@dataclass(frozen=True)
class Permute(Primitive):
    """[*s] -> [*s], the operand of the member that sends here, or zeros."""

    pairs: raw.Pairs

    elementwise = True

    def across(self, xs: Tensors) -> Tensors:
        return [raw.permute(x, self.pairs, self.scope.process_group()) for x in xs]

    def along(self, rows: torch.Tensor) -> torch.Tensor:
        source = {d: s for s, d in self.pairs}
        given = rows.unbind(0)
        nothing = torch.zeros_like(given[0])
        return torch.stack(
            [given[source[k]] if k in source else nothing for k in range(len(given))]
        )

    def transposed(self) -> Primitive:
        return replace(self, pairs=tuple((d, s) for s, d in self.pairs))


def apply(primitive: Primitive, index: torch.Tensor | None, xs: Tensors) -> list[torch.Tensor]:
    """Run ``primitive`` on every tensor; ``index`` is that of a vmapped axis, else None."""
    return list(_Linear.apply(primitive, index, *xs)) if xs else []


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(primitive: Primitive, index: torch.Tensor | None, *xs: torch.Tensor) -> Any:
        if primitive.scope.is_alone:
            return tuple(_alone(primitive, x) for x in xs)
        with axis_stack.over(primitive.scope.tracked):
            results = primitive.across(xs)
        return tuple(noted(primitive.varying, xs, results))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        primitive, index, *xs = inputs
        ctx.primitive = primitive
        note_place(ctx)
        ctx.kinds = kinds_of(xs)
        ctx.set_materialize_grads(False)
        save(ctx, index)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        (index,) = ctx.saved_tensors
        with naming(ctx, cotangents):
            return None, None, *_apply_present(ctx.primitive.transposed(), index, cotangents)

    @staticmethod
    def jvp(ctx: Any, _primitive: None, _index: None, *tangents: torch.Tensor | None) -> Any:
        (index,) = ctx.saved_tensors
        return _apply_present(ctx.primitive, index, filled_tangents(tangents, ctx.kinds))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], primitive: Primitive, index: Any, *xs: Any
    ) -> Any:
        _, index_dim, *dims = in_dims
        if index_dim is None:
            if primitive.elementwise:
                return tuple(apply(primitive, index, xs)), tuple(dims)
            return pass_through(lambda moved: apply(primitive, index, moved), xs, dims)
        results, out_dims = along_axis(
            primitive.along,
            primitive.scope,
            info.batch_size,
            xs,
            dims,
            replicates=primitive.replicates,
            is_sent=primitive.is_sent,
        )
        return tuple(noted(primitive.varying, xs, results)), out_dims


def noted(varying: Callable[[Axes], Axes], xs: Tensors, results: Tensors) -> Tensors:
    """The results, with the axes along which they vary."""
    for x, result in zip(xs, results, strict=True):
        set_axes(result, varying(axes_of(x)))
    return results


def _alone(primitive: Primitive, x: torch.Tensor) -> torch.Tensor:
    """What the only member of a group gets."""
    rows = primitive.along(x.unsqueeze(0))
    return rows if primitive.replicates else rows.squeeze(0)


def _apply_present(primitive: Primitive, index: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Apply to the derivatives that exist; a leaf without one stays without."""
    present = [value for value in values if value is not None]
    results = iter(apply(primitive, index, present))
    return tuple(None if value is None else next(results) for value in values)


# --- shared ---------------------------------------------------------------------------------------


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def note_place(ctx: Any) -> None:
    """Note where a collective runs, for ``naming``."""
    ctx.number, ctx.split = axis_stack.ordinal(), axis_stack.split()


@contextmanager
def naming(ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Name the collectives of a backward pass by the one they transpose: all may come from one line
    of code.  As many devices come there.
    """
    present = [k for k, cotangent in enumerate(cotangents) if cotangent is not None]
    told = f"the derivative of collective {ctx.number}, results {present}"
    with axis_stack.serving(lambda: told), axis_stack.split_again(ctx.split):
        yield


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    wide = raw.widened(rows, "sum")
    return raw.narrowed(wide.sum(0, dtype=wide.dtype), "sum", rows.dtype)


def pass_through(
    run: Callable[[Tensors], Tensors], xs: Tensors, dims: Sequence[int | None]
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    """The vmap at hand is not the axis: put its batch dim last, where no collective looks."""
    results = run([x if d is None else x.movedim(d, -1) for x, d in zip(xs, dims, strict=True)])
    pairs = zip(results, dims, strict=True)
    return tuple(results), tuple(None if dim is None else r.dim() - 1 for r, dim in pairs)


def along_axis(
    along: Callable[[torch.Tensor], torch.Tensor],
    scope: Scope,
    size: int,
    xs: Tensors,
    dims: Sequence[int | None],
    *,
    replicates: bool,
    is_sent: bool = True,
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    """The vmap at hand is the axis: run on its rows, or on those of every group.

    ``replicates``: ``along`` gives one result for all rows instead of rows.  ``is_sent``: whether
    all rows must get here.
    """
    if is_sent and size > 1:
        axis_stack.check_together(depth() + 1)  # rules run one level below the vmap
    rows = [
        x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(xs, dims, strict=True)
    ]
    partition = scope.partition
    if partition is not None and len(partition) == 1 and replicates:  # one result for all again
        rows = [torch.stack([r.select(0, k) for k in partition[0]]) for r in rows]
        partition = None
    if partition is None:
        return tuple(along(r) for r in rows), tuple(None if replicates else 0 for _ in rows)
    stacks = [results_of_groups(along, r, partition, replicates) for r in rows]
    results = (torch.stack([x[place[k]] for k in range(size)]) for x, place in stacks)
    return tuple(results), tuple(0 for _ in rows)


def results_of_groups(
    along: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    partition: Partition,
    replicates: bool,
) -> tuple[torch.Tensor, dict[int, int]]:
    """Results of all groups, stacked, and for each member the place of its own."""
    given = rows.unbind(0)
    results = [along(torch.stack([given[k] for k in group])) for group in partition]
    if replicates:
        return torch.stack(results), {k: g for g, group in enumerate(partition) for k in group}
    members = (k for group in partition for k in group)
    return torch.cat(results), {k: place for place, k in enumerate(members)}
