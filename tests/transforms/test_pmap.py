"""Covers: _transforms/pmap.py, _transforms/arguments.py and _trace/program.py: what goes in and
what comes out of a call.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")
Point = namedtuple("Point", ["x", "y"])


@dataclass
class State:
    w: torch.Tensor
    b: torch.Tensor


pytree.register_dataclass(State)  # here, so that workers that import this module know it too


def same(result, expected):
    results, spec = pytree.tree_flatten(result)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for value, want in zip(results, wanted, strict=True):
        if want is None:
            assert value is None
            continue
        torch.testing.assert_close(value, torch.as_tensor(want), rtol=0, atol=0)


ROWS = torch.arange(12.0).reshape(4, 3)  # 4 devices, 3 columns
SQUARE = torch.arange(16.0).reshape(4, 4)
X, ONE = torch.arange(4.0), torch.ones(4)


# Arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("out_axis", [0, 1, 2, -1, -2, -3])
def test_axes_are_those_of_vmap(mode, in_axis, out_axis):
    x = torch.arange(64.0).reshape(4, 4, 4)

    def f(block):
        return block.cumsum(0) * 2

    result = tp.pmap(f, in_axes=in_axis, out_axes=out_axis, compile=mode)(x)
    same(result, torch.vmap(f, in_axis, out_axis)(x))
    assert not result.is_fully_replicated


def of_named(w, x, *, scale, shift=0.0):
    return w * x * scale + shift


def of_all_kinds(a, /, b, *rest, c, d=2.0, **more):
    return a + 10 * b + 100 * sum(rest) + 1000 * c * d + 10_000 * more["e"]


def of_defaults(x, power=2, name="cube"):
    assert type(power) is int
    return x**power if name == "cube" else x


def of_statics(x, *, kind, offset=0):
    return (x.sum() if kind == "sum" else x.prod()) + offset


# (pmap in the mode of the test) -> (what a call gives, what it should)
CALLS = {
    "an axis for each argument": lambda pmap: (
        pmap(lambda a, b, c: a * b.sum() + c, in_axes=(1, None, -1))(ROWS.T, ONE[:2], ROWS.T[0]),
        ROWS * 2 + ROWS[:, :1],
    ),
    "axes that are a prefix": lambda pmap: (
        pmap(
            lambda tree, x: tree["a"][0] + tree["a"][1] + tree["b"] + x,
            in_axes=({"a": 1, "b": None}, 0),
        )({"a": [ROWS.T, ROWS.T], "b": torch.ones(3)}, ROWS),
        3 * ROWS + 1,
    ),
    "axes of a namedtuple": lambda pmap: (
        pmap(lambda t: t.x + t.y, in_axes=(Point(0, 1),))(Point(ROWS, ROWS.T)),
        ROWS * 2,
    ),
    "axes of a dataclass": lambda pmap: (
        pmap(lambda t: t.w + t.b, in_axes=(State(0, 1),))(State(ROWS, ROWS.T)),
        ROWS * 2,
    ),
    "axes of an OrderedDict": lambda pmap: (
        pmap(lambda t: t["a"] + t["b"], in_axes=(OrderedDict(b=0, a=1),))(
            OrderedDict(b=ROWS, a=ROWS.T)
        ),
        ROWS * 2,
    ),
    "axes of nested lists": lambda pmap: (
        pmap(lambda t: t[0] + t[1][0], in_axes=([0, (1,)],))([ROWS, (ROWS.T,)]),
        ROWS * 2,
    ),
    "None and an axis": lambda pmap: (
        pmap(lambda t: t["b"] * 2, in_axes=({"a": 5, "b": 0},))({"a": None, "b": ROWS}),
        ROWS * 2,
    ),
    "None": lambda pmap: (
        pmap(lambda t: t["b"] * (2 if t["a"] is None else 3))({"a": None, "b": ROWS}),
        ROWS * 2,
    ),
    "axes by name": lambda pmap: (
        pmap(of_named, in_axes={"w": None, "scale": None})(ROWS[1], ROWS, scale=10.0, shift=X),
        ROWS[1] * ROWS * 10 + X[:, None],
    ),
    "axes by name, from the back": lambda pmap: (
        pmap(of_named, in_axes={"x": 1, "scale": 1, "w": -1})(ROWS.T, ROWS.T, scale=ROWS.T),
        ROWS**3,
    ),
    "keywords are mapped on axis 0": lambda pmap: (
        pmap(lambda x, y: x + 10 * y, in_axes=1)(SQUARE, y=SQUARE),
        SQUARE.T + 10 * SQUARE,
    ),
    "keywords alone": lambda pmap: (pmap(lambda *, x: x + 1, in_axes=None)(x=ROWS), ROWS + 1),
    "parameters of all kinds": lambda pmap: (
        pmap(of_all_kinds)(ONE, ONE * 2, ONE * 3, ONE * 4, e=ONE * 6, c=ONE * 5),
        torch.tensor([1 + 20 + 700 + 10_000 + 60_000.0] * 4),
    ),
    "defaults stay Python values": lambda pmap: (pmap(of_defaults)(X), X**2),
    "statics by name": lambda pmap: (
        [
            pmap(of_statics, static_broadcasted_argnames=("kind", "offset"))(ROWS + 1, **statics)
            for statics in ({"kind": "sum"}, {"kind": "prod", "offset": 5})
        ],
        [(ROWS + 1).sum(1), (ROWS + 1).prod(1) + 5],
    ),
    "negative and several statics": lambda pmap: (
        [
            pmap(lambda op, x, n: op(x, n), static_broadcasted_argnums=(0, -1))(op, ROWS, 3)
            for op in (operator.mul, operator.add)
        ],
        [ROWS * 3, ROWS + 3],
    ),
    "axis_size without arguments": lambda pmap: (
        pmap(lambda: tp.axis_index("i") * 2, "i", axis_size=3)(),
        torch.tensor([0, 2, 4]),
    ),
    "axis_size without mapped arguments": lambda pmap: (
        pmap(lambda x: x + tp.axis_index("i"), "i", in_axes=None, axis_size=2)(10),
        torch.tensor([10, 11]),
    ),
    "outputs that are a prefix": lambda pmap: (
        pmap(
            lambda x: {"a": (x, x + 1), "b": x.sum(), "c": None}, out_axes={"a": 1, "b": 0, "c": 7}
        )(ROWS),
        {"a": (ROWS.T, ROWS.T + 1), "b": ROWS.sum(1), "c": None},
    ),
    "outputs of all kinds of trees": lambda pmap: (
        pmap(lambda x: {"z": Point(x, [x + 1]), "a": OrderedDict(q=x), "s": State(x, x * 2)})(X),
        {"z": Point(X, [X + 1]), "a": OrderedDict(q=X), "s": State(X, X * 2)},
    ),
    "outputs without tensors": lambda pmap: (
        [pmap(lambda x, out=out: out)(X) for out in (None, (), {}, [None, ()])],
        [None, (), {}, [None, ()]],
    ),
    "outputs of other layouts": lambda pmap: (
        pmap(lambda x: (x.T, x.expand(2, 2, 2), x[:, ::2], x.to(torch.complex64).conj()))(
            SQUARE.view(4, 2, 2)
        ),
        (
            SQUARE.view(4, 2, 2).mT,
            SQUARE.view(4, 1, 2, 2).expand(4, 2, 2, 2),
            SQUARE.view(4, 2, 2)[:, :, ::2],
            SQUARE.view(4, 2, 2).to(torch.complex64),
        ),
    ),
    "an empty output": lambda pmap: (pmap(lambda x: x[:0])(ROWS), torch.zeros(4, 0)),
    "a backend": lambda pmap: (pmap(lambda x: x + 1, backend="cpu")(ONE), ONE + 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name, mode):
    same(*CALLS[name](functools.partial(tp.pmap, compile=mode)))


def test_orders_and_specs_of_outputs(mode):
    out = tp.pmap(lambda x: {"z": x, "a": x + 1}, out_axes=1, compile=mode)(ROWS)
    assert list(out) == ["z", "a"]
    assert out["z"].sharding.spec == tp.P(None, "devices")


def test_wrong_calls_are_pythons_own_errors(mode):
    f = tp.pmap(lambda a, /, b=0: a, compile=mode)
    with pytest.raises(TypeError, match="positional-only"):
        f(a=ONE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        f(ONE, q=ONE)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional"):
        f(ONE, ONE, ONE)


# Outputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_out_axes_none_gives_the_first_devices_value_to_all(mode, order):
    devices = tp.devices()[::order]
    out = tp.pmap(lambda x: x * 2, out_axes=None, devices=devices, compile=mode)(X + 5)
    same(out, 10.0)
    assert out.is_fully_replicated
    assert [float(shard.data) for shard in out.addressable_shards] == [10.0] * 4
    same(tp.pmap(lambda x: x + 0, in_axes=None, axis_size=4, compile=mode)(out), ONE * 10)


def test_out_axes_none_of_reduced_and_unmapped_values(mode):
    def f(x, w):
        return tp.psum(x, "i"), w * 2, tp.axis_size("i")

    out = tp.pmap(f, "i", in_axes=(0, None), out_axes=None, compile=mode)(X, 3.0)
    assert [float(value) for value in out] == [6.0, 6.0, 4.0]
    assert all(value.is_fully_replicated for value in out)


def test_constants_and_numpy_outputs(mode):
    constants = 1, 2.0, True, 3j, np.float64(4), np.arange(2), torch.tensor(5.0)
    kinds = ("int64", "float32", "bool", "complex64", "float64", "int64", "float32")
    out = tp.pmap(lambda x: constants, compile=mode)(X)
    assert [value.dtype for value in out] == [getattr(torch, kind) for kind in kinds]
    for value, constant in zip(out, constants, strict=True):
        assert value.tolist() == [np.asarray(constant).tolist()] * 4


def test_the_same_tensor_returned_twice(mode):
    def f(x):
        y = x + 1
        return y, y, y[0], y.view(-1)

    out = tp.pmap(f, compile=mode)(ROWS)
    same(out, (ROWS + 1, ROWS + 1, ROWS[:, 0] + 1, ROWS + 1))
    out[0].add_(100)
    same(out[1], ROWS + 1)


# Devices -----------------------------------------------------------------------------------------


def test_fewer_rows_use_the_first_devices(mode):
    out = tp.pmap(lambda x: x + 1, compile=mode)(torch.zeros(3))
    assert [shard.device for shard in out.addressable_shards] == tp.devices()[:3]


def test_devices_give_the_order_of_the_axis(mode):
    devices = [tp.devices()[k] for k in (3, 0, 2)]
    f = tp.pmap(lambda x: (x, tp.axis_index("i")), "i", devices=devices, compile=mode)
    x, index = f(torch.tensor([10.0, 20.0, 30.0]))
    assert index.tolist() == [0, 1, 2]
    assert [(s.device, float(s.data)) for s in x.addressable_shards] == list(
        zip(devices, [10.0, 20.0, 30.0], strict=True)
    )
    alone = tp.pmap(lambda: tp.axis_index("i"), "i", devices=devices, compile=mode)
    assert alone().devices() == set(devices)


# Compiled ----------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_a_compiled_permutation_is_not_overwritten_while_it_travels():
    right, left = [(0, 1), (1, 2), (2, 3)], [(1, 0), (2, 1), (3, 2)]

    def diffuse(u):
        for _ in range(3):
            before, after = tp.ppermute(u[-1:], "i", right), tp.ppermute(u[:1], "i", left)
            u = u + 0.25 * (torch.cat([before, u[:-1]]) - 2 * u + torch.cat([u[1:], after]))
        return u

    u = torch.tensor([2.0, -1.0, 2.5, -0.5, 3.0, 0.0, 3.5, 0.5, 4.0, 1.0]).repeat(2)
    expected = torch.nn.functional.pad(u, (3, 3))  # the ends are zero, as where no row sends
    for _ in range(3):
        inner = expected[1:-1] + 0.25 * (expected[:-2] - 2 * expected[1:-1] + expected[2:])
        expected = torch.cat([expected[:1], inner, expected[-1:]])
        expected[:3] = expected[-3:] = 0
    diffused = tp.pmap(diffuse, axis_name="i")
    for _ in range(20):
        torch.testing.assert_close(diffused(u.reshape(4, 5)).cpu().flatten(), expected[3:-3])


@pytest.mark.inductor
def test_compiled_by_inductor():
    def f(params, x):
        loss, grads = tp.value_and_grad(lambda p: ((x @ p["w"] + p["b"]) ** 2).mean())(params)
        return tp.pmean((loss, grads), "i")

    params = {"w": torch.full((3, 2), 0.5), "b": torch.tensor([1.0, 2.0])}
    arguments = params, torch.arange(24.0).reshape(4, 2, 3)
    kinds = {"in_axes": (None, 0), "out_axes": (0, None)}
    compiled = tp.pmap(f, "i", **kinds)(*arguments)
    graph = tp.pmap(f, "i", compile=EAGER, **kinds)(*arguments)
    torch.testing.assert_close(compiled[0].to_host(), graph[0].to_host())
    torch.testing.assert_close(compiled[1]["w"].to_host(), graph[1]["w"].to_host())
    assert compiled[1]["w"].is_fully_replicated
