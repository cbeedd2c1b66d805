"""Covers: ``scan``, ``fori_loop``, ``while_loop``, ``map``, and all their derivatives."""

import numpy as np
import pytest
import torch
from _plain import GRAPH, same_everywhere
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torchpmap as tp

XS = torch.tensor([2.0, -1.0, 2.5, -0.5, 3.0])
W = torch.tensor([[0.5, -0.3, 0.2], [0.1, 0.4, -0.2], [0.3, 0.2, -0.6]])
H = torch.tensor([0.3, -0.8, 0.5])
ROWS = torch.linspace(-1, 1, 12).reshape(4, 3)


def rnn(loops, w, h, xs):
    _, hidden = loops.scan(lambda h, x: (lambda n: (n, n))(torch.tanh(w @ h + x)), h, xs)
    return (hidden**2).sum()


def backward(loops, w, h, xs):
    w, h = w.detach().clone().requires_grad_(), h.detach().clone().requires_grad_()
    loss = rnn(loops, w, h, xs)
    loss.backward()
    return loss.detach(), w.grad, h.grad


def nested(loops, w, xs):
    def outer(carry, x):
        inner, _ = loops.scan(lambda d, _: (torch.sin(w @ d + x), None), carry, None, length=2)
        return inner, inner.sum()

    return loops.scan(outer, torch.zeros(3), xs)[0].sum()


PROGRAMS = {
    "carry and outputs": lambda t, xs: t.scan(lambda c, x: (c + x, c * x), torch.tensor(1.0), xs),
    "reverse": lambda t, xs: t.scan(lambda c, x: (c * x + 1, c), torch.ones(()), xs, reverse=True),
    "no outputs": lambda t, xs: t.scan(lambda c, x: (c * x, None), torch.ones(2), xs),
    "no xs": lambda t, xs: t.scan(lambda c, _: (c * 2 + 1, c.sum()), xs, None, length=3),
    "integers beside floats": lambda t, xs: t.scan(
        lambda c, x: ((c[0] + 1, c[1] + x * c[0]), c[0] % 3),
        (torch.tensor(0, dtype=torch.int32), torch.zeros(())),
        xs,
    ),
    "constants of the body": lambda t, xs: t.scan(
        lambda c, x: (c + torch.tensor([1.0, 2.0]) * x, c), torch.zeros(2), xs
    ),
    "writes to the carry": lambda t, xs: t.scan(
        lambda c, x: (c.clone().add_(x), c * 1), torch.zeros(()), xs
    ),
    "fori_loop": lambda t, xs: t.fori_loop(2, 6, lambda i, v: v * 0.5 + i, xs),
    "fori_loop with an index": lambda t, xs: t.fori_loop(-2, 3, lambda i, v: v * xs[i] + i, xs),
    "fori_loop without steps": lambda t, xs: t.fori_loop(4, 1, lambda i, v: v + i, xs),
}


X = torch.tensor([2.0, -1.0, 2.5])
N = torch.tensor(3, dtype=torch.int32)


def newton(loops, a):
    return loops.while_loop(
        lambda s: (s[0] * s[0] - a).abs() > 1e-4,
        lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1),
        (a, torch.tensor(0)),
    )


WHILE = {
    "values": lambda t, x: newton(t, x[0]),
    "in a scan": lambda t, x: t.scan(
        lambda c, r: (lambda y: (y, y))(t.while_loop(lambda v: v > 1, lambda v: v / 2, c + r)),
        torch.zeros(()),
        x,
    ),
    "dynamic bounds": lambda t, x: t.fori_loop(0, N, lambda i, v: v * 2 + i, x),
    "jvp": lambda t, x: jvp(lambda a: newton(t, a)[0], (x[0],), (x[1],)),
    "jvp of jvp": lambda t, x: jvp(
        lambda a: jvp(lambda a: newton(t, a)[0], (a,), (a * 0 + 1,))[1], (x.sum(),), (x.mean(),)
    ),
    "jacfwd beside carries without tangents": lambda t, x: jacfwd(
        lambda x: t.while_loop(
            lambda s: s[1] < 5, lambda s: (s[0].sin(), s[1] + 1, s[2] * 2), (x, N * 0.0, N)
        )
    )(x),
    "jacfwd": lambda t, x: jacfwd(
        lambda x: t.while_loop(lambda v: v.sum() < 30, lambda v: v * v, x)
    )(x),
}


TRANSFORMED = {
    "grad": lambda t, w, h, xs: grad(lambda *a: rnn(t, *a), (0, 1, 2))(w, h, xs),
    "jvp": lambda t, w, h, xs: jvp(lambda h: rnn(t, w, h, xs), (h,), (h + 1,)),
    "jvp of jvp": lambda t, w, h, xs: jvp(
        lambda h: jvp(lambda h: rnn(t, w, h, xs), (h,), (h * 0 + 1,))[1], (h,), (h + 1,)
    ),
    "hessian": lambda t, w, h, xs: hessian(lambda h: rnn(t, w, h, xs))(h),
    "reverse over reverse": lambda t, w, h, xs: jacrev(jacrev(lambda w: rnn(t, w, h, xs)))(w),
    "backward": backward,
    "vmap of grad": lambda t, w, h, xs: vmap(grad(lambda *a: rnn(t, *a)), (None, None, 0))(
        w, h, torch.stack([xs, xs * 2])
    ),
    "grad of vmap": lambda t, w, h, xs: grad(
        lambda w: vmap(lambda xs: rnn(t, w, h, xs))(torch.stack([xs, xs * 2])).sum()
    )(w),
    "grad of a scan in a scan": lambda t, w, h, xs: grad(lambda w: nested(t, w, xs))(w),
}


def batch_that_reaches_a_carry_in_a_later_step(loops, factors):
    def row(w):
        def step(c, x):
            return (c[0] + c[1], c[1] + c[2], c[2] * w), c[0]

        return loops.scan(step, tuple(torch.ones(3)), XS)

    return vmap(row)(factors)


CASES = {f"scan: {name}": (program, XS) for name, program in PROGRAMS.items()}
CASES |= {f"scan: {name}": (program, W, H, ROWS) for name, program in TRANSFORMED.items()}
CASES |= {f"while: {name}": (program, X) for name, program in WHILE.items()}
CASES["scan: a batch"] = batch_that_reaches_a_carry_in_a_later_step, torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long("scan: reverse over reverse", "while: jvp of jvp")
def test_values_are_those_of_plain_python(name):
    program, *inputs = CASES[name]
    same_everywhere(program, *inputs)


def test_scan_without_steps():
    def program(loops, xs):
        return tp.scan(lambda c, x: (c + x, c * 2), torch.ones(2), xs[:0])

    same_everywhere(program, ROWS[:, :2], expected=(torch.ones(2), torch.zeros(0, 2)))


def test_map():
    def program(loops, xs):
        return [tp.map(lambda x: {"a": x.sum(), "b": x[0]}, xs, batch_size=k) for k in (None, 2, 3)]

    one = {"a": ROWS.sum(1), "b": ROWS[:, 0]}
    same_everywhere(program, ROWS, expected=[one, one, one])


def test_rows_that_are_done_keep_their_values():
    def program(loops, xs):
        return vmap(lambda a: newton(tp, a))(xs)

    xs = torch.tensor([10.0, 1.0, 1000.0])
    rows = [newton(tp, a) for a in xs]
    expected = tuple(map(torch.stack, zip(*rows, strict=True)))
    assert len(set(expected[1].tolist())) == 3
    same_everywhere(program, xs, expected=expected)


@pytest.mark.parametrize("zero", [np.bool_(False), np.array(False), False])
def test_conditions_of_numpy_and_python(zero):
    same_everywhere(lambda t, x: tp.while_loop(lambda v: zero, lambda v: v + 1, x), X, expected=X)


def test_unroll_puts_the_steps_into_the_graph():
    def nodes(unroll):
        def program(xs):
            return tp.scan(lambda c, x: (c * x, None), torch.ones(()), xs, unroll=unroll)[0]

        lowered = tp.pmap(program, compile=GRAPH).lower(XS[None])
        return [str(node.target) for node in lowered.graph.graph.nodes]

    assert "scan" in nodes(1)
    assert "scan" not in nodes(True)


def test_the_graph_does_not_grow_with_the_length():
    def nodes(length):
        def program(x):
            return tp.scan(lambda c, _: (torch.sin(c), c), x, None, length=length)

        return len(tp.pmap(program, compile=GRAPH).lower(torch.ones(1)).graph.graph.nodes)

    assert nodes(10) == nodes(1000)
