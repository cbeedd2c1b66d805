"""What a device runs in place of an operation that needs the rows of all devices.

Of most operations, a device runs the operation itself on its blocks.  These need more: the
statistics of a batch norm are those of the whole batch, and the mean of a loss divides by the
number of all rows.  Each function has the arguments of its operation, after ``size`` and ``group``:
how many devices have a part of the rows, and their group.  With ``size`` 1 it communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._collectives import backend as raw

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def run_on_blocks(name: str, size: int, group: str, *args: Any) -> Any:
    """Run what stands for the operation ``name``."""
    return INSTEAD[name](size, group, *args)


def _sums(size: int, group: str, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each summed over the devices, in one message."""
    if size == 1:
        return parts
    return raw.all_reduce(torch.stack(parts), "sum", group).unbind()


def promoted(x: torch.Tensor) -> torch.Tensor:
    """Half precision as float32, in which statistics and sums keep their digits."""
    return x.float() if x.dtype in _HALVES else x


def per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[C] -> [1, C, 1, ...], with as many dims as ``x``."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


# -- batch norm ------------------------------------------------------------------------------------


def _batch_norm(
    size: int,
    group: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    own = (weight, bias, running_mean, running_var)
    wider = [value.dtype for value in own if value is not None and value.dtype not in _HALVES]
    kept = wider[0] if wider else x.dtype
    weight, bias, *_ = (None if value is None else promoted(value) for value in own)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        known = promoted(running_mean), promoted(running_var)
        y = _aten.native_batch_norm(promoted(x), weight, bias, *known, False, momentum, eps)[0]
        return y.to(x.dtype), x.new_zeros(0, dtype=kept), x.new_zeros(0, dtype=kept)
    count = size * x.numel() // x.shape[1]
    if size == 1 and count > 1 and x.dtype not in _HALVES:
        return tuple(_aten.native_batch_norm(x, *own, True, momentum, eps))
    mean, var = statistics(size, group, promoted(x))
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        correction = count / max(count - 1, 1)  # a block may have one row when it is tried alone
        running_var.lerp_((var * correction).to(running_var.dtype), momentum)
    y = _aten.native_batch_norm(promoted(x), weight, bias, mean, var, False, 0.0, eps)[0]
    return y.to(x.dtype), mean.to(kept), (var + eps).rsqrt().to(kept)


def statistics(size: int, group: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance per channel (dim 1) of the rows of all devices, which have equally many."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    var, mean = torch.var_mean(x, dims, correction=0)
    if size == 1:
        return mean, var
    # the variance of the means is added: sums of squares would lose digits
    variances, means = raw.all_gather(torch.stack([var, mean]), size, group).unbind(1)
    return means.mean(0), variances.mean(0) + means.var(0, correction=0)


def _batch_norm_backward(
    size: int,
    group: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    if not train:
        assert running_mean is not None
        assert running_var is not None
        mean, invstd = promoted(running_mean), (promoted(running_var) + eps).rsqrt()
    assert mean is not None
    assert invstd is not None
    mean, invstd = promoted(mean), promoted(invstd)
    wide, dims = promoted(grad), [dim for dim in range(x.dim()) if dim != 1]
    scale, offset = per_channel(invstd, x), per_channel(mean, x)
    normalized = (promoted(x) - offset) * scale
    of_bias, of_weight = _sums(size, group, wide.sum(dims), (wide * normalized).sum(dims))
    if train:
        count = size * x.numel() // x.shape[1]
        wide = wide - (per_channel(of_bias, x) + normalized * per_channel(of_weight, x)) / count
    factor = scale if weight is None else scale * per_channel(promoted(weight), x)
    kept = x.dtype if weight is None else weight.dtype
    results = ((wide * factor).to(x.dtype), of_weight.to(kept), of_bias.to(kept))
    return tuple(y if wanted else None for y, wanted in zip(results, output_mask, strict=True))


# -- losses ----------------------------------------------------------------------------------------

_MEAN, _SUM = 1, 2
"""What ``reduction`` says."""


def _nll(name: str) -> Callable[..., Any]:
    operation = getattr(_aten, name).default

    def forward(
        size: int,
        group: str,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not reduction or (size == 1 and x.dtype not in _HALVES):
            loss, weights = operation(x, target, weight, reduction, ignore_index)
            return loss, weights
        wide = None if weight is None else promoted(weight)
        total, weights = _sums(
            size, group, *operation(promoted(x), target, wide, _SUM, ignore_index)
        )
        loss = total / weights if reduction == _MEAN else total
        return loss.to(x.dtype), weights.to(x.dtype)

    return forward


def _mean_loss_backward(name: str) -> Callable[..., Any]:
    operation = getattr(_aten, name).default
    position = [argument.name for argument in operation._schema.arguments].index("reduction")

    def backward(size: int, group: str, *args: Any) -> torch.Tensor:
        grad: torch.Tensor = operation(*args)
        reduction = args[position] if position < len(args) else _MEAN  # left out: the default
        return grad / size if reduction == _MEAN else grad

    return backward


# -- group norm ------------------------------------------------------------------------------------


def _group_norm(size: int, group: str, x: Any, weight: Any, bias: Any, n: int, *rest: Any) -> Any:
    return _aten.native_group_norm(x, weight, bias, x.shape[0], *rest)


def _group_norm_backward(
    size: int, group: str, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, n: int, *rest: Any
) -> Any:
    return _aten.native_group_norm_backward(grad, x, mean, rstd, weight, x.shape[0], *rest)


MEAN_LOSSES = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")

INSTEAD: dict[str, Callable[..., Any]] = {
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    **{f"{loss}_backward": _mean_loss_backward(f"{loss}_backward") for loss in MEAN_LOSSES},
    **{name: _nll(name) for name in ("nll_loss_forward", "nll_loss2d_forward")},
}
"""By the operation's name."""
