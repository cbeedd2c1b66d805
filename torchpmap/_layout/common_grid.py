"""One grid for values of the same devices, although their meshes differ.

devices 0 to 3      mesh (4,) 'i'      mesh (2, 2) 'x', 'y'
common grid (2, 2): 'i' is its dims (0, 1), 'x' is (0,) and 'y' is (1,)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from torchpmap._layout.axis_stack import Axis, Partition, lines
from torchpmap._layout.grid import Cut, Grid, trimmed
from torchpmap._layout.layout import Layout, general_layout, replicated_layout, row_layout
from torchpmap._layout.mesh import Mesh, NamedSharding, PartitionSpec, names_of


@dataclass(frozen=True)
class CommonGrid(Grid):
    """A grid that each of some meshes is a reshaped view of."""

    meshes: tuple[Mesh, ...]

    def blocks_of(self, layout: Layout) -> tuple[int, ...]:
        return tuple(range(len(self.devices)))  # nothing asks which are equal

    def shared_along(self, cut: Cut, whole: Axis) -> tuple[Axis, ...]:
        return ()

    def parts(self, over: Iterable[int]) -> int:
        """Into how many blocks these dims of the grid cut."""
        return math.prod(self.sizes[k] for k in over)

    def lines(self, over: Sequence[int]) -> Partition:
        """The places of the devices, in groups that differ only along these dims."""
        return lines(self.sizes, over)

    def cut_of(self, layout: Layout) -> Cut:
        """The cut of a layout on one of the meshes, or of one that is replicated."""
        if layout.is_replicated:
            return ()
        mesh = layout.sharding.mesh
        dims = dict(zip(mesh.axis_names, self._dims(mesh), strict=True))
        return trimmed(
            tuple(itertools.chain.from_iterable(dims[name] for name in names_of(entry)))
            for entry in layout.sharding.spec
        )

    def layout(self, shape: Sequence[int], dtype: torch.dtype, cut: Cut) -> Layout:
        """The layout with this cut, on a mesh of its own if none of the meshes has axes for it."""
        if not cut:
            return replicated_layout(shape, dtype, self.devices)
        for mesh in self.meshes:
            entries = [self._names(mesh, over) for over in cut]
            if len(mesh.axis_names) == 1 and None not in entries:
                return row_layout(shape, dtype, self.devices, len(cut) - 1, mesh.axis_names[0])
            if None not in entries:
                spec = PartitionSpec(*(entry or None for entry in entries))
                return general_layout(shape, dtype, NamedSharding(mesh, spec), stacked=True)
        return super().layout(shape, dtype, cut)

    def spec_of(self, cut: Cut) -> PartitionSpec:
        """A cut, by the names of the grid."""
        names = [tuple(self.names[k] for k in over) for over in cut]
        return PartitionSpec(*(over[0] if len(over) == 1 else over or None for over in names))

    def _dims(self, mesh: Mesh) -> list[tuple[int, ...]]:
        """The dims of the grid that each axis of a mesh is, the slowest first."""
        shape = mesh.devices.shape
        if shape == self.sizes:  # also where an axis has size 1
            return [(k,) for k in range(len(shape))]
        steps = _strides(self.sizes)
        return [
            tuple(k for k, step in enumerate(steps) if stride <= step < stride * size)
            for size, stride in zip(shape, _strides(shape), strict=True)
        ]

    def _names(self, mesh: Mesh, over: tuple[int, ...]) -> tuple[Hashable, ...] | None:
        """The axes of a mesh that are these dims of the grid, in this order."""
        axes = {dims[0]: (name, dims) for name, dims in self._named(mesh) if dims}
        names: list[Hashable] = []
        place = 0
        while place < len(over):
            name, dims = axes.get(over[place], (None, ()))
            if not dims or over[place : place + len(dims)] != dims:
                return None
            names.append(name)
            place += len(dims)
        return tuple(names)

    def _named(self, mesh: Mesh) -> Iterable[tuple[Hashable, tuple[int, ...]]]:
        return zip(mesh.axis_names, self._dims(mesh), strict=True)


def common_grid(layouts: Sequence[Layout]) -> CommonGrid | None:
    """The coarsest grid for layouts of the same devices in the same order; None if there is none,
    as for meshes of shapes (2, 3) and (3, 2).
    """
    cut = [layout for layout in layouts if not layout.is_replicated] or layouts[:1]
    meshes = tuple(dict.fromkeys(layout.sharding.mesh for layout in cut))
    sizes: tuple[int, ...] = meshes[0].devices.shape
    if any(mesh.devices.shape != sizes for mesh in meshes):
        strides = {step for mesh in meshes for step in _strides(mesh.devices.shape)}
        steps = sorted({1, len(layouts[0].devices), *strides})
        if any(long % short for short, long in itertools.pairwise(steps)):
            return None
        sizes = tuple(long // short for short, long in itertools.pairwise(steps))[::-1]
    alike = [mesh for mesh in meshes if mesh.devices.shape == sizes]
    unnamed = tuple(f"grid{k}" for k in range(len(sizes)))
    names = alike[0].axis_names if len(alike) == 1 else unnamed
    devices = layouts[0].devices
    return CommonGrid(devices, devices, sizes, names, meshes)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
