"""Which device holds which slice: ``Mesh``, ``PartitionSpec``, ``NamedSharding``. Pure arithmetic.

A mesh is an array of devices whose axes have names. A spec says, dim by dim, over which mesh axes a
tensor is cut; mesh axes that it does not mention hold equal copies:

    mesh (x: 2, y: 2)      spec P('x')          spec P(None, ('x', 'y'))
      [cpu:0 cpu:1]        cpu:0, cpu:1: rows 0    device k: column block k
      [cpu:2 cpu:3]        cpu:2, cpu:3: rows 1    (the first name is the slowest)
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from torchpmap._base.devices import PLATFORMS, Device

Index = tuple[slice, ...]


class PartitionSpec(tuple[Any, ...]):
    """How each dim of a tensor is laid over the axes of a mesh; ``P`` for short.

    Args:
        *entries: per dim None (not cut), the name of a mesh axis, or a tuple of names (cut over all
            of them, the first one slowest). Dims beyond the last entry are not cut.

    Example:
        >>> PartitionSpec("i", None)
        PartitionSpec('i', None)
        >>> PartitionSpec(("x", "y"))
        PartitionSpec(('x', 'y'),)
    """

    __slots__ = ()

    def __new__(cls, *entries: Any) -> PartitionSpec:
        for entry in entries:
            for name in names_of(entry):
                if isinstance(name, int) or name is None or not isinstance(name, Hashable):
                    raise TypeError(
                        "each entry of a PartitionSpec must be None, a mesh axis name or a tuple "
                        f"of names, but got {entry!r}."
                    )
        # ('x',) and 'x' are the same cut.
        short = (e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries)
        return super().__new__(cls, short)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"PartitionSpec{super().__repr__()}"


P = PartitionSpec


class AxisType(enum.Enum):
    """What ``axis_types`` of a mesh says in JAX; ``Auto`` and ``Explicit`` mean the same here.

    Source: ``jax.sharding.AxisType``.
    """

    Auto = enum.auto()
    Explicit = enum.auto()
    Manual = enum.auto()


class Mesh:
    """An array of distinct devices with one name per array axis; immutable and hashable.

    Args:
        devices: array-like of ``Device``, of any rank.
        axis_names: one hashable name per axis; a single string for a 1-D mesh.
        axis_types: for programs from JAX: one ``AxisType`` per axis, or one for all.

    Raises:
        ValueError: number of names and of axes differ, a name or a device is repeated, or an axis
            type is ``Manual`` or none at all.
        TypeError: something in ``devices`` is not a ``Device``.

    Example:
        >>> cpus = [Device(i, "cpu") for i in range(4)]
        >>> mesh = Mesh([cpus[:2], cpus[2:]], ("x", "y"))
        >>> mesh, mesh.size
        (Mesh('x': 2, 'y': 2), 4)
        >>> mesh.devices[1, 0]
        Device(cpu:2)
    """

    __slots__ = ("_hash", "axis_names", "devices")

    axis_names: tuple[Hashable, ...]
    devices: np.ndarray[Any, Any]

    def __init__(
        self, devices: Any, axis_names: str | Sequence[Hashable], axis_types: Any = None
    ) -> None:
        array = np.array(devices, dtype=object)
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        _check_mesh(array, names)
        _check_axis_types(axis_types, names)
        array.flags.writeable = False
        self.devices = array
        self.axis_names = names
        self._hash = hash((array.shape, tuple(array.flat), names))

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> Mesh:
        """Return the mesh of the devices of a ``torch.distributed.device_mesh.DeviceMesh``, with
        the names of its dims as axes.

        Rank k is device k, which belongs to process k, as under torchrun.  A dim without a name
        gets one: ``"dim_0"`` and so on.

        Raises:
            TypeError: it is not a DeviceMesh.
            ValueError: it is of a kind of device that torchpmap does not know.

        Example (under torchrun, in each of four processes):
            >>> from torch.distributed.device_mesh import init_device_mesh  # doctest: +SKIP
            >>> here = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))  # doctest: +SKIP
            >>> Mesh.from_device_mesh(here)  # doctest: +SKIP
            Mesh('x': 2, 'y': 2)
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(
                "Mesh.from_device_mesh takes a torch.distributed.device_mesh.DeviceMesh, but got "
                f"{type(device_mesh).__name__}."
            )
        kind, ranks = device_mesh.device_type, device_mesh.mesh
        if kind not in PLATFORMS:
            raise ValueError(
                f"the DeviceMesh is of devices of type {kind!r}, but torchpmap knows "
                f"{', '.join(map(repr, PLATFORMS))}."
            )
        names = device_mesh.mesh_dim_names or [f"dim_{k}" for k in range(ranks.dim())]
        devices = _object_array(Device(rank, kind, rank) for rank in ranks.flatten().tolist())
        return cls(devices.reshape(tuple(ranks.shape)), tuple(names))

    def to_device_mesh(self) -> Any:
        """Return the ``torch.distributed.device_mesh.DeviceMesh`` of the same devices, with the
        axes as its dims; every process of the job must call it.

        The process groups of a DeviceMesh are made once, so equal meshes give the same one, until
        torch.distributed is set up anew.  Names that are no strings become strings.

        Raises:
            RuntimeError: the devices are worker processes of one controller, which have no ranks in
                ``torch.distributed``; or there is no process group yet.

        Example (under torchrun, in each of four processes):
            >>> mesh = tp.make_mesh((2, 2), ("x", "y"))  # doctest: +SKIP
            >>> mesh.to_device_mesh()["x"].size()  # doctest: +SKIP
            2
        """
        import torch.distributed as dist

        if any(device.process_index != device.id for device in self.devices.flat):
            raise RuntimeError(
                f"{self} has no DeviceMesh: its devices are worker processes of one controller, "
                "which have no ranks in torch.distributed. A DeviceMesh needs one process per "
                "device, each of which runs the script: start it with torchrun."
            )
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{self} has no DeviceMesh yet: there is no process group. Under torchrun, call "
                "torchpmap.init() (or torch.distributed.init_process_group()) first."
            )
        made = _device_meshes.setdefault(dist.group.WORLD, {})
        if self not in made:
            made[self] = _device_mesh(self)
        return made[self]

    @property
    def shape(self) -> OrderedDict[Hashable, int]:
        """Axis name -> size, in axis order."""
        return OrderedDict(zip(self.axis_names, self.devices.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.devices.size

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh)
            and self.axis_names == other.axis_names
            and self.devices.shape == other.devices.shape
            and tuple(self.devices.flat) == tuple(other.devices.flat)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.devices, self.axis_names)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name!r}: {size}' for name, size in self.shape.items())})"


def _check_axis_types(given: Any, names: tuple[Hashable, ...]) -> None:
    """``given``: a type or its name, of this package or of JAX, or a tuple with one per axis."""
    if given is None:
        return
    kinds = tuple(given) if isinstance(given, tuple | list) else (given,) * len(names)
    if len(kinds) != len(names):
        raise ValueError(
            f"axis_types has {len(kinds)} entries, but the mesh has {len(names)} axes, {names}. "
            "Give one AxisType per axis, or leave it out."
        )
    for kind in kinds:
        name = getattr(kind, "name", kind)
        if name not in ("Auto", "Explicit"):
            raise ValueError(
                f"axis_types: got {kind!r}, expected AxisType.Auto or AxisType.Explicit, which "
                "mean the same here. An axis becomes manual inside shard_map (axis_names=)."
            )


def mesh_of(
    shape: tuple[int, ...],
    axis_names: Sequence[Hashable],
    devices: Sequence[Device],
    axis_types: Any = None,
) -> Mesh:
    """The first devices in a mesh, the last axis fastest; ``ValueError`` if there are too few."""
    if any(size < 1 for size in shape):
        raise ValueError(f"the sizes of mesh axes must be at least 1, but got {shape}.")
    size = math.prod(shape)
    if len(devices) < size:
        raise ValueError(
            f"Number of devices {len(devices)} must be >= the product of mesh_shape {shape}."
        )
    return Mesh(_object_array(devices[:size]).reshape(shape), axis_names, axis_types)


_device_meshes = WeakKeyDictionary[Any, dict[Mesh, Any]]()
"""By the process group of all processes: without it, those of a DeviceMesh are gone."""


def _device_mesh(mesh: Mesh) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    ids = np.array([device.id for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    names = tuple(map(str, mesh.axis_names))
    return DeviceMesh(mesh.devices.flat[0].platform, ids.tolist(), mesh_dim_names=names)


class NamedSharding:
    """Where each piece of a tensor lives: a mesh and a ``PartitionSpec``; immutable and hashable.

    Raises:
        ValueError: the spec has a name that is not an axis of the mesh, or the same name twice.

    Example:
        >>> mesh = Mesh([Device(0, "cpu"), Device(1, "cpu")], "i")
        >>> sharding = NamedSharding(mesh, PartitionSpec("i"))
        >>> sharding
        NamedSharding(mesh=Mesh('i': 2), spec=PartitionSpec('i',))
        >>> sharding.shard_shape((4, 3))
        (2, 3)
        >>> sharding.devices_indices_map((4, 3))[mesh.devices[1]]
        (slice(2, 4, None), slice(None, None, None))
    """

    __slots__ = ("_hash", "_parts", "mesh", "spec")

    mesh: Mesh
    spec: PartitionSpec

    def __init__(self, mesh: Mesh, spec: PartitionSpec) -> None:
        if not isinstance(mesh, Mesh) or not isinstance(spec, PartitionSpec):
            raise TypeError(
                "NamedSharding takes a Mesh and a PartitionSpec, but got "
                f"{type(mesh).__name__} and {type(spec).__name__}."
            )
        _check_names(mesh, spec)
        self.mesh = mesh
        self.spec = spec
        sizes = mesh.shape
        self._parts = tuple(math.prod(sizes[name] for name in names_of(entry)) for entry in spec)
        self._hash = hash((mesh, spec))

    @classmethod
    def from_placements(cls, mesh: Mesh, placements: Sequence[Any]) -> NamedSharding:
        """Return the sharding that ``torch.distributed.tensor`` writes as one placement per axis of
        the mesh: ``Shard(dim)`` or ``Replicate()``.

        Raises:
            ValueError: their number is not that of the axes, a dim is negative, or a placement is
                ``Partial`` or another.

        Example:
            >>> from torch.distributed.tensor import Replicate, Shard
            >>> mesh = mesh_of((2, 2), ("x", "y"), [Device(i, "cpu") for i in range(4)])
            >>> NamedSharding.from_placements(mesh, [Replicate(), Shard(1)]).spec
            PartitionSpec(None, 'y')
        """
        from torch.distributed.tensor import Shard

        if len(placements) != len(mesh.axis_names):
            raise ValueError(
                f"a mesh of {len(mesh.axis_names)} axes takes as many placements, but got "
                f"{len(placements)}: {list(placements)}."
            )
        entries: dict[int, list[Hashable]] = {}
        for name, placement in zip(mesh.axis_names, placements, strict=True):
            if isinstance(placement, Shard) and placement.dim >= 0:
                entries.setdefault(placement.dim, []).append(name)
            elif not placement.is_replicate():
                raise ValueError(
                    f"the placement {placement} along axis {name!r} has no PartitionSpec: it must "
                    "be Replicate(), or Shard(dim) with a dim counted from the front."
                )
        last = max(entries, default=-1)
        spec = PartitionSpec(*(tuple(entries.get(dim, ())) or None for dim in range(last + 1)))
        return cls(mesh, spec)

    @property
    def placements(self) -> tuple[Any, ...]:
        """What ``torch.distributed.tensor`` writes for this: a placement per axis of the mesh.

        Raises:
            ValueError: one dim is cut over several axes in another order than the mesh's.

        Example:
            >>> mesh = mesh_of((2, 2), ("x", "y"), [Device(i, "cpu") for i in range(4)])
            >>> NamedSharding(mesh, PartitionSpec(None, "y")).placements
            (Replicate(), Shard(dim=1))
        """
        from torch.distributed.tensor import Replicate, Shard

        names = self.mesh.axis_names
        cuts: dict[Hashable, int] = {}
        for dim, entry in enumerate(self.spec):
            parts = names_of(entry)
            if list(parts) != sorted(parts, key=names.index):
                raise ValueError(
                    f"dim {dim} is cut over the mesh axes {parts}, but a DTensor cuts in the order "
                    f"of its mesh: {names}. Move it to a sharding that names them in that order."
                )
            cuts.update(dict.fromkeys(parts, dim))
        return tuple(Shard(cuts[name]) if name in cuts else Replicate() for name in names)

    @property
    def device_set(self) -> set[Device]:
        """All devices of the mesh."""
        return set(self.mesh.devices.flat)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return math.prod(self._parts) == 1

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one device's piece of a tensor of this shape.

        Raises:
            ValueError: the spec has more entries than dims, or a dim cannot be cut evenly.
        """
        shape = tuple(shape)
        if len(self._parts) > len(shape):
            raise ValueError(
                f"Sharding {self} is only valid for values of rank at least {len(self._parts)}, "
                f"but was applied to a value of rank {len(shape)} (its shape is {shape})."
            )
        parts = self._parts + (1,) * (len(shape) - len(self._parts))
        for dim, (size, num_parts) in enumerate(zip(shape, parts, strict=True)):
            if size % num_parts:
                raise ValueError(self._indivisible(shape, dim, parts))
        return tuple(size // num_parts for size, num_parts in zip(shape, parts, strict=True))

    def devices_indices_map(self, shape: Sequence[int]) -> dict[Device, Index]:
        """Return the piece that each device holds, as an index into a tensor of this shape.

        Raises:
            ValueError: as ``shard_shape``.
        """
        shard_shape = self.shard_shape(shape)
        sizes = self.mesh.shape
        axes = {name: axis for axis, name in enumerate(self.mesh.axis_names)}
        indices: dict[Device, Index] = {}
        device: Device
        for coordinates, device in np.ndenumerate(self.mesh.devices):
            index = [slice(None)] * len(shard_shape)
            for dim, entry in enumerate(self.spec):
                if self._parts[dim] == 1:
                    continue
                block = 0
                for name in names_of(entry):  # ('x', 'y') over 2 x 4: x=1, y=3 is block 1 * 4 + 3
                    block = block * sizes[name] + coordinates[axes[name]]
                length = shard_shape[dim]
                index[dim] = slice(block * length, (block + 1) * length)
            indices[device] = tuple(index)
        return indices

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, NamedSharding)
            and self._hash == other._hash
            and self.spec == other.spec
            and self.mesh == other.mesh
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedSharding, (self.mesh, self.spec)

    def __repr__(self) -> str:
        return f"NamedSharding(mesh={self.mesh}, spec={self.spec})"

    def _indivisible(self, shape: tuple[int, ...], dim: int, parts: tuple[int, ...]) -> str:
        names = ", ".join(f"{name!r}" for name in names_of(self.spec[dim]))
        return (
            f"Sharding {self} implies that array axis {dim} is partitioned {parts[dim]} times (by "
            f"mesh axis {names}), but the dimension size is {shape[dim]} (full shape: {shape}, "
            f"per-dimension tiling factors: {list(parts)} should evenly divide the shape)"
        )


def row_sharding(devices: Sequence[Device], axis_name: Hashable, dim: int) -> NamedSharding:
    """Cut dim ``dim`` (counted from the front) over a 1-D mesh of ``devices``.

    Example:
        >>> row_sharding([Device(0, "cpu"), Device(1, "cpu")], "i", 1).spec
        PartitionSpec(None, 'i')
    """
    assert dim >= 0
    mesh = Mesh(_object_array(devices), (axis_name,))
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, axis_name))


def replicated(devices: Sequence[Device], axis_name: Hashable = "devices") -> NamedSharding:
    """Give every one of ``devices`` the whole tensor.

    Example:
        >>> replicated([Device(0, "cpu"), Device(1, "cpu")]).is_fully_replicated
        True
    """
    return NamedSharding(Mesh(_object_array(devices), (axis_name,)), PartitionSpec())


def names_of(entry: Any) -> tuple[Any, ...]:
    """The axes of one entry of a ``PartitionSpec``."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _object_array(devices: Iterable[Device]) -> np.ndarray[Any, Any]:
    return np.array(list(devices), dtype=object)


def _check_mesh(devices: np.ndarray[Any, Any], names: tuple[Hashable, ...]) -> None:
    for device in devices.flat:
        if not isinstance(device, Device):
            raise TypeError(
                f"devices of a Mesh must be Device objects, but got {device!r} of type "
                f"{type(device).__name__}."
            )
    if devices.ndim != len(names):
        raise ValueError(
            "Mesh requires the ndim of its first argument (`devices`) to equal the length of its "
            f"second argument (`axis_names`), but got devices.ndim == {devices.ndim} and "
            f"len(axis_names) == {len(names)}."
        )
    if not devices.size:
        raise ValueError(f"a Mesh needs at least one device, but got shape {devices.shape}.")
    for what, items in (("axis names", names), ("devices", tuple(devices.flat))):
        if len(set(items)) != len(items):
            repeated = next(item for item in items if items.count(item) > 1)
            raise ValueError(f"the {what} of a Mesh must be distinct, but got {repeated!r} twice.")


def _check_names(mesh: Mesh, spec: PartitionSpec) -> None:
    seen: set[Any] = set()
    for name in (name for entry in spec for name in names_of(entry)):
        if name not in mesh.axis_names:
            raise ValueError(
                f"Resource axis: {name} of {spec} is not found in mesh: {mesh.axis_names}."
            )
        if name in seen:
            raise ValueError(
                "A single NamedSharding spec specification can map every mesh axis to at most one "
                f"positional dimension, but {spec} has duplicate entries for `{name}`."
            )
        seen.add(name)
