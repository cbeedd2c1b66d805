"""Covers: ``cond`` and ``switch``, and their derivatives."""

import contextlib
import functools
import gc
import math
import weakref

import pytest
import torch
from _plain import GRAPH, same_everywhere
from _support import mostly_long
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


def switches(x, index):
    branches = [lambda x: x, lambda x: -x, lambda x: x * 10]
    return [tp.switch(index + k, branches, x) for k in range(-2, 4)]


def grad_of_a_switch(x, index):
    branches = [torch.sin, lambda x: x**2, lambda x: 3 * x]
    return grad(lambda x, i: tp.switch(i, branches, x))(x, index)


def numbers_beside_a_tensor(x, index):
    branches = [lambda: 1, lambda: 2.5, lambda: x.sum(), lambda: True]
    return [tp.switch(index + k, branches) for k in range(4)]


def select(pred, x):
    return tp.cond(pred, lambda: x.sum(), lambda: x[0] * 0)


# name: program, expected, inputs
GIVEN = {
    "a batched predicate": (
        vmap(select), torch.tensor([1.0, 0.0, 9.0]),
        torch.tensor([True, False, True]), torch.arange(6.0).reshape(3, 2)),
    "a number takes the dtype of the other branch": (
        lambda x: tp.cond(x.sum() < 0, lambda: x.sum(), lambda: 3), torch.tensor(3.0), X),
    "numbers of several branches": (
        numbers_beside_a_tensor, list(torch.tensor([1.0, 2.5, 1.0, 1.0])), X, torch.tensor(0)),
    "switch": (switches, [X, X, X, -X, X * 10, X * 10], X, torch.tensor(0)),
    "grad of a batched switch": (
        vmap(grad_of_a_switch), torch.tensor([3.0, math.cos(-1), 5.0, 3.0]),
        torch.tensor([2.0, -1.0, 2.5, -0.5]), torch.tensor([2, 0, 1, 5])),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_given_values(name):
    program, expected, *inputs = GIVEN[name]
    same_everywhere(lambda _, *args: program(*args), *inputs, expected=expected)


def test_predicates_and_indices_of_python():
    assert tp.cond(True, lambda: 1, lambda: 2) == 1
    assert tp.cond(0, lambda: 1, lambda: 2) == 2
    assert tp.switch(7, [lambda: 0, lambda: 1]) == 1


MANY = [lambda x, k=k: x * (k + 1) + x.sin() ** k for k in range(4)]
TRANSFORMS = {
    "values": lambda f: f,
    "grad": grad,
    "jvp": lambda f: lambda x, i: jvp(lambda x: f(x, i), (x,), (x + 1,)),
    "hessian": hessian,
    "vmap": lambda f: lambda x, i: vmap(f, (0, None))(torch.stack([x, -x]), i),
    "vmap of both": lambda f: lambda x, i: vmap(f)(torch.stack([x, -x]), torch.stack([i, i - 2])),
    "vmap of grad": lambda f: (
        lambda x, i: vmap(grad(f))(torch.stack([x, -x]), torch.stack([i, i - 2]))
    ),
}


@pytest.mark.parametrize("name", mostly_long(TRANSFORMS, *TRANSFORMS.keys() - {"hessian"}))
@pytest.mark.parametrize("count", [3, 4])
def test_a_switch_of_many(name, count):
    def program(loops, x):
        def f(x, i):
            if loops is tp:
                return tp.switch(i, MANY[:count], x)
            masks = [i <= 0, *[i == k for k in range(1, count - 1)], i >= count - 1]
            return sum(torch.where(m, branch(x), 0) for m, branch in zip(masks, MANY, strict=False))

        return [TRANSFORMS[name](f)(x[0], i) for i in torch.tensor([-3, 1, 9])]

    same_everywhere(program, X)


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


def test_strides_of_branches_may_differ():
    def program(loops, x):
        def f(x):
            return loops.scan(
                lambda c, r: (loops.cond(r > 0, lambda c: c * 2, lambda c: c + r, c), None),
                x[0] * 1,
                x,
            )[0]

        return hessian(f)(x), vmap(lambda x: loops.cond(True, lambda: x[:1], lambda: x), 1)(x[None])

    same_everywhere(program, X)


def test_what_no_branch_uses_has_no_gradient(mode):
    """As in JAX: zeros would make NaN of what was computed from a NaN."""

    def branches(x, p):
        return tp.cond(p, lambda a, b: b * 2, lambda a, b: b * 0 + 1, (x * 0 - 1).sqrt(), x)

    def steps(x, p):
        rows = torch.log(x * torch.zeros(2) - 1)
        return tp.scan(lambda c, t: (c * x, None), x, rows)[0]

    x, p = torch.tensor([3.0, 2.0]), torch.tensor([False, True])
    for function, first, second in (
        (branches, [0.0, 2.0], [0.0, 0.0]),
        (steps, (3 * x**2).tolist(), (6 * x).tolist()),
    ):
        assert tp.pmap(tp.grad(function), compile=mode)(x, p).tolist() == first
        assert tp.pmap(torch.func.hessian(function), compile=mode)(x, p).tolist() == second
