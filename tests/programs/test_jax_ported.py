"""What JAX's ``tests/pmap_test.py`` says of pmap beside the values of single programs.

Covers: pmap with torch.compile, where results are, caches, a vmap of torch around, derivatives by
autograd. The values are in ``parity/ported_cases.json``, whose programs test_jax_parity.py runs in
all modes; messages, donation and tensors of results are tested in transforms/ and sharded/.
Expectations are torch's on the whole array, or mathematics.
"""

import functools
import gc
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo.exc
from _spies import counted
from _support import EAGER, in_threads
from parity import cases, values
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

pmap = functools.partial(tp.pmap, compile=EAGER)
jit = functools.partial(torch.compile, backend="eager")

ONES = torch.ones(4)
X = torch.arange(12.0).reshape(4, 3)


def same(result, expected):
    """Shapes and values agree; dtypes too, unless the expectation is of Python numbers."""
    got = result.to_host() if isinstance(result, tp.ShardedTensor) else torch.as_tensor(result)
    check_dtype = isinstance(expected, torch.Tensor | np.ndarray)
    wanted = torch.as_tensor(expected)
    torch.testing.assert_close(got.detach(), wanted.detach(), check_dtype=check_dtype)


def sample(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def places(x):
    return [shard.device for shard in x.addressable_shards]


def difference(x):
    return x - tp.psum(x, "i")


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize("where", ["inside", "a part", "around", "around, disabled", "itself"])
def test_jit_and_pmap(where, reverse):
    devices = tp.devices()[::-1] if reverse else None
    inner = {"inside": jit(difference), "a part": lambda x: jit(difference)(x)}
    mapped = pmap(inner.get(where, difference), "i", devices=devices)
    if where == "around, disabled":
        mapped = torch.compiler.disable(mapped)
    if where == "itself":
        mapped = jit(mapped)
    function = jit(lambda x: mapped(x * 2) * 1) if "around" in where else lambda x: mapped(2 * x)
    x = sample(4, 4)
    same(function(x), 2 * (x - x.sum(0)))


def test_composition_with_jit_twice():
    @jit
    def f(x):
        y = x * 2

        @jit
        def g(z):
            return pmap(lambda x: x[None] * y)(z) * 1

        return g(x)

    same(f(torch.ones(4, 1)), torch.full((4, 4, 1), 2.0))


# Results -----------------------------------------------------------------------------------------


def test_threadsafe_indexing():
    x = sample(4, 50, 20)
    y = pmap(lambda x: x + 0)(x)
    results = in_threads(8, lambda k: torch.stack([y[(k + j) % 4] for j in range(4)]))
    for k, got in enumerate(results):
        same(got, x.roll(-k, 0))


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
    assert [shard.data.shape for shard in got.addressable_shards] == [(1, *got.shape[1:])] * 4


def test_device_put_replicated():
    x, three = sample(3), tp.devices()[:3]
    tree = tp.device_put_replicated({"a": x, "b": (5.0,)}, three)
    same(tree["a"], x.expand(3, 3))
    same(tree["b"][0], torch.full((3,), 5.0))
    for y, block in ((tree["a"], x[None]), (tree["b"][0], torch.tensor([5.0]))):
        assert places(y) == three
        assert all(torch.equal(shard.data, block) for shard in y.addressable_shards)


@pytest.mark.long
def test_many_args():
    xs = torch.arange(2000.0).reshape(500, 4)
    same(pmap(lambda xs: sum(xs))(list(xs)), xs.sum(0))


def test_donation_by_an_inner_function_is_ignored():
    inner = pmap(lambda x: x + 1, "j", donate_argnums=0)
    x = pmap(lambda x: x)(torch.ones(4, 2))
    same(pmap(lambda row: inner(row) + row, "i")(x), torch.full((4, 2), 3.0))
    assert not x.is_deleted()


# Caches ------------------------------------------------------------------------------------------


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


# Transforms of torch.func ------------------------------------------------------------------------


BY_TORCH = [
    *("vp_all_axes", "vp_several_arguments", "vp_keys", "vp_captured_scale", "vp_last_axis"),
    *("vp_all_gather_and_psum_scatter", "vp_captured_batch", "matrix_product_by_any_maps"),
]


@pytest.mark.parametrize("name", BY_TORCH)
def test_programs_with_a_vmap_of_torch_around(name, monkeypatch):
    (case,) = (case for case in cases.PORTED if case["id"] == name)
    inputs = {key: values.decode(value) for key, value in case["inputs"].items()}
    monkeypatch.setattr(tp, "vmap", lambda f, in_axes=0, out_axes=0: vmap(f, in_axes, out_axes))
    values.check(cases.run(case, "graph", inputs), values.expectation(case), values.widened(case))


# Derivatives by autograd -------------------------------------------------------------------------


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
