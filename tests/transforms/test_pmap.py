"""Covers: _transforms/pmap.py, _transforms/arguments.py, _plan/plan.py and _trace/program.py: what
goes into a call, of every kind and layout, and what comes out.
"""

import operator
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from _arrays import Foreign
from _support import DEVICE

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")
Point = namedtuple("Point", ["x", "y"])


@dataclass
class State:
    w: torch.Tensor
    b: torch.Tensor


pytree.register_dataclass(State)  # here, so that workers that import this module know it too


def same(result, expected):
    expected = expected if isinstance(expected, tuple) else torch.as_tensor(expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


ROWS = torch.arange(12.0).reshape(4, 3)  # 4 devices, 3 columns
CUBE = torch.arange(24.0).reshape(4, 2, 3)
X, ONE, WEIGHTS = torch.arange(4.0), torch.ones(4), torch.tensor([1.0, 2.0, 3.0])


def given(*args, **kwargs):
    return args, kwargs


def on_each(*numbers):
    return tuple(torch.tensor([number] * 4) for number in numbers)


def named(w, x, *, scale, shift=0.0):
    return w * x * scale + shift


def defaults(x, power=2, name="cube"):
    assert type(power) is int
    return x**power if name == "cube" else x


def chosen(x, *, kind, offset=0):
    return (x.sum() if kind == "sum" else x.prod()) + offset


# function, options of pmap, and calls: what is given, and what is expected
CALLS = {
    "in_axes by name": (
        named, {"in_axes": {"w": None, "scale": None}},
        (given(WEIGHTS, ROWS, scale=10.0, shift=X), WEIGHTS * ROWS * 10 + X[:, None])),
    "in_axes by name, of all": (
        named, {"in_axes": {"x": 1, "scale": 1, "w": -1}},
        (given(ROWS.T, ROWS.T, scale=ROWS.T), ROWS**3)),
    "defaults stay Python values": (defaults, {}, (given(X), X**2)),
    "statics by name": (
        chosen, {"static_broadcasted_argnames": ("kind", "offset")},
        (given(ROWS + 1, kind="sum"), (ROWS + 1).sum(1)),
        (given(ROWS + 1, kind="prod", offset=5), (ROWS + 1).prod(1) + 5)),
    "negative and several statics": (
        lambda op, x, n: op(x, n), {"static_broadcasted_argnums": (0, -1), "in_axes": 0},
        (given(operator.mul, ROWS, 3), ROWS * 3),
        (given(operator.add, ROWS, 3), ROWS + 3)),
    "numbers": (
        lambda x, *numbers: numbers, {"in_axes": (0, None, None, None, None)},
        (given(X, 2.5, 3, True, 1 + 2j), on_each(2.5, 3, True, 1 + 2j)),
        (given(X, 0.5, 4, False, 2j), on_each(0.5, 4, False, 2j))),
    "arrays of other libraries": (
        lambda x: x + 1, {},
        (given(Foreign(X)), X + 1), (given(Foreign(ROWS.T)), ROWS.T + 1)),
    "the platform as backend": (lambda x: x + 1, {"backend": DEVICE}, (given(ONE * 0), [1.0] * 4)),
    "outputs of other layouts": (
        lambda x: (x.T, x.expand(2, 2, 3), x[:, ::2], x.to(torch.complex64).conj()), {},
        (given(CUBE), (CUBE.transpose(1, 2), CUBE[:, None].expand(4, 2, 2, 3), CUBE[:, :, ::2],
                       CUBE.to(torch.complex64)))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(mode, name):
    function, options, *calls = CALLS[name]
    f = tp.pmap(function, compile=mode, **options)
    for (args, kwargs), expected in calls:
        same(f(*args, **kwargs), expected)


@pytest.mark.parametrize("order", ["default", "reversed"])
def test_out_axes_none_gives_the_first_devices_value_to_all(mode, order):
    options = {"devices": tp.devices()[::-1]} if order == "reversed" else {}
    found = tp.pmap(lambda x: (x * 2, x), out_axes=None, compile=mode, **options)(X + 5)
    for out, first in zip(found, (10.0, 5.0), strict=True):
        same(out, first)
        assert out.is_fully_replicated
        assert [float(shard.data) for shard in out.addressable_shards] == [first] * 4
        same(tp.pmap(lambda x: x + 0, in_axes=None, axis_size=4, compile=mode)(out), [first] * 4)


def test_wrong_calls_are_pythons_own_errors(mode):
    f = tp.pmap(lambda a, /, b=0: a, compile=mode)
    with pytest.raises(TypeError, match="positional-only"):
        f(a=ONE)
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        f(ONE, q=ONE)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional"):
        f(ONE, ONE, ONE)


def test_devices_give_the_order_of_the_axis(mode):
    fewer = tp.pmap(lambda x: x + 1, compile=mode)(torch.zeros(3))
    assert [shard.device for shard in fewer.addressable_shards] == tp.devices()[:3]
    devices = [tp.devices()[k] for k in (3, 0, 2)]
    f = tp.pmap(lambda x: (x, tp.axis_index("i")), "i", devices=devices, compile=mode)
    x, index = f(torch.tensor([10.0, 20.0, 30.0]))
    same(index, [0, 1, 2])
    assert [s.device for s in x.addressable_shards] == devices
    assert [float(s.data) for s in x.addressable_shards] == [10.0, 20.0, 30.0]
    some = tp.devices()[1:4]
    index = tp.pmap(lambda: tp.axis_index("i"), "i", devices=some, compile=mode)()
    assert index.devices() == set(some)


def test_constants_and_numpy_outputs(mode):
    def f(x):
        return 1, 2.0, True, 3j, np.float64(4), np.arange(2), torch.tensor(5.0), x

    out = tp.pmap(f, compile=mode)(torch.zeros(4))
    dtypes = ("int64", "float32", "bool", "complex64", "float64", "int64", "float32")
    assert [value.dtype for value in out[:7]] == [getattr(torch, dtype) for dtype in dtypes]
    constants = (1, 2.0, True, 3j, 4.0, [0, 1])
    assert [value.tolist() for value in out[:6]] == [[each] * 4 for each in constants]


def test_nested_outputs_keep_their_types(mode):
    def f(x):
        return {"z": Point(x, [x + 1]), "a": OrderedDict(q=x), "s": State(x, x * 2), "n": None}

    out = tp.pmap(f, compile=mode)(X)
    assert list(out) == ["z", "a", "s", "n"]
    assert type(out["z"]) is Point
    assert type(out["a"]) is OrderedDict
    assert type(out["s"]) is State
    same(out["z"].y[0], X + 1)
    same(out["s"].b, X * 2)


def test_the_same_tensor_returned_twice(mode):
    def f(x):
        y = x + 1
        return y, y, y[0], y.view(-1)

    out = tp.pmap(f, compile=mode)(ROWS)
    same(out, (ROWS + 1, ROWS + 1, ROWS[:, 0] + 1, ROWS + 1))
    out[0].add_(100)
    same(out[1], ROWS + 1)


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


LAYOUTS = {
    "negative strides": np.arange(8.0)[::-2],
    "backwards": np.arange(8.0).reshape(4, 2)[::-1, ::-1],
    "every second": np.repeat(np.arange(8.0).reshape(4, 2), 2, 0)[::2],
    "transposed": np.arange(8.0).reshape(2, 4).T,
    "big endian": np.arange(4, dtype=">f8"),
    "read-only": np.broadcast_to(np.float32(3), (4, 2)),
    "empty array": np.empty((4, 0)),
    "expanded": torch.tensor(3.0).expand(4),
    "transposed tensor": torch.arange(8.0).reshape(2, 4).T,
    "strided": torch.arange(8.0)[1::2],
    "conj": torch.tensor([1 + 2j, 3j, 4, 5]).conj(),
    "neg": torch.tensor([1 + 2j, 3j, 4, 5]).conj().imag,
    "expanded dim": torch.arange(4.0).expand(2, 4).T,
    "empty": torch.empty(4, 0),
    "size 1": torch.ones(4, 1, 3).transpose(1, 2),
}


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("axis", [0, None])
def test_layouts(mode, x, axis):
    options = {"in_axes": axis, "out_axes": (axis, None), "axis_size": 4}
    is_array = isinstance(x, np.ndarray)
    expected = torch.tensor(x.tolist(), dtype=getattr(torch, x.dtype.name)) if is_array else x
    for found in tp.pmap(lambda y: (y * 1, x), compile=mode, **options)(x):
        same(found, expected)


def test_in_place_writes_stay_inside(mode):
    def f(x, tree):
        torch.add(x, 0.25, out=x)
        torch._foreach_add_([x.view(-1)], 0.75)
        tree["y"][0] = 100.0
        tree["y"].mul_(x[0])
        return x, tree["y"]

    g = tp.pmap(f, in_axes=(0, None), compile=mode)
    x, y = ROWS.clone(), torch.ones(2)
    array = ROWS.numpy().copy()
    sharded, replicated = tp.device_put(x, tp.devices()), tp.replicate(y)
    for first, second in ((x, y), (array, y.numpy()), (sharded, replicated)):
        for _ in range(2):
            out = g(first, {"y": second})
            same(out[0], ROWS + 1)
            same(out[1], torch.tensor([100.0, 1.0]) * (ROWS[:, :1] + 1))
        same(torch.as_tensor(first), ROWS)
        same(torch.as_tensor(second), torch.ones(2))


def test_an_argument_returned_unchanged_is_a_value_of_its_own(mode):
    x = tp.device_put(ROWS, tp.devices())
    out = tp.pmap(lambda x: x, compile=mode)(x)
    x.delete()
    same(out, ROWS)


def test_a_mapped_function_inside_leaves_its_argument_alone(mode):
    def outer(x):
        doubled = tp.pmap(lambda t: t.mul_(2), "inner")(x)
        seen = tp.pmap(lambda t: t[None], "inner")(x)
        x.add_(1)
        return x, doubled, seen[:, 0]

    x = torch.arange(8.0).reshape(4, 2)
    mine = tp.pmap(outer, compile=mode)(x.clone())
    for found, right in zip(mine, (x + 1, x * 2, x), strict=True):
        assert torch.equal(found.cpu(), right)
