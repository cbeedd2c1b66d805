"""Covers: _transforms/row_preparation.py: derivatives, random numbers and options of
a pmap of a pmap.
"""

import functools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from _axis_models import sample
from _nested import NAMES, mesh_of, nested, same
from _support import COMPILED, EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("eight_devices")

# --- derivatives from outside ---------------------------------------------------------------------


def model(w, x):
    """Per row and column, of x [3]: with a sum over each axis, and over both."""
    y = (x * w).sin()
    return y / tp.psum(y.exp(), "rows"), tp.psum(y * x, "cols"), tp.pmean(y, NAMES)


def whole_model(w, x):
    """The same of x [r, c, 3]."""
    y = (x * w).sin()
    columns = (y * x).sum(1)
    return y / y.exp().sum(0), columns, y.mean((0, 1))


def mapped_model(mode):
    inner = {"in_axes": (None, 0), "out_axes": (0, None, None)}
    return nested(model, inner, in_axes=(None, 0), out_axes=(0, 0, None), compile=mode)


def scalar(f, w, x):
    return sum((y.to("cpu") * (k + 1)).cos().sum() for k, y in enumerate(f(w, x)))


shapes = pytest.mark.parametrize("shape", [(2, 4), (9, 4)], ids=str)


@pytest.mark.long
def test_transforms(mode):
    f = mapped_model(mode)
    w, x = sample(3), sample(2, 4, 3, seed=1) / 3
    tangents = sample(3, seed=2), sample(2, 4, 3, seed=3)

    def compared(transform):
        for got, wanted in zip(transform(f), transform(whole_model), strict=True):
            same(got.detach(), wanted)

    compared(lambda g: torch.func.grad(functools.partial(scalar, g), (0, 1))(w, x))
    compared(lambda g: torch.func.jvp(g, (w, x), tangents)[1])
    cotangents = tuple(sample(*y.shape, seed=4) for y in whole_model(w, x))
    compared(lambda g: torch.func.vjp(g, w, x)[1](cotangents))
    compared(lambda g: torch.func.vmap(g, (0, None))(torch.stack([w, 2 * w]), x))
    compared(lambda g: torch.func.jacrev(g)(w, x))
    compared(lambda g: torch.func.jacfwd(g)(w, x))
    compared(lambda g: torch.func.hessian(functools.partial(scalar, g))(w, x))


@shapes
def test_gradients_of_arguments_that_one_axis_shares(mode, shape):
    """It gets the sum over the devices of that axis, and of its rows on each."""
    inner = {"in_axes": (None, 0, 0), "out_axes": None}
    f = nested(lambda u, v, x: (u * v * x).sin(), inner, in_axes=(0, None, 0), compile=mode)

    def whole(u, v, x):
        return (u[:, None] * v * x).sin().mean(1)  # columns account for equal parts of one value

    given = sample(shape[0]) + 0.5, sample(shape[1], seed=1) + 0.5, sample(*shape, seed=2) / 3
    w = sample(shape[0], seed=3)
    got, wanted = (torch.func.vjp(g, *given)[1](w) for g in (f, whole))
    for slope, expected in zip(got, wanted, strict=True):
        same(slope, expected)


def test_gradients_lie_as_the_arguments_do():
    x = sample(2, 4)
    f = nested(lambda x: x**2)
    y = f(x)  # on the devices
    (slope,) = torch.func.vjp(lambda y: f(y), y)[1](f(y))
    same(slope, 2 * x**2 * x**4)
    assert slope.sharding == y.sharding


# --- random numbers -------------------------------------------------------------------------------


def on_rows(f, inner=None, **outer):
    """The same, without a mesh: the inner axis is where the outer one is."""
    mapped = tp.pmap(f, "cols", **(inner or {}))
    return tp.pmap(lambda *args: mapped(*args), "rows", **{"compile": EAGER, **outer})


def draws(x):
    first = torch.randn(2)
    inside = tp.vmap(lambda x: torch.rand(()) + 0 * x, axis_name="k")(x)
    return first, inside, torch.nn.functional.dropout(torch.ones(5), 0.5)


@pytest.mark.parametrize("inner", ["different", "same"])
@pytest.mark.parametrize("outer", ["different", "same"])
@pytest.mark.parametrize("shape", [(2, 4), (9, 4), (8, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:.* 9 rows run on 3 of 8 devices")
def test_random_numbers_do_not_depend_on_the_mesh(shape, outer, inner, mode):
    x = torch.zeros(*shape, 3)

    def drawn(make):
        torch.manual_seed(5)
        f = make(draws, {"randomness": inner}, randomness=outer, compile=mode)
        return [torch.cat([y.to("cpu") for y in f(x)], -1) for _ in range(2)]

    got, wanted = drawn(nested), drawn(on_rows)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert not torch.equal(got[0], got[1])
    rows = {tuple(row.tolist()) for row in got[0].flatten(0, 1)}
    distinct = [n for n, kind in zip(shape, (outer, inner), strict=True) if kind == "different"]
    assert len(rows) == np.prod(distinct, dtype=int)
    with tp.debug.fake_pmap():
        for a, b in zip(got, drawn(nested), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_refused_random_numbers(mode):
    x = torch.zeros(2, 4)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        nested(lambda x: torch.rand(()), {"randomness": "error"}, compile=mode)(x)
    with pytest.raises(RuntimeError, match="randomness='error' was given"):
        nested(lambda x: torch.rand(()), randomness="error", compile=mode)(x)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4), (9, 4)], ids=str)
def test_check_replicated(shape, mode):
    x = torch.arange(float(np.prod(shape))).reshape(shape)
    checked = {"out_axes": None, "check_replicated": True}

    def over(name, inner, **outer):
        return nested(lambda x: tp.psum(x, name), inner, compile=mode, **outer)(x)

    same(over(NAMES, checked, **checked), x.sum())
    same(over("cols", checked), x.sum(1))
    same(over("rows", {}, **checked), x.sum(0))
    text = r"'\)\(<inputs>\): out_axes is None for the output of <lambda>, but .*largest difference"
    for name, inner, outer in (("rows", checked, {}), ("cols", {}, checked)):
        declared = "rows" if outer else "cols"
        with pytest.raises(ValueError, match=f"axis_name='{declared}{text}"):
            over(name, inner, **outer)
    with pytest.raises(ValueError, match="out_axes is None"):
        over((), checked, **checked)

    def only_first_column(x):  # is the same in all rows
        return torch.where(tp.axis_index("cols") == 0, 1.0, x)

    f = nested(only_first_column, {"out_axes": None}, compile=mode, **checked)
    same(f(x), 1.0)  # what the inner call gives is the value of its first column


def test_what_is_compared_along_which_axis():
    """Only that is compared which is not proved."""
    x = torch.arange(8.0).reshape(2, 4)
    checked = {"out_axes": None, "check_replicated": True}
    within = "pmap(<lambda>, in_axes=0, axis_name='cols')(<inputs>)"
    claim = f"{within}: out_axes is None for the output of <lambda>"
    for name, inner, claims in (
        ("rows", {}, ()),
        (NAMES, checked, ()),
        ("rows", checked, (claim,)),
    ):
        f = nested(lambda x, name=name: tp.psum(x, name), inner, **checked)
        assert f.lower(x).compared == claims


def test_statics_keywords_and_none(mode):
    def f(x, k, y=None, *, scale):
        assert k == "double"
        assert y is None
        return {"x": 2 * x * scale, "none": None}

    x, scale = sample(2, 4), sample(2, 4, seed=1)
    inner = {"static_broadcasted_argnums": 1}
    mapped = nested(f, inner, compile=mode, **inner)
    got = mapped(x, "double", None, scale=scale)
    same(got["x"], 2 * x * scale)
    assert got["none"] is None
    assert mesh_of(got["x"]) == {"rows": 2, "cols": 4}


def test_kinds_of_arguments():
    x = sample(2, 4)
    f = nested(lambda tree, y: tree["x"] + tree["n"] * y, {"in_axes": ({"x": 0, "n": None}, 0)},
               in_axes=({"x": 0, "n": None}, 0))  # fmt: skip
    got = f({"x": x.numpy(), "n": 3}, x.to(torch.float32))
    same(got, 4 * x)
    assert mesh_of(got) == {"rows": 2, "cols": 4}
    on_the_devices = tp.device_put(x, tp.devices()[3])
    same(f({"x": on_the_devices, "n": 3}, got), x + 12 * x)


def test_what_does_not_fit_leaf_by_leaf_runs_on_the_rows(mode):
    """A static tuple of the outer call is two numbers to the inner one."""
    x, inner = sample(2, 4), {"in_axes": (0, None)}
    static = {"static_broadcasted_argnums": 1}
    f = nested(lambda x, pair: x * pair[0] + pair[1], inner, compile=mode, **static)
    got = f(x, (2, 1))
    same(got, 2 * x + 1)
    assert mesh_of(got) == {"rows": 2}


def test_misuse_of_the_inner_call_is_reported(mode):
    x = sample(2, 4)
    with pytest.raises(ValueError, match="pmap in_axes"):
        nested(lambda x: x, {"in_axes": (0, 0)}, compile=mode)(x)
    with pytest.raises(ValueError, match=r"axis_size"):
        nested(lambda x: x, {"axis_size": 3}, compile=mode)(x)
    with pytest.raises(ValueError, match="out_axes"):
        nested(lambda x: x, {"out_axes": 3}, compile=mode)(x)
    with pytest.raises(TypeError, match="must return tensors"):
        nested(lambda x: "text", compile=mode)(x)
    with pytest.raises(KeyError, match="mine"):
        nested(lambda x: {}["mine"], compile=mode)(x)
    with pytest.raises(NameError, match=r"Bound here: 'rows' \(size 2\), 'cols' \(size 4\)"):
        nested(lambda x: tp.psum(x, "k"), compile=mode)(x)


@pytest.mark.parametrize("mode", [EAGER, COMPILED, False])
def test_control_flow_on_values(mode):
    """With one row and one column on each device, Python sees values."""

    def f(x):
        return tp.psum(x * 10 if x.item() > 3 else x, "cols")

    x = torch.arange(8.0).reshape(2, 4)
    with pytest.warns(match="running without tracing") if mode is not False else nullcontext():
        got = nested(f, compile=mode)(x)
    same(got, torch.where(x > 3, 10 * x, x).sum(1, keepdim=True).expand(2, 4))
    if mode is not False:
        with pytest.raises(tp.TraceError, match="fullgraph=True"):
            nested(f, compile=mode, fullgraph=True)(x)


def test_donation():
    x = tp.device_put(sample(2, 4), tp.devices()[0])
    f = nested(lambda x: x + 1, {"donate_argnums": 0}, donate_argnums=0)
    y = f(x)
    same(f(y), sample(2, 4) + 2)
    with pytest.raises(RuntimeError, match="donated"):
        y.cpu()


@shapes
def test_three_ways_agree(shape, mode):
    """... on values and on gradients."""
    report = tp.debug.check_pmap(mapped_model(mode), sample(3), sample(*shape, 3) / 3)
    assert report.values == ("serial", "vmapped", "pmapped")
    assert report.gradients == report.values
    with tp.debug.fake_pmap():
        chosen = nested(lambda x: x, devices=tp.devices()[:8])(sample(2, 4))
        same(chosen, sample(2, 4))


def test_lowered():
    f = nested(lambda w, x: tp.psum(w @ x, "cols"), {"in_axes": (None, 0)}, in_axes=(None, 0))
    meta = torch.empty(5, 3, device="meta"), torch.empty(2, 4, 3, 2, device="meta")
    lowered = f.lower(*meta)
    assert lowered.in_layouts["w"].is_replicated
    assert lowered.in_layouts["x"].block_shape == (1, 1, 3, 2)
    (out,) = lowered.out_layouts
    assert (out.shape, out.block_shape) == ((2, 4, 5, 2), (1, 1, 5, 2))
    assert lowered.cost().flops == 2 * 5 * 3 * 2
    w, x = torch.ones(5, 3), torch.ones(2, 4, 3, 2)
    same(lowered.compile()(w, x), torch.full((2, 4, 5, 2), 12.0))


def test_prints_are_in_order(mode, capfd):
    def f(x):
        tp.debug.print("x = {}\nor so", x)
        return x

    for shape in ((2, 4), (9, 4)):
        capfd.readouterr()
        x = torch.arange(float(np.prod(shape))).reshape(shape)
        tp.block_until_ready(nested(f, compile=mode)(x))
        lines = [line for line in capfd.readouterr().out.splitlines() if line]
        assert [line.strip() for line in lines[1::2]] == ["or so"] * x.numel()
        places = [f"rows={r}, cols={c}" for r, c in np.ndindex(shape)]
        assert lines[::2] == [f"[{at}] x = {float(k)}" for k, at in enumerate(places)]


def test_assert_replicated():
    def f(x, name):
        y = tp.psum(x, "cols")
        tp.debug.assert_replicated(y, name)
        return y

    x = torch.arange(8.0).reshape(2, 4)
    options = {"static_broadcasted_argnums": 1}
    mapped = nested(f, options, **options)
    same(mapped(x, "cols"), x.sum(1, keepdim=True).expand(2, 4))
    for name in ("rows", NAMES):
        with pytest.raises(ValueError, match="differs between devices of axis"):
            tp.block_until_ready(mapped(x, name))


def test_a_plan_is_made_once_per_kind():
    traces = []
    f = nested(lambda x: traces.append(1) or x + 1)
    for k in range(3):
        same(f(sample(2, 4) + k), sample(2, 4) + k + 1)
    assert len(traces) == 1
    f(f(sample(2, 4)))
    assert len(traces) == 1  # where the argument lies makes no other program
    f(sample(4, 4))
    assert len(traces) == 2
