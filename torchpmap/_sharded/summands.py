"""Values of a graph for whole values, as a device has them, and what may run on parts of a sum.

Where devices have parts of a sum, a linear operation gives parts of its own result, so that the sum
can wait for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Node

from torchpmap._base.errors import size_text
from torchpmap._base.inexact import is_inexact
from torchpmap._layout.grid import Cut
from torchpmap._layout.mesh import PartitionSpec
from torchpmap._sharded.joined import Joined
from torchpmap._sharded.rules.signature import Call
from torchpmap._sharded.unforeseen import name_of

_LINEAR = frozenset(
    [
        *("_reshape_alias", "_unsafe_view", "alias", "clone", "detach", "mean", "neg"),
        *("permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "sum"),
        *("t", "transpose", "unbind", "unsqueeze", "view"),
    ]
)
"""Linear in their one tensor, and their results have no more elements than it."""
OF_SHAPES = frozenset(
    [
        *("empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like"),
        "zeros_like",
    ]
)
"""They ask for the shape and dtype of a tensor only, which need not be added up."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the whole graph, as a device has it."""

    block: Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Cut = ()
    over: tuple[int, ...] = ()
    """Dims of the grid along which the blocks are still to be added up."""
    is_weight: bool = False
    """A captured tensor, or a view of one, which is gathered where data is cut alike."""
    joined: Joined | None = None
    """Rows that are in another order on each device, along a dim."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Moved(NamedTuple):
    """An operand that an operation could not take as it lay."""

    operation: str
    place: str
    """The user's line."""
    kind: str
    """Dtype and shape of the whole."""
    before: PartitionSpec
    after: PartitionSpec
    num_bytes: int
    """Of the whole."""

    def __str__(self) -> str:
        moved = f"{self.kind} from {self.before} to {self.after}"
        at = f" at {self.place}" if self.place else ""
        return f"{self.operation}: {moved} ({size_text(self.num_bytes)}){at}"


def carried(
    call: Call, values: Sequence[Value], results: Sequence[torch.Tensor]
) -> tuple[int, ...] | None:
    """The dims along which results may stay parts of sums, as operands are; None: these sums must
    be made first.
    """
    parts = [value for value in values if value.over]
    name = name_of(call.func)
    if not parts or name in OF_SHAPES:
        return ()
    kinds = {value.dtype for value in parts} | {result.dtype for result in results}
    if len(kinds) > 1 or not is_inexact(results[0]) or call.arguments.get("rounding_mode"):
        return None  # a part that is rounded, or wrapped, gives another sum
    is_each = len({value.over for value in values}) == 1
    is_linear = (
        (name in _LINEAR and len(values) == 1)
        or (name == "cat" and is_each)
        or (
            name in ("add", "sub")
            and is_each
            and [v.shape for v in values[1:]] == [values[0].shape]
        )
        or (name in ("mul", "div") and len(values) == 1 and _is_small(call, name))
    )
    return parts[0].over if is_linear and len(values) == len(parts) else None


def _is_small(call: Call, name: str) -> bool:
    """Whether parts stay finite where their sum does, if they are multiplied or divided first."""
    factor = call.arguments["other"]
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        return False
    return 0 < abs(factor) <= 1 if name == "mul" else abs(factor) >= 1
