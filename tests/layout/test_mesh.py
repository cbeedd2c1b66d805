"""Covers: _layout/mesh.py."""

import enum
import math
import pickle
from collections import OrderedDict

import cloudpickle
import numpy as np
import pytest
import torch.distributed as dist
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchpmap._base.devices import Device
from torchpmap._layout.mesh import (
    AxisType,
    Mesh,
    NamedSharding,
    P,
    PartitionSpec,
    replicated,
    row_sharding,
)
from torchpmap._runtime.meshes import make_mesh

CPUS = tuple(Device(i, "cpu") for i in range(8))
WHOLE = slice(None)


def mesh_of(**shape):
    return make_mesh(tuple(shape.values()), tuple(shape), devices=CPUS)


def message(call, error=ValueError):
    with pytest.raises(error) as info:
        call()
    return str(info.value)


def test_partition_spec():
    assert P is PartitionSpec
    spec = P("i", None, ("x", "y"))
    assert repr(spec) == "PartitionSpec('i', None, ('x', 'y'))"
    assert repr(P("i", None)) == "PartitionSpec('i', None)"
    assert repr(P()) == "PartitionSpec()"
    assert list(spec) == ["i", None, ("x", "y")]
    assert (len(spec), spec[0]) == (3, "i")
    assert P("i") == P(("i",)) != P("i", None)
    assert hash(P("i")) == hash(P(("i",)))
    for dumps in (pickle.dumps, cloudpickle.dumps):
        copy = pickle.loads(dumps(spec))
        assert type(copy) is PartitionSpec
        assert copy == spec
    assert pytree.tree_leaves({"a": P("i", None)}) == [P("i", None)]


@pytest.mark.parametrize("entry", [3, True, ["x"], ("x", None), ("x", 0)])
def test_bad_partition_spec(entry):
    text = (
        "each entry of a PartitionSpec must be None, a mesh axis name or a tuple of names, but got "
    )
    assert message(lambda: P(None, entry), TypeError) == f"{text}{entry!r}."


def test_mesh():
    mesh = Mesh([CPUS[:2], CPUS[2:4]], ("x", "y"))
    assert mesh.shape == OrderedDict(x=2, y=2)
    assert type(mesh.shape) is OrderedDict
    assert mesh.axis_names == ("x", "y")
    assert mesh.size == 4
    assert mesh.devices.dtype == object
    assert mesh.devices[1, 0] is CPUS[2]
    assert repr(mesh) == "Mesh('x': 2, 'y': 2)"
    name = object()
    assert Mesh(CPUS[:2], (name,)).shape[name] == 2
    assert Mesh(CPUS[:2], "axis").axis_names == ("axis",)
    mesh = make_mesh((2, 3), ("x", "y"), devices=CPUS)
    assert mesh.devices.tolist() == [list(CPUS[:3]), list(CPUS[3:6])]
    assert make_mesh([2], ["i"], devices=CPUS[4:]).devices.tolist() == list(CPUS[4:6])


def test_mesh_is_a_value():
    mesh = mesh_of(x=2, y=2)
    same = Mesh(np.array(CPUS[:4]).reshape(2, 2), ["x", "y"])
    assert mesh == same
    assert hash(mesh) == hash(same)
    for other in (
        mesh_of(x=2, z=2),
        mesh_of(x=4, y=1),
        mesh_of(x=2),
        Mesh(np.array(CPUS[3::-1]).reshape(2, 2), ("x", "y")),
        "mesh",
    ):
        assert mesh != other
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy == mesh
    assert hash(copy) == hash(mesh)
    with pytest.raises(ValueError, match="read-only"):
        mesh.devices[0, 0] = CPUS[5]
    devices = np.array(CPUS[:2], dtype=object)
    mesh = Mesh(devices, "i")
    devices[0] = CPUS[5]
    assert mesh == Mesh(CPUS[:2], "i")  # it does not see later writes to its argument


JAX_TYPES = enum.Enum("AxisType", ["Auto", "Explicit", "Manual"])  # as jax.sharding.AxisType is


@pytest.mark.parametrize(
    "kinds",
    [None, (AxisType.Auto, AxisType.Explicit), [JAX_TYPES.Explicit] * 2, AxisType.Explicit, "Auto"],
)
def test_types_of_axes_make_no_difference(kinds):
    assert make_mesh((2, 2), ("x", "y"), kinds, devices=CPUS) == mesh_of(x=2, y=2)
    assert Mesh([CPUS[:2], CPUS[2:4]], ("x", "y"), axis_types=kinds) == mesh_of(x=2, y=2)


NO_TYPE = (
    ", expected AxisType.Auto or AxisType.Explicit, which mean the same here. An axis becomes "
    "manual inside shard_map (axis_names=)."
)
MISUSE = [
    (ValueError, lambda: make_mesh((2,), ("x",), (AxisType.Manual,), devices=CPUS),
     f"axis_types: got <AxisType.Manual: 3>{NO_TYPE}"),
    (ValueError, lambda: Mesh(CPUS[:2], "x", JAX_TYPES.Manual),
     f"axis_types: got <AxisType.Manual: 3>{NO_TYPE}"),
    (ValueError, lambda: Mesh(CPUS[:2], "x", ("explicit",)),
     f"axis_types: got 'explicit'{NO_TYPE}"),
    (ValueError, lambda: make_mesh((2,), ("x",), ("Auto", "Auto"), devices=CPUS),
     "axis_types has 2 entries, but the mesh has 1 axes, ('x',). Give one AxisType per axis, or "
     "leave it out."),
    (ValueError, lambda: Mesh(CPUS[:4], ("x", "y")),
     "Mesh requires the ndim of its first argument (`devices`) to equal the length of its second "
     "argument (`axis_names`), but got devices.ndim == 1 and len(axis_names) == 2."),
    (ValueError, lambda: Mesh([CPUS[:2]], ("x", "x")),
     "the axis names of a Mesh must be distinct, but got 'x' twice."),
    (ValueError, lambda: Mesh([CPUS[1], CPUS[0], CPUS[1]], "i"),
     "the devices of a Mesh must be distinct, but got Device(cpu:1) twice."),
    (ValueError, lambda: Mesh([], "i"), "a Mesh needs at least one device, but got shape (0,)."),
    (TypeError, lambda: Mesh([0, 1], "i"),
     "devices of a Mesh must be Device objects, but got 0 of type int."),
    (ValueError, lambda: make_mesh((2, 8), ("x", "y"), devices=CPUS),
     "Number of devices 8 must be >= the product of mesh_shape (2, 8)."),
    (ValueError, lambda: make_mesh((-2, -2), ("x", "y"), devices=CPUS),
     "the sizes of mesh axes must be at least 1, but got (-2, -2)."),
    (TypeError, lambda: Mesh.from_device_mesh([0, 1]),
     "Mesh.from_device_mesh takes a torch.distributed.device_mesh.DeviceMesh, but got list."),
    (ValueError, lambda: NamedSharding(mesh_of(x=2, y=2), P("q")),
     "Resource axis: q of PartitionSpec('q',) is not found in mesh: ('x', 'y')."),
    (ValueError, lambda: NamedSharding(mesh_of(x=2, y=2), P("x", "x")),
     "A single NamedSharding spec specification can map every mesh axis to at most one positional "
     "dimension, but PartitionSpec('x', 'x') has duplicate entries for `x`."),
    (ValueError, lambda: NamedSharding(mesh_of(x=2, y=2), P(("x", "x"))),
     "A single NamedSharding spec specification can map every mesh axis to at most one positional "
     "dimension, but PartitionSpec(('x', 'x'),) has duplicate entries for `x`."),
    (TypeError, lambda: NamedSharding(mesh_of(x=2), ("x",)),
     "NamedSharding takes a Mesh and a PartitionSpec, but got Mesh and tuple."),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "text"), MISUSE, ids=[text[:30] for *_, text in MISUSE])
def test_misuse(error, call, text):
    assert message(call, error) == text


def test_device_mesh_of_worker_processes():  # with ranks: tests/sharded/test_torchrun_layouts.py
    assert message(mesh_of(x=2, y=2).to_device_mesh, RuntimeError) == (
        "Mesh('x': 2, 'y': 2) has no DeviceMesh: its devices are worker processes of one "
        "controller, which have no ranks in torch.distributed. A DeviceMesh needs one process per "
        "device, each of which runs the script: start it with torchrun."
    )
    launched = Mesh([Device(rank, "cpu", rank) for rank in range(2)], "x")
    assert "call torchpmap.init() (or" in message(launched.to_device_mesh, RuntimeError)


def test_a_device_mesh_has_groups_that_exist():
    mesh = Mesh(
        [[Device(2 * i + j, "cpu", 2 * i + j) for j in range(2)] for i in range(2)], ("x", "y")
    )
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
        try:
            found = mesh.to_device_mesh()
            assert mesh.to_device_mesh() is found
            assert [dist.get_process_group_ranks(found.get_group(name)) for name in "xy"] == [
                [1, 3],
                [2, 3],
            ]
        finally:
            dist.destroy_process_group()


def test_named_sharding_is_a_value():
    mesh = mesh_of(x=2, y=2)
    sharding = NamedSharding(mesh, P("x"))
    assert (sharding.mesh, sharding.spec) == (mesh, P("x"))
    assert sharding == NamedSharding(mesh_of(x=2, y=2), P(("x",)))
    assert hash(sharding) == hash(NamedSharding(mesh_of(x=2, y=2), P(("x",))))
    assert sharding != NamedSharding(mesh, P("y"))
    assert sharding != NamedSharding(mesh_of(x=2, z=2), P("x"))
    assert sharding != "sharding"
    copy = pickle.loads(pickle.dumps(sharding))
    assert copy == sharding
    assert hash(copy) == hash(sharding)
    assert sharding.device_set == set(CPUS[:4])
    assert repr(sharding) == "NamedSharding(mesh=Mesh('x': 2, 'y': 2), spec=PartitionSpec('x',))"


UNFIT = [
    (P("x"), (3,),
     "implies that array axis 0 is partitioned 2 times (by mesh axis 'x'), but the dimension size "
     "is 3 (full shape: (3,), per-dimension tiling factors: [2] should evenly divide the shape)"),
    (P(None, ("x", "y")), (3, 6, 5),
     "implies that array axis 1 is partitioned 4 times (by mesh axis 'x', 'y'), but the dimension "
     "size is 6 (full shape: (3, 6, 5), per-dimension tiling factors: [1, 4, 1] should evenly "
     "divide the shape)"),
    (P(None, "x"), (4,),
     "is only valid for values of rank at least 2, but was applied to a value of rank 1 (its shape "
     "is (4,))."),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "shape", "text"), UNFIT)
def test_shapes_that_do_not_fit(spec, shape, text):
    sharding = NamedSharding(mesh_of(x=2, y=2), spec)
    for call in (sharding.shard_shape, sharding.devices_indices_map):
        assert message(lambda call=call: call(shape)) == f"Sharding {sharding} {text}"


@st.composite
def shardings(draw):
    """A mesh, a spec over it, and a shape that the spec divides."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = tuple("xyz"[: len(sizes)])
    devices = [Device(i, "cpu") for i in range(math.prod(sizes))]
    order = draw(st.permutations(devices))
    mesh = make_mesh(sizes, names, devices=order)
    left = list(draw(st.permutations(names)))
    spec, shape = [], []
    for _ in range(draw(st.integers(0, 3))):
        used = tuple(left.pop() for _ in range(draw(st.integers(0, len(left)))))
        spec.append(draw(st.sampled_from([used, used[0]])) if len(used) == 1 else used or None)
        shape.append(math.prod(mesh.shape[n] for n in used) * draw(st.integers(0, 3)))
    shape += draw(st.lists(st.integers(0, 3), max_size=2))
    return NamedSharding(mesh, P(*spec)), tuple(shape)


@given(shardings())
def test_pieces_against_numpy(case):
    sharding, shape = case
    mesh = sharding.mesh
    whole = np.arange(math.prod(shape)).reshape(shape)
    pieces = sharding.devices_indices_map(shape)
    assert list(pieces) == list(mesh.devices.flat)

    # The same cut made by numpy: split every dim, one mesh axis after the other.
    for coordinates, device in np.ndenumerate(mesh.devices):
        where = dict(zip(mesh.axis_names, coordinates, strict=True))
        expected = whole
        for dim, entry in enumerate(sharding.spec):
            for name in () if entry is None else (entry if isinstance(entry, tuple) else [entry]):
                expected = np.split(expected, mesh.shape[name], axis=dim)[where[name]]
        got = whole[pieces[device]]
        assert got.shape == expected.shape == sharding.shard_shape(shape)
        assert (got == expected).all()
    whole_piece = (WHOLE,) * len(shape)
    assert sharding.is_fully_replicated == all(p == whole_piece for p in pieces.values())


def test_row_sharding_and_replicated():
    devices = CPUS[3::-1]
    sharding = row_sharding(devices, "i", 1)
    assert sharding == NamedSharding(Mesh(devices, "i"), P(None, "i"))
    assert sharding.devices_indices_map((2, 8))[CPUS[3]] == (WHOLE, slice(0, 2))
    assert row_sharding(devices, "i", 0).spec == P("i")
    assert replicated(CPUS[:3], "i") == NamedSharding(Mesh(CPUS[:3], "i"), P())
    assert replicated(CPUS[:3]).device_set == set(CPUS[:3])
