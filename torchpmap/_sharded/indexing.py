"""Assignments ``x[index] = value``, and indices that are masks.

``x[:, 0] = 1`` is a write through a view, unless this is a slice of a cut dim: then a copy of the
whole value is written in this process, which has it, and sent.  Views would gather, and be a plan
for each place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchpmap._layout.layout import Layout
from torchpmap._sharded.gather_report import note_gather

_aten = torch.ops.aten
_FILLING = {
    _aten.index_put.default: _aten.masked_fill.Tensor,
    _aten.index_put_.default: _aten.masked_fill_.Tensor,
}
_MASKS = (torch.bool, torch.uint8)
INDEXING = frozenset([_aten.index.Tensor, *_FILLING])


def plain_index(index: Any) -> Any:
    """An index as torch reads it: with tensors in place of lists and arrays, and a number in place
    of a tensor of one.
    """
    if isinstance(index, tuple):
        return tuple(map(plain_index, index))
    if isinstance(index, torch.Tensor):
        is_number = index.dim() == 0 and index.dtype not in _MASKS
        return int(index) if is_number and not index.is_floating_point() else index
    if type(index) is list and all(isinstance(x, bool | int) for x in index):
        return torch.as_tensor(index, dtype=None if index else torch.int64)
    return torch.as_tensor(index) if isinstance(index, np.ndarray) else index


def slices_a_cut(layout: Layout, index: Any) -> bool:
    """Whether an index has a slice for a dim that is cut, or an entry that only torch
    understands.
    """
    entries = index if isinstance(index, tuple) else (index,)
    counts = [_num_dims(entry) for entry in entries]
    if -1 in counts:
        return True
    pairs = list(zip(layout.shape, layout.block_shape, strict=True))
    dim = 0
    for entry, count in zip(entries, counts, strict=True):
        if entry is Ellipsis:
            count = max(len(pairs) - sum(counts), 0)
        elif not isinstance(entry, torch.Tensor):
            for size, block in pairs[dim : dim + count]:
                if size != block and isinstance(entry, slice) and not _is_whole(entry, size):
                    return True
        dim += count
    return False


def _num_dims(entry: Any) -> int:
    """How many dims an entry of an index takes; -1: not known."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, torch.Tensor):
        return entry.dim() if entry.dtype in _MASKS else 1
    return 1 if isinstance(entry, slice) or hasattr(entry, "__index__") else -1


def _is_whole(entry: Any, size: int) -> bool:
    return isinstance(entry, slice) and entry.indices(size) == (0, size, 1)


def without_masks(
    func: Any, args: Sequence[Any], layout: Layout
) -> tuple[Any, tuple[Any, ...]] | None:
    """An equal call whose result has a known shape, where a mask prevents that: with the places
    that the mask selects, or as ``masked_fill``; None if there is none.

    ``func``: one of ``INDEXING``; ``layout``: of the indexed value.
    """
    x, indices, *rest = args
    masks = dict(_masks(indices))
    if not masks or not all(
        mask.dim() and mask.shape == x.shape[dim : dim + mask.dim()] for dim, mask in masks.items()
    ):
        return None  # torch has an error for it, or a meaning that needs no values
    if func in _FILLING and _is_number(*rest) and sum(x is not None for x in indices) == 1:
        ((dim, mask),) = masks.items()
        shape = (*(1,) * dim, *mask.shape, *(1,) * (x.dim() - dim - mask.dim()))
        return _FILLING[func], (x, mask.reshape(shape), rest[0].reshape(()))
    cut = {dim for dim, size in enumerate(x.shape) if size != layout.block_shape[dim]}
    if any(cut.intersection(range(dim, dim + mask.dim())) for dim, mask in masks.items()):
        return None
    fetched = [mask for mask in masks.values() if hasattr(mask, "to_host")]
    if fetched and func not in _FILLING:
        return None  # fetching all has the same result
    if fetched:
        note_gather(func, sum(mask.nbytes for mask in fetched))
    return func, (x, list(_places(indices)), *rest)


def _is_number(value: torch.Tensor, accumulate: bool = False) -> bool:
    return value.numel() == 1 and not accumulate


def _masks(indices: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Each mask, and the first of the dims that it is for."""
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool
        if is_mask:
            yield dim, index
        dim += index.dim() if is_mask else 1


def _places(indices: Sequence[Any]) -> Iterator[Any]:
    for index in indices:
        if index is None or index.dtype is not torch.bool:
            yield index
        else:
            yield from index.cpu().nonzero().unbind(1)
