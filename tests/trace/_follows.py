"""Whether a mapped function sees the outside as it is now."""

from __future__ import annotations

import torch

ONES = torch.ones(4)


def check_follows(f, change, expected):
    """Call, change the outside, call: the result is always that of the present."""
    assert f(ONES).flatten().tolist() == [1.0] * 4
    for value in expected:
        change(value)
        for _ in range(2):
            assert f(ONES).flatten().tolist() == [value] * 4
