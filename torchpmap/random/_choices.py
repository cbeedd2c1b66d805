"""Picks and orders drawn with a key: permutation, choice and categorical."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchpmap.random._continuous import (
    as_tensor,
    check_broadcast,
    check_dtype,
    gumbel,
    uniform,
)
from torchpmap.random._integers import INTEGERS, randint
from torchpmap.random._threefry import (
    MASK,
    Words,
    hashed_counts,
    one_key,
    random_bits,
    sampler,
    static_shape,
)


@sampler
def permutation(
    key: torch.Tensor, x: int | torch.Tensor, axis: int = 0, independent: bool = False
) -> torch.Tensor:
    """Shuffle the numbers 0 .. x - 1, or a tensor along one dim.

    permutation: (int64[2], int) -> int64[x]
    permutation: (int64[2], any[*s]) -> any[*s]
    Backward: the inverse permutation.

    Args:
        x: how many numbers, or a tensor of at least one dim.
        axis: the dim along which rows change places.
        independent: whether each line along the dim is shuffled by itself, instead of all alike.

    Returns:
        The shuffled numbers or tensor, exactly as JAX shuffles.

    Raises:
        TypeError: ``x`` has no dim to shuffle, or ``key`` is not a key.
        ValueError: ``x`` is negative, or there is more than one key.
        IndexError: ``axis`` is not a dim of ``x``.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.permutation(tp.random.key(0), 6).tolist()
        [0, 1, 5, 4, 3, 2]
    """
    words = one_key("permutation", key)
    if isinstance(x, INTEGERS):
        if x < 0:
            raise ValueError(f"permutation: got x={x}, expected a number of at least 0.")
        return _shuffled(words, torch.arange(x, device=key.device), 0)
    given = as_tensor(x, key)
    if given.dim() == 0:
        raise TypeError(
            "permutation: got x of shape (), expected an int (not a tensor: the shape of the "
            "result depends on it) or a tensor of at least one dim."
        )
    axis = _dim("permutation", axis, given)
    if independent or given.dim() == 1:
        return _shuffled(words, given, axis)
    order = _shuffled(words, torch.arange(given.shape[axis], device=key.device), 0)
    return given.index_select(axis, order)


@sampler
def choice(
    key: torch.Tensor,
    a: int | torch.Tensor,
    shape: Sequence[int] = (),
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
) -> torch.Tensor:
    """Pick from the numbers 0 .. a - 1, or rows of a tensor.

    choice: (int64[2], int) -> int64[*shape]
    choice: (int64[2], any[n at axis]) -> any[*shape at axis]

    Args:
        a: how many numbers, or a tensor of at least one dim.
        shape: shape of the picks.
        replace: whether the same number or row may be picked again.
        p: the probabilities, a vector of numbers that need not sum to 1; by default all are equal.
            The values of a tensor or array are not checked: with ``replace=False``, at least as
            many as there are picks must be above 0.
        axis: the dim along which ``a`` is picked from.

    Returns:
        The picks, equal to those of JAX; with ``p`` one may differ where rounding decides.

    Raises:
        TypeError: ``a`` has no dim to pick from, ``shape`` is a number, or ``key`` is not a key.
        ValueError: nothing to pick from, more picks than there are without ``replace``, ``p`` of
            the wrong shape or with a negative number in it, or more than one key.
        IndexError: ``axis`` is not a dim of ``a``.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.choice(tp.random.key(0), 10, (4,), replace=False).tolist()
        [0, 1, 8, 5]
        >>> coins = torch.tensor([1.0, 2.0, 5.0])
        >>> tp.random.choice(tp.random.key(0), coins, (4,), p=[0.1, 0.1, 0.8])
        tensor([1., 1., 5., 5.])
    """
    one_key("choice", key)
    if isinstance(shape, INTEGERS):
        raise TypeError(f"choice: got shape {shape}, expected a tuple of sizes: shape=({shape},).")
    shape = static_shape("choice", shape)
    values = None if isinstance(a, INTEGERS) else as_tensor(a, key)
    if values is not None:
        if values.dim() == 0:
            raise TypeError("choice: got a of shape (), expected an int or a tensor with a dim.")
        axis = _dim("choice", axis, values)
    size = int(a) if values is None else values.shape[axis]
    weights = None if p is None else _weights(p, key, size)
    picked = _picked(key, size, math.prod(shape), replace, weights)
    if values is None:
        return picked.reshape(shape)
    rows = values.index_select(axis, picked)
    return rows.reshape((*values.shape[:axis], *shape, *values.shape[axis + 1 :]))


@sampler
def categorical(
    key: torch.Tensor,
    logits: torch.Tensor,
    axis: int = -1,
    shape: int | Sequence[int] | None = None,
    replace: bool = True,
) -> torch.Tensor:
    """Draw categories with probabilities ``softmax(logits)``.

    categorical: (int64[2], float[*s, n]) -> int64[*shape]

    Args:
        logits: floating-point tensor; unnormalised logarithms of the probabilities along ``axis``.
        axis: the dim of the categories.
        shape: shape of the result: that of ``logits`` without ``axis`` (the default), perhaps with
            dims in front of it for further draws.
        replace: whether further draws may repeat a category.

    Returns:
        The categories, equal to those of JAX; one may differ where rounding decides.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: ``logits`` is not floating-point, the shape does not fit, more draws than
            categories without ``replace``, or more than one key.
        IndexError: ``axis`` is not a dim of ``logits``.

    Example:
        >>> import torch, torchpmap as tp
        >>> logits = torch.tensor([0.1, 0.2, 0.7]).log()
        >>> tp.random.categorical(tp.random.key(0), logits, shape=(8,)).tolist()
        [1, 2, 2, 1, 2, 2, 2, 2]
    """
    one_key("categorical", key)
    scores = as_tensor(logits, key)
    check_dtype("categorical", scores.dtype)
    axis = _dim("categorical", axis, scores)
    size, batch = scores.shape[axis], (*scores.shape[:axis], *scores.shape[axis + 1 :])
    shape = static_shape("categorical", batch if shape is None else shape)
    check_broadcast("categorical", "logits, without the categories,", batch, shape)
    prefix = shape[: len(shape) - len(batch)]
    if size == 0:
        raise ValueError("categorical: got no categories, expected at least one along axis.")
    if replace:
        noise_shape = [*shape]
        noise_shape.insert(len(prefix) + axis, size)
        noise = gumbel(key, noise_shape, scores.dtype)
        return (noise + scores).argmax(len(prefix) + axis)
    count = math.prod(prefix)
    if count > size or shape != (*prefix, *batch):
        raise ValueError(
            f"categorical: got shape {shape} without replacement, {count} draws, expected at most "
            f"the {size} categories, and the shape to end in {batch}."
        )
    noisy = (scores + gumbel(key, tuple(scores.shape), scores.dtype)).movedim(axis, -1)
    return _largest(noisy, count).movedim(-1, 0).reshape(shape)


def _shuffled(key: Words, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sort by random bits, often enough that equal bits hardly matter, as JAX does."""
    rounds = math.ceil(3 * math.log(max(1, x.numel())) / math.log(MASK))
    for _ in range(rounds):
        first, second = hashed_counts(key, (2,))
        key = first[0], second[0]
        order = torch.sort(
            random_bits((first[1], second[1]), 32, tuple(x.shape)), dim=dim, stable=True
        ).indices
        x = x.gather(dim, order)
    return x


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest along the last dim; among equals the first, unlike topk."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def _dim(function: str, axis: int, x: torch.Tensor) -> int:
    if not -x.dim() <= axis < x.dim():
        raise IndexError(
            f"{function}: got axis={axis}, expected a dim of a tensor of shape {tuple(x.shape)}."
        )
    return axis % x.dim()


def _picked(
    key: torch.Tensor, size: int, draws: int, replace: bool, weights: torch.Tensor | None
) -> torch.Tensor:
    """int64[draws]: positions below ``size``."""
    if draws == 0:
        return torch.zeros(0, dtype=torch.int64, device=key.device)
    if size <= 0:
        raise ValueError(f"choice: got {draws} draws from nothing, expected at least one to pick.")
    if not replace and draws > size:
        raise ValueError(
            f"choice: got {draws} draws from {size} without replacement, expected at most {size}."
        )
    if weights is None and replace:
        return randint(key, (draws,), 0, size).to(torch.int64)
    if weights is None:
        return permutation(key, size)[:draws]
    if replace:
        cumulative = weights.cumsum(0)
        position = cumulative[-1] * (1 - uniform(key, (draws,), weights.dtype))
        return torch.searchsorted(cumulative, position)
    return _largest(gumbel(key, (size,), weights.dtype) + weights.log(), draws)


def _weights(p: Any, key: torch.Tensor, size: int) -> torch.Tensor:
    weights = as_tensor(p, key)
    if weights.is_complex() or weights.shape != (size,):
        raise ValueError(
            f"choice: got p of shape {tuple(weights.shape)}, expected {size} real numbers, one per "
            f"number or row to pick: shape ({size},)."
        )
    if isinstance(p, list | tuple) and not (min(p) >= 0 and 0 < sum(p) < math.inf):
        raise ValueError(
            f"choice: got p={p}, expected probabilities: numbers of at least 0, not all 0."
        )
    return weights if weights.is_floating_point() else weights.to(torch.float32)
