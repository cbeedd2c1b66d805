"""Covers: _loops/surroundings.py: closures of loops in loops, transforms through all of them."""

import pytest
import torch
from _plain import GRAPH, check
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

import torchpmap as tp

X = torch.tensor([0.75, -0.25])


def constant_inside(c):
    """A tensor that is made in the graph of the innermost branch."""
    branches = [torch.sin, lambda c: vmap(lambda q: c * q)(torch.tensor([0.5, 1.0])).sum(0)]
    return tp.switch((c.sum() * 4).int(), [*branches, lambda c: c * 2], c)


def loops_in_branches(c):
    def scanned(c, n, reverse):
        xs = torch.linspace(0, 1, n) * (1 + c.sum())
        last, ys = tp.scan(lambda s, t: (s * 0.5 + t, s * t), c, xs, reverse=reverse)
        return last + ys.sum(0)

    inner = [torch.sin, lambda c: scanned(c, 3, False), lambda c: scanned(c, 2, True)]
    return tp.cond(c.sum() > 0, lambda c: tp.switch((c.sum() * 4).int(), inner, c), torch.cos, c)


def closure_returned(c):
    """Bodies and branches that return what they close over as it is."""
    chosen = tp.cond(c.sum() > 0, lambda: c * 3, lambda: c)
    return chosen + tp.scan(lambda s, _: (c, s * c), c * 1, length=3)[1].sum(0)


def closure_of_a_switch(x):
    """The operand and the closure are one tensor."""
    return tp.switch((x.sum() * 4).int(), [torch.sin, lambda c: x, lambda c: c * x], x)


def closure_out_of_transforms(x):
    """What leaves a transform as it is enters no operation either."""
    two = torch.tensor([0.5, 1.0])
    return tp.cond(
        x.sum() > 0,
        lambda c: vmap(lambda q: (c * q, x)[1])(two).sum(0),
        lambda c: vjp(lambda q: x, c)[0] * 3,
        x * 1.5,
    )


def closure_of_a_map(x):
    """The gradient of one branch is a part of a larger tensor."""
    rows = torch.stack([x, x * 2])
    return tp.cond(x.sum() > 0, lambda: tp.map(lambda _: x, rows).sum(0), lambda: x * 5)


TWO = torch.tensor([0.5, 1.0])


def captured_by_transforms(x):
    """A tensor that no transform traces meets one inside, while there is one around the call."""

    def each(x):
        return vmap(lambda q: x * q)(TWO).sum(0)

    return each(x) + tp.cond(x.sum() > 0, lambda: each(x), lambda: x)


TRANSFORMS = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),)),
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "hessian": lambda f: hessian(lambda x: (f(x) ** 2).sum()),
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x - 1])),
}


CASES = [(f, name) for f in (constant_inside, closure_returned) for name in TRANSFORMS]
CASES += [(loops_in_branches, name) for name in TRANSFORMS if name != "hessian"]  # a minute


@pytest.mark.parametrize(("f", "transform"), CASES)
@pytest.mark.long("loops_in_branches")
def test_transforms_through_all(f, transform):
    program = TRANSFORMS[transform](f)
    mapped = tp.pmap(program, in_axes=None, out_axes=None, axis_size=1, compile=GRAPH)
    check(mapped(X), program(X))


def whole_numbers(x):
    """Branches and a loop whose results have no tangents."""
    n = tp.cond(x.sum() > 0, lambda y: (y > 0).sum(), lambda y: (y < 0).sum(), x)
    n = n + tp.fori_loop(0, 2, lambda i, c: c + (x > i).sum(), torch.tensor(0))
    return x * n


def constants_inside(x):
    """A body in a body makes constants."""
    step = lambda c, _: (c * torch.tensor([2.0, 3.0]), c)  # noqa: E731
    inner = lambda c: tp.scan(step, c, None, 2)[0]  # noqa: E731
    return tp.cond(x.sum() > 0, inner, lambda c: c.index_fill(0, torch.tensor([1]), 4.0), x)


CLOSURES = [closure_returned, closure_of_a_switch, closure_out_of_transforms, closure_of_a_map]
CLOSURES += [captured_by_transforms, whole_numbers, constants_inside]


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("f", CLOSURES)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.long("closure_of_a_switch", "constants_inside", "whole_numbers")
def test_derivatives_inside_and_outside(f, mode, lanes):
    rows = torch.stack([X, -X, X * 0.6, X + 1] * lanes)
    mapped = tp.pmap(f, compile=mode)

    def loss(f):
        return lambda x: (f(x) ** 2).sum()

    check(grad(loss(mapped))(rows), torch.stack([grad(loss(f))(row) for row in rows]))
    pushed = [jvp(f, (row,), (row,)) for row in rows]
    pushed = tuple(map(torch.stack, zip(*pushed, strict=True)))
    check(jvp(mapped, (rows,), (rows,)), pushed)
    check(tp.pmap(lambda x: jvp(f, (x,), (x,)), compile=mode)(rows), pushed)


def test_a_branch_returns_a_part_of_what_it_has_received(mode):
    """Several values are reduced as one; torch wants results of branches in memory of their own."""
    which = torch.tensor(3)

    def f(x):
        largest = lambda y: tp.pmax((y, y), "i")[1]  # noqa: E731
        y = tp.cond(which % 2 == 0, torch.sin, largest, x * 2)
        return y, tp.fori_loop(0, 2, lambda i, c: c + i, x)

    got = tp.pmap(f, "i", compile=mode)(torch.stack([X, -X]))
    largest = 2 * torch.maximum(X, -X)
    check(got, (torch.stack([largest, largest]), torch.stack([X, -X]) + 1))


def test_a_loop_in_a_branch_of_some_devices(mode):
    """Of which values vary is followed, and the loop closes over a tensor from outside."""
    count, rows = torch.tensor(3), torch.tensor([1.0, 2.0])

    def until(x):
        test = lambda state: state[0] < count  # noqa: E731
        return tp.while_loop(test, lambda s: (s[0] + 1, s[1] * 2), (torch.tensor(0), x))[1]

    mesh = tp.make_mesh((2,), ("i",))
    specs = {"in_specs": tp.P("i"), "out_specs": tp.P("i")}
    mapped = tp.shard_map(
        lambda x: tp.cond(x[0] % 2 == 0, until, torch.neg, x), mesh=mesh, compile=mode, **specs
    )
    assert mapped(rows).tolist() == [-1, 16]


def scan_in_scan(x):
    def inner(d, _):
        return d * 0.75 + x.sin() * 0.25, None

    return tp.scan(lambda c, _: (tp.scan(inner, c, length=100)[0], None), x, length=3)[0]


def scan_in_branch(x):
    def step(c, t):
        halved = lambda c: tp.scan(lambda d, _: (d * 0.75, d), c, length=12)[0] + t  # noqa: E731
        return tp.cond(c.sum() > 0, halved, torch.cos, c), c

    return tp.scan(step, x, torch.arange(3.0))[1].sum(0)


def three_deep(x):
    def middle(c, _):
        return tp.scan(lambda d, t: (d * 0.75 + t, None), c, torch.linspace(0, 1, 8))[0], None

    def outer(c, _):
        return tp.switch(
            c.sum().int(), [torch.sin, lambda c: tp.scan(middle, c, length=2)[0]], c
        ), c

    return tp.scan(outer, x, length=2)[1].sum(0)


def backward(f):
    def run(x):
        x = x.detach().clone().requires_grad_()
        (f(x) ** 2).sum().backward()
        return x.grad

    return run


OUTSIDE = {
    "backward": backward,
    "grad": lambda f: grad(lambda x: (f(x) ** 2).sum()),
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: (f(x) ** 2).sum()),
}


FROM_OUTSIDE = [(scan_in_scan, how) for how in OUTSIDE]
FROM_OUTSIDE += [(f, how) for f in (scan_in_branch, three_deep) for how in ("backward", "jacfwd")]


@pytest.mark.long
@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(("f", "how"), FROM_OUTSIDE)
def test_derivatives_from_outside(f, how):
    rows = torch.stack([X, -X])
    # steps are put together for this back end, as for Inductor
    mapped = tp.pmap(f, compile={"backend": "aot_eager"})
    each = lambda x: torch.stack([f(row) for row in x])  # noqa: E731
    check(OUTSIDE[how](mapped)(rows), OUTSIDE[how](each)(rows))
