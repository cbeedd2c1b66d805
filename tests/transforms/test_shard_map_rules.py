"""The rules of ``shard_map``, one by one.

Covers: API, specs, messages, static arguments, closures, replication and random numbers of
``_transforms/shard_map.py`` and what is below it.  Rule numbers are those of the specification;
those that are missing here and in test_shard_map_composition.py are shown by programs of
tests/programs/test_jax_parity.py.  At the end, what comes with it: smap, make_mesh, device_put onto
a spec.
"""

import functools
import pickle
from dataclasses import dataclass

import pytest
import torch
from _blocks import XY, X, mapped
from _support import DEVICE, EAGER, in_threads
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import torchpmap as tp
from torchpmap import P
from torchpmap._layout.current_mesh import current_mesh


@pytest.mark.parametrize("options", [{"in_specs": XY}, {}])
def test_rule_1_pickled(mesh, options):
    placed = mapped(torch.neg, mesh, XY, XY)(X)
    call = tp.shard_map(torch.sin, mesh=mesh, out_specs=XY, compile=EAGER, **options)
    again = pickle.loads(pickle.dumps(call))
    torch.testing.assert_close(again(placed).cpu(), torch.sin(-X))


def test_rule_4_set_mesh_is_of_a_block_and_of_a_thread(mesh):
    total = mapped(lambda a: tp.psum(a, "x"), None, P("x"), P())
    with tp.set_mesh(mesh):
        assert total(X).shape == (2, 4)
        with tp.set_mesh(tp.make_mesh((4,), ("x",))):
            assert total(X).tolist() == [X.sum(0).tolist()]
        assert total(X).shape == (2, 4)
        with pytest.raises(ValueError, match="there is no mesh"):
            in_threads(1, lambda _: total(X))
    tp.set_mesh(mesh)
    try:
        assert total(X).shape == (2, 4)
    finally:
        tp.set_mesh(None)
    with pytest.raises(ValueError, match=r"there is no mesh.*set_mesh"):
        total(X)


def test_rule_4_a_context_is_for_one_block(mesh):
    once = tp.set_mesh(mesh)
    with once:
        pass
    text = r"set_mesh: this context was left already.*Call torchpmap.set_mesh\(mesh\) again"
    with pytest.raises(RuntimeError, match=text):
        once.__exit__()
    with pytest.raises(RuntimeError, match=text), once:
        pass
    assert current_mesh() is None
    other = tp.set_mesh(mesh)
    with pytest.raises(RuntimeError, match="entered in another thread"):
        in_threads(1, lambda _: other.__exit__())
    tp.set_mesh(None)


def test_rule_6_a_map_inside_has_the_mesh_around_it(mesh, mode):
    text = r"neg.*its mesh is Mesh\(.*, but the shard_map around it runs on Mesh\('x': 2, 'y': 2"
    for other in (tp.make_mesh((4,), ("i",)), tp.make_mesh((2, 2), ("a", "b"))):
        name = other.axis_names[0]
        inner = tp.shard_map(torch.neg, mesh=other, in_specs=P(name), out_specs=P(name))
        outer = mapped(lambda a, f=inner: f(a), mesh, P("x"), P("x"), compile=mode)
        with pytest.raises(ValueError, match=text):
            outer(X)
        with tp.debug.fake_pmap(), pytest.raises(ValueError, match=text):
            outer(X)


def test_rule_6_another_mesh_around_is_an_error(mesh):
    line = tp.make_mesh((4,), ("i",))
    with tp.set_mesh(mesh), pytest.raises(ValueError, match=r"its mesh is Mesh\('i': 4\), but set"):
        mapped(torch.neg, line, P("i"), P("i"))(X)


@dataclass
class Config:
    """It has no hash."""

    factor: float


def test_rule_7_static_objects_are_live(mesh, mode):
    traces = []

    def scale(config, sizes, tree, a):
        traces.append(1)
        return a * config.factor * len(sizes) * tree["k"]

    call = mapped(scale, mesh, (None, None, None, XY), XY, compile=mode)
    config, sizes = Config(2.0), {1, 2}
    for _ in range(3):
        assert call(config, sizes, {"k": 1}, X).tolist() == (4 * X).tolist()
    assert len(traces) == (mode is not False)
    config.factor = 3.0
    assert call(config, sizes, {"k": 1}, X).tolist() == (6 * X).tolist()
    sizes.add(3)
    assert call(config, sizes, {"k": 1}, X).tolist() == (9 * X).tolist()
    assert call(Config(4.0), sizes, {"k": torch.tensor(3.0)}, X).tolist() == (36 * X).tolist()


def test_rule_7_specs_of_the_arguments(mesh):
    call = tp.shard_map(torch.neg, mesh=mesh, out_specs=XY, compile=EAGER)
    assert call(mapped(torch.neg, mesh, XY, XY)(X)).tolist() == X.tolist()
    with pytest.raises(ValueError, match=r"in_specs was left out.* is not on the devices"):
        call(X)
    with pytest.raises(ValueError, match=r"but .* lies on Mesh\('devices': 4\)"):
        call(tp.pmap(torch.neg, compile=EAGER)(X))
    assert call(tp.replicate(X)).sharding.spec == XY
    with pytest.raises(
        ValueError, match=rf"but .* lies on .* of the devices {DEVICE}:0 {DEVICE}:1\. Give"
    ):
        call(tp.replicate(X, tp.devices()[:2]))


@pytest.mark.parametrize("num_args", [0, 1, 3])
def test_rule_7_a_spec_for_every_argument(mesh, num_args):
    call = mapped(lambda *args: args[0], mesh, (P("x"), P("y")), P("x"))
    with pytest.raises(ValueError, match=rf"has 2 entries, but the call has {num_args} positional"):
        call(*[X] * num_args)


def test_rule_8_keyword_arguments(mesh):
    with pytest.raises(TypeError, match=r"keyword argument 'a'.*functools\.partial"):
        mapped(lambda a: a, mesh, XY, XY)(a=X)
    with pytest.raises(TypeError, match=r"keyword argument 'k'.*functools\.partial"):
        mapped(lambda a, k: a * k, mesh, (XY, None), XY)(X, k=2)
    assert mapped(functools.partial(torch.mul, other=2), mesh, XY, XY)(X).sum() == 2 * X.sum()


MESSAGES = [
    (XY, {"w": [torch.ones(4, 3)]}, ValueError, r"dim 1 of argument a\['w'\]\[0\] has size 3.*'y' "
     r"\(2\).*shape is \[4, 3\]\. Pad the dim to 4"),
    (P(("x", "y")), torch.ones(6), ValueError, r"not divisible by 4.*'x' \(2\), 'y' \(2\).*to 8"),
    (XY, torch.ones(4), ValueError, r"for argument a, which is of rank 1"),
    (P("x"), 3.0, ValueError, r"A number takes P\(\)"),
    (P(), "text", TypeError, r"argument a has type str.*None in its place in in_specs"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "value", "error", "text"), MESSAGES)
def test_rule_10_messages(mesh, spec, value, error, text):
    with pytest.raises(error, match=text):
        mapped(lambda a: a, mesh, (spec,), P())(value)


MISUSE = [
    ({"in_specs": P("z")}, ValueError, r"'z' is not an axis of the mesh: \['x', 'y'\]"),
    ({"in_specs": P("x", "x")}, ValueError, "has the axis 'x' twice"),
    ({"in_specs": P("y"), "axis_names": {"x"}}, ValueError, "not an axis of axis_names"),
    ({"axis_names": "x"}, TypeError, "must be a set of names"),
    ({"axis_names": {"z"}}, ValueError, "axis_names has 'z'"),
    ({"in_specs": "x"}, TypeError, "it is 'x' of type str"),
    ({"out_specs": 0}, TypeError, "it is 0 of type int"),
    ({"mesh": 3}, TypeError, "must be a torchpmap.Mesh"),
    ({"f": 3}, TypeError, "got 3 of type int: f of shard_map must be a function"),
    ({"randomness": "none"}, ValueError, "'different', 'same' or 'error'"),
    ({"donate_argnums": "a"}, TypeError, "donate_argnums must be int"),
]


@pytest.mark.parametrize(("changes", "error", "text"), MISUSE)
def test_rule_11_misuse(mesh, changes, error, text):
    options = {"f": torch.neg, "mesh": mesh, "in_specs": P(), "out_specs": P(), **changes}
    with pytest.raises(error, match=text):
        tp.shard_map(options.pop("f"), **options)


def test_rule_11_a_decorator_of_no_function(mesh):
    with pytest.raises(TypeError, match="got 3 of type int: f of shard_map must be a function"):
        tp.shard_map(mesh=mesh, in_specs=P(), out_specs=P())(3)


def test_rule_13_closures_get_gradients(mesh):
    weight = torch.tensor(2.0, requires_grad=True)
    call = mapped(lambda a: tp.psum((a * weight).sum(), ("x", "y")), mesh, XY, P())
    call(X).backward()
    assert weight.grad is not None
    assert weight.grad.item() == X.sum()


def test_rule_17_an_axis_that_is_not_mentioned_keeps_one_copy(mesh):
    found = mapped(lambda a: tp.psum(a, "y"), mesh, XY, P("x"))(X)
    assert found.sharding.spec == P("x")
    sums = (X[:, :2] + X[:, 2:]).tolist()
    copies = {str(s.device): s.data.tolist() for s in found.addressable_shards}
    assert copies == {f"{DEVICE}:{k}": sums[:2] if k < 2 else sums[2:] for k in range(4)}


def test_rule_18_results(mesh):
    call = mapped(lambda a: (a.sum()[None], 3, True, None), mesh, P("x"), (P("x"), P(), P(), None))
    sums, three, true, none = call(X)
    assert (sums.tolist(), three.item(), true.item(), none) == ([28, 92], 3, True, None)
    with pytest.raises(ValueError, match=r"of rank 0.*add a dim: x\[None\]"):
        mapped(lambda a: a.sum(), mesh, P("x"), P("x"))(X)
    with pytest.raises(ValueError, match=r"tuple of length 3.*of length 2"):
        mapped(lambda a: (a, a), mesh, P(), (P(), P(), P()))(X)
    with pytest.raises(TypeError, match="out_specs is None for the output"):
        mapped(lambda a: a, mesh, P(), None)(X)
    with pytest.raises(ValueError, match=r"subtree of different type\s+<class 'torch.Tensor'>"):
        mapped(lambda a: a, mesh, XY, (XY, XY))(X)


VARYING = {
    "itself": (lambda a: a, XY, P("x")),
    "index": (lambda a: torch.ones(2) * tp.axis_index("y"), XY, P("x")),
    "index of both": (lambda a: tp.axis_index(("x", "y"))[None], XY, P("x")),
    "where": (lambda a: torch.where(tp.axis_index("y") == 0, a, 2 * a), P("x"), P("x")),
    "random": (lambda a: a + torch.rand(a.shape), P("x"), P("x")),
    "random, other axis": (lambda a: tp.psum(a + torch.rand(a.shape), "x"), P("x"), P()),
    "ppermute": (lambda a: tp.ppermute(a, "y", [(0, 1)]), P("x"), P("x")),
    "psum_scatter": (lambda a: tp.psum_scatter(a, "y", tiled=True), P("x"), P("x")),
    "all_to_all": (lambda a: tp.all_to_all(a, "y", 0, 1, tiled=True), P("x"), P("x")),
    "groups": (lambda a: tp.psum(a, "y", axis_index_groups=[[0], [1]]), XY, P("x")),
    "diagonals": (
        lambda a: tp.psum(a, ("x", "y"), axis_index_groups=[[0, 3], [1, 2]]), XY, P("x")),
    "pbroadcast along the other": (lambda a: tp.pbroadcast(a, "x", 1), XY, P("x")),
    "own part of what is gathered": (
        lambda a: tp.all_gather(a, "y").index_select(0, tp.axis_index("y")[None]), XY, P("x")),
    "after a psum": (lambda a: tp.psum(a, "y") - a, XY, P("x")),
    "gradient": (lambda a: tp.grad(lambda b: (b * b).sum())(a), XY, P()),
}  # fmt: skip


@pytest.mark.parametrize("case", VARYING)
def test_rule_19_what_may_differ_is_refused(mesh, case):
    fun, in_spec, out_spec = VARYING[case]
    with pytest.raises(ValueError, match=r"out_specs does not mention.* may differ along.*psum\("):
        mapped(fun, mesh, in_spec, out_spec)(X + 1)


EQUAL = {
    "constant": (lambda a: torch.ones(3), XY, P()),
    "captured": (lambda a: X * 2, XY, P()),
    "itself": (lambda a: a, P(), P()),
    "zeros": (lambda a: torch.zeros_like(a) + a.new_ones(2, 2), XY, P()),
    "index of one axis": (lambda a: tp.axis_index("x")[None], XY, P("x")),
    "part of an index": (lambda a: (tp.axis_index(("x", "y")) // 2)[None], XY, P("x")),
    "masked sum": (
        lambda a: tp.psum(torch.where(tp.axis_index("y") == 0, a, 0 * a), "y"), P("x"), P("x")),
    "random, summed": (lambda a: tp.psum(a + torch.rand(a.shape), ("y", "x")), XY, P()),
    "no dropout": (lambda a: torch.nn.functional.dropout(a, training=False), P(), P()),
    "groups of lines": (
        lambda a: tp.psum(a, ("x", "y"), axis_index_groups=[[0, 1], [2, 3]]), XY, P("x")),
    "pbroadcast": (lambda a: tp.pbroadcast(a, "y", 0), XY, P("x")),
    "pmin": (lambda a: tp.pmin(a, ("y", "x")), XY, P()),
    "write": (lambda a: a.mul_(2).view(-1).add_(1), P(), P()),
    "checkpoint": (
        lambda a: checkpoint(lambda z: tp.psum(z.sin(), "y"), a, use_reentrant=False), XY, P("x")),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
def test_rule_19_what_is_equal_is_not(mesh, case):
    fun, in_spec, out_spec = EQUAL[case]
    found = mapped(fun, mesh, in_spec, out_spec)(X)
    copies = {}
    for shard in found.addressable_shards:
        copies.setdefault(str(shard.index), []).append(shard.data.tolist())
    assert all(other == same[0] for same in copies.values() for other in same)


def test_rule_21_without_the_check_the_first_counts(mesh, mode):
    call = mapped(lambda a: a, mesh, XY, P("x"), check_vma=False, compile=mode)
    found = call(X)
    first = X[:, :2].tolist()
    copies = [s.data.tolist() for s in found.addressable_shards]
    assert copies == [first[:2], first[:2], first[2:], first[2:]]
    slope = torch.func.grad(lambda x: call(x).sum())(X)
    assert slope.tolist() == [[1, 1, 0, 0]] * 4


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty(mesh, mode, shape):
    call = mapped(lambda a: tp.psum(a, "x"), mesh, XY, P(None, "y"), compile=mode)
    assert call(torch.zeros(shape)).cpu().shape == (shape[0] // 2, shape[1])


# -- smap, make_mesh's defaults, device_put onto a spec, placements of a sharding -----------------


def test_dims_instead_of_specs(mesh):
    def f(a, b):
        return a - tp.pmean(a, "x"), b.sum()

    with tp.set_mesh(mesh):
        options = {"in_axes": (1, None), "out_axes": (1, None), "axis_name": "x", "compile": EAGER}
        apart, total = tp.smap(f, **options)(X, X)
        again, _ = tp.smap(**options)(f)(X, X)
    halves = torch.stack(X.chunk(2, 1))
    assert torch.equal(apart.cpu(), torch.cat(list(halves - halves.mean(0)), 1))
    assert torch.equal(apart.cpu(), again.cpu())
    assert total.item() == X.sum()


def test_a_dim_is_counted_from_the_front(pool):
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


def test_a_value_is_placed_by_a_spec(mesh):
    with tp.set_mesh(mesh):
        placed = tp.device_put(X, P("y", "x"))
    assert placed.sharding == tp.NamedSharding(mesh, P("y", "x"))
    (block,) = (s for s in placed.addressable_shards if s.device == tp.devices()[1])
    assert torch.equal(block.data, X[2:, :2])
    with pytest.raises(ValueError, match="needs a mesh"):
        tp.device_put(X, P("x"))


def test_placements_of_torch(mesh):
    placed = tp.NamedSharding.from_placements
    placements = (Shard(1), Replicate())
    assert placed(mesh, placements) == tp.NamedSharding(mesh, P(None, "x"))
    assert placed(mesh, placements).placements == placements
    assert placed(mesh, [Shard(0), Shard(0)]).spec == P(("x", "y"))
    with pytest.raises(ValueError, match="a DTensor cuts in the order of its mesh"):
        _ = tp.NamedSharding(mesh, P(("y", "x"))).placements
    with pytest.raises(ValueError, match="has no PartitionSpec"):
        placed(mesh, [Partial(), Replicate()])
    with pytest.raises(ValueError, match="takes as many placements, but got 1"):
        placed(mesh, [Replicate()])


def test_tools_for_pmap_say_what_they_take(mesh):
    doubled = tp.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(TypeError, match="compares the ways to compute a pmap, but got <shard_map"):
        tp.debug.check_pmap(doubled, X)
    assert tp.debug.cost(doubled, X).output_bytes == X.nbytes // 2
