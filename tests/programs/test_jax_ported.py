"""What JAX's ``tests/pmap_test.py`` says of pmap beside the values of single programs.

Covers: pmap with torch.compile, results and arguments as objects, errors, caches, devices,
donation, derivatives by autograd. The values are in ``parity/ported_cases.json``, whose programs
test_jax_parity.py runs in all modes. Expectations are torch's on the whole array, or mathematics.
"""

import copy
import functools
import gc
import itertools
import re
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo.exc
from _spies import asked, counted
from _support import EAGER, in_threads
from parity import cases, values
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

pmap = functools.partial(tp.pmap, compile=EAGER)
jit = functools.partial(torch.compile, backend="eager")

ONES, COLUMN = torch.ones(4), torch.ones(4, 1)
X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture(params=[4, 8], ids=["4 rows", "8 rows"])
def n(request):
    """On four devices: one row each, and two each."""
    return request.param


def same(result, expected):
    """Shapes and values agree; dtypes too, unless the expectation is of Python numbers."""
    got = result.to_host() if isinstance(result, tp.ShardedTensor) else torch.as_tensor(result)
    check_dtype = isinstance(expected, torch.Tensor | np.ndarray)
    wanted = torch.as_tensor(expected)
    torch.testing.assert_close(got.detach(), wanted.detach(), check_dtype=check_dtype)


def sample(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def places(x):
    return [shard.device for shard in x.addressable_shards]


def shards(x):
    return [shard.data for shard in x.addressable_shards]


def identity(x):
    return x


def double(x):
    return 2 * x


def first(x, y):
    return x


# torch.compile -----------------------------------------------------------------------------------


def difference(x):
    return x - tp.psum(x, "i")


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize("where", ["inside", "a part", "around", "around, disabled"])
def test_jit_and_pmap(where, reverse):
    devices = tp.devices()[::-1] if reverse else None
    inner = {"inside": jit(difference), "a part": lambda x: jit(difference)(x)}
    mapped = pmap(inner.get(where, difference), "i", devices=devices)
    if where == "around, disabled":
        mapped = torch.compiler.disable(mapped)
    function = jit(lambda x: mapped(x * 2) * 1) if "around" in where else lambda x: mapped(2 * x)
    x = sample(4, 4)
    same(function(x), 2 * (x - x.sum(0)))


def test_a_pmap_is_itself_compiled_by_jit():
    x = sample(4, 4)
    same(jit(pmap(difference, "i"))(x), x - x.sum(0))


def test_composition_with_jit_twice():
    @jit
    def f(x):
        y = x * 2

        @jit
        def g(z):
            return pmap(lambda x: x[None] * y)(z) * 1

        return g(x)

    same(f(torch.ones(4, 1)), torch.full((4, 4, 1), 2.0))


@pytest.mark.parametrize("rows", [4, 8])
def test_every_row_takes_its_own_branch(rows):
    def f(x):
        total = tp.psum(x, "i")
        return torch.cond(x > 1, lambda x, t: x + t, lambda x, t: x - t, (x, total))

    x = torch.arange(float(rows))
    same(pmap(f, "i")(x), torch.where(x > 1, x + x.sum(), x - x.sum()))


def test_any_python_without_a_graph():
    def f(x):
        return torch.tensor([float(v) ** 2 for v in x.tolist()])

    same(tp.pmap(f, compile=False)(X), X**2)


# Results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [None, 1, -1], ids=["not given", "in order", "reversed"])
def test_results_stay_on_the_devices_in_their_order(order):
    devices = tp.devices()[::order]
    f = pmap(double, devices=devices if order else None)
    y = X.numpy()
    for k in range(10):
        y = f(y)
        assert isinstance(y, tp.ShardedTensor)
        assert isinstance(y, torch.Tensor)
        assert places(y) == devices
        same(y, 2 ** (k + 1) * X)
    same(pmap(lambda x: x + 1)(y), 2**10 * X + 1)  # also where another order is expected
    same(torch.sin(y), torch.sin(2**10 * X))


@pytest.mark.parametrize(
    "use",
    [lambda x, y: x + y, lambda x, y: x + y.sum(0), lambda x, y: x + y[0]],
    ids=["whole", "sum", "index"],
)
def test_a_result_is_closed_over_by_another_function(use):
    y = pmap(double)(X)
    expected = torch.stack([use(row, 2 * X) for row in X])
    same(pmap(lambda x: use(x, y))(X), expected)


@pytest.mark.parametrize(
    ("start", "end"), [((1, 1), (1,)), ((1,), (1, 1)), ((1,), ()), ((4,), (2, 2))]
)
def test_a_result_is_reshaped(start, end):
    x = torch.arange(float(np.prod(start)))
    same(pmap(lambda x: x + 0)(x.reshape(start)).reshape(end), x.reshape(end))


def test_results_are_like_any_tensor():
    y = pmap(double)(X)
    assert y.block_until_ready() is y
    assert y.is_ready()
    same(y[0], 2 * X[0])
    same(y[-1, 1:], 2 * X[-1, 1:])
    same(y[1:3], 2 * X[1:3])
    same(torch.stack([y[k] for k in range(4)]), 2 * X)
    same(torch.stack(tuple(y)), 2 * X)
    assert repr(y).startswith("ShardedTensor(")


def test_delete_is_idempotent():
    y = pmap(double)(X)
    y.delete()
    y.delete()
    assert y.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        y[0]


def test_indexing_fetches_one_row(monkeypatch):
    y = pmap(lambda x: x + 1)(X).block_until_ready()
    calls = asked(monkeypatch)
    for k in range(4):
        same(y[k], X[k] + 1)
    monkeypatch.undo()
    fetched = [argument for name, argument in calls if name == "fetch"]
    assert all(len(list(rows)) == 1 for rows in fetched), fetched


def test_threadsafe_indexing():
    x = sample(4, 50, 20)
    y = pmap(lambda x: x + 0)(x)
    results = in_threads(8, lambda k: torch.stack([y[(k + j) % 4] for j in range(4)]))
    for k, got in enumerate(results):
        same(got, x.roll(-k, 0))


@pytest.mark.parametrize(
    ("function", "out_axes", "expected"),
    [(lambda x: x + 1, 0, X + 1), (lambda x: tp.psum(x, "i"), None, X.sum(0))],
    ids=["cut", "copies"],
)
def test_copies_are_made_on_the_devices(function, out_axes, expected, monkeypatch):
    y = pmap(function, "i", out_axes=out_axes)(X)
    calls = asked(monkeypatch)
    twins = [y.clone(), copy.deepcopy(y)]
    monkeypatch.undo()
    assert not [call for call in calls if call[0] in ("fetch", "put")]
    for twin in twins:
        assert twin.sharding == y.sharding
        assert twin.is_fully_replicated == (out_axes is None)
        assert len(shards(twin)) == 4
        same(twin, expected)


def test_work_on_each_devices_shard_between_two_calls():
    y = pmap(double)(X)
    changed = [shard.data[0].sin() + k for k, shard in enumerate(y.addressable_shards)]
    z = tp.device_put_sharded(changed, places(y))
    same(pmap(lambda x: x + 1)(z), (2 * X).sin() + torch.arange(4.0)[:, None] + 1)


def test_what_is_mapped_and_what_is_not_is_on_every_device():
    x = torch.arange(8.0).reshape(4, 2)
    f = pmap(lambda x, y: (x, y), in_axes=(0, None), out_axes=(None, 0))
    once, stacked = f(x, x)
    same(once, x[0])
    assert len(shards(once)) == 4
    assert all(torch.equal(block, x[0]) for block in shards(once))
    same(stacked, x.expand(4, 4, 2))
    assert len(shards(stacked)) == 4
    assert all(torch.equal(block, x[None]) for block in shards(stacked))


def test_psum_of_bools():
    x = torch.tensor([True, False, True, True])
    total, mean = pmap(lambda x: (tp.psum(x, "i"), tp.pmean(x, "i")), "i")(x)
    same(total, torch.full((4,), 3, dtype=torch.int32))
    same(mean, torch.full((4,), 0.75))


@pytest.mark.parametrize("rows", [4, 8, 3])
def test_the_size_of_an_axis_is_an_int(rows):
    sizes = []

    def f(x):
        sizes.append(tp.axis_size("i"))
        return x

    pmap(f, "i")(torch.zeros(rows))
    assert sizes
    assert all(type(size) is int and size == rows for size in sizes)


# Arguments ---------------------------------------------------------------------------------------

SPECS = [tp.P(), tp.P("a"), tp.P(None, "b"), tp.P("a", "b"), tp.P(("a", "b")), tp.P("b", "a")]


def placed(x, place):
    if isinstance(place, tp.PartitionSpec):
        mesh = tp.make_mesh((2, 2), ("a", "b"), devices=tp.devices())
        return tp.device_put(x, tp.NamedSharding(mesh, place))
    return tp.device_put(x, tp.devices()[place])


@pytest.mark.parametrize("place", [*SPECS, 0, slice(None, None, -1)], ids=str)
@pytest.mark.parametrize("in_axis", [0, 1, None])
def test_arguments_of_every_layout_are_moved_to_where_the_call_needs_them(place, in_axis):
    x = sample(4, 4)
    there = placed(x, place)
    same(there, x)
    got = pmap(lambda x: x + 1, in_axes=in_axis, axis_size=4)(there)
    same(got, x.expand(4, 4, 4) + 1 if in_axis is None else x.movedim(in_axis, 0) + 1)
    assert places(got) == tp.devices()
    assert [block.shape for block in shards(got)] == [(1, *got.shape[1:])] * 4


def test_two_arguments_of_different_layouts():
    seen = []

    def f(x, y):
        seen.append((tuple(x.shape), tuple(y.shape)))
        return x, y

    x = sample(4, 2, 2)
    rows, blocks = placed(x, tp.P(("a", "b"))), placed(x, tp.P("a", "b"))
    for got in pmap(f, in_axes=(0, 1))(rows, blocks.transpose(0, 1)):
        same(got, x)
    assert seen == [((2, 2), (2, 2))]


def test_numpy_arrays_are_cut_over_the_devices():
    y = pmap(identity)(np.arange(4))
    same(y, np.arange(4))
    assert places(y) == tp.devices()


@pytest.mark.long
def test_many_args():
    xs = torch.arange(2000.0).reshape(500, 4)
    same(pmap(lambda xs: sum(xs))(list(xs)), xs.sum(0))


def test_a_number_is_stacked():
    x, y = sample(4), sample(())
    copies, stacked = pmap(lambda x, y: (x, y), "i", in_axes=(0, None))(x, y)
    same(copies, x)
    same(stacked, y.expand(4))
    assert len(shards(stacked)) == 4


def test_device_put_sharded_and_replicated():
    x = list(sample(4, 3))
    y = tp.device_put_sharded(x, tp.devices())
    same(y, torch.stack(x))
    assert places(y) == tp.devices()
    for block, row in zip(shards(y), x, strict=True):
        same(block, row[None])
    y = tp.device_put_replicated(x[0], tp.devices())
    same(y, x[0].expand(4, 3))
    assert len(shards(y)) == 4
    assert all(torch.equal(block, x[0][None]) for block in shards(y))


def test_device_put_of_trees():
    trees = [(k, {"a": torch.full((2,), float(k))}) for k in range(4)]
    number, tree = tp.device_put_sharded(trees, tp.devices())
    same(number, torch.arange(4))
    same(tree["a"], torch.arange(4.0)[:, None].expand(4, 2))
    tree = tp.device_put_replicated({"a": torch.arange(3), "b": (5.0,)}, tp.devices())
    same(tree["a"], torch.arange(3).expand(4, 3))
    same(tree["b"][0], torch.full((4,), 5.0))


def test_keys_on_the_devices():
    def f(key):
        return tp.random.randint(key, (3,), 0, 1000)

    keys = tp.random.split(tp.random.key(123), 4)
    expected = torch.stack([f(key) for key in keys])
    same(pmap(f)(tp.device_put_sharded(list(keys), tp.devices())), expected)
    same(pmap(f)(tp.device_put_replicated(keys[0], tp.devices())), expected[0].expand(4, 3))
    same(pmap(identity)(keys), keys)
    same(pmap(identity, in_axes=None, axis_size=4)(keys[1]), keys[1].expand(4, 2))
    same(pmap(identity, in_axes=None, out_axes=None, axis_size=4)(keys[1]), keys[1])


def test_a_static_argument_of_a_method():
    class Model:
        @tp.pmap(static_broadcasted_argnums=0, compile=EAGER)
        def mapped(self, x):
            return x + 2

    same(Model().mapped(torch.ones(1)), torch.full((1,), 3.0))


UNBOUND = "unbound axis name: batch"
ERRORS = {
    "non-hashable static argument": (
        ValueError, "Non-hashable static arguments are not supported",
        lambda: pmap(first, static_broadcasted_argnums=1)(ONES, np.asarray(1))),
    "sizes": (ValueError, "pmap got inconsistent sizes for array axes to be mapped",
        lambda: pmap(lambda x, y: x + y)(ONES, torch.ones(3))),
    "in_axes of a tree": (ValueError, "pmap in_axes[0]",
        lambda: pmap(first, in_axes=((0, 0, 0), 0))([COLUMN, COLUMN], COLUMN)),
    "in_axes of a tree in a tree": (ValueError, "pmap in_axes[0][0]",
        lambda: pmap(first, in_axes=([(0, 0), 0], 0))([[COLUMN, COLUMN], COLUMN], COLUMN)),
    "in_axes of keywords": (ValueError, "keyword",
        lambda: pmap(first, in_axes=((0, 0), 0))(x=(ONES, ONES), y=ONES)),
    "in_axes with a bool": (TypeError, "must be an int, None, or",
        lambda: pmap(identity, in_axes=(True,))),
    "out_axes of a tree": (ValueError, "pmap out_axes[1]",
        lambda: pmap(lambda x: (x, [x, x]), out_axes=(0, [0, 0, 0]))(ONES)),
    "more rows than devices": (ValueError, "Got axis_size=5, num_local_devices=4",
        lambda: pmap(identity, devices=tp.devices())(torch.ones(5))),
    "rows for one device": (ValueError, "num_local_devices=1",
        lambda: pmap(lambda x: 3, devices=tp.devices()[-1:])(torch.ones(2))),
    "fewer rows than devices": (ValueError,
        "must equal the number of local devices passed to pmap",
        lambda: pmap(lambda x: tp.psum(x, "i"), "i", devices=tp.devices())(torch.ones(3))),
    "no devices": (ValueError, "'devices' argument to pmap must be non-empty, or None",
        lambda: pmap(identity, devices=[])(ONES)),
    "devices of the inner function": (ValueError, "devices",
        lambda: nested_sums(devices=tp.devices()[:3])(torch.ones(2, 3))),
    "an unbound name": (NameError, UNBOUND, lambda: pmap(lambda x: tp.psum(x, "batch"))(ONES)),
    "an unbound name beside another": (NameError, UNBOUND,
        lambda: pmap(lambda x: tp.psum(x, "batch"), "i")(ONES)),
    "an unbound name, uncompiled": (NameError, UNBOUND,
        lambda: tp.pmap(lambda x: tp.axis_index("batch"), compile=False)(ONES)),
    "no permutation": (ValueError, "`perm` does not represent a permutation: [1, 1, 2, 3]",
        lambda: pmap(lambda x: tp.pshuffle(x, "i", [1, 1, 2, 3]), "i")(ONES)),
    "no arguments": (ValueError, "pmap requires at least one argument", lambda: pmap(double)()),
    "nothing in an argument": (ValueError, "pmap requires at least one argument",
        lambda: pmap(identity)({})),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "call"), ERRORS.values(), ids=ERRORS)
def test_errors(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_donated_value_is_gone(value):
    x = tp.device_put(torch.tensor([value, 1.0, 2.0, 3.0]), tp.devices())
    got = pmap(lambda x: tp.psum(x, "i"), "i", donate_argnums=0)(x)
    torch.testing.assert_close(got.to_host(), torch.full((4,), 6 + value), equal_nan=True)
    assert x.is_deleted()


def test_a_donated_result_is_gone():
    x = pmap(identity)(ONES)
    y = pmap(lambda x: x + x - x, donate_argnums=0)(x)
    assert x.is_deleted()
    same(y, ONES)


def test_donation_by_an_inner_function_is_ignored():
    inner = pmap(lambda x: x + 1, "j", donate_argnums=0)
    x = pmap(identity)(torch.ones(4, 2))
    same(pmap(lambda row: inner(row) + row, "i")(x), torch.full((4, 2), 3.0))
    assert not x.is_deleted()


# Constants and caches ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [4, 3])
def test_a_constant_is_on_the_devices_and_traced_once(number):
    devices = tp.devices() if number == 4 else tp.devices()[::-1][:number]
    f, traces = counted(lambda x: 3, devices=None if number == 4 else devices)
    for _ in range(2):
        got = f(torch.arange(number))
        same(got, [3] * number)
        assert places(got) == devices
    assert traces.n == 1


def test_constants_of_nested_functions_and_of_any_number_of_rows():
    devices = tp.devices()[::-1][:2]
    got = pmap(pmap(lambda x: 3, "j"), "i", devices=devices)(torch.zeros(2, 2, 3))
    same(got, [[3, 3], [3, 3]])
    assert places(got) == devices
    same(pmap(pmap(lambda x: 3))(torch.zeros(5, 2)), np.full((5, 2), 3))
    with pytest.warns(UserWarning, match="5 rows run on 1 of 4 devices"):
        same(pmap(lambda x: 3)(torch.ones(5)), [3] * 5)


def test_a_function_is_traced_once_for_each_kind_of_arguments():
    f, traces = counted(lambda x, y: x + y)
    for k in range(3):
        same(f(ONES, ONES * k), ONES + k)
    for k, got in enumerate(in_threads(6, lambda k: f(ONES, ONES * k))):
        same(got, ONES + k)
    assert traces.n == 1
    f(ONES.double(), ONES)
    assert traces.n == 2


def test_a_derivative_is_traced_once():
    f, traces = counted(torch.sin, axis_name="i")
    value, pull = torch.func.vjp(f, ONES)
    same(pull(ONES)[0], ONES.cos())
    same(value, ONES.sin())
    count = traces.n
    for _ in range(3):
        _, pull = torch.func.vjp(f, ONES)
        pull(ONES)
    assert traces.n == count


def test_a_function_that_is_gone_is_not_kept():
    class Callable:
        def __call__(self, x):
            return tp.psum(torch.ones(()), ()) + x

    f = Callable()
    there = weakref.ref(f)
    same(pmap(f)(ONES), ONES + 1)
    assert there() is not None
    del f
    gc.collect()
    assert there() is None


def test_wrapped():
    assert pmap(first).__wrapped__ is first


# Devices -----------------------------------------------------------------------------------------


def test_all_devices():
    x = sample(4, 3)
    same(pmap(difference, "i", devices=tp.devices())(x), x - x.sum(0))


def test_one_device():
    x = sample(1, 2)
    for k in (0, -1):
        got = pmap(lambda x: x.sin() + 1, devices=[tp.devices()[k]])(x)
        same(got, x.sin() + 1)
        assert got.devices() == {tp.devices()[k]}


def nested_sums(**inner):
    def f(x):
        return tp.psum(x.int(), "i"), tp.psum(x.int(), "j"), tp.psum(x.int(), ("i", "j")), x

    return pmap(pmap(f, "j", **inner), "i", devices=[tp.devices()[k] for k in (2, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("inner", [{}, {"backend": "cpu"}], ids=str)
def test_nested_pmaps_on_some_devices(dtype, inner):
    x = (torch.arange(6).reshape(2, 3) % 2).to(dtype)
    results = nested_sums(**inner)(x)
    sums = [x.int().sum(0), x.int().sum(1, keepdim=True), x.int().sum()]
    for got, expected in zip(results, [*(s.int().expand(2, 3) for s in sums), x], strict=True):
        same(got, expected)
        assert places(got) == [tp.devices()[k] for k in (2, 0)]


def test_a_backend_for_all_levels():
    x = torch.arange(4.0).reshape(2, 2)
    f = pmap(pmap(lambda x: tp.psum(x, ("i", "j")), "j", backend="cpu"), "i", backend="cpu")
    same(f(x), torch.full((2, 2), 6.0))


# Transforms of torch.func ------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", list(itertools.product([0, 1, 2], [0, 1])), ids=str)
@pytest.mark.parametrize("out_axes", list(itertools.product([0, 1], [0, 1])), ids=str)
def test_vmap_of_pmap(in_axes, out_axes):
    x = sample(4, 4, 4)

    def f(row):
        return row.cumsum(0)

    outer, inner = in_axes
    got = vmap(pmap(f, in_axes=inner, out_axes=out_axes[1]), outer, out_axes[0])(x)
    expected = vmap(vmap(f, inner, out_axes[1]), outer, out_axes[0])(x)
    same(got, expected)


BY_TORCH = [
    *("vp_several_arguments", "vp_keys", "vp_captured_scale", "vp_last_axis"),
    *("vp_all_gather_and_psum_scatter", "vp_captured_batch", "matrix_product_by_any_maps"),
]


@pytest.mark.parametrize("name", BY_TORCH)
def test_programs_with_a_vmap_of_torch_around(name, monkeypatch):
    (case,) = (case for case in cases.PORTED if case["id"] == name)
    inputs = {key: values.decode(value) for key, value in case["inputs"].items()}
    monkeypatch.setattr(tp, "vmap", lambda f, in_axes=0, out_axes=0: vmap(f, in_axes, out_axes))
    values.check(cases.run(case, "graph", inputs), values.expectation(case), values.widened(case))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, of x
def test_linearize(n):
    f = pmap(lambda x: tp.psum(x.sin(), "i") * x, "i")
    x, tangent = sample(n, 3), sample(n, 3, seed=1)
    value, push = torch.func.linearize(f, x)
    same(value, x.sin().sum(0) * x)
    same(push(tangent), (x.cos() * tangent).sum(0) * x + x.sin().sum(0) * tangent)


# Derivatives by autograd -------------------------------------------------------------------------


def check_grads(f, *args, order=2, forward=False):
    """Derivatives against finite differences, in float64."""
    inputs = tuple(x.double().requires_grad_() for x in args)
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=forward, fast_mode=True)
    if order > 1:
        assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)


def test_grad_of_psum(n):
    f = pmap(lambda x: tp.psum(x.sin() * x, "i"), "i")
    check_grads(lambda x: f(x).sum(0), sample(n, 2), forward=True)
    check_grads(f, sample(n, 1), forward=True)


@pytest.mark.parametrize("grouped", [False, True], ids=["all", "groups"])
@pytest.mark.parametrize("tiled", [False, True], ids=["stacked", "tiled"])
@pytest.mark.parametrize("name", ["all_gather", "psum_scatter"])
def test_grad_of(n, name, tiled, grouped):
    groups = [list(range(n))[::2], list(range(n))[1::2]] if grouped else None
    members = n // 2 if grouped else n
    collective = getattr(tp, name)
    f = pmap(lambda x: collective(x, "i", tiled=tiled, axis_index_groups=groups) ** 2, "i")
    w = sample(n, members, dtype=torch.float64)
    x = sample(n, 1, seed=1) if name == "all_gather" else sample(n, members, seed=1)
    check_grads(lambda x: (f(x).cpu().reshape(n, -1)[:, :members] * w[:, :1]).sum(), x)


def test_grad_of_a_cyclic_permutation(n):
    perm = [(k, (k + 1) % n) for k in range(n)]
    check_grads(pmap(lambda x: tp.ppermute(x, "i", perm) ** 2, "i"), sample(n), forward=True)


@pytest.mark.parametrize("out_axis", [0, 1, 2])
@pytest.mark.parametrize("second", [0, 1, None])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_pmap_all_axes_grad(first, second, out_axis):
    f = pmap(lambda x, y: (x @ y).sin().T, in_axes=(first, second), out_axes=out_axis)
    x = sample(2, 3).expand(2, 2, 3).contiguous().movedim(0, first)
    y = sample(3, seed=1) if second is None else sample(3, 2, seed=1).movedim(1, second)
    y = y[..., None] if second is None else y.unsqueeze(-1)
    check_grads(f, x.contiguous(), y.contiguous(), order=2 if first == second else 1)


def test_remat_of_pmap(n):
    f = pmap(lambda x: tp.psum(x.sin().sin(), "i") * x, "i")
    x = sample(n, 2).requires_grad_()
    checkpoint(f, x, use_reentrant=False).sum().backward()
    same(x.grad, torch.func.grad(lambda x: (x.sin().sin().sum(0) * x).sum())(x.detach()))


def test_a_rule_for_tangents(mode):
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)
            ctx.save_for_backward(*inputs)

        @staticmethod
        def jvp(ctx, t):
            (x,) = ctx.saved_tensors
            return 7 * x.cos() * t  # not the derivative, to be recognised

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 7 * x.cos() * g

    def f(x):
        return torch.func.jvp(Sine.apply, (x,), (torch.ones_like(x),))

    value, tangent = tp.pmap(f, compile=mode)(torch.arange(4.0))
    same(value, torch.arange(4.0).sin())
    same(tangent, 7 * torch.arange(4.0).cos())


def test_a_rule_for_cotangents(mode):
    class Sine(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x.cos() * g

    x = torch.arange(8.0)
    same(tp.pmap(tp.grad(Sine.apply), compile=mode)(x), 2 * x.cos())
    whole = tp.pmap(Sine.apply, compile=mode)
    same(torch.func.grad(lambda x: whole(x).sum())(x), 2 * x.cos())


ROWS_AT_ONCE = "two rows per device: torch.vmap has no requires_grad_"


@pytest.mark.parametrize(
    "n", [4, pytest.param(8, marks=pytest.mark.xfail(raises=RuntimeError, reason=ROWS_AT_ONCE))]
)
def test_random_numbers_of_each_row_in_a_checkpoint(n):
    def f(key, x):
        def loss(x):
            here = tp.random.fold_in(key, tp.axis_index("i"))
            return (x * tp.random.normal(here, (3,)) * (1 + tp.axis_index("i"))).sum()

        x = x.detach().requires_grad_()
        (got,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
        return got

    key = tp.random.key(0)
    got = tp.pmap(f, "i", in_axes=(None, 0), compile=False)(key, sample(n, 3))
    draws = [tp.random.normal(tp.random.fold_in(key, k), (3,)) * (1 + k) for k in range(n)]
    same(got, torch.stack(draws))


def test_an_axis_name_does_not_leak():
    def f(x):
        assert tp.axis_bound("i")
        assert not tp.axis_bound("j")
        return x

    mapped = pmap(f, "i", axis_size=1)
    got = torch.func.grad(lambda x: mapped(x[None])[0])(torch.tensor(3.0))
    assert float(got) == 1.0
    assert not tp.axis_bound("i")
