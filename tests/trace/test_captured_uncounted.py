"""Covers: _trace/environment.py, _trace/capture.py: uncounted writes outside, reads by Python."""

import array
import ctypes

import numpy as np
import pytest
import torch
from _outside import ONES, check_follows
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def inference_tensor(value):
    with torch.inference_mode():
        return torch.full((3,), value)


def storage_write(w, value):
    memory = (ctypes.c_float * 3).from_address(w.untyped_storage().data_ptr())
    memory[:] = [value] * 3


def rebound(w, value):
    w.data = torch.full((3,), value)


UNCOUNTED = {
    ".data.fill_": lambda w, value: w.data.fill_(value),
    ".data.copy_": lambda w, value: w.data.copy_(torch.full((3,), value)),
    ".data.clamp_": lambda w, value: w.data.clamp_(value, value),
    "optimizer of old": lambda w, value: w.data.add_(value - w.data),
    "detach().numpy()": lambda w, value: w.detach().numpy().fill(value),
    "DLPack": lambda w, value: torch.from_dlpack(w.detach()).fill_(value),
    "view of .data": lambda w, value: w.data.view(-1).fill_(value),
    "memory": storage_write,
    "one element": lambda w, value: [w.data[k].fill_(value) for k in range(3)],
    ".data = ": rebound,
}


@pytest.mark.parametrize("write", UNCOUNTED)
def test_writes_that_change_no_version(write):
    w = torch.nn.Parameter(torch.ones(3))
    f = tp.pmap(lambda x: (x * w).detach().sum() / 3, compile=EAGER)
    check_follows(f, lambda value: UNCOUNTED[write](w, value), [2.0, 3.0, 1.0])


LAYOUTS = {
    "dense": lambda: torch.ones(4, 3),
    "transposed": lambda: torch.ones(3, 4).T,
    "every second": lambda: torch.ones(8, 3)[::2],
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "of inference mode": lambda: inference_tensor(1.0).expand(4, 3),
    "bfloat16": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "of numpy": lambda: torch.from_numpy(np.ones((4, 3), np.float32)),
    "conjugate": lambda: torch.ones(4, 3, dtype=torch.complex64).conj(),
    "four megabytes": lambda: torch.ones(1 << 20),
}
BITS = {"0.0": -0.0, "nan": 1.0, "1.0": float("nan")}


@pytest.mark.parametrize("name", [*LAYOUTS, *BITS])
def test_tensors_of_any_layout_are_compared_by_their_bits(name):
    def read(x):
        if w.dim():
            return w.sum().real.float() * x
        return torch.copysign(x, w) + torch.nan_to_num(w)

    w = LAYOUTS[name]() if name in LAYOUTS else torch.tensor(float(name))
    f = tp.pmap(read, compile=EAGER)
    before = f(ONES).cpu()
    with torch.inference_mode():  # where a write is not counted
        w.data[(-1,) * w.dim()] = BITS.get(name, 100.0)
        expected = read(ONES)
    assert not before.equal(expected)
    assert f(ONES).cpu().equal(expected)


@pytest.mark.parametrize(
    "data", [torch.tensor([1, 2, 3, 4]), torch.ones(2, 3), torch.ones(4).double(), torch.ones(4)]
)
@pytest.mark.parametrize("put", [torch.clone, tp.replicate], ids=["plain", "replicated"])
def test_data_of_another_kind(mode, data, put):
    w = put(torch.arange(6.0).view(3, 2))
    f = tp.pmap(lambda x: (w * 2, x), compile=mode)
    f(ONES)
    w.data = w.data.t()  # the same memory
    assert f(ONES)[0].cpu()[0].equal((w * 2).cpu())
    w.data = put(data)
    result = f(ONES)[0].cpu()
    assert result[0].equal(data * 2)
    assert result.dtype == data.dtype


def test_gradients_that_are_wanted_later(mode):
    w = torch.ones(1)
    f = tp.pmap(lambda x: x * w, compile=mode)
    assert not f(ONES).requires_grad
    w.requires_grad_()
    f(ONES).sum().backward()
    assert w.grad.tolist() == [4.0]
    w.requires_grad_(False)
    assert not f(ONES).requires_grad


READS = {
    "numpy": lambda w: float(w.numpy()[0]),
    "asarray": lambda w: float(np.asarray(w)[0]),
    "tolist": lambda w: w.tolist()[0],
    "DLPack": lambda w: torch.from_dlpack(w)[0],
    "item": lambda w: w[0].item(),
    "data": lambda w: w.data[0],
    "tensor of numpy": lambda w: torch.as_tensor(w.numpy())[0],
}


@pytest.mark.filterwarnings("ignore:.*running without tracing")
@pytest.mark.cpu_only("an uncompiled function has tensors of the GPU, without a NumPy view")
@pytest.mark.parametrize("read", READS)
def test_values_that_python_reads(mode, read):
    w = torch.ones(3)
    f = tp.pmap(lambda x: x * READS[read](w), compile=mode)
    check_follows(f, lambda value: w.data.fill_(value), [2.0, 3.0, 1.0])


def test_the_comparison_can_be_switched_off(monkeypatch):
    monkeypatch.setitem(tp.config._set, "check_captured", False)
    w = torch.ones(1)
    f = tp.pmap(lambda x: x * w, compile=EAGER)
    assert f(ONES).flatten().tolist() == [1.0] * 4
    w.data.fill_(2)
    assert f(ONES).flatten().tolist() == [1.0] * 4
    w.add_(0)
    assert f(ONES).flatten().tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("array", "change"),
    [
        (np.array([1.0, None], object), lambda a: a.__setitem__(0, 2.0)),
        (np.ones((4, 4))[::2, ::2], lambda a: a.fill(2.0)),
        (np.ones(1, ">f8"), lambda a: a.fill(2.0)),
        (np.ones(2, [("a", "f8")]), lambda a: a.__setitem__(0, (2.0,))),
        (bytearray(b"\1"), lambda a: a.__setitem__(0, 2)),
        (array.array("d", [1.0]), lambda a: a.__setitem__(0, 2.0)),
    ],
    ids=["objects", "strided", "big-endian", "structured", "bytearray", "array"],
)
def test_arrays_that_python_reads(array, change):
    def first():
        value = array.ravel()[0] if isinstance(array, np.ndarray) else array[0]
        return float(value["a"] if isinstance(value, np.void) else value)

    f = tp.pmap(lambda x: x * first(), compile=EAGER)
    assert f(ONES).tolist() == [1.0] * 4
    change(array)
    assert f(ONES).tolist() == [2.0] * 4
