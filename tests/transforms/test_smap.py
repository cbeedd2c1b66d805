"""Covers: smap, make_mesh's defaults, device_put onto a spec, placements of a sharding."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import torchpmap as tp
from torchpmap import P

GRAPH = {"backend": "eager"}
X = torch.arange(16.0).reshape(4, 4)


@pytest.fixture(scope="module", autouse=True)
def devices():
    tp.init(num_devices=4)


@pytest.fixture
def mesh():
    return tp.make_mesh((2, 2), ("x", "y"))


def test_dims_instead_of_specs(mesh):
    def f(a, b):
        return a - tp.pmean(a, "x"), b.sum()

    with tp.set_mesh(mesh):
        mapped = tp.smap(f, in_axes=(1, None), out_axes=(1, None), axis_name="x", compile=GRAPH)
        apart, total = mapped(X, X)
    halves = torch.stack(X.chunk(2, 1))
    assert torch.equal(apart.cpu(), torch.cat(list(halves - halves.mean(0)), 1))
    assert total.item() == X.sum()


def test_a_dim_is_counted_from_the_front():
    with pytest.raises(ValueError, match="in_axes has the dim -1; count it from the front"):
        tp.smap(torch.sin, in_axes=-1, out_axes=0, axis_name="x")
    with pytest.raises(TypeError, match="out_axes has ints and None, but got 'x'"):
        tp.smap(torch.sin, in_axes=0, out_axes="x", axis_name="x")


def test_a_mesh_takes_the_first_devices(mesh):
    assert mesh.devices.tolist() == [tp.devices()[:2], tp.devices()[2:4]]
    assert tp.make_mesh((2,), ("x",), ("Auto",)).size == 2
    with pytest.raises(ValueError, match="has 16 devices, but there are 4"):
        tp.make_mesh((4, 4), ("x", "y"))
    with pytest.raises(TypeError, match=r"but got 4\. For one axis write \(4,\)"):
        tp.make_mesh(4, ("x",))


def test_types_of_axes_from_jax_are_accepted(mesh):
    kinds = tp.AxisType.Auto, "Explicit"
    assert tp.make_mesh((2, 2), ("x", "y"), kinds) == tp.make_mesh((2, 2), ("x", "y"))
    assert tp.Mesh(tp.devices()[:2], ("x",), axis_types=tp.AxisType.Explicit).size == 2
    with pytest.raises(ValueError, match=r"got <AxisType\.Manual.*expected AxisType\.Auto or"):
        tp.make_mesh((2,), ("x",), (tp.AxisType.Manual,))
    with pytest.raises(ValueError, match="axis_types has 2 entries, but the mesh has 1 axes"):
        tp.make_mesh((2,), ("x",), ("Auto", "Auto"))


def test_a_value_is_placed_by_a_spec(mesh):
    with tp.set_mesh(mesh):
        placed = tp.device_put(X, P("y", "x"))
    assert placed.sharding == tp.NamedSharding(mesh, P("y", "x"))
    (block,) = (s for s in placed.addressable_shards if s.device == tp.devices()[1])
    assert torch.equal(block.data, X[2:, :2])
    with pytest.raises(ValueError, match="needs a mesh"):
        tp.device_put(X, P("x"))


def test_placements_of_torch(mesh):
    placements = (Shard(1), Replicate())
    sharding = tp.NamedSharding.from_placements(mesh, placements)
    assert sharding == tp.NamedSharding(mesh, P(None, "x"))
    assert sharding.placements == placements
    both = tp.NamedSharding.from_placements(mesh, [Shard(0), Shard(0)])
    assert both.spec == P(("x", "y"))
    with pytest.raises(ValueError, match="a DTensor cuts in the order of its mesh"):
        _ = tp.NamedSharding(mesh, P(("y", "x"))).placements
    with pytest.raises(ValueError, match="has no PartitionSpec"):
        tp.NamedSharding.from_placements(mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="takes as many placements, but got 1"):
        tp.NamedSharding.from_placements(mesh, [Replicate()])


def test_tools_for_pmap_say_what_they_take(mesh):
    doubled = tp.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(TypeError, match="compares the ways to compute a pmap, but got <shard_map"):
        tp.debug.check_pmap(doubled, X)
    assert tp.debug.cost(doubled, X).output_bytes == X.nbytes // 2
