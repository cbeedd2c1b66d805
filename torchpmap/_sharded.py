"""``ShardedTensor``: a tensor whose data lives on the devices of the pool.

It is a ``torch.Tensor`` subclass without storage here.  Its state is a layout (what the value is
and who holds which block) and a handle (the name of the blocks on the workers; the last reference
frees them).  Values are immutable: an in-place operation makes a new value and lets this tensor
name it.

An operation gathers the operands first and runs on the host; only what needs no data (``detach``,
``clone``) or little of it (``x[i]`` moves one row) is cheaper than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torchpmap._current import runtime
from torchpmap._devices import Device
from torchpmap._errors import RuntimeClosed
from torchpmap._layout import Layout
from torchpmap._mesh import NamedSharding
from torchpmap._runtimes._base import Handle, Team

__all__ = ["Shard", "ShardedTensor", "make_sharded", "store"]

_aten = torch.ops.aten
_SHARING = frozenset({_aten.detach.default, _aten.alias.default, _aten.clone.default})
"""Operations whose result is the same immutable value: nothing moves."""

_REPR_MOVES_UP_TO = 1000
"""Elements that ``repr`` fetches to show; a larger value is described without its numbers."""


@dataclass(frozen=True)
class Shard:
    """One device's block of a ``ShardedTensor``."""

    device: Device
    index: tuple[slice, ...]
    """Which part of the whole it is."""
    replica_id: int
    data: torch.Tensor
    """The block as a CPU tensor, with the dims of the whole."""


class ShardedTensor(torch.Tensor):
    """A ``torch.Tensor`` whose data lives on the devices (not ``torch.distributed``'s class of the
    same name).

    Results of ``pmap`` and of ``device_put`` are of this class.  ``shape``, ``dtype``, ``len`` and
    ``repr`` need no data; every torch function works on it, gathering the operands to the host
    first.  Handing it to a mapped function again moves nothing when it is already laid out as
    needed.  The workers free it when the last reference dies.

    Example:
        >>> import torch, torchpmap as tp
        >>> y = tp.pmap(lambda x: x * 2)(torch.arange(4.0))
        >>> y
        ShardedTensor([0., 2., 4., 6.], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> y[3], y.sum()
        (tensor(6.), tensor(12.))
        >>> [shard.data for shard in y.addressable_shards[:2]]
        [tensor([0.]), tensor([2.])]

    Source: ``jax.Array`` as ``jax.pmap`` returns it.
    """

    __slots__ = ("_consumed_by", "_handle", "_layout")

    _layout: Layout | None
    """None once the value was donated or deleted: no call accepts it then."""
    _handle: Handle | None
    _consumed_by: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> ShardedTensor:
        raise TypeError(
            "a ShardedTensor is made by pmap or by torchpmap.device_put, not by calling the class"
        )

    # -- where it is -------------------------------------------------------------------------------

    @property
    def sharding(self) -> NamedSharding:
        """Mesh and partition spec."""
        return self._alive()[0].sharding

    def devices(self) -> set[Device]:
        """The devices that hold a block."""
        return set(self._alive()[0].devices)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether every block is in reach of this process: always, with one controller."""
        return True

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return self._alive()[0].is_replicated

    @property
    def addressable_shards(self) -> list[Shard]:
        """The blocks, fetched, in mesh order."""
        layout, handle = self._alive()
        blocks = _fetch_blocks(layout, handle, range(len(layout.ranks)))
        seen: dict[str, int] = {}
        shards = []
        for device, index, block in zip(layout.devices, layout.slices, blocks, strict=True):
            replica = seen[str(index)] = seen.get(str(index), -1) + 1
            shards.append(Shard(device, index, replica, block))
        return shards

    def addressable_data(self, index: int) -> torch.Tensor:
        """The block of the ``index``-th device as a CPU tensor; ``IndexError`` if there is none."""
        layout, handle = self._alive()
        return _fetch_blocks(layout, handle, [range(len(layout.ranks))[index]])[0]

    # -- when it is --------------------------------------------------------------------------------

    def block_until_ready(self) -> ShardedTensor:
        """Wait until the value is computed and return it; raises what its computation raised."""
        _, handle = self._alive()
        handle.team.runtime.block(handle)
        return self

    def is_ready(self) -> bool:
        """Whether the value is known to be computed; does not wait."""
        _, handle = self._alive()
        return handle.team.runtime.is_ready(handle)

    def delete(self) -> None:
        """Free the value on the devices now; using it afterwards raises ``RuntimeError``.
        Idempotent.
        """
        self._consume("delete()")

    def is_deleted(self) -> bool:
        """Whether the value was deleted or donated."""
        return self._layout is None

    def _consume(self, by: str) -> None:
        if self._layout is not None:
            self._consumed_by = by
            self._layout = self._handle = None

    def _alive(self) -> tuple[Layout, Handle]:
        layout, handle = self._layout, self._handle
        if layout is None or handle is None:
            kind = str(self.dtype).removeprefix("torch.")
            raise RuntimeError(
                f"this ShardedTensor of type {kind}{list(self.shape)} has been deleted by "
                f"{self._consumed_by}; its memory on the devices is gone. Use the result of that "
                "call, or do not donate the argument."
            )
        return layout, handle

    # -- to the host -------------------------------------------------------------------------------

    def to_host(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor (a copy)."""
        return gather(*self._alive())

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The whole value as a plain CPU tensor."""
        return self.to_host() if not self.requires_grad else self * 1

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The whole value as a numpy array."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return self.to_host().numpy()

    def tolist(self) -> Any:
        """The whole value as (nested lists of) Python numbers."""
        return self.to_host().tolist()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``torch.Tensor.to``; a device argument, also ``"cpu"``, gathers."""
        return self.cpu().to(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(
                "a ShardedTensor lives on the devices: an array of it is always a copy"
            )
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *, stream: Any = None, **kwargs: Any) -> Any:
        return self.to_host().__dlpack__(stream=stream, **kwargs)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def __getitem__(self, index: Any) -> torch.Tensor:
        layout, handle = self._alive()
        traced = torch._C._len_torch_dispatch_stack()  # then it has to be an operation
        if type(index) is int and not self.requires_grad and layout.shape and not traced:
            size = layout.shape[0]
            if not -size <= index < size:
                raise IndexError(f"index {index} is out of bounds for dimension 0 with size {size}")
            return _fetch_row(layout, handle, index % size)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        layout, _ = self._alive()
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a ShardedTensor that requires grad cannot be written to in place; do it under "
                "torch.no_grad(), or use an out-of-place operation."
            )
        host = self.to_host()
        host[index] = value
        self._handle = store(layout, host)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self if self.requires_grad else self.to_host()).unbind(0))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a pickle may be read where these devices do not exist
        return self.to_host().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        copy = make_sharded(*self._alive())
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._layout
        if layout is None:
            return f"ShardedTensor(shape={list(self.shape)}, deleted by {self._consumed_by})"
        where = " ".join(map(str, layout.devices))
        if layout.is_replicated:
            where = f"replicated on {where}"
        elif layout.dim is not None:
            where = f"rows of dim {layout.dim} on {where}"
        else:
            where = f"{layout.sharding.spec} on {where}"
        if self.numel() > _REPR_MOVES_UP_TO:
            return f"ShardedTensor(shape={list(self.shape)}, dtype={self.dtype}, {where})"
        numbers = repr(self.to_host())[len("tensor(") : -1]
        return f"ShardedTensor({numbers}, {where})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), format_spec)

    # -- torch operations --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func in _SHARING
            and type(args[0]) is ShardedTensor
            and not (kwargs.get("memory_format") or 0)
        ):
            return make_sharded(*args[0]._alive())
        gathered: dict[int, torch.Tensor] = {}

        def to_host(value: Any) -> Any:
            if type(value) is not ShardedTensor:
                return value
            if id(value) not in gathered:
                gathered[id(value)] = value.to_host()
            return gathered[id(value)]

        host_args, host_kwargs = pytree.tree_map(to_host, (args, kwargs))
        result = func(*host_args, **host_kwargs)
        if not func._schema.is_mutable:
            return result
        return _write_back(func, args, kwargs, gathered, result)


def make_sharded(layout: Layout, handle: Handle) -> ShardedTensor:
    """A tensor that names the blocks of ``handle``."""
    # by position: keywords cost 0.15 us each time
    tensor: ShardedTensor = _wrap(
        ShardedTensor, layout.shape, None, None, None, layout.dtype, torch.strided, _CPU
    )
    tensor._layout = layout
    tensor._handle = handle
    return tensor


_wrap = torch.Tensor._make_wrapper_subclass
_CPU = torch.device("cpu")


def _write_back(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    gathered: dict[int, torch.Tensor],
    result: Any,
) -> Any:
    """After an in-place operation on gathered copies: store them again, and let the written tensors
    name the new values.
    """
    originals: dict[int, ShardedTensor] = {}
    for position, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for target in value if isinstance(value, list | tuple) else (value,):
            if not written or type(target) is not ShardedTensor or id(target) not in gathered:
                continue
            host, layout = gathered[id(target)], target._alive()[0]
            if tuple(host.shape) != layout.shape or host.dtype != layout.dtype:
                raise RuntimeError(
                    f"{func} would change the shape or dtype of a ShardedTensor in place; use the "
                    "out-of-place operation."
                )
            target._handle = store(layout, host)
            originals[id(host)] = target
    return pytree.tree_map(lambda value: originals.get(id(value), value), result)


# -- moving data -----------------------------------------------------------------------------------


def team_of(layout: Layout) -> Team:
    """The team that holds values of a layout, in the running pool."""
    return runtime().team(layout.ranks)


def store(layout: Layout, value: torch.Tensor) -> Handle:
    """Send a host tensor to the devices as ``layout`` says."""
    team = team_of(layout)
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    if layout.is_replicated:
        return team.runtime.put(team, [value] * len(layout.ranks))
    return team.runtime.put(team, [value[index] for index in layout.slices])


def gather(layout: Layout, handle: Handle) -> torch.Tensor:
    """Fetch a whole value."""
    if layout.is_replicated:
        return _fetch_blocks(layout, handle, [0])[0]
    whole = torch.empty(layout.shape, dtype=layout.dtype)
    parts = [whole[index] for index in layout.slices]
    direct = all(part.is_contiguous() for part in parts)
    targets = (
        parts if direct else [torch.empty(layout.block_shape, dtype=layout.dtype) for _ in parts]
    )
    handle.team.runtime.fetch(
        handle, [(place, -1, 0, target) for place, target in enumerate(targets)]
    )
    if not direct:
        for part, target in zip(parts, targets, strict=True):
            part.copy_(target)
    return whole


def _fetch_blocks(layout: Layout, handle: Handle, places: Sequence[int]) -> list[torch.Tensor]:
    blocks = [torch.empty(layout.block_shape, dtype=layout.dtype) for _ in places]
    handle.team.runtime.fetch(
        handle, [(place, -1, 0, block) for place, block in zip(places, blocks, strict=True)]
    )
    return blocks


def _fetch_row(layout: Layout, handle: Handle, row: int) -> torch.Tensor:
    """``x[row]``: from the device that holds it, or from the first if all do; else the whole value
    is fetched.
    """
    target = torch.empty(layout.shape[1:], dtype=layout.dtype)
    if layout.dim == 0:
        rows = layout.shape[0] // len(layout.ranks)
        request = (row // rows, 0, row % rows, target)
    elif layout.is_replicated:
        request = (0, 0, row, target)
    else:
        return gather(layout, handle)[row]
    handle.team.runtime.fetch(handle, [request])
    return target


def check_open(tensor: ShardedTensor) -> Handle:
    """The handle of an argument, if it belongs to the running pool."""
    _, handle = tensor._alive()
    if handle.team.runtime is not runtime():
        raise closed_pool()
    return handle


def closed_pool() -> RuntimeClosed:
    return RuntimeClosed(
        "a ShardedTensor of a pool that was shut down cannot be used; its data went with the "
        "workers. Fetch what must survive (torchpmap.device_get) before torchpmap.shutdown() or "
        "torchpmap.init() with other devices."
    )
