"""Covers: _base/traced_constants.py: ``linearize`` and ``make_fx`` of functions of ShardedTensors.

Expectations are torch's ``jvp`` of the same function of plain tensors.
"""

import pytest
import torch
from _sharded_values import numbers
from _support import EAGER
from torch.func import grad, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import torchpmap as tp

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # torch's own
]

X = numbers(4, 3) / 4 + 0.1
T = numbers(4, 3).flip(0) / 3
W = numbers(4, 3) + 0.5


def times_sum(x):
    return x * x.sum(0)


def mapped_times_sum():
    return tp.pmap(lambda x: x * tp.psum(x, "i"), axis_name="i", compile=EAGER)


def on_mesh_times_sum():
    mesh, cut = tp.make_mesh((4,), ("i",), devices=tp.devices()), tp.P("i")
    options = {"mesh": mesh, "in_specs": cut, "out_specs": cut, "compile": EAGER}
    return tp.shard_map(lambda x: x * tp.psum(x.sum(0), "i"), **options)


def of_both(function):
    """A function of x and of what it closes over: on the devices, and here."""
    return lambda: lambda x: function(x, tp.replicate(W)), lambda x: function(x, W)


FUNCTIONS = {
    "sin": (lambda: torch.sin, torch.sin),
    "sum": (lambda: lambda x: (x * x).sum(), lambda x: (x * x).sum()),
    "view": (lambda: lambda x: x[:, 0] * x[:, 1], lambda x: x[:, 0] * x[:, 1]),
    "in place": (lambda: lambda x: (x * 2).mul_(x), lambda x: (x * 2).mul_(x)),
    "closure": of_both(lambda x, w: (x * w).sin() + w),
    "product": of_both(lambda x, w: x @ w.T),
    "two results": of_both(lambda x, w: (x * w, x.sum())),
    "gathered": of_both(lambda x, w: x.cumsum(0) * w),
    "pmap": (mapped_times_sum, times_sum),
    "shard_map": (on_mesh_times_sum, times_sum),
    "pmap inside": (
        lambda: lambda x: mapped_times_sum()(x.sin()) * tp.replicate(W),
        lambda x: times_sum(x.sin()) * W,
    ),
    "gradient": (
        lambda: grad(lambda x: (mapped_times_sum()(x) ** 2).sum()),
        grad(lambda x: (times_sum(x) ** 2).sum()),
    ),
}
PLACES = {"here": lambda x: x, "cut": tp.shard_batch, "whole": tp.replicate}
each = pytest.mark.parametrize(("make", "plain"), FUNCTIONS.values(), ids=FUNCTIONS)


def same(results, expected):
    results, expected = (x if isinstance(x, tuple) else (x,) for x in (results, expected))
    for result, want in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), want)


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
@each
def test_linearize(make, plain, put):
    value, push = linearize(make(), put(X))
    expected = jvp(plain, (X,), (T,))
    same(value, expected[0])
    same(push(put(T)), expected[1])
    same(push(put(2 * T)), jvp(plain, (X,), (2 * T,))[1])


@pytest.mark.parametrize("name", ["sin", "closure", "pmap", "shard_map"])
def test_transforms_of_what_linearize_returns(name):
    make, plain = FUNCTIONS[name]
    _, push = linearize(make(), tp.shard_batch(X))
    same(push(tp.shard_batch(T)), jvp(plain, (X,), (T,))[1])
    stacked = torch.stack([jvp(plain, (X,), (t,))[1] for t in (T, 2 * T)])
    same(vmap(push)(torch.stack([T, 2 * T])), stacked)
    (pulled,) = vjp(push, tp.shard_batch(T))[1](tp.shard_batch(W))
    same(pulled, vjp(plain, X)[1](W)[0])


def test_a_linear_function_draws_no_random_numbers():
    _, push = linearize(mapped_times_sum(), X)
    push(T)
    state = torch.get_rng_state()
    push(T)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("put", [tp.shard_batch, tp.replicate], ids=["cut", "whole"])
def test_graphs_of_make_fx_compute_with_their_arguments(put):
    w = tp.replicate(W)
    graph = make_fx(lambda x: ((x * w).sin() + 1).sum(1) @ w)(put(X))
    for x in (X, 2 * X):
        torch.testing.assert_close(graph(put(x)).cpu(), ((x * W).sin() + 1).sum(1) @ W)
