"""Signatures of operations that rearrange: views, indexing with numbers, cat, new tensors."""

from __future__ import annotations

import math
from typing import Any

from torchpmap._sharded.rules.compute import aligned, dims_of, numbered, trailing
from torchpmap._sharded.rules.signature import Call, Labels, Rows, Rule, Signature


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


def _part(call: Call) -> Signature:
    """A part of ``self`` along some dims, or the whole with ``src`` or a gradient as that part.

    Each device has these dims whole.
    """
    x: Any = call.arguments.get("self")
    source: Any = call.arguments.get("src", call.arguments.get("grad_output"))
    part = call.results[0] if source is None else source.shape
    whole = x.shape if source is None else call.results[0]
    both = "dim1" in call.arguments
    named = [call.arguments[name] for name in (("dim1", "dim2") if both else ("dim",))]
    is_all = "start" in call.arguments and part == whole
    labels = numbered(len(whole), set() if is_all else dims_of(named, len(whole)))
    rest = tuple(label for label in labels if label is not None)
    own = labels if len(part) == len(whole) else (*rest, *(None,) * (len(part) - len(rest)))
    if source is None:
        return Signature({x.position: labels}, (own,) * len(call.results))
    if x is None:
        return Signature({source.position: own}, (labels,), size="input_sizes")
    return Signature({x.position: labels, source.position: own}, (labels,))


def _rows(call: Call) -> Signature | None:
    """``_part``, but the dim may be cut: the parts that devices have are added up, or put."""
    (operand,), arguments = call.operands, call.arguments
    is_back = "grad_output" in arguments
    part, whole = call.results[0], operand.shape
    if is_back:
        part, whole = whole, part
    if part == whole or not math.prod(part):
        return _part(call)
    (dim,) = dims_of(arguments["dim"], len(whole))
    is_one = "index" in arguments
    places = range(whole[dim])
    if is_one:
        places = places[arguments["index"] :][:1]
    else:
        places = places[arguments["start"] : arguments["end"] : arguments["step"]]
    labels = numbered(len(whole), set())
    own = (*labels[:dim], *(None,) * (not is_one), *labels[dim + 1 :])
    given, made = (own, labels) if is_back else (labels, own)
    rows = Rows(dim, places.start, places.step, len(places), is_back)
    size = "input_sizes" if is_back else None
    return Signature({operand.position: given}, (made,), ("sum",), size, rows=rows)


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


def _view(call: Call) -> Signature | None:
    if "dtype" not in call.arguments:
        return _reshaped(call)
    return trailing(int(call.operands[0].shape != call.results[0]))(call)


SHAPE: dict[str, Rule] = {
    "_reshape_alias": _reshaped,
    "_unsafe_view": _reshaped,
    "diagonal": _part,
    "diagonal_backward": _part,
    "diagonal_scatter": _part,
    "expand": _expand,
    "new_empty": _new,
    "new_full": _new,
    "new_ones": _new,
    "new_zeros": _new,
    "permute": _permute,
    "repeat": _repeat,
    "select": _rows,
    "select_backward": _rows,
    "select_scatter": _part,
    "slice": _rows,
    "slice_backward": _rows,
    "slice_scatter": _part,
    "split": _part,
    "split_with_sizes": _part,
    "squeeze": _reshaped,
    "stack": _stack,
    "t": _transpose,
    "transpose": _transpose,
    "unbind": _part,
    "unsafe_split": _part,
    "unsafe_split_with_sizes": _part,
    "unsqueeze": _reshaped,
    "view": _view,
}
"""Rule by name of the operation."""
