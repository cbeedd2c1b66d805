"""Covers: _trace/whole.py, _trace/indexing.py: positions that are tensors, in jitted functions."""

import pytest
import torch
import torch.nn.functional as F
from _cases import Cases, data
from torch import nn

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
