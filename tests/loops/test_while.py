"""Covers: ``while_loop``, and ``fori_loop`` with tensors as bounds."""

from __future__ import annotations

import pytest
import torch
from _plain import GRAPH, same_everywhere
from torch.func import grad, jacfwd, jvp, vmap

import torchpmap as tp

X = torch.tensor([2.0, -1.0, 2.5])
N = torch.tensor(3, dtype=torch.int32)


def newton(loops, a):
    return loops.while_loop(
        lambda s: (s[0] * s[0] - a).abs() > 1e-4,
        lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1),
        (a, torch.tensor(0)),
    )


PROGRAMS = {
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
    "jacfwd": lambda t, x: jacfwd(
        lambda x: t.while_loop(lambda v: v.sum() < 30, lambda v: v * v, x)
    )(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_while(name):
    same_everywhere(PROGRAMS[name], X)


def test_rows_that_are_done_keep_their_values():
    def program(loops, xs):
        return vmap(lambda a: newton(tp, a))(xs)

    xs = torch.tensor([10.0, 1.0, 1000.0])
    rows = [newton(tp, a) for a in xs]
    expected = tuple(map(torch.stack, zip(*rows, strict=True)))
    assert len(set(expected[1].tolist())) == 3
    same_everywhere(program, xs, expected=expected)


def test_a_number_as_first_value():
    def program(loops, x):
        return tp.while_loop(lambda v: v < 3, lambda v: v + 0.5, 0)

    same_everywhere(program, X, expected=torch.tensor(3.0))


def backward(n):
    x = torch.tensor(2.0, requires_grad=True)
    tp.fori_loop(0, n, lambda i, v: v * x, x).backward()


REVERSE = {
    "grad": lambda n: grad(lambda x: tp.fori_loop(0, n, lambda i, v: v * x, x))(torch.tensor(2.0)),
    "backward": backward,
    "while": lambda n: grad(lambda x: tp.while_loop(lambda v: v < n, lambda v: v * x, x))(
        torch.tensor(2.0)
    ),
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_raises(name):
    with pytest.raises(ValueError, match=r"reverse-mode differentiation .* Use scan"):
        REVERSE[name](N)
    with pytest.raises(ValueError, match=r"reverse-mode differentiation .* Use scan"):
        tp.pmap(REVERSE[name], in_axes=None, axis_size=1, compile=GRAPH)(N)


MISUSE = {
    "carry": (
        lambda x: tp.while_loop(lambda v: v < 5, lambda v: v + 0.5, N),
        r"carry: int32\[\] went in, float32\[\] came out",
    ),
    "test": (lambda x: tp.while_loop(lambda v: v > 0, lambda v: v, x), r"returned bool\[3\]"),
    "bounds": (lambda x: tp.fori_loop(N, N.long(), lambda i, v: v, x), "the same dtype"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name):
    call, text = MISUSE[name]
    with pytest.raises(TypeError, match=text):
        call(X)
    with pytest.raises(TypeError, match=text):
        tp.pmap(call, in_axes=None, axis_size=1, compile=GRAPH)(X)
