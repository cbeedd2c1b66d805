"""Covers: _transforms/pmap.py and _plan/plan.py: every kind of input: arrays, numbers, tensors in
any layout.
"""

import numpy as np
import pytest
import torch
from _arrays import Foreign

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def same(result, expected):
    torch.testing.assert_close(result, torch.as_tensor(expected), rtol=0, atol=0)


ROWS = torch.arange(12.0).reshape(4, 3)  # 4 devices, 3 columns


# Kinds of input ----------------------------------------------------------------------------------

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16"),
    *("float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_dtypes_are_kept(mode, dtype):
    array = np.array([[1, 0], [2, 3], [4, 5], [6, 7]]).astype(dtype)
    out = tp.pmap(lambda x: x, compile=mode)(array)
    assert out.dtype == getattr(torch, dtype)
    assert out.numpy().dtype == array.dtype
    np.testing.assert_array_equal(out, array)


def test_torch_dtypes_are_kept(mode):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.tensor([0.5, 1.0, 2.0, 3.0]).to(dtype)
        out = tp.pmap(lambda x: x, compile=mode)(x)
        assert out.dtype == dtype
        assert out.to_host().view(torch.uint8).tolist() == x.view(torch.uint8).tolist()


ARRAYS = {
    "negative strides": np.arange(8.0)[::-2],
    "backwards": np.arange(8.0).reshape(4, 2)[::-1, ::-1],
    "every second": np.repeat(np.arange(8.0).reshape(4, 2), 2, 0)[::2],
    "transposed": np.arange(8.0).reshape(2, 4).T,
    "big endian": np.arange(4, dtype=">f8"),
    "read-only": np.broadcast_to(np.float32(3), (4, 2)),
    "empty": np.empty((4, 0)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_numpy_layouts(mode, array):
    mapped, captured = tp.pmap(lambda x: (x * 1, array), compile=mode)(array)
    np.testing.assert_array_equal(mapped, array)
    np.testing.assert_array_equal(captured, np.stack([array] * 4))


TENSORS = {
    "expanded": torch.tensor(3.0).expand(4),
    "transposed": torch.arange(8.0).reshape(2, 4).T,
    "strided": torch.arange(8.0)[1::2],
    "conj": torch.tensor([1 + 2j, 3j, 4, 5]).conj(),
    "neg": torch.tensor([1 + 2j, 3j, 4, 5]).conj().imag,
    "expanded dim": torch.arange(4.0).expand(2, 4).T,
    "empty": torch.empty(4, 0),
    "size 1": torch.ones(4, 1, 3).transpose(1, 2),
}


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("axis", [0, None])
def test_tensor_layouts(mode, x, axis):
    options = {"in_axes": axis, "out_axes": (axis, None), "axis_size": 4}
    mapped, captured = tp.pmap(lambda y: (y * 1, x + 0), compile=mode, **options)(x)
    same(mapped, x)
    same(captured, x)


def test_empty_results(mode):
    out = tp.pmap(lambda x: x[:0], compile=mode)(ROWS)
    assert out.shape == (4, 0)
    assert out.tolist() == [[]] * 4


SCALARS = [
    (2.5, torch.float32),
    (3, torch.int64),
    (True, torch.bool),
    (1 + 2j, torch.complex64),
    (np.float64(2.5), torch.float64),
    (np.float16(2.5), torch.float16),
    (np.int8(3), torch.int8),
    (np.bool_(True), torch.bool),
]


@pytest.mark.parametrize(("value", "dtype"), SCALARS)
def test_scalars_are_unmapped_arguments(mode, value, dtype):
    out = tp.pmap(lambda x, s: (s, x * s), in_axes=(0, None), compile=mode)(torch.ones(4), value)
    assert out[0].dtype == dtype
    assert out[0].tolist() == [value] * 4
    assert out[1].dtype == torch.result_type(torch.ones(()), torch.as_tensor(value))
    other = tp.pmap(lambda x, s: s, in_axes=(0, None), compile=mode)(torch.ones(4), value * 0)
    assert other.tolist() == [value * 0] * 4


def test_dlpack_objects(mode):
    f = tp.pmap(lambda x: x + 1, compile=mode)
    for x in (torch.arange(4.0), torch.arange(8).view(2, 4).T, torch.arange(3.0), torch.ones(4)):
        same(f(Foreign(x)), x + 1)


def test_parameters_keep_their_values(mode):
    out = tp.pmap(lambda w: w * 2, compile=mode)(torch.nn.Parameter(ROWS))
    assert out.requires_grad
    same(out.detach(), ROWS * 2)


def test_in_place_writes_stay_inside(mode):
    def f(x, tree):
        x.add_(1)
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


# ShardedTensors in any layout --------------------------------------------------------------------


def test_results_of_four_devices_on_two(mode):
    four = tp.pmap(lambda x: x + 1, compile=mode)(ROWS)
    two = tp.pmap(lambda x: x * 2, devices=tp.devices()[2:], compile=mode)
    same(two(four.view(2, 6)), (ROWS + 1).view(2, 6) * 2)
    columns = tp.pmap(lambda x: x * 2, in_axes=1, compile=mode)
    same(columns(four), (ROWS + 1).T * 2)  # 3 rows: on three of the four devices
