"""Covers: ``cond`` and ``switch``.

Values and derivatives are those of JAX's programs in ``programs/parity/loop_cases.json``.
"""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from _everywhere import GRAPH, same_everywhere
from _support import WAYS
from torch.func import vmap

import torchpmap as tp

X = torch.tensor([2.0, -1.0])


def test_numbers_take_the_dtype_of_a_tensor_in_another_branch():
    def program(x, index):
        branches = [lambda: 1, lambda: 2.5, lambda: x.sum(), lambda: True]
        number = tp.cond(x.sum() < 0, lambda: x.sum(), lambda: 3)
        return [number, *(tp.switch(index + k, branches) for k in range(4))]

    expected = list(torch.tensor([3.0, 1.0, 2.5, 1.0, 1.0]))
    same_everywhere(program, X, torch.tensor(0), expected=expected)


def test_the_only_operand_by_its_name():
    """It may be None, as programs of JAX write a branch without operands."""

    def program(x, index):
        halves = tp.cond(x.sum() > 0, lambda v: v[0] / 2, lambda v: v[1], operand=(x, -x))
        other = tp.cond(True, lambda _: x, lambda _: -x, operand=None)
        none = tp.switch(index, [lambda _: x, lambda _: -x], operand=None)
        return halves, other, none

    same_everywhere(program, X, torch.tensor(1), expected=(X / 2, X, -X))


def test_a_switch_is_traced_once_for_each_branch():
    runs = []

    def branch(k):
        return lambda x: (runs.append(k), x * k)[1]

    def program(x):
        return tp.switch(x.int(), [branch(k) for k in range(32)], x)

    assert tp.pmap(program, compile=GRAPH)(torch.tensor([5.0, 40.0])).tolist() == [25.0, 1240.0]
    assert len(runs) <= 2 * 32


def test_a_branch_under_vmap_runs_once():
    runs = []

    def branch():
        runs.append(1)
        return torch.ones(())

    def program(p):
        return vmap(lambda q: tp.cond(q, branch, lambda: torch.zeros(())))(p)

    tp.pmap(program, compile=GRAPH)(torch.ones(2, 2, dtype=torch.bool))
    assert len(runs) == 2  # to find its closures, and into the graph


def test_branches_are_not_taken_for_others():
    """Neither by their code nor by what they did before."""
    x = torch.arange(4.0)
    pairs = [[torch.neg, torch.square], [torch.neg, torch.sum], [torch.neg, torch.square]]
    for other in (pairs[1][1], lambda x: x.int(), functools.partial(torch.sum, dim=0)):
        tp.switch(torch.tensor(0), pairs[0], x)
        with pytest.raises(TypeError, match="branch 1"):
            tp.switch(torch.tensor(0), [torch.neg, other], x)
    for kind in (torch.float32, torch.int32):
        change = functools.partial(torch.Tensor.to, dtype=kind)
        with pytest.raises(TypeError) if kind == torch.int32 else contextlib.nullcontext():
            tp.cond(x.sum() > 0, torch.neg, lambda x, change=change: change(x), x)


def test_branches_are_not_kept():
    class Big(torch.nn.Module):
        def forward(self, x):
            return x * 2

    big = Big()
    reference = weakref.ref(big)
    tp.cond(torch.tensor(True), big, torch.neg, X)
    del big
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("way", WAYS)
def test_one_row_takes_one_way(way):
    compile, around = WAYS[way]

    def f(x):
        return tp.cond(x > 0, lambda x: tp.psum(x, "i"), lambda x: -x, x)

    with around():
        assert tp.pmap(f, "i", compile=compile)(torch.tensor([2.0])).tolist() == [2.0]
