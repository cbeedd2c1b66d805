"""Covers: _sharded/tensor.py, shown.py: a Tensor whose data is elsewhere, and how it is shown."""

import copy
import io
import operator
import os
import pickle
import re
import signal

import numpy as np
import pytest
import torch
from _sharded_values import LAYOUTS, ROWS, each
from _spies import asked
from _support import DEVICE, EAGER, running_pool, wait_for, worker_pids

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def same(result, expected, kind=torch.Tensor):
    assert type(result) is kind
    torch.testing.assert_close(result, torch.as_tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_is_a_tensor_without_moving_data(y, monkeypatch):
    calls = asked(monkeypatch)
    assert isinstance(y, torch.Tensor)
    assert isinstance(y, tp.ShardedTensor)
    assert (y.shape, y.dtype, y.ndim, len(y)) == ((4, 2), torch.float32, 2, 4)
    assert (y.numel(), y.nbytes, y.device, y.layout) == (8, 32, torch.device("cpu"), torch.strided)
    assert y.is_floating_point()
    assert not y.requires_grad
    assert not y.is_shared()
    assert y.is_leaf
    assert hash(y) == hash(y)
    assert y.sharding.spec == tp.P("i")
    assert y.devices() == set(tp.devices())
    assert not y.is_deleted()
    assert y.is_fully_addressable
    assert calls == []


def test_repr(y):
    where = f"{DEVICE}:0 {DEVICE}:1 {DEVICE}:2 {DEVICE}:3"
    assert repr(y) == (
        "ShardedTensor([[0., 1.],\n        [2., 3.],\n        [4., 5.],\n        [6., 7.]], "
        f"rows of dim 0 on {where})"
    )
    assert str(y) == f"{y}" == repr(y)
    columns = tp.pmap(lambda x: x + 0, out_axes=1, compile=EAGER)(ROWS)
    assert repr(columns).endswith(f", rows of dim 1 on {where})")
    assert repr(tp.replicate(torch.tensor(2))) == f"ShardedTensor(2, replicated on {where})"
    assert repr(LAYOUTS["2x2"]()).endswith(f"PartitionSpec('x', 'y') on {where})")
    y.delete()
    assert repr(y) == "ShardedTensor(shape=[4, 2], deleted by delete())"


def test_arrays_are_copies(y):
    array = y.numpy()
    array[:] = -1
    np.asarray(y)[:] = -2
    torch.from_dlpack(y).fill_(-3)
    same(y.cpu(), ROWS)
    with pytest.raises(ValueError, match="always a copy"):
        np.array(y, copy=False)


def test_scalars():
    for x in (tp.device_put(torch.tensor(3)), tp.replicate(torch.tensor(3))):
        assert (int(x), float(x), bool(x), x.item(), complex(x)) == (3, 3.0, True, 3, 3 + 0j)
        assert [10, 20, 30, 40][x] == 40
        assert f"{x:d} {x}" == "3 3"
        for call in (len, iter, lambda x: x[0], lambda x: [*x]):
            with pytest.raises((TypeError, IndexError)) as expected:
                call(torch.tensor(3))
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                call(x)
    assert f"{tp.replicate(torch.tensor(0.12345)):.3f}" == "0.123"
    assert f"{tp.replicate(torch.ones(4))}".startswith("ShardedTensor([1., 1., 1., 1.]")
    assert len(tp.pmap(lambda x: x, compile=EAGER)(torch.ones(4))) == 4
    for call in (float, bool, operator.index, torch.Tensor.item):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
            call(torch.ones(4))
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            call(tp.replicate(torch.ones(4)))


def test_numpy_and_matplotlib_accept_it(y):
    for function in (np.sum, np.mean, np.sin, np.transpose, np.linalg.norm):
        np.testing.assert_allclose(function(np.asarray(y)), function(ROWS.numpy()))
        np.testing.assert_allclose(function(y.numpy()), function(ROWS.numpy()))
    np.testing.assert_array_equal(np.concatenate([y, y]), np.concatenate([ROWS, ROWS]))
    np.testing.assert_array_equal(np.stack([y, y])[1], ROWS)
    np.testing.assert_array_equal(y, ROWS)
    np.testing.assert_allclose(np.interp(y, [0, 10], [0, 20]), ROWS * 2)
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    (line, _) = axes.plot(y)
    np.testing.assert_array_equal(line.get_ydata(), ROWS[:, 0])
    axes.scatter(y[:, 0], y[:, 1])
    axes.imshow(y)
    pyplot.close(figure)


def test_indices_on_the_devices_and_iteration(y, monkeypatch):
    where = tp.replicate(torch.tensor([3, 1]))
    same(y[where].cpu(), ROWS[[3, 1]])
    same(ROWS[where].cpu(), ROWS[[3, 1]])
    mask = tp.device_put(torch.tensor([True, False, True, False]), tp.devices())
    same(y[mask], ROWS[[0, 2]])
    calls = asked(monkeypatch)
    first, *_, last = rows = [*y]
    assert "fetch" not in [name for name, _ in calls]
    for row, expected in zip((*rows, first, last), (*ROWS, ROWS[0], ROWS[-1]), strict=True):
        same(row, expected, tp.ShardedTensor)
    assert 3.0 in y
    assert 9.0 not in y


def test_pickles_are_plain_tensors(y):
    same(pickle.loads(pickle.dumps(y)), ROWS)
    again = pickle.loads(pickle.dumps({"a": y.requires_grad_()}))["a"]
    assert again.requires_grad
    file = io.BytesIO()
    torch.save({"y": y.detach()}, file)
    file.seek(0)
    same(torch.load(file)["y"], ROWS)


def test_copies(y):
    twin = copy.deepcopy({"y": y, "again": y})
    assert twin["y"] is twin["again"]
    assert twin["y"] is not y
    y.delete()
    assert twin["y"].tolist() == ROWS.tolist()
    with pytest.raises(TypeError, match="made by pmap"):
        tp.ShardedTensor([1, 2])


def test_deleted_values_say_so(y):
    twin = y.detach()
    y.delete()
    y.delete()
    assert y.is_deleted()
    assert (y.shape, y.dtype, len(y)) == ((4, 2), torch.float32, 4)
    uses = [
        *(y.numpy, y.tolist, y.cpu, y.devices, y.block_until_ready, y.is_ready, y.clone),
        *(lambda: y + 1, lambda: y[0], lambda: y[0:1], lambda: list(y), lambda: np.asarray(y)),
        *(lambda: y.to("cpu"), lambda: y.sum().item(), lambda: y.sharding, lambda: y.add_(1)),
        *(lambda: y.addressable_shards, lambda: y.addressable_data(0)),
        *(lambda: y.is_fully_replicated, lambda: operator.setitem(y, 0, 1.0)),
        *(lambda: pickle.dumps(y), lambda: copy.deepcopy(y), lambda: torch.from_dlpack(y)),
        *(lambda: torch.equal(y, ROWS), lambda: tp.device_get(y), lambda: tp.unreplicate(y)),
        *(lambda: tp.device_put(y, tp.devices()), lambda: tp.block_until_ready([y])),
        lambda: tp.pmap(lambda x: x, compile=EAGER)(y),
        lambda: tp.pmap(lambda x: x, compile=False)(y),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=r"type float32\[4, 2\] has been deleted by delete"):
            use()
    same(twin.cpu(), ROWS)


NUMBERS = [torch.tensor(x) for x in (2.5, -3, True, 1.5 + 2j)]
NUMBERS.append(torch.tensor(2.5, dtype=torch.float16))
CONSTRUCTORS = """
    torch.tensor([a, b]); torch.as_tensor([a, b]); torch.tensor((a, b)); a.new_tensor([a, b])
    torch.tensor([[a, 1], [0, b]]); torch.tensor([a, b], dtype=a.dtype); torch.Tensor([a, b])
    torch.ones(1).new_tensor([a, b]); torch.tensor([a.expand(2), b.expand(2)])
    torch.tensor([a.reshape(1, 1), b.reshape(1, 1)])
    torch.from_numpy(np.array([a.abs() * 1.0, b.abs() * 1.0]))
"""


@each("make", "a, b", CONSTRUCTORS)
@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_tensors_of_numbers_on_the_devices(make, number):
    def result(x):
        try:
            return make(x, x * 1)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error)

    expected, there = result(number), result(tp.replicate(number))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(there, expected)
        assert there.dtype == expected.dtype
    else:
        assert there is expected


def test_tensors_of_rows_of_replicated_values():
    x, y = tp.replicate(torch.arange(3.0)), tp.shard_batch(torch.arange(4.0))
    assert torch.tensor([x[0], x[2], y[3], y.requires_grad_().sum()]).tolist() == [0, 2, 3, 6]


def test_numbers_and_blocks(y):
    for value in (y, y.requires_grad_() * 1):
        html = value._repr_html_()
        assert "float32[4, 2], cut along dim 0; 32 B, 8 B per device" in html
        assert "[[0., 1.],\n [2., 3.],\n [4., 5.],\n [6., 7.]]" in html
        assert [html.count(f">{DEVICE}:{k}</td>") for k in range(4)] == [1] * 4


def test_a_large_value_is_not_waited_for(monkeypatch):
    large = tp.device_put(torch.zeros(4, 300, dtype=torch.int16), tp.devices())
    calls = asked(monkeypatch)
    where = f"rows of dim 0 on {DEVICE}:0 {DEVICE}:1 {DEVICE}:2 {DEVICE}:3"
    assert repr(large) == f"ShardedTensor(shape=[4, 300], dtype=torch.int16, {where})"
    html = large._repr_html_()
    assert "int16[4, 300], cut along dim 0; 2.4 kB, 600 B per device" in html
    assert "<pre" not in html
    assert calls == []


def step(x):
    tp.debug.assert_replicated(x, "i")
    return x


def test_what_is_gone_is_left_to_repr(y):
    failed = tp.pmap(step, "i", compile=EAGER)(torch.arange(4.0))
    assert failed._repr_html_() is None
    with pytest.raises(ValueError, match="assert_replicated: x differs"):
        repr(failed)
    x, lost = tp.replicate(torch.zeros(2)), tp.device_put(ROWS, tp.devices())
    y.delete()
    assert y._repr_html_() is None
    assert "deleted" in repr(y)
    large = tp.device_put(torch.zeros(4, 300), tp.devices())
    os.kill(worker_pids()[2], signal.SIGKILL)
    assert wait_for(lambda: running_pool().broken)
    assert lost._repr_html_() is None
    with pytest.raises(tp.ShardLost, match=rf"shard on device {DEVICE}:2 is lost"):
        repr(lost)
    assert f"{DEVICE}:2" in large._repr_html_()  # as its text: where it is, without asking
    tp.shutdown()
    assert x._repr_html_() is None
    assert "shut down" in repr(x)


def test_ipython_shows_both():
    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    data, _ = formatter.format(tp.replicate(torch.arange(2)))
    assert data["text/plain"].startswith("ShardedTensor([0, 1], replicated")
    assert "<table" in data["text/html"]
