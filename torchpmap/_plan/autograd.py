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

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.torch_internals import is_wrapped
from torchpmap._plan.derivatives import Function, PullBack, Tensors
from torchpmap._plan.mapped_program import MappedProgram
from torchpmap._plan.plan import Called
from torchpmap._sharded.transfer import host_tensor
from torchpmap._trace.transformable import Maybe, Transformable, apply, inexact, may_have_vjp
from torchpmap._trace.untraceable import Untraceable

# -- the function that torch's transforms see ------------------------------------------------------


@dataclass(eq=False)
class _Call(Transformable):
    """One use of a function."""

    function: Function
    wanted: tuple[int, ...] = ()
    """Inputs whose first gradient is likely to be asked for."""
    start: Callable[[Tensors], list[torch.Tensor]] | None = None
    """What runs it, if it is not the function itself."""
    pull_back: PullBack | None = None

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        with self.function.settings():
            if not self.wanted:
                return tuple((self.start or self.function.run)(tensors))
            results, self.pull_back = self.function.run_for(self.wanted, tensors)
            return tuple(results)

    def vmap(self, info: Any, dims: Sequence[int | None], tensors: Tensors) -> Any:
        batched, moved, out_dims = self.function.batched(info, dims, tensors)
        wanted = self.wanted if may_have_vjp(moved) else ()
        results = apply(_Call(batched, wanted), moved)
        return results, out_dims(results)

    def jvp(self, tensors: Tensors, tangents: Maybe) -> Maybe:
        results: list[torch.Tensor | None] = [None] * len(self.function.outputs)
        places = inexact(self.function.outputs)
        if places:
            given = tuple(k for k, x in enumerate(tangents) if x is not None)
            call = _Call(self.function.jvp(given))
            found = apply(call, [*tensors, *(x for x in tangents if x is not None)])
            for k, tangent in zip(places, found, strict=True):
                results[k] = tangent
        return results

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> Maybe:
        wanted = tuple(wanted)
        given = tuple(k for k, x in enumerate(cotangents) if x is not None)
        shortcut = None
        if self.pull_back is not None and set(wanted) <= set(self.wanted):
            shortcut = functools.partial(self.pull_back, wanted, given)
        call = _Call(self.function.vjp(wanted, given), start=shortcut)
        return apply(call, [*tensors, *(x for x in cotangents if x is not None)])


def call_function(
    function: Function, tensors: Tensors, has_pair: bool = True
) -> list[torch.Tensor]:
    """Call it so that transforms and ``backward()`` reach the tensors; ``has_pair``: whether the
    first gradient may take what the call leaves.
    """
    wanted: tuple[int, ...] = ()
    if has_pair and may_have_vjp(tensors) and inexact(function.outputs):
        wanted = tuple(k for k in inexact(function.layouts) if _is_traced(tensors[k]))
    return apply(_Call(function, wanted), tensors)


def call_differentiable(
    differentiable: MappedProgram,
    leaves: Sequence[Any],
    done: Called | None = None,
) -> list[torch.Tensor]:
    """Call a differentiable so that transforms and ``backward()`` reach its arguments and closures;
    ``done``: what it returned, if it has run already.
    """
    # copy arrays, because the caller may overwrite them before a derivative needs them
    arguments = [x if isinstance(x, torch.Tensor) else host_tensor(x).clone() for x in leaves]
    closures = [captured.value() for captured in differentiable.captured]
    tensors = [*arguments, *closures]
    if done is not None:
        for k in differentiable.keys:
            assert done.key is not None
            tensors[k] = done.key
        outputs = done.outputs
        start = functools.partial(differentiable.results, outputs)
        return apply(_Call(differentiable, start=start), tensors)
    return call_function(differentiable, tensors, not differentiable.plan.num_checks)


def _is_traced(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or is_wrapped(tensor)


# -- what has no graph -----------------------------------------------------------------------------


class _Underivable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: type[Exception], text: str, values: Sequence[torch.Tensor], *_: torch.Tensor
    ) -> Any:
        ctx.kind, ctx.text = kind, text
        ctx.mark_non_differentiable(*(x for x in values if not is_inexact(x)))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise ctx.kind(ctx.text)


def without_derivative(
    values: Sequence[torch.Tensor], kind: type[Exception], text: str, leaves: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """Let new tensors require grad, and raise in ``backward()``."""
    sources = [
        torch.zeros((), requires_grad=True, device="cpu")
    ]  # there may be closures that require grad
    sources += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return list(_Underivable.apply(kind, text, values, *sources))


def no_derivative(prefix: str, verdict: Untraceable) -> str:
    return (
        f"{prefix}: cannot be differentiated or batched from outside, because the function cannot "
        f"be traced: at {verdict}; or differentiate inside the mapped function, and call it under "
        "torch.no_grad() or with detached arguments."
    )
