"""Covers: _loops/surroundings.py: derivatives of loops in loops, with steps that are put together.

Other transforms, and what bodies close over, are in JAX's programs ``tr_...`` of
``programs/parity/loop_cases.json``.
"""

import functools

import pytest
import torch
from _everywhere import GRAPH, check
from torch.func import grad, hessian, jacfwd

import torchpmap as tp

X = torch.tensor([0.75, -0.25])


def scan_in_scan(x):
    def inner(d, _):
        return d * 0.75 + x.sin() * 0.25, None

    return tp.scan(lambda c, _: (tp.scan(inner, c, length=100)[0], None), x, length=3)[0]


def scan_in_branch(x):
    def step(c, t):
        halved = lambda c: tp.scan(lambda d, _: (d * 0.75, d), c, length=12)[0] + t  # noqa: E731
        return tp.cond(c.sum() > 0, halved, torch.cos, c), c

    return tp.scan(step, x, torch.arange(3.0))[1].sum(0)


def three_deep(x):
    def middle(c, _):
        return tp.scan(lambda d, t: (d * 0.75 + t, None), c, torch.linspace(0, 1, 8))[0], None

    def outer(c, _):
        return tp.switch(
            c.sum().int(), [torch.sin, lambda c: tp.scan(middle, c, length=2)[0]], c
        ), c

    return tp.scan(outer, x, length=2)[1].sum(0)


def backward(f):
    def run(x):
        x = x.detach().clone().requires_grad_()
        (f(x) ** 2).sum().backward()
        return x.grad

    return run


OUTSIDE = {
    "backward": backward,
    "grad": lambda f: grad(lambda x: (f(x) ** 2).sum()),
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: (f(x) ** 2).sum()),
}


FROM_OUTSIDE = [(scan_in_scan, how) for how in OUTSIDE]
FROM_OUTSIDE += [(f, how) for f in (scan_in_branch, three_deep) for how in ("backward", "jacfwd")]


@pytest.mark.long
@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(("f", "how"), FROM_OUTSIDE)
def test_derivatives_from_outside(f, how):
    rows = torch.stack([X, -X])
    # steps are put together for this back end, as for Inductor
    mapped = tp.pmap(f, compile={"backend": "aot_eager"})
    each = lambda x: torch.stack([f(row) for row in x])  # noqa: E731
    check(OUTSIDE[how](mapped)(rows), OUTSIDE[how](each)(rows))


SOLVED = torch.tensor([[3.0, 1.0], [0.5, 2.0]])
GRADIENTS_BY_MODE = {
    "solve": lambda c, x: torch.linalg.solve(SOLVED + torch.outer(c, x), x),
    "det": lambda c, x: torch.linalg.det(SOLVED + torch.outer(c, x)) * c / 8,
    "silu": lambda c, x: torch.nn.functional.silu(c * x),
}
"""Their gradient is another formula where it has a derivative itself."""


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("step", GRADIENTS_BY_MODE.values(), ids=GRADIENTS_BY_MODE)
def test_second_derivatives_of_steps(step, outside, pool):
    def looped(x):
        return tp.fori_loop(0, 2, lambda _, c: tp.cond(c[0] > -9, step, torch.sub, c, x), x.cos())

    def rolled_out(x):
        return step(step(x.cos(), x), x)

    def second(f):
        return lambda x: torch.func.jvp(grad(lambda x: f(x).sin().sum()), (x,), (x.cos(),))[1]

    rows = torch.stack([X, -X])
    mapped = functools.partial(tp.pmap, compile=GRAPH)
    f = second(mapped(looped)) if outside else mapped(second(looped))
    check(f(rows), torch.stack([second(rolled_out)(x) for x in rows]))


def test_a_branch_returns_a_part_of_what_it_has_received(mode):
    """Several values are reduced as one; torch wants results of branches in memory of their own."""
    which = torch.tensor(3)

    def f(x):
        largest = lambda y: tp.pmax((y, y), "i")[1]  # noqa: E731
        y = tp.cond(which % 2 == 0, torch.sin, largest, x * 2)
        return y, tp.fori_loop(0, 2, lambda i, c: c + i, x)

    got = tp.pmap(f, "i", compile=mode)(torch.stack([X, -X]))
    largest = 2 * torch.maximum(X, -X)
    check(got, (torch.stack([largest, largest]), torch.stack([X, -X]) + 1))
