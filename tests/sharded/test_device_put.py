"""Covers: _sharded/device_put.py and the device queries of _runtime/current.py."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _arrays import Foreign
from _spies import asked
from _support import DEVICE, EAGER, OTHER

import torchpmap as tp
from torchpmap import NamedSharding, P, make_mesh
from torchpmap._sharded import device_put as device_put_module

pytestmark = pytest.mark.usefixtures("pool")
X = torch.arange(8.0).reshape(4, 2)


def placed(value):
    """Per device: its part of the value."""
    return {shard.device.id: shard.data.tolist() for shard in value.addressable_shards}


def test_on_one_device():
    device = tp.devices()[2]
    x = tp.device_put(X, device)
    assert placed(x) == {2: X.tolist()}
    assert x.devices() == {device}
    assert tp.device_put(X).devices() == {tp.devices()[0]}


def test_rows_on_a_list_of_devices():
    devices = tp.devices()[::-1]
    x = tp.device_put(X, devices)
    assert placed(x) == {3 - k: [X[k].tolist()] for k in range(4)}
    assert x.tolist() == X.tolist()
    assert placed(tp.device_put(X[:2], tuple(devices[:2]))) == {3: [[0.0, 1.0]], 2: [[2.0, 3.0]]}
    assert tp.device_put(torch.empty(4, 0), tp.devices()).tolist() == [[]] * 4
    assert tp.replicate(torch.empty(0)).tolist() == []


def test_trees_scalars_and_dtypes():
    tree = {
        "tensor": X.to(torch.bfloat16), "array": np.arange(4, dtype=np.uint16), "number": 3.5,
        "scalar": np.float16(2), "none": None, "parameter": torch.nn.Parameter(X),
        "foreign": Foreign(torch.arange(3)), "nested": [(True,)],
    }  # fmt: skip
    out = tp.device_put(tree, tp.devices()[1])
    assert list(out) == list(tree)
    assert out["none"] is None
    dtypes = {key: leaf.dtype for key, leaf in out.items() if isinstance(leaf, torch.Tensor)}
    assert dtypes == {
        "tensor": torch.bfloat16, "array": torch.uint16, "number": torch.float32,
        "scalar": torch.float16, "parameter": torch.float32, "foreign": torch.int64,
    }  # fmt: skip
    assert out["parameter"].requires_grad
    assert out["parameter"].is_leaf
    assert not out["tensor"].requires_grad
    assert out["nested"][0][0].item() is True
    assert out["array"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [
        *(kind(3) for kind in (np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32)),
        *(np.uint64(2**63 + 5), np.ulonglong(2**63 + 5), np.int64(-5), np.longlong(-5)),
        *(np.float16(1.5), np.float32(1.5), np.float64(1.5), np.bool_(True)),
        *(np.complex64(1j), np.complex128(1j)),
        *(np.array([2**63 + 5], np.ulonglong), np.array([1, 2], ">i4"), np.array([1, 2], ">u8")),
    ],
    ids=lambda value: value.dtype.str,
)
def test_numpy_scalars_and_arrays_of_every_dtype(value):
    mapped = tp.pmap(lambda x, k: k, in_axes=(0, None), out_axes=None, compile=EAGER)
    results = [tp.replicate(value), tp.device_put(value), mapped(torch.ones(2), value)]
    if value.dtype.kind != "u" or value.dtype.itemsize == 1:  # torch adds no others
        results.append(tp.scan(lambda carry, x: (carry.clone(), x), value, torch.ones(2))[0])
        gathered = tp.pmap(lambda x: tp.all_gather(value, "i"), "i", compile=EAGER)(torch.ones(1))
        results.append(gathered[0, 0])
    for result in results:
        assert np.asarray(result).dtype.str == value.dtype.newbyteorder("=").str
        np.testing.assert_array_equal(np.asarray(result), value)


def test_the_source_is_copied():
    x, array = X.clone(), X.numpy().copy()
    there = tp.device_put([x, array], tp.devices())
    x.fill_(-1)
    array[:] = -1
    assert there[0].tolist() == there[1].tolist() == X.tolist()


def test_what_is_already_there_does_not_move(monkeypatch):
    x = tp.device_put(X, tp.devices())
    calls = asked(monkeypatch)
    again = tp.device_put(x, tp.devices())
    by_mesh = tp.device_put(x, NamedSharding(make_mesh((4,), ("q",), devices=tp.devices()), P("q")))
    assert calls == []
    assert by_mesh.sharding.spec == P("q")
    x.delete()
    assert again.tolist() == by_mesh.tolist() == X.tolist()
    tp.device_put(again, tp.devices()[::-1])
    assert [name for name, _ in calls].count("put") == 1


def test_a_place_for_each_part_of_a_tree():
    tree = {"w": X, "b": [X, {"c": X}], "n": None}
    places = {"w": mesh_sharding("x"), "b": [tp.devices()[1], tp.P(None, "x")], "n": None}
    with tp.set_mesh(mesh_sharding().mesh):
        put = tp.device_put(tree, places)
    found = [put["w"], put["b"][0], put["b"][1]["c"]]
    assert [x.tolist() for x in found] == [X.tolist()] * 3
    assert [x.sharding.spec for x in found] == [tp.P("x"), tp.P(), tp.P(None, "x")]
    assert found[1].devices() == {tp.devices()[1]}
    assert put["n"] is None
    first, second = tp.device_put((X, X), (mesh_sharding("x"), mesh_sharding()))
    assert (first.sharding.spec, second.sharding.spec) == (tp.P("x"), tp.P())


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: tp.device_put(X, "cpu:0"), TypeError,
         "a NamedSharding or a PartitionSpec, but got 'cpu:0'"),
        (lambda: tp.device_put(X, []), TypeError, r"a non-empty list of them, .* but got \[\]"),
        (lambda: tp.device_put(X, [0]), TypeError, r"but got \[0\]"),
        (lambda: tp.device_put({"a": X}, {"b": mesh_sharding("x")}), ValueError,
         r"(?s)different pytree metadata.*prefix pytree device_put device has"),
        (lambda: tp.device_put({"a": X}, {"a": 3}), TypeError, r"but got \{'a': 3\}"),
        (lambda: tp.device_put({"a": X[:3]}, {"a": mesh_sharding("x")}), ValueError,
         r"device_put of x\['a'\]: .*the dimension size is 3"),
        (lambda: tp.device_put({"a": X[:3]}, tp.devices()), ValueError,
         r"x\['a'\] must have 4 rows, but its shape is \[3, 2\].*use torchpmap\.replicate"),
        (lambda: tp.device_put(1.0, tp.devices()), ValueError, r"x must have 4 rows, .* is \[\]"),
        (lambda: tp.device_put("text"), TypeError,
         r"x has type str, which cannot be put on a device"),
        (lambda: tp.device_put({"a": torch.nn.ReLU()}), TypeError,
         r"x\['a'\] has type ReLU, .* a module is put there by torchpmap\.replicate or"),
        (lambda: tp.device_put([np.array(["a"])]), TypeError, "can't convert"),
        (lambda: tp.device_put(X[:3], mesh_sharding("x")), ValueError,
         r"axis 0 is partitioned 2 times \(by mesh axis 'x'\), but the dimension size is 3"),
        (lambda: tp.device_put(X[0], mesh_sharding(None, "x")), ValueError,
         r"only valid for values of rank at least 2, but was applied to a value of rank 1"),
        (lambda: tp.device_put(X, tp.Device(9, DEVICE)), ValueError,
         rf"{DEVICE}:9\) is not in use"),
        (lambda: tp.device_put(X[:2], [tp.Device(0, DEVICE), tp.Device(9, DEVICE)]), ValueError,
         rf"{DEVICE}:9\) is not in use"),
        (lambda: tp.replicate(X, [tp.Device(0, OTHER)]), ValueError,
         rf"{OTHER}:0\) is not in use"),
        (lambda: tp.replicate(X, []), ValueError, "at least one device"),
        (lambda: tp.device_put_sharded([X], tp.devices()), ValueError,
         r"len\(shards\) = 1 must equal len\(devices\) = 4"),
        (lambda: tp.device_put_sharded([], []), ValueError, "there must be at least one"),
        (lambda: tp.device_put_sharded([X, {"a": X}], tp.devices()[:2]), ValueError,
         "shards must have one structure, but shard 0 has .* and shard 1 has"),
        (lambda: tp.device_put_sharded([{"a": X}, {"a": X[:3]}], tp.devices()[:2]), ValueError,
         r"must agree in shape and dtype, but shards\[k\]\['a'\] has"),
    ],
)  # fmt: skip
def test_errors(call, kind, text, monkeypatch):
    calls = asked(monkeypatch)
    with pytest.raises(kind, match=text):
        call()
    assert calls == []


def mesh_sharding(*entries):
    return NamedSharding(make_mesh((2,), ("x",), devices=tp.devices()), P(*entries))


def test_device_put_sharded():
    devices = tp.devices()[2:]
    out = tp.device_put_sharded([{"a": X, "b": None}, {"b": None, "a": X + 1}], devices)
    assert out["b"] is None
    assert placed(out["a"]) == {2: [X.tolist()], 3: [(X + 1).tolist()]}
    numbers = tp.device_put_sharded([1, 2], devices)
    assert numbers.tolist() == [1, 2]
    rows = tp.device_put_sharded(list(tp.device_put(X, tp.devices())), tp.devices())
    assert rows.tolist() == X.tolist()


def test_rows_on_the_device_of_this_process_do_not_visit_the_host(monkeypatch):
    given = []

    class HasDevice:
        """The runtime of one of several processes."""

        runs_here = True

        def team(self, ranks):
            return SimpleNamespace(ranks=ranks, runtime=self)

        def put(self, team, blocks):
            given.extend(block.device.type for block in blocks)
            return SimpleNamespace(team=team, seq=0)

    monkeypatch.setattr(device_put_module, "current_runtime", HasDevice)
    tp.device_put_sharded([torch.ones(2, device="meta"), torch.ones(2)], tp.devices()[:2])
    assert given == ["meta", "cpu"]


def test_a_gradient_goes_back_to_the_device_of_the_value():
    context = SimpleNamespace(before=None, device=torch.device("meta"))
    gradient, _ = device_put_module._Put.backward(context, torch.ones(2))
    assert gradient.device.type == "meta"


def test_replicate_and_unreplicate():
    tree = {"w": X, "b": [None, 2.0], "n": 3}
    out = tp.replicate(tree)
    assert placed(out["w"]) == dict.fromkeys(range(4), X.tolist())
    assert out["w"].is_fully_replicated
    assert placed(tp.replicate(X, tp.devices()[1:3])) == {1: X.tolist(), 2: X.tolist()}
    back = tp.unreplicate(out)
    assert type(back["w"]) is torch.Tensor
    assert back["w"].tolist() == X.tolist()
    assert back["b"][0] is None
    assert back["b"][1].item() == 2.0
    assert out["n"].item() == back["n"].item() == 3
    stacked = tp.device_put_replicated(X[0], tp.devices())
    columns = tp.device_put(X, mesh_sharding(None, "x"))
    for x in (stacked, stacked.clone().requires_grad_(), columns):
        row = tp.unreplicate(x)
        assert type(row) is torch.Tensor
        assert row.tolist() == X[0].tolist()
    assert tp.unreplicate([X, "text"])[0].tolist() == X[0].tolist()


def test_device_get():
    x = tp.device_put(X, tp.devices())
    marker = object()
    out = tp.device_get({"a": x, "b": [marker, 3, X], "c": tp.device_put(1), "d": None})
    assert isinstance(out["a"], np.ndarray)
    np.testing.assert_array_equal(out["a"], X.numpy(), strict=True)
    assert out["b"][0] is marker
    assert out["b"][2] is X
    assert (out["c"], out["d"]) == (1, None)
    half = tp.device_get(tp.device_put(torch.ones(2, dtype=torch.bfloat16)))
    assert type(half) is torch.Tensor
    assert half.dtype == torch.bfloat16
    assert tp.device_get(x.requires_grad_()).tolist() == X.tolist()


def test_what_device_get_returns_is_taken_by_numpy_and_torch():
    value = X.flatten()
    array = tp.device_get(tp.replicate(value))
    plain = value.numpy()
    assert repr(array) == repr(plain)
    for compute in (
        *(np.sin, np.sum, lambda x: x + x, lambda x: x.mean(), lambda x: x[0], lambda x: x @ x),
        *(lambda x: np.stack([x, x]), lambda x: np.where(x > 1, x, 0)),
        lambda x: pickle.loads(pickle.dumps(x)),
    ):
        result, expected = compute(array), compute(plain)
        assert type(result) is type(expected)
        np.testing.assert_array_equal(result, expected)
    for take in (torch.tensor, torch.as_tensor, torch.from_numpy, torch.zeros_like(value).copy_):
        assert torch.equal(take(array), value)
    assert torch.equal(torch.ones_like(value) + array, value + 1)
    assert torch.equal(array * torch.ones_like(value), value)
    assert torch.equal(tp.replicate(array).cpu(), value)
    assert torch.equal(tp.pmap(lambda x: x * 2, compile=EAGER)(array[:4]).cpu(), value[:4] * 2)
    assert torch.equal(tp.scan(lambda c, x: (c + x, c), array[0], array)[0], value.sum() + value[0])


def test_a_module_loads_what_device_get_returns():
    norm, source = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    source(torch.randn(4, 3))
    state = tp.replicate(dict(source.state_dict()))
    norm.load_state_dict(tp.device_get(state))
    there = tp.replicate(torch.nn.BatchNorm1d(3))
    there.load_state_dict(tp.device_get(state))
    for name, value in source.state_dict().items():
        assert torch.equal(norm.state_dict()[name], value)
        assert torch.equal(there.state_dict()[name].cpu(), value)


def test_block_until_ready(monkeypatch):
    f = tp.pmap(lambda x: torch.linalg.matrix_power(x, 500), compile=EAGER)
    tree = {"a": f(torch.zeros(4, 99, 99)), "b": [f(torch.zeros(2, 99, 99)), None, 3, X]}
    calls = asked(monkeypatch)
    assert tp.block_until_ready(tree) is tree
    assert [name for name, _ in calls] == ["block", "block"]
    assert tree["a"].is_ready()
    assert tree["b"][0].is_ready()
    slow = f(torch.zeros(4, 200, 200))
    assert slow.block_until_ready() is slow
    assert slow.is_ready()


def test_block_until_ready_raises_what_the_computation_raised():
    f = tp.pmap(lambda x: torch.linalg.cholesky(x), compile=EAGER)
    bad = f(-torch.eye(2).expand(4, 2, 2))
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        tp.block_until_ready([bad])
    assert f(torch.eye(2).expand(4, 2, 2)).tolist() == torch.eye(2).expand(4, 2, 2).tolist()


@pytest.mark.cpu_only("the devices are named")
def test_devices():
    devices = tp.devices()
    assert [str(device) for device in devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert tp.devices("cpu") == tp.local_devices() == tp.local_devices(0, "cpu") == devices
    assert tp.device_count() == tp.local_device_count() == tp.device_count("cpu") == 4
    assert (tp.process_index(), tp.process_count(), tp.default_backend()) == (0, 1, "cpu")
    devices.clear()
    assert tp.device_count() == 4
    with pytest.raises(ValueError, match="Unknown process_index 1"):
        tp.local_devices(1)
    with pytest.raises(RuntimeError, match="Unknown backend: 'tpu' requested"):
        tp.device_count("tpu")
