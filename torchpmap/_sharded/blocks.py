"""What a device does before and after an operation on its blocks; operations' graphs call it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchpmap._base.torch_internals import FakeTensor
from torchpmap._collectives import backend as raw
from torchpmap._collectives.groups import pick
from torchpmap._sharded.rules.signature import Combine


def place_along(index: torch.Tensor, sizes: Sequence[int], over: Sequence[int]) -> torch.Tensor:
    """The place of device ``index`` of a grid along some of its dims, the first the slowest."""
    place = torch.zeros_like(index)
    for k in over:  # device 5 of a grid of (2, 4): 5 // 4 = 1 along dim 0, 5 % 4 along dim 1
        place = place * sizes[k] + index // math.prod(sizes[k + 1 :]) % sizes[k]
    return place


def added_once(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """``x`` on the first of the devices that add up partial results, zeros on the others."""
    return torch.where(place == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))


def own_block(whole: torch.Tensor, dim: int, size: int, index: torch.Tensor) -> torch.Tensor:
    """The block at place ``index`` of a value that this device holds whole, contiguous as stored
    blocks are.

    Some kernels ignore strides: ``native_layer_norm_backward`` reads ``mean`` and ``rstd`` as if
    they were contiguous, because torch's own always are.
    """
    rows = whole.shape[dim] // size
    if index.is_cpu and not isinstance(index, FakeTensor):  # else it is traced
        return whole.narrow(dim, int(index) * rows, rows).contiguous()
    # reading the index would wait for all that the device has to do
    return pick(whole.unflatten(dim, (size, rows)).movedim(dim, 0), index).contiguous()


def listed(index: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """``numbers[index]`` as a tensor."""
    return pick(index.new_tensor(numbers), index)


def joined(block: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """The blocks of a group put together along a dim, on every device of it; contiguous."""
    return raw.all_gather(block, size, group).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def combined(
    part: torch.Tensor, kind: Combine, size: int, group: str, order: float | None
) -> torch.Tensor:
    """Combine partial results into the whole, on every device; ``order`` is that of a norm."""
    if kind == "sum" or kind == "max" or kind == "min":
        return raw.all_reduce(part, kind, group)
    if kind == "mean":
        return raw.all_reduce(part / size, "sum", group)
    parts = raw.all_gather(part, size, group)
    if kind == "prod":
        return parts.prod(0, dtype=part.dtype)
    if kind == "logsumexp":
        return parts.logsumexp(0)
    assert kind == "norm", kind
    return torch.linalg.vector_norm(parts, 2 if order is None else order, dim=0)


def stored(block: torch.Tensor) -> torch.Tensor:
    """A block as it is kept: contiguous, and not a part of a larger memory.

    It may share its memory with another value, for example after a reshape: values are immutable.
    """
    block = block.resolve_conj().resolve_neg()
    alone = block.untyped_storage().nbytes() == block.numel() * block.itemsize
    if alone and block.is_contiguous():
        return block
    return block.clone(memory_format=torch.contiguous_format)


def in_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The same matrices, stored by columns."""
    return matrix.mT.contiguous().mT


def exchanged(block: torch.Tensor, dim: int, other: int, size: int, group: str) -> torch.Tensor:
    """The blocks of a group joined along ``dim``, and cut along ``other``: a device sends each of
    the others the part that it keeps.  Contiguous.
    """
    rows = block.unflatten(other, (size, block.shape[other] // size)).movedim(other, 0)
    parts = raw.all_to_all(rows, size, group)
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def added_up(parts: Sequence[torch.Tensor], group: str) -> list[torch.Tensor]:
    """The sums of the parts of a group, on every device of it."""
    return raw.all_reduce_many(parts, "sum", group)


def added_and_cut(
    parts: Sequence[torch.Tensor], dims: Sequence[int], size: int, group: str
) -> list[torch.Tensor]:
    """Of the sum of each part over a group, this device's block along its dim; one message."""
    rows = [
        x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0)
        for x, dim in zip(parts, dims, strict=True)
    ]
    flat = torch.cat([x.reshape(size, -1) for x in rows], 1)
    own = raw.reduce_scatter(flat, size, group).split([x[0].numel() for x in rows])
    return [x.reshape(row.shape[1:]) for x, row in zip(own, rows, strict=True)]
