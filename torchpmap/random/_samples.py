"""Numbers of distributions that torch has, and ``jax.random`` has not or in another form.

``poisson`` and ``gamma`` turn one uniform number into the result, by their distribution functions.
(Rejection, which is quicker on a CPU, repeats until all values are accepted, and a graph cannot.)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchpmap._base.torch_internals import set_forward_grad
from torchpmap.random._continuous import check_dtype, gumbel, uniform

_gamma_grad = torch.ops.aten._standard_gamma_grad


def exponential(
    key: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, lambd: float = 1.0
) -> torch.Tensor:
    """Never 0, as ``torch.Tensor.exponential_``: callers take the logarithm."""
    check_dtype("exponential_", dtype)
    wide = torch.promote_types(dtype, torch.float32)
    drawn = -torch.log1p(-uniform(key, shape, wide))
    return (drawn.clamp_min(torch.finfo(wide).eps / 2) / lambd).to(dtype)


def cauchy(
    key: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    median: float = 0.0,
    sigma: float = 1.0,
) -> torch.Tensor:
    check_dtype("cauchy_", dtype)
    angle = uniform(key, shape, torch.promote_types(dtype, torch.float32)) - 0.5
    return (median + sigma * torch.tan(math.pi * angle)).to(dtype)


def geometric(
    key: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, p: float
) -> torch.Tensor:
    if not 0.0 < p < 1.0:
        raise ValueError(f"geometric_: got p={p}, expected a probability between 0 and 1.")
    wide = torch.promote_types(dtype, torch.float32)
    failures = torch.log1p(-uniform(key, shape, wide)) / math.log1p(-p)
    return (failures.floor() + 1).to(dtype)


def truncated_normal(
    key: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mean: float,
    std: float,
    a: float,
    b: float,
) -> torch.Tensor:
    """Of a mean and deviation, between ``a`` and ``b``, as ``nn.init.trunc_normal_``."""
    check_dtype("trunc_normal_", dtype)
    low, high = (a - mean) / std, (b - mean) / std
    side = -1.0 if low > 0 else 1.0  # the lower tail is the one that has all digits
    ends = sorted((side * low, side * high))
    below, above = (math.erfc(-x * 0.5**0.5) / 2 for x in ends)
    chance = below + uniform(key, shape, torch.float64) * (above - below)
    drawn = torch.special.ndtri(chance).clamp(*ends) * (side * std) + mean
    return drawn.clamp(a, b).to(dtype)


def picks(key: torch.Tensor, weights: torch.Tensor, count: int, replace: bool) -> torch.Tensor:
    """Places in the last dim of ``weights``, as ``torch.multinomial`` gives them."""
    size = weights.shape[-1] if weights.dim() else 0
    if weights.dim() not in (1, 2) or not weights.is_floating_point():
        raise RuntimeError(
            f"multinomial: got {weights.dtype} of shape {list(weights.shape)}, expected a vector "
            "or a matrix of probabilities."
        )
    if count < 1 or (count > size and not replace):
        raise RuntimeError(
            f"multinomial: got num_samples={count}, expected a number from 1 to the {size} places "
            "to pick from, or replacement=True."
        )
    if not replace:
        wide = torch.promote_types(weights.dtype, torch.float32)
        scores = weights.to(wide).log() + gumbel(key, tuple(weights.shape), wide)
        return scores.topk(count).indices
    below = weights.double().cumsum(-1)
    unit = uniform(key, (*weights.shape[:-1], count), torch.float64).clamp_max(1 - 2**-50)
    found = torch.searchsorted(below, unit * below[..., -1:], right=True)
    return found.clamp_max(size - 1)


def poisson(key: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """For every rate the smallest k of which ``P(X <= k)`` is above a uniform number."""
    check_dtype("poisson", rate.dtype)
    mean = rate.detach().double()[..., None]
    unit = uniform(key, tuple(rate.shape), torch.float64)[..., None]
    count = torch.where(mean < _FEW, _of_few(mean, unit), _of_many(mean, unit))
    return torch.where(mean >= 0, count, math.nan).squeeze(-1).to(rate.dtype)


_FEW = 10.0


def _of_few(mean: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """For small means: add up all probabilities that a double knows of."""
    counts = torch.arange(48, dtype=torch.float64, device=mean.device)
    mean = mean.clamp_max(_FEW)
    chances = torch.exp(torch.xlogy(counts, mean) - mean - torch.lgamma(counts + 1))
    return (chances.cumsum(-1) <= unit).double().sum(-1, keepdim=True)


def _of_many(mean: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """For others: a guess (Cornish and Fisher) that is off by less than 5, then its neighbours."""
    mean = mean.clamp_min(_FEW)
    z, deviation = torch.special.ndtri(unit.clamp_min(2.0**-54)), mean.sqrt()
    guess = mean + deviation * z + (z * z - 1) / 6 + (z - z**3) / (72 * deviation)
    first = guess.floor().clamp_min(0.0) - 5
    near = first + torch.arange(11, dtype=torch.float64, device=mean.device)
    below = torch.special.gammaincc(near.clamp_min(0.0) + 1, mean) <= unit
    return first + (below | (near < 0)).double().sum(-1, keepdim=True)


def gamma(key: torch.Tensor, concentration: torch.Tensor) -> torch.Tensor:
    """Of scale 1; differentiable in the concentration."""
    check_dtype("_standard_gamma", concentration.dtype)
    alpha = concentration.detach().double()
    unit = uniform(key, tuple(alpha.shape), torch.float64)
    least = math.log(torch.finfo(torch.float64).tiny)
    low, high = torch.full_like(alpha, least), (alpha + 12 * alpha.sqrt() + 60).log()
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.special.gammainc(alpha, middle.exp()) > unit
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    drawn = high.exp().to(concentration.dtype)
    tiny = torch.finfo(concentration.dtype).tiny
    result: torch.Tensor = _Drawn.apply(concentration, drawn.clamp_min(tiny))
    return result


def dirichlet(key: torch.Tensor, concentration: torch.Tensor) -> torch.Tensor:
    parts = gamma(key, concentration.detach())
    return parts / parts.sum(-1, keepdim=True)


class _Drawn(torch.autograd.Function):
    """(concentration, number drawn with it) -> the number, a quantile."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return drawn.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cotangent * _gamma_grad(*ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        with set_forward_grad(True):
            return tangent * _gamma_grad(*ctx.saved_tensors)
