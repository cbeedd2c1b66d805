"""``associative_scan``: all prefixes at once, in as many rounds as their number can be halved.

x0        x1        x2        x3            rows
     x0 x1               x2 x3              neighbours combined, and those scanned
     x0 x1               x0 x1 x2 x3        the odd places
x0             x0 x1 x2                     the even ones: an odd place, and the next row
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeVar

import torch

from torchpmap._base.boundary import outside_graphs
from torchpmap._loops.bodies import Function, private
from torchpmap._loops.checks import check_function
from torchpmap._loops.trees import Parts, Tensors, same_kinds, take_apart

_Elements = TypeVar("_Elements")


@outside_graphs
def associative_scan(
    fn: Callable[[_Elements, _Elements], _Elements],
    elems: _Elements,
    reverse: bool = False,
    axis: int = 0,
) -> _Elements:
    """Combine every row with all rows before it, by an associative function.

    associative_scan: (fn: (x[*, ...], x[*, ...]) -> x[*, ...], x[n, ...]) -> x[n, ...]

    Row k of the result is ``fn(...fn(fn(x[0], x[1]), x[2])..., x[k])``.  Independent combinations
    run at once, so this is quicker than ``scan`` on long sequences.

    Args:
        fn: an associative function of two trees of rows, which it combines row by row: it gets many
            rows at once.  ``torch.add``, or ``lambda a, b: a @ b`` for a sequence of matrices.
        elems: a pytree of tensors with the same size along ``axis``.
        reverse: whether to combine from the last row on: row k is
            ``fn(fn(x[n - 1], x[n - 2])..., x[k])``.
        axis: the dim of the rows.

    Returns:
        A tree like ``elems``.

    Raises:
        TypeError: ``fn`` is not a function, or returns another kind of tree.
        ValueError: rows of different numbers, or a dim that does not exist.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.associative_scan(torch.add, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([ 1.,  3.,  6., 10.])

    Source: jax.lax.associative_scan; checked in tests/loops.
    """
    check_function("associative_scan", "fn", fn)
    parts = take_apart(elems, "elems")
    axis = operator.index(axis)
    _check(parts, axis)
    if not parts.tensors:
        return elems
    function = Function("associative_scan", fn, parts.tree, parts.tree)

    def combined(a: Tensors, b: Tensors) -> Tensors:
        found = take_apart(function(a, b), "the result of fn")
        if found.tree != parts.tree or not same_kinds(found.tensors, a):
            raise TypeError(
                "associative_scan: fn must return a tree of the structure, shapes and dtypes that "
                "it gets."
            )
        return found.tensors

    tensors = [x.flip(axis) for x in parts.tensors] if reverse else parts.tensors
    results = _scanned(combined, tensors, axis)
    return parts.tree.build([x.flip(axis) for x in results] if reverse else results)


def _check(parts: Parts, axis: int) -> None:
    for x, path in zip(parts.tensors, parts.tree.paths("elems"), strict=True):
        if not -x.dim() <= axis < x.dim():
            raise ValueError(
                f"associative_scan: axis={axis}, but {path} has the shape {list(x.shape)}."
            )
    if len({x.shape[axis] for x in parts.tensors}) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in parts.tensors)
        raise ValueError(
            "associative_scan: all elems must have the same size along the axis, but they have the "
            f"shapes {shapes} (axis={axis})."
        )


def _rows(x: torch.Tensor, axis: int, *bounds: int | None) -> torch.Tensor:
    key = [slice(None)] * x.dim()
    key[axis] = slice(*bounds)
    return x[tuple(key)]


def _scanned(
    combined: Callable[[Tensors, Tensors], Tensors], tensors: Tensors, axis: int
) -> Tensors:
    count = tensors[0].shape[axis]
    if count < 2:
        return private(tensors)

    def rows(xs: Tensors, *bounds: int | None) -> Tensors:
        return [_rows(x, axis, *bounds) for x in xs]

    pairs = combined(rows(tensors, 0, count - 1, 2), rows(tensors, 1, None, 2))
    odd = _scanned(combined, pairs, axis)
    before = rows(odd, 0, -1) if count % 2 == 0 else odd
    later = rows(tensors, 2, None, 2)
    rest = combined(before, later) if later[0].shape[axis] else later
    even = [torch.cat(pair, axis) for pair in zip(rows(tensors, 0, 1), rest, strict=True)]
    return [_interleaved(a, b, axis) for a, b in zip(even, odd, strict=True)]


def _interleaved(even: torch.Tensor, odd: torch.Tensor, axis: int) -> torch.Tensor:
    axis %= even.dim()
    count = odd.shape[axis]
    both = torch.stack([_rows(even, axis, 0, count), odd], axis + 1).flatten(axis, axis + 1)
    return torch.cat([both, _rows(even, axis, count, None)], axis)
