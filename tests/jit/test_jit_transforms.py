"""Covers: _transforms/jit_transforms.py: torch's transforms around calls of a jitted function."""

import pytest
import torch
import torch.nn.functional as F
from _cases import Cases, OnDevices, data
from _models import LINE, SQUARE
from _spies import asked
from _support import COMPILED, EAGER, close
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")
cases = Cases()


def f(w, x):
    return (x @ w).sin()


def total(f):
    return lambda *args: f(*args).square().sum()


def in_trees(f, w, x):
    tree = {"w": w, "x": [x, 3.0]}
    return grad(lambda t: (f(t["w"], t["x"][0]).sum(), f(x, w)), has_aux=True)(tree | {"x": [x]})


AROUND = {
    "grad": lambda f, w, x: grad(total(f), (0, 1))(w, x),
    "in trees": in_trees,
    "vjp": lambda f, w, x: vjp(f, w, x)[1](x),
    "twice through one call": lambda f, w, x: [vjp(f, w, x)[1](c) for c in (x, w)],
    "jvp": lambda f, w, x: jvp(f, (w, x), (x, w)),
    "jvp of one": lambda f, w, x: jvp(lambda x: f(w, x), (x,), (w,)),
    "vmap": lambda f, w, x: vmap(f, (None, 0))(w, x),
    "vmap of columns": lambda f, w, x: vmap(f, (None, 1), 1)(w, x),
    "vmap of both": lambda f, w, x: vmap(lambda w, x: f(w[:, None], x[None]), (1, 0))(w, x),
    "vmap of vmap": lambda f, w, x: vmap(vmap(lambda a, b: f(a[None, None], b[None, None])))(w, x),
    "gradients of rows": lambda f, w, x: vmap(grad(total(f)), (None, 0))(w, x),
    "grad of grad": lambda f, w, x: grad(lambda w: total(grad(total(f)))(w, x))(w),
    "jvp of grad": lambda f, w, x: jvp(lambda w: grad(total(f))(w, x), (w,), (x,)),
    "grad of jvp": lambda f, w, x: grad(lambda w: jvp(lambda x: f(w, x), (x,), (w,))[1].sum())(w),
    "jacrev": lambda f, w, x: jacrev(f, (0, 1))(w, x),
    "jacfwd": lambda f, w, x: jacfwd(f)(w, x),
    "hessian": lambda f, w, x: hessian(lambda w: total(f)(w[:2, :2], x[:2, :2]))(w[:2, :2].clone()),
    "tp.grad": lambda f, w, x: tp.value_and_grad(total(f))(w, x),
    "tp.vmap": lambda f, w, x: tp.vmap(tp.grad(total(f)), in_axes=(None, 0))(w, x),
}
PLACES = {
    "host": lambda x: x,
    "replicated": tp.replicate,
    "rows": lambda x: on(LINE, P("x"), x),
    "columns": lambda x: on(LINE, P(None, "x"), x),
    "both": lambda x: on(SQUARE, P("x", "y"), x),
}


def on(mesh, spec, x):
    return tp.device_put(x, tp.NamedSharding(tp.make_mesh(*mesh), spec))


def jit(f, **options):
    return tp.jit(f, **{"compile": EAGER, "fullgraph": True} | options)


def assert_same(mine, right):
    close(mine, right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "places",
    [
        ("replicated", "rows"),
        ("rows", "rows"),
        ("columns", "rows"),
        ("both", "both"),
        ("host", "rows"),
        ("rows", "host"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("name", AROUND)
def test_as_torch_on_whole_tensors(name, places):
    w, x = data(0), data(1)
    mine = AROUND[name](jit(f), *(PLACES[k](v) for k, v in zip(places, (w, x), strict=True)))
    assert_same(mine, AROUND[name](f, w, x))


@pytest.mark.parametrize("compile", [COMPILED])
def test_compiled(compile):
    w, x = data(0), data(1)
    for name in ("grad", "gradients of rows", "jvp of grad"):
        around = AROUND[name]
        mine = around(jit(f, compile=compile), PLACES["rows"](w), PLACES["rows"](x))
        assert_same(mine, around(f, w, x))


@pytest.mark.parametrize(
    ("name", "count"),
    [("vjp", 2), ("jvp", 2), ("jvp of one", 2), ("vmap", 1)],
)
def test_one_message_for_a_call_and_one_for_its_derivative(name, count, monkeypatch):
    jitted, given = jit(f), [PLACES["rows"](data(k)) for k in range(2)]
    AROUND[name](jitted, *given)
    calls = asked(monkeypatch)
    AROUND[name](jitted, *given)
    assert [method for method, _ in calls] == ["execute"] * count
    assert jitted.num_traces == 1


def test_where_derivatives_lie():
    w, x = PLACES["columns"](data(0)), PLACES["rows"](data(1))
    first, second = (AROUND[name](jit(f), w, x) for name in ("grad", "grad of grad"))
    specs = [each.sharding.spec for each in (*first, second)]
    assert specs == [P(None, "x"), P("x"), P(None, "x")]
    rows = AROUND["gradients of rows"](jit(f), PLACES["replicated"](data(0)), x)
    assert rows.sharding.spec == P("x")  # each device has those of its rows
    host = AROUND["grad of grad"](jit(f), data(0), x)
    assert type(host) is torch.Tensor


@cases.add()
def gradients_of_a_gradient_reach_parameters(on):
    model = on.model(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    g = on.jit(lambda x: model(x).sin().sum())
    found = []
    for k in range(2):
        model.zero_grad()
        found.append(grad(g)(on.put(data(k))))
        found[-1].square().sum().backward()
        found += [p.grad for p in model.parameters()]
    assert not isinstance(on, OnDevices) or g.num_traces == 1
    return found


@cases.add()
def parameters_as_an_argument(on):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    params = {
        name: on.put(data(k, *p.shape)) for k, (name, p) in enumerate(model.named_parameters())
    }
    g = on.jit(lambda p, x: functional_call(model, p, (x,)).square().mean())
    x = on.put(data())
    both, rows = grad_and_value(g)(params, x), vmap(grad(g), (None, 0))(params, x)
    return tree_leaves((both, rows))


@cases.add()
def a_tangent_that_begins_elsewhere_in_its_memory(on):
    """Torch keeps what the first trace of an operation finds out."""

    def f(x):
        return jvp(lambda y: (y[None] * 2).sum(0), (x[1],), (x[2],))[1]

    return [on.jit(f)(on.put(data())) for _ in range(2)]


@cases.add()
def a_tensor_that_requires_grad(on):
    w, x = on.put(data()).requires_grad_(), on.put(data(1))
    g = on.jit(lambda w, x: (w.sin() * x).sum())
    grad(g, 1)(w, x).square().sum().backward()
    return [w.grad]


@cases.add()
def other_results(on):
    x, w = on.put(data()), on.put(data(1))
    g = on.jit(lambda x, n, *, d: {"y": (x**n).sum(), "d": d, "x": x, "w": w, "k": x.argmax(1)})

    def loss(x):
        found = g(x, 3, d="text")
        assert found["d"] == "text"
        return found["y"], (found["x"], found["w"], found["k"])

    return tree_leaves(grad(loss, has_aux=True)(x))


@cases.add()
def a_value_that_is_two_arguments(on):
    x = on.put(data())
    g = on.jit(lambda a, b: (a * b.sin()).sum())
    return [*grad(g, (0, 1))(x, x), grad(lambda x: g(x, x))(x)]


@cases.add()
def training_and_evaluation(on):
    model, x = on.model(nn.Linear(8, 8), nn.Dropout(0.0), nn.Tanh()), on.put(data())
    g, found = on.jit(lambda x: model(x).sum() * (2 if model.training else 3)), []
    for k in range(4):
        model.train(k % 2 == 0)
        found.append(grad(g)(x))
    assert not isinstance(on, OnDevices) or g.num_traces == 2
    return found


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * cotangent * ctx.saved_tensors[0]


@cases.add()
def what_torch_func_refuses(on):
    """A first gradient is that of ``backward()``."""
    x = on.put(data())
    if isinstance(on, OnDevices):
        return [grad(on.jit(lambda x: Tripled.apply(x).sum()))(x)]
    return [3 * x]


@cases.add()
def loops_and_other_jitted_functions(on):
    x, inner = on.put(data()), on.jit(lambda c, row: c.sin() * row.sum() + c)

    def g(x):
        if isinstance(on, OnDevices):
            return tp.scan(lambda c, row: (inner(c, row), None), x, x)[0].sum()
        c = x
        for row in x:
            c = inner(c, row)
        return c.sum()

    jitted = on.jit(g)
    return [grad(jitted)(x), jvp(grad(jitted), (x,), (x,))[1]]


@cases.add()
def transforms_inside_too(on):
    w = on.put(data(1))
    g = on.jit(lambda x: jvp(lambda y: y * w[0], (x,), (x,))[1].sum() + grad(total(torch.sin))(x))
    return [grad(total(g))(on.put(data())), vmap(g)(on.put(data()))]


@cases.add()
def dual_numbers(on):
    with forward_ad.dual_level():
        y = on.jit(lambda x: x.sin())(forward_ad.make_dual(on.put(data()), on.put(data(1))))
        return [forward_ad.unpack_dual(y).tangent]


@cases.add()
def without_gradients(on):
    x, model = on.put(data()), on.model()
    with torch.no_grad():
        return [vmap(on.jit(lambda x: model(x)))(x)]


@cases.add(fullgraph=False)
def values_that_are_needed(on):
    return [
        grad(on.jit(lambda x: x.sin().sum() if x.detach().sum() < 1e9 else x.sum()))(on.put(data()))
    ]


@cases.add(fullgraph=False)
def a_tensor_that_the_transform_follows_and_the_function_closes_over(on):
    model, x = on.model(), on.put(data())
    forward = on.jit(lambda x: model(x).sin())
    whole = nn.Module()
    whole.model, whole.forward = model, forward
    params = {name: p.detach() for name, p in whole.named_parameters()}
    return tree_leaves(grad(lambda p: functional_call(whole, p, (x,)).sum())(params))


test_as_in_plain_torch = cases.tests()


def test_constraints():
    by_rows = tp.NamedSharding(tp.make_mesh(*LINE), P("x"))
    g = jit(lambda x: tp.with_sharding_constraint(x.sin(), by_rows), out_shardings=by_rows)
    x = PLACES["columns"](data())
    y, pull = vjp(g, x)
    assert (y.sharding.spec, pull(x)[0].sharding.spec) == (P("x"), P(None, "x"))
    for name in ("grad of grad", "jvp"):
        mine = AROUND[name](lambda w, x: g(w), x, x)
        assert_same(mine, AROUND[name](lambda w, x: w.sin(), data(), data()))
    columns = vmap(jit(lambda x: tp.with_sharding_constraint(x.sin(), by_rows)), 1)(x)
    assert_same(columns, data().sin().T)


def test_random_numbers():
    ones = PLACES["rows"](torch.ones(8, 8))
    g = jit(lambda x: F.dropout(x, 0.5))
    (y, pull), (z, tangent) = vjp(g, ones), jvp(g, (ones,), (ones,))
    assert torch.equal(y.cpu(), pull(ones)[0].cpu())
    assert torch.equal(z.cpu(), tangent.cpu())
    assert not torch.equal(y.cpu(), z.cpu())
    twice = grad(lambda x: grad(lambda x: (g(x) * x).sum())(x).sum())(ones)
    assert set(twice.cpu().unique().tolist()) == {0.0, 4.0}
    for randomness, are_equal in (("same", True), ("different", False)):
        rows = vmap(g, randomness=randomness)(ones).cpu()
        assert bool((rows == rows[0]).all()) == are_equal
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(g)(ones)


def test_writes_are_torchs_to_refuse():
    count, x = tp.replicate(torch.zeros(8)), PLACES["rows"](data())

    def g(x):
        count.add_(1)
        return x.sum()

    with (
        pytest.warns(UserWarning, match="it writes to tensors from outside, .* under a transform"),
        pytest.raises(RuntimeError, match="would mutate a captured Tensor"),
    ):
        grad(jit(g, fullgraph=False))(x)
    with pytest.raises(tp.TraceError, match="it writes to tensors from outside"):
        grad(jit(g))(x)
    assert count.sum() == 0


def test_what_is_read_may_not_change_before_a_derivative_is_traced():
    class Settings:
        factor = 2.0

    settings = Settings()
    g, x = jit(lambda x: x**3 * settings.factor), PLACES["rows"](data())
    _, pull = vjp(grad(total(g)), x)
    settings.factor = 3.0
    with pytest.raises(RuntimeError, match="has changed since the call"):
        pull(x)
    assert_same(vjp(g, x)[1](x), vjp(lambda x: x**3 * 3, data())[1](data()))


def test_what_a_call_leaves_is_freed():
    w = PLACES["rows"](data(0, 1000, 100))
    g = jit(lambda w: w.sin().exp().sum())
    before = tp.memory_stats()[tp.devices()[0]].value_bytes
    for _ in range(4):
        found = grad(g)(w)
    after = tp.memory_stats()[tp.devices()[0]].value_bytes
    assert after - before < 2 * w.nbytes
    del found
