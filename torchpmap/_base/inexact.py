"""Values that can have derivatives, and the tangents of their copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchpmap._base.torch_internals import set_forward_grad

Kind = tuple[Sequence[int], torch.dtype, torch.device]


def is_inexact(x: Any) -> bool:
    """Whether the dtype of a tensor or layout is one that can have a derivative."""
    dtype: torch.dtype = x.dtype
    return dtype.is_floating_point or dtype.is_complex


def kinds_of(tensors: Sequence[torch.Tensor]) -> list[Kind]:
    return [(x.shape, x.dtype, x.device) for x in tensors]


def filled_tangents(
    tangents: Sequence[torch.Tensor | None], kinds: Sequence[Kind]
) -> list[torch.Tensor | None]:
    """Tangents of values of these kinds; zeros for missing ones, or None for a dtype without any.

    torch (2.13) fails if only some of the outputs that can have a tangent have one.
    """
    return [_zeros(*k) if x is None else x for x, k in zip(tangents, kinds, strict=True)]


def copied_tangents(
    tangents: Sequence[torch.Tensor | None], kinds: Sequence[Kind]
) -> tuple[torch.Tensor | None, ...]:
    """The tangents of copies of values of these kinds, for ``jvp`` of an ``autograd.Function``;
    None where the dtype can have none.

    Under vmap, torch (2.13) gives 0.5 * x of a number x a tangent of float64, and fails for a value
    without a tangent.
    """
    with set_forward_grad(True):
        return tuple(
            _zeros(*kind) if x is None else x.to(kind[1], copy=True)
            for x, kind in zip(tangents, kinds, strict=True)
        )


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    return zeros if is_inexact(zeros) else None
