"""Whether the results of a program are right.

The tolerance is measured: the reference runs again with rounding errors added to every value that
it computes, and what the results may differ by is a multiple of what they move by.  A program whose
results move by much is not judged; it is another program's turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from _fuzz_models import HALVES
from _fuzz_programs import Program
from _fuzz_reference import run

NOISES = (1, 2, 3)


@dataclass(frozen=True)
class Expected:
    """A result and how far from it one may be."""

    value: torch.Tensor
    tolerance: float


def expectation(program: Program) -> list[Expected] | None:
    """What a program gives; None if a rounding error changes it much, or it is invalid."""
    try:
        clean = run(program)
        noisy = [run(program, noise) for noise in NOISES]
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, NotImplementedError):
        return None
    found = [_expected(value, others) for value, *others in zip(clean, *noisy, strict=True)]
    known = [expected for expected in found if expected is not None]
    return known if len(known) == len(found) and found else None


def _expected(value: torch.Tensor, others: Sequence[torch.Tensor]) -> Expected | None:
    if any(other.shape != value.shape or other.dtype != value.dtype for other in others):
        return None
    if not (value.is_floating_point() or value.is_complex()):
        return Expected(value, 0.0) if all(torch.equal(value, o) for o in others) else None
    if not value.numel():
        return Expected(value, 0.0)
    if not all(_is_finite_alike(value, other) for other in others):
        return None
    wide = _finite(value)
    moved = max(float((_finite(other) - wide).abs().max()) for other in others)
    size, eps = float(wide.abs().max()), torch.finfo(value.dtype).eps
    if value.dtype in HALVES:  # a few errors of a half are all of it
        tolerance, limit = 8 * moved + 4 * eps * size, 0.3 * size
    else:
        tolerance, limit = 32 * moved + 8 * eps * size, 1e-2 * size
    return Expected(value, tolerance + 1e-300) if tolerance <= limit else None


def _finite(value: torch.Tensor) -> torch.Tensor:
    """In the widest dtype, with zeros for what is not finite."""
    wide = value.to(torch.complex128)
    return torch.where(wide.isfinite(), wide, 0)


def _is_finite_alike(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether infinities and NaN are the same."""
    if value.is_complex():
        return _is_finite_alike(torch.view_as_real(value), torch.view_as_real(other))
    special, same = ~value.isfinite(), value.eq(other) | (value.isnan() & other.isnan())
    return torch.equal(special, ~other.isfinite()) and bool(same[special].all())


def verdict(got: Sequence[torch.Tensor], expected: Sequence[Expected]) -> str:
    """What is wrong with the results; empty if nothing is."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for k, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        if value.dtype != wanted.value.dtype:
            return f"result {k} has dtype {value.dtype} instead of {wanted.value.dtype}"
        if value.shape != wanted.value.shape:
            return f"result {k} has shape {tuple(value.shape)}, not {tuple(wanted.value.shape)}"
        if not value.numel() or torch.equal(value, wanted.value):
            continue
        text = f"\ngot {value}\ninstead of {wanted.value}"
        if not _is_finite_alike(value, wanted.value):
            return f"result {k} is not finite where it should be, or the other way round:{text}"
        distance = float((_finite(value) - _finite(wanted.value)).abs().max())
        if distance > wanted.tolerance:
            return f"result {k} differs by {distance:.3g}, more than {wanted.tolerance:.3g}:{text}"
    return ""
