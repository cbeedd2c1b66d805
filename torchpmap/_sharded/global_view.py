"""ShardedTensors that span processes, made from host-local values or DTensors, and the way back.

If a launcher started several processes, a mapped call takes and returns the rows of its own
process.  A ``ShardedTensor`` over the devices of all processes is the *global view* of the same
data; a mapped call that gets a global view works on all rows, as with one controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._base.errors import kind_of
from torchpmap._base.pytree import Tree, flatten
from torchpmap._layout.current_mesh import current_mesh
from torchpmap._layout.layout import Layout, general_layout, replicated_layout, row_layout
from torchpmap._layout.mesh import Mesh, NamedSharding, PartitionSpec
from torchpmap._runtime.current import (
    check_devices,
    is_launched,
    local_devices,
    process_count,
    process_index,
)
from torchpmap._runtime.current import devices as all_devices
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import (
    EQUAL,
    check_equal_everywhere,
    fetch_blocks,
    host_tensor,
    is_whole_here,
    places_here,
    store,
    team_of,
)


@boundary
def global_view(x: Tree) -> Tree:
    """Return the rows of all processes as one value that spans them; every process must call it.

    global_view: [k, *s] in each of n processes -> [n*k, *s] over all devices

    No data is sent: each process contributes its own rows (of the dim that is cut; of dim 0 for
    host tensors).  The processes compare shapes and dtypes, and values that are replicated.  With
    one process ShardedTensors are returned unchanged.

    Args:
        x: ShardedTensor, tensor, array, or a pytree of them; equal shapes in all processes.

    Raises:
        ValueError: the processes have different numbers of rows, other shapes or dtypes, or a
            replicated value differs between them.

    Example:
        >>> import torch, torchpmap as tp
        >>> y = tp.global_view(tp.pmap(lambda x: x * 2)(torch.arange(4.0)))
        >>> y.shape, y.is_fully_addressable  # with one process
        (torch.Size([4]), True)

    Source: ``jax.experimental.multihost_utils.host_local_array_to_global_array``.
    """
    leaves, structure = flatten(x)
    paths = structure.paths("x")
    if process_count() > 1:
        kinds = {
            path: _kind(leaf) for leaf, path in zip(leaves, paths, strict=True) if leaf is not None
        }
        if kinds:
            check_equal_everywhere(kinds, None, _EQUAL_ROWS, "another shape or dtype")
    return structure.unflatten(
        [_global(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    )


@boundary
def local_view(x: Tree) -> Tree:
    """Return the rows of this process of values that span processes; the inverse of
    ``global_view``.

    local_view: [n*k, *s] over all devices -> [k, *s] on the device of this process

    Raises:
        ValueError: a value is cut, but not into equal blocks of rows.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.local_view(tp.global_view(torch.arange(4.0))).tolist()  # with one process
        [0.0, 1.0, 2.0, 3.0]

    Source: ``jax.experimental.multihost_utils.global_array_to_host_local_array``.
    """
    leaves, structure = flatten(x)
    return structure.unflatten([_local(leaf) for leaf in leaves])


_EQUAL_ROWS = (
    "All processes must have equally many rows: drop those of an uneven last batch "
    "(DataLoader(drop_last=True)), or pad them."
)


def _kind(leaf: Any) -> str:
    value = leaf if isinstance(leaf, torch.Tensor) else host_tensor(leaf)
    kind = kind_of(value.shape, value.dtype)
    return f"{kind}, {leaf._alive()[0].sharding.spec}" if type(leaf) is ShardedTensor else kind


def _global(leaf: Any, path: str) -> Any:
    if leaf is None or (type(leaf) is ShardedTensor and process_count() == 1):
        return leaf
    everywhere = tuple(all_devices())
    if type(leaf) is not ShardedTensor:
        value = host_tensor(leaf)
        if not value.dim():
            raise ValueError(f"{path} has no dims, so there are no rows of it to put together.")
        shape = (value.shape[0] * process_count(), *value.shape[1:])
        if process_count() == 1:
            return _stored(_rows_or_whole(shape, value.dtype, everywhere), value)
        return _stored(row_layout(shape, value.dtype, everywhere, 0, None), value)
    layout, _ = leaf._alive()
    if not leaf.is_fully_addressable:
        return leaf
    block = leaf.to_host()
    if layout.dim is None:
        check_equal_everywhere({path: block})
        return _stored(replicated_layout(layout.shape, layout.dtype, everywhere), block)
    return _stored(over_processes(layout), block)


def over_processes(layout: Layout) -> Layout:
    """Of the rows of this process, the layout of the rows of all; any other layout as it is."""
    if layout.dim is None or process_count() == 1 or not is_whole_here(layout):
        return layout
    shape = list(layout.shape)
    shape[layout.dim] *= process_count()
    name = layout.sharding.mesh.axis_names[0]
    return row_layout(shape, layout.dtype, tuple(all_devices()), layout.dim, name)


def _rows_or_whole(shape: Any, dtype: torch.dtype, devices: Any) -> Layout:
    fits = shape[0] and shape[0] % len(devices) == 0
    chosen = devices if fits else devices[:1]
    return row_layout(shape, dtype, chosen, 0, None)


def _local(leaf: Any) -> Any:
    if type(leaf) is not ShardedTensor or leaf.is_fully_addressable:
        return leaf
    layout, handle = leaf._alive()
    here = tuple(local_devices())
    if layout.is_replicated:
        return _stored(replicated_layout(layout.shape, layout.dtype, here), leaf.to_host())
    if layout.dim is None:
        raise ValueError(
            f"a value laid out as {layout.sharding.spec} over {layout.sharding.mesh} is not cut "
            "into one block of rows per process; use addressable_shards for its blocks here."
        )
    (block,) = fetch_blocks(layout, handle, places_here(layout))
    name = layout.sharding.mesh.axis_names[0]
    return _stored(row_layout(block.shape, layout.dtype, here, layout.dim, name), block)


def _stored(layout: Layout, value: torch.Tensor) -> ShardedTensor:
    """A ShardedTensor whose block in this process is ``value`` (with one process: all of it)."""
    if process_count() == 1:
        return make_sharded(layout, store(layout, value))
    team = team_of(layout)
    return make_sharded(layout, team.runtime.put(team, [value] * len(layout.ranks)))


# -- DTensor ---------------------------------------------------------------------------------------


@boundary
def to_dtensor(x: ShardedTensor, mesh: Mesh | None = None) -> Any:
    """Return a ``torch.distributed.tensor.DTensor`` of the same blocks on the same mesh; every
    process must call it.

    to_dtensor: ShardedTensor[*s] -> DTensor[*s]

    A host-local value becomes a global view first (``global_view``).  Each mesh axis becomes a
    mesh dim: ``Shard(d)`` where it cuts dim d, else ``Replicate()``.

    Args:
        x: the value.
        mesh: the mesh of the DTensor, for a value that all devices have whole: it lies on any mesh
            of its devices, and DTensors of two meshes do not meet in an operation.  Left out, it is
            that of ``set_mesh`` if this has the same devices, else a line of them.

    Raises:
        RuntimeError: this process was not started by a launcher: a DTensor needs a process for
            every device.
        ValueError: one dim is cut over several mesh axes in another order than the mesh's; or
            ``mesh`` is not one that the value lies on.

    Source: ``torch.distributed.tensor.DTensor.from_local``.
    """
    from torch.distributed.tensor import DTensor

    _insist_on_processes("to_dtensor")
    x = global_view(x)
    layout, handle = x._alive()
    sharding = _on_mesh(layout, mesh)
    placements = sharding.placements
    (block,) = fetch_blocks(layout, handle, places_here(layout))
    whole = torch.empty(layout.shape, device="meta")
    return DTensor.from_local(
        block.to(current_runtime().device),
        sharding.mesh.to_device_mesh(),
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _on_mesh(layout: Layout, mesh: Mesh | None) -> NamedSharding:
    """The sharding of a layout, of a whole value on a mesh of the caller's."""
    own = layout.sharding
    chosen = current_mesh() if mesh is None else mesh
    if chosen is None or chosen == own.mesh:
        return own
    if layout.is_replicated and set(chosen.devices.flat) == set(layout.devices):
        return NamedSharding(chosen, PartitionSpec())
    if mesh is None:
        return own
    raise ValueError(
        f"to_dtensor: the value lies as {own.spec} over {own.mesh} on "
        f"{' '.join(map(str, layout.devices))}, which is not on the mesh that was given: {mesh} on "
        f"{' '.join(map(str, mesh.devices.flat))}. Move it there: torchpmap.device_put(x, "
        "torchpmap.NamedSharding(mesh, P(...)))."
    )


@boundary
def from_dtensor(x: Any) -> ShardedTensor:
    """Return a ShardedTensor with the blocks and the mesh of a DTensor.

    from_dtensor: DTensor[*s] -> ShardedTensor[*s] that spans its processes

    Raises:
        RuntimeError: this process was not started by a launcher.
        TypeError: ``x`` is not a DTensor.
        ValueError: a placement is ``Partial`` (redistribute it first), or a dim does not divide.

    Source: ``torch.distributed.tensor.DTensor.to_local``.
    """
    from torch.distributed.tensor import DTensor

    _insist_on_processes("from_dtensor")
    if not isinstance(x, DTensor):
        raise TypeError(f"from_dtensor takes a DTensor, but got {type(x).__name__}.")
    mesh = Mesh.from_device_mesh(x.device_mesh)
    check_devices(mesh.devices.flat)
    if any(placement.is_partial() for placement in x.placements):
        raise ValueError(
            f"the DTensor has the placements {list(x.placements)}: its blocks are partial results. "
            "Redistribute it to Shard or Replicate first."
        )
    sharding = NamedSharding.from_placements(mesh, x.placements)
    layout = general_layout(tuple(x.shape), x.dtype, sharding)
    return _stored(layout, x.to_local().detach())


def _insist_on_processes(what: str) -> None:
    if not is_launched():
        raise RuntimeError(
            f"{what}: a DTensor needs one process per device, but this process drives all devices "
            "itself. Start the script with torchrun."
        )


def check_host_values(
    named: Mapping[str, Any],
    devices: Sequence[Device],
    call: tuple[str, str],
    remedy: str = EQUAL,
) -> None:
    """Raise ``ValueError`` unless the processes of these devices give the same host values to a new
    call (see ``check_equal_everywhere``); what is on the devices already is not compared.
    """
    own = {name: x for name, x in named.items() if x is not None and type(x) is not ShardedTensor}
    processes = {device.process_index for device in devices}
    if own and len(processes) > 1 and process_index() in processes:
        values = {name: host_tensor(x) for name, x in own.items()}
        check_equal_everywhere(values, [device.id for device in devices], remedy, call=call)
