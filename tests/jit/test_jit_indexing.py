"""Covers: _trace/whole.py, _trace/indexing.py: positions that are tensors, in jitted functions;
rows of a cut dim in compiled code.
"""

import pytest
import torch
import torch.nn.functional as F
from _cases import Cases, data
from _models import LINE
from torch import nn

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

CASES = Cases()
AT = torch.tensor(3)


@CASES.add(1)
def parts(on):
    def f(x, at):
        return (
            *(x[at], x[:, at], x[at - 5], x[at : at + 2], x.narrow(1, at, 2), x.select(0, at)),
            *(x[at, [0, 1]], x[[0, 1], at], x[None, at, 2:4], x[at, ..., None], x[at][at]),
            *(torch.tensor([at, at + 1]), F.one_hot(at, 9)),
        )

    return on.jit(f)(on.put(data()), AT)


@CASES.add(1)
def writes(on):
    cache = on.put(data(1))

    def f(x, at):
        cache[at] = x[0]
        cache[:, at].add_(1)
        cache[:, at : at + 2] *= 2
        return cache.sum()

    step = on.jit(f)
    return [step(on.put(data()), AT), step(on.put(data()), AT - 1), cache]


@CASES.add(1)
def views(on):
    def f(x, at):
        row, part = x[at], x[at : at + 2]
        before = part.clone()
        x.add_(1)
        part[0] = 7
        return row, part, before, x.sum()

    x = on.put(data())
    return [*on.jit(f)(x, AT), x]


@CASES.add(1)
def rows(on):
    cache = on.put(data(1))

    def f(x):
        first = x[0]
        first.add_(1)
        x[-1, 3].fill_(2)
        x[1] += first
        cache[2].copy_(x[1])
        for k, row in enumerate(cache):
            row.mul_(k)
        cache.add_(1)
        return first, cache[2], x.sum()

    x = on.put(data())
    return [*on.jit(f)(x), x, cache]


@CASES.add(1)
def gradients(on):
    weight = nn.Parameter(on.put(data(1)))

    def f(x, at):
        weight.grad = None
        (weight[at] * x[at] + (weight[:, at] ** 2).sum()).sum().backward()
        weight.grad[at] *= 2
        rows = torch.func.vmap(lambda row, k: row[k])(x, at + torch.arange(8) - 3)
        return rows, torch.func.jacrev(lambda x: x[at] ** 2)(x)

    return [*on.jit(f)(on.put(data()), AT), weight.grad]


test_as_in_plain_torch = CASES.tests()


@pytest.mark.inductor
def test_compiled_rows_of_a_cut_dim():
    def f(x, half, mask, places):
        rows = x.select(0, 11), half[5:7] * 1, mask[30:, 2], places[1::30]
        return (rows[0].sin() * x[20:22]).sum(), *rows

    x, half = data(0, 32, 4), data(1, 32, 4, dtype=torch.float16)
    values = [x, half, half > 0, half.view(torch.uint16)]
    mesh = tp.make_mesh(*LINE)
    there = [tp.device_put(value, tp.NamedSharding(mesh, P("x"))) for value in values]
    there[0].requires_grad_()
    results = tp.jit(f)(*there)
    results[0].backward()
    expected = f(x.requires_grad_(), *values[1:])
    expected[0].backward()
    for got, right in zip((*results, there[0].grad), (*expected, x.grad), strict=True):
        torch.testing.assert_close(got.detach().cpu(), right.detach())
    assert there[0].grad.sharding == there[0].sharding


@pytest.mark.inductor
def test_compiled_writes_to_rows_of_a_cut_dim():
    def f(x, part):
        y = x.sin()
        y[5:20:3] = part
        y[-1] = part[0] ** 2
        return y, (y * x).sum()

    x, part = data(0, 32, 4).requires_grad_(), data(1, 5, 4).requires_grad_()
    mesh = tp.make_mesh(*LINE)
    there = [
        tp.device_put(value.detach(), tp.NamedSharding(mesh, spec)).requires_grad_()
        for value, spec in ((x, P("x")), (part, P()))
    ]
    jitted = tp.jit(f)
    assert not jitted.lower(*(value.detach() for value in there)).resharded
    results, expected = jitted(*there), f(x, part)
    for total in (results[1], expected[1]):
        total.backward()
    given = [*results, *(value.grad for value in there)]
    for got, right in zip(given, (*expected, x.grad, part.grad), strict=True):
        torch.testing.assert_close(got.detach().cpu(), right.detach())
    assert results[0].sharding == there[0].sharding
