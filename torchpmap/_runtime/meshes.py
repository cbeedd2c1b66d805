"""``make_mesh``: a mesh of the devices of this job."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._layout.mesh import Mesh, mesh_of
from torchpmap._runtime.current import devices as all_devices


@boundary
def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[Hashable],
    axis_types: Any = None,
    *,
    devices: Sequence[Device] | None = None,
) -> Mesh:
    """Arrange the first ``prod(axis_shapes)`` devices in a mesh, the last axis fastest.

    Args:
        axis_shapes: the size of each axis.
        axis_names: as many names.
        axis_types: for programs from JAX: one ``AxisType`` per axis; ``Auto`` and ``Explicit``
            mean the same here.
        devices: default: ``tp.devices()``.

    Raises:
        TypeError: ``axis_shapes`` is no tuple.
        ValueError: there are fewer devices than that, or an axis type is ``Manual``.

    Example:
        >>> import torchpmap as tp
        >>> tp.make_mesh((2, 2), ("x", "y"))
        Mesh('x': 2, 'y': 2)

    Source: ``jax.make_mesh``.
    """
    if not isinstance(axis_shapes, Sequence):
        raise TypeError(
            f"make_mesh: axis_shapes must be a tuple with the size of each axis, but got "
            f"{axis_shapes!r}. For one axis write ({axis_shapes},)."
        )
    shape = tuple(axis_shapes)
    chosen = all_devices() if devices is None else devices
    if devices is None and len(chosen) < math.prod(shape):
        raise ValueError(
            f"make_mesh: a mesh of shape {shape} has {math.prod(shape)} devices, but there are "
            f"{len(chosen)}. Ask for more with torchpmap.init(num_devices={math.prod(shape)}); "
            "CPU devices are processes, and may be more than the cores."
        )
    return mesh_of(shape, axis_names, chosen, axis_types)
