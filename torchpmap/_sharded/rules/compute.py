"""Signatures of operations that compute: elementwise, reductions, along a dim, products, layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchpmap._sharded.rules.signature import Call, Combine, Labels, Rule, Signature


def elementwise(call: Call) -> Signature | None:
    """Dims are aligned from the back, as broadcasting does: label -1 is the last dim."""
    shape = call.results[0]
    if any(other != shape for other in call.results):
        return None
    return Signature(
        {operand.position: aligned(operand.shape, shape) for operand in call.operands},
        (tuple(range(-len(shape), 0)),) * len(call.results),
    )


def aligned(shape: Sequence[int], whole: Sequence[int]) -> tuple[int | None, ...]:
    """Labels (-1: the last dim) of the dims that a shape shares with the broadcast shape."""
    return tuple(
        k if -k <= len(whole) and shape[k] == whole[k] else None for k in range(-len(shape), 0)
    )


def numbered(ndim: int, mixed: set[int]) -> Labels:
    """Each dim's number as its label; None for the dims in ``mixed``."""
    return tuple(None if dim in mixed else dim for dim in range(ndim))


def dims_of(value: Any, ndim: int) -> set[int]:
    """The dims, counted from the front, that an argument names."""
    named = value if isinstance(value, list | tuple) else (value,)
    size = max(ndim, 1)
    for dim in named:
        if not -size <= dim < size:  # not every operation checks it on meta tensors
            raise IndexError(
                "Dimension out of range (expected to be in range of "
                f"[{-size}, {size - 1}], but got {dim})"
            )
    return {dim % size for dim in named}


# -- reductions ------------------------------------------------------------------------------------

_BY_ORDER: dict[Any, Combine] = {0: "sum", math.inf: "max", -math.inf: "min"}
"""How norms of parts are combined, by their order; for any other order by the same norm."""


def _reduction(combine: Combine | None) -> Rule:
    def rule(call: Call) -> Signature | None:
        x, dim = call.arguments["self"], call.arguments.get("dim")
        every = dim is None or dim == []
        dims = set(range(x.ndim)) if every else dims_of(dim, x.ndim)
        kind = combine
        if kind == "norm":
            order = call.arguments["ord"] if "ord" in call.arguments else call.arguments["p"]
            kind = _BY_ORDER.get(order, "norm")
        if len(call.results) > 1:
            kind = None  # values with their indices
        kept = numbered(x.ndim, dims)
        if not call.arguments.get("keepdim"):
            kept = tuple(label for label in kept if label is not None)
        count = len(call.results)
        if any(len(shape) != len(kept) for shape in call.results):
            return None
        return Signature({x.position: numbered(x.ndim, set())}, (kept,) * count, (kind,) * count)

    return rule


_REDUCTIONS: dict[Combine | None, str] = {
    "sum": "sum nansum count_nonzero",
    "mean": "mean",
    "max": "amax max any",
    "min": "amin min all",
    "prod": "prod",
    "norm": "linalg_vector_norm norm",
    "logsumexp": "logsumexp",
    None: "aminmax argmax argmin kthvalue median mode nanmedian std std_mean var var_mean",
}


# -- along some dims -------------------------------------------------------------------------------


def _along(call: Call) -> Signature | None:
    """Operations that mix elements only along ``dim`` or ``dims``."""
    named = call.arguments["dim"] if "dim" in call.arguments else call.arguments["dims"]
    if named is None or named == []:
        return None  # roll() of the flat values
    ndim = len(call.results[0])
    # of what has fewer dims, such as the empty [0] in a cat, all devices have the whole
    alike = [operand for operand in call.operands if operand.ndim == ndim]
    shapes = [*(operand.shape for operand in alike), *call.results]
    uneven = {dim for dim in range(ndim) if len({shape[dim] for shape in shapes}) > 1}
    labels = numbered(ndim, dims_of(named, ndim) | uneven)
    return Signature(
        dict.fromkeys([o.position for o in alike], labels), (labels,) * len(shapes[len(alike) :])
    )


def _indexed(call: Call) -> Signature | None:
    """``index_select`` and the like: as ``_along``, with an index that every device has whole."""
    signature = _along(call)
    if signature is not None:
        signature.operands.pop(call.arguments["index"].position, None)
    return signature


def _index(call: Call) -> Signature | None:
    """``x[:, index]`` and ``x[:, index] = values`` with tensors of integers, which every device has
    whole.
    """
    x, indices = call.arguments["self"], call.arguments["indices"]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.itemsize == 1 for _, index in given):
        return None  # a mask stands for as many dims as it has
    taken = [dim for dim, _ in given]
    num_new = len(torch.broadcast_shapes(*(index.shape for _, index in given)))
    labels = numbered(x.ndim, set(taken))
    rest = [label for label in labels if label is not None]
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    at = taken[0] if adjacent else 0
    part: Labels = (*rest[:at], *(None,) * num_new, *rest[at:])
    values = call.arguments.get("values")
    if values is None:
        return Signature({x.position: labels}, (part,))
    sizes = [0 if label is None else x.shape[label] for label in part]
    shared = aligned(values.shape, sizes)
    own = tuple(None if k is None else part[k] for k in shared)
    return Signature({x.position: labels, values.position: own}, (labels,))


def trailing(num_dims: int | Callable[[Call], int], size: str | None = None) -> Rule:
    """Operations on the last dims; the dims before are batch dims.

    ``size``: the argument that is the shape of the result.
    """

    def rule(call: Call) -> Signature | None:
        core = num_dims if isinstance(num_dims, int) else num_dims(call)
        batch = call.operands[0].shape[: call.operands[0].ndim - core]
        shapes = [*(operand.shape for operand in call.operands), *call.results]
        if any(shape[: len(batch)] != batch for shape in shapes):
            return None
        return Signature(
            {o.position: leading(len(batch), o.ndim) for o in call.operands},
            tuple(leading(len(batch), len(shape)) for shape in call.results),
            size=size,
        )

    return rule


def leading(num_batch: int, ndim: int) -> Labels:
    return (*range(num_batch), *(None,) * (ndim - num_batch))


# -- products and layers ---------------------------------------------------------------------------


def letters(
    takes: str,
    results: str,
    others: Combine = "sum",
    num_batch: Callable[[Call], int] = lambda call: 0,
    once: str = "",
) -> Rule:
    """Labels as ``einsum`` has them: ``letters("self:ik mat2:kj", "ij")`` is a product of matrices.

    Letters are for the first dims of operands, where these are given, and of results: ``.`` is a
    dim without a label, ``*`` so many as ``num_batch`` says, ``-`` none, as for results at the end
    that are left out.

    Args:
        others: how a result that lacks a label is put together.
        once: the operand that is added to the first result, and may be broadcast.
    """
    named = [item.split(":") for item in takes.split()]

    def rule(call: Call) -> Signature | None:
        def labels(text: str, ndim: int) -> Labels:
            own: Labels = tuple(None if letter == "." else letter for letter in text.strip("-"))
            own = tuple(range(num_batch(call))) if text == "*" else own
            return (*own, *(None,) * (ndim - len(own)))

        given = [(call.arguments.get(name), text) for name, text in named]
        operands = [(operand, text) for operand, text in given if operand is not None]
        found = {operand.position: labels(text, operand.ndim) for operand, text in operands}
        if any(len(found[operand.position]) > operand.ndim for operand, _ in operands):
            return None  # it has no batch, for example
        texts: Iterator[str] = itertools.chain(results.split(), itertools.repeat("-"))
        mask = call.arguments.get("output_mask") or ()
        if len(mask) > len(call.results):  # else it is all True, or a fake kernel ignores it
            texts = itertools.compress(texts, mask)
        made = tuple(labels(text, len(x)) for x, text in zip(call.results, texts, strict=False))
        alone = [call.arguments[once]] if once else []
        for operand in alone:
            shared = aligned(operand.shape, call.results[0])
            found[operand.position] = tuple(None if k is None else made[0][k] for k in shared)
        return Signature(found, made, (others,) * len(made), once=tuple(x.position for x in alone))

    return rule


def _dims_before(call: Call) -> int:
    """Of a layer norm."""
    x, shape = call.arguments["input"], call.arguments["normalized_shape"]
    return x.ndim - len(shape)


def _convolution(call: Call) -> Signature | None:
    x, weight = call.arguments["input"], call.arguments["weight"]
    return letters("grad_output:n input:n", "n")(call) if x.ndim == weight.ndim else None


def _sampled(call: Call) -> Signature | None:
    if False in call.arguments.get("output_mask", ()):
        return None  # kernels give both gradients all the same, fake ones too
    return letters("grad_output:n input:n grid:n", "n n")(call)


def _dims_of_indices(call: Call) -> int:
    ndim: int = call.arguments["indices"].ndim
    return ndim


def _embedding_backward(call: Call) -> Signature | None:
    if call.arguments["scale_grad_by_freq"]:
        return None  # needs how often an index occurs on all devices
    return letters("grad_output:* indices:*", "-", num_batch=_dims_of_indices)(call)


def _table() -> dict[str, Rule]:
    table: dict[str, Rule] = {
        "addmm": letters("mat1:ik mat2:kj", "ij", once="self"),
        "addmv": letters("mat:ik vec:k", "i", once="self"),
        "baddbmm": letters("batch1:bik batch2:bkj", "bij", once="self"),
        "bmm": letters("self:bik mat2:bkj", "bij"),
        "constant_pad_nd": trailing(lambda call: len(call.arguments["pad"]) // 2),
        "convolution": _convolution,
        "convolution_backward": _convolution,
        "dot": letters("self:k tensor:k", "-"),
        "embedding": letters("indices:*", "*", num_batch=_dims_of_indices),
        "embedding_dense_backward": _embedding_backward,
        "grid_sampler_2d": _sampled,
        "grid_sampler_2d_backward": _sampled,
        "grid_sampler_3d": _sampled,
        "grid_sampler_3d_backward": _sampled,
        "index": _index,
        "index_put": _index,
        "mm": letters("self:ik mat2:kj", "ij"),
        "mv": letters("self:ik vec:k", "i"),
        "native_layer_norm": letters("input:*", "* * *", num_batch=_dims_before),
        "native_layer_norm_backward": letters(
            "grad_out:* input:* mean:* rstd:*", "*", num_batch=_dims_before
        ),
        "vdot": letters("self:k other:k", "-"),
    }
    for kind, names in _REDUCTIONS.items():
        table |= dict.fromkeys(names.split(), _reduction(kind))
    for given, size in (_ON_LAST, None), (_RESIZING, "input_size"):
        for num_dims, names in given.items():
            for name in names.split():
                table[name] = trailing(num_dims)
                table[f"{name}_backward"] = trailing(num_dims, size)
    return table | dict.fromkeys(_ALONG.split(), _along) | dict.fromkeys(_INDEXED.split(), _indexed)


_ALONG = (
    "_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data cat "
    "cummax cummin cumprod cumsum flip gather glu glu_backward logcumsumexp roll scatter "
    "scatter_add scatter_reduce sort topk"
)
_INDEXED = "index_add index_copy index_fill index_select"
_ON_LAST = {
    0: "view_as_real",
    1: "reflection_pad1d replication_pad1d view_as_complex",
    2: "_adaptive_avg_pool2d _linalg_det _linalg_slogdet adaptive_max_pool2d avg_pool2d col2im "
    "linalg_cholesky_ex linalg_inv_ex linalg_qr max_pool2d_with_indices reflection_pad2d "
    "replication_pad2d tril triu",
    3: "_adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d im2col max_pool3d_with_indices "
    "pixel_shuffle pixel_unshuffle reflection_pad3d replication_pad3d",
}
_RESIZING = {
    1: "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d",
    2: "upsample_bicubic2d upsample_bilinear2d upsample_nearest2d _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa _upsample_nearest_exact2d",
    3: "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d",
}
"""Operations on so many last dims, and so their gradients; these give them another size, of which
the gradient is told.
"""

COMPUTE = _table()
"""Rule by name of the operation, without the ``_`` of its in-place form."""
