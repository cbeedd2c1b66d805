"""Signatures of operations that rearrange: views, indexing with numbers, cat, new tensors."""

from __future__ import annotations

import math
from typing import Any

from torchpmap._sharded.rules.compute import aligned, dims_of, numbered, trailing
from torchpmap._sharded.rules.signature import Call, Labels, Rows, Rule, Signature


def _same_dims(operand: Any, *results: Labels, **options: Any) -> Signature:
    return Signature({operand.position: numbered(operand.ndim, set())}, results, **options)


def _permuted(call: Call) -> Signature:
    x, arguments = call.arguments["self"], call.arguments
    if "dims" in arguments:
        return _same_dims(x, tuple(dim % x.ndim for dim in arguments["dims"]))
    order = list(range(x.ndim))
    if order:
        first, second = arguments.get("dim0", 0), arguments.get("dim1", -1)
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

    Each device has these dims whole.  Only the dim of rows may be cut: those that devices have are
    added up, or put.
    """
    arguments = call.arguments
    x: Any = arguments.get("self")
    source: Any = arguments.get("src", arguments.get("grad_output"))
    part = call.results[0] if source is None else source.shape
    whole = x.shape if source is None else call.results[0]
    both = "dim1" in arguments
    named = [arguments[name] for name in (("dim1", "dim2") if both else ("dim",))]
    is_all = "start" in arguments and part == whole
    dims = set() if is_all else dims_of(named, len(whole))
    labels = numbered(len(whole), dims)
    rest = tuple(label for label in labels if label is not None)
    own = labels if len(part) == len(whole) else (*rest, *(None,) * (len(part) - len(rest)))
    rows = None
    if dims and math.prod(part) and not arguments.keys().isdisjoint(("index", "start")):
        (dim,) = dims
        places = range(whole[dim])
        if "index" in arguments:
            places = places[arguments["index"] :][:1]
        else:
            places = places[arguments["start"] : arguments["end"] : arguments["step"]]
        labels = numbered(len(whole), set())
        rows = Rows(dim, places.start, places.step, len(places), source is not None)
    given = {} if x is None else {x.position: labels}
    if source is None:
        return Signature(given, (own,) * len(call.results), ("sum",) if rows else (), rows=rows)
    size = "input_sizes" if x is None else None
    return Signature(given | {source.position: own}, (labels,), size=size, rows=rows)


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
    "permute": _permuted,
    "repeat": _repeat,
    "select": _part,
    "select_backward": _part,
    "select_scatter": _part,
    "slice": _part,
    "slice_backward": _part,
    "slice_scatter": _part,
    "split": _part,
    "split_with_sizes": _part,
    "squeeze": _reshaped,
    "stack": _stack,
    "t": _permuted,
    "transpose": _permuted,
    "unbind": _part,
    "unsafe_split": _part,
    "unsafe_split_with_sizes": _part,
    "unsqueeze": _reshaped,
    "view": _view,
}
"""Rule by name of the operation."""
