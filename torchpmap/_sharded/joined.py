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
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from torchpmap._base.pytree import tree_flatten
from torchpmap._base.torch_internals import OpOverload
from torchpmap._layout.grid import Cut, block_shape, cut_at, padded
from torchpmap._sharded.arguments import facts_of, slotted
from torchpmap._sharded.on_blocks import described
from torchpmap._sharded.rules.signature import placement_of
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.spmd import Emitter
from torchpmap._sharded.trial import Trial

_aten = torch.ops.aten
VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_SAME = (_aten.alias.default, _aten.detach.default)


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


def comes_apart(node: Node, joined: Joined, values: Mapping[Node, Any]) -> bool:
    """Whether nothing that is made of a value with a joined dim depends on the order of rows.

    ``values``: those that are written; each of the others will be joined alike, it is assumed, as a
    gradient is where it meets what it is of.
    """
    waiting, seen = [(node, joined)], set()
    while waiting:
        here, rows = waiting.pop()
        if (here, rows) in seen:
            continue
        seen.add((here, rows))
        for user in here.users:
            if user.target in VIEWS and is_taken_apart(user, rows):
                continue
            known = {x: getattr(values.get(x), "joined", None) for x in user.all_input_nodes}
            given = {x: each for x, each in known.items() if each} | {here: rows}
            is_fine, after = followed(user, given, [x for x in known if x not in values])
            if not is_fine:
                return False
            waiting += [] if after is None else [(user, after)]
        if not here.users:
            return False
    return True


def followed(
    node: Node, joined: Mapping[Node, Joined], others: Container[Node] = ()
) -> tuple[bool, Joined | None]:
    """Whether an operation does the same with each row, or adds them up; the dim of its result, if
    it has one.

    Args:
        joined: the operands that have such a dim.
        others: operands that may have one.
    """
    func, made = node.target, node.meta.get("val")
    if not isinstance(func, OpOverload) or not isinstance(made, torch.Tensor):
        return False, None
    first = next(iter(joined.values()))
    if func in _SAME:
        return True, first
    slots, sources = slots_of(node)
    values = [source.meta["val"] for source in sources]
    trial = Trial(func, slots, values, (), (0,), tree_flatten(made)[1], (made,), True, False)
    # rules are about blocks, of which each row is one here
    rows = math.prod(first.shape)
    cuts = {k: cut_at(joined[x].dim) for k, x in enumerate(sources) if x in joined}
    placement = placement_of(described(trial, (rows,), cuts), rule_of(func))
    if placement is None or placement.rows or len({each[1:] for each in joined.values()}) > 1:
        return False, None
    (cut,) = placement.results
    for k, wanted in placement.operands.items():
        if cuts.get(k, ()) != wanted and (k in cuts or sources[k] not in others):
            return False, None
    if not cut:
        return True, None
    dim = len(cut) - 1
    return made.shape[dim] == rows, first._replace(dim=dim)


def slots_of(node: Node) -> tuple[dict[str, Any], list[Node]]:
    """The arguments of an operation by name, with a ``Slot`` for each value, and these values."""
    func: Any = node.target
    named = dict(zip(facts_of(func).names, node.args, strict=False)) | dict(node.kwargs)
    return slotted(named, lambda _, value: isinstance(value, Node))


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
