"""Put values on devices and get them back: JAX's ``device_put`` family and flax's ``replicate``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch

from torchpmap._base.arrays import HostArray
from torchpmap._base.axis_spec import broadcast_axes
from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._base.errors import check_array
from torchpmap._base.pytree import Tree, flatten
from torchpmap._base.torch_internals import innermost
from torchpmap._layout.current_mesh import current_mesh
from torchpmap._layout.layout import Layout, general_layout, replicated_layout, row_layout
from torchpmap._layout.mesh import NamedSharding, PartitionSpec
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import check_devices, local_devices, refuse_inside
from torchpmap._runtime.current import devices as all_devices
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._sharded.gather_report import MOVE, note_gather
from torchpmap._sharded.host import is_recorded
from torchpmap._sharded.operations import move
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import (
    check_equal_everywhere,
    check_open,
    host_tensor,
    store,
)
from torchpmap._trace.escaped import Escaped

Place = Device | Sequence[Device] | NamedSharding | PartitionSpec | None
Placement = Place | Mapping[Any, Any] | list[Any] | tuple[Any, ...]
Number = complex | np.ndarray[Any, Any] | np.generic
"""Leaves that are tensors once they are on a device (``complex``: any Python number)."""


@overload
def device_put(x: Number, device: Placement = None) -> torch.Tensor: ...
@overload
def device_put(x: Tree, device: Placement = None) -> Tree: ...
@boundary
def device_put(x: Any, device: Placement = None) -> Any:
    """Return ``x`` on the devices, as ShardedTensors.

    device_put: T[*s] on the host -> T[*s] on the devices (dtypes are kept)

    Args:
        x: tensor, numpy array, number, or a pytree of them.
        device: a device (the whole value goes there), a list of devices (row k of dim 0 goes to the
            k-th), a ``NamedSharding``, a ``P(...)`` over the mesh of ``set_mesh``, or None for the
            first device.  For a pytree also a tree prefix of it with a device, sharding or
            ``P(...)`` for each part.

    Returns:
        The same structure.  A ShardedTensor moves to the layout that is asked for; if it is already
        there, nothing is sent.  If its blocks are in several processes, all of them must call this.
        Derivatives pass through a computed tensor; an autograd leaf that requires grad, such as a
        parameter, becomes a new leaf with its own ``.grad``.

    Raises:
        TypeError: ``device`` is something else, or a leaf is no tensor, array or number.
        ValueError: a shape does not divide over the devices; there is no mesh for a ``P(...)``; or
            the devices belong to several processes, which do not all give the same value.
        RuntimeError: a ShardedTensor with blocks in several processes is to move to other devices.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.device_put(torch.arange(4.0), tp.devices()[:4])
        ShardedTensor([0., 1., 2., 3.], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> tp.device_put(3.5, tp.devices()[1])
        ShardedTensor(3.5000, replicated on cpu:1)

    Source: ``jax.device_put``.
    """
    refuse_inside("device_put")
    if not _is_tree_of_places(device):
        target = _target(device)
        return put_as(x, functools.partial(_layout_at, target))
    places = broadcast_axes(device, x, what="device_put device", root="")
    targets = dict(zip(flatten(x)[1].paths("x"), map(_target, places), strict=True))
    return put_as(x, lambda shape, dtype, path: _layout_at(targets[path], shape, dtype, path))


Target = Device | tuple[Device, ...] | NamedSharding


def _layout_at(target: Target, shape: tuple[int, ...], dtype: torch.dtype, path: str) -> Layout:
    if isinstance(target, NamedSharding):
        try:
            return general_layout(shape, dtype, target)
        except ValueError as error:
            raise ValueError(f"device_put of {path}: {error}") from None
    if isinstance(target, Device):
        return replicated_layout(shape, dtype, (target,))
    if not shape or shape[0] != len(target):
        raise ValueError(
            f"device_put onto {len(target)} devices puts row k of dim 0 on the k-th, so {path} "
            f"must have {len(target)} rows, but its shape is {list(shape)}. For a copy on "
            "every device use torchpmap.replicate."
        )
    return row_layout(shape, dtype, target, 0, None)


def _is_tree_of_places(device: Any) -> bool:
    """Whether it says where each part of a tree goes; a list of devices is a place for rows."""
    leaves = flatten(device)[0]
    if leaves in ([], [device]) or _is_list_of_devices(device):
        return False
    return all(isinstance(leaf, Device | NamedSharding | PartitionSpec | None) for leaf in leaves)


def _is_list_of_devices(device: Any) -> bool:
    return isinstance(device, list | tuple) and all(isinstance(part, Device) for part in device)


def _target(device: Any) -> Target:
    if device is None:
        return local_devices()[0]
    if isinstance(device, Device):
        check_devices([device])
        return device
    if isinstance(device, NamedSharding | PartitionSpec):
        sharding = sharding_of(device, "device_put")
        check_devices(sharding.mesh.devices.flat)
        return sharding
    if _is_list_of_devices(device) and device:
        check_devices(device)
        return tuple(device)
    raise TypeError(
        "device_put takes a torchpmap Device, a non-empty list of them, a NamedSharding or a "
        f"PartitionSpec, but got {device!r}."
    )


def sharding_of(sharding: Any, what: str) -> NamedSharding:
    """``sharding``, or that of a ``P(...)`` over the mesh of ``set_mesh``."""
    if isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(
            f"{what} takes a NamedSharding or a P(...), but got {sharding!r}: "
            'NamedSharding(mesh, P("x")) names the mesh.'
        )
    mesh = current_mesh()
    if mesh is None:
        raise ValueError(
            f"{what}: {sharding!r} needs a mesh. Name it (NamedSharding(mesh, {sharding!r})), or "
            "set one with torchpmap.set_mesh(mesh)."
        )
    return NamedSharding(mesh, sharding)


def put_as(
    tree: Any, layout: Callable[[tuple[int, ...], torch.dtype, str], Layout], name: str = "x"
) -> Any:
    """A tree on the devices; ``layout`` says where a leaf of a shape and dtype, at a path, goes.

    ``name``: of the tree, in messages.
    """
    leaves, structure = flatten(tree)
    paths = structure.paths(name)
    values = [
        leaf if leaf is None or isinstance(leaf, torch.Tensor) else _host(leaf, path)
        for leaf, path in zip(leaves, paths, strict=True)
    ]
    layouts = [
        None if value is None else layout(tuple(value.shape), value.dtype, path)
        for value, path in zip(values, paths, strict=True)
    ]
    if not inline_mode.active():
        _check_spanning(paths, values, layouts)
    placed: list[Any] = []
    for leaf, value, wanted in zip(leaves, values, layouts, strict=True):
        if value is None or wanted is None:
            placed.append(None)
            continue
        is_leaf = isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
        is_leaf = is_leaf and innermost(leaf) is leaf  # every tensor of a transform is a leaf
        if inline_mode.active():
            result = (value.detach() if is_leaf else value).cpu().clone()
            if wanted.is_replicated:
                inline_mode.note_replicated(result)
        else:
            result = put(value.detach() if is_leaf else value, wanted)
        placed.append(result.requires_grad_() if is_leaf else result)
    return structure.unflatten(placed)


def put(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``value`` laid out as ``layout``, differentiably."""
    if isinstance(value, Escaped):
        value.refuse()
    if _is_followed(value):
        result: torch.Tensor = _Put.apply(value, layout)
        return result
    return make_sharded(layout, handle_of(value, layout, is_noted=False))


def _is_followed(value: torch.Tensor) -> bool:
    """Whether a derivative through ``value`` may be asked for."""
    return innermost(value) is not value or is_recorded(value)


class _Put(torch.autograd.Function):
    """Move a value, differentiably."""

    @staticmethod
    def forward(value: torch.Tensor, layout: Layout) -> torch.Tensor:
        return make_sharded(layout, handle_of(value, layout, is_noted=False))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Any], output: Any) -> None:
        value, ctx.layout = inputs
        ctx.before = value._layout if type(value) is ShardedTensor else None
        ctx.device = value.device

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        if ctx.before is None:
            return cotangent.cpu().to(ctx.device), None
        return put(cotangent, ctx.before), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return put(tangent, ctx.layout)

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise NotImplementedError(
            "device_put and replicate do not work under torch.func.vmap (or jacrev, jacfwd, "
            "hessian): one row of a vmap cannot be moved alone. Put the values on the devices "
            "outside of it."
        )


def _check_spanning(
    paths: Sequence[str],
    values: Sequence[torch.Tensor | None],
    layouts: Sequence[Layout | None],
) -> None:
    """Raise ``ValueError`` if processes give different values for devices of several processes."""
    spanning = {
        path: value
        for path, value, layout in zip(paths, values, layouts, strict=True)
        if value is not None and layout is not None and type(value) is not ShardedTensor
        if len({device.process_index for device in layout.devices}) > 1
    }
    if spanning:
        check_equal_everywhere(spanning)


def _host(leaf: Any, path: str) -> torch.Tensor:
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        check_array(leaf, path)
        return host_tensor(leaf)
    if hasattr(leaf, "__dlpack__"):
        return torch.from_dlpack(leaf)
    raise TypeError(
        f"{path} has type {type(leaf).__name__}, which cannot be put on a device. Pass tensors, "
        "numpy arrays and numbers; a module is put there by torchpmap.replicate or "
        "torchpmap.shard_module."
    )


@overload
def device_put_sharded(shards: Sequence[Number], devices: Sequence[Device]) -> torch.Tensor: ...
@overload
def device_put_sharded(shards: Sequence[Tree], devices: Sequence[Device]) -> Tree: ...
@boundary
def device_put_sharded(shards: Sequence[Any], devices: Sequence[Device]) -> Any:
    """Return a list of per-device values as ShardedTensors: value k becomes row k, on the k-th
    device.

    device_put_sharded: n x T[*s] -> T[n, *s]

    Args:
        shards: one value (or pytree of one structure) per device.
        devices: as many devices.

    Raises:
        ValueError: the numbers of shards and devices, or structures or shapes of shards, differ.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.device_put_sharded([torch.ones(2), torch.zeros(2)], tp.devices()[:2]).tolist()
        [[1.0, 1.0], [0.0, 0.0]]

    Source: ``jax.device_put_sharded`` (removed from JAX in 0.10).
    """
    refuse_inside("device_put_sharded")
    if not shards or len(shards) != len(devices):
        raise ValueError(
            f"len(shards) = {len(shards)} must equal len(devices) = {len(devices)}, and there must "
            "be at least one."
        )
    check_devices(devices)
    flat = [flatten(shard) for shard in shards]
    structure = flat[0][1]
    for k, (_, other) in enumerate(flat):
        if other != structure:
            raise ValueError(
                f"shards must have one structure, but shard 0 has {structure} and shard {k} has "
                f"{other}."
            )
    chosen = tuple(devices)
    results: list[Any] = []
    for path, *parts in zip(
        structure.paths("shards[k]"), *(leaves for leaves, _ in flat), strict=True
    ):
        if parts[0] is None:
            results.append(None)
            continue
        values = [
            _near(part) if isinstance(part, torch.Tensor) else _host(part, path) for part in parts
        ]
        kinds = {(tuple(value.shape), value.dtype) for value in values}
        if len(kinds) != 1:
            raise ValueError(
                f"the shards must agree in shape and dtype, but {path} has "
                f"{sorted(map(str, kinds))}."
            )
        shape, dtype = kinds.pop()
        layout = row_layout((len(chosen), *shape), dtype, chosen, 0, None)
        results.append(_put_rows(layout, values))
    return structure.unflatten(results)


def _near(value: torch.Tensor) -> torch.Tensor:
    """A tensor that the running devices can take: on the host, or on the device of this process."""
    plain = type(value) is not ShardedTensor and not inline_mode.active()
    return value if plain and current_runtime().runs_here else value.cpu()


def _put_rows(layout: Layout, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    if inline_mode.active():
        return torch.stack(list(rows))
    if any(map(_is_followed, rows)):
        return put(torch.stack([row.cpu() for row in rows]), layout)
    team = current_runtime().team(layout.ranks)
    return make_sharded(layout, team.runtime.put(team, [row.unsqueeze(0) for row in rows]))


@overload
def device_put_replicated(x: Number, devices: Sequence[Device]) -> torch.Tensor: ...
@overload
def device_put_replicated(x: Tree, devices: Sequence[Device]) -> Tree: ...
@boundary
def device_put_replicated(x: Any, devices: Sequence[Device]) -> Any:
    """Return ``x`` with a new leading dim of one equal row per device.

    device_put_replicated: T[*s] -> T[n, *s]

    Args:
        x: tensor, array, number or a pytree of them.
        devices: the devices, in row order.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.device_put_replicated(torch.tensor(7.0), tp.devices()[:3])
        ShardedTensor([7., 7., 7.], rows of dim 0 on cpu:0 cpu:1 cpu:2)

    Source: ``jax.device_put_replicated`` (removed from JAX in 0.10).
    """
    refuse_inside("device_put_replicated")
    return device_put_sharded([x] * len(devices), devices)


def replicate(x: Any, devices: Sequence[Device] | None = None, name: str = "x") -> Any:
    """``torchpmap.replicate`` of a tree of tensors, arrays and numbers."""
    refuse_inside("replicate")
    chosen = tuple(all_devices() if devices is None else devices)
    check_devices(chosen)
    return put_as(x, lambda shape, dtype, path: replicated_layout(shape, dtype, chosen), name)


@boundary
def unreplicate(x: Tree) -> Tree:
    """Return the first device's value of every leaf, as plain CPU tensors.

    unreplicate: replicated T[*s] -> T[*s];  stacked T[n, *s] -> T[*s] (row 0)

    Args:
        x: pytree; values of ``replicate`` and of ``out_axes=None`` are fetched as they are, stacked
            ones (one row per device) give row 0.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.unreplicate(tp.replicate(torch.tensor([1.0, 2.0])))
        tensor([1., 2.])
        >>> tp.unreplicate(tp.device_put_replicated(torch.tensor(7.0), tp.devices()))
        tensor(7.)

    Source: ``flax.jax_utils.unreplicate``.
    """

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        value = innermost(leaf)
        if not isinstance(value, ShardedTensor):
            return leaf if inline_mode.is_replicated(leaf) else leaf[0]
        if value.is_fully_replicated:
            return leaf.cpu()
        has_rows_here = value.is_fully_addressable and value._alive()[0].dim == 0
        if has_rows_here and not _is_followed(leaf):
            return value.addressable_data(0)[0]  # leaf[0] would send it to all devices
        return leaf[0].cpu()

    leaves, structure = flatten(x)
    return structure.unflatten([first(leaf) for leaf in leaves])


@boundary
def device_get(x: Any) -> Any:
    """Return a pytree with every ShardedTensor fetched to the host; other leaves are left alone.

    device_get: T[*s] on the devices -> numpy array [*s] (dtypes that numpy lacks, such as bfloat16:
    a CPU tensor). Torch takes these arrays as tensors, for example in ``module.load_state_dict``.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.device_get({"y": tp.device_put(torch.arange(2.0)), "n": 3})
        {'y': array([0., 1.], dtype=float32), 'n': 3}

    Source: ``jax.device_get``.
    """

    def fetch(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        host = leaf.to_host()
        try:
            return host.numpy().view(HostArray)
        except TypeError:
            return host

    leaves, structure = flatten(x)
    return structure.unflatten([fetch(leaf) for leaf in leaves])


@boundary
def block_until_ready(x: Tree) -> Tree:
    """Wait until every ShardedTensor in a pytree is computed; returns the pytree.

    Raises:
        What a computation raised.

    Example:
        >>> import torch, torchpmap as tp
        >>> y = tp.block_until_ready(tp.pmap(lambda x: x + 1)(torch.zeros(4)))

    Source: ``jax.block_until_ready``.
    """
    latest: dict[int, Handle] = {}
    for leaf in flatten(x)[0]:
        if isinstance(leaf, ShardedTensor):
            _, handle = leaf._alive()
            known = latest.get(id(handle.team))
            if known is None or handle.seq > known.seq:
                latest[id(handle.team)] = handle
            handle.team.runtime.check(handle)
    for handle in latest.values():
        handle.team.runtime.block(handle)
    for leaf in flatten(x)[0]:
        if isinstance(leaf, ShardedTensor):
            handle = leaf._alive()[1]
            handle.team.runtime.check(handle)
    return x


def handle_of(value: Any, layout: Layout, *, is_noted: bool = True) -> Handle:
    """The handle of a value laid out as ``layout``: its own if it is there already, else it is
    (re)sent.

    ``is_noted``: whether ``report_gathers`` lists a ShardedTensor that moves, as an argument.
    """
    if type(value) is not ShardedTensor:
        return store(layout, value if isinstance(value, torch.Tensor) else host_tensor(value))
    handle, here = check_open(value), value._layout
    assert here is not None
    if here.same_place(layout):
        return handle
    if is_noted:
        note_gather(MOVE, value.nbytes)
    return move(here, handle, layout)


def handles_of(values: Sequence[Any], layouts: Sequence[Layout]) -> list[Handle]:
    return [handle_of(value, layout) for value, layout in zip(values, layouts, strict=True)]
