"""Kinds of tensors and numbers that cannot be on devices, and what to use instead of each.

A value on a device is a dense block of numbers of one dtype.  ``oddity`` says why a tensor is not
such a block, ``absence`` why it has no numbers; each ends with what to do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchpmap._base.arrays import for_torch
from torchpmap._base.errors import check_array
from torchpmap._base.torch_internals import FakeTensor, no_torch_dispatch
from torchpmap._trace.escaped import Escaped

_NUMBERS = (bool, int, float, complex)


def insist(tensor: torch.Tensor, what: str) -> None:
    """Raise unless ``tensor`` can be sent: dense, with numbers.  The error calls it ``what``."""
    if isinstance(tensor, Escaped):
        tensor.refuse(what)
    reason = oddity(tensor) or absence(tensor)
    if reason is not None:
        raise TypeError(f"{what} {reason}")


def oddity(tensor: torch.Tensor) -> str | None:
    """Why this is not one dense block; None if it is."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return (
            "is an uninitialized parameter, which has no shape yet. Call its module (a lazy one) "
            "once, on an example, before it is mapped."
        )
    if tensor.is_nested or tensor.layout is torch.jagged:
        return (
            "is a nested tensor, but only dense tensors can be put on devices. Pass "
            ".to_padded_tensor(0.0) and the lengths, or its parts (.unbind())."
        )
    if tensor.is_quantized:
        return (
            f"is quantized ({tensor.dtype}), but only plain numbers can be put on devices. Pass "
            ".dequantize(), or .int_repr() with its scale and zero point."
        )
    if tensor.layout is not torch.strided:
        return (
            f"has the layout {tensor.layout}, but only dense tensors can be put on devices. Pass "
            ".to_dense(), or its parts."
        )
    kind = type(tensor)
    own = kind.__torch_dispatch__ is not no_torch_dispatch
    if own and not kind.__module__.startswith(("torchpmap.", "torch._subclasses.")):
        return (
            f"is a {kind.__module__}.{kind.__name__}, a kind of tensor with operations of its own, "
            "which the devices do not have. Pass the plain tensors that it is made of (of a "
            "DTensor: torchpmap.from_dtensor, or .to_local())."
        )
    return None


def absence(tensor: torch.Tensor) -> str | None:
    """Why there are no numbers in it; None if there are."""
    if tensor.device.type == "meta":
        return (
            "is on the meta device, where tensors have no numbers. Pass a real tensor; to see what "
            "a call would do with such shapes, use fun.lower(...)."
        )
    if isinstance(tensor, FakeTensor):
        return (
            "is a fake tensor (torch's FakeTensorMode), which has no numbers. Pass a real one, or "
            "call the mapped function while the mode is on."
        )
    return None


def check_number(value: Any, what: str) -> None:
    """Raise ``ValueError`` for an int that no dtype holds."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(
            f"{what} is {value}, which is too large for int64, torch's largest integers. Use a "
            "float, or a static argument."
        )


def check_dtype(value: np.ndarray[Any, Any] | np.generic, what: str) -> None:
    """Raise ``TypeError`` for a numpy array of a class or dtype that torch does not have."""
    check_array(value, what)
    if value.dtype.kind not in "biufc" or value.dtype in (np.longdouble, np.clongdouble):
        raise TypeError(
            f"{what} is a numpy array of dtype {value.dtype}, which torch has no tensors of."
        )


def as_result(value: Any, path: str) -> torch.Tensor:
    """The value that a mapped function returned at ``path``, as a tensor."""
    if isinstance(value, torch.Tensor):
        reason = oddity(value) or (absence(value) if value.device.type == "meta" else None)
        if reason is not None:
            reason = reason.replace("Pass", "Return")
            raise TypeError(f"{path} {reason}")
        return value
    if isinstance(value, np.ndarray | np.generic):
        check_dtype(value, path)
        return torch.as_tensor(np.array(for_torch(value)))
    if isinstance(value, _NUMBERS):
        check_number(value, path)
        return torch.as_tensor(value)
    raise TypeError(
        f"{path} has type {type(value).__name__}, but a mapped function must return tensors, numpy "
        "arrays, numbers or None (in any pytree)."
    )
