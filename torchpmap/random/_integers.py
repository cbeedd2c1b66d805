"""Integers and coins drawn with a key: bernoulli, rademacher and randint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchpmap._base.errors import dtype_name, wrong_dtype
from torchpmap.random._continuous import as_tensor, check_broadcast
from torchpmap.random._threefry import (
    MASK,
    Words,
    hashed_counts,
    one_key,
    random_bits,
    rounded,
    sampler,
    static_shape,
    unit_interval,
)

INTEGERS = (int, np.integer)
"""Types of integers that are not tensors."""
_MIN64, _MAX64 = -(2**63), 2**63 - 1
_RANGES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@sampler
def bernoulli(
    key: torch.Tensor, p: float | torch.Tensor = 0.5, shape: int | Sequence[int] | None = None
) -> torch.Tensor:
    """Draw True with probability ``p``.

    bernoulli: (int64[2], float) -> bool[*shape]

    Args:
        p: the probability; a number, or a floating-point tensor that broadcasts to ``shape``. The
            values of a tensor are not checked.
        shape: shape of the result; by default that of ``p``.

    Returns:
        The draws, exactly those of JAX.

    Raises:
        TypeError: ``p`` is not floating-point, or ``key`` is not a key.
        ValueError: the number ``p`` is not between 0 and 1, ``p`` does not broadcast to ``shape``,
            or there is more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.bernoulli(tp.random.key(0), 0.9, (4,))
        tensor([False, False,  True,  True])
    """
    words = one_key("bernoulli", key)
    if isinstance(p, float):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"bernoulli: got p={p}, expected a probability between 0 and 1.")
        chances: Any = rounded(p, torch.float32)
        given, dtype = torch.Size(), torch.float32
    else:
        chances = as_tensor(p, key)
        given, dtype = chances.shape, chances.dtype
        if isinstance(p, int) or not dtype.is_floating_point:
            raise TypeError(
                f"bernoulli: got p of type {type(p).__name__}, expected a float or a "
                "floating-point tensor."
            )
    shape = static_shape("bernoulli", given if shape is None else shape)
    check_broadcast("bernoulli", "p", given, shape)
    return unit_interval(words, shape, dtype) < chances


@sampler
def rademacher(
    key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Draw 1 and -1, equally likely.

    rademacher: int64[2] -> number[*shape]

    Args:
        dtype: a signed dtype.

    Returns:
        The signs, exactly those of JAX without 64-bit types, in every dtype.

    Raises:
        TypeError: the dtype has no sign, or ``key`` is not a key.
        ValueError: a negative size, or more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.rademacher(tp.random.key(1), (5,)).tolist()
        [1, -1, 1, 1, -1]
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_signed):
        raise wrong_dtype("rademacher", dtype, "one that can hold -1")
    one_key("rademacher", key)
    shape = static_shape("rademacher", shape)
    return 2 * bernoulli(key, 0.5, shape).to(dtype) - 1


@sampler
def randint(
    key: torch.Tensor,
    shape: int | Sequence[int],
    minval: int | torch.Tensor,
    maxval: int | torch.Tensor,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """Draw integers from minval to maxval - 1.

    randint: (int64[2], int, int) -> int[*shape]

    Each draw is a remainder of 64 random bits (int64: 128), so that all integers are equally likely
    up to one part in 2**32 in the worst case.

    Args:
        minval: the smallest integer; a number, or an integer tensor that broadcasts to ``shape``.
        maxval: one more than the largest, likewise. Both bounds are clipped to the range of the
            dtype. Where a tensor ``maxval`` is not above ``minval``, the result is ``minval``.
        dtype: int8, int16, int32, int64 or uint8. As in JAX, all but int64 give the same draws.

    Returns:
        The integers, exactly those of JAX.

    Raises:
        TypeError: the dtype is another, a bound is not an integer, or ``key`` is not a key.
        ValueError: the number ``minval`` is not below ``maxval``, bounds that do not broadcast to
            ``shape``, or more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.randint(tp.random.key(0), (6,), 1, 7).tolist()
        [2, 1, 3, 2, 6, 4]
    """
    words = one_key("randint", key)
    if dtype not in _RANGES:
        raise wrong_dtype("randint", dtype, "int8, int16, int32, int64 or uint8")
    shape = static_shape("randint", shape)
    if isinstance(minval, INTEGERS) and isinstance(maxval, INTEGERS) and minval >= maxval:
        raise ValueError(
            f"randint: got minval={minval} and maxval={maxval}, expected minval < maxval."
        )
    info = torch.iinfo(dtype)
    low, _ = _clipped("minval", minval, key, shape, info)
    high, is_above = _clipped("maxval", maxval, key, shape, info)
    # A span of 2**64 wraps to 0, which stands for it.
    span = torch.where(high > low, high - low + is_above, 1)
    width = 64 if dtype == torch.int64 else 32
    return (low + _offset(width, words, shape, span)).to(dtype)


def _offset(width: int, key: Words, shape: tuple[int, ...], span: torch.Tensor) -> torch.Tensor:
    """The remainder by ``span`` of twice ``width`` random bits, in numbers modulo 2**width."""
    remainder = _remainder64 if width == 64 else torch.remainder
    mask = -1 if width == 64 else MASK  # a product that overflows int64 keeps its low bits
    first, second = hashed_counts(key, (2,))
    higher, lower = (
        remainder(random_bits((first[i], second[i]), width, shape), span) for i in (0, 1)
    )
    power = remainder(torch.full_like(span, 2 ** (width // 2)), span)
    power = remainder(power * power & mask, span)
    return remainder(higher * power + lower & mask, span)


def _remainder64(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Of unsigned 64-bit numbers held in int64; a divisor 0 means 2**64."""
    small = torch.where(divisor > 0, divisor, 1)
    quotient = ((x >> 1) & _MAX64) // small << 1
    rest = x - quotient * small  # below 2 * divisor
    rest = torch.where(_not_below(rest, small), rest - small, rest)
    return torch.where(divisor > 0, rest, torch.where(_not_below(x, divisor), x - divisor, x))


def _not_below(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Comparison as unsigned 64-bit numbers."""
    return (x ^ _MIN64) >= (y ^ _MIN64)


def _clipped(
    name: str, value: Any, key: torch.Tensor, shape: tuple[int, ...], info: torch.iinfo
) -> tuple[torch.Tensor, torch.Tensor]:
    """A bound clipped to the range of the dtype, in int64, and whether it was above the range."""
    if isinstance(value, INTEGERS):
        held = min(max(int(value), info.min), info.max)
        found = torch.full((), held, dtype=torch.int64, device=key.device)
        return found, torch.full_like(found, int(value) > info.max)
    tensor = as_tensor(value, key)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.uint64:
        raise TypeError(
            f"randint: got {name} of dtype {dtype_name(tensor.dtype)}, expected an integer, at "
            "most int64."
        )
    check_broadcast("randint", name, tensor.shape, shape)
    wide = tensor.to(torch.int64)
    return wide.clamp(info.min, info.max), (wide > info.max).to(torch.int64)
