"""Covers: _trace/transform_rules.py: torch.cond in mapped functions, also under vmap."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def choose(condition, x):
    return torch.cond(condition, lambda x: x * 10, lambda x: -x, (x,))


@pytest.mark.parametrize("rows", [4, 8])
def test_closures_stay_fresh(rows):
    shift = torch.tensor(1.0)
    x = torch.arange(float(rows))
    f = tp.pmap(
        lambda x: torch.cond(x > 1, lambda x: x + shift, lambda x: x - shift, (x,)), compile=EAGER
    )
    assert f(x).tolist() == torch.where(x > 1, x + 1, x - 1).tolist()
    shift.fill_(5.0)
    assert f(x).tolist() == torch.where(x > 1, x + 5, x - 5).tolist()


ROWS = torch.arange(8.0)
INNER = torch.arange(16.0).reshape(8, 2) - 5

NESTED = {
    "rows decide": (
        lambda row, x: choose(row > 1, x), torch.where(ROWS > 1, 10 * INNER.T, -INNER.T)),
    "the inner decides": (
        lambda row, x: choose(x > 0, row), torch.where(INNER.T > 0, 10 * ROWS, -ROWS)),
    "both": (
        lambda row, x: choose(x > row, x), torch.where(INNER.T > ROWS, 10 * INNER.T, -INNER.T)),
    "neither": (lambda row, x: choose(torch.tensor(2) > 1, x + row), 10 * (INNER.T + ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("case", NESTED)
def test_vmap_inside(case, mode):
    f, expected = NESTED[case]
    mapped = tp.pmap(lambda row, x: torch.func.vmap(lambda x: f(row, x))(x), compile=mode)
    assert mapped(ROWS, INNER).tolist() == expected.T.tolist()
