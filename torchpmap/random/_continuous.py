"""Real numbers drawn with a key: uniform, normal, and distributions computed from them.

JAX's CPU and GPU compilers contract ``u * span + low`` into one fused multiply-add, which rounds
once; here the exact product is computed in float64.  In bfloat16 both JAX and this module round
twice, and so does JAX in float16 on a CPU without arithmetic for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from torchpmap._base.errors import check_array, wrong_dtype
from torchpmap.random._threefry import (
    Number,
    Words,
    one_key,
    rounded,
    sampler,
    static_shape,
    unit_interval,
)

Limit: TypeAlias = Number | torch.Tensor

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@sampler
def uniform(
    key: torch.Tensor,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    minval: Limit = 0.0,
    maxval: Limit = 1.0,
) -> torch.Tensor:
    """Draw numbers that are uniform in [minval, maxval).

    uniform: int64[2] -> float[*shape]
    Backward: the derivatives of ``minval + u * (maxval - minval)``.

    Args:
        minval: lower bound; a number, or a tensor that broadcasts to ``shape``.
        maxval: upper bound, likewise.

    Returns:
        The numbers, bit by bit those of JAX. Between bounds other than 0 and 1, float64 may differ
        by one rounding, and so may bfloat16 where Inductor compiles it, and float16 where JAX runs
        on a CPU without arithmetic for it.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: the dtype is not a float, bounds that do not broadcast to ``shape``, or more
            than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.uniform(tp.random.key(0), (3,))
        tensor([0.9477, 0.9786, 0.3323])
    """
    return _unit("uniform", key, shape, dtype, minval, maxval)


@sampler
def truncated_normal(
    key: torch.Tensor,
    lower: Limit,
    upper: Limit,
    shape: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Draw from the normal distribution of mean 0 and variance 1, limited to (lower, upper).

    truncated_normal: (int64[2], float, float) -> float[*shape]
    Backward: into ``lower`` and ``upper``.

    Args:
        lower: lower limit; a number, or a tensor that broadcasts to ``shape``.
        upper: upper limit, likewise.
        shape: shape of the result; by default that of the limits, broadcast.
        dtype: float32, float64, float16 or bfloat16.

    Returns:
        The numbers, those of JAX but for rounding: in float32 within 3e-6 for limits up to 2, and
        3e-5 up to 3. The farther out both limits are, the fewer different numbers there are
        between them.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: the dtype is not a float, ``lower`` is not below ``upper`` (numbers only),
            limits that do not broadcast to ``shape``, or more than one key.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.truncated_normal(tp.random.key(0), -2.0, 2.0, (3,))
        tensor([ 1.4560,  1.7147, -0.4127])
    """
    words = one_key("truncated_normal", key)
    check_dtype("truncated_normal", dtype)
    if isinstance(lower, Number) and isinstance(upper, Number) and not lower < upper:
        raise ValueError(
            f"truncated_normal: got lower={lower} and upper={upper}, expected lower < upper."
        )
    below, above = (_in_dtype(x, key, dtype) for x in (lower, upper))
    if shape is None:
        shape = torch.broadcast_shapes(below.shape, above.shape)
    shape = static_shape("truncated_normal", shape)
    sqrt2 = rounded(math.sqrt(2), dtype)
    ends = [torch.erf(limit / sqrt2) for limit in (below, above)]
    u = between("truncated_normal", words, shape, dtype, *ends)
    # The derivative of the polynomial is inaccurate. That of torch.erfinv is used instead, where it
    # exists (rounding may have made u 1 or -1).
    value, inside = u.detach(), u.detach().abs() < 1
    exact = torch.erfinv(torch.where(inside, u, 0.0))
    drawn = _erfinv(value) + (exact - exact.detach())
    drawn = torch.where(inside, drawn, value * math.inf) * sqrt2
    # Rounding must not leave the open interval.
    infinity = torch.full_like(below, math.inf)
    first = torch.nextafter(below.detach(), infinity)
    last = torch.nextafter(above.detach(), -infinity)
    return torch.minimum(torch.maximum(drawn, first), last)


def _in_dtype(limit: Limit, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(limit, Number):
        return torch.tensor(rounded(limit, dtype), dtype=dtype, device=key.device)
    return as_tensor(limit, key).to(dtype)


class _Sampler(Protocol):
    def __call__(
        self, key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32
    ) -> torch.Tensor: ...


_RAISES = """Raises:
        TypeError: ``key`` is not a key.
        ValueError: the dtype is not a float, a negative size, or more than one key.

    Example:"""


def _distribution(
    uniform: Callable[[str, torch.Tensor, int | Sequence[int], torch.dtype], torch.Tensor],
) -> Callable[[Callable[[torch.Tensor], torch.Tensor]], _Sampler]:
    """Make a sampler of what turns uniform numbers into its numbers; its docstring gets the parts
    that these samplers share.
    """

    def made(turned: Callable[[torch.Tensor], torch.Tensor]) -> _Sampler:
        name = turned.__name__

        def draw(
            key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32
        ) -> torch.Tensor:
            return turned(uniform(name, key, shape, dtype))

        draw.__name__, draw.__qualname__ = name, name
        first, *rest = (turned.__doc__ or "").split("\n", 1)
        whole = "\n".join([first, "", f"    {name}: int64[2] -> float[*shape]", *rest])
        whole = whole.replace("Returns:", "Args:\n\n    Returns:").replace("Example:", _RAISES)
        draw.__doc__ = whole
        return sampler(draw)

    return made


def _unit(
    function: str,
    key: torch.Tensor,
    shape: int | Sequence[int],
    dtype: torch.dtype,
    minval: Limit = 0.0,
    maxval: Limit = 1.0,
) -> torch.Tensor:
    words = one_key(function, key)
    check_dtype(function, dtype)
    return between(function, words, static_shape(function, shape), dtype, minval, maxval)


def _signed(
    function: str, key: torch.Tensor, shape: int | Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Uniform numbers between -1 and 1, of which neither occurs."""
    check_dtype(function, dtype)
    return _unit(function, key, shape, dtype, -1.0 + torch.finfo(dtype).eps / 2)


def _positive(
    function: str, key: torch.Tensor, shape: int | Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Uniform numbers that are never 0 but at least the smallest normal number."""
    # JAX adds that number to all of them, but XLA folds the addition away, as float16 shows.
    return _unit(function, key, shape, dtype).clamp_min(torch.finfo(dtype).tiny)


@_distribution(_signed)
def normal(u: torch.Tensor) -> torch.Tensor:
    """Draw from the normal distribution of mean 0 and variance 1.

    ``mean + std * normal(key, shape)`` is differentiable in ``mean`` and ``std``.

    Returns:
        The numbers, those of JAX but for rounding: in float32 within 4 units in the last place, in
        float64 within a relative 2e-12. In float16 and bfloat16 they are equal, but may
        differ in the last place where Inductor compiles them.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.normal(tp.random.key(0), (3,))
        tensor([ 1.6226,  2.0253, -0.4336])
    """
    return _erfinv(u) * rounded(math.sqrt(2), u.dtype)


@_distribution(_unit)
def exponential(u: torch.Tensor) -> torch.Tensor:
    """Draw from the exponential distribution of rate 1.

    Returns:
        The numbers, those of JAX within 2 units in the last place.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.exponential(tp.random.key(0), (3,))
        tensor([2.9501, 3.8434, 0.4039])
    """
    return -torch.log1p(-u)


@_distribution(_positive)
def gumbel(u: torch.Tensor) -> torch.Tensor:
    """Draw from the standard Gumbel distribution, whose density is ``exp(-x - exp(-x))``.

    Returns:
        The numbers, those of JAX (in its mode "low") but for rounding: in float32 within 5e-7,
        relative to numbers above 1.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.gumbel(tp.random.key(0), (3,))
        tensor([ 2.9234,  3.8326, -0.0969])
    """
    return -torch.log(-torch.log(u))


@_distribution(_signed)
def laplace(u: torch.Tensor) -> torch.Tensor:
    """Draw from the Laplace distribution of mean 0 and scale 1.

    Returns:
        The numbers, those of JAX within 2 units in the last place.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.laplace(tp.random.key(0), (3,))
        tensor([-2.2570, -3.1503,  0.4086])
    """
    return torch.sign(u) * torch.log1p(-torch.abs(u))


@_distribution(_positive)
def logistic(u: torch.Tensor) -> torch.Tensor:
    """Draw from the logistic distribution of mean 0 and scale 1.

    Returns:
        The numbers, those of JAX but for rounding: in float32 within 5e-7, relative to numbers
        above 1.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.random.logistic(tp.random.key(0), (3,))
        tensor([ 2.8964,  3.8218, -0.6978])
    """
    return torch.log(u) - torch.log1p(-u)


def between(
    function: str,
    key: Words,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    minval: Limit,
    maxval: Limit,
) -> torch.Tensor:
    """Uniform numbers between two bounds."""
    low, high = (
        rounded(limit, dtype)
        if isinstance(limit, Number)
        else torch.as_tensor(limit, device=key[0].device).to(dtype)
        for limit in (minval, maxval)
    )
    for name, limit in (("minval", low), ("maxval", high)):
        if isinstance(limit, torch.Tensor):
            check_broadcast(function, name, limit.shape, shape)
    unit = unit_interval(key, shape, dtype)
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        if (low, high) == (0.0, 1.0):
            return unit
        return _scaled(unit, rounded(high - low, dtype), low).clamp_min(low)
    lowest = low if isinstance(low, torch.Tensor) else torch.full_like(unit, low)
    return torch.maximum(lowest, _scaled(unit, high - low, low))


def check_dtype(function: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise wrong_dtype(function, dtype, "float32, float64, float16 or bfloat16", ValueError)


def check_broadcast(function: str, name: str, given: Sequence[int], shape: tuple[int, ...]) -> None:
    """Raise unless the shape ``given`` broadcasts to ``shape``."""
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(
            f"{function}: got {name} of shape {tuple(given)}, expected one that broadcasts to the "
            f"shape of the result, {shape}."
        )


def as_tensor(value: Any, key: torch.Tensor) -> torch.Tensor:
    """A tensor as it is; numbers, lists and arrays as a tensor on the device of the key."""
    if isinstance(value, torch.Tensor):
        return value
    check_array(value, "an argument of torchpmap.random")
    return torch.as_tensor(value, device=key.device)


def _scaled(unit: torch.Tensor, span: Limit, low: Limit) -> torch.Tensor:
    """``unit * span + low``, rounded once (in bfloat16 and float64 twice)."""
    dtype = unit.dtype
    if dtype in (torch.float64, torch.bfloat16):
        return unit * span + low
    wide_span, wide_low = (
        x.to(torch.float64) if isinstance(x, torch.Tensor) else x for x in (span, low)
    )
    return (unit.to(torch.float64) * wide_span + wide_low).to(dtype)


# M. Giles, "Approximating the erfinv function", 2010, single precision: the polynomials for
# -log(1 - x**2) below and above 5, highest power first.
_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse error function as XLA approximates it, which is up to 91 units in the last place
    away from ``torch.erfinv`` in float32.
    """
    if x.dtype == torch.float64:
        return torch.erfinv(x)
    y = x.to(torch.float32)
    w = -torch.log1p(-y * y)
    centre = w < 5.0
    w = torch.where(centre, w - 2.5, torch.sqrt(w) - 3.0)
    polynomial = torch.where(centre, _CENTRE[0], _TAIL[0])
    for inner, outer in zip(_CENTRE[1:], _TAIL[1:], strict=True):
        polynomial = polynomial * w + torch.where(centre, inner, outer)
    return (polynomial * y).to(x.dtype)
