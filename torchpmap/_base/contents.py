"""Notices whether the contents of a tensor or an array have changed, by comparing bits.

torch counts the writes that it sees.  It does not see those through ``.data``, ``.numpy()``, DLPack
or an array that shares the memory, and tensors of inference mode count nothing.  So a copy is kept
and compared bit by bit; docs/state.md says what that costs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchpmap._base.fingerprint import as_bytes

_differ = ctypes.CDLL(None).memcmp
_differ.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_differ.restype = ctypes.c_int


class Contents:
    """What a tensor held when this was made."""

    __slots__ = ("_address", "_compares", "_copied", "_copy", "_kind", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, *, compared: bool = True) -> None:
        """``compared``: whether to find writes that torch does not count, too."""
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._address = tensor.data_ptr()
        self._kind = tensor.shape, tensor.stride(), tensor.dtype
        detached = tensor.detach()
        # keeps the memory alive, so that no other tensor gets this address
        self._copy = detached
        self._compares = compared or self._version is None
        self._copied: tuple[int, int] | None = None
        """Address and byte count of a copy with the memory layout of the tensor."""
        if self._compares:
            self._copy = _dense(detached).clone()
            if tensor.is_cpu and _dense(detached) is detached:
                self._copied = self._copy.data_ptr(), self._copy.nbytes

    def same(self) -> bool:
        """Whether the tensor still holds the same."""
        tensor = self._tensor
        address = tensor.data_ptr()
        if (
            address != self._address
            or (self._version is not None and tensor._version != self._version)
            or (tensor.shape, tensor.stride(), tensor.dtype) != self._kind
        ):
            return False
        if self._copied is not None:
            return not _differ(address, *self._copied)
        if not self._compares:
            return True
        now, copy = _dense(tensor.detach()), self._copy
        if now.is_cpu:
            return not _differ(now.data_ptr(), copy.data_ptr(), copy.nbytes)
        return torch.equal(as_bytes(now), as_bytes(copy))

    def restore(self) -> None:
        """Write the kept contents back to the tensor."""
        self._tensor.detach().copy_(self._copy)


class ReadProperty:
    """A property of a tensor besides its numbers (such as ``.grad``), as it was when read."""

    __slots__ = ("_answer", "_question")

    def __init__(self, question: Callable[[], Any], answer: Any) -> None:
        self._question = question
        self._answer = answer

    def same(self) -> bool:
        """Whether the tensor would answer the same now."""
        try:
            answer = self._question()
        except (RuntimeError, IndexError):  # the dim in question no longer exists
            return False
        if answer is None or isinstance(answer, torch.Tensor):
            return answer is self._answer
        return type(answer) is type(self._answer) and bool(answer == self._answer)


class ArrayContents:
    """What a numpy array held when this was made."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._copy = array.copy(order="K")  # for dtype object, copies the references only

    def same(self) -> bool:
        """Whether the array still holds the same."""
        array, copy = self._array, self._copy
        if (array.shape, array.dtype) != (copy.shape, copy.dtype):
            return False
        if array.strides != copy.strides:
            array, copy = np.ascontiguousarray(array), np.ascontiguousarray(copy)
        return not _differ(array.ctypes.data, copy.ctypes.data, copy.nbytes)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values side by side in memory, copied only if they are not."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return tensor if is_dense else tensor.contiguous()
