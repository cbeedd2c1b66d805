"""Covers: the forward rules of collectives and closures, under a derivative of the derivative.

torch turns forward mode off while a rule runs, and what it computes of tangents would be constant
for a jvp around it.  Expectations are torch's, for the function of all rows.
"""

import pytest
import torch
from _support import WAYS

import torchpmap as tp

pytestmark = [pytest.mark.usefixtures("pool"), pytest.mark.parametrize("pool", [2], indirect=True)]

X = torch.tensor([0.5, -1.0, 2.0, 1.5])
WHOLE = {tp.pmax: torch.amax, tp.pmin: torch.amin, tp.psum: torch.sum, tp.pmean: torch.mean}


@pytest.fixture(params=[2, 4], ids=["row", "lanes"])
def x(request):
    return X[: request.param]


@pytest.fixture(params=["graph", "python", "lanes"])
def mode(request):
    compile, around = WAYS[request.param]
    with around():
        yield compile


def pushed(f):
    """The derivative along ``p * p``, which itself depends on ``p``."""
    return lambda p: torch.func.jvp(f, (p,), (p * p,))[1]


def check(mapped, whole, x):
    wanted = torch.func.jacfwd(pushed(whole))(x)
    torch.testing.assert_close(torch.func.jacfwd(pushed(mapped))(x).cpu(), wanted)
    _, tangent = torch.func.jvp(pushed(mapped), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent.cpu(), wanted.sum(-1))


@pytest.mark.parametrize("op", WHOLE, ids=lambda op: op.__name__)
def test_outside(op, x, mode):
    check(tp.pmap(lambda p: p * op(p, "i"), "i", compile=mode), lambda p: p * WHOLE[op](p, 0), x)


@pytest.mark.parametrize("op", WHOLE, ids=lambda op: op.__name__)
def test_inside(op, x, mode):
    """Every row along its own direction, so that the tangent is that of the whole."""

    def row(p):
        inner = pushed(lambda q: op(q, "i"))
        return torch.func.jvp(inner, (p,), (torch.ones_like(p),))[1]

    wanted = torch.func.jvp(pushed(lambda p: WHOLE[op](p, 0)), (x,), (torch.ones_like(x),))[1]
    result = tp.pmap(row, "i", compile=mode)(x)
    torch.testing.assert_close(result.cpu(), wanted.expand(len(x)))


def test_one_value_of_equal_rows(x, mode):
    mapped = tp.pmap(lambda p: tp.psum(p**3, "i"), "i", out_axes=None, compile=mode)
    check(mapped, lambda p: (p**3).sum(), x)


class _Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2


CLOSURES = {
    "all_gather": (lambda w: tp.all_gather(w, "i"), lambda w, n: w.expand(n, n, -1)),
    "ppermute": (
        lambda w: tp.ppermute(w, "i", [(0, 0)]),
        lambda w, n: torch.stack([w, *[w * 0] * (n - 1)]),
    ),
    "no pair": (lambda w: tp.ppermute(w, "i", []), lambda w, n: w.expand(n, -1) * 0),
    "function of the user's": (_Doubled.apply, lambda w, n: 2 * w.expand(n, -1)),
}


@pytest.mark.parametrize("which", CLOSURES)
def test_closure_that_goes_into_a_function_as_it_is(which, mode):
    """... and so passes no torch function on its way."""
    use, whole = CLOSURES[which]

    def f(w):
        return tp.pmap(lambda x: use(w) * x, "i", compile=mode)(torch.ones(2))

    w = torch.tensor([2.0, 3.0])
    value, tangent = torch.func.jvp(f, (w,), (w + 1,))
    torch.testing.assert_close(value.cpu(), whole(w, 2))
    torch.testing.assert_close(tangent.cpu(), whole(w + 1, 2))
