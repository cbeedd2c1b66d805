"""Operations that run in this process: a call on meta tensors does not show what devices return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchpmap._layout.layout import Layout

ROUNDED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
"""Dtypes with too few digits for partial results, and the dtypes that these get instead."""

_UNFORESEEN = frozenset(
    [
        "_batch_norm_no_update",
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
    ]
)
"""Operations whose results on the CPU are undefined or have other shapes than on meta tensors.

The list is complete for the operations in the tests of torch 2.13 (``op_db``) and in ``nn.LSTM``.
These batch norms run on the host only if they do not train.
"""

_ROUNDING_STATISTICS = frozenset(["_batch_norm_with_update", "_native_batch_norm_legit"])
"""The same if all operands are in half precision: only the CPU rounds the statistics to it."""
_ASSIGNING = frozenset(["index_put", "index_put_"])


def name_of(func: Any) -> str:
    """Without its namespace and overload."""
    name: str = func._schema.name.removeprefix("aten::")
    return name


def has_unforeseen_results(
    func: Any, named: dict[str, Any], operands: Sequence[Any], layout: Layout
) -> bool:
    """Whether a call on meta tensors does not show what the call on devices returns."""
    name = name_of(func)
    if name in _UNFORESEEN and named.get("training") is not True:
        return True
    on_cpu = layout.devices[0].platform == "cpu"
    if name in _ASSIGNING and not _is_foreseen_assignment(**named):
        return True
    dtypes = {x.dtype for x in operands if isinstance(x, torch.Tensor)}
    return name in _ROUNDING_STATISTICS and on_cpu and dtypes <= ROUNDED.keys()


def _is_foreseen_assignment(
    self: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, **_: Any
) -> bool:
    """Meta tensors take any dtype, and masks of any shape."""
    given = (index for index in indices if index is not None)
    is_masked = any(index.dtype in (torch.bool, torch.uint8) for index in given)
    return values.dtype == self.dtype and not is_masked


def is_random(func: Any, named: dict[str, Any]) -> bool:
    """Whether the results depend on a generator."""
    arguments = {argument.name: argument for argument in func._schema.arguments}
    dropout = arguments.get("dropout_p")
    # torch leaves out arguments that are equal to their defaults
    if dropout is not None and named.get("dropout_p", dropout.default_value) == 0:
        return False
    return torch.Tag.nondeterministic_seeded in func.tags or "generator" in arguments
