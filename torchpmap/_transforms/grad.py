"""``grad`` and ``value_and_grad`` with JAX's arguments and result order, on ``torch.func``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np
import torch

from torchpmap._base.arrays import for_torch
from torchpmap._base.boundary import outside_graphs
from torchpmap._base.errors import check_array, dtype_name, kind_of
from torchpmap._base.pytree import flatten, replaced
from torchpmap._collectives.operands import AxisName, resolve
from torchpmap._collectives.reduce import pmean
from torchpmap._collectives.varying import NONE, axes_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_X = TypeVar("_X")
_Aux = TypeVar("_Aux")


@overload
def grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[_X, _P], Any],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    mean_over: AxisName = (),
) -> Callable[Concatenate[_X, _P], _X]: ...
@overload
def grad(
    fun: Callable[Concatenate[_X, _P], tuple[Any, _Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    mean_over: AxisName = (),
) -> Callable[Concatenate[_X, _P], tuple[_X, _Aux]]: ...
@overload
def grad(
    fun: Callable[_P, Any],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    *,
    mean_over: AxisName = (),
) -> Callable[_P, Any]: ...
@outside_graphs
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    mean_over: AxisName = (),
) -> Callable[..., Any]:
    """Return a function that computes the gradient of ``fun``.

    grad: (fun: (*args) -> float[]) -> (*args) -> gradient, with the structure of the argument

    Inside a mapped function the gradient is that of the *sum* of all devices' results, because the
    transpose of psum is psum: on n devices, ``grad`` of ``psum(loss)`` is n times the gradient of
    the device's own loss, and ``grad`` of ``pmean(loss)`` is the gradient of the own loss alone.
    For weights that all devices share, pass ``mean_over`` to get the gradient of the mean.  Inside
    a ``shard_map`` (with ``check_vma=True``) the gradient of what devices share is the sum of
    theirs, and that of ``pmean(loss)`` is the gradient of the mean.

    Args:
        fun: returns a real scalar, or with ``has_aux`` a pair (scalar, anything).
        argnums: position of the argument, or positions of the arguments, to differentiate; each a
            pytree of floating-point or complex tensors. Python floats become tensors. Other
            arguments, and all keyword arguments, pass through.
        has_aux: whether ``fun`` returns a pair.
        mean_over: names of mapped axes along which the arguments are the same; the gradient is then
            that of the mean, over these axes, of what ``fun`` returns, whether or not ``fun``
            averages itself.

    Returns:
        A function of the same arguments that returns the gradient, a tuple of gradients where
        ``argnums`` is a sequence; with ``has_aux`` the pair (gradient, aux).

    Raises:
        TypeError: an argument is not differentiable, or the result is not a real scalar.
        ValueError: inside a ``shard_map``, an axis of ``mean_over`` cuts an argument, and what
            ``fun`` returns differs along it.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.grad(lambda w, x: w * x**2, argnums=1)(2.0, 3.0)
        tensor(12.)
        >>> f = tp.pmap(tp.grad(lambda x: tp.psum(x**2, "i")), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [0.0, 8.0, 16.0, 24.0]
        >>> mean = tp.grad(lambda w, x: tp.pmean(w * x, "i"), mean_over="i")
        >>> tp.pmap(mean, "i", in_axes=(None, 0))(torch.tensor(2.0), torch.arange(4.0)).tolist()
        [1.5, 1.5, 1.5, 1.5]

    Source: jax.grad; checked in tests/transforms/test_grad.py.
    """
    both = value_and_grad(fun, argnums, has_aux, mean_over=mean_over)

    @outside_graphs
    @functools.wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[_X, _P], _R],
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    *,
    mean_over: AxisName = (),
) -> Callable[Concatenate[_X, _P], tuple[_R, _X]]: ...
@overload
def value_and_grad(
    fun: Callable[_P, _R],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    *,
    mean_over: AxisName = (),
) -> Callable[_P, tuple[_R, Any]]: ...
@outside_graphs
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    mean_over: AxisName = (),
) -> Callable[..., Any]:
    """Return a function that computes ``fun`` and its gradient.

    value_and_grad: (fun: (*args) -> float[]) -> (*args) -> (value, gradient)

    Args:
        fun: returns a real scalar, or with ``has_aux`` a pair (scalar, anything).
        argnums: as for ``grad``.
        has_aux: whether ``fun`` returns a pair.
        mean_over: as for ``grad``; the value is the mean, too (aux is not averaged).

    Returns:
        A function of the same arguments that returns the pair (value, gradient); with ``has_aux``
        the pair ((value, aux), gradient).

    Raises:
        TypeError: an argument is not differentiable, or the result is not a real scalar.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.value_and_grad(lambda x: x**3)(2.0)
        (tensor(8.), tensor(12.))

    Source: jax.value_and_grad, whose order is (value, gradient) where torch.func.grad_and_value has
        (gradient, value); checked in tests/transforms/test_grad.py.
    """
    single = not isinstance(argnums, Sequence)
    positions = [
        operator.index(k) for k in (argnums if isinstance(argnums, Sequence) else [argnums])
    ]

    @outside_graphs
    @functools.wraps(fun)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        where = _places(positions, len(args))
        leaves, structure = flatten(tuple(args[k] for k in where))

        shared, own = _split(mean_over)

        def of_leaves(inputs: list[Any]) -> Any:
            full = list(args)
            for k, argument in zip(where, structure.unflatten(inputs), strict=True):
                full[k] = argument
            return _mean(fun(*full, **kwargs), shared, leaves, has_aux)

        grads, value, aux = _differentiate(of_leaves, leaves, has_aux)
        if own:
            # each device has a gradient of the sum; their mean is the gradient of the mean
            value, grads = pmean((value, grads), own)
        gradients = structure.unflatten(grads)
        return (value, aux) if has_aux else value, gradients[0] if single else gradients

    return value_and_gradient


def _differentiate(
    fun: Callable[[list[Any]], Any], leaves: list[Any], has_aux: bool
) -> tuple[list[Any], torch.Tensor, Any]:
    """Gradients of ``fun(leaves)``, its value, and aux or None."""
    # None is an empty leaf: nothing to differentiate, and None in the gradient.
    given = [i for i, leaf in enumerate(leaves) if leaf is not None]
    aux_leaves, aux_structure = flatten(None)

    def scalar_fun(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        nonlocal aux_leaves, aux_structure
        result = fun(replaced(leaves, given, inputs))
        value, aux = _pair(result) if has_aux else (result, None)
        aux_leaves, aux_structure = flatten(aux)
        # torch.func lets only tensors out of the differentiated function.
        return _scalar(value), [leaf for leaf in aux_leaves if isinstance(leaf, torch.Tensor)]

    inputs = [_differentiable(leaves[i]) for i in given]
    grads, (value, aux_tensors) = torch.func.grad_and_value(scalar_fun, has_aux=True)(inputs)
    tensors = [i for i, leaf in enumerate(aux_leaves) if isinstance(leaf, torch.Tensor)]
    aux = aux_structure.unflatten(replaced(aux_leaves, tensors, aux_tensors))
    return replaced(leaves, given, grads), value, aux


def _split(mean_over: AxisName) -> tuple[tuple[Hashable, ...], ...]:
    """The names of axes over which gradients are summed by themselves, and the others."""
    names = tuple(mean_over) if isinstance(mean_over, tuple | list) else (mean_over,)
    found: tuple[list[Hashable], list[Hashable]] = [], []
    for name in names:
        found[not _tracked(name)].append(name)
    return tuple(found[0]), tuple(found[1])


def _tracked(name: Hashable) -> frozenset[Any]:
    return NONE.union(*(axis.tracked for axis in resolve("grad", name).axes))


def _mean(result: Any, over: tuple[Hashable, ...], leaves: list[Any], has_aux: bool) -> Any:
    """What a function of ``leaves`` returned, with the mean of its value over some axes."""
    value, aux = _pair(result) if has_aux else (result, None)
    value = _scalar(value) if over else value
    for name in over:
        tracked = _tracked(name)
        if tracked.isdisjoint(axes_of(value)):
            continue  # the same along the axis: it is its own mean
        for x in leaves:
            if isinstance(x, torch.Tensor) and not tracked.isdisjoint(axes_of(x)):
                raise ValueError(
                    f"grad: mean_over has {name!r}, but an argument of shape {list(x.shape)} "
                    f"varies along {name!r}: it is cut over the axis, or computed from what is, so "
                    "that each device has the gradient of its own part. Leave the axis out of "
                    "mean_over, and take the mean of the loss (tp.pmean)."
                )
        value = pmean(value, name)
    return (value, aux) if has_aux else value


def _places(argnums: list[int], count: int) -> list[int]:
    for argnum in argnums:
        if not -count <= argnum < count:
            needed = argnum + 1 if argnum >= 0 else -argnum
            told = argnums[0] if len(argnums) == 1 else argnums
            raise TypeError(
                f"differentiating with respect to argnums={told} requires at least {needed} "
                "positional arguments to be passed by the caller, but got only "
                f"{count} positional arguments."
            )
    places = [argnum % count for argnum in argnums]
    if len(set(places)) < len(places):
        raise TypeError(f"argnums={argnums} must name each of {count} arguments once.")
    return places


def _differentiable(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, (torch.Tensor, np.ndarray, np.generic, bool, int, float, complex)):
        raise TypeError(
            f"grad requires tensors, numpy arrays or Python numbers, but got {leaf!r} of type "
            f"{type(leaf).__name__}."
        )
    check_array(leaf, "grad: an argument")
    tensor = leaf if isinstance(leaf, torch.Tensor) else torch.tensor(for_torch(leaf))
    if not tensor.is_floating_point() and not tensor.is_complex():
        raise TypeError(
            "grad requires real- or complex-valued inputs (input dtype that is a sub-dtype of "
            f"float or complex), but got {dtype_name(tensor.dtype)}."
        )
    return tensor


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple | list) and len(result) == 2:
        value, aux = result
        return value, aux
    raise TypeError(
        "expected function with aux output to return a two-element tuple, but got type "
        f"{type(result)} with value "
        f"{_kinds(result)}"
    )


def _kinds(value: Any) -> str:
    """A tree with the kinds of its tensors, whose values a message cannot show."""
    leaves, structure = flatten(value)
    return structure.shown(
        kind_of(x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves
    )


def _scalar(value: Any) -> torch.Tensor:
    if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
        check_array(value, "grad: the result")
        value = torch.tensor(for_torch(value))
    if not isinstance(value, torch.Tensor):
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        hint = " Did you mean has_aux=True, for a pair (value, aux)?" if is_pair else ""
        raise TypeError(
            f"Gradient only defined for scalar-output functions. Output was {_kinds(value)}.{hint}"
        )
    if value.dim():
        raise TypeError(
            "Gradient only defined for scalar-output functions. Output had shape: "
            f"{tuple(value.shape)}."
        )
    if not value.is_floating_point():
        raise TypeError(
            "grad requires real-valued outputs (output dtype that is a sub-dtype of float), but "
            f"got {dtype_name(value.dtype)}."
        )
    return value
