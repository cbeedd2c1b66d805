"""What torch's transforms ask of a mapped program: its derivatives and its batched form.

A ``Differentiable`` is a mapped program as a function of all its tensors, including those it closes
over.  Its derivatives and its batched form are differentiable again, lowered to plans of their own,
so every order and nesting of transforms runs on the workers::

    Differentiable --vjp(wanted, given)--> primals, cotangents -> cotangents of the primals
                   --jvp(given)----------> primals, tangents   -> tangents of the outputs
                   --vmap(which, size)---> the same with one more dim, after the others

Each of them traces the body anew, with ``torch.func`` around the user's function, because a lowered
graph has lost the effects of ``detach`` and ``no_grad``.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchpmap._base.errors import kind_of
from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import flatten, replaced
from torchpmap._collectives.backend import widened
from torchpmap._collectives.primitives import AllReduce, Scope, apply
from torchpmap._collectives.varying import axes_of
from torchpmap._layout.axis_stack import Axis, bound_again, joined
from torchpmap._layout.grid import Cut, Grid
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.lower import Body, Pair, Target, lower, lower_pair
from torchpmap._plan.plan import Plan
from torchpmap._runtime.base import Handle
from torchpmap._sharded.device_put import handles_of
from torchpmap._sharded.operations import move
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import gather, is_whole_here
from torchpmap._trace.block_program import enter
from torchpmap._trace.casts import times_tracked, tracked
from torchpmap._trace.program import Outcome
from torchpmap._trace.transformable import inexact, jvp_of, vmap_of
from torchpmap.random._streams import batched_key

Tensors = Sequence[torch.Tensor]
Outputs = list[tuple[Layout, Handle]]
PullBack = Callable[[tuple[int, ...], tuple[int, ...], Tensors], list[torch.Tensor]]
"""(wanted, given, [*primals, *cotangents of the outputs given]) -> gradients of the inputs wanted.
"""
OutDims = Callable[[Tensors], list[int | None]]


_MAX_DERIVED = 256
"""Derivatives and batched forms that a function keeps."""


class Function(ABC):
    """A function of tensors, whose derivatives and batched forms are such functions, made once."""

    keys: tuple[int, ...] = ()
    """Inputs that are the key of a call, for its random numbers."""
    mirrored: tuple[int, ...] = ()
    """For a gradient, the inputs that its outputs belong to."""

    def __init__(
        self, layouts: Sequence[Any], settings: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """``layouts``: what tells the dtypes of the inputs; ``settings``: what is around a run."""
        self.layouts, self.settings = tuple(layouts), settings
        self._derived: dict[Any, Any] = {}

    @property
    @abstractmethod
    def outputs(self) -> Sequence[Any]:
        """What tells the dtypes of the outputs."""

    @abstractmethod
    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Run on tensors that no transform is tracing."""

    @abstractmethod
    def run_for(
        self, wanted: tuple[int, ...], tensors: Tensors
    ) -> tuple[list[torch.Tensor], PullBack | None]:
        """``run``, and how gradients of the inputs ``wanted`` follow from what that leaves."""

    def vjp(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Any:
        """(inputs, cotangents of the outputs ``given``) -> cotangents of the inputs ``wanted``."""
        inputs = [*self.layouts, *(self.outputs[k] for k in given)]
        outputs = [self.layouts[k] for k in wanted]
        key, body = ("vjp", wanted, given), self._pull(wanted, given)
        return self._derive(key, wanted, body, inputs, outputs)

    def jvp(self, given: tuple[int, ...]) -> Any:
        """(inputs, tangents of the inputs ``given``) -> tangents of the inexact outputs."""
        inputs = [*self.layouts, *(self.layouts[k] for k in given)]
        outputs = [self.outputs[k] for k in inexact(self.outputs)]
        # a tangent is where its gradient is
        return self._derive(("jvp", given), self.mirrored, self._push(given), inputs, outputs)

    @abstractmethod
    def _pull(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Any:
        """The body of ``vjp``."""

    @abstractmethod
    def _push(self, given: tuple[int, ...]) -> Any:
        """The body of ``jvp``."""

    @abstractmethod
    def batched(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[Function, list[torch.Tensor], OutDims]:
        """The batched form, its inputs, and the batch dims of its outputs, once it has run."""

    @abstractmethod
    def _made(self, key: Any, body: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Function:
        """The derivative, or the batched form, ``key``, which runs ``body``."""

    def _derive(self, key: Any, mirrored: tuple[int, ...], *given: Any) -> Any:
        made = self._derived.get(key)
        if made is None:
            made = self._made(key, *given)
            made.keys, made.mirrored = self.keys, mirrored
            if len(self._derived) >= _MAX_DERIVED:  # batches of ever other sizes, for example
                del self._derived[next(iter(self._derived))]
            self._derived[key] = made
        return made


class Differentiable(Function):
    """A body and the layouts of its inputs, lowered when it first runs."""

    layouts: tuple[Layout, ...]

    def __init__(self, target: Target, body: Body, layouts: Sequence[Layout]) -> None:
        super().__init__(layouts, target.settings)
        self.target = target
        self.body = body
        self._plan: Plan | None = None
        self.batch_dims: Callable[[], tuple[int, ...]] = lambda: (0,) * len(self.outputs)
        """How many trailing dims of each output are batch dims."""
        self._batch_dims_in = (0,) * len(layouts)
        self._pairs: dict[Any, Pair | None] = {}
        self._cotangents: dict[tuple[int, ...], tuple[int, ...]] = {}
        """By the inputs whose gradient was wanted: the outputs whose cotangents there were."""

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = lower(self.target, self.body, self.layouts)
        return self._plan

    @property
    def outputs(self) -> tuple[Layout, ...]:
        return self.plan.outputs[: len(self.plan.outputs) - self.plan.num_checks]

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        return self.results(self.start(tensors), tensors)

    def run_for(
        self, wanted: tuple[int, ...], tensors: Tensors
    ) -> tuple[list[torch.Tensor], PullBack | None]:
        expected = self._cotangents.get(wanted, inexact(self.outputs))
        pair = self.pair(wanted, expected)
        if pair is None:
            return self.run(tensors), None
        handles, residuals = pair.run(self.placed(tensors))

        def pull_back(some: tuple[int, ...], given: tuple[int, ...], tensors: Tensors) -> Any:
            self._cotangents[wanted] = given
            derived = self.vjp(some, given)
            count, left, pair = len(self.layouts), residuals, self.pair(wanted, given)
            if pair is None:
                return derived.run(tensors)
            if given != expected:
                _, left = pair.run(self.placed(tensors[:count]))
            gradients = pair.gradients(left, tensors[count:], [self.outputs[k] for k in given])
            return derived.results([gradients[wanted.index(k)] for k in some], tensors)

        outputs = list(zip(pair.forward.outputs, handles, strict=True))
        return self.results(outputs, tensors), pull_back

    def start(self, tensors: Tensors) -> Outputs:
        return self.plan.call(self.placed(tensors)).outputs

    def results(self, outputs: Outputs, tensors: Tensors) -> list[torch.Tensor]:
        """The outputs as tensors; gradients of host tensors are such."""
        strides = [
            _batch_first(layout.shape, dims) if dims else None
            for (layout, _), dims in zip(outputs, self.batch_dims(), strict=True)
        ]
        results: list[torch.Tensor] = [
            make_sharded(layout, handle, order)
            for (layout, handle), order in zip(outputs, strides, strict=True)
        ]
        for position, source in enumerate(self.mirrored):
            original = tensors[source]
            if type(original) is not ShardedTensor:
                value = whole(*outputs[position]).to(original.device)
                order = strides[position]
                if order is not None:
                    value = value.new_empty_strided(value.shape, order).copy_(value)
                results[position] = value
        return results

    def placed(self, tensors: Tensors) -> list[Handle]:
        return handles_of(tensors, self.layouts)

    def batched(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[Differentiable, list[torch.Tensor], OutDims]:
        moved = [
            x if dim is None else x.movedim(dim, -1) for x, dim in zip(tensors, dims, strict=True)
        ]
        which = [dim is not None for dim in dims]
        for k in self.keys:
            if not which[k]:
                moved[k], which[k] = batched_key(moved[k], info)
        derived = self.vmap(tuple(which), info.batch_size)

        def out_dims(results: Tensors) -> list[int | None]:
            pairs = zip(results, derived.batched_outputs(), strict=True)
            return [result.dim() - 1 if has else None for result, has in pairs]

        return derived, moved, out_dims

    def vmap(self, which: tuple[bool, ...], size: int) -> Differentiable:
        """This function for a batch of values of the inputs ``which``, along a new last dim."""
        layouts = [
            self.target.grid.extended(layout, size) if batched else layout
            for layout, batched in zip(self.layouts, which, strict=True)
        ]
        batched = _Batched(self.body, which)
        derived: Differentiable = self._derive(
            ("vmap", which, size), self.mirrored, batched, layouts, ()
        )
        return derived

    def batched_outputs(self) -> tuple[bool, ...]:
        """Which outputs of a batched form depend on a batched input, and have the batch dim."""
        assert isinstance(self.body, _Batched)
        if self.body.reached is None:
            _ = self.plan  # tracing the plan sets body.reached
        assert self.body.reached is not None
        return self.body.reached

    def pair(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Pair | None:
        """Forward and backward plans for cotangents of the outputs ``given``."""
        if (wanted, given) not in self._pairs:
            body = self._pull(wanted, given, keep_outputs=True)
            layouts = [*self.layouts, *(self.outputs[k] for k in given)]
            numbers = len(self.outputs), len(given)
            self._pairs[wanted, given] = None
            # a function without a derivative may still run: ``backward()`` raises the error
            with contextlib.suppress(RuntimeError, NotImplementedError):
                target = self.target.of_derivative
                self._pairs[wanted, given] = lower_pair(target, body, layouts, *numbers)
        return self._pairs[wanted, given]

    def _made(
        self, key: Any, body: Body, inputs: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Differentiable:
        kind, *places = key
        target = self.target if kind == "vmap" else self.target.of_derivative
        made, own = Differentiable(target, body, inputs), self._batch_dims_in
        if kind == "vmap":
            made._batch_dims_in = tuple(map(operator.add, own, places[0]))
            made.batch_dims = lambda: tuple(
                map(operator.add, self.batch_dims(), made.batched_outputs())
            )
        elif kind == "vjp":
            wanted, given = places
            made._batch_dims_in = (*own, *(self.batch_dims()[k] for k in given))
            made.batch_dims = lambda: tuple(own[k] for k in wanted)
        else:
            made._batch_dims_in = (*own, *(own[k] for k in places[0]))
            made.batch_dims = lambda: tuple(self.batch_dims()[k] for k in inexact(self.outputs))
        return made

    # -- derived bodies ---------------------------------------------------------------------------

    def _pull(
        self, wanted: tuple[int, ...], given: tuple[int, ...], keep_outputs: bool = False
    ) -> Body:
        count, grid = len(self.layouts), self.target.grid

        def pull(blocks: Tensors, axis: Axis) -> Outcome:
            primals, cotangents = blocks[:count], blocks[count:]
            outcomes: list[Outcome] = []

            def function(*xs: torch.Tensor) -> Any:
                outcomes.append(self.body(replaced(primals, wanted, xs), axis))
                outputs = outcomes[-1].outputs
                return tuple(outputs[k][0] for k in given), [block for block, _ in outputs]

            before = times_tracked()
            pulled: Any = torch.func.vjp(function, *(primals[k] for k in wanted), has_aux=True)
            _, pull_back, outputs = pulled
            outcome = outcomes[-1]
            cuts = [cut for _, cut in outcome.outputs]
            cuts_in = [grid.cut_of(self.layouts[k]) for k in wanted]
            with (
                tracked() if times_tracked() > before else contextlib.nullcontext(),
                bound_again(outcome.bound),
            ):
                shares = [
                    _share(x, *outcome.outputs[k], outcome, grid, axis)
                    for k, x in zip(given, cotangents, strict=True)
                ]
                pulled_back = pull_back(tuple(shares))
            for gradient in pulled_back:
                if gradient.layout is not torch.strided:
                    raise NotImplementedError(sparse_gradient(self.target.prefix, gradient))
            gradients = list(pulled_back)
            if outcome.tracked is None:
                whole = [(*cut, outcome.unbound) for cut in cuts_in]
                gradients = _summed(pulled_back, whole, grid, axis)
            kept = list(zip(outputs, cuts, strict=True)) if keep_outputs else []
            return _outcome([*kept, *zip(gradients, cuts_in, strict=True)], outcome)

        return pull

    def _push(self, given: tuple[int, ...]) -> Body:
        count = len(self.layouts)

        def push(blocks: Tensors, axis: Axis) -> Outcome:
            primals, tangents = blocks[:count], blocks[count:]
            outcomes: list[Outcome] = []

            def run(xs: Tensors) -> list[torch.Tensor]:
                outcomes.append(self.body(xs, axis))
                return [x for x, _ in outcomes[-1].outputs]

            _, typed = jvp_of(run, primals, given, tangents)
            outcome = outcomes[-1]
            cuts = [cut for x, cut in outcome.outputs if is_inexact(x)]
            return _outcome(list(zip(typed, cuts, strict=True)), outcome)

        return push


class _Batched:
    """A body for a batch of values of the inputs ``which``."""

    def __init__(self, body: Body, which: tuple[bool, ...]) -> None:
        self._body = body
        self._which = which
        self.reached: tuple[bool, ...] | None = None
        """Whether each output is batched (known when it has run)."""

    def __call__(self, blocks: Tensors, axis: Axis) -> Outcome:
        outcomes: list[Outcome] = []

        def body(xs: Tensors) -> list[torch.Tensor]:
            outcomes.append(self._body(xs, axis))
            return [*(x for x, _ in outcomes[-1].outputs), *outcomes[-1].checks]

        given = [x.movedim(-1, 0) if has else x for x, has in zip(blocks, self._which, strict=True)]
        # "same": keys have the batch dim if rows are to draw different numbers
        results, reached = vmap_of(body, self._which, "same")(given)
        (outcome,) = outcomes
        count = len(outcome.outputs)
        self.reached = tuple(reached[:count])
        outputs = [
            (x.movedim(0, -1) if has else x, cut)
            for x, has, (_, cut) in zip(results, reached, outcome.outputs, strict=False)
        ]
        pairs = zip(results[count:], reached[count:], strict=True)
        return _outcome(outputs, outcome, tuple(x.amax(0) if has else x for x, has in pairs))


def _outcome(
    outputs: Sequence[tuple[torch.Tensor, Cut]], of: Outcome, checks: tuple[torch.Tensor, ...] = ()
) -> Outcome:
    """The outcome of a derivative, or of the batched form, of a program with the outcome ``of``.

    ``checks``: those of ``of``; none for a derivative, whose primals have been checked.
    """
    blocks, cuts = tuple(x for x, _ in outputs), tuple(cut for _, cut in outputs)
    structure = flatten(list(range(len(outputs))))[1]
    checked = of.checked if checks else ()
    known: dict[str, Any] = {"unbound": of.unbound, "tracked": of.tracked, "bound": of.bound}
    return Outcome(structure, blocks, cuts, checks, checked, **known)


def _share(
    x: torch.Tensor, output: torch.Tensor, cut: Cut, outcome: Outcome, grid: Grid, axis: Axis
) -> torch.Tensor:
    """What this device gets of the cotangent of an output of which there are copies.

    An equal part, as in ``jax.pmap``; or all or nothing, so that the first copy counts.  Where it
    is followed which values vary, an output that does not vary has one cotangent, for all devices.
    """
    cut = (*cut, outcome.unbound)
    if outcome.tracked is not None:
        varying = axes_of(output)
        one = (k for k, along in enumerate(outcome.tracked) if along.isdisjoint(varying))
        enter(x, varying)
        cut = (*cut, tuple(one))
    copies = grid.copies(cut)
    if copies == 1:
        return x
    if outcome.tracked is None and not outcome.first_counts:
        return x / copies
    for along in grid.shared_along(cut, axis):
        x = torch.where(along.index == 0, x, torch.zeros_like(x))
    return x


def _summed(gradients: Tensors, cuts: Sequence[Cut], grid: Grid, axis: Axis) -> list[torch.Tensor]:
    """The gradient of an input that devices share: the sum of their gradients."""
    summed = [widened(gradient, "sum") for gradient in gradients]  # rounded once, after the sum
    over = [frozenset(itertools.chain(*cut)) for cut in cuts]
    for dims in dict.fromkeys(over):
        alike = [k for k, own in enumerate(over) if own == dims]
        for along in joined(grid.shared_along(cuts[alike[0]], axis)):
            if along.size > 1:
                primitive = AllReduce(Scope(along.size, along.group))
                sums = apply(primitive, None, [summed[k] for k in alike])
                for k, total in zip(alike, sums, strict=True):
                    summed[k] = total
    return [total.to(x.dtype) for x, total in zip(gradients, summed, strict=True)]


def whole(layout: Layout, handle: Handle) -> torch.Tensor:
    """The gradient of a host tensor, on the host of every process.

    All processes gave the same tensor if others have parts of its gradient, and take this step
    together, as they compute the gradient together.
    """
    if not is_whole_here(layout):
        wanted = replicated_layout(layout.shape, layout.dtype, layout.devices)
        layout, handle = wanted, move(layout, handle, wanted)
    return gather(layout, handle)


def _batch_first(shape: Sequence[int], num_batch_dims: int) -> list[int]:
    """Strides that make a result contiguous for each of the vmaps around the call.

    torch copies a tangent that has other strides than its primal, and fails if both are views.
    """
    front = len(shape) - num_batch_dims
    strides, size = [0] * len(shape), 1
    for dim in [*reversed(range(front)), *range(front, len(shape))]:
        strides[dim] = size
        size *= max(1, shape[dim])
    return strides


def sparse_gradient(prefix: str, gradient: torch.Tensor) -> str:
    kind = kind_of(gradient.shape, gradient.dtype)
    return (
        f"{prefix}: the gradient of type {kind} of what the function was given has the layout "
        f"{gradient.layout}, but gradients that come from the devices are dense. Leave out "
        "sparse=True (of torch.nn.Embedding, embedding or embedding_bag)."
    )
