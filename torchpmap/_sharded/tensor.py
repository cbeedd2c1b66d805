"""``ShardedTensor``: a tensor whose data lives on the devices of the pool.

It is a ``torch.Tensor`` subclass without storage in this process.  Its state is a layout (shape,
dtype, and which rank holds which block) and a handle (the name of the blocks on the workers; the
last reference frees them).  Values are immutable: an in-place operation computes a new value and
makes this tensor refer to it.

An operation runs on the workers, and its results stay there.  For one that only this process can
run, such as one whose result has a shape that depends on values, the operands are fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from torchpmap._base.boundary import bounded
from torchpmap._base.devices import Device
from torchpmap._base.errors import kind_of
from torchpmap._base.torch_internals import (
    guard_memory,
    innermost,
    is_traced,
    new_wrapper,
    no_torch_function,
    num_modes,
    untraced,
)
from torchpmap._base.traced_constants import become_constants
from torchpmap._base.writes import written_values
from torchpmap._layout.layout import Layout, Shard
from torchpmap._layout.mesh import NamedSharding
from torchpmap._runtime.base import Handle
from torchpmap._sharded.arguments import CHANNELS_LAST, facts_of, occurrences
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.host import ToHost, is_recorded, run_on_host
from torchpmap._sharded.host_copy import host_copy
from torchpmap._sharded.indexing import (
    INDEXING,
    plain_index,
    slices_a_cut,
    without_masks,
)
from torchpmap._sharded.lower import Operation
from torchpmap._sharded.memory import CPU, STRIDED, Remote, with_operators
from torchpmap._sharded.operations import operation_for, start
from torchpmap._sharded.shown import html_of, text_of
from torchpmap._sharded.strides import (
    QUESTIONS,
    RESHAPING,
    Strides,
    check_overlap,
    in_whole_memory,
    strides_of,
    strides_of_call,
    strides_of_computed,
    strides_of_copy,
    turn,
)
from torchpmap._sharded.transfer import (
    blocks_of,
    fetch_blocks,
    gather,
    is_whole_here,
    places_here,
    store,
)
from torchpmap._sharded.views import (
    Changed,
    check_writable,
    is_row,
    is_taken_as_grad,
    link_alias,
    link_view,
    share_values,
    twin_of,
    unlink,
    write_all,
)

_aten = torch.ops.aten
_SHARING = frozenset({_aten.detach.default, _aten.alias.default, _aten.clone.default})
"""Operations whose result is the same immutable value: nothing moves."""
_ABOUT_MEMORY = frozenset({*_SHARING, *QUESTIONS, *RESHAPING, _aten.as_strided.default})

_ANY_FORMAT = (None, torch.contiguous_format, torch.preserve_format, *CHANNELS_LAST)


@untraced
@bounded
@with_operators
class ShardedTensor(Remote):
    """A ``torch.Tensor`` whose data lives on the devices (not ``torch.distributed``'s class of the
    same name).

    Results of ``pmap`` and of ``device_put`` are of this class.  ``shape``, ``dtype`` and ``len``
    fetch nothing.  Every torch function works on it, on the devices unless the shape of its result
    depends on values.  Passing it to a mapped function moves nothing if it is already laid out as
    needed.  The workers free the data when the last reference dies.

    Example:
        >>> import torch, torchpmap as tp
        >>> y = tp.pmap(lambda x: x * 2)(torch.arange(4.0))
        >>> y
        ShardedTensor([0., 2., 4., 6.], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> y[3].item(), y.sum()
        (6.0, ShardedTensor(12., replicated on cpu:0 cpu:1 cpu:2 cpu:3))
        >>> (y + 1).sharding == y.sharding
        True
        >>> [shard.data for shard in y.addressable_shards[:2]]
        [tensor([0.]), tensor([2.])]

    Source: ``jax.Array`` as ``jax.pmap`` returns it.
    """

    __slots__ = ("_aliases", "_consumed_by", "_copy", "_handle", "_layout", "_view", "_views")

    _layout: Layout | None
    """None once the value was donated or deleted: no call accepts it then."""
    _handle: Handle | None
    _consumed_by: str

    __torch_function__ = no_torch_function

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
        """Whether this process can reach every block; always true with one controller."""
        layout = self._alive()[0]
        return len(places_here(layout)) == len(layout.devices)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return self._alive()[0].is_replicated

    @property
    def addressable_shards(self) -> list[Shard]:
        """The blocks that this process can reach, fetched, in mesh order."""
        layout, handle = self._alive()
        here = places_here(layout)
        blocks = dict(zip(here, fetch_blocks(layout, handle, here), strict=True))
        shards = {
            place: Shard(layout.devices[place], index, replica, blocks[place])
            for places, index in blocks_of(layout)
            for replica, place in enumerate(places)
            if place in blocks
        }
        return [shards[place] for place in here]

    def addressable_data(self, index: int) -> torch.Tensor:
        """The block of the ``index``-th device as a CPU tensor; ``IndexError`` if there is none."""
        layout, handle = self._alive()
        return fetch_blocks(layout, handle, [places_here(layout)[index]])[0]

    # -- waiting and freeing -----------------------------------------------------------------------

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
            kind = kind_of(self.shape, self.dtype)
            by = getattr(self, "_consumed_by", "a call that was interrupted, or still runs")
            raise RuntimeError(
                f"this ShardedTensor of type {kind} has been deleted by {by}; its memory on the "
                "devices is gone. Use the result of that call, or do not donate the argument."
            )
        return layout, handle

    def _is_closed(self) -> bool:
        """Whether the pool was shut down, and the data with it."""
        return self._handle is not None and self._handle.team.runtime.closed

    def _twin(self) -> ShardedTensor:
        """Another tensor of the same value, with the same strides."""
        return make_sharded(*self._alive(), strides=strides_of(self))

    def _made(self, *given: Any, **options: Any) -> ShardedTensor:
        """``make_sharded``, for code that this file imports."""
        return make_sharded(*given, **options)

    backward = torch.Tensor.backward  # here, so that it folds tracebacks

    # -- another value -----------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The same value without gradients, as ``torch.Tensor.data``.  After ``x.data = y`` both
        share the value of the ShardedTensor ``y``: a write to one changes both.
        """
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if is_traced():
            _data.__set__(self, value)
            return
        if type(value) is not ShardedTensor:
            raise TypeError(
                "the data of a ShardedTensor must be a ShardedTensor, but got a "
                f"{type(value).__name__}. Put it on the devices first (torchpmap.device_put, "
                "torchpmap.replicate), or write the numbers: x.copy_(value)."
            )
        layout, handle = value._alive()
        if value is self:
            return
        old = None if self._layout is None else self._twin()
        _data.__set__(self, value)  # shape and dtype, and what torch checks
        if old is not None:
            unlink(self, old)
        self._layout, self._handle = layout, handle
        link_alias(self, value)

    # -- to the host -------------------------------------------------------------------------------

    def to_host(self) -> torch.Tensor:
        """The whole value as a plain CPU tensor (a copy)."""
        return gather(*self._alive())

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """The whole value as a plain CPU tensor."""
        if is_traced():
            return super().cpu()
        if is_recorded(self):
            return ToHost.apply(self)
        return self.to_host()

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
        """As ``torch.Tensor.to``; a device argument (also ``"cpu"``) or a host tensor gathers,
        except ``"meta"``.
        """
        given = [*args, *kwargs.values()]
        like = [value for value in given if isinstance(value, torch.Tensor)]
        if any(type(value) is ShardedTensor for value in like):
            return super().to(*args, **kwargs)
        place = kwargs.get("device", args[0] if args else None)
        if not like and not isinstance(place, torch.device | str | int):
            return super().to(*args, **kwargs)
        if str(place).startswith("meta") or any(value.is_meta for value in like):
            return super().to(*args, **kwargs)  # needs no values
        return self.cpu().to(*args, **kwargs)

    def _memory(self) -> torch.Tensor:
        return host_copy(self).flat

    def __setitem__(self, index: Any, value: Any) -> None:
        layout, handle = self._alive()
        if num_modes():
            super().__setitem__(index, value)
            return
        index = plain_index(index)
        if type(index) is int and is_row(value, self, index) and not is_recorded(self):
            return  # x[k] += 1 has written it
        if any(isinstance(x, torch.Tensor) and is_recorded(x) for x in (self, value)) or not (
            is_whole_here(layout) and slices_a_cut(layout, index)
        ):
            super().__setitem__(index, value)
            return
        check_writable(self)
        if self.is_inference() and not _is_inference():
            self.copy_(gather(layout, handle))  # torch's error
        while True:
            host = gather(layout, handle)
            note_gather(_aten.index_put_.default, host.nbytes)
            host[index] = value
            torch.autograd.graph.increment_version(self)
            try:  # copy_ would hold the value thrice
                return write_all([self], [handle], [store(layout, host)])
            except Changed:
                layout, handle = self._alive()

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.dim() == 0:
            raise TypeError("iteration over a 0-d tensor")
        layout = self._alive()[0]
        if num_modes() or is_recorded(self) or layout.shape[0] == layout.block_shape[0]:
            return iter(self.unbind(0))
        return (self[k] for k in range(len(self)))  # unbind would gather

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a pickle may be read where these devices do not exist
        host = self.to_host().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            host = torch.nn.Parameter(host, self.requires_grad)
        return host.__reduce_ex__(protocol)

    def __copy__(self) -> ShardedTensor:
        twin = twin_of(self)
        twin.__dict__.update(self.__dict__)
        twin.requires_grad_(self.requires_grad)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment. Copy x.detach(), or use x.clone()."
            )
        twin = memo[id(self)] = make_sharded(*self._alive())
        twin.__dict__.update(deepcopy(self.__dict__, memo))
        twin.requires_grad_(self.requires_grad)
        twin.grad = deepcopy(self.grad, memo)
        return twin

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return text_of(self)

    __str__ = __repr__

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def __format__(self, format_spec: str) -> str:
        if self._layout is None or self._is_closed():
            return repr(self)
        return format(self.item() if self.dim() == 0 else str(self), format_spec)

    # -- torch operations --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if num_modes() and become_constants(occurrences(cls, args, kwargs)):
            return func(*args, **kwargs)
        if func in _ABOUT_MEMORY:
            if func in _SHARING and kwargs.get("memory_format") in _ANY_FORMAT:
                return _shared(func, args[0], kwargs.get("memory_format"))
            if func in QUESTIONS:
                return QUESTIONS[func](*args, **kwargs)
            if func in RESHAPING:
                return turn(func, args)
            if func is _aten.as_strided.default:
                args = in_whole_memory(*args)
        facts = facts_of(func)
        if facts.is_composite:  # autograd, which decomposes it, was skipped
            return func.decompose(*args, **kwargs)
        if func.is_view and (of_inference := args[0].is_inference()) != _is_inference():
            # a view of a normal tensor is a normal tensor, and no other is
            with torch.inference_mode(of_inference), torch.no_grad():
                return func(*args, **kwargs)
        written = written_values(func, args, kwargs) if facts.writes else ()
        targets = [target for target in written if type(target) is ShardedTensor]
        for target in targets:
            check_writable(target)
        while True:
            try:
                return _run(cls, func, args, kwargs, targets)
            except Changed:
                continue


_data: Any = torch.Tensor.data
_is_inference = torch.is_inference_mode_enabled


def spans_processes(value: Any) -> bool:
    """Whether a value has rows in other processes too, also as function transforms see it."""
    value = innermost(value)
    return type(value) is ShardedTensor and not (
        value.is_fully_replicated or value.is_fully_addressable
    )


def make_sharded(
    layout: Layout,
    handle: Handle,
    order: Sequence[int] | None = None,
    strides: Strides | None = None,
) -> ShardedTensor:
    """A tensor that refers to the blocks of ``handle``; ``order``: its strides, if it is not
    contiguous; ``strides``: where it would lie in the memory of another tensor.
    """
    tensor: ShardedTensor
    if strides is None:
        tensor = new_wrapper(
            ShardedTensor, layout.shape, order, None, None, layout.dtype, STRIDED, CPU
        )
    else:
        tensor = strides.tensor(ShardedTensor, layout.dtype, layout.shape)
    guard_memory(tensor)
    tensor._layout, tensor._handle = layout, handle
    return tensor


def make_all(layouts: Sequence[Layout], handles: Sequence[Handle]) -> list[ShardedTensor]:
    """``make_sharded`` for several; doing each step for all at once saves an eighth of the time."""
    make, kind, strided, cpu = new_wrapper, ShardedTensor, STRIDED, CPU
    tensors = [make(kind, x.shape, None, None, None, x.dtype, strided, cpu) for x in layouts]
    deque(map(guard_memory, tensors), maxlen=0)
    for tensor, layout, handle in zip(tensors, layouts, handles, strict=True):
        tensor._layout = layout
        tensor._handle = handle
    return tensors


def _run(cls: Any, func: Any, args: Any, kwargs: dict[str, Any], targets: list[Any]) -> Any:
    """``func``, which writes to ``targets``, on the devices or in this process."""
    if len(targets) < 2 or not share_values(targets, occurrences(cls, args, kwargs)):
        found = operation_for(cls, func, args, kwargs)
        if found is not None:
            return _on_devices(*found, func, args, kwargs)
        if func in INDEXING and type(args[0]) is cls:
            other = without_masks(func, args, args[0]._alive()[0])
            if other is not None:
                return other[0](*other[1])
    return run_on_host(cls, func, args, kwargs, targets)


def _shared(func: Any, source: ShardedTensor, memory_format: Any) -> ShardedTensor:
    """``detach``, ``alias`` and ``clone``."""
    if func is not _aten.clone.default and not is_taken_as_grad():
        return twin_of(source)
    return make_sharded(*source._alive(), strides=strides_of_copy(source, memory_format))


def _on_devices(
    operation: Operation, operands: list[Any], func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Start an operation on the workers; the results may not be computed yet."""
    written = [operands[position] for position in operation.trial.written]
    if written:
        check_overlap(func, written, operands)
    before = [x._handle for x in written or (args[:1] if func.is_view else ())]
    started = start(operation, ShardedTensor, operands)
    if written:
        write_all(written, before, [handle for _, handle in started[: len(written)]])
        made = [make_sharded(*x) for x in started[len(written) :]]
        return operation.trial.result([*written, *made])
    strides: Any = None
    if func.is_view or func is _aten.new_empty_strided.default:
        strides = strides_of_call(func, args, kwargs)
    elif facts_of(func).keeps_order:
        strides = strides_of_computed(func, args, kwargs)
    pairs = zip(started, strides or [None] * len(started), strict=True)
    results = [make_sharded(*x, strides=theirs) for x, theirs in pairs]
    if func.is_view:
        link_view(results, args[0], before[0], func, args[1:])
    return operation.trial.result(results)
