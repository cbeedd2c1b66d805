"""Covers: random: every function against the numbers that jax draws, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchpmap as tp
from torchpmap import random

CASES = json.loads((Path(__file__).parent / "random_cases.json").read_text())["cases"]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
BITS[torch.float64] = torch.int64

# Programs of these are as jax's but for rounding; all others are equal, bit by bit.
ULPS = {"normal": 4, "exponential": 2, "laplace": 2}
ABSOLUTE = {"gumbel": 5e-7, "logistic": 5e-7, "truncated_normal": 1e-6}


def namespace() -> dict[str, Any]:
    """What the programs may name: as in tests/parity/generate_random.py."""
    names = {name: getattr(random, name) for name in random.__all__}
    widths = (
        "uint8 uint16 uint32 uint64 int8 int16 int32 int64",
        "float16 float32 float64 bfloat16",
    )
    names |= {name: getattr(torch, name) for name in " ".join(widths).split()}
    return names | {"array": lambda x, dtype: torch.tensor(x, dtype=dtype), "vmap": tp.vmap}


def stored(case: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, case["dtype"])
    if not dtype.is_floating_point:
        return torch.tensor(np.array(case["data"], case["dtype"]).reshape(case["shape"]))
    unsigned = np.array(case["data"], f"uint{8 * dtype.itemsize}")
    return (
        torch.tensor(unsigned.view(f"int{8 * dtype.itemsize}")).view(dtype).reshape(case["shape"])
    )


def ordinal(x: torch.Tensor) -> torch.Tensor:
    """Consecutive integers for consecutive floating-point numbers."""
    pattern = x.view(BITS[x.dtype]).to(torch.int64)
    smallest = -(2 ** (8 * x.dtype.itemsize - 1))
    return torch.where(pattern < 0, smallest - pattern, pattern)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same numbers; torch has int64 where jax has int32 for positions and uint32 for keys."""
    assert actual.shape == expected.shape
    if expected.is_floating_point():
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    else:
        assert actual.tolist() == expected.tolist()


def assert_close_to_jax(program: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    name = next((name for name in (*ULPS, *ABSOLUTE) if f"{name}(" in program), None)
    if expected.dtype == torch.float64 and "-3.7" in program:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-15)
    elif name is None:
        assert_equal(actual, expected)
    elif expected.dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=2e-12, atol=0)
    elif name in ULPS:
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        apart = (ordinal(actual) - ordinal(expected)).abs()
        assert (apart <= ULPS[name]).all(), (apart, actual, expected)
    else:
        widened = torch.finfo(expected.dtype).eps / torch.finfo(torch.float32).eps
        tolerance = ABSOLUTE[name] * widened
        torch.testing.assert_close(actual, expected, rtol=4e-7 * widened, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["program"][:70])
def test_numbers_are_those_of_jax(case):
    actual = eval(case["program"], namespace())
    assert_close_to_jax(case["program"], actual, stored(case))
