"""Covers: traced numbers as indices in a body, and as first carries."""

import pytest
import torch
from _plain import same_everywhere
from _support import EAGER
from torch.utils._pytree import tree_map

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(48.0).reshape(4, 3, 4)  # a [3, 4] for each device


def last(key):
    """Adds up what ``x[key(i, j)]`` is in six steps."""

    def f(x):
        return tp.fori_loop(0, 3, lambda i, s: s + x[key(i, i + 1)].sum() * (i + 1), x.sum() * 0)

    return f


def test_a_body_reads_a_view_that_was_made_before_a_write(mode):
    """Rows that share a device, too: there the view is a copy, which no body may bring up to
    date.
    """

    def f(x, i):
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


def written(key, value):
    def f(x):
        def body(i, y):
            y = y.clone()
            y[key(i, i - 2)] = value
            y[key(i, i)] = y[key(i, i + 1)] * 2
            return y

        return tp.fori_loop(0, 3, body, x)

    return f


KEYS = {
    "both": lambda i, j: (i, j),
    "with a slice": lambda i, j: (slice(None), j),
    "behind dots": lambda i, j: (..., i, j),
    "with a new dim": lambda i, j: (None, i, None, j),
    "with an int": lambda i, j: (1, j),
    "one": lambda i, j: i,
}


def in_steps(f, x):
    """With plain torch: outside of a trace a loop is a Python loop."""
    return torch.stack([f(row) for row in x])


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.long("graph-both")
def test_several_numbers_as_indices(name, mode):
    for f in (last(KEYS[name]), written(KEYS[name], 7.0)):
        torch.testing.assert_close(tp.pmap(f, compile=mode)(X).cpu(), in_steps(f, X))
        twice = torch.cat([X, X + 1])  # two rows on each device
        torch.testing.assert_close(tp.pmap(f, compile=mode)(twice).cpu(), in_steps(f, twice))


@pytest.mark.parametrize("name", ["both", "with a new dim"])
def test_their_gradients(name):
    f = written(KEYS[name], 7.0)

    def loss(x):
        return (f(x) ** 2).sum()

    expected = torch.stack([torch.func.grad(loss)(row) for row in X])
    torch.testing.assert_close(tp.pmap(tp.grad(loss), compile=EAGER)(X).cpu(), expected)


def three_apart(i, y):
    y[i, :, 1 - i, i] = torch.tensor([1.0, 2.0])
    return y + y[i, :, i, 1 - i].sum()


def beside_an_index_with_dims(i, y):
    y[i, torch.tensor([0, 1])] = 1.0
    return y


@pytest.mark.parametrize(
    ("body", "x"),
    [(three_apart, torch.arange(64.0).reshape(4, 2, 2, 2, 2)), (beside_an_index_with_dims, X)],
)
def test_numbers_apart_and_beside_an_index_with_dims(body, x):
    def f(x):
        return tp.fori_loop(0, 2, lambda i, y: body(i, y.clone()), x)

    torch.testing.assert_close(tp.pmap(f, compile=EAGER)(x).cpu(), in_steps(f, x))


def test_a_first_number_becomes_a_tensor_where_the_body_needs_one():
    """The dtypes of first numbers are those of JAX: ``nu_...`` in ``parity/loop_cases.json``."""

    def program(_, x):
        return tp.scan(lambda c, _: (torch.sin(c) * x[0], c.shape[:0]), 1.0, x)

    expected = [torch.tensor(1.0).sin().sin().sin()]
    same_everywhere(program, torch.arange(1.0, 4), expected=expected)
