"""What a value on the workers looks like: its logical shape and which block each rank holds.

A block has as many dims as the whole value.  Layouts are interned: the key of a call compares them
by identity, so asking "is this argument where the plan wants it" costs one dictionary lookup
however many leaves there are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.devices import Device
from torchpmap._layout.mesh import NamedSharding, replicated, row_sharding

DEFAULT_AXIS_NAME = "devices"


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Layout:
    """Shape, dtype and placement of a sharded value (compared by identity; made by the functions
    below).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding
    devices: tuple[Device, ...]
    """In mesh order; ``ranks`` are their ids."""
    ranks: tuple[int, ...]
    dim: int | None
    """The dim that is cut into equal blocks of rows, the k-th on the k-th device; None if every
    device holds everything (or for a general sharding).
    """
    is_replicated: bool

    @property
    def slices(self) -> tuple[tuple[slice, ...], ...]:
        """Per rank, the part of the whole that its block is."""
        where = self.sharding.devices_indices_map(self.shape)
        return tuple(where[device] for device in self.devices)

    @property
    def block_shape(self) -> tuple[int, ...]:
        return tuple(self.sharding.shard_shape(self.shape))

    def same_place(self, other: Layout) -> bool:
        """Whether both put the same block on the same rank (axis names do not matter)."""
        return self is other or (
            self.shape == other.shape
            and self.dtype == other.dtype
            and self.ranks == other.ranks
            and (len(self.ranks) == 1 or self._same_blocks(other))
        )

    def _same_blocks(self, other: Layout) -> bool:
        return (
            self.is_replicated == other.is_replicated
            and self.dim == other.dim
            and (self.dim is not None or self.is_replicated or self.slices == other.slices)
        )


_interned: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()


def row_layout(
    shape: Sequence[int],
    dtype: torch.dtype,
    devices: tuple[Device, ...],
    dim: int,
    axis_name: Hashable,
) -> Layout:
    """The rows of ``dim``, in equal blocks, live on the devices in order."""
    name = DEFAULT_AXIS_NAME if axis_name is None else axis_name
    key = (tuple(shape), dtype, devices, dim, name)
    return _interned_as(key, lambda: (row_sharding(devices, name, dim), dim))


def replicated_layout(
    shape: Sequence[int], dtype: torch.dtype, devices: tuple[Device, ...]
) -> Layout:
    """Every device holds the whole value."""
    key = (tuple(shape), dtype, devices)
    return _interned_as(key, lambda: (replicated(devices), None), is_replicated=True)


def spread_layout(shape: Sequence[int], dtype: torch.dtype, devices: tuple[Device, ...]) -> Layout:
    """Cut the first dim that divides over the devices; if there is none, replicate the value."""
    for dim, size in enumerate(shape):
        if size and size % len(devices) == 0:
            return row_layout(shape, dtype, devices, dim, None)
    return replicated_layout(shape, dtype, devices)


def _interned_as(
    key: tuple[Any, ...],
    make: Callable[[], tuple[NamedSharding, int | None]],
    *,
    is_replicated: bool = False,
) -> Layout:
    """``key``: begins with shape, dtype and devices; ``make``: gives the sharding and the dim."""
    layout = _interned.get(key)
    if layout is None:
        shape, dtype, devices = key[:3]
        sharding, dim = make()
        ranks = tuple(device.id for device in devices)
        layout = Layout(shape, dtype, sharding, devices, ranks, dim, is_replicated)
        _interned[key] = layout
    return layout


def general_layout(
    shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, *, stacked: bool = False
) -> Layout:
    """The layout of any named sharding (``ValueError`` if the shape does not divide); ``stacked``:
    a value that is cut only over mesh axes of size 1 counts as rows, not as replicated.
    """
    shape = tuple(shape)
    sharding.shard_shape(shape)
    devices = tuple(sharding.mesh.devices.flat)
    if sharding.is_fully_replicated and not stacked:
        return replicated_layout(shape, dtype, devices)
    key = (shape, dtype, devices, sharding)
    return _interned_as(key, lambda: (sharding, _row_dim(shape, sharding)))


def _row_dim(shape: tuple[int, ...], sharding: NamedSharding) -> int | None:
    """The dim whose k-th block is what the k-th device of the mesh holds, if there is one."""
    indices = sharding.devices_indices_map(shape).values()
    block_shape = tuple(sharding.shard_shape(shape))
    for dim, rows in enumerate(block_shape):
        if block_shape != (*shape[:dim], rows, *shape[dim + 1 :]):
            continue  # blocks of no rows are equal, but here they are cut along another dim too
        if rows * sharding.mesh.size == shape[dim] and all(
            index[dim] == slice(k * rows, (k + 1) * rows) for k, index in enumerate(indices)
        ):
            return dim
    return None


@dataclass(frozen=True)
class Shard:
    """One device's block of a ``ShardedTensor``."""

    device: Device
    index: tuple[slice, ...]
    """Which part of the whole it is."""
    replica_id: int
    data: torch.Tensor
    """The block as a CPU tensor, with the dims of the whole."""
