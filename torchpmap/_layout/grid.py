"""The devices of a mapped call as an array, with one dim per mapped axis that shares them.

A *cut* says how an input or output of a program lies on the grid: for each dim of the value, the
dims of the grid that cut it, the slowest first.  Devices along any other dim of the grid hold the
same.

    grid (2, 4), value [2, 5, 4]   cut ((0,), (), (1,)): device (r, c) holds value[r:r+1, :, c:c+1]
                                   cut ((), (), (1,)): it holds value[:, :, c:c+1]
                 value [16]        cut ((1, 0),): it holds value[4 * c + 2 * r : 4 * c + 2 * r + 2]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchpmap._base.devices import Device
from torchpmap._layout.axis_stack import Axis, Partition, mesh_axes
from torchpmap._layout.layout import (
    DEFAULT_AXIS_NAME,
    Layout,
    general_layout,
    replicated_layout,
    row_layout,
)
from torchpmap._layout.mesh import NamedSharding, PartitionSpec, mesh_of, names_of

Cut = tuple[tuple[int, ...], ...]
"""Dims beyond the last entry are not cut; the last entry is not empty."""


def cut_at(dim: int | None) -> Cut:
    """A value whose dim ``dim`` is cut over the first dim of the grid."""
    return () if dim is None else (*((),) * dim, (0,))


def dim_of(cut: Cut, grid_dim: int) -> int | None:
    """The dim of a value that is cut over a dim of the grid."""
    return next((dim for dim, over in enumerate(cut) if grid_dim in over), None)


def trimmed(entries: Iterable[tuple[int, ...]]) -> Cut:
    """A cut, without the entries of the last dims that are not cut."""
    cut = list(entries)
    while cut and not cut[-1]:
        del cut[-1]
    return tuple(cut)


def padded(cut: Cut, ndim: int) -> Cut:
    """A cut with an entry for each of so many dims, or more."""
    return *cut, *((),) * (ndim - len(cut))


def block_shape(shape: Sequence[int], cut: Cut, sizes: Sequence[int]) -> list[int]:
    """The shape of a block of a whole value, on a grid of these sizes."""
    entries = zip(shape, padded(cut, len(shape)), strict=True)
    return [n // math.prod(sizes[k] for k in over) for n, over in entries]


def nested(dim: int | None, inner: Cut) -> Cut:
    """The cut of stacked values: a new dim at ``dim`` is cut over the first dim of the grid, and
    those that were there, as ``inner`` says, over the dims after it.
    """
    inside = tuple(tuple(k + 1 for k in over) for over in inner)
    if dim is None:
        return inside
    front = inside[:dim] + ((),) * (dim - len(inside))
    return (*front, (0,), *inside[dim:])


@dataclass(frozen=True)
class Grid:
    """Devices in row-major order.  With several processes each has rows on its own devices only,
    and the grid has one dim.
    """

    devices: tuple[Device, ...]
    """The devices that hold the blocks of this process."""
    axis_devices: tuple[Device, ...]
    """All devices of the axes: the same unless there are several processes."""
    sizes: tuple[int, ...]
    names: tuple[Hashable, ...]
    """Of the axes, the outermost first; None for an axis without a name."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(device.id for device in self.axis_devices)

    @property
    def sizes_here(self) -> tuple[int, ...]:
        """The sizes of the part of the grid that holds the rows of this process."""
        return self.sizes if self.is_one_process else (len(self.devices),)

    @property
    def is_one_process(self) -> bool:
        return len(self.devices) == len(self.axis_devices)

    def blocks_of(self, layout: Layout) -> tuple[int, ...]:
        """A number for every device of the axes, equal for devices known to hold equal blocks."""
        count = len(self.axis_devices)
        if len(layout.ranks) < count:  # those of other processes hold anything
            return tuple(range(count))
        dims = sorted(itertools.chain(*self.cut_of(layout)))
        places = np.indices(self.sizes).reshape(len(self.sizes), -1)[dims]
        sizes = [self.sizes[k] for k in dims]
        return tuple(np.ravel_multi_index(tuple(places), sizes).tolist()) if dims else (0,) * count

    def layout(self, shape: Sequence[int], dtype: torch.dtype, cut: Cut) -> Layout:
        """The layout of a value with this cut."""
        if not cut:
            return replicated_layout(shape, dtype, self.axis_devices)
        if len(self.sizes) == 1 or len(self.devices) == 1:
            dim = next(dim for dim, over in enumerate(cut) if over)
            return row_layout(shape, dtype, self.devices, dim, self.names[cut[dim][0]])
        names = self._distinct_names()
        spec = PartitionSpec(*(tuple(names[k] for k in over) or None for over in cut))
        mesh = mesh_of(self.sizes, names, self.devices)
        return general_layout(shape, dtype, NamedSharding(mesh, spec), stacked=True)

    def stacked(self, block_shape: Sequence[int], dtype: torch.dtype, cut: Cut) -> Layout:
        """The layout of a value whose blocks have this shape."""
        shape = list(block_shape)
        for dim, over in enumerate(cut):
            shape[dim] *= math.prod(self.sizes_here[k] for k in over)
        return self.layout(shape, dtype, cut)

    def cut_of(self, layout: Layout) -> Cut:
        """The cut of a layout of this grid."""
        if layout.is_replicated or len(self.sizes) == 1 or len(self.devices) == 1:
            return cut_at(layout.dim)
        place = {name: k for k, name in enumerate(self._distinct_names())}
        return tuple(tuple(place[name] for name in names_of(e)) for e in layout.sharding.spec)

    def extended(self, layout: Layout, size: int) -> Layout:
        """The layout with one more dim of this size at the end."""
        shape = (*layout.shape, size)
        if layout.is_replicated:
            return replicated_layout(shape, layout.dtype, layout.devices)
        return self.layout(shape, layout.dtype, self.cut_of(layout))

    def copies(self, cut: Cut) -> int:
        """How many devices hold each block."""
        return math.prod(size for k, size in enumerate(self.sizes) if dim_of(cut, k) is None)

    def shared_along(self, cut: Cut, whole: Axis) -> tuple[Axis, ...]:
        """The axes along which all devices hold the same; ``whole`` is the axis of all devices."""
        axes = enumerate(mesh_axes(whole, self.sizes, self.names))
        return tuple(axis for k, axis in axes if axis is not None and dim_of(cut, k) is None)

    def axes_along(self, partition: Partition) -> str:
        """The names of the axes along which these groups of places lie: ``"rows, cols"``.  Groups
        that are parts of lines, as ``axis_index_groups`` are, count as the whole lines.
        """
        sizes = self.sizes if math.prod(self.sizes) == len(self.ranks) else (len(self.ranks),)
        dims = [
            dim
            for dim in range(len(sizes))
            if any(len({np.unravel_index(k, sizes)[dim] for k in part}) > 1 for part in partition)
        ]
        names = [DEFAULT_AXIS_NAME if self.names[dim] is None else self.names[dim] for dim in dims]
        return ", ".join(map(str, names))

    def _distinct_names(self) -> tuple[Hashable, ...]:
        """Names for a mesh; an axis without a name, or hidden by an inner axis, gets a new one."""
        return tuple(
            f"{DEFAULT_AXIS_NAME}{k}" if name is None or name in self.names[k + 1 :] else name
            for k, name in enumerate(self.names)
        )
