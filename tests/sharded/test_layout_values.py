"""Covers: values in every layout: numbers, rows, indices, writes, copies, pickles and texts."""

import copy
import pickle

import numpy as np
import pytest
import torch
from _sharded_values import fetched_bytes, numbers, on_mesh
from _spies import asked

import torchpmap as tp
from torchpmap import P

pytestmark = [pytest.mark.usefixtures("pool"), pytest.mark.parametrize("pool", [8], indirect=True)]

X = numbers(4, 8, 6)
LAYOUTS = {
    "one dim": P("x"),
    "two dims": P("x", "y"),
    "three dims": P("x", "y", "z"),
    "a dim by two axes": P(("x", "y")),
    "swapped axes and a dim": P(("y", "x"), None, "z"),
    "not the first dim": P(None, ("z", "x")),
    "all axes": P(None, ("z", "x", "y")),
}
every_layout = pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
OTHER_LAYOUTS = {
    "replicated": tp.replicate,
    "rows": lambda x: tp.device_put(x, tp.devices()[:4]),
    "reversed": lambda x: tp.device_put(x, tp.devices()[3::-1]),
    "columns": lambda x: on_mesh(x, (None, "i"), (8,)),
    "on one": lambda x: tp.device_put(x, tp.devices()[2]),
}


def put(spec, value=X):
    if spec in OTHER_LAYOUTS:
        return OTHER_LAYOUTS[spec](value)
    return on_mesh(value, spec, (2, 2, 2), ("x", "y", "z"))


def same(found, right=X):
    torch.testing.assert_close(torch.as_tensor(found), right, rtol=0, atol=0)


@pytest.mark.parametrize("spec", [*LAYOUTS.values(), *OTHER_LAYOUTS], ids=str)
def test_numbers_and_shards(spec, monkeypatch):
    x = put(spec)
    calls = asked(monkeypatch)
    same(x.cpu())
    assert fetched_bytes(calls) == X.nbytes  # one copy of each block
    same(x.to("cpu"))
    for whole_numbers in (
        x.to("cpu", torch.int32),
        x.to(dtype=torch.int32, device="cpu", copy=True),
        x.to(X.int()),
    ):
        same(whole_numbers, X.int())
    np.testing.assert_array_equal(x.numpy(), X.numpy(), strict=True)
    np.testing.assert_array_equal(np.asarray(x), X.numpy(), strict=True)
    assert np.asarray(x, dtype=np.int8).dtype == np.int8
    same(torch.tensor(x.tolist()))
    same(torch.from_dlpack(x))
    np.testing.assert_array_equal(np.from_dlpack(x), X.numpy())
    assert x.__dlpack_device__() == torch.ones(1).__dlpack_device__()
    same(torch.stack(list(x)))
    other = put(spec)  # a value that is nowhere else yet
    found = other.addressable_shards
    indices = other.sharding.devices_indices_map(X.shape)
    assert [shard.device for shard in found] == list(other.sharding.mesh.devices.flat)
    for number, shard in enumerate(found):
        assert shard.index == indices[shard.device]
        same(shard.data, X[shard.index])
        same(other.addressable_data(number), X[shard.index])
    blocks = {str(shard.index) for shard in found}
    replicas = [shard.replica_id for shard in found]
    assert all(replicas.count(k) == len(blocks) for k in range(len(found) // len(blocks)))
    with pytest.raises(IndexError):
        other.addressable_data(len(found))


@pytest.mark.parametrize("spec", [*LAYOUTS.values(), *OTHER_LAYOUTS], ids=str)
def test_rows(spec, monkeypatch):
    x = put(spec)
    calls = asked(monkeypatch)
    with tp.debug.report_gathers() as gathers:
        for row in (0, 2, -1, -4):
            same(x[row].cpu(), X[row])
        assert gathers == []
    assert fetched_bytes(calls) == 4 * X[0].nbytes
    for row in (4, -5):
        with pytest.raises(IndexError, match=f"index {row} is out of bounds for dimension 0"):
            x[row]


INDICES = [
    *((1, 2, 3), (slice(None), 1), (Ellipsis, -1), (slice(1, 3), slice(None), slice(2, 4))),
    *(None, ([0, 2],), (slice(None), [3, 1]), slice(1, 3), slice(None, None, 2), (0, 1), True),
    *((-1, slice(None)), torch.tensor([3, 0]), np.array([1, 2]), [0, 2], (slice(None), None, 0)),
    *(torch.tensor([True, False, True, False]), np.int64(2), torch.tensor(1)),
]


@every_layout
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indices(spec, index):
    same(put(spec)[index].cpu(), X[index])


@every_layout
def test_writes_of_parts(spec):
    x, right = put(spec), X.clone()
    for y in (x, right):
        y[1] = 5
        y[:, 2] += 1
        y[..., -1:] *= y[..., :1]
    same(x.cpu(), right)
    assert x.sharding.spec == spec


@every_layout
def test_copies(spec):
    x = put(spec)
    twin, alias = copy.deepcopy(x), copy.copy(x)
    same(pickle.loads(pickle.dumps(x)))
    x.zero_()
    same(twin.cpu())
    same(alias.cpu(), torch.zeros_like(X))
    assert twin.sharding == alias.sharding == x.sharding


@every_layout
def test_texts(spec):
    x = put(spec)
    assert repr(x).startswith("ShardedTensor([[[")
    assert repr(x).endswith(f" {spec} on {' '.join(map(str, tp.devices()))})")
    blocks = {str(shard.index) for shard in x.addressable_shards}
    assert x._repr_html_().count("background:hsl") == len(blocks)
