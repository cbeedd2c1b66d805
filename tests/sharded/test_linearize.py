"""Covers: _base/traced_constants.py: ``linearize`` and ``make_fx`` of functions of ShardedTensors.

Expectations are torch's ``jvp`` of the same function of plain tensors.
"""

import pytest
import torch
from _sharded_values import numbers
from _support import EAGER, close
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


def by_pmap():
    return tp.pmap(lambda x: x * tp.psum(x, "i"), axis_name="i", compile=EAGER)


def by_shard_map():
    mesh, cut = tp.make_mesh((4,), ("i",), devices=tp.devices()), tp.P("i")
    options = {"mesh": mesh, "in_specs": cut, "out_specs": cut, "compile": EAGER}
    return tp.shard_map(lambda x: x * tp.psum(x.sum(0), "i"), **options)


# of a tensor, of one that the function closes over, and of what stands for times_sum
FUNCTIONS = {
    "sin": lambda x, w, f: x.sin(),
    "sum": lambda x, w, f: (x * x).sum(),
    "view": lambda x, w, f: x[:, 0] * x[:, 1],
    "in place": lambda x, w, f: (x * 2).mul_(x),
    "closure": lambda x, w, f: (x * w).sin() + w,
    "product": lambda x, w, f: x @ w.T,
    "two results": lambda x, w, f: (x * w, x.sum()),
    "gathered": lambda x, w, f: x.cumsum(0) * w,
    "mapped": lambda x, w, f: f(x),
    "mapped inside": lambda x, w, f: f(x.sin()) * w,
    "gradient": lambda x, w, f: grad(lambda x: (f(x) ** 2).sum())(x),
}


def on_devices(name, make=by_pmap):
    f = make()
    return lambda x: FUNCTIONS[name](x, tp.replicate(W), f)


def plain(name):
    return lambda x: FUNCTIONS[name](x, W, times_sum)


PLACES = {"here": lambda x: x, "cut": tp.shard_batch, "whole": tp.replicate}
CASES = [*((name, by_pmap) for name in FUNCTIONS), ("mapped", by_shard_map)]


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("name", "make"), CASES)
def test_linearize(name, make, put):
    value, push = linearize(on_devices(name, make), put(X))
    expected = jvp(plain(name), (X,), (T,))
    close(value, expected[0])
    close(push(put(T)), expected[1])
    close(push(put(2 * T)), jvp(plain(name), (X,), (2 * T,))[1])


@pytest.mark.parametrize(
    ("name", "make"),
    [("sin", by_pmap), ("closure", by_pmap), ("mapped", by_pmap), ("mapped", by_shard_map)],
)
def test_transforms_of_what_linearize_returns(name, make):
    _, push = linearize(on_devices(name, make), tp.shard_batch(X))
    close(push(tp.shard_batch(T)), jvp(plain(name), (X,), (T,))[1])
    stacked = torch.stack([jvp(plain(name), (X,), (t,))[1] for t in (T, 2 * T)])
    close(vmap(push)(torch.stack([T, 2 * T])), stacked)
    (pulled,) = vjp(push, tp.shard_batch(T))[1](tp.shard_batch(W))
    close(pulled, vjp(plain(name), X)[1](W)[0])


def test_a_linear_function_draws_no_random_numbers():
    _, push = linearize(by_pmap(), X)
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
