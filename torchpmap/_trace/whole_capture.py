"""Stand-ins, in a trace of whole values, of the tensors that a function closes over.

They are put in the place of real tensors above autograd: the stand-in of a parameter is a leaf with
a gradient of its own, and what shares its value with another tensor has a stand-in that does so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, Self

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._base.storages import own_strides, storage_number
from torchpmap._base.torch_internals import (
    AUTOGRAD,
    BACKWARD,
    function_modes,
    hooks_of,
    is_wrapped,
    outside_modes,
    outside_transforms,
    torch_function_off,
)
from torchpmap._base.torch_versions import applying
from torchpmap._trace.capture import Capture, TracedCalls, here, is_real
from torchpmap._trace.untraceable import Untraceable

_LET_REQUIRE_GRAD = torch.Tensor.requires_grad_
_PLACED = ("storage_offset", "as_strided", "as_strided_", "as_strided_scatter")
Hook = Callable[[torch.Tensor, torch.Tensor], None]
"""Hears of each leaf and its stand-in."""

_ZERO_GRAD = tuple(
    inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, torch.nn.Module)
)


@dataclass(eq=False)
class Leaf:
    """A tensor that gradients are stored in."""

    real: torch.Tensor
    stand_in: torch.Tensor
    before: torch.Tensor | None
    """The gradient with which the function begins."""
    is_stored: bool = True
    """Whether the tensor stores it; else it only passes it on."""
    was_read: bool = False
    """Whether it matters if there was one."""
    is_cleared: bool = False
    """Whether the function took it away before anything asked for it."""
    after: torch.Tensor | None = None
    """The gradient with which the function ends."""
    pulled: torch.Tensor | None = None
    """What a ``backward()`` outside adds to it."""
    num_hooks: int = 0
    """With which the function begins."""

    def is_frozen(self) -> bool:
        """Whether it requires no grad now."""
        return not _requires_grad(self.stand_in)

    def count_hooks(self) -> int:
        return sum(map(len, hooks_of(self.stand_in)))

    def gradient(self) -> torch.Tensor | None:
        """The one that it has now."""
        with torch_function_off():
            grad = self.stand_in.grad
        if grad is not None and grad.layout is not torch.strided:
            reason = "the gradient of a parameter is sparse"
            raise Untraceable(reason, users_line(), "layers without sparse=True")
        return grad

    def clear(self) -> None:
        """Take it away without asking what is there, as ``zero_grad`` does."""
        if not self.was_read and self.gradient() is self.before:
            self.is_cleared = True
        with torch_function_off():
            self.stand_in.grad = None

    def ask(self) -> None:
        self.was_read |= not self.is_cleared


class WholeCapture(Capture):
    """Makes the stand-in of a leaf of autograd a leaf."""

    def __init__(self, device: torch.device, hook: Hook) -> None:
        super().__init__(device)
        self._hook = hook
        self.leaves: dict[int, Leaf] = {}
        """By the id of the stand-in."""
        self._others: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What requires no grad, and its stand-in, by the id of the latter."""
        self.grad_of: dict[int, torch.Tensor] = {}
        """Id of a gradient from before -> the leaf: each call may find another there."""
        self.is_outside = False
        """Whether what runs now is the ``backward()`` that may follow outside."""
        self.linked: list[torch.Tensor] = []
        """What shares its value with something captured; kept, so that no other gets its id."""

    def _add(self, real: torch.Tensor) -> torch.Tensor:
        # a transform inside the function may be the first to meet it; a question for its shape
        # would make another stand-in
        with outside_transforms(), torch_function_off():
            return self._added(real)

    def _added(self, real: torch.Tensor) -> torch.Tensor:
        linked = self._linked(real)
        if linked is None:
            stand_in = self._stand_in(real)
            stand_in.__dict__.update({**real.__dict__, **stand_in.__dict__})
            self.adopt(real, stand_in)
            return stand_in
        self.stand_ins[id(real)] = linked
        self.linked.append(real)
        return linked

    def adopt(self, real: torch.Tensor, stand_in: torch.Tensor, is_given: bool = False) -> None:
        """Make a stand-in the leaf that the tensor is; one that was computed outside of the
        function, and ``is_given`` to it, passes its gradient on.
        """
        with torch_function_off(), outside_modes():
            requires_grad, is_stored = real.requires_grad, real.is_leaf
        if not requires_grad:
            self._others[id(stand_in)] = real, stand_in
        elif not is_stored and not is_given:
            raise Untraceable(
                "a tensor that requires grad was computed outside of the function",
                users_line(),
                "x.detach(), an argument for it, or compute it in the function",
            )
        else:
            self._add_leaf(real, stand_in, is_stored)

    def leaf(self, stand_in: torch.Tensor) -> Leaf | None:
        """That of a stand-in.  What requires no grad, such as a frozen parameter, is one from when
        something first asks for its gradient, or lets it require grad.
        """
        if id(stand_in) in self._others and stand_in.grad_fn is None:
            with outside_transforms():
                self._add_leaf(*self._others.pop(id(stand_in)), True)
        return self.leaves.get(id(stand_in))

    def _add_leaf(self, real: torch.Tensor, stand_in: torch.Tensor, is_stored: bool) -> None:
        with torch_function_off(), outside_modes():
            grad, requires_grad = real.grad if is_stored else None, real.requires_grad
            hooks, after_hooks = hooks_of(real)
        if grad is not None and (id(grad) in self.stand_ins or hasattr(grad, "_view")):
            refuse_gradient()
        before = None if grad is None else self.substitute(grad)
        if grad is not None:
            self.grad_of[id(grad)] = real
        with torch_function_off():
            if is_inexact(stand_in):  # only then has it hooks
                stand_in.requires_grad_()
                for hook in hooks.values() if is_stored else ():
                    stand_in.register_hook(functools.partial(self._inside, hook))
                for hook in after_hooks.values():
                    stand_in.register_post_accumulate_grad_hook(lambda _, hook=hook: hook(real))
                self._hook(real, stand_in)
                stand_in.requires_grad_(requires_grad)
            stand_in.grad = before
        leaf = self.leaves[id(stand_in)] = Leaf(real, stand_in, before, is_stored)
        leaf.num_hooks = leaf.count_hooks()

    def reals(self) -> dict[int, torch.Tensor]:
        """By the ids of stand-ins, what they stand for."""
        return {id(self.stand_ins[id(x)]): x for x in self.tensors}

    def _strides(self, real: torch.Tensor) -> Sequence[int] | None:
        with outside_modes():
            return own_strides(real)

    def _inside(self, hook: Callable[[torch.Tensor], Any], grad: torch.Tensor) -> Any:
        return None if self.is_outside else hook(grad)  # outside, that of the real tensor runs

    def check(self) -> None:
        """Raise if the function changes a leaf in a way that would be lost."""
        for leaf in self.leaves.values():
            changed = None
            if leaf.count_hooks() != leaf.num_hooks:
                changed = "it registers a hook of a parameter"
            elif leaf.is_frozen() and _requires_grad(leaf.real):
                changed = "it changes requires_grad of a parameter"
            elif not leaf.is_stored and leaf.gradient() is not None:
                changed = "its backward() reaches a tensor that was computed outside of it"
            if changed is not None:
                raise Untraceable(changed, users_line(), "the same outside of the function")

    def is_from_outside(self, x: torch.Tensor) -> bool:
        """Whether it lies in the memory of a tensor of the caller's."""
        stand_ins = [leaf.stand_in for leaf in self.leaves.values()]
        stand_ins += [stand_in for _, stand_in in self._others.values()]
        return storage_number(x) in map(storage_number, stand_ins)

    def _linked(self, real: Any) -> torch.Tensor | None:
        """The stand-in of a view, or of one of several tensors of one value, made of that of the
        parent, or of the first, so that writes reach it.
        """
        view, requires_grad = getattr(real, "_view", None), _requires_grad(real)
        found = [reference() for reference in getattr(real, "_aliases", ())]
        aliases = [alias for alias in found if alias is not None]
        first = next(filter(_requires_grad, aliases), aliases[0] if aliases else real)
        if view is not None and view.parent._layout is not None:
            source, take = view.parent, view.take
        elif first is not real:
            source, take = first, torch.ops.aten.detach.default
        else:
            return None
        if requires_grad:
            raise Untraceable(
                "a tensor that requires grad shares its value with another one",
                users_line(),
                "one of the two",
            )
        with torch_function_off(), torch.no_grad():
            taken: torch.Tensor = take(self.substitute(source))
        return taken


def refuse_gradient() -> NoReturn:
    """A gradient is an input by its parameter: each call may find another there."""
    raise Untraceable(
        "it uses the gradient of a parameter by another name, or as a view",
        users_line(),
        "parameter.grad",
    )


def _requires_grad(tensor: torch.Tensor) -> bool:
    with torch_function_off(), outside_modes():
        return tensor.requires_grad


class Replace(TracedCalls):
    """Puts stand-ins in the place of real tensors, and hears of questions for gradients.

    torch turns modes off while ``backward()`` runs, where hooks, functions of the user and
    checkpoints meet real tensors too, so there this is entered again.
    """

    def __init__(self, capture: WholeCapture) -> None:
        super().__init__(capture, self._stand_in)
        self.capture: WholeCapture = capture

    def _stand_in(self, x: torch.Tensor) -> torch.Tensor:
        if not _is_users(x):
            return x
        if id(x) in self.capture.grad_of:
            refuse_gradient()
        stand_in: torch.Tensor = self.capture.substitute(x)
        return stand_in

    def __enter__(self) -> Self:
        _backward.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _backward.__exit__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # as torch.cond does its branches
            return func(*args, **(kwargs or {}))
        of = func.__self__ if func.__name__ in ("__get__", "__set__") else None
        is_question = func.__name__ == "__get__"
        if (of is torch.Tensor.requires_grad and not is_question) or func is _LET_REQUIRE_GRAD:
            self.capture.leaf(self.find(args[0]))
        elif of is torch.Tensor.grad:
            leaf = self.capture.leaf(self.find(args[0]))
            if leaf is not None:
                if _zero_grad_asks() if is_question else args[1] is None:
                    leaf.clear()
                    return None
                leaf.ask()
        elif _asks_for_place(func, args, kwargs or {}) and self.capture.is_from_outside(
            self.find(args[0])
        ):
            reason = "it asks where a tensor from outside begins in memory"
            raise Untraceable(reason, users_line(), "indices")
        return super().__torch_function__(func, types, args, kwargs)


def _innermost() -> Replace | None:
    """That of the trace that this thread makes."""
    return next((each for each in reversed(here.entered) if isinstance(each, Replace)), None)


def reals() -> dict[int, torch.Tensor]:
    """Those of the trace that this thread makes."""
    active = _innermost()
    return {} if active is None else active.capture.reals()


def _with_modes(own: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        active: Any = _innermost()
        is_on = active is None or active in function_modes()
        with contextlib.nullcontext() if is_on else active:
            return own(*args, **kwargs)

    return run


def _found(value: Any) -> Any:
    active = _innermost() if isinstance(value, torch.Tensor) else None
    return value if active is None else active.find(value)


_backward = Replaced(
    [
        Replacement(AUTOGRAD, BACKWARD, _with_modes),
        *(Replacement(*each) for each in applying(_found)),
    ]
)


def _asks_for_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call uses the place of a tensor in its memory, which may differ in each call."""
    if func.__name__ not in _PLACED:
        return False
    is_question = func.__name__ == "storage_offset"
    return is_question or "storage_offset" in kwargs or isinstance(args[-1], int)


def _is_users(tensor: torch.Tensor) -> bool:
    """Whether a tensor was there before the trace; loops try their bodies on others."""
    if not is_real(tensor) or is_wrapped(tensor):
        return False
    with torch_function_off():
        return not tensor.is_meta


def _zero_grad_asks() -> bool:
    """Whether the question for a gradient comes from ``zero_grad()``, which sets it to None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # another mode
        frame = frame.f_back
    return (
        frame is not None and frame.f_code in _ZERO_GRAD and bool(frame.f_locals.get("set_to_none"))
    )
