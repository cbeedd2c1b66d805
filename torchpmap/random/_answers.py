"""What torch's random functions return inside a mapped function, from a key.

``ANSWERS`` is for the functions of torch that are written in C++: what is written in Python draws
with these.  An answer takes the arguments of its function after ``key_of``, which gives the next
key, and raises if a generator was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import batched_levels
from torchpmap.random._choices import permutation
from torchpmap.random._continuous import normal, uniform
from torchpmap.random._integers import bernoulli, randint
from torchpmap.random._samples import (
    cauchy,
    dirichlet,
    exponential,
    gamma,
    geometric,
    picks,
    poisson,
    truncated_normal,
)


class KeyOf(Protocol):
    """Gives the key of a draw."""

    def __call__(self, generator: Any = None) -> torch.Tensor: ...


_Sample = Callable[..., torch.Tensor]
_Answer = Callable[..., Any]


def _normal(key: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        parts = normal(key, (*shape, 2), dtype.to_real()) * 0.5**0.5
        return torch.view_as_complex(parts)
    return normal(key, shape, dtype)


def _unit(key: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(uniform(key, (*shape, 2), dtype.to_real()))
    return uniform(key, shape, dtype)


# -- new tensors -----------------------------------------------------------------------------------


def _new(sample: _Sample) -> _Answer:
    """``sample(key, ...)``, with the options of torch that do not affect the numbers."""

    def answer(
        key_of: KeyOf,
        *args: Any,
        generator: Any = None,
        device: Any = None,
        out: torch.Tensor | None = None,
        requires_grad: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        for name in ("layout", "pin_memory", "memory_format"):
            options.pop(name, None)
        value = sample(key_of(generator), *args, **options)
        if device is not None:
            value = value.to(device)
        if out is not None:
            return out.copy_(value)
        return value.requires_grad_() if requires_grad else value

    return answer


def _factory(sample: _Sample) -> _Answer:
    def drawn(key: Any, *sizes: Any, size: Any = None, dtype: Any = None) -> torch.Tensor:
        sizes = sizes if size is None else (size,)
        shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        return sample(key, tuple(shape), dtype or torch.get_default_dtype())

    return _new(drawn)


def _like(sample: _Sample) -> _Answer:
    def drawn(key: Any, input: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        return sample(key, tuple(input.shape), dtype or input.dtype)

    return _new(drawn)


def _integers(key: torch.Tensor, shape: Any, dtype: torch.dtype, low: int, high: int) -> Any:
    return randint(key, shape, low, high, torch.int64).to(dtype)


def _randint(key: Any, *args: Any, dtype: Any = None, **named: Any) -> torch.Tensor:
    both = len(args) + len(named) > 2  # low and high
    given = dict(zip(("low", "high", "size") if both else ("high", "size"), args, strict=False))
    given = {"low": 0} | given | named
    return _integers(key, tuple(given["size"]), dtype or torch.int64, given["low"], given["high"])


def _randint_like(
    key: Any, input: torch.Tensor, *args: Any, dtype: Any = None, **named: Any
) -> torch.Tensor:
    return _randint(key, *args, dtype=dtype or input.dtype, size=input.shape, **named)


def _randperm(key: Any, n: int, dtype: Any = None) -> torch.Tensor:
    return permutation(key, n).to(dtype or torch.int64)


def _torch_normal(
    key: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, dtype: Any = None
) -> torch.Tensor:
    parts = [x.detach() for x in (mean, std) if isinstance(x, torch.Tensor)]
    mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
    if size is None:
        size = torch.broadcast_shapes(*(x.shape for x in parts))
    dtype = dtype or (parts[0].dtype if parts else torch.get_default_dtype())
    return _bell(key, tuple(size), dtype, mean, std)


def _torch_bernoulli(key: Any, input: torch.Tensor, p: Any = None) -> torch.Tensor:
    return _coins(key, tuple(input.shape), input.dtype, input.detach() if p is None else p)


def _multinomial(
    key: Any, input: torch.Tensor, num_samples: int, replacement: bool = False
) -> torch.Tensor:
    return picks(key, input.detach(), num_samples, replacement)


def _of_rates(sample: _Sample) -> _Answer:
    """For a function of a tensor that has a parameter of a distribution for each number."""

    def answer(key_of: KeyOf, input: torch.Tensor, generator: Any = None) -> torch.Tensor:
        return sample(key_of(generator), input)

    return answer


# -- in place --------------------------------------------------------------------------------------


def _in_place(name: str, sample: _Sample) -> _Answer:
    """``sample(key, shape, dtype, *args)`` written to the tensor."""

    def answer(key_of: KeyOf, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        key = key_of(options.pop("generator", None))
        with torch.no_grad():
            drawn = sample(key, tuple(x.shape), x.dtype, *args, **options)
        if not batched_levels(drawn) <= batched_levels(x):
            raise RuntimeError(
                f"at {users_line()}: {name} draws other numbers for every row, but the rows of a "
                "device (or of a vmap) share the tensor that it writes to. Make the tensor with "
                "torch.empty inside the function or with torch.empty_like(row), draw a new one "
                "(torch.rand, torch.randn), or give all rows the same numbers with "
                "randomness='same'."
            )
        return x.copy_(drawn)

    return answer


def _random(key: Any, shape: Any, dtype: torch.dtype, *limits: Any, **named: Any) -> Any:
    names = ("from", "to") if len(limits) + len(named) > 1 else ("to",)
    given = dict(zip(names, limits, strict=False)) | named
    low, high = given.get("from", 0), given.get("to")
    if high is None:  # as torch: up to the largest integer that the dtype holds exactly
        is_real = dtype.is_floating_point
        high = 1 + (round(2 / torch.finfo(dtype).eps) if is_real else torch.iinfo(dtype).max)
    return _integers(key, shape, dtype, low, high)


def _coins(key: Any, shape: Any, dtype: torch.dtype, p: Any = 0.5) -> torch.Tensor:
    if isinstance(p, torch.Tensor) and not p.is_floating_point():
        p = p.to(torch.get_default_dtype())
    return bernoulli(key, p if isinstance(p, torch.Tensor) else float(p), shape).to(dtype)


def _between(key: Any, shape: Any, dtype: Any, a: Any = 0.0, b: Any = 1.0, **named: Any) -> Any:
    low, high = named.get("from", a), named.get("to", b)
    return uniform(key, shape, dtype) * (high - low) + low


def _bell(
    key: torch.Tensor, shape: Any, dtype: torch.dtype, mean: Any = 0.0, std: Any = 1.0
) -> torch.Tensor:
    return _normal(key, shape, dtype) * std + mean


def _log_normal(
    key: torch.Tensor, shape: Any, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0
) -> torch.Tensor:
    return _bell(key, shape, dtype, mean, std).exp()


# -- dropout and relatives -------------------------------------------------------------------------


def _dropout(name: str) -> _Answer:
    """``name``: of torch's function; ``feature``: of whole channels, ``alpha``: for SELU."""

    def answer(key_of: KeyOf, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not train or p == 0.0:
            return input
        shape = _channels(input) if "feature" in name else tuple(input.shape)
        keep = bernoulli(key_of(), 1.0 - p, shape).to(input.dtype)
        scale = keep / (1.0 - p) if p < 1.0 else keep * 0.0
        shift: torch.Tensor | None = None
        if "alpha" in name and p < 1.0:
            alpha = 1.7580993408473766  # torch's number: minus the limit of SELU
            slope = ((alpha * alpha * p + 1) * (1 - p)) ** -0.5
            scale, shift = keep * slope, (keep - 1) * (alpha * slope) + alpha * slope * p
        if name.endswith("_"):
            input.mul_(scale)
            return input if shift is None else input.add_(shift)
        return input * scale if shift is None else input * scale + shift

    return answer


def _channels(input: torch.Tensor) -> tuple[int, ...]:
    if input.dim() < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return (*input.shape[:2], *(1,) * (input.dim() - 2))


def _native_dropout(key_of: KeyOf, input: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    keep = bernoulli(key_of(), 1.0 - float(p), tuple(input.shape))
    return input * (keep.to(input.dtype) / (1.0 - p) if p < 1.0 else 0.0), keep


def _rrelu(*, inplace: bool) -> _Answer:
    def answer(
        key_of: KeyOf,
        input: torch.Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        generator: Any = None,
    ) -> torch.Tensor:
        slope: Any = (lower + upper) / 2
        if training:
            slope = uniform(key_of(generator), tuple(input.shape), input.dtype)
            slope = slope * (upper - lower) + lower
        out = torch.where(input > 0, input, input * slope)
        return input.copy_(out) if inplace else out

    return answer


def _attention(
    key_of: KeyOf,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        no = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, no, -math.inf)
    whole = torch.ops.aten._scaled_dot_product_attention_math
    weights = whole(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )[1]
    weights = ANSWERS["dropout"](key_of, weights, dropout_p, True)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return weights @ value


_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_IN_PLACE: dict[str, _Sample] = {
    "uniform_": _between,
    "normal_": _bell,
    "log_normal_": _log_normal,
    "bernoulli_": _coins,
    "exponential_": exponential,
    "cauchy_": cauchy,
    "geometric_": geometric,
    "random_": _random,
}

truncated = _in_place("trunc_normal_", truncated_normal)
"""For ``nn.init.trunc_normal_``, which is a loop written in Python."""

ANSWERS: dict[str, _Answer] = {
    "rand": _factory(_unit),
    "randn": _factory(_normal),
    "rand_like": _like(_unit),
    "randn_like": _like(_normal),
    "randint": _new(_randint),
    "randint_like": _new(_randint_like),
    "randperm": _new(_randperm),
    "normal": _new(_torch_normal),
    "bernoulli": _new(_torch_bernoulli),
    "multinomial": _new(_multinomial),
    "poisson": _of_rates(poisson),
    "_standard_gamma": _of_rates(gamma),
    "_sample_dirichlet": _of_rates(dirichlet),
    "native_dropout": _native_dropout,
    "rrelu": _rrelu(inplace=False),
    "rrelu_": _rrelu(inplace=True),
    "scaled_dot_product_attention": _attention,
    **{name: _in_place(name, sample) for name, sample in _IN_PLACE.items()},
    **{name: _dropout(name) for each in _DROPOUTS for name in (each, f"{each}_")},
}
"""By the name of the function of torch, which is that of the method and of the operation too."""
