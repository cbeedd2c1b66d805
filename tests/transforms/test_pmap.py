"""Covers: _transforms/pmap.py, _transforms/arguments.py and _trace/program.py: what goes in and
what comes out of a call.
"""

import operator
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from _support import EAGER

import torchpmap as tp
from torchpmap._transforms.call import Static

pytestmark = pytest.mark.usefixtures("pool")
Point = namedtuple("Point", ["x", "y"])


@dataclass
class State:
    w: torch.Tensor
    b: torch.Tensor


pytree.register_dataclass(State)  # here, so that workers that import this module know it too


def same(result, expected):
    torch.testing.assert_close(result, torch.as_tensor(expected), rtol=0, atol=0)


ROWS = torch.arange(12.0).reshape(4, 3)  # 4 devices, 3 columns


# in_axes and out_axes ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("out_axis", [0, 1, 2, -1, -2, -3])
def test_axes_are_those_of_vmap(mode, in_axis, out_axis):
    x = torch.arange(64.0).reshape(4, 4, 4)

    def f(block):
        return block.cumsum(0) * 2

    result = tp.pmap(f, in_axes=in_axis, out_axes=out_axis, compile=mode)(x)
    same(result, torch.vmap(f, in_axis, out_axis)(x))
    assert not result.is_fully_replicated


def test_in_axes_per_argument(mode):
    f = tp.pmap(lambda a, b, c: a * b.sum() + c, in_axes=(1, None, -1), compile=mode)
    same(f(ROWS.T, torch.ones(2), ROWS.T[0]), ROWS * 2 + ROWS[:, :1])


def test_in_axes_is_a_prefix(mode):
    f = tp.pmap(
        lambda tree, x: tree["a"][0] + tree["a"][1] + tree["b"] + x,
        in_axes=({"a": 1, "b": None}, 0),
        compile=mode,
    )
    tree = {"a": [ROWS.T, ROWS.T], "b": torch.ones(3)}
    same(f(tree, ROWS), 3 * ROWS + 1)


@pytest.mark.parametrize(
    ("tree", "in_axes", "get"),
    [
        (Point(ROWS, ROWS.T), Point(0, 1), lambda t: t.x + t.y),
        (State(ROWS, ROWS.T), State(0, 1), lambda t: t.w + t.b),
        (OrderedDict(b=ROWS, a=ROWS.T), OrderedDict(b=0, a=1), lambda t: t["a"] + t["b"]),
        ([ROWS, (ROWS.T,)], [0, (1,)], lambda t: t[0] + t[1][0]),
        ({"a": None, "b": ROWS}, {"a": 5, "b": 0}, lambda t: t["b"] * 2),
        ({"a": None, "b": ROWS}, 0, lambda t: t["b"] * (2 if t["a"] is None else 3)),
    ],
    ids=["namedtuple", "dataclass", "OrderedDict", "nested", "None and an axis", "None"],
)
def test_in_axes_of_trees(mode, tree, in_axes, get):
    same(tp.pmap(get, in_axes=(in_axes,), compile=mode)(tree), ROWS * 2)


def test_in_axes_by_parameter_name(mode):
    def f(w, x, *, scale, shift=0.0):
        return w * x * scale + shift

    g = tp.pmap(f, in_axes={"w": None, "scale": None}, compile=mode)
    weights = torch.tensor([1.0, 2.0, 3.0])
    expected = weights * ROWS * 10 + torch.arange(4.0)[:, None]
    same(g(weights, ROWS, scale=10.0, shift=torch.arange(4.0)), expected)
    g = tp.pmap(f, in_axes={"x": 1, "scale": 1, "w": -1}, compile=mode)
    same(g(ROWS.T, ROWS.T, scale=ROWS.T), ROWS**3)


def test_keyword_arguments_are_mapped_on_axis_0(mode):
    f = tp.pmap(lambda x, y: x + 10 * y, in_axes=1, compile=mode)
    square = torch.arange(16.0).reshape(4, 4)
    same(f(square, y=square), square.T + 10 * square)
    g = tp.pmap(lambda *, x: x + 1, in_axes=None, compile=mode)
    same(g(x=ROWS), ROWS + 1)


def test_out_axes_is_a_prefix(mode):
    def f(x):
        return {"a": (x, x + 1), "b": x.sum(), "c": None}

    g = tp.pmap(f, out_axes={"a": 1, "b": 0, "c": 7}, compile=mode)
    out = g(ROWS)
    same(out["a"][0], ROWS.T)
    same(out["a"][1], ROWS.T + 1)
    same(out["b"], ROWS.sum(1))
    assert out["c"] is None
    assert out["a"][0].sharding.spec == tp.P(None, "devices")


def test_out_axes_none_gives_the_first_devices_value_to_all(mode):
    f = tp.pmap(lambda x: x * 2, out_axes=None, compile=mode)
    out = f(torch.arange(4.0) + 5)
    same(out, 10.0)
    assert out.is_fully_replicated
    assert [float(shard.data) for shard in out.addressable_shards] == [10.0] * 4
    back = tp.pmap(lambda x: x + 0, in_axes=None, axis_size=4, compile=mode)(out)
    same(back, [10.0] * 4)


def test_out_axes_none_with_other_device_order(mode):
    devices = tp.devices()[::-1]
    out = tp.pmap(lambda x: x, out_axes=None, devices=devices, compile=mode)(torch.arange(4.0) + 7)
    assert [float(shard.data) for shard in out.addressable_shards] == [7.0] * 4


def test_out_axes_none_of_reduced_and_unmapped_values(mode):
    def f(x, w):
        return tp.psum(x, "i"), w * 2, tp.axis_size("i")

    out = tp.pmap(f, "i", in_axes=(0, None), out_axes=None, compile=mode)(torch.arange(4.0), 3.0)
    assert [float(value) for value in out] == [6.0, 6.0, 4.0]
    assert all(value.is_fully_replicated for value in out)


def test_check_replicated(mode):
    def f(x):
        return {"same": tp.pmean(x, "i"), "other": [x]}

    g = tp.pmap(f, "i", out_axes=None, check_replicated=True, compile=mode)
    with pytest.raises(
        ValueError, match=r"out_axes is None for the output of f\['other'\]\[0\], but"
    ) as e:
        g(torch.tensor([1.0, 1.0, 1.5, 1.0]))
    assert "(largest difference 0.5)" in str(e.value)
    same(g(torch.ones(4))["other"][0], 1.0)
    nan = torch.full((4,), float("nan"))
    assert torch.isnan(g(nan)["other"][0].to_host())


def test_check_replicated_knows_nan_and_integers(mode):
    g = tp.pmap(lambda x: x, out_axes=None, check_replicated=True, compile=mode)
    with pytest.raises(ValueError, match="largest difference inf"):
        g(torch.tensor([1.0, float("nan"), 1.0, 1.0]))
    with pytest.raises(ValueError, match="largest difference 1"):
        g(torch.tensor([True, True, True, False]))
    assert int(g(torch.full((4,), 2**40))) == 2**40


# Signatures --------------------------------------------------------------------------------------


def test_kinds_of_parameters(mode):
    def f(a, /, b, *rest, c, d=2.0, **more):
        return a + 10 * b + 100 * sum(rest) + 1000 * c * d + 10_000 * more["e"]

    one = torch.ones(4)
    out = tp.pmap(f, compile=mode)(one, one * 2, one * 3, one * 4, e=one * 6, c=one * 5)
    same(out, [1 + 20 + 700 + 10_000 + 60_000.0] * 4)


def test_wrong_calls_are_pythons_own_errors(mode):
    f = tp.pmap(lambda a, /, b=0: a, compile=mode)
    with pytest.raises(TypeError, match="positional-only"):
        f(a=torch.ones(4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        f(torch.ones(4), q=torch.ones(4))
    with pytest.raises(TypeError, match="takes from 1 to 2 positional"):
        f(torch.ones(4), torch.ones(4), torch.ones(4))


def test_defaults_stay_python_values(mode):
    def f(x, power=2, name="cube"):
        assert type(power) is int
        return x**power if name == "cube" else x

    same(tp.pmap(f, compile=mode)(torch.arange(4.0)), torch.arange(4.0) ** 2)


def test_statics_by_number_are_told_apart_by_type():
    seen = []

    def f(x, n):
        seen.append(n)
        return x * n

    g = tp.pmap(f, static_broadcasted_argnums=1, in_axes=(0, None), compile=EAGER)
    x = torch.ones(4, dtype=torch.int64)
    assert [g(x, n).dtype for n in (1, 1.0, True, 1)] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
    ]
    assert [type(n) for n in seen] == [int, float, bool]


def test_equal_statics_of_two_types_differ():
    assert Static(1) == Static(1)
    assert Static(1) != Static(1.0)
    assert Static(1) != Static(True)
    assert Static(1) != 1


def test_statics_by_name(mode):
    def f(x, *, kind, offset=0):
        return (x.sum() if kind == "sum" else x.prod()) + offset

    g = tp.pmap(f, static_broadcasted_argnames=("kind", "offset"), compile=mode)
    same(g(ROWS + 1, kind="sum"), (ROWS + 1).sum(1))
    same(g(ROWS + 1, kind="prod", offset=5), (ROWS + 1).prod(1) + 5)


def test_negative_and_several_statics(mode):
    f = tp.pmap(
        lambda op, x, n: op(x, n), static_broadcasted_argnums=(0, -1), in_axes=0, compile=mode
    )
    same(f(operator.mul, ROWS, 3), ROWS * 3)
    same(f(operator.add, ROWS, 3), ROWS + 3)


def test_axis_size_without_mapped_arguments(mode):
    f = tp.pmap(lambda: tp.axis_index("i") * 2, "i", axis_size=3, compile=mode)
    same(f(), [0, 2, 4])
    g = tp.pmap(lambda x: x + tp.axis_index("i"), "i", in_axes=None, axis_size=2, compile=mode)
    same(g(10), [10, 11])
    devices = tp.devices()[1:4]
    h = tp.pmap(lambda: tp.axis_index("i"), "i", devices=devices, compile=mode)
    assert h().devices() == set(devices)


# Devices -----------------------------------------------------------------------------------------


def test_fewer_rows_use_the_first_devices(mode):
    out = tp.pmap(lambda x: x + 1, compile=mode)(torch.zeros(3))
    assert [shard.device for shard in out.addressable_shards] == tp.devices()[:3]


def test_devices_give_the_order_of_the_axis(mode):
    devices = [tp.devices()[k] for k in (3, 0, 2)]
    f = tp.pmap(lambda x: (x, tp.axis_index("i")), "i", devices=devices, compile=mode)
    x, index = f(torch.tensor([10.0, 20.0, 30.0]))
    same(index, [0, 1, 2])
    assert [(s.device, float(s.data)) for s in x.addressable_shards] == list(
        zip(devices, [10.0, 20.0, 30.0], strict=True)
    )


def test_backend_names_the_platform():
    same(tp.pmap(lambda x: x + 1, backend="cpu", compile=EAGER)(torch.zeros(4)), [1.0] * 4)


# Outputs -----------------------------------------------------------------------------------------


def test_constants_and_numpy_outputs(mode):
    def f(x):
        return 1, 2.0, True, 3j, np.float64(4), np.arange(2), torch.tensor(5.0), x

    out = tp.pmap(f, compile=mode)(torch.zeros(4))
    assert [value.dtype for value in out[:7]] == [
        *(torch.int64, torch.float32, torch.bool, torch.complex64, torch.float64, torch.int64),
        torch.float32,
    ]
    assert [value.tolist() for value in out[:6]] == [
        [1] * 4,
        [2.0] * 4,
        [True] * 4,
        [3j] * 4,
        [4.0] * 4,
        [[0, 1]] * 4,
    ]


@pytest.mark.parametrize("out", [None, (), {}, [None, ()]], ids=repr)
def test_outputs_without_tensors(mode, out):
    assert tp.pmap(lambda x: out, compile=mode)(torch.zeros(4)) == out


def test_nested_outputs_keep_their_types(mode):
    def f(x):
        return {"z": Point(x, [x + 1]), "a": OrderedDict(q=x), "s": State(x, x * 2), "n": None}

    out = tp.pmap(f, compile=mode)(torch.arange(4.0))
    assert list(out) == ["z", "a", "s", "n"]
    assert type(out["z"]) is Point
    assert type(out["a"]) is OrderedDict
    assert type(out["s"]) is State
    same(out["z"].y[0], torch.arange(4.0) + 1)
    same(out["s"].b, torch.arange(4.0) * 2)


def test_the_same_tensor_returned_twice(mode):
    def f(x):
        y = x + 1
        return y, y, y[0], y.view(-1)

    out = tp.pmap(f, compile=mode)(ROWS)
    for value, expected in zip(out, (ROWS + 1, ROWS + 1, ROWS[:, 0] + 1, ROWS + 1), strict=True):
        same(value, expected)
    out[0].add_(100)
    same(out[1], ROWS + 1)


def test_outputs_of_other_layouts(mode):
    out = tp.pmap(
        lambda x: (x.T, x.expand(2, 2, 3), x[:, ::2], x.to(torch.complex64).conj()), compile=mode
    )(torch.arange(24.0).reshape(4, 2, 3))
    x = torch.arange(24.0).reshape(4, 2, 3)
    same(out[0], x.transpose(1, 2))
    same(out[1], x[:, None].expand(4, 2, 2, 3))
    same(out[2], x[:, :, ::2])
    same(out[3], x.to(torch.complex64))


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
