"""``resize``: another number of devices, and all values go on.

The old pool runs until the new one has every value: a failure before that changes nothing.

    old pool --gather--> this process --store--> new pool;  then the same tensors refer to that
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import PLATFORMS, Device
from torchpmap._base.torch_internals import is_traced
from torchpmap._layout.layout import (
    Layout,
    general_layout,
    replicated_layout,
    row_layout,
    spread_layout,
)
from torchpmap._layout.mesh import Mesh, NamedSharding
from torchpmap._runtime import current, inline_mode
from torchpmap._runtime.base import Handle, PoolRuntime
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import blocks_of, gather, store_on
from torchpmap._sharded.views import in_turn


@boundary
def resize(devices: int | Sequence[Device]) -> None:
    """Change the number of devices; every ShardedTensor keeps its value, on the new devices.

    The tensors stay the same objects, so modules and optimizers that hold them go on.  Mapped and
    jitted functions are traced anew at their next call.

    A value that all devices hold is held by all afterwards.  One that is cut over all devices is
    cut in the same way (of a mesh with several axes the first gets another size).  If that does
    not divide, the first dim that does is cut; if there is none, the value is replicated.  A value
    on some of the devices lies on those of them that remain, or on the first device.

    A value that only a worker that has died had raises ``ShardLost`` when it is used, as before.
    What has a copy on another device keeps its value, also where no worker could be started again.

    It waits for calls that run, and calls of other threads wait for it.  What one of these returns
    that had begun just before may be lost.  For a moment there are two pools, each with all values.

    Args:
        devices: how many; or those of ``tp.devices()`` that remain, of which the k-th is device k
            afterwards.  GPUs remain from the first on.

    Raises:
        ValueError: an illegal number, fewer GPUs than that, or devices that are not in use.
        TypeError: ``devices`` is something else.
        RuntimeError: inside a mapped or jitted function, under a launcher such as torchrun, or with
            the runtime ``inline``.
        What fetching or sending a value raised; then the old devices and all values are as before.

    Example:
        >>> import torch, torchpmap as tp
        >>> x, w = tp.shard_batch(torch.arange(4.0)), tp.replicate(torch.tensor(7.0))
        >>> tp.resize(2)
        >>> x, w
        (ShardedTensor([0., 1., 2., 3.], rows of dim 0 on cpu:0 cpu:1), \
ShardedTensor(7., replicated on cpu:0 cpu:1))
        >>> tp.resize(4)
        >>> x.tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    _refuse_where_impossible()
    before = tuple(current.devices())
    if type(devices) is int:
        num_devices, kept = devices, before[: max(devices, 0)]
    else:
        kept = _remaining(devices, before)
        num_devices = len(kept)
    if not current.has_values():
        current.init(num_devices, before[0].platform)
    elif num_devices != len(before) or kept != before or not current.is_running():
        with current.steady, in_turn():  # what another thread wrote meanwhile would be lost
            current.change(num_devices, partial(_carry, kept))


def _refuse_where_impossible() -> None:
    current.refuse_inside("resize")
    if is_traced():
        raise RuntimeError(
            "torchpmap.resize was called in a function that is being traced, whose graph is for "
            "the devices there are. Call it between the calls of that function."
        )
    if inline_mode.active():
        raise RuntimeError(
            "torchpmap.resize changes a pool of workers, and with the runtime 'inline' there is "
            "none: mapped functions run in this process. Call torchpmap.init(num_devices=...)."
        )
    if current.is_launched():
        raise RuntimeError(
            "torchpmap.resize cannot change how many processes a launcher has started. Save the "
            "values (torchpmap.checkpoint), and start the script again with another number."
        )


def _remaining(devices: Any, before: tuple[Device, ...]) -> tuple[Device, ...]:
    chosen = tuple(devices) if isinstance(devices, Iterable) else ()
    if not chosen or not all(isinstance(each, Device) for each in chosen):
        raise TypeError(
            "resize takes the number of devices, or a list of those that remain, but got "
            f"{devices!r}."
        )
    current.check_devices(chosen)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"resize: a device is listed twice in {list(chosen)}.")
    if PLATFORMS[chosen[0].platform].is_hardware and chosen != before[: len(chosen)]:
        raise ValueError(
            f"resize: GPUs can only remain from the first on, but got {list(chosen)}. Choose which "
            "GPUs there are with CUDA_VISIBLE_DEVICES when the script starts."
        )
    return chosen


def _carry(kept: Sequence[Device], old: PoolRuntime, new: PoolRuntime) -> Callable[[bool], None]:
    """Copy all values to the new pool, and return a function that lets the tensors refer to the
    copies (True) or again to the old ones (False); ``kept``: the devices that remain.
    """
    places = dict(zip(kept, new.devices, strict=False))
    carried: dict[tuple[Layout, Handle], tuple[Layout, Handle]] = {}
    while True:  # a view may have been made of one meanwhile
        tensors = [(x, (x._layout, x._handle)) for x in _living(old)]
        missing = dict.fromkeys(key for _, key in tensors if key not in carried)
        if not missing:
            break
        for layout, handle in missing:
            where = _layout_on(layout, _new_devices(layout, old, new, places))
            carried[layout, handle] = where, _carried(layout, handle, where, new)

    def switch(is_new: bool) -> None:
        for tensor, key in tensors:
            tensor._layout, tensor._handle = carried[key] if is_new else key

    return switch


def _living(owner: PoolRuntime) -> list[Any]:
    """The tensors whose values this pool has.

    Python's collector knows them all: a list of them would make each new tensor cost more.  Objects
    that ``gc.freeze`` hides from it are thawed for a moment.
    """
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.collect()  # what is frozen again must not be garbage
        gc.unfreeze()
    try:
        # Not get_objects: it also gives tuples that other threads are making, which these then
        # cannot (SystemError, https://bugs.python.org/issue15108).  An object refers to its class.
        users = gc.get_referrers(*_with_subclasses(ShardedTensor))
        found: list[Any] = [x for x in users if issubclass(type(x), ShardedTensor)]
    finally:
        if is_frozen:
            gc.freeze()
    handles = [getattr(x, "_handle", None) for x in found]  # one may be half made, or deleted
    return [
        x for x, y in zip(found, handles, strict=True) if y is not None and y.team.runtime is owner
    ]


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in type.__subclasses__(kind):
        yield from _with_subclasses(each)


def _carried(layout: Layout, handle: Handle, where: Layout, new: PoolRuntime) -> Handle:
    """A value in the new pool; if it is lost, a handle that says so."""
    team = new.team(where.ranks)
    value = _rescued(layout, handle)
    if isinstance(value, BaseException):
        return new.lost(team, value)
    sent = store_on(team, where, value)
    new.block(sent)  # there may be no memory for it
    return sent


def _rescued(layout: Layout, handle: Any) -> torch.Tensor | BaseException:
    """A whole value, of any copies that are left; or why it is lost."""
    owner: PoolRuntime = handle.team.runtime
    try:
        return gather(layout, handle)
    except Exception:
        if not any(owner.loss(handle, place) for place in range(len(layout.ranks))):
            raise
    whole = owner.memory(layout.shape, layout.dtype)
    for places, index in blocks_of(layout):
        losses = {place: owner.loss(handle, place) for place in places}
        left = next((place for place, loss in losses.items() if loss is None), None)
        if left is None:
            found = losses[places[0]]
            assert found is not None
            return found
        owner.fetch(handle, [(left, -1, 0, whole[index])])
    return whole


def _new_devices(
    layout: Layout, old: PoolRuntime, new: PoolRuntime, places: dict[Device, Device]
) -> tuple[Device, ...]:
    if set(layout.devices) == set(old.devices):
        return new.devices
    return tuple(places[x] for x in layout.devices if x in places) or new.devices[:1]


def _layout_on(layout: Layout, devices: tuple[Device, ...]) -> Layout:
    """The layout of the same kind on other devices."""
    shape, dtype, sharding = layout.shape, layout.dtype, layout.sharding
    if layout.is_replicated:
        return replicated_layout(shape, dtype, devices)
    names, (_, *rest) = sharding.mesh.axis_names, sharding.mesh.devices.shape
    if not rest and layout.dim is not None and shape[layout.dim] % len(devices) == 0:
        return row_layout(shape, dtype, devices, layout.dim, names[0])
    if rest and len(devices) % math.prod(rest) == 0:
        array = np.array(devices, dtype=object).reshape(-1, *rest)
        try:
            new = NamedSharding(Mesh(array, names), sharding.spec)
            return general_layout(shape, dtype, new, stacked=True)
        except ValueError:  # a dim does not divide
            pass
    return spread_layout(shape, dtype, devices)
