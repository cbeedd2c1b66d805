"""A call of a jitted function under torch's transforms, with programs for its derivatives.

    call --trace--> Outline: its results, and what it closes over that has gradients
                       |
                  WholeFunction --vjp, jvp, vmap--> WholeFunction --> ...

Each is a function of whole tensors, of which ``jit`` makes a program when it runs, for the places
where its inputs lie.  The first gradient is what ``backward()`` outside of a jitted function runs:
it begins with what the call has left on the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from torchpmap._base.ambient import ambient, applied, in_force
from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import flatten
from torchpmap._base.sources import users_line
from torchpmap._base.storages import own_strides
from torchpmap._base.torch_internals import (
    innermost,
    is_wrapped,
    outside_modes,
    outside_transforms,
    torch_function_off,
)
from torchpmap._plan.autograd import call_function
from torchpmap._plan.derivatives import Function, OutDims, PullBack, Tensors, whole
from torchpmap._plan.mapped_program import other_closures, other_surroundings
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._trace.capture import Exchange, Substitute, is_real
from torchpmap._trace.environment import Surroundings
from torchpmap._trace.graphs import results_of
from torchpmap._trace.transformable import jvp_of, vjp_of
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole import WholeTrace, trace_whole
from torchpmap._transforms.jit_containers import Changes
from torchpmap._transforms.jit_program import Options, fixed_parts, layout_of_gradient
from torchpmap._transforms.jit_values import RESULT, JitCall, returned
from torchpmap.random._streams import batched_key, draw_key, new_seed, streams_of

Body = Callable[[Tensors], list[torch.Tensor]]
Make = Callable[[Body, tuple[int, ...]], Body]
"""A body -> the same as programs; with the inputs whose gradients its first results are."""


class WholeFunction(Function):
    """A function of whole tensors."""

    def __init__(
        self,
        make: Make,
        body: Body,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        settings: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(inputs, settings)
        self._make, self._body, self._outputs = make, body, outputs

    @functools.cached_property
    def _program(self) -> Body:
        return self._make(self._body, self.mirrored)

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        return self._outputs

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        results = list(map(_alone, self._program(list(map(_detached, tensors)))))
        for position, source in enumerate(self.mirrored):
            result, original = results[position], tensors[source]
            if type(result) is ShardedTensor and type(original) is not ShardedTensor:
                results[position] = whole(*result._alive()).to(original.device)
        return results

    def run_for(
        self, wanted: tuple[int, ...], tensors: Tensors
    ) -> tuple[list[torch.Tensor], PullBack | None]:
        given_in = [_detached(x) for x in tensors]
        for k in wanted:
            given_in[k].requires_grad_()
        with torch.enable_grad():
            results = self._program(given_in)

        def pull_back(some: tuple[int, ...], given: tuple[int, ...], tensors: Tensors) -> Any:
            cotangents = tensors[len(given_in) :]
            ends = [(results[k], x) for k, x in zip(given, cotangents, strict=True)]
            ends = [(result, x) for result, x in ends if result.requires_grad]
            leaves = [given_in[k] for k in some]
            found: Sequence[torch.Tensor | None] = [None] * len(some)
            if ends:
                outputs, cotangents = zip(*ends, strict=True)
                # torch.func may ask again
                options = {"retain_graph": True, "allow_unused": True}
                found = torch.autograd.grad(outputs, leaves, cotangents, **options)
            pairs = zip(leaves, found, strict=True)
            with torch.no_grad():
                return [torch.zeros_like(x) if grad is None else grad for x, grad in pairs]

        return list(map(_alone, results)), pull_back

    def _pull(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Body:
        count = len(self.layouts)

        def pull(tensors: Tensors) -> list[torch.Tensor]:
            primals, cotangents = tensors[:count], tensors[count:]
            return vjp_of(self._body, primals, wanted, given, cotangents, set())

        return pull

    def _push(self, given: tuple[int, ...]) -> Body:
        count = len(self.layouts)
        return lambda tensors: jvp_of(self._body, tensors[:count], given, tensors[count:])[1]

    def batched(
        self, info: Any, dims: Sequence[int | None], tensors: Tensors
    ) -> tuple[WholeFunction, list[torch.Tensor], OutDims]:
        over, moved = list(dims), list(tensors)
        for k in self.keys:
            if over[k] is None:
                moved[k], is_batched = batched_key(moved[k], info)
                over[k] = moved[k].dim() - 1 if is_batched else None

        def rows(tensors: Tensors) -> list[torch.Tensor]:
            def row(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple(self._body(given))

            # "same": keys have the batch dim if rows are to draw different numbers
            return list(torch.func.vmap(row, tuple(over), 0, randomness="same")(*tensors))

        key = ("vmap", tuple(over))
        derived = self._derive(key, self.mirrored, rows, self.layouts, self._outputs)
        return derived, moved, lambda results: [0] * len(results)

    def _made(
        self, key: Any, body: Body, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> WholeFunction:
        return WholeFunction(self._make, body, inputs, outputs, self.settings)


class Outline:
    """A kind of call under transforms, and what transforms need to know of it.

    Args:
        make: see ``Make``.
    """

    changes = Changes()

    def __init__(
        self, call: JitCall, options: Options, optimizers: Sequence[Any], make: Make
    ) -> None:
        self._call, self._prefix = call.without_tensors(), options.prefix
        self.surroundings = Surroundings(())
        """What it reads from outside, as of the trace."""
        self._grad_mode = torch.is_grad_enabled()
        with outside_transforms():
            seed, kinds = new_seed(), list(map(_of_kind, call.tensors))

        def flat(given: Sequence[torch.Tensor]) -> Any:
            with Substitute(_not_of_transforms):
                template, results = call.of_tensors(given)
            return template, [x.detach() for x in results]

        device = current_runtime().device
        with outside_transforms():
            traced = trace_whole(flat, kinds, device, seed, lambda *_: None, optimizers)
        _refuse_effects(traced, options.where)
        self._tree, self._values = traced.returned
        self._met = traced.met
        self._kinds = fixed_parts(self._met)
        self._read_gradients = [(x, layout_of_gradient(x)) for x, _ in traced.read_gradients]
        self._has_key = any(x is seed for x in traced.captured)
        self._closures = [x for x in self._met if x.requires_grad]
        made = [node.meta["val"].dtype for node in results_of(traced.graph.graph)]
        outputs = [torch.empty(0, dtype=dtype, device="cpu") for dtype in made]
        inputs = [*kinds, *([seed] if self._has_key else ()), *self._closures]
        wanted = ambient()

        def settings() -> AbstractContextManager[Any]:
            return nullcontext() if in_force(wanted) else applied(wanted)

        self._function = WholeFunction(make, self._body, inputs, outputs, settings)
        self._function.keys = (len(kinds),) if self._has_key else ()

    def taken(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """See ``Program``."""
        is_same = fixed_parts(self._met) == self._kinds and all(
            layout_of_gradient(leaf) == layout for leaf, layout in self._read_gradients
        )
        return tensors if is_same else None

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        given = [*tensors, *([draw_key()] if self._has_key else ()), *self._closures]
        results = call_function(self._function, given) if self._function.outputs else []
        return self._tree.unflatten(returned(self._values, results, tensors))

    def _body(self, tensors: Tensors) -> list[torch.Tensor]:
        """The function of its arguments, the key of a call, and what it closes over."""
        if self.surroundings.changed():
            raise RuntimeError(other_surroundings(self._prefix))
        count = len(tensors) - len(self._closures)
        exchange = Exchange(self._closures, tensors[count:])
        with ExitStack() as stack:
            stack.enter_context(self.surroundings.tracing())
            if self._has_key:
                count -= 1
                stack.enter_context(streams_of(tensors[count]))
            stack.enter_context(exchange)
            stack.enter_context(torch.set_grad_enabled(self._grad_mode))
            values, _ = flatten(self._call.returned(tensors[:count]))
        if len(values) != len(self._values):
            raise RuntimeError(other_closures(self._prefix))
        pairs = zip(values, self._values, strict=True)
        return [value for value, known in pairs if known is RESULT]


def _of_kind(x: torch.Tensor) -> torch.Tensor:
    """A tensor of this kind, which takes no memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _not_of_transforms(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself; raise if the function closes over it, and a transform follows it."""
    with torch_function_off(), outside_modes():
        is_followed = is_real(innermost(x)) if is_wrapped(x) else is_real(x) and _has_tangent(x)
    if is_followed:
        raise Untraceable(
            "it closes over a tensor that a transform around the call follows",
            users_line(),
            "an argument for it",
        )
    return x


def _has_tangent(x: torch.Tensor) -> bool:
    return is_inexact(x) and forward_ad.unpack_dual(x).tangent is not None


def _refuse_effects(traced: WholeTrace, where: str) -> None:
    reads = any(id(x) in traced.grad_of for x in traced.captured)
    if traced.written or traced.graded or traced.cleared or traced.numbers or reads:
        raise Untraceable(
            "it writes to tensors from outside, or uses their gradients, under a transform around "
            "the call",
            where,
            "the transform in the function, or return what it writes",
        )


def _detached(x: torch.Tensor) -> torch.Tensor:
    if type(x) is not ShardedTensor:
        return x.detach()
    return make_sharded(*x._alive(), order=own_strides(x))


def _alone(x: torch.Tensor) -> torch.Tensor:
    """The value as a tensor of its own, which is no argument and has no history."""
    return _detached(x) if type(x) is ShardedTensor else x.detach().clone()
