"""Signatures of layers and losses; ``_sharded/layers`` has what their blocks compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchpmap._sharded.rules.compute import aligned, batched, leading
from torchpmap._sharded.rules.signature import Call, Combine, Labels, Rule, Signature


def _attention(names: str, num_rows: int, mask_name: str = "attn_bias") -> Rule:
    """Rows and heads are batches; the mask, [T, S] or [B or 1, H or 1, T, S], may have them."""
    without_mask = batched(names, num_rows, "equal", 2)

    def rule(call: Call) -> Signature | None:
        signature = without_mask(call)
        mask = call.arguments.get(mask_name)
        if signature is None or mask is None:
            return signature
        whole = (*call.arguments["query"].shape[:2], None, None)[-mask.ndim :]
        labels = tuple(dim if size == whole[dim] else None for dim, size in enumerate(mask.shape))
        wants_its_gradient = num_rows == 4 and len(call.results) == 4
        if wants_its_gradient and labels[:2] != (0, 1):
            return None  # it is a sum over the rows
        return replace(signature, operands=signature.operands | {mask.position: labels})

    return rule


def _loss(call: Call) -> Signature | None:
    shape = max((operand.shape for operand in call.operands), key=len)
    labels = tuple(range(-len(shape), 0))
    kinds: dict[Any, Combine | None] = {0: None, 1: "mean", 2: "sum"}
    kind = kinds[call.arguments["reduction"]]
    operands: dict[int, Labels] = {
        operand.position: aligned(operand.shape, shape) for operand in call.operands
    }
    if "grad_output" in call.arguments:
        return Signature(operands, (labels,))
    return Signature(operands, (labels if kind is None else (),), (kind,))


def _nll(call: Call) -> Signature | None:
    x, target = call.arguments["self"], call.arguments["target"]
    if target.ndim != x.ndim - 1:
        return None  # one row
    operands = {x.position: leading(1, x.ndim), target.position: leading(1, target.ndim)}
    each = call.arguments["reduction"] == 0
    if "grad_output" in call.arguments:
        grad = call.arguments["grad_output"]
        operands[grad.position] = leading(int(each), grad.ndim)
        return Signature(operands, (leading(1, x.ndim),))
    loss = leading(1, target.ndim) if each else ()
    return Signature(operands, (loss, ()), (None if each else "equal", "equal"))


def _lstm(call: Call) -> Signature:
    """A layer of [T, B, I], whose states are [B, H]."""
    batch: Labels = (None, 0, None)
    state: Labels = (0, None)
    labels = {"input": batch, "output": batch, "grad_output": batch}
    labels |= dict.fromkeys(["hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy"], state)
    operands = {
        call.arguments[name].position: own
        for name, own in labels.items()
        if call.arguments.get(name) is not None
    }
    if "output" not in call.arguments:
        return Signature(operands, (batch, state, state, (None,)), (None, None, None, "equal"))
    weights: tuple[Labels, ...] = ((None, None), (None, None), (None,), (None,))
    kinds: tuple[Combine | None, ...] = (None, *("sum",) * 4, None, None)
    return Signature(operands, (batch, *weights, state, state), kinds)


_LOSSES = (
    "binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss "
    "binary_cross_entropy_backward huber_loss_backward mse_loss_backward smooth_l1_loss_backward"
)
_NLL = "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"
_HEADS = "query key value"
_KEPT = f"{_HEADS} out logsumexp"

LAYERS: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention(_HEADS, 2, "attn_mask"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(
        f"grad_out {_KEPT}", 3, "attn_mask"
    ),
    "_scaled_dot_product_flash_attention": _attention(_HEADS, 2),
    "_scaled_dot_product_flash_attention_backward": _attention(f"grad_out {_KEPT}", 3),
    "_scaled_dot_product_cudnn_attention": _attention(_HEADS, 2),
    "_scaled_dot_product_cudnn_attention_backward": _attention(f"grad_out {_KEPT}", 3),
    "_scaled_dot_product_efficient_attention": _attention(_HEADS, 2),
    "_scaled_dot_product_efficient_attention_backward": _attention(f"grad_out_ {_KEPT}", 4),
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm,
    "_native_batch_norm_legit_functional": batched("input", 1, "equal"),
    "native_batch_norm": batched("input", 1, "equal"),
    "native_batch_norm_backward": batched("grad_out input", 1, "equal"),
    "native_group_norm": batched("input", 3),
    "native_group_norm_backward": batched("grad_out input mean rstd", 1),
    **dict.fromkeys(_LOSSES.split(), _loss),
    **dict.fromkeys(_NLL.split(), _nll),
}
"""Rule by name of the operation."""
