"""Covers: what ``scan``, ``while_loop``, ``fori_loop``, ``cond`` and ``switch`` refuse."""

import numpy as np
import pytest
import torch
from _everywhere import GRAPH
from torch.func import grad, vmap

import torchpmap as tp

X = torch.tensor([2.0, -1.0])
N = torch.tensor(3, dtype=torch.int32)


def same(c, x):
    return c, x


VALUE_ERRORS = {
    r"different leading sizes: 1 \(xs\[0\]\), 2 \(xs\[1\]\)":
        lambda x: tp.scan(lambda c, x: (c, x[0]), x, (x[:1], x)),
    "no length": lambda x: tp.scan(same, x),
    r"length=4, but the leading dims of xs have the sizes 2 \(xs\)":
        lambda x: tp.scan(same, x, x, length=4),
    "unroll": lambda x: tp.scan(same, x, x, unroll=0),
    "empty sequence of branches": lambda x: tp.switch(0, [], x),
}  # fmt: skip
TYPE_ERRORS = {
    "length must be an integer, but got 3.0 of type float":
        lambda x: tp.scan(same, x, length=3.0),
    "length must be a Python number, but got a tensor.* Use fori_loop or while_loop":
        lambda x: tp.scan(same, x, length=x.sum()),
    "unroll must be an integer, but got 1.5": lambda x: tp.scan(same, x, x, unroll=1.5),
    "f must be a function, but got 3": lambda x: tp.scan(3, x, x),
    r"must return a pair .* returned a tensor of kind float32\[2\]":
        lambda x: tp.scan(lambda c, x: c, x, x),
    "returned a tuple of 3": lambda x: tp.scan(lambda c, x: (c, x, x), x, x),
    r"carry\['a'\]: float32\[2\] went in, float32\[1\] came out":
        lambda x: tp.scan(lambda c, x: ({"a": c["a"][:1]}, x), {"a": x}, x),
    r"it got float32\[2\] and returned \(float32\[2\], float32\[2\]\)":
        lambda x: tp.scan(lambda c, x: ((c, c), x), x, x),
    "upper must be an int": lambda x: tp.fori_loop(0, 1.5, lambda i, v: v, x),
    "the same dtype": lambda x: tp.fori_loop(N, N.long(), lambda i, v: v, x),
    r"carry: int32\[\] went in, float32\[\] came out":
        lambda x: tp.while_loop(lambda v: v < 5, lambda v: v + 0.5, N),
    r"returned bool\[2\]": lambda x: tp.while_loop(lambda v: v > 0, lambda v: v, x),
    r"output: float32\[2\] from true_fun, int32\[2\] from false_fun":
        lambda x: tp.cond(x.sum() > 0, lambda: x, lambda: x.int()),
    "cond: got operand= beside 1 operands by position":
        lambda x: tp.cond(x.sum() > 0, torch.sin, torch.cos, x, operand=x),
    "same structure": lambda x: tp.cond(x.sum() > 0, lambda: x, lambda: (x, x)),
    r"true_fun returned \(\*, None\) and false_fun returned \(\*, \*\)":
        lambda x: tp.cond(x.sum() > 0, lambda: (x, None), lambda: (x, x)),
    "must be a scalar": lambda x: tp.cond(x > 0, lambda: x, lambda: x),
    "cond.*a real number": lambda x: tp.cond(x[0] * 1j, lambda: x, lambda: x),
    "a real number": lambda x: tp.cond(1j, lambda: x, lambda: x),
    "a sequence of func": lambda x: tp.switch(x.int().sum(), torch.sin, x),
    r"output: float32\[2\] from branch 0, float32\[\] from branch 2":
        lambda x: tp.switch(x.int().sum(), [torch.sin, torch.cos, torch.sum], x),
    r"branch 0 returned \* and branch 2 returned \(\*, \*\)":
        lambda x: tp.switch(x.int().sum(), [torch.sin, torch.cos, lambda x: (x, x)], x),
    "an integer": lambda x: tp.switch(x[0], [torch.sin, torch.cos], x),
}  # fmt: skip
MISUSE = {text: (call, ValueError, text) for text, call in VALUE_ERRORS.items()}
MISUSE |= {text: (call, TypeError, text) for text, call in TYPE_ERRORS.items()}
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
        TypeError,
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
    f"{loop}, {name}": (lambda x, run=run, body=body: run(body, x[0]), TypeError, text)
    for loop, run in LOOPS.items()
    for name, (body, text) in CARRIES.items()
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_everywhere(name):
    call, error, text = MISUSE[name]
    for run in (call, lambda x: vmap(lambda _: call(x))(torch.arange(2))):
        with pytest.raises(error, match=text):
            run(X)
    for mode in (GRAPH, False):
        with pytest.raises(error, match=text):
            tp.pmap(call, in_axes=None, axis_size=1, compile=mode)(X)


def backward(n):
    x = torch.tensor(2.0, requires_grad=True)
    tp.fori_loop(0, n, lambda i, v: v * x, x).backward()


TWO = torch.tensor(2.0)
REVERSE = {
    "grad": lambda n: grad(lambda x: tp.fori_loop(0, n, lambda i, v: v * x, x))(TWO),
    "backward": backward,
    "while": lambda n: grad(lambda x: tp.while_loop(lambda v: v < n, lambda v: v * x, x))(TWO),
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_through_loops_of_unknown_length_is_refused(name):
    for run in (REVERSE[name], tp.pmap(REVERSE[name], in_axes=None, axis_size=1, compile=GRAPH)):
        with pytest.raises(ValueError, match=r"reverse-mode differentiation .* Use scan"):
            run(N)
