"""The rules of ``shard_map`` about derivatives and composition, one by one.

Covers: ``vmap`` around, maps in maps and their derivatives, random numbers, plans.  Rule numbers
are those of the specification; derivatives of one map are in tests/programs/test_jax_parity.py.
"""

import functools

import pytest
import torch
from _blocks import XY, X, mapped
from _support import EAGER, WAYS

import torchpmap as tp
from torchpmap import P


def blocks(x):
    """By the coordinates of the mesh, of a value under P('x', 'y')."""
    return [list(rows.chunk(2, 1)) for rows in x.chunk(2, 0)]


def _here(x):
    return tuple(map(_here, x)) if isinstance(x, tuple) else x.cpu()


def test_rule_25_the_mesh_hides_an_axis_of_a_vmap(mesh):
    batch = torch.randn(3, 4, 4)
    inner = mapped(lambda a: tp.psum(a, "x"), mesh, XY, P(None, "y"))
    found = tp.vmap(inner, axis_name="x")(batch)
    torch.testing.assert_close(found.cpu(), batch[:, :2] + batch[:, 2:])


def inner_map(fun, in_specs=P(None, "y"), out_specs=P(), **options):  # noqa: B008
    """Over the axis "y", inside a map over "x"."""
    return tp.shard_map(fun, in_specs=in_specs, out_specs=out_specs, axis_names={"y"}, **options)


def nest(a, w):
    """[2, 4] per device along "x" -> [2, 2], the same everywhere."""
    return tp.psum(inner_map(lambda b: tp.psum(b * b * w, "y"))(a), "x")


def whole_nest(a, w):
    return sum(block * block * w for row in blocks(a) for block in row)


def test_rule_27_derivatives_of_a_map_in_a_map(mesh, mode):
    call = mapped(nest, mesh, (P("x"), P()), P(), axis_names={"x"}, compile=mode)
    a, w = torch.randn(4, 4), torch.tensor(1.5)
    torch.testing.assert_close(call(a, w).cpu(), whole_nest(a, w))
    found = torch.func.grad(lambda a, w: call(a, w).sin().sum(), argnums=(0, 1))(a, w)
    expected = torch.func.grad(lambda a, w: whole_nest(a, w).sin().sum(), argnums=(0, 1))(a, w)
    torch.testing.assert_close(_here(found), expected)

    def twice(f):
        once = torch.func.grad(lambda a: f(a, w).sin().sum())
        return torch.func.grad(lambda a: once(a).square().sum())(a).cpu()

    torch.testing.assert_close(twice(call), twice(whole_nest), atol=1e-4, rtol=1e-4)
    _, found = torch.func.jvp(call, (a, w), (a.cos(), w))
    _, expected = torch.func.jvp(whole_nest, (a, w), (a.cos(), w))
    torch.testing.assert_close(found.cpu(), expected)


def test_rule_27_gradients_inside_the_outer_map(mesh, mode):
    def slope(a):
        square = inner_map(torch.square, out_specs=P(None, "y"))
        return tp.grad(lambda b: square(b).sum())(a)

    call = mapped(slope, mesh, P("x"), P("x"), axis_names={"x"}, compile=mode)
    assert call(X).tolist() == (2 * X).tolist()


def half_layer(h, w, *, check_vma):
    """[2, 4] per device along "x" -> the same: a sum over "y"."""
    specs = P("y"), P(None, "y")
    return inner_map(lambda w, h: tp.psum((h @ w).sin(), "y"), specs, check_vma=check_vma)(w, h)


def whole_layer(h, w):
    return (h[:, :2] @ w[:2]).sin() + (h[:, 2:] @ w[2:]).sin()


REPEATS = {
    "two calls": lambda tp, layer, a, w: layer(layer(a, w), w),
    "a scan": lambda tp, layer, a, w: tp.scan(lambda h, _: (layer(h, w), None), a, None, 2)[0],
    "a branch": lambda tp, layer, a, w: layer(
        tp.cond(w.sum() > -99, lambda a: layer(a, w), lambda a: a * w[0], a), w
    ),
}


@pytest.mark.parametrize("checks", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", REPEATS)
def test_rule_27_derivatives_of_several_maps_in_a_map(mesh, name, checks):
    def f(a, w):
        layer = functools.partial(half_layer, check_vma=checks[1])
        return REPEATS[name](tp, layer, a, w)

    options = {"axis_names": {"x"}, "check_vma": checks[0]}
    call = mapped(f, mesh, (P("x"), P()), P("x"), **options)
    a, w = X / 16, X.T / 16 - 0.2
    found = torch.func.grad(lambda a, w: call(a, w).square().sum(), argnums=(0, 1))(a, w)
    expected = torch.func.grad(
        lambda a, w: whole_layer(whole_layer(a, w), w).square().sum(), argnums=(0, 1)
    )(a, w)
    torch.testing.assert_close(_here(found), expected)


@pytest.mark.parametrize("way", WAYS)
def test_rule_27_vmap_of_a_map_inside(mesh, way):
    compile, around = WAYS[way]

    def outer(f, a):
        return torch.func.vmap(inner_map(f))(torch.stack([a, a * a]))

    def call(f):
        options = {"axis_names": {"x"}, "compile": compile}
        return mapped(lambda a: outer(f, a), mesh, P("x"), P(None, "x"), **options)

    both = torch.stack([X, X * X])
    with around():
        found = call(lambda b: tp.psum(b, "y"))(X)
        torch.testing.assert_close(found.cpu(), both[..., :2] + both[..., 2:])
        with pytest.raises(ValueError, match="does not mention axis 'y' for the output of <lambda"):
            call(lambda b: b)(X)


def test_rule_27_the_checks_of_all_calls_count(mesh):
    def outer(a):
        inner = inner_map(lambda b: b)
        return inner(a) + inner(a * 0)  # the second is the same everywhere

    call = mapped(outer, mesh, P("x"), P("x"), axis_names={"x"}, compile=False)
    text = (
        r"shard_map\(<lambda>, .*\)\(<inputs>\): out_specs does not mention axis 'y' for the output"
    )
    with pytest.raises(ValueError, match=text):
        call(X)


def squares(b, w):
    return tp.psum((b * w).square().sum(), "y") + tp.psum(w, "y")


def captured_slope(a, w):
    return tp.grad(lambda w: inner_map(lambda b: squares(b, w))(a))(w)[None]


def passed_slope(a, w):
    return tp.grad(lambda w: inner_map(squares, (P(None, "y"), P()))(a, w))(w)[None]


@pytest.mark.parametrize("check_vma", [True, False])
def test_rule_27_gradients_inside_for_a_captured_value(mesh, check_vma):
    w = torch.tensor(1.5)
    specs = (P("x"), P()), P("x")
    options = {"axis_names": {"x"}, "check_vma": check_vma}
    call = mapped(captured_slope, mesh, *specs, **options)
    expected = torch.stack([2 * w * rows.square().sum() + 2 for rows in X.chunk(2)])
    if check_vma:
        expected = expected.sum().expand(2)
    torch.testing.assert_close(call(X, w).cpu(), expected)
    if check_vma:
        without_a_trace = mapped(captured_slope, mesh, *specs, **options, compile=False)
        assert without_a_trace(X, w).tolist() == call(X, w).tolist()
    same = mapped(passed_slope, mesh, *specs, **options)
    for argnum in (0, 1):
        found = [
            torch.func.grad(lambda *args, f=f: f(*args).sin().sum(), argnum)(X / 9, w).cpu()
            for f in (call, same)
        ]
        torch.testing.assert_close(*found)


def test_rule_27_backward_inside_for_a_captured_parameter(mesh):
    w = torch.tensor(1.5, requires_grad=True)

    def slope(a):
        inner_map(lambda b: tp.psum((b * w).square().sum(), "y"))(a).backward()
        assert w.grad is not None
        return w.grad[None]

    expected = [2 * 1.5 * rows.square().sum().item() for rows in X.chunk(2)]
    call = mapped(slope, mesh, P("x"), P("x"), axis_names={"x"}, check_vma=False)
    assert call(X).tolist() == expected
    call = mapped(slope, mesh, P("x"), P("x"), axis_names={"x"})
    assert call(X).tolist() == [sum(expected)] * 2


def test_rule_27_an_axis_is_mapped_once(mesh):
    def outer(a):
        return tp.shard_map(lambda b: b, in_specs=P(), out_specs=P())(a)

    with pytest.raises(ValueError, match="the axis 'x' is already mapped by the shard_map around"):
        mapped(outer, mesh, P("x"), P("x"))(X)


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("name", ["a gradient pushed forward", "its gradient"])
@pytest.mark.parametrize("specs", [(P("x"), P("x")), (P(), P("x"))], ids=["cut", "shared"])
def test_higher_derivatives_from_outside_of_views(specs, name):
    """The tangent of a cotangent, and that of what an inner gradient wraps, varies as its value."""
    rows = {"sum": lambda x: x.sin().sum(1), "select": lambda x: x[:, 0].sin() * x[:, 1]}

    def pushed(f, w, v):
        return torch.func.jvp(tp.grad(lambda w: f(w).sin().sum()), (w,), (v,))[1]

    def derivative(f):
        if name == "its gradient":
            return tp.grad(lambda w, v: pushed(f, w, v).square().sum(), argnums=(0, 1))
        return functools.partial(pushed, f)

    x = torch.linspace(-1, 2, 12).reshape(4, 3)
    w = x.cos() if specs[0] == P("x") else x[1:2].cos()
    mesh = tp.make_mesh((4,), ("x",))
    for row in rows.values():
        mapped = tp.shard_map(
            lambda w, x, row=row: row(w * x),
            mesh=mesh,
            in_specs=specs,
            out_specs=P("x"),
            compile=EAGER,
        )
        ours = derivative(lambda w, f=mapped: f(w, x))(w, w.sin())
        theirs = derivative(lambda w, f=row: f(w * x))(w, w.sin())
        torch.testing.assert_close(ours, theirs)


def test_rule_28_random_numbers(mesh):
    draw = mapped(lambda a: torch.rand(a.shape), mesh, XY, XY)
    assert draw(X).cpu().unique().numel() == 16
    torch.manual_seed(0)
    first, second = draw(X).tolist(), draw(X).tolist()
    torch.manual_seed(0)
    assert draw(X).tolist() == first != second
    for serial in (False, True):
        with tp.debug.fake_pmap(serial=serial):
            torch.manual_seed(0)
            assert draw(X).tolist() == first
    same = mapped(lambda a: torch.rand(a.shape), mesh, XY, XY, randomness="same")
    assert same(X).cpu().unique().numel() == 4
    # along an axis that is not mapped
    draw = mapped(lambda a: torch.rand(a.shape), mesh, P("x"), P("x"), axis_names={"x"})
    one, two, three, _ = [s.data.tolist() for s in draw(X).addressable_shards]
    assert one == two != three


def test_rule_29_plans(mesh):
    traces = []

    def double(a):
        traces.append(1)
        return a * 2

    call = mapped(double, None, XY, XY)
    for _ in range(3):
        with tp.set_mesh(tp.make_mesh((2, 2), ("x", "y"))):
            result = call(call(X))
    assert result.tolist() == (4 * X).tolist()
    assert len(traces) == 1
