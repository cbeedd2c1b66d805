"""Where the elements of a ShardedTensor would lie in memory, if it had memory in this process.

torch makes decisions by strides, storage offset and storage size.  For example, in the derivative
of a write to a view, ``torch.func`` finds the written part of the gradient by ``as_strided``.  So
a view reports what it would report if it had memory:

    x = [4, 3] contiguous     x.narrow(1, 1, 1): strides (3, 1), offset 1, storage of 12 elements
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from torchpmap._base.torch_internals import below_dispatch, new_wrapper
from torchpmap._sharded.arguments import CHANNELS_LAST
from torchpmap._sharded.memory import CPU, STRIDED
from torchpmap._sharded.unforeseen import name_of
from torchpmap._sharded.views import is_linked, linked, view_of

_aten = torch.ops.aten
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Strides(NamedTuple):
    """Where the elements of a tensor lie."""

    strides: tuple[int, ...]
    offset: int
    num_bytes: int
    """The size of the whole storage."""

    def tensor(self, kind: type, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """A tensor of class ``kind`` that lies there, without memory."""
        given = self.strides, self.offset, None, dtype, STRIDED, CPU
        return new_wrapper(kind, shape, *given, storage_size=self.num_bytes)


def strides_of(tensor: torch.Tensor) -> Strides:
    """Where the elements of ``tensor`` lie."""
    storage = torch.Tensor.untyped_storage(tensor)  # a ShardedTensor's own method raises
    return Strides(tensor.stride(), int(tensor.storage_offset()), storage.nbytes())


def strides_of_call(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = _NOTHING
) -> list[Strides]:
    """Where the results of ``func(*args, **kwargs)`` lie.

    Raises what torch raises where the strides of a tensor do not allow such a view of it.
    """
    key: tuple[tuple[str, Any], ...] = ()
    for name, x in kwargs.items():
        if name not in ("device", "pin_memory"):
            key += ((name, _hashable(x)),)
    return _strides_of_call(func, _hashable(args), key)


def strides_of_computed(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Strides] | None:
    """Where the new tensors ``func(*args, **kwargs)`` lie, for a ``func`` that keeps the order of
    dims; None: they are contiguous.

    torch's elementwise operations keep the order of dims in memory: ``x.T * 2`` is transposed, too.
    Whether a later ``reshape`` is a view or a copy depends on it.
    """
    if func is not _aten.rot90.default and not (
        kwargs and kwargs.get("memory_format") in CHANNELS_LAST
    ):
        for operand in args:
            if isinstance(operand, torch.Tensor) and not operand.is_contiguous():
                break
        else:
            return None
    return strides_of_call(func, args, kwargs)


def strides_of_copy(tensor: Any, memory_format: Any = None) -> Strides | None:
    """Where ``tensor.clone()`` lies; None: it is contiguous."""
    options = {} if memory_format is None else {"memory_format": memory_format}
    found = strides_of_computed(_aten.clone.default, (tensor,), options)
    return found[0] if found else None


class _Like(NamedTuple):
    """Stands for a tensor in a cache key."""

    dtype: torch.dtype
    shape: torch.Size
    own: Strides


def _hashable(value: Any) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, torch.Tensor):
        return _Like(value.dtype, value.shape, strides_of(value))
    return value


def _unhashed(value: Any) -> Any:
    if isinstance(value, _Like):
        return _meta(*value)
    return list(map(_unhashed, value)) if type(value) is tuple else value


@lru_cache(2048)
def _strides_of_call(
    func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> list[Strides]:
    operands = list(map(_unhashed, args))
    results = func(*operands, **{name: _unhashed(x) for name, x in kwargs})
    results = (results,) if isinstance(results, torch.Tensor) else results
    if func in _FORGETFUL:
        results = [_in_format_of(operands[0], x) for x in results]
    return [strides_of(x) for x in results if x is not None]


_FORGETFUL = frozenset(
    getattr(_aten, name).default
    for name in (
        *("pixel_shuffle", "reflection_pad2d", "reflection_pad3d"),
        *("replication_pad2d", "replication_pad3d"),
    )
)
"""Operations that keep channels last, but not of meta tensors (torch 2.11 to 2.15)."""


def _in_format_of(operand: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(operand.dim())
    if wanted is None or not operand.is_contiguous(memory_format=wanted):
        return result
    return result.contiguous(memory_format=wanted)


def _meta(dtype: torch.dtype, shape: torch.Size, own: Strides) -> torch.Tensor:
    """A tensor without values that lies where a ShardedTensor would."""
    memory = torch.empty(own.num_bytes, dtype=torch.uint8, device="meta").untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device="meta")
    return tensor.set_(memory, own.offset, shape, own.strides)


def in_whole_memory(
    tensor: Any, size: Any, strides: Any, offset: int | None = None
) -> tuple[Any, ...]:
    """Equivalent arguments of ``as_strided`` for a contiguous tensor of the whole memory."""
    own = tensor.storage_offset()
    return whole_memory(tensor), size, strides, own if offset is None else offset


def whole_memory(tensor: Any) -> Any:
    """A contiguous tensor of all elements of the memory that ``tensor`` lies in."""
    view = view_of(tensor)
    if view is not None:
        whole = whole_memory(view.parent)
        read = _READINGS.get(view.func)
        return whole if read is None else read(whole, *view.args)
    if not tensor.is_contiguous():
        steps = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -steps[dim]))
    if not tensor.is_contiguous() or tensor.storage_offset():
        raise RuntimeError(
            "as_strided() of a view of a ShardedTensor that has been deleted; use the tensor "
            "before it is deleted, or .clone() the view."
        )
    return tensor


_READINGS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten._conj.default: _aten._conj.default,
    _aten._neg_view.default: _aten._neg_view.default,
    _aten.view.dtype: lambda whole, dtype: whole.view(-1).view(dtype),
    _aten.view_as_complex.default: lambda whole: torch.view_as_complex(whole.view(-1, 2)),
    _aten.view_as_real.default: torch.view_as_real,
}
"""Views whose elements are not those of their parent; the whole memory is read by the same view."""


_READING_FIRST = ("fill_", "index_fill_", "masked_fill_", "masked_scatter_")


def check_overlap(func: Any, targets: Sequence[Any], operands: Sequence[Any]) -> None:
    """Raise torch's error for a write to a part of the memory of an operand, or to all of it in
    another order of dims.  It is torch's rule, which asks only about tensors without gaps.
    """
    for target in targets:
        if not is_linked(target) or name_of(func) in _READING_FIRST:
            continue
        others = linked(target)[1:]
        if any(x is other and _overlap_partly(target, x) for x in operands for other in others):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to "
                "tensor refer to a single memory location. Please clone() the tensor before "
                "performing the operation."
            )


def _overlap_partly(*pair: torch.Tensor) -> bool:
    places = [strides_of(x) for x in pair]
    starts = [own.offset * x.itemsize for x, own in zip(pair, places, strict=True)]
    ends = [start + x.nbytes for x, start in zip(pair, starts, strict=True)]
    if max(starts) >= min(ends) or (places[0] == places[1] and ends[0] == ends[1]):
        return False
    alike = [_meta(x.dtype, x.shape, own) for x, own in zip(pair, places, strict=True)]
    return all(map(_aten.is_non_overlapping_and_dense.default, alike))


# -- questions of torch about memory ---------------------------------------------------------------


def _zeros_in_place_of(
    tensor: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Zeros that lie as ``other`` lies, for a tangent; batch dims of ``tensor`` come first."""
    strides, offset, num_bytes = strides_of(other)
    size = num_bytes // other.element_size()
    front = tensor.shape[:self_num_batch_dims]
    if other.is_contiguous() and size == other.numel():
        return tensor.new_zeros([*front, *other.shape])
    whole = tensor.new_zeros([*front, size])
    return whole.as_strided([*front, *other.shape], [*whole.stride()[:-1], *strides], offset)


QUESTIONS: dict[Any, Callable[..., Any]] = {
    _aten._has_same_storage_numel.default: lambda tensor, other: (
        strides_of(tensor).num_bytes == strides_of(other).num_bytes
    ),
    _aten._new_zeros_with_same_feature_meta.default: _zeros_in_place_of,
    _aten.is_same_size.default: lambda tensor, other: tensor.shape == other.shape,
    # no device holds nested tensors: ``nn.TransformerEncoder`` makes them only after a yes
    _aten._nested_tensor_from_mask_left_aligned.default: lambda tensor, mask: False,
}
"""Operations that need no values."""

# -- in-place operations that change the shape -----------------------------------------------------

_TURNING = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}
"""In-place operation -> the operation that gives its value."""

RESHAPING = frozenset([*_TURNING, *(getattr(_aten.set_, x) for x in _aten.set_.overloads())])
_MEMORY_OF_ANOTHER = (
    "set_() makes a tensor use the memory of another, but a ShardedTensor has no memory in this "
    "process. Share the value of another ShardedTensor by x.data = y, or copy it: x.copy_(y)."
)


def turn(func: Any, args: Sequence[Any]) -> Any:
    """Run an in-place operation that changes the shape, such as ``transpose_``."""
    if func not in _TURNING:
        raise RuntimeError(_MEMORY_OF_ANOTHER)
    target, *args = args
    if is_linked(target):
        raise RuntimeError(
            f"{func} would change the shape of a ShardedTensor that shares its values with views "
            "or detached tensors; use the out-of-place operation."
        )
    result = _TURNING[func](target._made(*target._alive()), *args)
    with below_dispatch():
        func(target, *args)
    target._layout, target._handle = result._alive()
    return target
