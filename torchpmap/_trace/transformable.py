"""A function of tensors, with rules of its own, that all of torch's transforms know.

Loops and branches, and calls of mapped functions, are such functions.  ``_Torchpmap`` is the one
``autograd.Function`` for them.  Each rule makes another ``Transformable``, which is transformed
again by the transforms around it, so every order and nesting of them works.  Where none is left,
``run`` runs it: a loop becomes a node of a graph (``_loops/emit``), a call goes to the devices.

(``torch.library.custom_op`` has rules that want the ``ctx`` of an ``autograd.Function`` of their
own: ``_trace/transform_rules``.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad

from torchpmap._base.boundary import boundary
from torchpmap._base.context import assigned
from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import replaced
from torchpmap._base.torch_internals import (
    depth,
    is_batched,
    is_grad,
    set_forward_grad,
    transforms,
    was_recording,
)
from torchpmap._layout import axis_stack

Tensors = Sequence[torch.Tensor]
Maybe = Sequence[torch.Tensor | None]


class Transformable(ABC):
    """A function of tensors, and its derivatives and batched form."""

    num_kept = 0
    """How many of the last results are kept for the vjp."""

    @abstractmethod
    def run(self, tensors: Tensors) -> Tensors:
        """Run below all transforms."""

    def keeping(self) -> Transformable:
        """The same, with ``num_kept`` results more."""
        return self

    @abstractmethod
    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> Maybe:
        """Cotangents of the tensors ``wanted``."""

    @abstractmethod
    def jvp(self, tensors: Tensors, tangents: Maybe) -> Maybe:
        """Tangents of the results."""

    @abstractmethod
    def vmap(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[Tensors, Sequence[int | None]]:
        """Results for a batch, and their batch dims."""


class WithoutDerivatives(Transformable):
    """One whose result is no function of its tensors."""

    def vjp(
        self, tensors: Tensors, kept: Tensors, cotangents: Maybe, wanted: Sequence[int]
    ) -> Maybe:
        return [None] * len(wanted)

    def jvp(self, tensors: Tensors, tangents: Maybe) -> Maybe:
        return [None]


def apply(function: Transformable, tensors: Tensors) -> list[torch.Tensor]:
    """Run so that transforms and ``backward()`` reach the tensors."""
    kept = function.keeping() if may_have_vjp(tensors) else function
    with assigned(_modes, _grad_modes()):
        results = list(_Torchpmap.apply(kept, *tensors))
    return results[: len(results) - (kept.num_kept - function.num_kept)]


def may_have_vjp(tensors: Tensors) -> bool:
    """Whether reverse-mode differentiation may follow."""
    active = transforms()
    if active:
        return any(map(is_grad, active))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _grad_modes() -> dict[int, bool]:
    """By depth, whether gradients are recorded there."""
    mode, modes = torch.is_grad_enabled(), {}
    for transform in reversed(transforms()):
        modes[int(transform.level())] = mode
        mode = mode and (not is_grad(transform) or was_recording(transform))
    return {**modes, 0: mode}


_modes: ContextVar[dict[int, bool]] = ContextVar("torchpmap_grad_modes")
"""Of the innermost ``apply``.  Below a jvp, torch (2.13) turns recording on for functions, and off
in their rules.
"""


def _is_recorded_in_vain() -> bool:
    """Whether torch records a function where the caller has turned that off."""
    modes, active = _modes.get(), transforms()
    return len(modes) > 1 and not modes[depth()] and (not active or is_grad(active[-1]))


class _Torchpmap(torch.autograd.Function):
    @staticmethod
    def forward(function: Transformable, *tensors: torch.Tensor) -> Any:
        return tuple(function.run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function, *tensors = inputs
        ctx.function = function
        ctx.count = len(tensors)
        ctx.inexact = [is_inexact(x) for x in tensors]
        ctx.set_materialize_grads(False)
        kept = output[len(output) - function.num_kept :]
        ctx.save_for_backward(*tensors, *kept)
        ctx.save_for_forward(*tensors)
        ends = _is_recorded_in_vain()
        ctx.mark_non_differentiable(*(x for x in output if ends or not is_inexact(x)))

    @staticmethod
    @boundary
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors  # a checkpoint allows one look
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        wanted = [k for k, has in enumerate(ctx.inexact) if has and ctx.needs_input_grad[k + 1]]
        results: list[Any] = [None] * (1 + ctx.count)
        if wanted and any(x is not None for x in cotangents):
            found = ctx.function.vjp(tensors, kept, cotangents, wanted)
            for k, gradient in zip(wanted, found, strict=True):
                results[k + 1] = gradient
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, _function: None, *tangents: torch.Tensor | None) -> Any:
        # torch 2.13 turns forward mode off here: a jvp around this one would see constants
        with set_forward_grad(True), torch.set_grad_enabled(_modes.get()[depth()]):
            # without the tangents that are being pushed, which would be pushed again
            tensors = [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors[: ctx.count]]
            return tuple(ctx.function.jvp(tensors, tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Transformable, *tensors: Any) -> Any:
        with torch.set_grad_enabled(_modes.get()[depth()]):
            results, dims = function.vmap(info, in_dims[1:], tensors)
        return tuple(results), tuple(dims)


def inexact(values: Sequence[Any]) -> tuple[int, ...]:
    """The places of those, tensors or layouts, that can have derivatives."""
    return tuple(k for k, x in enumerate(values) if is_inexact(x))


def zeros_or(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if given is None else given


# -- transforms of bodies --------------------------------------------------------------------------

Body = Callable[[Tensors], list[torch.Tensor]]
"""A function of tensors that can run again, at any level of transforms."""


def vjp_of(
    body: Body,
    tensors: Tensors,
    wanted: Sequence[int],
    given: Sequence[int],
    cotangents: Tensors,
    reached: set[int],
) -> list[torch.Tensor]:
    """Cotangents of the tensors ``wanted``, from those of the results ``given``.

    ``reached`` gets the places in ``wanted`` that have a part in the results.  Others have zeros,
    which outside of a graph would be no stand-in for having no cotangent: 0 times NaN is NaN.
    """
    if not wanted:
        return []
    if not given:
        return [torch.zeros_like(tensors[k]) for k in wanted]

    def function(*xs: torch.Tensor) -> Any:
        for place, x in enumerate(xs):
            x.register_hook(lambda _, place=place: reached.add(place))
        results = body(replaced(tensors, wanted, xs))
        return tuple(results[k] for k in given)

    _, pull_back = torch.func.vjp(function, *(tensors[k] for k in wanted))[:2]
    return list(pull_back(tuple(cotangents)))


def jvp_of(
    body: Body, tensors: Tensors, given: Sequence[int], tangents: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(the results, the tangents of those that are inexact), from tangents of ``given``."""
    if not given:
        results = body(tensors)
        return results, [torch.zeros_like(x) for x in results if is_inexact(x)]

    def function(*xs: torch.Tensor) -> Any:
        results = body(replaced(tensors, given, xs))
        # torch wants a result that has a tangent: the first argument is one
        return (xs[0], *(x for x in results if is_inexact(x))), tuple(results)

    primals = tuple(tensors[k] for k in given)
    # rules run without grad mode, where torch (2.13) computes some gradients, as of linalg.solve
    # and silu, by formulas that have no derivative
    with torch.enable_grad():
        pushed: Any = torch.func.jvp(function, primals, tuple(tangents), has_aux=True)
    (_, *values), (_, *derivatives), results = pushed
    # under vmap, torch (2.13) gives x + 0.5 of a number x a tangent of float64
    typed = [t.to(x.dtype) for x, t in zip(values, derivatives, strict=True)]
    return list(results), typed


def vmap_of(
    body: Body, which: Sequence[bool], randomness: str, parts: str | None = None
) -> Callable[[Tensors], tuple[list[torch.Tensor], list[bool]]]:
    """The body for a batch of the tensors ``which``, along dim 0: its results, and which of them
    are batched.

    It is made in the rule of a vmap, and runs later, where the vmap may get another level.
    ``parts`` is the loop or branch in which the rows take different ways, if that begins here.
    """
    parts = parts or axis_stack.parts_at(depth() + 1)

    def run(tensors: Tensors) -> tuple[list[torch.Tensor], list[bool]]:
        found: list[torch.Tensor] = []
        reached: list[bool] = []

        def function(*xs: torch.Tensor) -> Any:
            with axis_stack.entering(depth(), parts):
                found[:] = body(xs)
            reached[:] = [is_batched(x) for x in found]
            # results that are not batched leave this vmap through ``found``
            return tuple(x for x, has in zip(found, reached, strict=True) if has)

        if not any(which):
            with axis_stack.entering(depth() + 1, None):
                results = body(tensors)
            return results, [False] * len(results)
        dims = tuple(0 if has else None for has in which)
        rows = iter(torch.func.vmap(function, dims, 0, randomness=randomness)(*tensors))
        results = [next(rows) if has else x for x, has in zip(found, reached, strict=True)]
        return results, reached

    return run


def batch_first(
    tensors: Tensors, dims: Sequence[int | None], size: int | None = None
) -> list[torch.Tensor]:
    """The tensors with their batch dims in front; with a ``size``, all have one."""
    pairs = zip(tensors, dims, strict=True)
    moved = [(x if dim is None else x.movedim(dim, 0), dim is not None) for x, dim in pairs]
    return [x if size is None else expanded(x, has, size) for x, has in moved]


def expanded(tensor: torch.Tensor, is_batched: bool, size: int) -> torch.Tensor:
    """The tensor with a batch dim in front."""
    return tensor if is_batched else tensor.expand(size, *tensor.shape)


def expand_some(
    tensors: Tensors, are_batched: Sequence[bool], wanted: Sequence[bool], size: int
) -> list[torch.Tensor]:
    """The tensors, of which those that are wanted have a batch dim in front."""
    each = zip(tensors, are_batched, wanted, strict=True)
    return [expanded(x, has, size) if wants else x for x, has, wants in each]
