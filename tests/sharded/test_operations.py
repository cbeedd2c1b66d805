"""Covers: _sharded/tensor.py: operations on ShardedTensors (where results are: test_blocks.py)."""

import copy

import numpy as np
import pytest
import torch
from _sharded_values import LAYOUTS, ROWS, any_layout, each, on_mesh
from _spies import asked
from _support import DEVICE
from torch.nn import functional as F
from torch.nn.functional import one_hot

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

any_put = pytest.mark.parametrize("put", [tp.replicate, lambda x: on_mesh(x, ("i",))])


def same(result, expected, rtol=0.0):
    """Equal numbers, wherever they are."""
    assert isinstance(result, torch.Tensor)
    expected = torch.as_tensor(expected)
    torch.testing.assert_close(result.cpu(), expected, rtol=rtol, atol=0, equal_nan=True)


def test_equality(y):
    assert torch.equal(y, ROWS)
    assert torch.equal(y, LAYOUTS["replicated"]())
    assert not torch.equal(y, ROWS + 1)
    assert torch.allclose(y, ROWS)
    torch.testing.assert_close(y, ROWS)
    torch.testing.assert_close(ROWS, y)
    torch.testing.assert_close({"a": y}, {"a": LAYOUTS["columns"]()})
    with pytest.raises(AssertionError, match="Mismatched elements: 8 / 8"):
        torch.testing.assert_close(y, ROWS + 1)


def test_detach_and_clone_move_nothing(y, monkeypatch):
    calls = asked(monkeypatch)
    for twin in (y.detach(), y.clone(), y.data, copy.deepcopy(y), torch.clone(y)):
        assert type(twin) is tp.ShardedTensor
        assert twin.sharding == y.sharding
    assert calls == []
    twin = y.clone()
    twin.add_(1)
    same(y.cpu(), ROWS)
    y.delete()
    same(twin.cpu(), ROWS + 1)


def test_a_size_cannot_change():
    x = LAYOUTS["rows"]()
    with pytest.raises(RuntimeError):
        x.resize_(2, 2)
    assert x.shape == x.cpu().shape == (4, 2)


def test_backward(y):
    y.requires_grad_()
    ((y * ROWS).sum() + y[1].sum() + y.view(-1)[0]).backward()
    expected = ROWS.clone()
    expected[1] += 1
    expected[0, 0] += 1
    same(y.grad, expected)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        y[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"Use tensor\.detach\(\)\.numpy\(\)"):
        y.numpy()
    np.testing.assert_array_equal(y.numpy(force=True), ROWS)
    with torch.no_grad():
        y[0] = 1.0
    assert y[0].tolist() == [1.0, 1.0]
    host = y.cpu()
    assert type(host) is torch.Tensor
    assert host.requires_grad
    assert sum(row.sum() for row in y).requires_grad
    y.grad = None
    (host**2).sum().backward()
    same(y.grad, [[2.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0, 14.0]])


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("put", [LAYOUTS["rows"], LAYOUTS["columns"], LAYOUTS["replicated"]])
def test_embedding_bags(put, mode, max_norm):
    bags = torch.tensor([[0, 1], [2, 3], [3, 3]])
    here, there = ROWS.clone().requires_grad_(), put().requires_grad_()
    results = [
        torch.nn.functional.embedding_bag(bags, weight, mode=mode, max_norm=max_norm)
        for weight in (there, here)
    ]
    close(*results)
    for result in results:
        result.square().sum().backward()
    close(there.grad, here.grad)
    close(there, here)


CONJUGATING = """
    torch.linalg.pinv(z); torch.linalg.pinv(z.mH); torch.linalg.matrix_exp(z.mH @ z / 100)
    torch.linalg.lstsq(z, z[:, :2].contiguous()).solution; torch.cov(z); torch.linalg.svd(z)[1]
    (z.conj() * 1j).imag.cumsum(0); z.conj().add_(z.clone().imag.cumsum(0))
"""


@any_layout
@each("function", "z", CONJUGATING)
def test_operations_that_conjugate_on_their_way(function, put):
    value = put()
    z = torch.complex(value * 1.0, (value % 3).float()).cos()
    expected = function(z.cpu()).resolve_conj()
    torch.testing.assert_close(function(z).cpu().resolve_conj(), expected, rtol=1e-4, atol=1e-4)


NORMS = {
    "layer": lambda affine: torch.nn.LayerNorm(4, elementwise_affine=affine),
    "group": lambda affine: torch.nn.GroupNorm(4, 4, affine=affine),
    "instance": lambda affine: torch.nn.InstanceNorm1d(4, affine=affine),
    "batch": lambda affine: torch.nn.BatchNorm1d(4, affine=affine),
}


@pytest.mark.filterwarnings("ignore:InstanceNorm1d is on the devices, but its operation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weights", ["half", "float", "none"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_in_half_precision(kind, of_weights, dtype):
    """On the CPU the statistics are in half precision too, unless the weights are not."""
    if DEVICE != "cpu" and (kind, of_weights) == ("group", "float"):
        pytest.skip("group norms of GPUs want weights in the dtype of the values")
    layer = NORMS[kind](of_weights != "none").to(torch.float32 if of_weights == "float" else dtype)
    values = torch.arange(64.0).mul(7).remainder(11).reshape(4, 4, 4).to(dtype)
    for put in (tp.replicate, tp.shard_batch):
        layer.zero_grad()
        twin = copy.deepcopy(layer)._apply(tp.replicate)
        here, there = values.clone().requires_grad_(), put(values).requires_grad_()
        with tp.debug.report_gathers() as gathers:
            result = twin(there)
            result[:, :2].sum().backward()
        assert not gathers or kind == "instance"
        expected = layer(here)
        expected[:, :2].sum().backward()
        near = {} if DEVICE == "cpu" else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(result.detach().cpu(), expected.detach(), **near)
        for mine, theirs in zip(twin.buffers(), layer.buffers(), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=0.02, atol=0.02)
        pairs = [(there, here), *zip(twin.parameters(), layer.parameters(), strict=True)]
        for mine, theirs in pairs:
            assert mine.grad.dtype == theirs.grad.dtype
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("of_weights", [torch.float16, torch.float32, None])
@pytest.mark.parametrize("shape", [(4, 0), (0, 4)])
def test_layer_norms_of_nothing_in_half_precision(shape, of_weights):
    values = torch.zeros(shape, dtype=torch.float16)
    weight = None if of_weights is None else torch.ones(shape[1], dtype=of_weights)
    for put in (tp.replicate, tp.shard_batch)[: 1 + bool(shape[0])]:
        found = []
        for given in ((values.clone(), weight), (put(values), tp.replicate(weight))):
            x, w = given
            given = [each.requires_grad_() for each in given if each is not None]
            F.layer_norm(x, shape[1:], w).sum().backward()
            found.append([each.grad.cpu() for each in given])
        torch.testing.assert_close(*found)


def test_batch_norms_that_do_not_train():
    """By the names that a program made of ATen operations has for them."""
    statistics = (torch.ones(2), torch.zeros(2), torch.tensor([3.0, 4.0]), torch.ones(2))
    there = [tp.replicate(x) for x in statistics]
    aten = torch.ops.aten
    calls = [
        (aten._native_batch_norm_legit_no_training, (0.1, 1e-5)),
        (aten._native_batch_norm_legit, (False, 0.1, 1e-5)),
        (aten._batch_norm_no_update, (0.1, 1e-5)),
        (aten.native_batch_norm, (False, 0.1, 1e-5)),
    ]
    for operation, rest in calls:
        given = operation(tp.replicate(ROWS), *there, *rest)
        for left, right in zip(given, operation(ROWS, *statistics, *rest), strict=True):
            close(left, right)


def close(result, expected):
    near = {} if DEVICE == "cpu" else {"rtol": 1e-3, "atol": 1e-4}  # cuDNN's products are in TF32
    torch.testing.assert_close(result.detach().cpu(), expected.detach(), **near)


@pytest.mark.cpu_only("GPUs have no products of float8 at all")
def test_blocks_that_a_kernel_refuses_are_gathered():
    x = torch.arange(4.0).to(torch.float8_e4m3fn)  # whose products of one number torch refuses
    product = tp.device_put(x, tp.devices()) * tp.device_put(x, tp.devices())
    assert product.cpu().float().tolist() == [0, 1, 4, 9]


# What torch does below the operations of a class --------------------------------------------------


@any_put
def test_one_hot(put):
    classes = torch.arange(8).view(4, 2) % 3
    for count in (-1, 3, 5):
        result = one_hot(put(classes), count)
        assert type(result) is tp.ShardedTensor
        same(result, one_hot(classes, count))
    same(one_hot(put(classes)[:, :0], 3), one_hot(classes[:, :0], 3))
    for wrong, count in ((classes - 1, -1), (classes - 1, 3), (classes, 2)):
        with pytest.raises(RuntimeError, match=r"Class values must be"):
            one_hot(wrong, count)
        with pytest.raises(RuntimeError, match=r"index -?\d is out of bounds for dimension"):
            one_hot(put(wrong), count).cpu()
    with pytest.raises(RuntimeError, match="LongTensor"):
        one_hot(put(classes.int()), 3)


@any_put
def test_splits_at_places_on_the_devices(put):
    for places in (torch.tensor([1, 3, 3, 4]), torch.tensor(2)):
        expected = torch.tensor_split(ROWS, places)
        for x in (ROWS, put(ROWS)):
            there = put(places) if places.ndim else tp.replicate(places)
            for got, right in zip(torch.tensor_split(x, there), expected, strict=True):
                same(got, right)
