"""Slices whose place is a tensor, with the names and rules of ``jax.lax``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.errors import kind_of
from torchpmap._base.inexact import is_inexact
from torchpmap._trace.windows import Window, with_part

Index: TypeAlias = int | torch.Tensor
"""An integer, or an integer tensor without dims."""


@boundary
def dynamic_slice(
    operand: torch.Tensor,
    start_indices: Sequence[Index] | torch.Tensor,
    slice_sizes: Sequence[int],
) -> torch.Tensor:
    """A part of a tensor, of fixed size, at a place that may depend on values.

    dynamic_slice: (operand[...], start_indices of d integers, slice_sizes) -> [*slice_sizes]

    A negative start counts from the end.  Then a start is moved, so that the part is inside: this
    never raises for a value, as ``operand.narrow`` and ``operand[start : start + size]`` do.

    Args:
        operand: a tensor of ``d`` dims.
        start_indices: for each dim an integer, or an integer tensor without dims; or one tensor of
            shape ``[d]``.
        slice_sizes: for each dim the size of the part, a Python number.

    Returns:
        A new tensor, which shares no memory with ``operand``.

    Raises:
        TypeError: a start that is no integer, or sizes that do not fit into ``operand``.
        ValueError: too few or too many starts or sizes.

    Example:
        >>> import torch, torchpmap as tp
        >>> x = torch.arange(10)
        >>> tp.dynamic_slice(x, (torch.tensor(4),), (3,)), tp.dynamic_slice(x, (9,), (3,))
        (tensor([4, 5, 6]), tensor([7, 8, 9]))

    Source: jax.lax.dynamic_slice; checked in tests/trace/test_dynamic_slices.py.
    """
    sizes = _sizes("dynamic_slice", operand, slice_sizes)
    starts = _starts("dynamic_slice", operand, start_indices)
    result = operand
    for dim, window in _windows(operand, starts, sizes):
        result = result.index_select(dim, window.positions)
    return result.clone() if result is operand else result


@boundary
def dynamic_update_slice(
    operand: torch.Tensor,
    update: torch.Tensor,
    start_indices: Sequence[Index] | torch.Tensor,
) -> torch.Tensor:
    """A tensor with another one in the place of a part.

    dynamic_update_slice: (operand[...], update of as many dims, start_indices) -> [...]

    The place is found as in ``dynamic_slice``.

    Args:
        operand: a tensor of ``d`` dims, which stays as it is.
        update: a tensor of ``d`` dims, of the same dtype, in no dim larger than ``operand``.
        start_indices: as in ``dynamic_slice``.

    Returns:
        A new tensor like ``operand``.

    Raises:
        TypeError: a start that is no integer, or an ``update`` that does not fit.
        ValueError: too few or too many starts.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.dynamic_update_slice(torch.zeros(5), torch.ones(2), (torch.tensor(-2),))
        tensor([0., 0., 0., 1., 1.])

    Source: jax.lax.dynamic_update_slice; checked in tests/trace/test_dynamic_slices.py.
    """
    _check_tensor("dynamic_update_slice", "operand", operand)
    _check_tensor("dynamic_update_slice", "update", update)
    kinds = f"update is {kind_of(update.shape, update.dtype)}, and operand "
    kinds += kind_of(operand.shape, operand.dtype)
    fits = update.dim() == operand.dim() and all(map(operator.le, update.shape, operand.shape))
    if not fits or update.dtype != operand.dtype:
        raise TypeError(
            f"dynamic_update_slice: {kinds}; update needs as many dims, none of them larger, and "
            "the same dtype."
        )
    starts = _starts("dynamic_update_slice", operand, start_indices)
    windows = _windows(operand, starts, list(update.shape))
    if not windows:  # it replaces everything
        return update.clone()
    return with_part(operand, windows, update)


@boundary
def dynamic_slice_in_dim(
    operand: torch.Tensor, start_index: Index, slice_size: int, axis: int = 0
) -> torch.Tensor:
    """``dynamic_slice`` along one dim.

    Args:
        operand: a tensor.
        start_index: an integer, or an integer tensor without dims.
        slice_size: the size of the part along ``axis``.
        axis: a dim of ``operand``.

    Returns:
        A new tensor: ``operand`` with size ``slice_size`` along ``axis``.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.dynamic_slice_in_dim(torch.arange(6).reshape(2, 3), torch.tensor(1), 2, axis=1)
        tensor([[1, 2],
                [4, 5]])

    Source: jax.lax.dynamic_slice_in_dim; checked in tests/trace/test_dynamic_slices.py.
    """
    axis = _axis("dynamic_slice_in_dim", operand, axis)
    sizes = list(operand.shape)
    sizes[axis] = slice_size
    return dynamic_slice(operand, _along(operand, axis, start_index), sizes)


@boundary
def dynamic_update_slice_in_dim(
    operand: torch.Tensor, update: torch.Tensor, start_index: Index, axis: int
) -> torch.Tensor:
    """``dynamic_update_slice`` along one dim.

    Args:
        operand: a tensor, which stays as it is.
        update: a tensor of as many dims, in no dim larger than ``operand``.
        start_index: an integer, or an integer tensor without dims.
        axis: a dim of ``operand``; ``update`` begins at 0 in the others.

    Returns:
        A new tensor like ``operand``.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.dynamic_update_slice_in_dim(torch.zeros(4), torch.ones(2), torch.tensor(1), 0)
        tensor([0., 1., 1., 0.])

    Source: jax.lax.dynamic_update_slice_in_dim; checked in tests/trace/test_dynamic_slices.py.
    """
    axis = _axis("dynamic_update_slice_in_dim", operand, axis)
    return dynamic_update_slice(operand, update, _along(operand, axis, start_index))


@boundary
def dynamic_index_in_dim(
    operand: torch.Tensor, index: Index, axis: int = 0, keepdims: bool = True
) -> torch.Tensor:
    """One element along a dim, at a place that may depend on values; see ``dynamic_slice``.

    Args:
        operand: a tensor.
        index: an integer, or an integer tensor without dims.
        axis: a dim of ``operand``.
        keepdims: whether the result has ``axis``, with size 1.

    Returns:
        A new tensor.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.dynamic_index_in_dim(torch.arange(5), torch.tensor(9), keepdims=False)
        tensor(4)

    Source: jax.lax.dynamic_index_in_dim; checked in tests/trace/test_dynamic_slices.py.
    """
    part = dynamic_slice_in_dim(operand, index, 1, axis)
    return part if keepdims else part.squeeze(axis)


def _windows(
    operand: torch.Tensor, starts: Sequence[Index], sizes: Sequence[int]
) -> list[tuple[int, Window]]:
    """(dim, window) for the dims of which the part is not all."""
    found = []
    for dim, (start, length, size) in enumerate(zip(starts, sizes, operand.shape, strict=True)):
        if length != size:
            steps = torch.arange(length, device=operand.device)
            found.append((dim, Window(_inside(start, length, size) + steps)))
    return found


def _inside(start: Index, length: int, size: int) -> Index:
    """The start as it is used."""
    if not isinstance(start, torch.Tensor):
        return min(max(start + size if start < 0 else start, 0), size - length)
    start = start.to(torch.int64)
    return torch.where(start < 0, start + size, start).clamp(0, size - length)


def _check_tensor(name: str, what: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {what} must be a tensor, but is {value!r}")


def _sizes(name: str, operand: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    _check_tensor(name, "operand", operand)
    found = [operator.index(size) for size in sizes]
    if len(found) != operand.dim():
        raise ValueError(
            f"{name}: slice_sizes must have a size for each of the {operand.dim()} dims of "
            f"operand, but has {len(found)}: {found}"
        )
    if any(not 0 <= size <= whole for size, whole in zip(found, operand.shape, strict=True)):
        raise TypeError(
            f"{name}: slice_sizes must be between 0 and the shape of operand, "
            f"{list(operand.shape)}, but are {found}"
        )
    return found


def _starts(name: str, operand: torch.Tensor, starts: Any) -> list[Index]:
    is_one = isinstance(starts, torch.Tensor)
    if is_one and starts.dim() != 1:
        raise TypeError(
            f"{name}: start_indices must be a sequence, or a tensor of shape [{operand.dim()}], "
            f"but is a tensor of shape {list(starts.shape)}"
        )
    found = list(starts.unbind() if is_one else starts)
    if len(found) != operand.dim():
        raise ValueError(
            f"{name}: start_indices must have an index for each of the {operand.dim()} dims of "
            f"operand, but has {len(found)}"
        )
    return [_start(name, k, start) for k, start in enumerate(found)]


def _start(name: str, place: int, start: Any) -> Index:
    if isinstance(start, torch.Tensor):
        is_whole = not is_inexact(start)
        if not start.dim() and is_whole and start.dtype != torch.bool:
            return start
        got = f"a tensor of kind {kind_of(start.shape, start.dtype)}"
    elif hasattr(start, "__index__") and not isinstance(start, bool):
        return operator.index(start)
    else:
        got = repr(start)
    raise TypeError(
        f"{name}: start_indices[{place}] must be an integer, or an integer tensor without dims, "
        f"but is {got}"
    )


def _axis(name: str, operand: torch.Tensor, axis: int) -> int:
    _check_tensor(name, "operand", operand)
    if not -operand.dim() <= axis < operand.dim():
        raise IndexError(f"{name}: axis is {axis}, but operand has {operand.dim()} dims")
    return axis % operand.dim()


def _along(operand: torch.Tensor, axis: int, start: Index) -> list[Index]:
    return [start if dim == axis else 0 for dim in range(operand.dim())]
