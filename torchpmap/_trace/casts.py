"""Casts values where they meet others that vary along more axes (see ``_collectives/varying``).

``Casts`` is a function mode: above autograd and function transforms.  So these record the cast, as
they record the operation after it, and what they save for a derivative is the cast value.  Then
derivatives of every order are those of the typed program.

Two places pass no function mode.  A backward pass runs where it is called, and the mode is entered
again around it, for rules in Python and for checkpoints that compute again.  And an
``autograd.Function`` is its own rule: it gets values as they are, and the gradients that its rule
gives are summed over the axes along which its argument does not vary.

Whatever else computes unseen is found at the end: a gradient that varies along more axes than its
argument raises an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torchpmap._base.context import assigned
from torchpmap._base.inexact import copied_tangents, is_inexact, kinds_of
from torchpmap._base.pytree import map_tensors
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import (
    AUTOGRAD,
    BACKWARD,
    OpOverload,
    custom_function_call,
    depth,
    forward_level,
    function_modes,
    is_vmap_wrapper,
    layers,
    level_of,
    set_forward_grad,
    torch_function_off,
)
from torchpmap._base.torch_versions import apply_entry
from torchpmap._base.writes import written_values
from torchpmap._collectives.groups import summed, varied
from torchpmap._collectives.varying import (
    NONE,
    Axes,
    Tracking,
    axes_of,
    mark_gradient,
    named,
    set_axes,
    tensors_in,
    union,
)
from torchpmap._layout import axis_stack
from torchpmap._trace.capture import Substitute

# Per thread, as the bound axes are.
_active: ContextVar[Casts | None] = ContextVar("torchpmap_casts", default=None)


def is_tracked() -> bool:
    """Whether it is followed in this thread along which axes values vary."""
    return _active.get() is not None


_times: ContextVar[int] = ContextVar("torchpmap_times_tracked", default=0)

times_tracked = _times.get
"""How often this thread has begun to follow which values vary."""


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Follow in the block along which axes values vary, and cast them where they meet."""
    mode = _active.get()
    if mode is not None and mode in function_modes():
        yield
        return
    mode = Casts()
    token = _active.set(mode)
    _times.set(_times.get() + 1)
    try:
        with _patches, Tracking(), mode:
            yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def must_vary(axes: Axes, name: str, part: axis_stack.Split | None) -> Iterator[None]:
    """A branch of ``name`` that devices along some axes may not take: raise for a value with a
    derivative that they share, because all of them would have to sum its gradient.
    """
    if not axes:
        yield
        return
    branches = (*_branches.get(), _Branch(axes, name, depth()))
    with assigned(_branches, branches), axis_stack.entered(part):
        yield


def must_vary_wholly(results: Sequence[torch.Tensor], name: str) -> None:
    """The results of a branch of ``name``, of which another may vary along any axes: raise for one
    with a derivative that does not vary along all.
    """
    every = NONE.union(*(axis.tracked for parts in axis_stack.bound() for axis in parts))
    for x in results:
        lacking = every - axes_of(x)
        if lacking and is_inexact(x) and _has_gradient(x):
            raise ValueError(
                f"at {users_line()}: the branch of {name} that is taken returns a tensor that does "
                f"not vary along {named(lacking)}, and whose gradient is wanted. Whether that of "
                "another branch does is not known, as it fails without values. Cast what the "
                f"branch returns: tp.pcast(x, {_names(lacking)}, to='varying')."
            )


class _Branch(NamedTuple):
    """A branch that devices along some axes may not take."""

    axes: Axes
    name: str
    depth: int
    """How many transforms are around it."""


_branches: ContextVar[tuple[_Branch, ...]] = ContextVar("torchpmap_branches", default=())
"""Those that this thread is in."""


def _refuse_shared(tensors: Sequence[torch.Tensor]) -> None:
    for branch in _branches.get():
        met = branch.axes & union(tensors)
        for x in tensors:
            lacking = branch.axes - axes_of(x)
            # a derivative taken in the branch is summed over the axes of what its tensor meets
            outermost = None if lacking & met else branch.depth
            if lacking and _has_gradient(_substituted(x), outermost):
                raise ValueError(
                    f"at {users_line()}: the predicate of {branch.name} varies along "
                    f"{named(lacking)}, but the branch uses a tensor from outside that does not, "
                    f"and whose gradient is wanted. Pass it to {branch.name} as an operand, or "
                    f"cast it before: x = tp.pcast(x, {_names(lacking)}, to='varying')."
                )


class Casts(TorchFunctionMode):
    """Casts the operands of each operation that varies along more axes than they do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if torch.compiler.is_dynamo_compiling() or name == "__set__":
            return func(*args, **kwargs)
        if name == "__get__":
            result = func(*args, **kwargs)
            if func.__self__ is torch.Tensor.grad and result is not None:
                _check_gradients([_substituted(args[0])], [result])
            return result
        if func is torch.Tensor.__deepcopy__:  # copies memory outside of all modes
            result = func(*args, **kwargs)
            set_axes(result, axes_of(args[0]))
            return result
        if func not in _TAKEN_AS_THEY_ARE:
            tensors = list(tensors_in([*args, *kwargs.values()]))
            _refuse_shared(tensors)
            if len(tensors) > 1:
                axes = union(tensors)
                if axes and any(axes_of(x) != axes for x in tensors):
                    args, kwargs = _together(func, name, args, kwargs, axes)
        return func(*args, **kwargs)


_TAKEN_AS_THEY_ARE = frozenset({torch.autograd.grad, torch.Tensor.backward, custom_function_call})


def _together(func: Any, name: str, args: Any, kwargs: Any, axes: Axes) -> tuple[Any, Any]:
    """The arguments, those that can have a derivative cast so that they vary along ``axes``."""
    written = _written(func, name, args, kwargs)
    for x in written:
        lacking = axes - axes_of(x)
        if lacking and _has_gradient(_substituted(x)):
            raise ValueError(
                f"at {users_line()}: {name} writes a value that varies along {named(lacking)} into "
                "a tensor that does not, and whose gradient is wanted. Cast the tensor before: "
                f"x = tp.pcast(x, {_names(lacking)}, to='varying')."
            )
    kept = set(map(id, written))

    def cast(x: torch.Tensor) -> torch.Tensor:
        given = _substituted(x)
        return varied(given, axes) if id(x) not in kept and _is_differentiated(given) else x

    found: tuple[Any, Any] = map_tensors(cast, (args, kwargs))
    return found


def _written(func: Any, name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that a function writes to."""
    if isinstance(func, OpOverload):
        return list(tensors_in(written_values(func, args, kwargs)))
    found = [kwargs.get("out")]
    if name in ("__setitem__", *_IN_PLACE) or (name.endswith("_") and not name.endswith("__")):
        found.append(args[0] if args else kwargs.get("input"))
    if name in ("batch_norm", "instance_norm"):
        is_functional = func in (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)
        found += args[1:3] if is_functional else args[3:5]
        found += [kwargs.get("running_mean"), kwargs.get("running_var")]
    if name in ("embedding", "embedding_bag") and func is getattr(torch.nn.functional, name):
        given = dict(zip(("input", "weight", "", "max_norm"), args, strict=False)) | kwargs
        found.append(None if given.get("max_norm") is None else given["weight"])
    return list(tensors_in(found))


_IN_PLACE = tuple(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)


def _has_gradient(x: torch.Tensor, outermost: int | None = None) -> bool:
    """Whether autograd, or a transform at any level, records what becomes of a value; or one of the
    ``outermost`` levels.
    """
    with torch_function_off():  # no access of the user's
        return any(
            each.requires_grad
            for each in layers(x)
            if not is_vmap_wrapper(each) and (outermost is None or level_of(each) <= outermost)
        )


def _is_differentiated(x: torch.Tensor) -> bool:
    """Whether a derivative of any order may be taken through a value."""
    with torch_function_off():
        has_derivatives = is_inexact(x)
    return has_derivatives and (forward_level() >= 0 or _has_gradient(x))


def _substituted(x: torch.Tensor) -> torch.Tensor:
    """What takes the place of a tensor that the function closes over."""
    for mode in function_modes():
        if isinstance(mode, Substitute):
            x = mode.find(x)
    return x


def _names(axes: Axes) -> str:
    names = tuple(sorted((axis.name for axis in axes), key=str))
    return repr(names[0] if len(names) == 1 else names)


# -- gradients -------------------------------------------------------------------------------------


def _run_backward(own: Any, outputs: Any, cotangents: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass with casts in its rules, and check what comes out of it."""
    mode = _active.get()
    if mode is None:
        return own(outputs, cotangents, *args, **kwargs)
    given = tuple(map(_as_output, outputs, cotangents))
    inputs = args[2] if len(args) > 2 else ()
    with contextlib.nullcontext() if mode in function_modes() else mode:
        gradients = own(outputs, given, *args, **kwargs)
    if gradients is not None:
        _check_gradients(inputs, gradients)
    return gradients


def _as_output(output: Any, cotangent: torch.Tensor | None) -> torch.Tensor | None:
    if cotangent is None or not isinstance(output, torch.Tensor):
        return cotangent
    more = axes_of(cotangent) - axes_of(output)
    if more:
        raise ValueError(
            f"at {users_line()}: a cotangent varies along {named(more)}, but the output that it "
            "belongs to does not. Sum the cotangent over the axis (tp.psum), or cast the output: "
            f"tp.pcast(output, {_names(more)}, to='varying')."
        )
    return varied(cotangent, axes_of(output))


def _check_gradients(inputs: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    for x, gradient in zip(inputs, gradients, strict=True):
        if gradient is None or not isinstance(x, torch.Tensor):
            continue
        more = axes_of(gradient) - axes_of(x)
        if more:
            raise NotImplementedError(
                f"at {users_line()}: the gradient of a tensor of shape {list(x.shape)} varies "
                f"along {named(more)}, along which the tensor does not: an operation that torch "
                "does not show was differentiated. Cast the tensor first: "
                f"x = tp.pcast(x, {_names(more)}, to='varying')."
            )
        mark_gradient(gradient)


class _Argument(torch.autograd.Function):
    """An argument of an ``autograd.Function``, whose gradient gets the axes of the argument."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: Any) -> None:
        ctx.axes = axes_of(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return summed(cotangent, axes_of(cotangent) - ctx.axes)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        with set_forward_grad(True):  # as in _Extreme.jvp
            return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor) -> Any:
        return _Argument.apply(x), in_dims[0]


def together(
    results: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    levels: Sequence[frozenset[int]] | None = None,
) -> Any:
    """Copies of results, through which every operand has a gradient: zeros if it has no part in
    them.  So devices that compute different results sum the gradients of the same operands.

    ``levels``: of the vmaps of which each result has rows, as those of other devices have; None:
    all that are met.
    """
    return _Together.apply(levels, len(results), *results, *operands)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, count: int, *tensors: torch.Tensor) -> Any:
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, count, *tensors = inputs
        ctx.kinds = kinds_of(output)
        ctx.save_for_backward(*tensors[count:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_inexact(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        operands, given = ctx.saved_tensors, [x for x in cotangents if x is not None]
        if not given:
            return (None,) * (2 + len(cotangents) + len(operands))
        inexact = list(filter(is_inexact, operands))
        others = [*inexact, *given]
        zeros = iter(together([_zeros(x, others) for x in inexact], others))
        return None, None, *cotangents, *(next(zeros) if is_inexact(x) else None for x in operands)

    @staticmethod
    def jvp(ctx: Any, _levels: None, _count: None, *tangents: torch.Tensor | None) -> Any:
        return copied_tangents(tangents[: len(ctx.kinds)], ctx.kinds)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], levels: Any, count: int, *tensors: Any) -> Any:
        given, dims = list(tensors), list(in_dims[2 : count + 2])
        for k, dim in enumerate(dims):
            if dim is None and (levels is None or depth() + 1 in levels[k]):
                given[k], dims[k] = given[k].expand(info.batch_size, *given[k].shape), 0
        return tuple(_Together.apply(levels, count, *given)), tuple(dims)


def _zeros(x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Zeros for a gradient of ``x``, rows of each vmap of which ``others`` have some."""
    with torch_function_off():
        zeros = torch.zeros_like(x)
        for each in others:
            zeros = zeros + torch.zeros_like(each, dtype=x.dtype).sum()
    set_axes(zeros, axes_of(x))
    return zeros


def _with_arguments(kind: type, args: Any) -> Any:
    if _active.get() is None or kind.__module__.startswith("torchpmap."):
        return args
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    axes = union(tensors)
    if all(axes_of(x) == axes for x in tensors):
        return args
    return tuple(
        _Argument.apply(x) if isinstance(x, torch.Tensor) and _is_differentiated(x) else x
        for x in args
    )


_patches = Replaced(
    [
        Replacement(AUTOGRAD, BACKWARD, lambda own: functools.partial(_run_backward, own)),
        Replacement(*apply_entry(_with_arguments)),
    ]
)
