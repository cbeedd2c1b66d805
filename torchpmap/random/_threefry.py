"""The bits of ``torchpmap.random``: the Threefry-2x32 hash in plain tensor operations.

A key is two 32-bit words, and random bits are the hash of a counter under the key; there is no
state anywhere.  Only arithmetic on integers is used, so that the same numbers come out eagerly,
batched by ``vmap``, traced, compiled, and on every device.

Words are held in int64.  What does not work: uint32, for which torch 2.13 has neither addition, nor
shifts, comparisons, ``%``, ``arange``, ``gather`` or ``index_select``; and int32, whose right shift
copies the sign and whose overflow is undefined in C++.

Sources: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011; the layout
of the counters is that of JAX with ``jax_threefry_partitionable=True``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from inspect import signature
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from torchpmap._base.boundary import boundary
from torchpmap._base.context import assigned
from torchpmap._base.errors import dtype_name

MASK = 0xFFFFFFFF
Words: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Number: TypeAlias = int | float
_P = ParamSpec("_P")
_T = TypeVar("_T")

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

# dtype -> (random bits that are drawn, bits of the stored mantissa)
_PRECISION = {
    torch.bfloat16: (8, 7),
    torch.float16: (16, 10),
    torch.float32: (32, 23),
    torch.float64: (64, 52),
}


def threefry2x32(key: Words, counts: Words) -> Words:
    """The 20-round hash of ``counts`` under ``key``; only the low 32 bits of each word count."""
    is_whole = not is_dynamo_compiling() and _is_whole.get()
    return (_operation if is_whole else _hash)(*key, *counts)


def whole() -> AbstractContextManager[None]:
    """Trace each hash in the block as one operation: tracing its 140 takes 70 ms."""
    return assigned(_is_whole, True)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition of the operation, from which a compiler makes one kernel."""
    return {_operation: _hash}


def _hash(key0: torch.Tensor, key1: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> Words:
    key, counts = (key0, key1), (high, low)
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    x0 = counts[0] + schedule[0]
    x1 = (counts[1] + schedule[1]) & MASK
    for i in range(5):
        for distance in _ROTATIONS[i % 2]:
            # x0 is never masked: it grows by less than 2**32 a step, and only its low bits are
            # used. The product stays below 2**61; with what was shifted out it is a rotation.
            x0 = x0 + x1
            turned = torch.add(x1 >> (32 - distance), x1, alpha=1 << distance)
            x1 = _stored((turned ^ x0) & MASK)
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = (x1 + (schedule[(i + 2) % 3] + (i + 1))) & MASK
    return x0 & MASK, x1


def _stored(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, which Inductor computes once.

    Inductor (torch 2.13) repeats the expression of a value at each of its three uses, unless the
    value is stored; over 20 rounds that is an exponential number of terms, and compiling one draw
    took ten times as long. Taking a strided view of a value makes Inductor store it. All rounds
    still become one kernel without further memory, and elsewhere the view costs next to nothing.
    """
    return x.as_strided(x.shape, x.stride())


def _hash_fake(*words: torch.Tensor) -> Words:
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    return words[0].new_empty(shape), words[0].new_empty(shape)


def _hash_vmap(
    info: Any, dims: tuple[int | None, ...], *words: torch.Tensor
) -> tuple[Words, tuple[int, int]]:
    rank = max(w.dim() - (d is not None) for w, d in zip(words, dims, strict=True))
    batched = []
    for word, dim in zip(words, dims, strict=True):
        if dim is not None:  # [batch, dims that are broadcast]
            word = word.movedim(dim, 0)
            ones = [1] * (rank + 1 - word.dim())
            word = word.reshape(word.shape[0], *ones, *word.shape[1:])
        batched.append(word)
    return _operation(*batched), (0, 0)


_is_whole: ContextVar[bool] = ContextVar("torchpmap_whole_hash", default=False)

_library = torch.library.Library("torchpmap_random", "DEF")
_library.define(
    "threefry2x32(Tensor key0, Tensor key1, Tensor high, Tensor low) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("threefry2x32", _hash, "CompositeExplicitAutograd")
_operation = torch.ops.torchpmap_random.threefry2x32.default
torch.library.register_fake(_operation, _hash_fake, lib=_library)
torch.library.register_vmap(_operation, _hash_vmap, lib=_library)


def hashed_counts(key: Words, shape: tuple[int, ...]) -> Words:
    """The hash of 0, 1, 2, ... in row-major order: two words of the given shape."""
    size = math.prod(shape)
    low = torch.arange(size, dtype=torch.int64, device=key[0].device).reshape(shape)
    if size <= MASK + 1:
        return threefry2x32(key, (torch.zeros_like(key[0]), low))
    return threefry2x32(key, (low >> 32, low & MASK))


def random_bits(key: Words, width: int, shape: tuple[int, ...]) -> torch.Tensor:
    """int64[*shape] whose low ``width`` bits are random; the others are 0."""
    high, low = hashed_counts(key, shape)
    if width == 64:
        return (high << 32) | low
    mixed = high ^ low
    return mixed if width == 32 else mixed & ((1 << width) - 1)


def unit_interval(key: Words, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Multiples of 2**-mantissa in [0, 1), all equally likely."""
    width, mantissa = _PRECISION[dtype]
    if width == 64:
        high, low = hashed_counts(key, shape)
        leading = (high << (mantissa - 32)) | (low >> (64 - mantissa))
    else:
        leading = random_bits(key, width, shape) >> (width - mantissa)
    return leading.to(dtype) * 2.0**-mantissa


def rounded(value: Number, dtype: torch.dtype) -> float:
    """The number of the dtype nearest to ``value``, by arithmetic on Python numbers alone.

    A constant must not depend on whether a compiler keeps the rounding of a tensor in between.
    """
    value = float(value)
    if not math.isfinite(value) or dtype == torch.float64:
        return value
    bits = _PRECISION[dtype][1] + 1
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def one_key(function: str, key: torch.Tensor) -> Words:
    """The two words of ``key``; raises unless it is one key."""
    example = "torchpmap.random.key(0)"
    if not isinstance(key, torch.Tensor):
        raise TypeError(
            f"{function}: got a key of type {type(key).__name__}, expected a tensor. Make a key "
            f"from a seed: {example}."
        )
    if key.dtype != torch.int64:
        raise TypeError(
            f"{function}: got a key of dtype {dtype_name(key.dtype)}, expected int64. Make a key "
            f"with {example}, or convert the two 32-bit words of jax.random.key_data with "
            ".to(torch.int64)."
        )
    if key.shape != (2,):
        shape = tuple(key.shape)
        batch = len(shape) > 1 and shape[-1] == 2
        raise ValueError(
            f"{function}: got {'a batch of keys' if batch else 'a key'} of shape {shape}, expected "
            + (
                "one key, of shape (2,). Map the function over the batch: "
                f"torchpmap.vmap(lambda key: torchpmap.random.{function}(key, ...))(keys)."
                if batch
                else f"shape (2,). Make a key with {example}."
            )
        )
    return key[0], key[1]


def static_shape(function: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple of sizes; a number is that of the only dim."""
    sizes = tuple(shape) if isinstance(shape, Sequence | np.ndarray) else (shape,)
    if not all(isinstance(size, int | np.integer | torch.SymInt) for size in sizes):
        raise TypeError(f"{function}: got shape {shape!r}, expected a tuple of ints.")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{function}: got shape {sizes}, expected no negative size.")
    return sizes


# -- what the public functions share ---------------------------------------------------------------

_SHARED = {
    "key": "the key.",
    "shape": "shape of the result.",
    "dtype": "float32, float64, float16 or bfloat16.",
}


def sampler(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A boundary; its docstring gets the arguments that it does not describe, and the source."""
    doc, name = function.__doc__ or "", function.__name__
    given = signature(function).parameters
    left = (k for k in _SHARED if k in given and f"\n        {k}: " not in doc)
    args = "".join(f"        {k}: {_SHARED[k]}\n" for k in left)
    doc = doc.replace("    Args:\n", f"    Args:\n{args}", 1)
    source = f"    Source: jax.random.{name}; checked in tests/random/test_random.py.\n    "
    function.__doc__ = f"{doc.rstrip()}\n\n{source}"
    return boundary(function)
