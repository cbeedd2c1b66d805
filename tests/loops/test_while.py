"""Covers: ``while_loop``, and ``fori_loop`` with tensors as bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _plain import same_everywhere
from torch.func import jacfwd, jvp, vmap

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
    "jacfwd beside carries without tangents": lambda t, x: jacfwd(
        lambda x: t.while_loop(
            lambda s: s[1] < 5, lambda s: (s[0].sin(), s[1] + 1, s[2] * 2), (x, N * 0.0, N)
        )
    )(x),
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


@pytest.mark.parametrize("zero", [np.bool_(False), np.array(False), False])
def test_conditions_of_numpy_and_python(zero):
    same_everywhere(lambda t, x: tp.while_loop(lambda v: zero, lambda v: v + 1, x), X, expected=X)
