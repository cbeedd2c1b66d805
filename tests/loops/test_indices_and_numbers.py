"""Covers: what bodies read of views and of first numbers.

Traced numbers as indices are in JAX's programs ``ix_...`` of ``programs/parity/loop_cases.json``.
"""

import pytest
import torch
from _plain import same_everywhere
from torch.utils._pytree import tree_map

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(48.0).reshape(4, 3, 4)  # a [3, 4] for each device


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


def test_a_first_number_becomes_a_tensor_where_the_body_needs_one():
    """The dtypes of first numbers are those of JAX: ``nu_...`` in ``parity/loop_cases.json``."""

    def program(_, x):
        return tp.scan(lambda c, _: (torch.sin(c) * x[0], c.shape[:0]), 1.0, x)

    expected = [torch.tensor(1.0).sin().sin().sin()]
    same_everywhere(program, torch.arange(1.0, 4), expected=expected)
