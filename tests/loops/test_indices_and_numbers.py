"""Covers: several traced numbers as indices in the body of a loop; first carries that are Python
numbers, whose dtypes are those that JAX (0.10.2) gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from _plain import same_everywhere
from _support import EAGER
from torch.utils._pytree import tree_map

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(48.0).reshape(4, 3, 4)  # a [3, 4] for each device


def last(key: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Adds up what ``x[key(i, j)]`` is in six steps."""

    def f(x: Any) -> Any:
        return tp.fori_loop(0, 3, lambda i, s: s + x[key(i, i + 1)].sum() * (i + 1), x.sum() * 0)

    return f


@pytest.mark.parametrize("mode", [EAGER, False])
def test_a_body_reads_a_view_that_was_made_before_a_write(mode: Any) -> None:
    """Rows that share a device, too: there the view is a copy, which no body may bring up to
    date.
    """

    def f(x: Any, i: Any) -> Any:
        v = x[i]
        x.add_(1.0)
        chosen = tp.cond(x.sum() > 0, lambda: v * 2, lambda: v)
        done = tp.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + v), (0, x[0]))
        return chosen, done[1], tp.scan(lambda c, row: (c + v, row * v), x[0], x)

    i = torch.tensor([1, 2])
    v = torch.stack([X[0, 1], X[1, 2]]) + 1
    first = X[:2, 0] + 1
    expected = (v * 2, first + 2 * v, (first + 3 * v, (X[:2] + 1) * v[:, None]))
    torch.testing.assert_close(
        tree_map(lambda y: y.cpu(), tp.pmap(f, compile=mode)(X[:2], i)), expected
    )
    with tp.debug.fake_pmap():
        torch.testing.assert_close(tp.pmap(f)(X[:2], i), expected)


def written(key: Callable[[Any, Any], Any], value: Any) -> Callable[[Any], Any]:
    def f(x: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            y = y.clone()
            y[key(i, i - 2)] = value
            y[key(i, i)] = y[key(i, i + 1)] * 2
            return y

        return tp.fori_loop(0, 3, body, x)

    return f


KEYS: dict[str, Callable[[Any, Any], Any]] = {
    "both": lambda i, j: (i, j),
    "with a slice": lambda i, j: (slice(None), j),
    "behind dots": lambda i, j: (..., i, j),
    "with a new dim": lambda i, j: (None, i, None, j),
    "with an int": lambda i, j: (1, j),
    "one": lambda i, j: i,
}


def in_steps(f: Callable[[Any], Any], x: torch.Tensor) -> torch.Tensor:
    """With plain torch: outside of a trace a loop is a Python loop."""
    return torch.stack([f(row) for row in x])


@pytest.mark.parametrize("name", KEYS)
def test_several_numbers_as_indices(name: str, mode: Any) -> None:
    for f in (last(KEYS[name]), written(KEYS[name], 7.0)):
        torch.testing.assert_close(tp.pmap(f, compile=mode)(X).cpu(), in_steps(f, X))
        twice = torch.cat([X, X + 1])  # two rows on each device
        torch.testing.assert_close(tp.pmap(f, compile=mode)(twice).cpu(), in_steps(f, twice))


@pytest.mark.parametrize("name", ["both", "with a new dim"])
def test_their_gradients(name: str) -> None:
    f = written(KEYS[name], 7.0)

    def loss(x: Any) -> Any:
        return (f(x) ** 2).sum()

    expected = torch.stack([torch.func.grad(loss)(row) for row in X])
    torch.testing.assert_close(tp.pmap(tp.grad(loss), compile=EAGER)(X).cpu(), expected)


def three_apart(x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        y = y.clone()
        y[i, :, 1 - i, i] = torch.tensor([1.0, 2.0])
        return y + y[i, :, i, 1 - i].sum()

    return tp.fori_loop(0, 2, body, x)


def beside_an_index_with_dims(x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        y = y.clone()
        y[i, torch.tensor([0, 1])] = 1.0
        return y

    return tp.fori_loop(0, 2, body, x)


@pytest.mark.parametrize("f", [three_apart, beside_an_index_with_dims])
def test_numbers_apart_and_beside_an_index_with_dims(f: Any) -> None:
    x = torch.arange(64.0).reshape(4, 2, 2, 2, 2)
    torch.testing.assert_close(tp.pmap(f, compile=EAGER)(x).cpu(), in_steps(f, x))


# -- Python numbers as first carry -----------------------------------------------------------------

STARTS = {
    "sum": lambda x, s: tp.scan(lambda c, x: (c + x, c), s(0.0), x),
    "product": lambda x, s: tp.scan(lambda c, x: (c * x, x), s(1.0), x),
    "an integer": lambda x, s: tp.scan(lambda c, x: (c + x, c), s(0), x),
    "fori": lambda x, s: tp.fori_loop(0, 3, lambda i, c: c + x[0], s(0.0)),
    "fori without steps": lambda x, s: tp.fori_loop(4, 1, lambda i, c: c + x[0], s(0)),
    "while": lambda x, s: tp.while_loop(lambda c: c < 3, lambda c: c + x[0], s(0.0)),
    "while without steps": lambda x, s: tp.while_loop(lambda c: c > 3, lambda c: c + x[0], s(0)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int16])
@pytest.mark.parametrize("name", STARTS)
def test_a_first_number_takes_the_dtype_of_what_it_meets(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point and name not in ("an integer", "fori without steps"):
        pytest.skip("a fraction and integers make float32")
    xs = torch.ones(3, dtype=dtype)

    def as_tensor(number: Any) -> torch.Tensor:
        return torch.tensor(number, dtype=dtype)

    same_everywhere(
        lambda _, x: STARTS[name](x, lambda number: number),
        xs,
        expected=STARTS[name](xs, as_tensor),
    )


OWN: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "meets no tensor": (
        lambda x: tp.scan(lambda c, x: (c * 0.5, None), 1.0, x.half())[0], torch.tensor(0.125)),
    "of numpy": (
        lambda x: tp.scan(lambda c, x: (c + x, None), np.float32(0), x)[0], torch.tensor(3.0)),
    "a sum of int32": (
        lambda x: tp.scan(lambda c, x: (c + x.sum(), None), 0, x.int()[:, None])[0],
        torch.tensor(3)),
    "a fraction later": (
        lambda x: tp.while_loop(lambda v: v < 3, lambda v: v + 0.5, 0), torch.tensor(3.0)),
    "a body that needs a tensor": (
        lambda x: tp.scan(lambda c, x: (torch.sin(c) * x, c.shape[:0]), 1.0, x)[0],
        torch.tensor(1.0).sin().sin().sin()),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_first_number_alone(name: str) -> None:
    program, expected = OWN[name]
    same_everywhere(lambda _, x: program(x), torch.ones(3), expected=expected)
