"""Signatures of layers and losses; ``_sharded/layers`` has what their blocks compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchpmap._sharded.rules.compute import aligned, letters
from torchpmap._sharded.rules.signature import Call, Combine, Labels, Rule, Signature


def _attention(kept: str, num_rows: int) -> Rule:
    """Rows and heads are batches; the mask, [T, S] or [B or 1, H or 1, T, S], may have them."""
    without_mask = letters(f"query:bh key:bh value:bh {kept}", "bh " * num_rows, "equal")

    def rule(call: Call) -> Signature | None:
        signature = without_mask(call)
        mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
        if signature is None or mask is None:
            return signature
        whole = (*call.arguments["query"].shape[:2], None, None)[-mask.ndim :]
        shared = zip("bh.."[-mask.ndim :], mask.shape, whole, strict=True)
        labels = tuple(letter if size == full else None for letter, size, full in shared)
        wants_its_gradient = num_rows == 4 and len(call.results) == 4
        if wants_its_gradient and labels[:2] != ("b", "h"):
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
    if not target.ndim or target.ndim != x.ndim - 1:
        return None  # one row
    each = call.arguments["reduction"] == 0
    has_rows = each or "grad_output" in call.arguments
    named = "self:n target:n" + " grad_output:n" * each
    return letters(named, "n" if has_rows else "-", "equal")(call)


_LOSSES = (
    "binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss smooth_l1_loss "
    "binary_cross_entropy_backward huber_loss_backward mse_loss_backward smooth_l1_loss_backward"
)
_NLL = "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"
_KEPT = "out:bh logsumexp:bh"
_STATE = "hx_:b cx_:b cx_tmp:b hy_:b cy_:b grad_hy:b grad_cy:b"
"""Of an LSTM, [B, H]; its input and output are [T, B, I]."""

LAYERS: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention("", 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(f"grad_out:bh {_KEPT}", 3),
    "_scaled_dot_product_flash_attention": _attention("", 2),
    "_scaled_dot_product_flash_attention_backward": _attention(f"grad_out:bh {_KEPT}", 3),
    "_scaled_dot_product_cudnn_attention": _attention("", 2),
    "_scaled_dot_product_cudnn_attention_backward": _attention(f"grad_out:bh {_KEPT}", 3),
    "_scaled_dot_product_efficient_attention": _attention("", 2),
    "_scaled_dot_product_efficient_attention_backward": _attention(f"grad_out_:bh {_KEPT}", 4),
    "mkldnn_rnn_layer": letters(f"input:.b {_STATE}", ".b b b", "equal"),
    "mkldnn_rnn_layer_backward": letters(
        f"input:.b output:.b grad_output:.b {_STATE}", ".b - - - - b b"
    ),
    "_native_batch_norm_legit_functional": letters("input:n", "n", "equal"),
    "native_batch_norm": letters("input:n", "n", "equal"),
    "native_batch_norm_backward": letters("grad_out:n input:n", "n", "equal"),
    "native_group_norm": letters("input:n", "n n n"),
    "native_group_norm_backward": letters("grad_out:n input:n mean:n rstd:n", "n"),
    **dict.fromkeys(_LOSSES.split(), _loss),
    **dict.fromkeys(_NLL.split(), _nll),
}
"""Rule by name of the operation."""
