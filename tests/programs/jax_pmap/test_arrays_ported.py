"""Covers: what pmap returns and takes, and the device_put functions, as JAX tests them."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from _ported import counting, pmap, same, sample
from _spies import asked
from _support import in_threads

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = counting(4, 3)


def shards(x: Any) -> list[torch.Tensor]:
    return [shard.data for shard in x.addressable_shards]


def mesh22() -> tp.Mesh:
    return tp.make_mesh((2, 2), ("a", "b"), devices=tp.devices())


# Results -----------------------------------------------------------------------------------------


def test_default_device_ordering() -> None:
    got = pmap(lambda x: x)(torch.arange(4))
    assert [shard.device for shard in got.addressable_shards] == tp.devices()


@pytest.mark.parametrize("reverse", [False, True])
def test_arrays(reverse: bool) -> None:
    devices = tp.devices()[::-1] if reverse else tp.devices()
    f = pmap(lambda x: 2 * x, devices=devices)
    y = f(X.numpy())
    assert isinstance(y, tp.ShardedTensor)
    assert isinstance(y, torch.Tensor)
    same(y, 2 * X)
    z = f(y)
    same(z, 4 * X)
    assert [shard.device for shard in z.addressable_shards] == devices
    same(pmap(lambda x: x + 1)(z), 4 * X + 1)  # also where another order is expected
    same(torch.sin(y), torch.sin(2 * X))


@pytest.mark.parametrize(
    "use",
    [lambda x, y: x + y, lambda x, y: x + y.sum(0), lambda x, y: x + y[0]],
    ids=["whole", "sum", "index"],
)
def test_arrays_captured(use: Any) -> None:
    """testArrays: a result is closed over by another function."""
    y = pmap(lambda x: 2 * x)(X)
    expected = torch.stack([use(row, 2 * X) for row in X])
    same(pmap(lambda x: use(x, y))(X), expected)


@pytest.mark.parametrize(
    ("start", "end"), [((1, 1), (1,)), ((1,), (1, 1)), ((1,), ()), ((4,), (2, 2))]
)
def test_array_reshape(start: tuple[int, ...], end: tuple[int, ...]) -> None:
    y = pmap(lambda x: x + 0)(counting(*start))
    same(y.reshape(end), counting(*start).reshape(end))


def test_array_block_until_ready() -> None:
    y = pmap(lambda x: x + 1)(X)
    assert y.block_until_ready() is y
    assert y.is_ready()


def test_array_get_item() -> None:
    y = pmap(lambda x: 2 * x)(X)
    same(y[0], 2 * X[0])
    same(y[-1, 1:], 2 * X[-1, 1:])
    same(y[1:3], 2 * X[1:3])


def test_no_copy_indexing_1d(monkeypatch: pytest.MonkeyPatch) -> None:
    y = pmap(lambda x: x + 1)(X).block_until_ready()
    calls = asked(monkeypatch)
    for k in range(4):
        same(y[k], X[k] + 1)
    monkeypatch.undo()
    fetched = [argument for name, argument in calls if name == "fetch"]
    assert all(len(list(places)) == 1 for places in fetched), fetched


def test_threadsafe_indexing() -> None:
    x = sample(4, 50, 20)
    y = pmap(lambda x: x + 0)(x)
    results = in_threads(8, lambda k: torch.stack([y[(k + j) % 4] for j in range(4)]))
    for k, got in enumerate(results):
        same(got, x.roll(-k, 0))


def test_repr() -> None:
    assert repr(pmap(lambda x: x + 1)(X)).startswith("ShardedTensor(")


def test_delete_is_idempotent() -> None:
    y = pmap(lambda x: x + 1)(X)
    y.delete()
    y.delete()
    assert y.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        y[0]


def test_jnp_stack() -> None:
    """test_jnp_stack, with torch.stack."""
    y = pmap(lambda x: 2 * x)(X)
    same(torch.stack([y[k] for k in range(4)]), 2 * X)
    same(torch.stack(tuple(y)), 2 * X)


def test_pmap_replicated_copy() -> None:
    y = pmap(lambda x: tp.psum(x, "i"), "i", out_axes=None)(X)
    same(y.clone(), X.sum(0))
    twin = copy.deepcopy(y)
    same(twin, X.sum(0))
    assert twin.is_fully_replicated
    assert len(shards(twin)) == 4


def test_array_with_pmap_sharding_copy_without_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    y = pmap(lambda x: x + 1)(X)
    calls = asked(monkeypatch)
    twins = [y.clone(), copy.deepcopy(y)]
    monkeypatch.undo()
    for twin in twins:
        assert twin.sharding == y.sharding
        same(twin, X + 1)
    assert not [call for call in calls if call[0] in ("fetch", "put")]


def test_amap() -> None:
    """test_amap: work on each device's shard between two mapped calls."""
    y = pmap(lambda x: 2 * x)(X)
    changed = [shard.data[0].sin() + k for k, shard in enumerate(y.addressable_shards)]
    z = tp.device_put_sharded(changed, [shard.device for shard in y.addressable_shards])
    same(pmap(lambda x: x + 1)(z), (2 * X).sin() + torch.arange(4.0)[:, None] + 1)


# Inputs ------------------------------------------------------------------------------------------


def test_numpy_input_sharding() -> None:
    y = pmap(lambda x: x)(np.arange(4))
    same(y, np.arange(4))
    assert y.devices() == set(tp.devices())


def test_pmap_input_array_output_array() -> None:
    x = tp.device_put(X.repeat(1, 2), tp.NamedSharding(mesh22(), tp.P(("a", "b"))))
    y = pmap(lambda x: x + 1)(x)
    same(y, X.repeat(1, 2) + 1)
    assert [tuple(block.shape) for block in shards(y)] == [(1, 6)] * 4


def test_pmap_double_input_array_output_array() -> None:
    seen = []

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        seen.append((tuple(x.shape), tuple(y.shape)))
        return x, y

    x = sample(4, 2, 2)
    mesh = mesh22()
    first = tp.device_put(x, tp.NamedSharding(mesh, tp.P(("a", "b"))))
    second = tp.device_put(x, tp.NamedSharding(mesh, tp.P("a", "b")))
    got = pmap(f, in_axes=(0, 1))(first, second.transpose(0, 1))
    same(got[0], x)
    same(got[1], x)
    assert seen == [((2, 2), (2, 2))]


def test_pmap_array_in_axes_out_axes() -> None:
    x = counting(4, 2)
    f = pmap(lambda x, y: (x, y), in_axes=(0, None), out_axes=(None, 0))
    first, second = f(x, x)
    same(first, x[0])
    assert all(torch.equal(block, x[0]) for block in shards(first))
    same(second, x.expand(4, 4, 2))
    assert all(torch.equal(block, x[None]) for block in shards(second))


def test_pmap_array_sharding_mismatch() -> None:
    x = tp.device_put(X, tp.devices()[0])
    y = pmap(lambda x: x)(x)
    same(y, X)
    assert y.devices() == set(tp.devices())


def test_pmap_array_devices_mismatch() -> None:
    x = tp.device_put(X, tp.devices()[::-1])
    y = pmap(lambda x: x)(x)
    same(y, X)
    assert [shard.device for shard in y.addressable_shards] == tp.devices()


SPECS = [tp.P(), tp.P("a"), tp.P(None, "b"), tp.P("a", "b"), tp.P(("a", "b")), tp.P("b", "a")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("in_axis", [0, 1, None])
def test_shard_args(spec: tp.PartitionSpec, in_axis: int | None) -> None:
    """testShardArgs: arguments of every layout are moved to where the call needs them."""
    x = sample(4, 4)
    placed = tp.device_put(x, tp.NamedSharding(mesh22(), spec))
    same(placed, x)
    got = pmap(lambda x: x + 1, in_axes=in_axis, axis_size=4)(placed)
    same(got, x.expand(4, 4, 4) + 1 if in_axis is None else x.movedim(in_axis, 0) + 1)


# device_put_* ------------------------------------------------------------------------------------


def test_device_put_sharded() -> None:
    x = list(sample(4, 3))
    y = tp.device_put_sharded(x, tp.devices())
    same(y, torch.stack(x))
    for shard, row, device in zip(y.addressable_shards, x, tp.devices(), strict=True):
        assert shard.device == device
        same(shard.data, row[None])


def test_device_put_sharded_pytree() -> None:
    trees = [(k, {"a": torch.full((2,), float(k))}) for k in range(4)]
    number, tree = tp.device_put_sharded(trees, tp.devices())
    same(number, torch.arange(4))
    same(tree["a"], torch.arange(4.0)[:, None].expand(4, 2))


def test_device_put_replicated() -> None:
    x = torch.arange(1.0, 5.0)
    y = tp.device_put_replicated(x, tp.devices())
    same(y, x.expand(4, 4))
    assert all(torch.equal(block, x[None]) for block in shards(y))


def test_device_put_replicated_pytree() -> None:
    tree = tp.device_put_replicated({"a": torch.arange(3), "b": (5.0,)}, tp.devices())
    same(tree["a"], torch.arange(3).expand(4, 3))
    same(tree["b"][0], torch.full((4,), 5.0))


# Random keys -------------------------------------------------------------------------------------


def test_typed_prng_key_sharded() -> None:
    def f(key: torch.Tensor) -> torch.Tensor:
        return tp.random.randint(key, (3,), 0, 1000)

    keys = tp.random.split(tp.random.key(123), 4)
    expected = torch.stack([f(key) for key in keys])
    sharded = tp.device_put_sharded(list(keys), tp.devices())
    same(pmap(f)(sharded), expected)
    replicated = tp.device_put_replicated(keys[0], tp.devices())
    same(pmap(f)(replicated), expected[0].expand(4, 3))


@pytest.mark.parametrize("rows", [4, 8])
def test_pmap_of_prng_key(rows: int) -> None:
    keys = tp.random.split(tp.random.key(77), rows)

    def f(key: torch.Tensor) -> torch.Tensor:
        first, second = tp.random.split(key)
        return tp.random.uniform(first) + tp.random.normal(second, (2,))

    expected = torch.stack([f(key) for key in keys])
    same(pmap(f)(keys), expected)
    same(tp.pmap(f, compile=False)(keys), expected)


def test_prng_key() -> None:
    keys = tp.random.split(tp.random.key(0), 4)
    same(pmap(lambda k: k)(keys), keys)
    same(pmap(lambda k: k, in_axes=None, axis_size=4)(keys[1]), keys[1].expand(4, 2))
    same(pmap(lambda k: k, in_axes=None, out_axes=None, axis_size=4)(keys[1]), keys[1])
