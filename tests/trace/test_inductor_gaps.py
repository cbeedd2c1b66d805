"""Covers: _trace/inductor_gaps.py: what Inductor would get wrong, without an error.

What is right is what the same operations give in plain torch, one by one.
"""

import itertools

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
    "index_put": lambda z, v: z.index_put((PLACES[:, 0, 0],), v[0]),
    "index_put of a sum": lambda z, v: z.index_put((PLACES[:, 0, 0],), v[0], accumulate=True),
    "put": lambda z, v: z.put(PLACES[0], v[0]),
    "scatter": lambda z, v: z.scatter(1, PLACES, v),
    "scatter_add": lambda z, v: z.scatter_add(1, PLACES, v),
    "select_scatter": lambda z, v: z.select_scatter(v[:, 0], 1, 3),
    "slice_scatter": lambda z, v: z.slice_scatter(v, 1, 3, 4),
    "diagonal_scatter": lambda z, v: z.diagonal_scatter(v[:, 0], 0, 0, 1),
}
IS_OLD = torch.__version__ < "2.13"
if not IS_OLD:  # torch.compile cannot either
    WRITES["index_fill"] = lambda z, v: z.index_fill(1, AT, 2)


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
    later.split(2)[1].mul_(2)
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


PICKED = {
    "argmax": lambda y: y.argmax(),
    "argmin, kept dims": lambda y: y.argmin(keepdim=True),
    "of a transposed copy": lambda y: y.t().contiguous().argmax(),
    "of a transposed sum": lambda y: (y.t() + 0.5).argmin(),
    "of sums of rows": lambda y: y.view(7, -1, 37).sum(1).t().argmax(),
}
DIVISORS = torch.tensor([0.1, 3, -0.7, torch.inf, -torch.inf, 0, torch.nan, 1e-3])
DIVIDENDS = torch.tensor([1, -1, 5.5, 0, 1e20, torch.inf, 0.3, 2.0**31])
BYTES = torch.tensor([5, 1, 100, 3, 7, 8, 9, 13, 100, 120, 127, 2, 6, 4, 11, 12, 90, 80])


def numbers(x):
    yield from (pick(x.sin()) for pick in PICKED.values())
    for dtype in torch.float32, torch.float64, torch.bfloat16:
        a, b = (each.to(dtype)[:, None, None] for each in (DIVIDENDS, DIVISORS))
        a, b = torch.broadcast_tensors(a + 0 * x[0, 0].to(dtype), b.transpose(0, 1))
        a, b = (
            a.squeeze(2).repeat(1, 4),
            b.squeeze(2).repeat(1, 4),
        )  # so many that there are vectors
        yield from (a % b, a // b, a % 3, a // -0.7, 7 % b, (a * 10).int().clamp(-99, 99) % 0.3)
    for y in (x[:8, 0] * 9).bfloat16(), (x[:8, 0] * 9).half():
        yield from (y // 0.1, y // torch.tensor(0.1))
    a = torch.tensor([1, -1, 0, -0.0]) * x[0, 0].abs()
    yield from (1 / (a // -3), 1 / (a // 7))  # the sign of 0
    for dtype in torch.uint8, torch.int8:
        for y in BYTES.to(dtype) + x[0, 0].to(dtype) * 0, -BYTES.to(dtype) + x[0, 0].to(dtype) * 0:
            yield from (y.min(), y.max(), y.argmin(), y.argmax(), *y.aminmax())
            yield from (*y.repeat(3, 1).min(1), *y.repeat(18, 1).t().max(0), y.amax((0,), True))
    yield from ((x[:8, 0] + DIVISORS) * 0, 0 * (x[:8, 0] + DIVISORS).cfloat())
    yield from ((x > 0).max(), (x > 9).amin(0), (x * 9).short().abs().amin(), x.short().argmax(0))


def test_numbers_are_those_of_plain_torch():
    rows = torch.randn(2, 21, 37, generator=torch.Generator().manual_seed(1))
    results = tp.pmap(lambda x: list(numbers(x)), axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, numbers(row), strict=True):
            torch.testing.assert_close(mine[k].cpu(), right, equal_nan=True)


PLACES_5 = (torch.arange(21 * 37) * 7 % 5).reshape(21, 37)
EXTREMES = {
    "amax": lambda y: y.amax(1),
    "amin": lambda y: y.amin(0),
    "norm": lambda y: torch.linalg.vector_norm(y, torch.inf, 1),
    "scattered": lambda y: y[:5].scatter_reduce(0, PLACES_5, y, "amax", include_self=False),
}
COMPUTED = {
    "affine": lambda x: x * 1.125 + 0.375,
    "product": lambda x: x * x.flip(0) * 1.125,
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
}
EXACT = ("affine", "product")


def slopes(x):
    for dtype in torch.float32, torch.bfloat16:
        names = EXACT if dtype == torch.bfloat16 else COMPUTED
        for name, extreme in itertools.product(names, EXTREMES.values()):
            loss = lambda x: extreme(COMPUTED[name](x)).float().sum()  # noqa: B023, E731
            yield grad(loss)(x.to(dtype))
        yield (x.to(dtype) * 1.125).argmax(1)
        yield (x.to(dtype) * 1.125).max(0).indices
    for computed in COMPUTED["atan2"], lambda x: x.erf() * x:
        yield grad(lambda x: computed(x).amax(1).sum())(x[:3, :5])  # noqa: B023
        twice = lambda x: computed(x) % 0.1  # noqa: B023, E731
        for y in x, x[:3, :5]:
            yield (computed(y) == computed(y).amax(1, True)).float()
            yield (twice(y) == twice(y).amax(1, True)).float()
    yield x - x.bfloat16().float()
    yield (x * 3).half().double() - (x * 3).double()


def test_what_is_compared_is_the_same_number_in_every_loop():
    rows = torch.randn(2, 21, 37, generator=torch.Generator().manual_seed(1))
    results = tp.pmap(lambda x: list(slopes(x)), axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, slopes(row), strict=True):
            tolerances = {"rtol": 0.02, "atol": 0.02} if right.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(mine[k].cpu(), right, **tolerances)


def test_numbers_of_few_bits_are_rounded_before_more_bits_decide():
    def decided(x):
        number = torch.tensor(1.3)
        for y in x.bfloat16(), x.half():
            beside = y * 1.3, y / 1.3, 1.3 / y, y + 1.3, 1.3 - y, y * number, number / y, y - number
            yield from (z.frac() for z in beside)
            yield from ((y * 3.3).double().floor(), y * 1.3 > y.flip(0), (y * 257).argmax(1))

    rows = torch.randn(2, 21, 37, generator=torch.Generator().manual_seed(1)) * 9
    results = tp.pmap(lambda x: list(decided(x)), axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, decided(row), strict=True):
            assert torch.equal(mine[k].cpu(), right)


def parts(x):
    """Of branches and bodies, which return them."""
    yes, low = x[0, 0] > 0, x[:2]
    yield tp.cond(yes, lambda: (x @ x)[1], lambda: (x @ x.T)[1]) * 2
    yield tp.cond(yes, lambda: (x @ x)[1], lambda: (x @ x.T)[2])
    all_yes = tp.pmin(x[0, 0], "i") > 0
    yield tp.cond(all_yes, lambda: tp.psum(x, "i")[1:3], lambda: tp.psum(x * 3, "i")[1:3]) * 2
    inner = lambda: tp.cond(x[1, 1] > 0, lambda: (x @ x)[3], lambda: (x * 2)[:, 3])  # noqa: E731
    yield tp.cond(yes, inner, lambda: x.sort(0).values[1]) * 3
    index = (x[0, 0] * 10).long().abs() % 3
    yield tp.switch(index, [lambda: (x @ x)[1], lambda: x.sort(0).values[1], lambda: (x + 1)[2]])
    double = lambda k, y: (torch.cat([y, y * 2]) @ x)[2:]  # noqa: E731
    yield tp.fori_loop(0, 3, double, low) * 2


def parts_in_plain_torch(x, rows):
    yes, low = x[0, 0] > 0, x[:2]
    yield ((x @ x)[1] if yes else (x @ x.T)[1]) * 2
    yield (x @ x)[1] if yes else (x @ x.T)[2]
    yield rows.sum(0)[1:3] * (2 if (rows[:, 0, 0] > 0).all() else 6)
    yield (((x @ x)[3] if x[1, 1] > 0 else (x * 2)[:, 3]) if yes else x.sort(0).values[1]) * 3
    index = (x[0, 0] * 10).long().abs() % 3
    yield [(x @ x)[1], x.sort(0).values[1], (x + 1)[2]][index]
    for _ in range(3):
        low = low * 2 @ x
    yield low * 2


def test_branches_and_bodies_return_parts():
    rows = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = tp.pmap(lambda x: list(parts(x)), axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, parts_in_plain_torch(row, rows), strict=True):
            torch.testing.assert_close(mine[k].cpu(), right)


def turned(x):
    """What branches read that lies in memory in another order than its elements."""
    branches = lambda y: y[[1, 0, 2]] * 2, lambda y: y[:3] + 1
    columns = x.reshape(4, 9).t()
    for y in columns * 2, (columns * 2)[1:], columns[1:], x.as_strided((5, 5), (1, 6)) * 3:
        yield tp.cond(x[0, 0] > 0, *branches, y)
        step = lambda c, y: (c + tp.cond(c > 0, *branches, y * 2 + c).sum(), c)  # noqa: E731
        yield tp.scan(step, x[0, 0], torch.stack([y, y * 3]))[1]


def test_branches_read_what_was_given_to_them():
    rows = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = tp.pmap(lambda x: list(turned(x)), axis_name="i", fullgraph=True)(rows)
    for k, row in enumerate(rows):
        for mine, right in zip(results, turned(row), strict=True):
            torch.testing.assert_close(mine[k].cpu(), right)
