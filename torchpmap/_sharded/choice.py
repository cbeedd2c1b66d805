"""Where an operation runs if its operands do not lie as it needs them: at the least cost in bytes.

Each operand keeps its cut, gives up a part of it (it is gathered), or moves one dim of the grid to
another of its dims (one all-to-all).  Where a weight and data are cut along the same dim of the
grid, the weight is gathered: that is fully sharded training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torchpmap._layout.grid import Cut, padded, trimmed
from torchpmap._sharded.rules.signature import Call, Operand, Placement, Rule, placement_of

_MAX_TRIED = 2**18
"""Ways to lay out one operand; of n operands there are n * n times fewer, as each takes longer."""
_NEVER = 1e12
"""Bytes: data yields to a weight only where nothing else is possible."""
_LOCAL = 0.25
"""Cost of a byte that a device reads or writes, in bytes that it sends."""


def chosen(
    call_with: Callable[[Mapping[int, Cut]], Call],
    cuts: Mapping[int, Cut],
    rule: Rule | None,
    *,
    weights: Collection[int] = (),
    wish: Cut = (),
    uses: int = 1,
    is_row: bool = False,
) -> tuple[Call, Placement]:
    """The call with the cuts that its operands are brought to, and how it runs then.

    Args:
        call_with: the call, if operands have these cuts, by position.
        cuts: how they lie.
        rule: of the operation; without one all operands are gathered.
        weights: positions of the operands that are weights.
        wish: the cut of the first result, if operands allow it as they lie.
        uses: how many such calls can use the operands that are brought.
        is_row: whether it takes a single row, which is sent whatever else is less.
    """
    call = call_with(cuts)
    placement = placement_of(call, rule, wish)
    if placement and (is_row or not (placement.rows and any(placement.combine))):
        return call, placement  # else a sum may be larger than the operand
    operands, sizes = call.operands if rule else (), call.sizes
    places = [operand.position for operand in operands]
    of_weights = {k for o in operands if o.position in weights for over in o.cut for k in over}
    options = [
        sorted(_options(o, sizes, o.position in weights, of_weights), key=lambda option: option[1])
        for o in operands
    ]
    best: tuple[float, Call, Placement] | None = None
    most = _MAX_TRIED // max(len(operands), 1) ** 2
    for combination in itertools.islice(itertools.product(*options), most):
        cost = sum(price for _, price in combination) / uses
        if best is not None and cost >= best[0]:
            continue
        call = call_with(dict(zip(places, (cut for cut, _ in combination), strict=True)))
        placement = placement_of(call, rule)
        if placement is not None:
            cost += _work(call, placement)
            if best is None or cost < best[0]:
                best = cost, call, placement
    if best is None:  # too many ways, of which the last is to gather all
        call = call_with({})
        placement = placement_of(call, rule)
        assert placement is not None
        return call, placement
    return best[1:]


def _options(
    operand: Operand, sizes: Sequence[int], is_weight: bool, of_weights: set[int]
) -> Iterator[tuple[Cut, float]]:
    """Cuts that an operand may be brought to, and what it costs to send it there."""
    num_bytes = math.prod(operand.shape) * operand.itemsize
    places = [(dim, k) for dim, over in enumerate(operand.cut) for k in over]
    for count in range(len(places) + 1):
        for dropped in itertools.combinations(places, count):
            cut = trimmed(
                tuple(k for k in over if (dim, k) not in dropped)
                for dim, over in enumerate(operand.cut)
            )
            yields = not is_weight and any(k in of_weights for _, k in dropped)
            parts = math.prod(sizes[k] for _, k in dropped)
            yield cut, num_bytes * (1 - 1 / parts) + _NEVER * yields
            if len(dropped) == 1 and not (is_weight or operand.written):
                for moved in _moved(operand, cut, dropped[0], sizes):
                    yield moved, num_bytes / parts * (1 - 1 / parts) + 1 + _NEVER * yields


def _moved(
    operand: Operand, cut: Cut, place: tuple[int, int], sizes: Sequence[int]
) -> Iterator[Cut]:
    """The cuts with a dim of the grid at another dim of the operand."""
    dim, k = place
    entries = list(padded(cut, len(operand.shape)))
    for other, size in enumerate(operand.shape):
        more = (*entries[other], k)
        if other != dim and size % math.prod(sizes[j] for j in more) == 0:
            yield trimmed([*entries[:other], more, *entries[other + 1 :]])


def _work(call: Call, placement: Placement) -> float:
    """What it costs a device to read, to write, and to put results together."""
    cost = 0.0
    for operand in call.operands:
        own = math.prod(operand.shape) / _parts(call, placement.operands[operand.position])
        cost += _LOCAL * own * operand.itemsize
    itemsize = max((operand.itemsize for operand in call.operands), default=4)
    for shape, cut, how in zip(call.results, placement.results, placement.combine, strict=True):
        own = math.prod(shape) / _parts(call, cut) * itemsize
        cost += _LOCAL * own
        if how is not None and how.kind != "equal":
            cost += 2 * own
    return cost


def _parts(call: Call, cut: Cut) -> int:
    return call.parts(k for over in cut for k in over)
