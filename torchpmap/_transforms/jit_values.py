"""A jitted call: its arguments, where its values come from, and where its effects go.

A ``Place`` is a tensor of the caller's.  An input of the program is a ``Value`` (what such a tensor
holds on the devices), ``Kept`` (a tensor of this process), or ``StepNumbers``.
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchpmap._base.axis_spec import argument_names
from torchpmap._base.exact import exact
from torchpmap._base.pytree import flatten, flatten_call
from torchpmap._base.sources import users_line
from torchpmap._base.storages import own_strides
from torchpmap._base.torch_internals import innermost
from torchpmap._layout.layout import Layout
from torchpmap._plan.plan import Captured, Drawn
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.device_put import handle_of
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import host_tensor
from torchpmap._trace.capture import is_real
from torchpmap._trace.kinds import check_dtype, oddity
from torchpmap._trace.optimizers import Numbers
from torchpmap._trace.reach import SIMPLE
from torchpmap._trace.snapshot import has_traced_keys
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole_capture import reals
from torchpmap.random._streams import peek_key

_is_contiguous = torch.Tensor.is_contiguous
_requires_grad = operator.attrgetter("requires_grad")


def _are_sharded(leaves: Sequence[Any]) -> bool:
    """Whether all are on the devices, as those of most calls."""
    return set(map(type, leaves)) == {ShardedTensor}


def leaf_keys(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What must be the same of arguments for the same program."""
    is_plain = _are_sharded(leaves) and all(map(_is_contiguous, leaves))
    if is_plain and not any(map(_requires_grad, leaves)):
        layouts = [leaf._layout for leaf in leaves]
        if all(layouts):  # hundreds of leaves are asked in half the time that ``_key`` takes
            return tuple(layouts)
    return tuple(map(_key, leaves))


def _key(leaf: Any) -> Hashable:
    if type(leaf) is ShardedTensor and leaf.is_contiguous() and not leaf.requires_grad:
        return leaf._layout or leaf._alive()[0]
    if not isinstance(leaf, torch.Tensor):
        return exact(leaf)
    grad = leaf.requires_grad and (leaf.is_leaf or "computed")
    if type(leaf) is ShardedTensor:
        return leaf._alive()[0], own_strides(leaf), grad
    shape = None if leaf.is_nested else tuple(leaf.shape)
    return shape, leaf.dtype, own_strides(leaf), grad, leaf.layout, type(leaf)


class Argument(NamedTuple):
    """A tensor that the function was given."""

    place: int

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tensors[self.place]


class ClosedOver(NamedTuple):
    """A tensor that the function closes over."""

    tensor: torch.Tensor

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.tensor


class GradientOf(NamedTuple):
    """The gradient of another."""

    leaf: Argument | ClosedOver

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.leaf.of(tensors).grad


_CLOSED_OVER = "a tensor that it closes over"
Place = Argument | ClosedOver | GradientOf


class Again(NamedTuple):
    """The same as an earlier result."""

    place: int


class Copied(NamedTuple):
    """A result that the caller may change."""

    value: Any

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        return copy.copy(self.value)


RESULT = object()
"""Stands for what the graph returns."""


def returned(
    values: Sequence[Any], results: Iterable[Any], tensors: Sequence[torch.Tensor]
) -> list[Any]:
    """What a call returns; ``values``: of the first one, with ``RESULT`` for each of these."""
    rest, found = iter(results), []
    for value in values:
        if value is RESULT:
            found.append(next(rest))
        elif isinstance(value, Again):
            found.append(found[value.place])
        else:
            is_place = isinstance(value, Argument | ClosedOver | Copied)
            found.append(value.of(tensors) if is_place else value)
    return found


_TENSOR = object()
"""Stands for one among the leaves of a call."""


class JitCall:
    """A call, taken apart."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Any,
        kwargs: Any,
        prefix: str,
        own: Callable[..., Any] | None = None,
    ) -> None:
        """``prefix``: the function, as messages name it; ``own``: the user's, if ``fun`` is not."""
        self.fun, self._own, self._prefix = fun, own or fun, prefix
        self.leaves, self.structure = flatten_call(args, kwargs)
        if _are_sharded(self.leaves):
            self.tensors: list[torch.Tensor] = list(self.leaves)
            return
        for k, x in enumerate(self.leaves):
            if isinstance(x, np.ndarray):
                self.leaves[k] = self._of_array(x, k)
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]

    @functools.cached_property
    def paths(self) -> list[str]:
        args, _ = self.structure.unflatten(self.leaves)
        return self.structure.call_paths(argument_names(self._own, len(args)))

    @functools.cached_property
    def names(self) -> list[str]:
        """The leaves, as messages name them."""
        return [f"argument {path}" for path in self.paths]

    def _of_array(self, x: np.ndarray[Any, Any], k: int) -> torch.Tensor:
        try:
            made = host_tensor(x)
        except TypeError:
            check_dtype(x, f"{self._prefix}: {self.names[k]}")
            raise
        if x.size and not np.may_share_memory(x, made.numpy()):
            made.is_copy = True  # type: ignore[attr-defined]
        return made

    def check(self) -> None:
        """Raise for tensors that cannot be on devices."""
        for name, x in zip(self.names, self.leaves, strict=True):
            reason = oddity(x) if isinstance(x, torch.Tensor) else None
            if reason is not None:
                raise TypeError(f"{self._prefix}: {name} {reason}")

    def objects(self) -> list[Any]:
        """The arguments of which the function may read more than is compared."""
        return [x for x in self.leaves if not isinstance(x, torch.Tensor | SIMPLE)]

    def without_tensors(self) -> JitCall:
        """The same, for calls with others; it keeps none alive."""
        other = copy.copy(self)
        other.leaves = [_TENSOR if isinstance(x, torch.Tensor) else x for x in self.leaves]
        other.tensors = []
        return other

    def returned(self, given: Sequence[torch.Tensor]) -> Any:
        """Call the function with other tensors."""
        rest = iter(given)
        is_tensor = [leaf is _TENSOR or isinstance(leaf, torch.Tensor) for leaf in self.leaves]
        leaves = zip(self.leaves, is_tensor, strict=True)
        args, kwargs = self.structure.unflatten([next(rest) if x else leaf for leaf, x in leaves])
        return self.fun(*args, **kwargs)

    def of_tensors(self, given: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """The same; see ``whole.Fun``."""
        values, tree = flatten(self.returned(given))
        if has_traced_keys(tree):
            raise Untraceable("it returns a dict of new tensors", users_line(), "a list of pairs")
        places: dict[int, Any] = {key: ClosedOver(x) for key, x in reals().items()}
        places |= {id(x): Argument(k) for k, x in enumerate(given)}
        template: list[Any] = []
        results = []
        for value in values:
            if id(value) in places:
                template.append(places[id(value)])
            elif isinstance(value, torch.Tensor) and is_real(value):
                if not is_real(innermost(value)):
                    reason = "it returns a tensor of a transform that has ended"
                    raise Untraceable(reason, users_line(), "what the transform returns")
                template.append(ClosedOver(value))
            elif isinstance(value, torch.Tensor):
                places[id(value)] = Again(len(template))
                template.append(RESULT)
                results.append(value)
            else:
                _refuse_hidden(value)
                is_fixed = isinstance(value, SIMPLE)
                template.append(value if is_fixed else Copied(value))
        return (tree, template), results


def _refuse_hidden(value: Any) -> None:
    """Raise for a result with tensors that no call could give values."""
    inside = vars(value).values() if hasattr(value, "__dict__") else ()
    inside = value if isinstance(value, list | tuple | set | frozenset) else inside
    if any(isinstance(x, torch.Tensor) and not is_real(x) for x in inside):
        kind = type(value).__name__
        raise TypeError(
            f"jit: the function returns tensors in a {kind}, which is no pytree. Return a tuple or "
            f"a dict, or register {kind} with torch.utils._pytree.register_dataclass or "
            "register_pytree_node."
        )


class Value(NamedTuple):
    """A tensor on the devices, as an input.  It keeps no blocks: these may be donated."""

    place: Place
    layout: Layout

    def given(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[str, Any]:
        """What a message calls it, and its value; ``paths``: of the tensors."""
        place = self.place
        name = paths[place.place] if isinstance(place, Argument) else _CLOSED_OVER
        return name, place.of(tensors)

    def handle(self, tensors: Sequence[torch.Tensor]) -> Handle:
        return handle_of(self.place.of(tensors), self.layout)


class Kept(NamedTuple):
    """A tensor of this process, or the key of random numbers, as an input."""

    captured: Captured

    def given(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[str, Any]:
        if isinstance(self.captured, Drawn):
            return "the seed of its random numbers", peek_key()
        return _CLOSED_OVER, self.captured.value()

    def handle(self, tensors: Sequence[torch.Tensor]) -> Handle:
        return self.captured.handle()


def direct(given: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The tensor of an input that is the same in each call, or the place among ``tensors`` of one
    on the devices, as it lies as it did in the first; None for other inputs.
    """
    place = given.place if isinstance(given, Value) else None
    if isinstance(place, Argument) and type(tensors[place.place]) is ShardedTensor:
        return place.place
    return place.tensor if isinstance(place, ClosedOver) else None


class StepNumbers:
    """The rates and counters of an optimizer, as an input.

    A call leaves those of the next one on the devices.  They are sent only where these differ from
    what the optimizer has: in the first call, and when a schedule has changed a rate.
    """

    def __init__(self, numbers: Numbers, layout: Layout) -> None:
        self.numbers = numbers
        self._layout = layout
        self._held: tuple[bytes, Handle] | None = None
        """Values, and where the devices have them."""
        _holders.add(self)

    def given(self, tensors: Sequence[torch.Tensor], paths: Sequence[str]) -> tuple[str, Any]:
        values = torch.tensor(self.numbers.read(), dtype=torch.float64)
        return "the rates and counters of an optimizer", values

    def handle(self, tensors: Sequence[torch.Tensor]) -> Handle:
        if current_runtime().has_losses:
            for each in tuple(_holders):  # one that is called no more must hold nothing either
                each.forget_lost()
        values, held = self.numbers.read().tobytes(), self._held
        if held is None or held[0] != values:
            sent = torch.frombuffer(bytearray(values), dtype=torch.float64)
            self._held = held = values, handle_of(sent, self._layout)
        return held[1]

    def follow(self, before: Handle, after: Handle) -> None:
        """Hear that a call has made the values ``after`` from those ``before``.

        If another thread has begun a call meanwhile, nothing is known, and they are sent again.
        """
        held = self._held
        if held is not None and held[1] is before:
            self._held = self.numbers.after(array("d", held[0])).tobytes(), after

    def forget_lost(self) -> None:
        """Drop what a call that has failed should have made, or a worker that has died had."""
        if self._held is not None:
            try:
                self._held[1].team.runtime.check(self._held[1])
            except Exception:  # it says what has failed, which the caller's own values tell too
                self._held = None


_holders: weakref.WeakSet[StepNumbers] = weakref.WeakSet()
