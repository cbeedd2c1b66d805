"""Function transforms and ``backward()`` around a call of a mapped function.

``_Call`` hands the derivatives of ``_plan/derivatives`` to torch's transforms
(``_trace/transformable``).  The first gradient is cheaper: the forward plan leaves what the
backward plan needs (its residuals) on the workers, and nothing is computed twice.  If that gradient
is transformed again, the transformed function starts from the primals.

Which outputs have cotangents is known only when the gradient is asked for.  The first call expects
them of all, and each later one of those that had them before.  Zeros are no stand-in for a
cotangent that is not there: a derivative may be infinite, and 0 * inf is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._base.torch_internals import is_wrapped
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._plan.derivatives import Differentiable, MappedProgram, Outputs, Tensors, is_inexact
from torchpmap._plan.lower import Pair
from torchpmap._plan.plan import Called
from torchpmap._runtime.base import Handle
from torchpmap._sharded.device_put import handles_of
from torchpmap._sharded.tensor import ShardedTensor, gather, make_sharded
from torchpmap._sharded.transfer import host_tensor, is_whole_here, move
from torchpmap._trace.transformable import Maybe, Transformable, apply, may_have_vjp
from torchpmap._trace.untraceable import Untraceable
from torchpmap.random._streams import batched_key

# -- the function that torch's transforms see ------------------------------------------------------


class _Call(Transformable):
    """One use of a ``Differentiable``."""

    def __init__(
        self,
        differentiable: Differentiable,
        wanted: tuple[int, ...] = (),
        start: Callable[[Tensors], Outputs] | None = None,
        kept: object = None,
    ) -> None:
        self.differentiable = differentiable
        self._wanted = wanted
        """Inputs whose first gradient is likely to be asked for."""
        self._start = start
        self._kept = kept
        """What must live as long as derivatives may be traced: the instance of a method."""
        self._pair: Pair | None = None
        self._expected: tuple[int, ...] = ()
        """The outputs whose cotangents the pair takes."""
        self._residuals: list[Handle] = []

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        with self.differentiable.target.settings():
            return self._run(tensors)

    def _run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        differentiable = self.differentiable
        if self._start is not None:
            outputs = self._start(tensors)
        else:
            if self._wanted:
                given = differentiable.cotangents.get(self._wanted)
                self._expected = differentiable.inexact_outputs() if given is None else given
                self._pair = differentiable.pair(self._wanted, self._expected)
            if self._pair is None:
                outputs = differentiable.start(tensors)
            else:
                outputs, self._residuals = _forward(self._pair, differentiable.placed(tensors))
        strides = [
            _batch_first(layout.shape, dims) if dims else None
            for (layout, _), dims in zip(outputs, differentiable.batch_dims(), strict=True)
        ]
        results: list[torch.Tensor] = [
            make_sharded(layout, handle, order)
            for (layout, handle), order in zip(outputs, strides, strict=True)
        ]
        for position, source in enumerate(differentiable.mirrored):
            original = tensors[source]
            if type(original) is not ShardedTensor:
                value = _whole(*outputs[position]).to(original.device)
                order = strides[position]
                if order is not None:
                    value = value.new_empty_strided(value.shape, order).copy_(value)
                results[position] = value
        return tuple(results)

    def vmap(self, info: Any, dims: Sequence[int | None], tensors: Tensors) -> Any:
        moved = [
            x if dim is None else x.movedim(dim, -1) for x, dim in zip(tensors, dims, strict=True)
        ]
        which = [dim is not None for dim in dims]
        for k in self.differentiable.keys:
            if not which[k]:
                moved[k], which[k] = batched_key(moved[k], info)
        batched = self.differentiable.vmap(tuple(which), info.batch_size)
        results = apply(_Call(batched, self._wanted, kept=self._kept), moved)
        pairs = zip(results, batched.batched_outputs(), strict=True)
        return results, [result.dim() - 1 if has else None for result, has in pairs]

    def jvp(self, tensors: Tensors, tangents: Maybe) -> Maybe:
        results: list[torch.Tensor | None] = [None] * len(self.differentiable.outputs)
        places = self.differentiable.inexact_outputs()
        if places:
            given = tuple(k for k, x in enumerate(tangents) if x is not None)
            call = _Call(self.differentiable.jvp(given), kept=self._kept)
            found = apply(call, [*tensors, *(x for x in tangents if x is not None)])
            for k, tangent in zip(places, found, strict=True):
                results[k] = tangent
        return results

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> Maybe:
        wanted = tuple(wanted)
        given = tuple(k for k, x in enumerate(cotangents) if x is not None)
        derived = self.differentiable.vjp(wanted, given)
        shortcut = None
        if self._pair is not None and set(wanted) <= set(self._wanted):
            self.differentiable.cotangents[self._wanted] = given
            shortcut = self._shortcut(wanted, given, derived)
        call = _Call(derived, start=shortcut, kept=self._kept)
        return apply(call, [*tensors, *(x for x in cotangents if x is not None)])

    def _shortcut(
        self, wanted: tuple[int, ...], given: tuple[int, ...], derived: Differentiable
    ) -> Callable[[Tensors], Outputs]:
        """The first gradient by a pair."""
        differentiable, places = self.differentiable, self._wanted
        expected, residuals = self._expected, self._residuals

        def backward(tensors: Tensors) -> Outputs:
            count, left = len(differentiable.layouts), residuals
            pair = differentiable.pair(places, given)
            if pair is None:
                return derived.start(tensors)
            if given != expected:
                left = _forward(pair, differentiable.placed(tensors[:count]))[1]
            layouts = [differentiable.outputs[k] for k in given]
            held = handles_of(tensors[count:], layouts)
            gradients = pair.backward.call([*left, *held]).outputs
            return [gradients[places.index(k)] for k in wanted]

        return backward


def _forward(pair: Pair, held: list[Handle]) -> tuple[Outputs, list[Handle]]:
    """The outputs, and the residuals."""
    plan = pair.forward
    handles = plan.run(held)
    count = len(plan.outputs)
    return list(zip(plan.outputs, handles[:count], strict=True)), handles[count:]


def _whole(layout: Layout, handle: Handle) -> torch.Tensor:
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


def call_differentiable(
    differentiable: MappedProgram,
    leaves: Sequence[Any],
    done: Called | None = None,
    kept: object = None,
) -> list[torch.Tensor]:
    """Call a differentiable so that transforms and ``backward()`` reach its arguments and closures;
    ``done``: what it returned, if it has run already; ``kept``: what its derivatives need.
    """
    # copy arrays, because the caller may overwrite them before a derivative needs them
    arguments = [x if isinstance(x, torch.Tensor) else host_tensor(x).clone() for x in leaves]
    closures = [captured.value() for captured in differentiable.captured]
    tensors = [*arguments, *closures]
    if done is not None:
        for k in differentiable.keys:
            assert done.key is not None
            tensors[k] = done.key
        call = _Call(differentiable, start=lambda _: done.outputs, kept=kept)
        return apply(call, tensors)
    wanted: tuple[int, ...] = ()
    if (
        may_have_vjp(tensors)
        and differentiable.inexact_outputs()
        and not differentiable.plan.num_checks
    ):
        wanted = tuple(k for k in differentiable.inexact_inputs() if _is_traced(tensors[k]))
    return apply(_Call(differentiable, wanted, kept=kept), tensors)


def _is_traced(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or is_wrapped(tensor)


# -- what has no graph -----------------------------------------------------------------------------


class _Underivable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: type[Exception], text: str, outputs: Outputs, *_: torch.Tensor
    ) -> Any:
        ctx.kind, ctx.text = kind, text
        results = tuple(make_sharded(layout, handle) for layout, handle in outputs)
        ctx.mark_non_differentiable(*(x for x in results if not is_inexact(x.dtype)))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise ctx.kind(ctx.text)


def without_derivative(
    outputs: Outputs, kind: type[Exception], text: str, leaves: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """The outputs as tensors that require grad, and raise in ``backward()``."""
    sources = [
        torch.zeros((), requires_grad=True, device="cpu")
    ]  # there may be closures that require grad
    sources += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return list(_Underivable.apply(kind, text, outputs, *sources))


def no_derivative(prefix: str, verdict: Untraceable) -> str:
    return (
        f"{prefix}: cannot be differentiated or batched from outside, because the function cannot "
        f"be traced: at {verdict.where}: {verdict.reason}. Use {verdict.instead}; or "
        "differentiate inside the mapped function, and call it under torch.no_grad() or with "
        "detached arguments."
    )
