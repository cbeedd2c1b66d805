"""One operation on the blocks of its operands: what a device calls, and what comes out (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.pytree import tree_leaves
from torchpmap._layout.grid import Cut, block_shape
from torchpmap._sharded.arguments import Slot, filled
from torchpmap._sharded.rules.signature import Call, Combination, Operand, Placement
from torchpmap._sharded.trial import Trial, check_here, masked, meta, on_meta
from torchpmap._sharded.unforeseen import ROUNDED

_aten = torch.ops.aten
_UNKNOWN_TO_INDUCTOR = (torch.uint16, torch.uint32, torch.uint64)
"""It compiles no ``torch.where`` of them (torch 2.13)."""


def described(trial: Trial, sizes: tuple[int, ...], cuts: Mapping[int, Cut]) -> Call:
    """A call as rules see it; ``cuts``: of the operands that have one, by position."""
    operands = {
        position: Operand(
            position,
            tuple(value.shape),
            cuts.get(position, ()),
            position in trial.written,
            value.itemsize,
        )
        for position, value in enumerate(trial.values)
        if isinstance(value, torch.Tensor)
    }
    defaults = {
        argument.name: argument.default_value
        for argument in trial.func._schema.arguments
        if argument.has_default_value()
    }
    values = [operands.get(position, value) for position, value in enumerate(trial.values)]
    return Call(
        trial.func,
        defaults | filled(trial.arguments, values),
        tuple(operands.values()),
        tuple(tuple(result.shape) for result in trial.results),
        sizes,
    )


@dataclass(frozen=True)
class OnBlocks:
    """A call, and where its operands and results lie."""

    trial: Trial
    call: Call
    placement: Placement

    @property
    def cuts(self) -> list[Cut]:
        """Of the new values of what it writes, and of its results."""
        written = [self.placement.operands[position] for position in self.trial.written]
        return [*written, *(self.placement.results if self.trial.makes_new else ())]

    def block_shape(self, shape: Sequence[int], cut: Cut) -> list[int]:
        return block_shape(shape, cut, self.call.sizes)

    def block_call(self) -> tuple[Any, dict[str, Any]]:
        """The same operation with the sizes of blocks."""
        placement = self.placement
        shape = self.block_shape(self.call.results[0], placement.results[0])
        if placement.signature.as_view:
            return _aten.view.default, {"self": Slot(0), "size": shape}
        if placement.signature.size is not None:
            return self.trial.func, self.trial.arguments | {placement.signature.size: shape}
        return self.trial.func, self.trial.arguments

    @property
    def rounds_parts(self) -> bool:
        """Whether partial results would be rounded before they are added up."""
        combinations = zip(self.trial.results, self.placement.combine, strict=True)
        return not (self.trial.written or self.placement.rows) and any(
            result.dtype in ROUNDED and self.is_sent(how) and how.kind not in ("max", "min")
            for result, how in combinations
            if how is not None
        )

    def is_sent(self, how: Combination) -> bool:
        """Whether putting a result together takes communication."""
        return how.kind != "equal" and self.call.parts(how.over) > 1

    @property
    def added_along(self) -> tuple[int, ...]:
        """The dims of the grid along which devices add what only one of them may."""
        return next((how.over for how in self.placement.combine if how and self.is_sent(how)), ())

    def is_refused(self) -> bool:
        """Whether the kernel of CPUs refuses what it takes as a whole: some refuse one element."""
        if self.placement.rows is not None:
            return False
        try:
            check_here(*self.block_call(), self._blocks())
        except Exception:
            return True
        return False

    def fits(self) -> bool:
        """Whether results come out in the shapes and dtypes of their blocks."""
        if self.placement.rows is not None:
            (result,) = self.trial.results
            is_float8 = result.itemsize == 1 and result.is_floating_point()  # it may have no zero
            return not is_float8 and result.dtype not in _UNKNOWN_TO_INDUCTOR
        func, arguments = self.block_call()
        blocks = self._blocks()
        try:
            made = masked(on_meta(func, arguments, blocks), arguments)
        except Exception:
            return False
        if not self.trial.makes_new:
            made = [blocks[position] for position in self.trial.written]
        cuts = self.cuts[-len(self.trial.results) :]
        made = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        found = [(list(x.shape), x.dtype) for x in made]
        return found == [
            (self.block_shape(result.shape, cut), result.dtype)
            for result, cut in zip(self.trial.results, cuts, strict=True)
        ]

    def _blocks(self) -> list[Any]:
        cuts = self.placement.operands
        return [
            meta(self.block_shape(x.shape, cuts[k]), x.dtype) if isinstance(x, torch.Tensor) else x
            for k, x in enumerate(self.trial.values)
        ]
