"""Covers: _loops/bodies.py: bodies that write in place to what they get or close over."""

import pytest
import torch
from _everywhere import GRAPH, check, same_everywhere
from torch import nn
from torch.func import grad, jvp, vmap

import torchpmap as tp
from torchpmap._trace.graphs import has_effects

X = torch.tensor([[2.0, -1.0, 2.5], [0.5, 20.0, -0.1]])


def everywhere(program, x, expected):
    same_everywhere(program, x, expected=expected, fullgraph=False)
    with tp.debug.fake_pmap():
        check(tp.pmap(program, in_axes=None, out_axes=None, axis_size=1)(x), expected)


def an_output_that_is_the_carry(x):
    def step(c, t):
        c += t
        return c, c

    return *tp.scan(step, x, torch.arange(3.0)), x


def first_carry_beside_a_number(x):
    return tp.scan(lambda c, _: ((c[0].mul_(2), c[1] + 1), None), (x, 0), length=3)[0], x


def rows(x):
    xs = x * 1

    def loss(xs):
        return tp.scan(lambda c, row: (c + row.mul_(2).sum(), None), xs.sum() * 0, xs)[0]

    return loss(xs), grad(loss)(xs), xs


def rows_of_a_vmap_that_are_done(x):
    def double(v):
        return tp.while_loop(lambda c: c.abs() < 10, lambda c: c.mul_(2), v)

    return vmap(vmap(double))(x)


DONE = X * 2 ** torch.log2(10 / X.abs()).ceil().clamp(0)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (an_output_that_is_the_carry, (X + 3, torch.stack([X, X + 1, X + 3]), X)),
        (first_carry_beside_a_number, ((X * 8, torch.tensor(3)), X)),
        (rows, (2 * X.sum(), torch.full_like(X, 2), X)),
        (rows_of_a_vmap_that_are_done, DONE),
    ],
)
def test_what_a_step_gets_stays_as_it_was(program, expected):
    everywhere(program, X, expected)


def branches(x):
    return tp.cond(x.sum() > 10, lambda y: y.mul_(3) * y, lambda y: y.add_(1) * 5, x)


EXPECTED = torch.stack([5 * (X[0] + 1), 9 * X[1] ** 2])
GRADIENT = torch.stack([torch.full_like(X[0], 5), 18 * X[1]])


def test_branches_and_their_gradients():
    """If the predicate differs by row, both run: the second must not see what the first wrote."""

    def gradient(row):
        return grad(lambda row: branches(row).sum())(row)

    everywhere(
        lambda x: [(branches(row * 1), row) for row in x], X, list(zip(EXPECTED, X, strict=True))
    )
    everywhere(vmap(branches), X, EXPECTED)
    everywhere(vmap(gradient), X, GRADIENT)
    everywhere(lambda x: torch.stack([gradient(row) for row in x]), X, GRADIENT)


def test_branches_on_devices(mode):
    check(tp.pmap(branches, compile=mode)(X), EXPECTED)
    with tp.debug.fake_pmap():
        check(tp.pmap(branches)(X), EXPECTED)


KEPT = {
    "scan": lambda x: tp.scan(lambda c, r: (c.mul_(r), c.sin()), x[0], x)[1],
    "scan of one step": lambda x: tp.scan(lambda c, r: (c.mul_(2), r.add_(c)), x[0], x[:1])[1],
    "unrolled": lambda x: tp.scan(lambda c, r: (c.mul_(r), c.sin()), x[0], x, unroll=True)[1],
    "map": lambda x: tp.map(lambda r: r.mul_(2), x),
    "map in batches": lambda x: tp.map(lambda r: r.mul_(2), x.T, batch_size=2),
    "fori_loop": lambda x: tp.fori_loop(0, 2, lambda i, c: c.mul_(i.add_(1)), x),
    "while_loop": lambda x: tp.while_loop(
        lambda c: c.mul_(2).min() <= 0, lambda c: c.abs_().add_(1), x
    ),
    "cond": lambda x: tp.cond(x.sum() > 0, lambda y: y.mul_(2), lambda y: y, x),
    "cond, by Python": lambda x: tp.cond(True, lambda y: y.mul_(2), lambda y: y, x),
    "switch": lambda x: tp.switch(
        x.sum().int(), [torch.neg, lambda y: y.mul_(3), lambda y: y.mul_(2)], x
    ),
    "switch, by Python": lambda x: tp.switch(1, [torch.neg, lambda y: y.mul_(2)], x),
    "switch of one": lambda x: tp.switch(x.sum().int(), [lambda y: y.mul_(2)], x),
    "associative_scan": lambda x: tp.associative_scan(lambda a, b: a.add_(b), x, axis=1),
    "associative_scan, other argument": lambda x: tp.associative_scan(
        lambda a, b: b.add_(a), x, axis=1, reverse=True
    ),
}
PURE = {name: lambda x: x * 2 for name in KEPT} | {
    "scan": lambda x: torch.cumprod(torch.cat([x[:1], x]), 0)[1:].sin(),
    "scan of one step": lambda x: x[:1] * 3,
    "unrolled": lambda x: torch.cumprod(torch.cat([x[:1], x]), 0)[1:].sin(),
    "map in batches": lambda x: x.T * 2,
    "while_loop": lambda x: 1 + x.abs(),
    "associative_scan": lambda x: x.cumsum(1),
    "associative_scan, other argument": lambda x: x.flip(1).cumsum(1).flip(1),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_caller_has_stays_as_it_was(name):
    everywhere(lambda x: (KEPT[name](x), x), X, (PURE[name](X), X))


def second(program):
    return lambda x: grad(lambda x: grad(lambda x: program(x).sum())(x).square().sum())(x)


DERIVED = {
    "grad": lambda program: grad(lambda x: program(x).sum()),
    "jvp": lambda program: lambda x: jvp(program, (x,), (x + 1,)),
    "vmap": lambda program: lambda x: vmap(program)(torch.stack([x, x + 1])),
    "vmap of grad": lambda program: lambda x: vmap(grad(lambda x: program(x).sum()))(x[None]),
    "twice": second,
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("how", DERIVED)
def test_derivatives_of_what_writes(name, how):
    if name == "while_loop" and "grad" in how + "grad" * (how == "twice"):
        pytest.skip("a while_loop has no reverse mode")
    everywhere(DERIVED[how](KEPT[name]), X, DERIVED[how](PURE[name])(X))


@pytest.mark.parametrize("name", ["scan", "map"])
def test_a_body_may_write_to_a_leaf_that_requires_grad(name):
    x = X.clone().requires_grad_()
    KEPT[name](x).sum().backward()
    check(x.grad, grad(lambda x: PURE[name](x).sum())(X))


AFTERWARDS = {
    "the first carry": lambda x: tp.scan(lambda c, r: (c * r, None), x[0], X)[0],
    "rows": lambda x: tp.scan(lambda c, r: (c * r, None), X[0], x)[0],
    "an operand": lambda x: tp.cond(x.sum() > 0, torch.square, torch.neg, x),
    "in a body": lambda x: tp.scan(
        lambda c, r: (tp.scan(lambda d, q: (d * q * d, None), c, X)[0] + c.mul_(2), c), x[0], X
    )[1],
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_a_gradient_sees_what_there_was_before_a_later_write(name):
    def loss(x):
        y = x * 1
        found = AFTERWARDS[name](y).sum()
        return found + y.mul_(2).sum() * 0

    # outside of a trace the body runs by itself, and gets copies
    everywhere(grad(loss), X * 0.1, grad(loss)(X * 0.1))


RESULTS = {
    "cond": lambda x, y: tp.cond(x.sum() > 0, lambda x: x, lambda x: x, x),
    "cond, a closure": lambda x, y: tp.cond(x.sum() > 0, lambda: y, lambda: x),
    "cond, by Python": lambda x, y: tp.cond(True, lambda x: x, lambda x: x, x),
    "cond, a closure by Python": lambda x, y: tp.cond(True, lambda: y, lambda: x),
    "switch of one": lambda x, y: tp.switch(x.sum().int(), [lambda x: x[:1]], x),
    "scan": lambda x, y: tp.scan(lambda c, _: (y, None), x, length=2)[0],
    "scan of one step": lambda x, y: tp.scan(lambda c, _: (y, None), x, length=1)[0],
    "scan of no step": lambda x, y: tp.scan(lambda c, _: (y, None), x, length=0)[0],
    "outputs": lambda x, y: tp.scan(lambda c, _: (c, y), x, length=1)[1],
    "fori_loop": lambda x, y: tp.fori_loop(2, 2, lambda i, c: y, x),
    "while_loop": lambda x, y: tp.while_loop(lambda c: c.sum() < 0, lambda c: c, x),
    "associative_scan": lambda x, y: tp.associative_scan(torch.add, x[:1]),
    "map": lambda x, y: tp.map(lambda r: r, x),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_share_no_memory(name):
    def program(x):
        x, y = x * 1, x * 2
        RESULTS[name](x, y).fill_(7)
        return x, y

    everywhere(program, X, (X, X * 2))


LOST = {
    "scan": lambda x, y: tp.scan(lambda c, _: (c + y.add_(1), None), x, length=3),
    "scan of one step": lambda x, y: tp.scan(lambda c, _: (c + y.add_(1), None), x, length=1),
    "scan of no step": lambda x, y: tp.scan(lambda c, _: (c + y.add_(1), None), x, length=0),
    "unrolled": lambda x, y: tp.scan(lambda c, _: (c + y.add_(1), None), x, length=3, unroll=True),
    "through a view": lambda x, y: tp.scan(lambda c, _: (c + y[0].add_(1), None), x, length=3),
    "map": lambda x, y: tp.map(lambda r: y.add_(1), x),
    "map in batches": lambda x, y: tp.map(lambda r: r + y.add_(1)[0], x, batch_size=2),
    "fori_loop": lambda x, y: tp.fori_loop(0, 3, lambda i, c: c + y.add_(1), x),
    "a condition": lambda x, y: tp.while_loop(lambda c: y.add_(1).sum() < 9, lambda c: c, x),
    "while_loop": lambda x, y: tp.while_loop(
        lambda c: c.sum() < 99, lambda c: c.abs() + y.abs_() + 1, x
    ),
    "while_loop without steps": lambda x, y: tp.while_loop(
        lambda c: c.sum() < -99, lambda c: y.add_(1), x
    ),
    "cond": lambda x, y: tp.cond(x.sum() > 0, lambda: y.add_(1), lambda: x),
    "the other branch": lambda x, y: tp.cond(x.sum() > 0, lambda: x, lambda: y.add_(1)),
    "cond, by Python": lambda x, y: tp.cond(True, lambda: y.add_(1), lambda: x),
    "switch": lambda x, y: tp.switch(x.sum().int(), [lambda: x, lambda: x, lambda: y.add_(1)]),
    "switch of one": lambda x, y: tp.switch(x.sum().int(), [lambda: y.add_(1)]),
    "associative_scan": lambda x, y: tp.associative_scan(lambda a, b: a + y.add_(1)[0], x[:, 0]),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("how", ["values", "grad", "vmap"])
def test_writes_to_closures_are_errors_everywhere(name, how):
    def program(x):
        y = x * 1
        LOST[name](x * 1, y)
        return y.sum()

    derived = {"values": lambda f: f, "grad": grad, "vmap": lambda f: lambda x: vmap(f)(x[None])}
    f = derived[how](program)
    mapped = [tp.pmap(f, in_axes=None, axis_size=1, compile=mode) for mode in (GRAPH, False)]
    for call in (f, *mapped):
        with pytest.raises(RuntimeError, match="that it closes over"):
            call(X)
    with tp.debug.fake_pmap(), pytest.raises(RuntimeError, match="that it closes over"):
        tp.pmap(f, in_axes=None, axis_size=1)(X)


def test_a_write_to_a_closure_does_not_happen():
    norm = nn.BatchNorm1d(3)
    for call in (
        lambda: tp.fori_loop(0, 2, lambda _, s: s + norm(X).sum(), 0.0),
        lambda: tp.cond(X.sum() < 0, lambda: norm(X), lambda: X),
    ):
        with pytest.raises(RuntimeError, match=r"closes over.*BatchNorm: \.eval\(\)"):
            call()
    assert norm.num_batches_tracked == 0


def test_copies_that_nothing_needs_are_not_in_the_graph():
    """Neither in bodies nor around them: only a body that writes copies."""
    clone = torch.ops.aten.clone.default

    def copies(f):
        row = X[:1]  # one alone: several on a device would be lanes of a vmap
        graph = tp.pmap(f, compile=GRAPH).lower(row).graph
        modules = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        return sum(len(m.graph.find_nodes(op="call_function", target=clone)) for m in modules)

    def loss(x):
        return tp.scan(lambda c, r: (c * r, c[:1].sin() + r), x.sum(), x[:, None])[1].sum()

    def product(x, y):
        return tp.scan(lambda c, r: (c * r, None), x, y)[0]

    assert copies(lambda x: tp.scan(lambda c, r: (c * r, c[:2].sin()), x, x + 1)) == 0
    assert copies(lambda x: tp.while_loop(lambda c: c.sum() < 9, lambda c: c.view(3) + 1, x)) == 0
    assert copies(lambda x: tp.switch(x.sum().int(), [torch.sin, torch.cos, torch.neg], x)) == 0
    assert copies(lambda x: product(x, x + 1) + product(x, x + 2)) == 0
    assert copies(lambda x: tp.cond(True, torch.sin, torch.cos, x) * 2) == 0
    assert copies(lambda x: tp.scan(lambda c, r: (c.mul_(r), c.sin()), x, x + 1)) > 0


@pytest.mark.parametrize(
    "product",
    [
        lambda c, w: c @ w,
        lambda c, w: w @ c,
        lambda c, w: (w * c).sum(0).unsqueeze_(0).squeeze_(0),
        lambda c, w: (w * c).t_().sum(0),
        lambda c, w: (w * c).transpose_(0, 1).sum(0),
    ],
    ids=["vector @ matrix", "matrix @ vector", "squeeze_", "t_", "transpose_"],
)
def test_what_changes_only_a_shape_is_no_effect(product):
    """torch squeezes the product of a vector in place."""
    w, c = torch.arange(36.0).view(4, 3, 3) / 36, torch.ones(4, 3)
    f = tp.pmap(
        lambda w, c: tp.scan(lambda c, _: (product(c, w), None), c, None, length=3)[0],
        compile=GRAPH,
    )
    (node,) = f.lower(w, c).graph.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.scan
    )
    assert not has_effects(node)
    expected = c
    for _ in range(3):
        expected = torch.stack([product(*each) for each in zip(expected, w, strict=True)])
    torch.testing.assert_close(torch.from_numpy(tp.device_get(f(w, c))), expected)


def test_a_shape_that_others_see_changes_in_place():
    def body(c, _):
        y = c * 2
        z = y.view(3)
        y.unsqueeze_(0)
        return y.sum(0) + z, y

    f = tp.pmap(lambda c: tp.scan(body, c, None, length=2), compile=GRAPH)
    x = torch.ones(4, 3)
    last, ys = f(x)
    assert last.tolist() == (x * 16).tolist()
    assert tuple(ys.shape) == (4, 2, 1, 3)


def test_a_while_loop_beside_a_write_in_a_gradient_from_outside():
    def program(x):
        y = x.clone()
        y[0] = y[0] * 3
        return y.square() * tp.while_loop(lambda n: n < 50, lambda n: n * 2, x.detach().sum())

    x = X.abs()
    scales = torch.stack([total * 2 ** (50 / total).log2().ceil() for total in x.sum(1)])
    expected = 2 * x * torch.tensor([9.0, 1.0, 1.0]) * scales[:, None]
    got = grad(lambda x: tp.pmap(program, compile=GRAPH)(x).sum())(x)
    torch.testing.assert_close(got.cpu(), expected)
