"""Covers: _loops/without_values.py: where kinds are needed and no step is, nothing happens; what
bodies read of views and of first numbers.
"""

from contextlib import nullcontext

import pytest
import torch
from _everywhere import GRAPH, printed, same_everywhere
from torch.utils._pytree import tree_map

import torchpmap as tp

ONE = torch.ones(1)
X = torch.arange(24.0).reshape(2, 3, 4)  # a [3, 4] for each device


def say(text, value):
    tp.debug.print(text)
    return value


PRINTS = {
    "a number as carry": (lambda x: tp.scan(lambda c, _: (say("ran", c + x), c), 0, length=3), 3),
    "while": (lambda x: tp.while_loop(lambda c: c < 3, lambda c: say("ran", c + x), 0.0), 3),
    "one step": (lambda x: tp.scan(lambda c, _: (say("ran", c + x), c), 0, length=1), 1),
    "in the graph": (
        lambda x: tp.scan(lambda c, _: (say("ran", c + x), c), 0, length=3, unroll=True),
        3,
    ),
    "no steps": (lambda x: tp.scan(lambda c, _: (say("ran", c), c), x, length=0)[0], 0),
    "other branch": (lambda x: tp.cond(x > 0, lambda: x, lambda: say("ran", x)), 0),
}


@pytest.mark.parametrize("name", PRINTS)
def test_as_many_prints_as_steps(name, capfd):
    program, count = PRINTS[name]
    program(torch.tensor(1.0))
    assert capfd.readouterr().out.splitlines() == ["ran"] * count
    for mode in (GRAPH, False):
        tp.block_until_ready(tp.pmap(program, "i", compile=mode)(ONE))
        tp.block_until_ready(tp.pmap(lambda x: say("end", x), "i", compile=False)(ONE))
        found = printed(capfd, lambda lines: "[i=0] end" in lines)
        assert found == ["[i=0] ran"] * count + ["[i=0] end"]


def test_as_many_random_numbers_as_in_python():
    torch.manual_seed(0)
    expected = torch.rand(()) + torch.rand(())
    torch.manual_seed(0)
    assert tp.scan(lambda c, _: (c + torch.rand(()), None), 0.0, length=2)[0] == expected


def test_the_other_branch_writes_nothing():
    y = torch.ones(3)
    for branches in ([torch.square, lambda x: x.add_(y.sum())], [torch.square, lambda x: y.sum()]):
        with pytest.raises(TypeError) if branches[1](y * 1).dim() == 0 else nullcontext():
            assert tp.switch(torch.tensor(0), branches, y).tolist() == [1.0] * 3
    assert y.tolist() == [1.0] * 3


def test_a_first_step_that_needs_values():
    def step(c, x):
        return c + (x if x.item() > 1 else 0 * x), None

    assert tp.scan(step, 0.0, torch.arange(4.0))[0] == 5


def test_a_gradient_in_the_body_goes_to_no_parameter():
    w = torch.ones(2, requires_grad=True)

    def step(c, _):
        (w * w).sum().backward()
        return c + 1.0, None

    assert tp.scan(step, 0.0, length=2)[0] == 2
    assert type(w.grad) is torch.Tensor


@pytest.mark.usefixtures("pool")
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
    first = X[:, 0] + 1
    expected = (v * 2, first + 2 * v, (first + 3 * v, (X + 1) * v[:, None]))
    torch.testing.assert_close(
        tree_map(lambda y: y.cpu(), tp.pmap(f, compile=mode)(X, i)), expected
    )
    with tp.debug.fake_pmap():
        torch.testing.assert_close(tp.pmap(f)(X, i), expected)


def test_a_first_number_becomes_a_tensor_where_the_body_needs_one():
    """The dtypes of first numbers are those of JAX: ``nu_...`` in ``parity/loop_cases.json``."""

    def program(x):
        return tp.scan(lambda c, _: (torch.sin(c) * x[0], c.shape[:0]), 1.0, x)

    expected = [torch.tensor(1.0).sin().sin().sin()]
    same_everywhere(program, torch.arange(1.0, 4), expected=expected)
