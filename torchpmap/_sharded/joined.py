"""Rows that each device joins in an order of its own.

``x.view(t * b, e)`` of a value that is cut over ``b`` has no layout: the rows of a device are no
neighbours in the whole.  But a matrix product does the same with each row, whatever the order, and
afterwards ``y.view(t, b, f)`` takes the rows apart again.  So devices may join theirs, as long as
nothing in between depends on the order.  ``nn.MultiheadAttention`` is written so: it puts the
batch into the second dim, and then calls linear layers.  So is attention by plain operations, which
joins rows and heads for a product of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from torchpmap._base.torch_internals import OpOverload
from torchpmap._layout.grid import Cut, block_shape, padded
from torchpmap._sharded.arguments import facts_of
from torchpmap._sharded.rules.compute import elementwise
from torchpmap._sharded.rules.shape import order_of
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.spmd import Emitter

_aten = torch.ops.aten
VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_MOVES = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_SAME = (_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten._to_copy.default)


class Joined(NamedTuple):
    """How a dim of a value came about."""

    dim: int
    shape: tuple[int, ...]
    """Of the dims that were joined."""
    cut: Cut
    """An entry for each of these."""

    @property
    def over(self) -> tuple[int, ...]:
        """The dims of the grid over which the rows are cut."""
        return tuple(k for entry in self.cut for k in entry)

    def apart(self, shape: tuple[int, ...], cut: Cut) -> tuple[tuple[int, ...], Cut]:
        """Shape and cut of a value whose first dims are those that were joined."""
        entries = padded(cut, len(shape))
        rest = [k for k in range(len(shape)) if k != self.dim]
        sizes = (*self.shape, *(shape[k] for k in rest))
        return sizes, (*self.cut, *(entries[k] for k in rest))


def joined_by(node: Node, shape: tuple[int, ...], cut: Cut) -> Joined | None:
    """How a view joins the first dims of a value, if the rows of a device are no neighbours."""
    made = tuple(node.meta["val"].shape)
    entries = padded(cut, len(shape))
    for count in range(2, len(shape) + 1):
        if made and math.prod(shape[:count]) == made[0]:
            is_same = shape[count:] == made[1:] or not any(entries[count:])
            if is_same and any(entries[k] and math.prod(shape[:k]) > 1 for k in range(1, count)):
                return Joined(0, tuple(shape[:count]), entries[:count])
    return None


def is_taken_apart(node: Node, joined: Joined) -> bool:
    """Whether a view makes the dims again that were joined."""
    made = tuple(node.meta["val"].shape)
    return joined.dim == 0 and made[: len(joined.shape)] == joined.shape


def keeps_rows(node: Node, joined: Joined) -> bool:
    """Whether a view leaves the joined dim as it is."""
    made, (source, *_) = tuple(node.meta["val"].shape), node.all_input_nodes
    shape = tuple(source.meta["val"].shape)
    return made == shape or (joined.dim == 0 and made[:1] == shape[:1])


def comes_apart(
    node: Node, joined: Joined, known: Callable[[Node, Joined | None], Joined | None]
) -> bool:
    """Whether nothing that is made of a value with a joined dim depends on the order of rows.

    ``known``: the joined dim of another value; if it is not written yet, the one that is given.
    """
    waiting, seen = [(node, joined)], set()
    while waiting:
        here, rows = waiting.pop()
        if (here, rows) in seen:
            continue
        seen.add((here, rows))
        for user in here.users:
            if user.target in VIEWS:
                if is_taken_apart(user, rows):
                    continue
                if not keeps_rows(user, rows):
                    return False
                waiting.append((user, rows))
            elif not _adds_up_rows(user, here, rows):
                # a gradient meets what it is of in the backward pass: it is joined alike
                operands = {
                    x: known(x, rows if _alike(user, x, here) else None) for x in _others(user)
                }
                operands[here] = rows
                is_fine, after = followed(user, {x: each for x, each in operands.items() if each})
                if not is_fine:
                    return False
                waiting += [] if after is None else [(user, after)]
        if not here.users:
            return False
    return True


def _others(user: Node) -> list[Node]:
    return [] if user.target in _PRODUCTS else user.all_input_nodes


def _alike(user: Node, node: Node, other: Node) -> bool:
    value, shape = node.meta.get("val"), other.meta["val"].shape
    if not isinstance(value, torch.Tensor):
        return False
    count = 1 if user.target is _aten.bmm.default else None
    return value.shape[:count] == shape[:count]


def _adds_up_rows(user: Node, node: Node, joined: Joined) -> bool:
    """Whether a product does.  The other operand will have such a dim too, it is assumed; else this
    one is brought into order, which costs a message.  The result has no such dim.
    """
    return user.target is _aten.mm.default and user.args[1 - joined.dim] is node


def followed(node: Node, joined: Mapping[Node, Joined]) -> tuple[bool, Joined | None]:
    """Whether an operation does the same with each row, or adds them up; the dim of its result, if
    it has one.

    Args:
        joined: the operands that have such a dim.
    """
    func, made = node.target, node.meta.get("val")
    if not isinstance(func, OpOverload) or not isinstance(made, torch.Tensor):
        return False, None
    first = next(iter(joined.values()))
    if func in _SAME:
        return True, first
    if func is _aten.expand.default:
        return made.ndim == _ndim(node.args[0]), first
    if func in _MOVES:
        named = dict(zip(facts_of(func).names, node.args, strict=False))
        return True, first._replace(dim=order_of(named, made.ndim).index(first.dim))
    if func is _aten.bmm.default:
        is_fine = len(set(joined.values())) == 1 and all(x in joined for x in node.args)
        return (True, first) if is_fine and first.dim == 0 else (False, None)
    if func in _PRODUCTS:
        given: list[Any] = list(node.args)
        *added, rows, columns = given
        if any(x in joined for x in added):
            return False, None
        is_fine, after = _product(joined.get(rows), joined.get(columns))
        if after is not None:
            is_fine = is_fine and not any(_has_dim(x, made.ndim - after.dim) for x in added)
        return is_fine, after
    if func is _aten.sum.dim_IntList:
        args: Any = node.args
        return [dim % _ndim(args[0]) for dim in args[1] or ()] == [first.dim], None
    return _elementwise(node, joined) if rule_of(func) is elementwise else (False, None)


def _ndim(node: Any) -> int:
    ndim: int = node.meta["val"].ndim
    return ndim


def _product(rows: Joined | None, columns: Joined | None) -> tuple[bool, Joined | None]:
    if rows is not None and columns is not None:
        return rows.dim == 1 and columns.dim == 0 and rows[1:] == columns[1:], None
    each = rows or columns
    assert each is not None
    return each.dim == (0 if columns is None else 1), each


def _elementwise(node: Node, joined: Mapping[Node, Joined]) -> tuple[bool, Joined | None]:
    """All operands with rows must have the same; others must be equal for all rows."""
    found = set()
    for operand in node.all_input_nodes:
        ndim, each = operand.meta["val"].ndim, joined.get(operand)
        if each is not None:
            found.add((ndim - each.dim, each[1:]))
    if len(found) > 1:
        return False, None
    ((from_end, (shape, cut)),) = found
    if any(_has_dim(x, from_end) for x in node.all_input_nodes if x not in joined):
        return False, None
    return True, Joined(node.meta["val"].ndim - from_end, shape, cut)


def in_order(
    emitter: Emitter, block: Node, rows: Joined, sizes: tuple[int, ...], cut: Cut, wanted: Cut
) -> tuple[Node, Cut]:
    """The block and cut of a value whose rows are in order: they are taken apart (``sizes``,
    ``cut``), brought to a cut along the first of their dims alone, and joined.
    """
    count, grid = len(rows.shape), emitter.grid.sizes
    block = emitter.call(_aten.movedim.int, block, rows.dim, 0)
    block = emitter.call(_aten.reshape.default, block, block_shape(sizes, cut, grid))
    block = emitter.resharded(block, cut, wanted)
    shape, cut = (math.prod(rows.shape), *sizes[count:]), (wanted[0], *wanted[count:])
    block = emitter.call(_aten.reshape.default, block, block_shape(shape, cut, grid))
    entries = list(cut[1:])
    entries.insert(rows.dim, cut[0])
    return emitter.call(_aten.movedim.int, block, 0, rows.dim), tuple(entries)


def _has_dim(node: Node, from_end: int) -> bool:
    """Whether a value differs along a dim, counted from the last: it is not broadcast."""
    sizes = node.meta["val"].shape
    return len(sizes) >= from_end and sizes[-from_end] != 1
