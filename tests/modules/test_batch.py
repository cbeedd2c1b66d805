"""Covers: _modules/batch.py: batches cut over the devices."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _support import EAGER, close, gradients
from torch import nn

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

sizes = pytest.mark.parametrize("pool", [1, 2, 4], indirect=True)


@pytest.mark.parametrize("length", [1, 3, 8])
@sizes
def test_rows_are_cut_where_they_divide(pool, length):
    batch = {"x": torch.randn(length, 3), "y": np.arange(length), "none": None}
    result = tp.shard_batch(batch)
    assert torch.equal(result["x"].cpu(), batch["x"])
    assert result["y"].tolist() == list(range(length))
    assert result["none"] is None
    for x in (result["x"], result["y"]):
        assert x.is_fully_replicated == (length % pool != 0)
        assert x.devices() == set(tp.devices())
    some = tp.devices()[pool // 2 :]
    assert tp.shard_batch(torch.arange(4), devices=some).devices() == set(some)


@pytest.mark.parametrize("length", [1, 3, 8])
@sizes
def test_stacked(pool, length):
    x = torch.arange(length * 2).reshape(length, 2)
    rows, mask = tp.shard_batch({"x": x}, stacked=True)
    each = -(-length // pool)
    assert rows["x"].shape == (pool, each, 2)
    assert mask.shape == (pool, each)
    assert torch.equal(rows["x"].cpu()[mask.cpu()], x)
    padding = rows["x"].cpu()[~mask.cpu()]
    assert torch.equal(padding, x[-1:].expand(len(padding), 2))
    assert [len(shard.data) for shard in mask.addressable_shards] == [1] * pool
    with tp.debug.fake_pmap():  # in one process batches are plain
        plain, mask = tp.shard_batch(x, stacked=True)
        assert type(plain) is torch.Tensor
        assert plain.shape[:2] == mask.shape == (pool, each)


@pytest.mark.parametrize("length", [5, 8])
@sizes
def test_a_step_is_that_of_one_device_for_any_length(pool, length):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4))
    module = tp.replicate(copy.deepcopy(plain))
    x, y = torch.randn(length, 3), torch.arange(length) % 4
    losses = []
    for net, batch in ((plain, (x, y)), (module, tp.shard_batch((x, y)))):
        torch.manual_seed(1)
        loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    close(gradients(module), gradients(plain), rtol=1e-4, atol=1e-6)
    close(module.buffers(), plain.buffers())


ERRORS = [
    ({"x": torch.ones(4), "y": torch.ones(4, 2), "z": torch.ones(3)}, ValueError,
     "all leaves of a batch must have the same number of rows (dim 0), but batch['x'] has 4 and "
     "batch['z'] has 3."),
    ([torch.ones(4), torch.tensor(1.0)], ValueError,
     "batch[1] is a number (no dims), so it has no rows to cut. Use torchpmap.replicate for a "
     "value that all devices need."),
    ([torch.ones(4), ["a", "b"]], TypeError,
     "batch[1][0] has type str, but a batch consists of tensors and arrays with one row per "
     "example. Leave it out of what is passed."),
    ([torch.ones(0, 2)], ValueError, "the batch has no rows. Leave out empty batches."),
    ([], ValueError, "the batch has no rows. Leave out empty batches."),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "kind", "message"), ERRORS)
def test_errors(batch, kind, message):
    with pytest.raises(kind) as raised:
        tp.shard_batch(batch)
    assert str(raised.value) == f"shard_batch: {message}"


def test_it_is_not_for_mapped_functions():
    with pytest.raises(RuntimeError, match="shard_batch"):
        tp.pmap(lambda x: tp.shard_batch(x), compile=EAGER)(torch.ones(4))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("length", [8, 6])
def test_gradients_of_a_batch_arrive_on_the_host(length, stacked):
    x = torch.randn(length, 3, requires_grad=True)
    weights = torch.randn(3)
    if stacked:
        rows, mask = tp.shard_batch(x, stacked=True)
        (rows * weights * mask[..., None]).sum().backward()
    else:
        (tp.shard_batch(x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights.expand(length, 3))
