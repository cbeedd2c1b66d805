"""Covers: _sharded/spread.py and choice.py: a graph of whole values, run on blocks by devices."""

import itertools
from collections import Counter

import pytest
import torch
from _support import DEVICE, close

import torchpmap as tp
from torchpmap import P
from torchpmap._base.torch_internals import FakeTensorMode
from torchpmap._layout.common_grid import common_grid
from torchpmap._runtime.defining import define
from torchpmap._sharded.spmd import Emitter
from torchpmap._sharded.spread import Spread
from torchpmap._sharded.summands import Value
from torchpmap._sharded.tensor import make_sharded

pytestmark = pytest.mark.usefixtures("pool")

numbers = itertools.count(-(2**42), -1)
LINE, SQUARE = {"x": 4}, {"x": 2, "y": 2}


def spread(f, values, specs, axes=LINE, wanted=None, weights=()):
    """Results of ``f`` for values that lie as the specs say, how often each function is called on a
    device, and what was resharded; ``wanted``: specs of results.
    """
    from torchpmap._trace.graph_mode import graph_of

    mesh = tp.make_mesh(tuple(axes.values()), tuple(axes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in values]
        module = graph_of(lambda *xs: tuple(f(*xs)), fakes)
    given = [
        tp.device_put(x, tp.NamedSharding(mesh, s)) for x, s in zip(values, specs, strict=True)
    ]
    layouts = [x._layout for x in given]
    grid = common_grid(layouts)
    emitter = Emitter(grid)
    inputs = [
        Value(emitter.input(f"x{k}"), x.shape, x.dtype, grid.cut_of(x), (), k in weights)
        for k, x in enumerate(layouts)
    ]
    whole = Spread(module, emitter)
    count = len(module.graph.output_node().args[0])
    cuts = [None] * count if wanted is None else [cut_of(spec, axes) for spec in wanted]
    results = whole.run(inputs, cuts)
    outputs = [grid.layout(value.shape, value.dtype, value.cut) for value in results]
    blocks = [value.block for value in results]
    ranks = [device.id for device in grid.devices]
    kinds = [(x.block_shape, x.dtype) for x in layouts]
    definition = emitter.finished(next(numbers), "whole", blocks, outputs, ranks, kinds)
    team = given[0]._handle.team
    define(team, definition, emitter.groups, "a whole graph")
    handles = team.runtime.execute(team, definition.plan_id, [x._handle for x in given], count)
    team.runtime.forget(definition.plan_id)
    called = Counter(getattr(n.target, "__name__", "") for n in definition.graph.graph.nodes)
    sent = ("joined", "exchanged", "added_up", "added_and_cut", "combined")
    return (
        [make_sharded(*pair) for pair in zip(outputs, handles, strict=True)],
        {name: called[name] for name in sent if called[name]},
        whole.reshards,
    )


def cut_of(spec, axes):
    names = list(axes)
    return tuple(
        ()
        if entry is None
        else tuple(map(names.index, (entry,) if isinstance(entry, str) else entry))
        for entry in spec
    )


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, Y, W = normal(8, 8), normal(8, 8, seed=1), normal(8, 8, seed=2)
HALVES = [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]

FUNCTIONS = {
    "a product": lambda x, y: [x @ y, x.T @ y, (x @ y).sum()],
    "sums that wait": lambda x, y: [x.sum(0) * 2 - x.mean(0), (x.sum(1) + y.sum(1)).tanh()],
    "a sum of a part of a sum": lambda x, y: [(x @ y).sum(0), (x.sum(0) / 3).sum()],
    "a part times a part": lambda x, y: [x.sum(0) * y.sum(0), x.sum(0) * y, y / x.sum(0)],
    "what is not linear": lambda x, y: [
        x.sum(0).mul(x.sum(0)),
        x.sum(0).div(3, rounding_mode="floor"),
        x.sum(0).sum(dtype=torch.int64),
        x.sum(0) + 1,
        (x * 5).long().sum(0) // 2,
        x.sum(0).square(),
        y * 2 - x.sum(0),
    ],
    "a part of a sum that moves": lambda x, y: [
        *(lambda z: [z[2:4], z.flip(0), z])(x.sum(0)),
        *(lambda z: [*z.split(4, 1), z.softmax(1), z.flip(0).exp(), z[0], z.t()[0].exp()])(x @ y),
    ],
    "sums that wrap": lambda x, y: [
        (x * 99).sum(0, dtype=torch.uint8) * 2.0,
        (x * 99).long().sum(0, dtype=torch.int8) / 2,
        x.sum(0, dtype=torch.bool) * 2.0,
        torch.cat([(x * 99).sum(0, dtype=torch.int8), y[0]]),
    ],
    "sums that are not finite": lambda x, y: [
        (x * (x > 1)).sum(0) / 0.0,
        (x * (x > 1)).sum(0) * torch.inf,
        (x * 0).sum(0) / torch.zeros(8),
    ],
    "a branch": lambda x, y: [
        torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)) + y,
        *torch.cond(y.sum() > 0, lambda a: (a + 1, a.sum(0)), lambda a: (a * 2, a[0] * 3), (x,)),
    ],
    "masks of two dims": lambda x, y: [x.index_put((x > 0,), x.new_zeros(()))],
    "an extreme": lambda x, y: [x.amax(0), (x @ y).amin(), x.norm(), x.logsumexp(1)],
    "softmax along each dim": lambda x, y: [x.softmax(0) @ y.softmax(1)],
    "without a rule": lambda x, y: [*x.sort(0), y.cumsum(0) + x.flip(1), torch.linalg.inv(x)],
    "shapes": lambda x, y: [x.view(4, 2, 8).transpose(0, 2).reshape(8, 8) @ y, torch.cat([x, y])],
    "rows": lambda x, y: [x[2:6] + y[:4], x[torch.tensor([3, 1])], x[1] * y],
    "few rows": lambda x, y: [x[3] * y, y[5, 6].exp(), x[1:8:6] - y[2:4], (x[:, 5] / 2).sum()],
    "gradients of rows": lambda x, y: torch.func.grad(
        lambda x, y: (x[3] * y[:, 2] + x[6:7].sin() + y[1::5].exp().sum(0)).sum(), (0, 1)
    )(x, y),
    "a constant": lambda x, y: [x * torch.arange(8.0).double(), y + 1],
    "several results": lambda x, y: [
        a * b for a, b in zip(x.split(4), y.unbind()[:2], strict=True)
    ],
    "integers and halves": lambda x, y: [
        (x * 9).long().sum(0),
        (x.bfloat16() @ y.bfloat16()).float(),
    ],
    "masks": lambda x, y: [
        torch.where(x > 0, x, y).sum(1),
        (x > y).any(0),
        x.masked_fill(y > 0, 0),
    ],
    "like a half": lambda x, y: [
        torch.ones_like(x.bfloat16().sum(0)),
        torch.zeros_like(x.half().sum(0)) + y,
    ],
    "nothing": lambda x, y: [x, y, x],
}


host_graphs = pytest.mark.skipif(
    DEVICE != "cpu", reason="the graph is made here, and its constants are of the host"
)


@host_graphs
@pytest.mark.parametrize("first", HALVES, ids=str)
@pytest.mark.parametrize("second", HALVES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_whole(name, first, second):
    results, _, _ = spread(FUNCTIONS[name], [X, Y], [first, second], SQUARE)
    for got, expected in zip(results, FUNCTIONS[name](X, Y), strict=True):
        close = {"rtol": 0.1, "atol": 0.1} if name == "integers and halves" else {}
        torch.testing.assert_close(got.cpu(), expected, equal_nan=True, **close)


@pytest.mark.parametrize("spec", HALVES, ids=str)
def test_results_lie_where_they_are_wanted(spec):
    def f(x, y):
        return x @ y, x.sum(0), x * y, x

    wanted = [spec, P(spec[-1] if spec else None), spec, spec]
    results, _, _ = spread(f, [X, Y], [P("x", "y"), P("y")], SQUARE, wanted)
    for got, expected, place in zip(results, f(X, Y), wanted, strict=True):
        torch.testing.assert_close(got.cpu(), expected)
        right = tp.NamedSharding(tp.make_mesh((2, 2), ("x", "y")), place)
        assert got.sharding.devices_indices_map(got.shape) == right.devices_indices_map(got.shape)


def test_a_gradient_of_rows_takes_one_message():
    def step(x, w, b):
        loss, grads = torch.func.grad_and_value(
            lambda w, b: ((x @ w + b).tanh() ** 2).mean(), (0, 1)
        )(w, b)[::-1]
        return loss, *grads

    values = [X, W, Y[0]]
    results, sent, reshards = spread(step, values, [P("x"), P(), P()])
    assert (sent, reshards) == ({"added_up": 1}, [])
    close(results, step(*values))


def test_rows_take_one_message_of_their_size_and_their_gradient_none():
    def step(x):
        return torch.func.grad_and_value(lambda x: (x[9] + x[6:8]).tanh().sum())(x)

    x = normal(32, 8)
    results, sent, reshards = spread(step, [x], [P("x")])
    assert (sent, reshards) == ({"added_up": 1}, [])
    assert results[0].sharding.spec == P("x")
    close(results, step(x))


def test_all_rows_one_by_one_move_once():
    x = normal(64, 8)
    results, sent, _ = spread(lambda x: [x[k].exp() for k in range(64)], [x], [P("x")])
    assert sent == {"exchanged": 1}
    close(results, list(x.exp()))


def test_a_cut_weight_is_gathered_and_its_gradient_scattered():
    def step(x, w):
        return torch.func.grad_and_value(lambda w: ((x @ w).tanh() ** 2).mean())(w)

    results, sent, reshards = spread(
        step, [X, W], [P("x"), P("x")], wanted=[P("x"), P()], weights=[1]
    )
    assert sent == {"joined": 1, "added_and_cut": 1, "added_up": 1}
    assert [(r.operation, r.before, r.after, r.num_bytes) for r in reshards] == [
        ("aten.mm.default", P("x"), P(), 512)
    ]
    close(results, step(X, W))


def test_data_that_is_no_weight_moves_to_another_dim_in_one_message():
    """JAX's compiler does the same: an all-to-all sends a part of what a gather would."""
    results, sent, _ = spread(lambda x: [x.softmax(1)], [X], [P(None, "x")])
    assert sent == {"exchanged": 1}
    torch.testing.assert_close(results[0].cpu(), X.softmax(1))
    assert results[0].sharding.spec == P("x")


def test_rows_are_put_by_the_devices_that_have_them():
    part = normal(3, X.shape[1], seed=5)

    def put(x, part):
        return [x.slice_scatter(part, 0, 3, 6), x.select_scatter(part[0], 0, -1)]

    results, sent, reshards = spread(put, [X, part], [P("x"), P()])
    assert (sent, reshards) == ({}, [])
    assert [result.sharding.spec for result in results] == [P("x")] * 2
    close([result.cpu() for result in results], put(X, part))


_aten = torch.ops.aten


def flash(q, k, v, grad):
    y, kept, rows, columns, m, n, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True
    )
    given = grad, q, k, v, y, kept, rows, columns, m, n, 0.0, True, seed, offset
    return y, *_aten._scaled_dot_product_flash_attention_backward(*given)


def cudnn(q, k, v, grad):
    y, kept, rows, columns, m, n, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True
    )
    given = grad, q, k, v, y, kept, seed, offset, None, rows, columns, m, n, 0.0, True
    return y, *_aten._scaled_dot_product_cudnn_attention_backward(*given)


def efficient(q, k, v, grad, mask=None):
    y, kept, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, 0.0, mask is None
    )
    wanted = [True, True, True, mask is not None]
    given = grad, q, k, v, mask, y, kept, seed, offset, 0.0, wanted, mask is None
    found = _aten._scaled_dot_product_efficient_attention_backward(*given)
    return y, *(x for x in found if x is not None)


def efficient_with_a_mask(q, k, v, grad):
    return efficient(q, k, v, grad, torch.zeros(4, 4, 8, 8, dtype=q.dtype, device=q.device))


@pytest.mark.parametrize("attention", [flash, cudnn, efficient, efficient_with_a_mask])
def test_the_attention_of_accelerators_keeps_rows_and_heads_apart(attention):
    """Their kernels do not run on the CPU: this is about where values lie."""
    from torchpmap._trace.graph_mode import graph_of

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(4, 4, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        module = graph_of(attention, fakes)
    mesh = tp.make_mesh(tuple(SQUARE.values()), tuple(SQUARE))
    x = tp.device_put(torch.zeros(4, 4, 8, 64), tp.NamedSharding(mesh, P("x", "y")))
    grid = common_grid([x._layout])
    emitter, cut = Emitter(grid), grid.cut_of(x._layout)
    given = [
        Value(emitter.input(f"x{k}"), tuple(fake.shape), fake.dtype, cut, ())
        for k, fake in enumerate(fakes)
    ]
    spread = Spread(module, emitter)
    count = len(module.graph.output_node().args[0])
    assert [value.cut for value in spread.run(given, [None] * count)] == [cut] * count
    assert not spread.reshards
