"""Numpy's arrays and scalars in the form that torch takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def for_torch(value: Any) -> Any:
    """An array that ``torch.tensor`` takes, of the same values; anything else as it is.

    torch knows one of numpy's two unsigned types of 64 bits, no scalar of it above 2**63, no
    other order of bytes than the machine's, and no negative strides.
    """
    if not isinstance(value, np.ndarray | np.generic):
        return value
    kind = value.dtype.newbyteorder("=")
    if kind.kind in "iu":
        kind = np.dtype(f"{kind.kind}{kind.itemsize}")
    made = np.asarray(value, kind)
    return made.copy() if min(made.strides, default=0) < 0 else made


class HostArray(np.ndarray[Any, Any]):
    """A numpy array that torch takes where it asks for a tensor.

    ``module.load_state_dict`` refuses what has no ``__torch_function__``.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_as_tensors(args), **_as_tensors(kwargs or {}))

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


def _as_tensors(value: Any) -> Any:
    if isinstance(value, HostArray):
        return torch.from_numpy(value.view(np.ndarray))
    if isinstance(value, list | tuple):
        return type(value)(map(_as_tensors, value))
    if isinstance(value, dict):
        return {name: _as_tensors(x) for name, x in value.items()}
    return value
