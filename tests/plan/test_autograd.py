"""Covers: _plan/autograd.py, _trace/partition.py: gradients, tangents and batches through pmap from
outside.

Expectations are torch's own, for the function that the mapped one stands for.
"""

import gc

import pytest
import torch
from _support import EAGER, mostly_long, running_pool
from torch.autograd import forward_ad

import torchpmap as tp
from torchpmap._runtime.current import runtime

pytestmark = pytest.mark.usefixtures("pool")

X = torch.tensor([0.5, -1.0, 2.0, 1.5])
Y = torch.arange(12.0).reshape(4, 3) / 7
W = torch.tensor([[0.5, -0.25, 1.0], [2.0, 0.0, -1.0], [0.125, 1.0, 0.5]])


def has_no_failed_pair(mapped):
    """Whether gradients took the cheap way wherever it was tried."""
    differentiables = mapped._preparation._differentiables.values()
    return all(pair is not None for o in differentiables for pair in o._pairs.values())


def same(got, expected):
    torch.testing.assert_close(got.cpu() if hasattr(got, "cpu") else got, expected)


# (mapped function of one row, whole function of all rows)
ROWS = "rows"


def scaled_by_the_sum(x):
    return x.sin() * tp.psum(x**2, ROWS)


def stopped(x):
    with torch.no_grad():
        frozen = x * 2
    return x.detach() * x + frozen * x + x**3


PROGRAMS = {
    "stopped gradients stay stopped": (stopped, stopped),
    "no collective": (lambda x: (x**3).sum(), lambda x: (x**3).sum(1)),
    "psum": (scaled_by_the_sum, lambda x: x.sin() * (x**2).sum(0)),
    "pmean": (lambda x: x / (1 + tp.pmean(x**2, ROWS)), lambda x: x / (1 + (x**2).mean(0))),
    "pmax": (lambda x: x * tp.pmax(x, ROWS), lambda x: x * x.amax(0)),
    "all_gather": (lambda x: tp.all_gather(x, ROWS).cos().sum(0) * x, lambda x: x.cos().sum(0) * x),
    "ppermute": (
        lambda x: x * tp.ppermute(x, ROWS, [(k, (k + 1) % 4) for k in range(4)]),
        lambda x: x * x.roll(1, 0),
    ),
    "psum_scatter": (
        lambda x: tp.psum_scatter(torch.stack([x, x**2, x**3, x]), ROWS),
        lambda x: torch.stack([x, x**2, x**3, x], 1).sum(0),
    ),
    "gradient inside": (
        lambda x: tp.grad(lambda v: (v**4).sum())(x) * tp.psum(x, ROWS),
        lambda x: 4 * x**3 * x.sum(0),
    ),
}


@pytest.fixture(params=PROGRAMS)
def program(request, mode):
    """A mapped function, and the same of all rows in plain torch."""
    row, whole = PROGRAMS[request.param]
    mapped = tp.pmap(row, ROWS, compile=mode)
    yield mapped, whole
    assert has_no_failed_pair(mapped)


def backward(f):
    def gradient(x):
        leaf = x.clone().requires_grad_()
        (f(leaf) ** 2).sum().backward()
        assert type(leaf.grad) is torch.Tensor
        return leaf.grad

    return gradient


def backward_twice(f):
    def gradient(x):
        leaf = x[:, :1].clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
        (first**2).sum().backward()
        return leaf.grad

    return gradient


func = torch.func
TRANSFORMS = {
    "grad": lambda f: func.grad(lambda x: (f(x) ** 2).sum()),
    "backward": backward,
    "backward twice": backward_twice,
    "jacrev": func.jacrev,
    "jacfwd": func.jacfwd,
    "hessian": lambda f: lambda x: func.hessian(lambda x: f(x).sum())(x[:, :1]),
    "vmap": lambda f: lambda x: func.vmap(f)(torch.stack([x, x + 1, -x])),
    "vmap of dims": lambda f: lambda x: func.vmap(f, 1, -1)(torch.stack([x, x + 1, -x], 1)),
    "vmap of grad": lambda f: (
        lambda x: func.vmap(func.grad(lambda x: f(x).sum()))(torch.stack([x, x + 1]))
    ),
    "grad of vmap": lambda f: func.grad(
        lambda x: (func.vmap(f)(torch.stack([x, x + 1])) ** 2).sum()
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(program, transform):
    mapped, whole = program
    same(transform(mapped)(Y), transform(whole)(Y))


def test_trees_integers_and_none(mode):
    def f(tree, k):
        return {"y": tree["a"] * k, "n": None, "k": k + 1, "b": tree["b"]}

    mapped = tp.pmap(f, compile=mode)
    k = torch.arange(4)

    def loss(a):
        out = mapped({"a": a, "b": None}, k)
        assert out["n"] is None
        assert out["b"] is None
        assert out["k"].dtype == torch.int64
        return (out["y"] * out["k"]).sum()

    same(torch.func.grad(loss)(X), (k * (k + 1)).float())


def test_one_function_sees_every_new_closure():
    holder = [torch.tensor(0.0)]
    mapped = tp.pmap(lambda x: x * holder[0] ** 2, compile=EAGER)

    def loss(w):
        holder[0] = w
        return mapped(X).sum()

    for value in (1.0, 3.0, 5.0):
        same(torch.func.grad(loss)(torch.tensor(value)), 2 * value * X.sum())


def test_functional_call(mode):
    module = torch.nn.Linear(3, 2)
    mapped = tp.pmap(lambda x: module(x).sum(), compile=mode)

    def loss(parameters):
        with torch.nn.utils.stateless._reparametrize_module(module, parameters):
            return mapped(Y).sum()

    parameters = {"weight": W[:2].clone(), "bias": torch.zeros(2)}
    got = torch.func.grad(loss)(parameters)
    same(got["weight"], Y.sum(0).expand(2, 3))
    same(got["bias"], torch.full((2,), 4.0))


def test_custom_functions_with_closures(mode):
    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return 2 * g * w, 3 * g * x  # not the derivative, to be recognised

    w = torch.tensor(5.0, requires_grad=True)
    x = X.clone().requires_grad_()
    tp.pmap(lambda x: Twice.apply(x, w), compile=mode)(x).sum().backward()
    same(x.grad, torch.full((4,), 10.0))
    same(w.grad, 3 * X.sum())


def test_in_place_writes_inside(mode):
    def f(x, buffer):
        buffer += x.detach()
        y = x * 2
        y *= x
        return y * buffer

    x, buffer = X.clone().requires_grad_(), torch.ones(4)
    mapped = tp.pmap(f, compile=mode)
    mapped(x, buffer).sum().backward()
    assert has_no_failed_pair(mapped)
    same(x.grad, 4 * X * (1 + X))
    assert buffer.tolist() == [1.0] * 4


def test_sharded_arguments_get_sharded_gradients(mode):
    x = tp.device_put(Y, tp.devices()).requires_grad_()
    tp.pmap(lambda x: (x**2).sum(), compile=mode)(x).sum().backward()
    assert type(x.grad) is tp.ShardedTensor
    same(x.grad, 2 * Y)


def test_forward_mode_of_torch(mode):
    mapped = tp.pmap(scaled_by_the_sum, ROWS, compile=mode)
    tangent = torch.tensor([1.0, 0.5, -1.0, 2.0])
    expected = torch.func.jvp(lambda x: x.sin() * (x**2).sum(), (X,), (tangent,))[1]
    with forward_ad.dual_level():
        _, got = forward_ad.unpack_dual(mapped(forward_ad.make_dual(X, tangent)))
    same(got, expected)


def tangent_of(f):
    return lambda x: torch.func.jvp(f, (x,), (x,))[1]


def silent(f):
    return lambda x: torch.no_grad()(f)(x)


RECORDED = {
    "jvp": tangent_of,
    "jvp without": lambda f: silent(tangent_of(f)),
    "jvp of jvp without": lambda f: silent(tangent_of(tangent_of(f))),
    "jacfwd without": lambda f: silent(torch.func.jacfwd(f)),
    "jvp of grad without": lambda f: silent(tangent_of(torch.func.grad(lambda x: f(x).sum()))),
    "grad beside jvp without": lambda f: torch.func.grad(
        lambda x: (silent(tangent_of(f))(x) * x).sum()
    ),
    "grad of jvp": lambda f: torch.func.grad(lambda x: tangent_of(f)(x).sum()),
}


@pytest.mark.parametrize("kind", ["pmap", "jit", "shard_map"])
@pytest.mark.parametrize("transform", RECORDED.values(), ids=RECORDED)
def test_gradients_are_recorded_where_the_caller_wants_them(transform, kind, mode):
    weight = W[0, 0].clone().requires_grad_()

    def f(x):
        return x.sin() * weight

    rows = {"mesh": tp.make_mesh((4,), ("x",)), "in_specs": tp.P("x"), "out_specs": tp.P("x")}
    mapped = getattr(tp, kind)(f, compile=mode, **(rows if kind == "shard_map" else {}))
    got, expected = transform(mapped)(X), transform(f)(X)
    same(got.detach(), expected.detach())
    assert got.requires_grad == expected.requires_grad
    if got.requires_grad:
        gradients = [torch.autograd.grad(x.square().sum(), weight)[0] for x in (got, expected)]
        same(*gradients)


def test_forward_mode_through_results_without_derivatives(mode):
    """Integers and bools alone: nothing moves with the argument."""
    mapped = tp.pmap(lambda x: (tp.axis_index(ROWS), x > 0), ROWS, compile=mode)

    def weighted(f, x):
        index, positive = f(x)
        return (x**2 * index * positive).sum()

    def whole(x):
        return torch.arange(4), x > 0

    for transform in (torch.func.jacfwd, torch.func.hessian):
        got, expected = (transform(lambda x, f=f: weighted(f, x))(X) for f in (mapped, whole))
        same(got, expected)


def test_the_forward_pass_is_not_computed_again():
    traced = []

    def f(x):
        traced.append(1)
        return (x.sin() ** 2).sum()

    mapped = tp.pmap(f, compile=EAGER)
    x = Y.clone().requires_grad_()
    for _ in range(3):
        mapped(x).sum().backward()
    assert len(traced) == 2  # one trace of the function, one of function and gradient
    same(x.grad, 3 * (2 * Y).sin())


@pytest.mark.parametrize("used", [(1,), (0,), (1, 2), (0, 1, 2)])
def test_results_that_nothing_uses_have_no_part_in_gradients(mode, used):
    """The derivative of a square root at 0 is infinite, and NaN if it is multiplied by zero."""

    def f(x):
        return (x - 1).sqrt(), x**3, x * tp.psum(x**2, ROWS)

    def plain(x):
        return (x - 1).sqrt(), x**3, x * (x**2).sum()

    def total(results):
        return sum((k + 2) * results[k].sum() for k in used)

    mapped = tp.pmap(f, ROWS, compile=mode)
    x = torch.tensor([2.0, 5.0, 10.0, 17.0] if 0 in used else [1.0, 2.0, 5.0, 10.0])
    first, second = tp.grad(lambda x: total(mapped(x))), tp.grad(lambda x: total(plain(x)))
    for _ in range(2):
        same(first(x), second(x))
    y = x.clone().requires_grad_()
    total(mapped(y)).backward()
    same(y.grad, second(x))
    (differentiable,) = mapped._preparation._differentiables.values()
    assert len(differentiable._pairs) <= 2  # for all results, and for those that are used
    if mode is not False:  # what has run uncompiled has no residuals
        assert all(derived._plan is None for derived in differentiable._derived.values())
    same(tp.grad(lambda x: first(x).sum())(x), tp.grad(lambda x: second(x).sum())(x))
    assert has_no_failed_pair(mapped)


def test_a_limited_number_of_batched_forms_is_kept(monkeypatch):
    monkeypatch.setattr("torchpmap._plan.derivatives._MAX_DERIVED", 3)
    mapped = tp.pmap(lambda x: x * 2, compile=EAGER)
    for size in (*range(1, 8), 2):
        x = torch.arange(4.0 * size).reshape(size, 4)
        same(torch.func.vmap(mapped)(x), x * 2)
    (differentiable,) = mapped._preparation._differentiables.values()
    assert len(differentiable._derived) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_tangents_have_the_dtype_of_the_value(dtype, mode):
    x = torch.arange(1.0, 5.0, dtype=dtype)
    mapped = tp.pmap(lambda p: (p + 0.5) * 2, compile=mode)
    jacobian = torch.func.jacfwd(mapped)(x)
    assert jacobian.dtype == dtype
    assert jacobian.cpu().equal(2 * torch.eye(4, dtype=dtype))


def test_residuals_are_freed(monkeypatch):
    mapped = tp.pmap(lambda x: (x.sin() ** 2).sum(), compile=EAGER)
    x = tp.device_put(Y, tp.devices()).requires_grad_()
    mapped(x).sum().backward()
    gc.collect()
    team = runtime().team(tuple(range(4)))
    before = team.runtime._next_handle
    out = mapped(x).sum()
    made = team.runtime._next_handle - before
    monkeypatch.setattr(running_pool(), "_tick", lambda: None)  # would send what is released
    team.released.clear()
    out.backward()
    del out
    gc.collect()
    assert made > 2  # an output and residuals
    assert len(team.released) >= made


def test_gradients_of_functions_that_cannot_be_traced():
    def f(x):
        return x * 2 if x > 0 else x

    mapped = tp.pmap(f, compile=False)
    x = X.clone().requires_grad_()
    out = mapped(x)
    same(out.detach(), torch.where(X > 0, 2 * X, X))
    assert out.requires_grad
    text = r"cannot be differentiated or batched from outside.*return x \* 2 if x > 0.*torch\.where"
    with pytest.raises(NotImplementedError, match=text):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match=text):  # x is not "unused"
        torch.autograd.grad(mapped(x).sum(), x, allow_unused=True)
    with pytest.raises(NotImplementedError, match=text):
        torch.func.grad(lambda x: mapped(x).sum())(X)


def test_outputs_that_nothing_batched_reaches():
    f = tp.pmap(lambda x, z: (x * tp.psum(x, "i"), tp.psum(z, "i")), "i", compile=EAGER)
    x, z = torch.arange(8.0).reshape(2, 4), torch.arange(4.0)
    sums = x * x.sum(1, keepdim=True), torch.full((4,), 6.0)
    for got, expected in zip(torch.func.vmap(f, (0, None), (0, None))(x, z), sums, strict=True):
        same(got, expected)
    # tp.vmap: torch's takes the dim of an outer vmap for its own where out_dims is None
    twice = tp.vmap(tp.vmap(f, (0, None), (0, None)), (None, 0), (None, 0))
    many = torch.stack([z, z + 1, z + 2])
    first, second = twice(x, many)
    same(first, sums[0])
    same(second, torch.tensor([6.0, 10.0, 14.0]).unsqueeze(1).expand(3, 4))


def test_gradients_that_nothing_batched_reaches():
    f = tp.pmap(lambda x, z: (x * x, tp.psum(z * z, "i")), "i", compile=EAGER)
    x, z = torch.arange(8.0).reshape(2, 4), torch.arange(4.0)
    gradient = torch.func.vmap(lambda x: torch.func.grad(lambda z: f(x, z)[1].sum())(z), 0, None)
    same(gradient(x), 4 * 2 * z)
    tangent = torch.func.vmap(lambda t: torch.func.jvp(f, (x[0], z), (t, z))[1], 0, (0, None))
    of_x, of_z = tangent(x)
    same(of_x, 2 * x[0] * x)
    same(of_z, torch.full((4,), 2 * 14.0))


def test_donation_is_left_for_calls_that_are_not_differentiated():
    mapped = tp.pmap(lambda x: x * 2, donate_argnums=0, compile=EAGER)
    x = tp.device_put(X, tp.devices()).requires_grad_()
    mapped(x).sum().backward()
    assert not x.is_deleted()
    with torch.no_grad():
        mapped(x)
    assert x.is_deleted()


@pytest.mark.inductor
@pytest.mark.always
def test_compiled_by_inductor():
    mapped = tp.pmap(
        lambda w, x: torch.tanh(w @ x) * tp.psum(x, ROWS).sum(), ROWS, in_axes=(None, 0)
    )
    got = torch.func.grad(lambda w: (mapped(w, Y) ** 2).sum())(W)
    same(got, torch.func.grad(lambda w: ((torch.tanh(Y @ w.T) * Y.sum()) ** 2).sum())(W))


def test_batches_seen_by_transforms_are_contiguous():
    mapped = tp.pmap(lambda x: x.sin(), compile=EAGER)
    seen = []

    def f(x):
        y = mapped(x)
        seen.append(y.stride())
        return y

    got = torch.func.vmap(torch.func.vmap(f))(torch.ones(2, 5, 4, 3))
    assert seen == [(3, 1)]
    same(got, torch.ones(2, 5, 4, 3).sin())


JACOBIANS = {"F": torch.func.jacfwd, "R": torch.func.jacrev}


def derivative(word, function):
    """``word``: the transforms from the outside in, G for the gradient of the sum, V for vmap."""
    if not word:
        return function
    inner = derivative(word[1:], function)
    if word[0] == "V":
        return lambda x: torch.func.vmap(inner)(torch.stack([x, x + 0.5]))
    if word[0] == "G":
        return torch.func.grad(lambda x: inner(x).sum())
    return JACOBIANS[word[0]](inner)


LINEAR = {
    "affine": lambda x: x * 2 + 1,
    "constant": lambda x: x * 0 + 1,
    "flipped": lambda x: x.flip(0),
    "expanded sum": lambda x: x.sum().expand(3),
}


@pytest.mark.parametrize("word", ["FRR", "FRF", "FFR", "RFR", "FF"])
@pytest.mark.parametrize("name", LINEAR)
def test_third_order_of_linear_functions_of_vectors(word, name, mode):
    row = LINEAR[name]
    x = torch.tensor([[0.3, 0.1], [-0.7, 0.5]])
    expected = derivative(word, torch.func.vmap(row))(x)
    got = derivative(word, tp.pmap(row, compile=mode))(x)
    torch.testing.assert_close(got.cpu(), expected)


POLYNOMIALS = {
    "no collective": lambda x: (x**4).sum(),
    "psum": lambda x: tp.psum(x.sin() * x, ROWS).prod() * x.sum(),
    "ppermute": lambda x: (x**3 * tp.ppermute(x, ROWS, [(k, (k + 1) % 4) for k in range(4)])).sum(),
    "all_gather": lambda x: (tp.all_gather(x, ROWS).sin().prod(0) * x).sum(),
    "pmax": lambda x: (tp.pmax(x, ROWS) ** 3 * x.cos()).sum(),
}


THIRD = ["FFG", "FRG", "RFG", "RRG", "VFFG", "VFRG", "VRFG", "VRRG", "FFF", "VFFF", "RFF", "GGG"]


@pytest.mark.parametrize("pool", [2], indirect=True)  # two rows per device
@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("word", mostly_long(THIRD, "FRG", "VFFF", "GGG"))
def test_third_order(word, name, pool):
    row = POLYNOMIALS[name]
    x = torch.tensor([[0.3], [-0.7], [1.1], [0.6]])
    expected = derivative(word, tp.vmap(row, axis_name=ROWS))(x)
    got = derivative(word, tp.pmap(row, ROWS, compile=EAGER))(x)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
