"""Covers: _trace/inductor_gaps.py: what Inductor must not write, or read, too early.

What is right is what the same operations give in plain torch, one by one.
"""

import pytest
import torch
from torch.func import grad, jacrev, vmap

import torchpmap as tp

pytestmark = [pytest.mark.usefixtures("pool"), pytest.mark.inductor, pytest.mark.always]

AT = torch.tensor([3])
PLACES = torch.full((8, 1, 8), 3)
NEXT = (torch.arange(8) + 1) % 8

BASES = {
    "zeros": lambda x: torch.zeros_like(x).expand(8, 8, 8),
    "argument": lambda x: x.expand(8, 8, 8),
    "computed": lambda x: (x * 2).expand(8, 8, 8),
    "cut in": lambda x: (x * 2).unsqueeze(1).expand(8, 8, 8),
    "with a sum that is dropped": lambda x: (x * 2).expand(8, 8, 8) + torch.zeros(8, 8, 8).to(x),
    "number": lambda x: x.new_full((1,), 3).expand(8, 8, 8),
}
WRITES = {
    "index_add": lambda z, v: z.index_add(1, AT, v),
    "index_copy": lambda z, v: z.index_copy(1, AT, v),
    "index_fill": lambda z, v: z.index_fill(1, AT, 2),
    "index_put": lambda z, v: z.index_put((PLACES[:, 0, 0],), v[0]),
    "index_put of a sum": lambda z, v: z.index_put((PLACES[:, 0, 0],), v[0], accumulate=True),
    "put": lambda z, v: z.put(PLACES[0], v[0]),
    "scatter": lambda z, v: z.scatter(1, PLACES, v),
    "scatter_add": lambda z, v: z.scatter_add(1, PLACES, v),
    "select_scatter": lambda z, v: z.select_scatter(v[:, 0], 1, 3),
    "slice_scatter": lambda z, v: z.slice_scatter(v, 1, 3, 4),
    "diagonal_scatter": lambda z, v: z.diagonal_scatter(v[:, 0], 0, 0, 1),
}


def to_itself(y):
    y = y.cumsum(0)
    own = y @ y.T
    yield y.index_copy(0, NEXT, y)
    yield own.index_add(0, NEXT, own)
    yield y.slice_scatter(y[:4], 0, 2, 6)
    places = torch.argsort(y[:, 0])
    yield places.index_put((places,), places)
    later = y + 1
    later[1:] = later[:-1].clone()
    yield later
    later = y.sort(0).values
    later[NEXT] = later.clone()
    yield later
    later = y.cumsum(1)
    first, second = later.split(4)
    yield later.index_put((NEXT[:4],), second).index_put((NEXT[4:],), first, accumulate=True)


def derivatives(y):
    weights = torch.tensor([1.0, -1.0], dtype=y.dtype)
    f = lambda row: (row.index_select(0, torch.tensor([0, 2])) * weights).sum()  # noqa: E731
    yield vmap(grad(f))(y)
    yield jacrev(lambda x: x.index_select(0, AT) ** 2)(y)
    yield jacrev(lambda x: x[NEXT[:2]] ** 2)(y)


def all_of(x):
    """Every case, in one graph."""
    v = (x[None] - 1).transpose(0, 1)
    found = [write(base(x), v) for base in BASES.values() for write in WRITES.values()]
    return (*found, *to_itself(x), *derivatives(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # put under vmap
@pytest.mark.parametrize("size", [4, 8])
def test_a_write_leaves_what_is_read_alone(size):
    rows = torch.randn(size, 8, 8, dtype=torch.float64)
    results = tp.pmap(all_of, axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, all_of(row), strict=True):
            torch.testing.assert_close(mine[k].cpu(), right, rtol=1e-12, atol=1e-12)


INDEX = torch.randint(0, 6, (6, 6), generator=torch.Generator().manual_seed(1))


def gathered(x):
    y = x.gather(0, INDEX)
    return (x.sin() + 2 * (x * 2).sin() + 3 * y.sin()).sum()


def moved(x):
    y, other = x.clone(), x * 2
    y[:, :-1] = y[:, 1:].clone() * 1.5
    return (y.sin() + 2 * other.sin()).sum()


def test_a_loop_reads_what_a_scatter_has_written():
    both = lambda x: (grad(gathered)(x), grad(moved)(x))  # noqa: E731
    rows = torch.randn(4, 6, 6, dtype=torch.float64)
    results = tp.pmap(both, axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, both(row), strict=True):
            torch.testing.assert_close(mine[k].cpu(), right, rtol=1e-12, atol=1e-12)


def test_operands_of_a_sum_over_devices_stay_as_they_are():
    def masks(x):
        largest = tp.pmax((x, x * 2), "i")
        mine = (x == largest[0]).float(), (x * 2 == largest[1]).float()
        count = tp.psum(mine, "i")
        joined = torch.cat(mine)
        written = joined.index_add(0, torch.tensor([1, 7]), x[:2])
        return mine[0] / count[0], mine[1] / count[1], written, mine[0] * 2

    rows = torch.randn(4, 5)
    first, second, written, twice = tp.pmap(masks, axis_name="i", fullgraph=True)(rows)
    mask = (rows == rows.amax(0)).float()
    for mine, right in (first, mask), (second, mask), (twice, mask * 2):
        assert torch.equal(mine.cpu(), right)
    right = torch.cat([mask, mask], 1)
    right[:, [1, 7]] += rows[:, :2]
    assert torch.equal(written.cpu(), right)
