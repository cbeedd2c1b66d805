"""Covers: _trace/vmapped_functions.py: the rules that torch makes for rows of a function."""

import pytest
import torch
from torch.testing import assert_close as close

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

ROWS = "rows"


class Collected(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return tp.psum(x, ROWS) * number()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 3 * tp.psum(g * number(), ROWS)  # 3, to be recognised

    @staticmethod
    def jvp(ctx, t):
        return 3 * tp.psum(t, ROWS) * number()


class CollectedWithin(Collected):
    forward = staticmethod(lambda x: tp.psum(x, (ROWS, "inner")) * number())
    backward = staticmethod(lambda ctx, g: 3 * tp.psum(g * number(), (ROWS, "inner")))
    jvp = staticmethod(lambda ctx, t: 3 * tp.psum(t, (ROWS, "inner")) * number())


def number():
    return 1 + tp.axis_index(ROWS) + tp.axis_index("inner")


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("function", [Collected, CollectedWithin])
def test_collectives_in_their_rules(count, function, mode):
    mapped = tp.pmap(tp.vmap(function.apply, axis_name="inner"), ROWS, compile=mode)
    numbers = 1 + torch.arange(count)[:, None] + torch.arange(3)

    def whole(x):
        return x.sum(0 if function is Collected else (0, 1)) * numbers

    def slope(f):
        return torch.func.grad(lambda x: (f(x) ** 2 / numbers).sum())

    def called(x):
        return mapped(x).cpu()

    x = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)
    close(called(x), whole(x))
    (called(x) ** 2 / numbers).sum().backward()
    close(x.grad, 3 * slope(whole)(x))
    close(torch.func.jvp(called, (x,), (x,))[1], 3 * whole(x))
    twice = torch.func.grad(lambda x, f: slope(f)(x).pow(3).sum())
    close(twice(x, called), 81 * twice(x, whole))


class SummedForward(torch.autograd.Function):
    """Each device's cotangent is its own: in JAX 0.10.2 a ``custom_vjp`` of ``psum`` with the
    identity as its backward gives [1, 2, ...] for the gradient below, also from outside of pmap.
    """

    generate_vmap_rule = True
    forward = staticmethod(lambda x: tp.psum(x, ROWS))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g.clone())


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("count", [4, 8])
def test_rows_have_cotangents_as_devices_do(count, inner, mode):
    def f(x, weight):
        if inner:
            return tp.vmap(SummedForward.apply)(x[None]).sum() * weight
        return SummedForward.apply(x).sum() * weight

    weights = 1 + torch.arange(count, dtype=torch.float64)
    x = torch.randn(count, 3, dtype=torch.float64)
    mapped = tp.pmap(f, ROWS, compile=mode)
    found = torch.func.grad(lambda x: mapped(x, weights).sum())(x)
    close(found, weights[:, None].expand(count, 3))
    close(tp.pmap(tp.grad(f), ROWS, compile=mode)(x, weights).cpu(), found)
