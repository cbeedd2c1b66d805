"""Covers: ``while_loop``, and ``fori_loop`` with tensors as bounds."""

from __future__ import annotations

import numpy as np
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


CONDITIONS = {
    "float": (lambda v: v + 1.0, r"returned float32\[\]\. Write a comparison"),
    "int": (lambda v: v.int(), r"returned int32\[\]"),
    "shape (1,)": (lambda v: (v > 0)[None], r"returned bool\[1\]"),
    "number": (lambda v: 1, "returned 1"),
    "0.0": (lambda v: 0.0, r"returned 0\.0"),
    "numpy": (lambda v: np.int64(0), "returned "),
    "numpy array": (lambda v: np.zeros(2, bool), r"returned bool\[2\]"),
    "None": (lambda v: None, "returned None"),
    "tuple": (lambda v: (True,), r"returned \(True,\)"),
}
MISUSE |= {
    f"a condition: {name}": (
        lambda x, test=test: tp.while_loop(test, lambda v: v - 1, x[0]),
        "cond_fun must return a boolean scalar .* but " + text,
    )
    for name, (test, text) in CONDITIONS.items()
}
CARRIES = {
    "dtype": (lambda v: v.int(), r"float32\[\] went in, int32\[\] came out"),
    "shape": (lambda v: v[None], r"float32\[\] went in, float32\[1\] came out"),
    "structure": (lambda v: (v,), r"it got float32\[\] and returned \(float32\[\],\)"),
    "None": (lambda v: None, r"it got float32\[\] and returned None"),
    "number": (lambda v: 1j, r"float32\[\] went in, complex64\[\] came out"),
}
LOOPS = {
    "while_loop": lambda body, x: tp.while_loop(lambda v: True, body, x),
    "while_loop without steps": lambda body, x: tp.while_loop(lambda v: False, body, x),
    "fori_loop": lambda body, x: tp.fori_loop(0, 2, lambda _, v: body(v), x),
    "fori_loop without steps": lambda body, x: tp.fori_loop(4, 1, lambda _, v: body(v), x),
    "scan of one step": lambda body, x: tp.scan(lambda v, _: (body(v), None), x, length=1),
    "scan without steps": lambda body, x: tp.scan(lambda v, _: (body(v), None), x, length=0),
}
MISUSE |= {
    f"{loop}, {name}": (lambda x, run=run, body=body: run(body, x[0]), text)
    for loop, run in LOOPS.items()
    for name, (body, text) in CARRIES.items()
}


@pytest.mark.parametrize("zero", [np.bool_(False), np.array(False), False])
def test_conditions_of_numpy_and_python(zero):
    same_everywhere(lambda t, x: tp.while_loop(lambda v: zero, lambda v: v + 1, x), X, expected=X)


def test_a_number_takes_a_dtype_without_steps_too():
    def program(loops, x):
        return (
            tp.fori_loop(4, 1, lambda i, v: v + x[0], 0),
            tp.while_loop(lambda v: v > 3, lambda v: v + x[0], 0),
        )

    same_everywhere(program, X.half(), expected=(torch.zeros((), dtype=torch.float16),) * 2)


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name):
    call, text = MISUSE[name]
    with pytest.raises(TypeError, match=text):
        call(X)
    for mode in (GRAPH, False):
        with pytest.raises(TypeError, match=text):
            tp.pmap(call, in_axes=None, axis_size=1, compile=mode)(X)
