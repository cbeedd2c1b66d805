"""Covers: ``cond`` and ``switch``, and their derivatives."""

from __future__ import annotations

import pytest
import torch
from _plain import GRAPH, same_everywhere
from torch.func import grad, hessian, jvp, vmap

import torchpmap as tp

X = torch.tensor([2.0, -1.0])
W = torch.tensor([1.5, -1.5])


def piece(loops, x, w):
    return loops.cond(x.sum() > 0, lambda: (x**3).sum(), lambda: (w * x).sum())


def backward(loops, x, w):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    (piece(loops, x, w) + 0 * w.sum()).backward()
    return x.grad, w.grad


PROGRAMS = {
    "trees": lambda t, x, w: t.cond(
        x.sum() > 0, lambda x: {"a": x + 1, "b": x[0]}, lambda x: {"a": x * 2, "b": x.sum()}, x
    ),
    "other branch": lambda t, x, w: piece(t, -x, w),
    "grad": lambda t, x, w: [
        grad(lambda *a: piece(t, *a), (0, 1))(sign * x, w) for sign in (1, -1)
    ],
    "hessian": lambda t, x, w: hessian(lambda x: piece(t, x, w))(x),
    "jvp": lambda t, x, w: jvp(lambda x: piece(t, x, w), (x,), (w,)),
    "backward": backward,
    "grad in a scan": lambda t, x, w: grad(
        lambda x: t.scan(
            lambda c, r: (t.cond(c.sum() > 0, lambda: c * r, lambda: c + r), c.sum()),
            x,
            torch.stack([w, -w, w]),
        )[0].sum()
    )(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_cond(name):
    same_everywhere(PROGRAMS[name], X, W)


def test_a_batched_predicate_selects():
    def program(loops, pred, xs):
        return vmap(lambda p, x: tp.cond(p, lambda: x.sum(), lambda: x[0] * 0))(pred, xs)

    xs = torch.arange(6.0).reshape(3, 2)
    expected = torch.tensor([1.0, 0.0, 9.0])
    same_everywhere(program, torch.tensor([True, False, True]), xs, expected=expected)


def test_python_predicates():
    assert tp.cond(True, lambda: 1, lambda: 2) == 1
    assert tp.cond(0, lambda: 1, lambda: 2) == 2


def test_a_number_takes_the_dtype_of_the_other_branch():
    def program(loops, x):
        return tp.cond(x.sum() < 0, lambda: x.sum(), lambda: 3)

    same_everywhere(program, X, expected=torch.tensor(3.0))


def test_switch():
    def program(loops, x, index):
        branches = [lambda x: x, lambda x: -x, lambda x: x * 10]
        return [tp.switch(index + k, branches, x) for k in range(-2, 4)]

    expected = [X, X, X, -X, X * 10, X * 10]
    same_everywhere(program, X, torch.tensor(0), expected=expected)
    assert tp.switch(7, [lambda: 0, lambda: 1]) == 1


def test_grad_of_a_batched_switch():
    def program(loops, xs, index):
        branches = [torch.sin, lambda x: x**2, lambda x: 3 * x]
        return vmap(grad(lambda x, i: tp.switch(i, branches, x)))(xs, index)

    xs = torch.tensor([2.0, -1.0, 2.5, -0.5])
    expected = torch.stack([torch.tensor(3.0), xs[1].cos(), 2 * xs[2], torch.tensor(3.0)])
    same_everywhere(program, xs, torch.tensor([2, 0, 1, 5]), expected=expected)


MISUSE = {
    "dtypes": (
        lambda x: tp.cond(x.sum() > 0, lambda: x, lambda: x.int()),
        TypeError,
        r"output: float32\[2\] from true_fun, int32\[2\] from false_fun",
    ),
    "structures": (
        lambda x: tp.cond(x.sum() > 0, lambda: x, lambda: (x, x)),
        TypeError,
        "same structure",
    ),
    "None": (
        lambda x: tp.cond(x.sum() > 0, lambda: (x, None), lambda: (x, x)),
        TypeError,
        r"true_fun returned \(\*, None\) and false_fun returned \(\*, \*\)",
    ),
    "branches": (lambda x: tp.switch(x.int().sum(), torch.sin, x), TypeError, "a sequence of func"),
    "predicate": (lambda x: tp.cond(x > 0, lambda: x, lambda: x), TypeError, "must be a scalar"),
    "empty": (lambda x: tp.switch(0, [], x), ValueError, "empty sequence of branches"),
    "index": (lambda x: tp.switch(x[0], [torch.sin, torch.cos], x), TypeError, "an integer"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name):
    call, error, text = MISUSE[name]
    with pytest.raises(error, match=text):
        call(X)
    with pytest.raises(error, match=text):
        vmap(lambda _: call(X))(torch.arange(2))
    with pytest.raises(error, match=text):
        tp.pmap(call, in_axes=None, axis_size=1, compile=GRAPH)(X)
