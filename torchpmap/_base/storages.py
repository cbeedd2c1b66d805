"""Storages, by which tensors that lie in the same memory are known."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchpmap._base.torch_internals import innermost, torch_function_off


def storage_of(value: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of the tensor below all transforms; None if it has none, as sparse ones.

    The storage of a ShardedTensor has no memory: its method of the same name would fetch the value.
    """
    value = innermost(value)
    with torch_function_off():  # no access of the user's
        try:
            return torch.Tensor.untyped_storage(value)
        except (NotImplementedError, RuntimeError):
            return None


def storage_number(value: torch.Tensor) -> int | None:
    """The number of its storage, which no other has while that one is alive."""
    storage = storage_of(value)
    return None if storage is None else int(storage._cdata)


def own_strides(x: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is not contiguous; None of others, and of sparse ones."""
    try:
        return None if x.is_contiguous() else x.stride()
    except RuntimeError:
        return None


def apart(tensors: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, or copies, so that they share memory neither with each other nor with others."""
    used = {x.untyped_storage()._cdata for x in given}
    found = []
    for x in tensors:
        found.append(x.clone() if x.untyped_storage()._cdata in used else x)
        used.add(found[-1].untyped_storage()._cdata)
    return found


def memory_order(x: torch.Tensor) -> list[int]:
    """The dims as they lie in memory, the slowest first; those of one element, or that are
    expanded, stay where they are.
    """
    dims = [dim for dim in range(x.dim()) if x.shape[dim] > 1 and x.stride()[dim]]
    moved = dict(zip(dims, sorted(dims, key=lambda dim: -x.stride()[dim]), strict=True))
    return [moved.get(dim, dim) for dim in range(x.dim())]
