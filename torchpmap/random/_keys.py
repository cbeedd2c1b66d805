"""Keys of ``torchpmap.random``, and the bits they stand for: key, split, fold_in and bits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import torch

from torchpmap._base.errors import dtype_name, wrong_dtype
from torchpmap.random._threefry import (
    MASK,
    hashed_counts,
    one_key,
    random_bits,
    sampler,
    static_shape,
    threefry2x32,
)

_WIDTHS = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}


@sampler
def key(
    seed: SupportsIndex | torch.Tensor, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Make a random key from a seed.

    key: int -> int64[2]

    A key is an ordinary int64 tensor of two 32-bit words; only the low 32 bits of each count. Keys
    are stacked, mapped over, moved and sent like any other tensor. Using a key twice gives the same
    numbers twice: ``split`` it, or ``fold_in`` a number, to get new ones.

    To and from the keys of JAX::

        torch.tensor(np.asarray(jax.random.key_data(jax_key)), dtype=torch.int64)
        jax.random.wrap_key_data(key.numpy().astype(np.uint32))

    Args:
        seed: any 64-bit integer, or an integer tensor of shape (). As in JAX without 64-bit types
            only its low 32 bits count: -1 and 2**32 - 1 are the same seed, and so are 0 and 2**40.
        device: device of the key and of the numbers drawn with it. By default the device of a
            tensor ``seed``, else torch's default device.

    Returns:
        The key, int64[2].

    Raises:
        TypeError: the seed is not one integer.
        ValueError: the seed has more than 64 bits.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.key(42)
        tensor([ 0, 42])
        >>> tp.random.uniform(tp.random.key(42))
        tensor(0.4887)
    """
    if isinstance(seed, torch.Tensor):
        low = _integer("key", "seed", seed) & MASK
        made = torch.stack([torch.zeros_like(low), low])
        return made if device is None else made.to(device)
    number = _number("key", "a seed", seed)
    if not -(2**63) <= number < 2**63:
        raise ValueError(
            f"key: got seed {number}, expected a 64-bit integer. Only its low 32 bits count: take "
            f"{number} % 2**32."
        )
    return torch.tensor([0, number & MASK], dtype=torch.int64, device=device)


PRNGKey = key
"""JAX's older name of ``key``."""


@sampler
def split(key: torch.Tensor, num: int | Sequence[int] = 2) -> torch.Tensor:
    """Derive new keys from a key; the old one should not be used again.

    split: int64[2] -> int64[*num, 2]

    Args:
        num: how many new keys, or the shape of an array of them.

    Returns:
        The new keys, stacked; they unpack: ``key, subkey = split(key)``.

    Raises:
        TypeError: ``num`` is not an int or a tuple of ints, or ``key`` is not a key.
        ValueError: ``num`` is negative, or there is more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.split(tp.random.key(0))
        tensor([[1797259609, 2579123966],
                [ 928981903, 3453687069]])
        >>> keys = tp.random.split(tp.random.key(0), 4)
        >>> draw = tp.pmap(lambda key: tp.random.randint(key, (), 0, 100))
        >>> draw(keys).tolist()
        [91, 22, 59, 67]
    """
    words = one_key("split", key)
    if isinstance(num, Sequence):
        shape = static_shape("split", num)
    else:
        try:
            shape = (operator.index(num),)
        except TypeError:
            raise TypeError(
                f"split: got num={num!r}, expected an int or a tuple of ints."
            ) from None
    if any(size < 0 for size in shape):
        raise ValueError(f"split: got num={num}, expected the number of keys, 0 or more.")
    return torch.stack(hashed_counts(words, shape), -1)


@sampler
def fold_in(key: torch.Tensor, data: SupportsIndex | torch.Tensor) -> torch.Tensor:
    """Derive the key that belongs to a number: a step, a layer, or the index of a device.

    fold_in: (int64[2], int) -> int64[2]

    Inside a mapped function ``fold_in(key, axis_index("i"))`` gives every device a key of its own.
    It depends on nothing but ``key`` and the index: not on how many devices there are.

    Args:
        data: an int from 0 to 2**32 - 1, or an integer tensor of shape (), of which the low 32 bits
            count.

    Returns:
        The new key.

    Raises:
        TypeError: ``data`` is not one integer, or ``key`` is not a key.
        ValueError: ``data`` is out of range, or there is more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> key = tp.random.key(0)
        >>> tp.random.fold_in(key, 1)
        tensor([ 928981903, 3453687069])
        >>> def draw(x, key):
        ...     return x + tp.random.normal(tp.random.fold_in(key, tp.axis_index("i")))
        >>> tp.pmap(draw, "i", in_axes=(0, None))(torch.zeros(4), key).cpu()
        tensor([ 1.0040, -2.4425,  1.2956, -0.6219])
    """
    words = one_key("fold_in", key)
    if isinstance(data, torch.Tensor):
        low = _integer("fold_in", "data", data) & MASK
        return torch.stack(threefry2x32(words, (torch.zeros_like(low), low)))
    number = _number("fold_in", "data", data)
    if not 0 <= number <= MASK:
        raise ValueError(
            f"fold_in: got data {number}, expected 0 to 2**32 - 1. Fold in a larger number piece "
            "by piece."
        )
    zero = torch.zeros_like(words[0])
    return torch.stack(threefry2x32(words, (zero, zero + number)))


@sampler
def bits(
    key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.uint32
) -> torch.Tensor:
    """Draw integers all of whose bits are random.

    bits: int64[2] -> uint[*shape]

    Args:
        dtype: uint8, uint16, uint32 or uint64. torch has few operations on the last three: convert
            with ``.to(torch.int64)`` to compute with them.

    Returns:
        The numbers, equally likely from 0 to the largest of the dtype.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: the dtype is not an unsigned integer, a negative size, or more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.bits(tp.random.key(0), (3,)).tolist()
        [4070199207, 4202968722, 1427181096]
    """
    words = one_key("bits", key)
    if dtype not in _WIDTHS:
        raise wrong_dtype("bits", dtype, "uint8, uint16, uint32 or uint64", ValueError)
    return random_bits(words, _WIDTHS[dtype], static_shape("bits", shape)).to(dtype)


def _number(function: str, name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        got = f"{function}: got {name} of type {type(value).__name__}"
        raise TypeError(f"{got}, expected an int or an integer tensor.") from None


def _integer(function: str, name: str, value: torch.Tensor) -> torch.Tensor:
    """``value`` in int64: one integer."""
    if value.is_floating_point() or value.is_complex():
        raise TypeError(
            f"{function}: got {name} of dtype {dtype_name(value.dtype)}, expected an int "
            "or an integer tensor."
        )
    if value.dim():
        raise TypeError(
            f"{function}: got {name} of shape {tuple(value.shape)}, expected one number, of shape "
            f"(). Map the function over the numbers with torchpmap.vmap."
        )
    return value.to(torch.int64)
