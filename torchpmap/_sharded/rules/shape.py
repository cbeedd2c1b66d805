"""Signatures of operations that rearrange: views, indexing with numbers, cat, new tensors."""

from __future__ import annotations

import math
from typing import Any

from torchpmap._sharded.rules.compute import aligned, dims_of, numbered
from torchpmap._sharded.rules.signature import Call, Labels, Rule, Signature


def _same_dims(operand: Any, *results: Labels, **options: Any) -> Signature:
    return Signature({operand.position: numbered(operand.ndim, set())}, results, **options)


def _permute(call: Call) -> Signature:
    x = call.arguments["self"]
    return _same_dims(x, tuple(dim % x.ndim for dim in call.arguments["dims"]))


def _transpose(call: Call) -> Signature:
    x = call.arguments["self"]
    order = list(range(x.ndim))
    if order:
        first = call.arguments.get("dim0", 0) % x.ndim
        second = call.arguments.get("dim1", -1) % x.ndim
        order[first], order[second] = order[second], order[first]
    return _same_dims(x, tuple(order))


def _reshaped(call: Call) -> Signature:
    """The same elements in the same order, in other dims.

    A dim of the result gets the label of an operand's dim if the dims before both have the same
    product: [4, 6, 5] -> [24, 5] keeps dim 0, and so does [24, 5] -> [4, 6, 5] in 4 blocks.
    """
    (x,), shape = call.operands, call.results[0]
    labels: list[Any] = [None] * len(shape)
    if math.prod(shape):
        for dim, over in enumerate(x.cut):
            for other, size in enumerate(shape):
                fits = size % call.parts(over) == 0
                if over and fits and math.prod(shape[:other]) == math.prod(x.shape[:dim]):
                    labels[other] = dim
    return _same_dims(x, tuple(labels), as_view=True)


def _expand(call: Call) -> Signature:
    x, shape = call.arguments["self"], call.results[0]
    return Signature(
        {x.position: aligned(x.shape, shape)}, (tuple(range(-len(shape), 0)),), size="size"
    )


def _repeat(call: Call) -> Signature:
    x, shape = call.arguments["self"], call.results[0]
    labels = aligned(x.shape, shape)
    return Signature({x.position: labels}, ((*(None,) * (len(shape) - x.ndim), *labels),))


def _select(call: Call) -> Signature:
    x = call.arguments["self"]
    labels = numbered(x.ndim, dims_of(call.arguments["dim"], x.ndim))
    rest = tuple(label for label in labels if label is not None)
    return Signature({x.position: labels}, (rest,) * len(call.results))


def _slice(call: Call) -> Signature:
    x = call.arguments["self"]
    (dim,) = dims_of(call.arguments["dim"], x.ndim)
    labels = numbered(x.ndim, set() if x.shape == call.results[0] else {dim})
    return Signature({x.position: labels}, (labels,))


def _split(call: Call) -> Signature:
    x = call.arguments["self"]
    labels = numbered(x.ndim, dims_of(call.arguments["dim"], x.ndim))
    return Signature({x.position: labels}, (labels,) * len(call.results))


def _select_back(call: Call) -> Signature:
    """``select_scatter`` and the gradient of ``select``: the result has the selected dim."""
    shape = call.results[0]
    labels = numbered(len(shape), dims_of(call.arguments["dim"], len(shape)))
    rest = tuple(label for label in labels if label is not None)
    return _inserted(call, labels, rest)


def _slice_back(call: Call) -> Signature:
    shape = call.results[0]
    labels = numbered(len(shape), dims_of(call.arguments["dim"], len(shape)))
    return _inserted(call, labels, labels)


def _inserted(call: Call, whole: Labels, part: Labels) -> Signature:
    if "grad_output" in call.arguments:
        grad = call.arguments["grad_output"]
        return Signature({grad.position: part}, (whole,), size="input_sizes")
    x, source = call.arguments["self"], call.arguments["src"]
    return Signature({x.position: whole, source.position: part}, (whole,))


def _diagonal(call: Call) -> Signature:
    whole = call.arguments.get("self")
    shape = call.results[0] if whole is None or "src" in call.arguments else whole.shape
    ndim = len(shape)
    taken = dims_of((call.arguments["dim1"], call.arguments["dim2"]), ndim)
    labels = numbered(ndim, taken)
    part = (*(label for label in labels if label is not None), None)
    if whole is None or "src" in call.arguments:
        return _inserted(call, labels, part)
    return Signature({whole.position: labels}, (part,))


def _cat(call: Call) -> Signature:
    shape = call.results[0]
    labels = numbered(len(shape), dims_of(call.arguments["dim"], len(shape)))
    # torch leaves out an empty [0] among tensors of any shape: it stays whole
    joined = [operand for operand in call.operands if operand.ndim == len(shape)]
    return Signature({operand.position: labels for operand in joined}, (labels,))


def _stack(call: Call) -> Signature:
    shape = call.results[0]
    (dim,) = dims_of(call.arguments["dim"], len(shape))
    labels = numbered(len(shape) - 1, set())
    return Signature(
        {operand.position: labels for operand in call.operands},
        ((*labels[:dim], None, *labels[dim:]),),
    )


def _new(call: Call) -> Signature:
    """A new tensor with the dtype of ``self``, and with its layout if the shapes are equal."""
    x, shape = call.arguments["self"], call.results[0]
    labels = numbered(x.ndim, set())
    if x.shape == shape:
        return Signature({x.position: labels}, (labels,), size="size")
    return Signature({x.position: labels}, ((None,) * len(shape),), ("equal",))


def _as_real(call: Call) -> Signature:
    x = call.arguments["self"]
    return _same_dims(x, (*range(x.ndim), None))


def _as_complex(call: Call) -> Signature:
    x = call.arguments["self"]
    labels = numbered(x.ndim, {x.ndim - 1})
    return Signature({x.position: labels}, (labels[:-1],))


def _view(call: Call) -> Signature:
    if "dtype" not in call.arguments:
        return _reshaped(call)
    x = call.arguments["self"]
    labels = numbered(x.ndim, set() if x.shape == call.results[0] else {x.ndim - 1})
    return Signature({x.position: labels}, (labels,))


SHAPE: dict[str, Rule] = {
    "_reshape_alias": _reshaped,
    "_unsafe_view": _reshaped,
    "cat": _cat,
    "diagonal": _diagonal,
    "diagonal_backward": _diagonal,
    "diagonal_scatter": _diagonal,
    "expand": _expand,
    "new_empty": _new,
    "new_full": _new,
    "new_ones": _new,
    "new_zeros": _new,
    "permute": _permute,
    "repeat": _repeat,
    "select": _select,
    "select_backward": _select_back,
    "select_scatter": _select_back,
    "slice": _slice,
    "slice_backward": _slice_back,
    "slice_scatter": _slice_back,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _reshaped,
    "stack": _stack,
    "t": _transpose,
    "transpose": _transpose,
    "unbind": _select,
    "unsafe_split": _split,
    "unsafe_split_with_sizes": _split,
    "unsqueeze": _reshaped,
    "view": _view,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
"""Rule by name of the operation."""
