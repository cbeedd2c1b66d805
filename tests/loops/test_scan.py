"""Covers: ``scan``, ``fori_loop`` with numbers as bounds, ``map``, and all their derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _plain import GRAPH, same_everywhere
from torch.func import grad, hessian, jacrev, jvp, vmap

import torchpmap as tp

XS = torch.tensor([2.0, -1.0, 2.5, -0.5, 3.0])
W = torch.tensor([[0.5, -0.3, 0.2], [0.1, 0.4, -0.2], [0.3, 0.2, -0.6]])
H = torch.tensor([0.3, -0.8, 0.5])
ROWS = torch.linspace(-1, 1, 12).reshape(4, 3)
BATCH = torch.linspace(-1, 1, 24).reshape(2, 4, 3)


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    same_everywhere(PROGRAMS[name], XS)


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


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name):
    same_everywhere(TRANSFORMED[name], W, H, ROWS)


def test_a_batch_reaches_a_carry_in_a_later_step():
    def program(loops, factors):
        def row(w):
            def step(c, x):
                return (c[0] + c[1], c[1] + c[2], c[2] * w), c[0]

            return loops.scan(step, tuple(torch.ones(3)), XS)

        return vmap(row)(factors)

    same_everywhere(program, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("start", "xs", "dtype"),
    [
        (0, XS, torch.float32),
        (0.0, XS.double(), torch.float64),
        (0, XS.to(torch.int32).reshape(-1, 1), torch.int64),
        (np.float32(0), XS, torch.float32),
    ],
)
def test_a_number_as_first_carry_takes_the_dtype_of_the_result(start, xs, dtype):
    def program(loops, xs):
        return tp.scan(lambda c, x: (c + x.sum(), c), start, xs)

    expected = xs.to(dtype).sum(), (xs.to(dtype).reshape(-1).cumsum(0) - xs.to(dtype).reshape(-1))
    same_everywhere(program, xs, expected=expected)


def test_scan_without_steps():
    def program(loops, xs):
        return tp.scan(lambda c, x: (c + x, c * 2), torch.ones(2), xs[:0])

    same_everywhere(program, ROWS[:, :2], expected=(torch.ones(2), torch.zeros(0, 2)))


def test_map():
    def program(loops, xs):
        return [tp.map(lambda x: {"a": x.sum(), "b": x[0]}, xs, batch_size=k) for k in (None, 2, 3)]

    one = {"a": ROWS.sum(1), "b": ROWS[:, 0]}
    same_everywhere(program, ROWS, expected=[one, one, one])


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


MISUSE = {
    "rows": (
        lambda: tp.scan(lambda c, x: (c, x[0]), XS, (XS[:3], XS[:4])),
        ValueError,
        r"different leading sizes: 3 \(xs\[0\]\), 4 \(xs\[1\]\)",
    ),
    "no length": (lambda: tp.scan(lambda c, x: (c, x), XS), ValueError, "no length"),
    "wrong length": (
        lambda: tp.scan(lambda c, x: (c, x), XS, XS, length=4),
        ValueError,
        r"length=4, but the leading dims of xs have the sizes 5 \(xs\)",
    ),
    "length, a float": (
        lambda: tp.scan(lambda c, x: (c, x), XS, length=3.0),
        TypeError,
        "length must be an integer, but got 3.0 of type float",
    ),
    "length, computed": (
        lambda: tp.scan(lambda c, x: (c, x), XS, length=XS.sum()),
        TypeError,
        "length must be a Python number, but got a tensor.* Use fori_loop or while_loop",
    ),
    "unroll, a float": (
        lambda: tp.scan(lambda c, x: (c, x), XS, XS, unroll=1.5),
        TypeError,
        "unroll must be an integer, but got 1.5",
    ),
    "no function": (lambda: tp.scan(3, XS, XS), TypeError, "f must be a function, but got 3"),
    "a tensor": (
        lambda: tp.scan(lambda c, x: c, XS, XS),
        TypeError,
        r"must return a pair .* returned a tensor of kind float32\[5\]",
    ),
    "three": (lambda: tp.scan(lambda c, x: (c, x, x), XS, XS), TypeError, "returned a tuple of 3"),
    "carry kind": (
        lambda: tp.scan(lambda c, x: ({"a": c["a"][:2]}, x), {"a": XS}, XS),
        TypeError,
        r"carry\['a'\]: float32\[5\] went in, float32\[2\] came out",
    ),
    "carry structure": (
        lambda: tp.scan(lambda c, x: ((c, c), x), XS, XS),
        TypeError,
        r"it got float32\[5\] and returned \(float32\[5\], float32\[5\]\)",
    ),
    "unroll": (lambda: tp.scan(lambda c, x: (c, x), XS, XS, unroll=0), ValueError, "unroll"),
    "bound": (lambda: tp.fori_loop(0, 1.5, lambda i, v: v, XS), TypeError, "upper must be an int"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name):
    call, error, text = MISUSE[name]
    with pytest.raises(error, match=text):
        call()
    with pytest.raises(error, match=text):
        tp.pmap(call, axis_size=1, compile=GRAPH)()


def test_a_write_to_what_was_made_outside_of_the_body():
    def program(x):
        total = x * 0
        tp.scan(lambda c, _: (c, total.add_(1)), x, None, length=3)
        return total

    with pytest.raises(RuntimeError, match="in the body of a loop or branch"):
        tp.pmap(program, compile=GRAPH)(XS[:4])
