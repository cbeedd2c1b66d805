"""The devices of a mapped call as an array, with one dim per mapped axis that shares them.

A *cut* says how an input or output of a program lies on the grid: for each dim of the grid, the dim
of the value that is cut over it, or None if all devices along it hold the same.

    grid (2, 4), value [2, 5, 4]   cut (0, 2): device (r, c) holds value[r, :, c]
                                   cut (None, 2): it holds value[:, :, c]
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
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
from torchpmap._layout.mesh import NamedSharding, PartitionSpec, make_mesh

Cut = tuple[int | None, ...]


def shifted(cut: Cut, dim: int | None) -> Cut:
    """The cut of a value after a new dim is inserted at ``dim``."""
    if dim is None:
        return cut
    return tuple(k if k is None or k < dim else k + 1 for k in cut)


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

    def is_same(self, layout: Layout) -> bool:
        """Whether all devices are known to hold the same block."""
        return layout.is_replicated and len(layout.ranks) == len(self.axis_devices)

    def layout(self, shape: Sequence[int], dtype: torch.dtype, cut: Cut) -> Layout:
        """The layout of a value with this cut."""
        dims = [dim for dim in cut if dim is not None]
        if not dims:
            return replicated_layout(shape, dtype, self.axis_devices)
        if len(self.sizes) == 1 or len(self.devices) == 1:
            return row_layout(shape, dtype, self.devices, dims[0], self.names[cut.index(dims[0])])
        names = self._distinct_names()
        entries: list[Hashable] = [None] * len(shape)
        for dim, name in zip(cut, names, strict=True):
            if dim is not None:
                entries[dim] = name
        spec = PartitionSpec(*entries[: max(dims) + 1])
        mesh = make_mesh(self.sizes, names, devices=self.devices)
        return general_layout(shape, dtype, NamedSharding(mesh, spec), stacked=True)

    def stacked(self, block_shape: Sequence[int], dtype: torch.dtype, cut: Cut) -> Layout:
        """The layout of a value whose blocks have this shape."""
        shape = list(block_shape)
        for size, dim in zip(self.sizes_here, cut, strict=True):
            if dim is not None:
                shape[dim] *= size
        return self.layout(shape, dtype, cut)

    def cut_of(self, layout: Layout) -> Cut:
        """The cut of a layout of this grid."""
        if layout.is_replicated:
            return (None,) * len(self.sizes)
        if len(self.sizes) == 1:
            return (layout.dim,)
        if len(self.devices) == 1:
            return (layout.dim, *(None,) * (len(self.sizes) - 1))
        dims = {name: dim for dim, name in enumerate(layout.sharding.spec)}
        return tuple(dims.get(name) for name in self._distinct_names())

    def extended(self, layout: Layout, size: int) -> Layout:
        """The layout with one more dim of this size at the end."""
        shape = (*layout.shape, size)
        if layout.is_replicated:
            return replicated_layout(shape, layout.dtype, layout.devices)
        return self.layout(shape, layout.dtype, self.cut_of(layout))

    def copies(self, cut: Cut) -> int:
        """How many devices hold each block."""
        return math.prod(size for size, dim in zip(self.sizes, cut, strict=True) if dim is None)

    def shared_along(self, cut: Cut, whole: Axis) -> tuple[Axis, ...]:
        """The axes along which all devices hold the same; ``whole`` is the axis of all devices."""
        axes = mesh_axes(whole, self.sizes, self.names)
        return tuple(
            axis for axis, dim in zip(axes, cut, strict=True) if dim is None and axis is not None
        )

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
