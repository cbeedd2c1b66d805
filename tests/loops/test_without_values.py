"""Covers: _loops/without_values.py: where kinds are needed and no step is, nothing happens."""

from contextlib import nullcontext

import pytest
import torch
from _plain import GRAPH, printed

import torchpmap as tp

ONE = torch.ones(1)


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
