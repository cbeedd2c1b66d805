"""Checks of the arguments of loops."""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchpmap._base.torch_internals import fake_mode
from torchpmap._loops.trees import category


def check_function(name: str, what: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(
            f"{name}: {what} must be a function, but got {value!r} of type {type(value).__name__}."
        )


def whole_number(name: str, what: str, value: Any) -> int:
    """An integer that Python knows."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and (fake_mode() is not None or value.dim() or category(value.dtype) != 1):
        raise TypeError(
            f"{name}: {what} must be a Python number, but got a tensor, whose value may differ "
            "between calls. Use fori_loop or while_loop for a number of steps that is computed, or "
            "the size of a dim (x.shape[0]), which is a Python number."
        )
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name}: {what} must be an integer, but got {value!r} of type {type(value).__name__}."
        )
    return operator.index(value)
