"""What a device runs in place of an operation that needs the rows of all devices.

Of most operations, a device runs the operation itself on its blocks.  These need more: the
statistics of a batch norm are those of the whole batch, and the mean of a loss divides by the
number of all rows.  Each of these functions has the arguments of its operation, after ``size`` and
``group``: how many devices have a part of the rows, and their group.  With ``size`` 1 it
communicates nothing.  Others do what kernels of some devices do not (``_alone``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchpmap._collectives import backend as raw
from torchpmap._sharded.unforeseen import ROUNDED

_aten = torch.ops.aten


def run_on_blocks(name: str, size: int, group: str, *args: Any, **kwargs: Any) -> Any:
    """Run what stands for the operation ``name``."""
    return INSTEAD[name](size, group, *args, **kwargs)


def _sums(size: int, group: str, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each summed over the devices, in one message."""
    if size == 1:
        return parts
    return raw.all_reduce(torch.stack(parts), "sum", group).unbind()


def promoted(x: torch.Tensor) -> torch.Tensor:
    """Half precision as float32, in which statistics and sums keep their digits."""
    return x.to(ROUNDED[x.dtype]) if x.dtype in ROUNDED else x


def _promoted(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else promoted(value)


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
    wider = [value.dtype for value in own if value is not None and value.dtype not in ROUNDED]
    kept = wider[0] if wider else x.dtype
    count = size * x.numel() // x.shape[1]
    if training and size == 1 and count > 1 and x.dtype not in ROUNDED:
        return tuple(_aten.native_batch_norm(x, *own, True, momentum, eps))
    if training:
        mean, var = statistics(size, group, promoted(x))
        saved = mean.to(kept), (var + eps).rsqrt().to(kept)
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            correction = count / max(count - 1, 1)  # a block may have one row when tried alone
            running_var.lerp_((var * correction).to(running_var.dtype), momentum)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = promoted(running_mean), promoted(running_var)
        saved = x.new_zeros(0, dtype=kept), x.new_zeros(0, dtype=kept)
    known = _promoted(weight), _promoted(bias), mean, var
    return _aten.native_batch_norm(promoted(x), *known, False, 0.0, eps)[0].to(x.dtype), *saved


def _functional_batch_norm(size: int, group: str, *args: Any) -> tuple[torch.Tensor, ...]:
    """The new running statistics are results."""
    x, weight, bias, *running = args[:5]
    running = [value.clone() for value in running]
    return *_batch_norm(size, group, x, weight, bias, *running, *args[5:]), *running


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
        if not reduction or (size == 1 and x.dtype not in ROUNDED):
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


def _group_norm(x: Any, weight: Any, bias: Any, n: int, *rest: Any) -> Any:
    y, *statistics = _aten.native_group_norm(x, weight, bias, x.shape[0], *rest)
    # the CPU's kernel takes parameters of another dtype; meta tensors do not say what it then gives
    like = next((value for value in (weight, bias) if value is not None), x)
    return y, *(value.to(like.dtype) for value in statistics)


def _group_norm_backward(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, n: int, *rest: Any
) -> Any:
    found = _aten.native_group_norm_backward(grad, x, mean, rstd, weight, x.shape[0], *rest)
    return None if found[0] is None else found[0].to(x.dtype), *found[1:]


# -- layer norm ------------------------------------------------------------------------------------
# In half precision, only the CPU's kernel rounds the statistics to it; meta tensors say float32.


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    own = (weight, bias)
    if x.is_cpu and x.dtype in ROUNDED:
        own = (_promoted(weight), _promoted(bias))
    y, *statistics = _aten.native_layer_norm(promoted(x) if x.is_cpu else x, shape, *own, eps)
    return y.to(x.dtype), *statistics


def _layer_norm_backward(
    grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    operation = _aten.native_layer_norm_backward
    if x.is_cuda or x.dtype not in ROUNDED:
        return operation(grad, x, shape, mean, rstd, weight, bias, output_mask)
    own = (_promoted(weight), _promoted(bias))
    wide = operation(promoted(grad), promoted(x), shape, mean, rstd, *own, output_mask)
    dtypes = (x.dtype, *((x if value is None else value).dtype for value in (weight, bias)))
    return tuple(
        y.to(dtype) if wanted else None
        for y, dtype, wanted in zip(wide, dtypes, output_mask, strict=True)
    )


# -- attention -------------------------------------------------------------------------------------
# The caller's tensors are of the CPU, so torch chooses the CPU's kernel whatever the devices are.


def _attention(query: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    if query.device.type in ("cpu", "meta"):
        operation = _aten._scaled_dot_product_flash_attention_for_cpu
        return tuple(operation(query, *rest, **options))
    y = attention_by_torch(query, *rest, **options)
    kept = torch.promote_types(query.dtype, torch.float32)
    return y, query.new_full(query.shape[:-1], math.nan, dtype=kept)  # only the CPU's kernel has it


def attention_by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """By the kernel that torch chooses for the device."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )


def _attention_backward(grad: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
    if query.device.type in ("cpu", "meta"):
        operation = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return operation(grad, query, *rest, **options)
    return attention_backward_by_torch(grad, query, *rest, **options)


def attention_backward_by_torch(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """The forward pass is computed again: each kernel keeps other things for its backward."""

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention_by_torch(query, key, value, dropout_p, is_causal, **options)

    return _gradients(forward, (query, key, value), (grad,))


def _gradients(
    function: Callable[..., Any],
    operands: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The gradients to the operands, given those of the results; zeros where there is none."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in operands]
        # in the process of the caller this runs below autograd
        is_below = not leaves[0].view_as(leaves[0]).requires_grad
        with torch.overrides.enable_reentrant_dispatch() if is_below else nullcontext():
            results = function(*leaves)
    results = (results,) if isinstance(results, torch.Tensor) else results
    pairs = [(y, grad) for y, grad in zip(results, grads, strict=True) if grad is not None]
    found = torch.autograd.grad(
        [y for y, _ in pairs], leaves, [grad for _, grad in pairs], materialize_grads=True
    )
    return tuple(found)


# -- LSTM ------------------------------------------------------------------------------------------
# A layer in one direction, of [T, B, I].  Its kernel keeps what only the same kernel can read.

_LSTM_MODE = 2


def _lstm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    *weights, hx, cx, reverse, batch_sizes, mode, _, _, has_biases = args[:12]
    assert mode == _LSTM_MODE
    assert not batch_sizes
    keeps = x.new_zeros(1, dtype=torch.uint8)
    if x.is_meta:
        return x.new_empty(*x.shape[:2], hx.shape[-1]), hx.clone(), cx.clone(), keeps
    return *_lstm_layer(reverse, has_biases, x, *weights, hx, cx), keeps


def _lstm_layer(
    reverse: bool, has_biases: bool, x: torch.Tensor, *own: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    *weights, hx, cx = own
    y, hy, cy = torch.lstm(
        x.flip(0) if reverse else x,
        (hx[None], cx[None]),
        weights if has_biases else weights[:2],
        has_biases,
        1,
        0.0,
        True,  # else cuDNN keeps nothing for a backward pass
        False,
        False,
    )
    return y.flip(0) if reverse else y, hy[0], cy[0]


def _lstm_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    operands, grads = args[:7], args[10:13]
    reverse, _, _, _, has_biases = args[13:18]
    if operands[0].is_meta:
        return tuple(map(torch.empty_like, operands))
    return _gradients(functools.partial(_lstm_layer, reverse, has_biases), operands, grads)


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's kernel promises what CPUs keep for the backward pass; GPUs keep nothing."""
    y, kept = _aten.log_sigmoid_forward(x)
    return y, kept if kept.shape == x.shape else x.abs().neg().exp()


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a device does with its own rows, whatever others have."""
    return lambda size, group, *args, **kwargs: function(*args, **kwargs)


MEAN_LOSSES = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")

INSTEAD: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _alone(_attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _alone(_attention_backward),
    "mkldnn_rnn_layer": _alone(_lstm),
    "mkldnn_rnn_layer_backward": _alone(_lstm_backward),
    "_native_batch_norm_legit_functional": _functional_batch_norm,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm": _alone(_group_norm),
    "native_group_norm_backward": _alone(_group_norm_backward),
    "log_sigmoid_forward": _alone(_log_sigmoid),
    "native_layer_norm": _alone(_layer_norm),
    "native_layer_norm_backward": _alone(_layer_norm_backward),
    **{f"{loss}_backward": _mean_loss_backward(f"{loss}_backward") for loss in MEAN_LOSSES},
    **{name: _nll(name) for name in ("nll_loss_forward", "nll_loss2d_forward")},
}
"""By the operation's name."""

_HERE: dict[Any, Callable[..., Any]] = {
    _aten.mkldnn_rnn_layer.default: _lstm,
    _aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        attention_backward_by_torch
    ),
}
"""What runs on the host for operations whose kernels read what a device's kernel did not keep."""


def on_host(func: Any) -> Callable[..., Any]:
    """An operation for whole values in this process."""
    return _HERE.get(func, func)
