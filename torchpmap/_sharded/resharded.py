"""Operations on values that span processes, where the blocks that the devices have do not suffice.

Along a cut dim, every device gets the whole operands, and keeps its block of the result.  Where the
operands of an elementwise operation are cut differently, one stays as it is, and every device gets
the others whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchpmap._base.pytree import tree_map
from torchpmap._layout.layout import replicated_layout, spread_layout
from torchpmap._sharded.draws import send_again
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.redistribute import redistributed
from torchpmap._sharded.rules.compute import elementwise
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.strides import strides_of_results
from torchpmap._sharded.transfer import is_whole_here, team_of
from torchpmap._sharded.views import Make, link_view

_aten = torch.ops.aten
RESHARDED = frozenset(
    {
        # taking rows and putting them together, and derivatives
        _aten.cat.default,
        _aten.select.int,
        _aten.select_backward.default,
        _aten.select_scatter.default,
        _aten.slice.Tensor,
        _aten.slice_backward.default,
        _aten.slice_scatter.default,
        # merging dims of which a later one is cut, as layers do with [time, batch, ...]
        _aten._unsafe_view.default,
        _aten.view.default,
        # each process draws the numbers of all rows, from the same seed
        _aten._sample_dirichlet.default,
        _aten._standard_gamma.default,
        _aten.binomial.default,
        _aten.multinomial.default,
        _aten.poisson.default,
    }
)


def run_resharded(
    make: Make, func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any]
) -> Any:
    """Run an operation; all processes must call it."""
    result = run_moved(make, func, args, kwargs, operands)
    devices = operands[0]._alive()[0].devices
    wanted = spread_layout(result.shape, result.dtype, devices)
    if type(result) is not type(operands[0]):
        return make(wanted, send_again(wanted, result, f"the result of {func}"))
    layout, handle = result._alive()
    if not layout.same_place(wanted):
        handle = redistributed(team_of(wanted), layout, handle, wanted)
    if not func.is_view:
        return make(wanted, handle)
    view = make(wanted, handle, strides=strides_of_results(func, args[0], args[1:])[0])
    link_view([view], args[0], func, args[1:])
    return view


def kept_of(func: Any, operands: Sequence[Any], targets: Sequence[Any]) -> Any:
    """The operand of an elementwise operation that stays as it is if the others are moved: the one
    that is written, or else the first that is cut.  None if moving others does not help.
    """
    if rule_of(func) is not elementwise or len(targets) > 1:
        return None
    if len({operand._alive()[0].devices for operand in operands}) > 1:
        return None
    spread = [operand for operand in operands if not is_whole_here(operand._alive()[0])]
    kept = (*targets, *spread)[0]
    return kept if any(operand is not kept for operand in spread) else None


def run_moved(
    make: Make, func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any]
) -> Any:
    """Run an operation with ``operands`` whole on every device; all processes must call it."""
    note_gather(func, sum(operand.nbytes for operand in operands))
    copies = {id(operand): _whole(make, operand) for operand in operands}
    given = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
    return func(*given[0], **given[1])


def _whole(make: Make, operand: Any) -> Any:
    layout, handle = operand._alive()
    wanted = replicated_layout(layout.shape, layout.dtype, layout.devices)
    if not layout.same_place(wanted):
        handle = redistributed(team_of(wanted), layout, handle, wanted)
    if operand.is_contiguous():
        return make(wanted, handle)
    return make(wanted, handle, strides=strides_of_results(_aten.clone.default, operand)[0])
