"""Covers: random: every function against the numbers that jax draws, wherever it runs."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _support import EAGER
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import torchpmap as tp
from torchpmap import random
from torchpmap._trace.compile import compile_definition
from torchpmap._trace.toolchain import cpp_compiler, warm_up
from torchpmap.random._threefry import threefry2x32, whole

CASES = json.loads((Path(__file__).parent / "random_cases.json").read_text())["cases"]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
BITS[torch.float64] = torch.int64

# Programs of these are as jax's but for rounding; all others are equal, bit by bit.
ULPS = {"normal": 4, "exponential": 2, "laplace": 2}
ABSOLUTE = {"gumbel": 5e-7, "logistic": 5e-7, "truncated_normal": 1e-6}


def namespace():
    """What the programs may name: as in tests/programs/parity/generate_random.py."""
    names = {name: getattr(random, name) for name in random.__all__}
    widths = (
        "uint8 uint16 uint32 uint64 int8 int16 int32 int64",
        "float16 float32 float64 bfloat16",
    )
    names |= {name: getattr(torch, name) for name in " ".join(widths).split()}
    return names | {"array": lambda x, dtype: torch.tensor(x, dtype=dtype), "vmap": tp.vmap}


def stored(case):
    dtype = getattr(torch, case["dtype"])
    if not dtype.is_floating_point:
        return torch.tensor(np.array(case["data"], case["dtype"]).reshape(case["shape"]))
    unsigned = np.array(case["data"], f"uint{8 * dtype.itemsize}")
    return (
        torch.tensor(unsigned.view(f"int{8 * dtype.itemsize}")).view(dtype).reshape(case["shape"])
    )


def ordinal(x):
    """Consecutive integers for consecutive floating-point numbers."""
    pattern = x.view(BITS[x.dtype]).to(torch.int64)
    smallest = -(2 ** (8 * x.dtype.itemsize - 1))
    return torch.where(pattern < 0, smallest - pattern, pattern)


def assert_equal(actual, expected):
    """The same numbers; int64 may stand for jax's uint32 (in keys) and int32 (in positions)."""
    assert actual.shape == expected.shape
    assert actual.dtype in (expected.dtype, torch.int64)
    if expected.is_floating_point():
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    else:
        assert actual.tolist() == expected.tolist()


def assert_close_to_jax(program, actual, expected):
    name = next((name for name in (*ULPS, *ABSOLUTE) if f"{name}(" in program), None)
    if expected.dtype == torch.float64 and "-3.7" in program:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-15)
    elif name is None:
        assert_equal(actual, expected)
    elif expected.dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=2e-12, atol=0)
    elif name in ULPS:
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        apart = (ordinal(actual) - ordinal(expected)).abs()
        assert (apart <= ULPS[name]).all(), (apart, actual, expected)
    else:
        widened = torch.finfo(expected.dtype).eps / torch.finfo(torch.float32).eps
        tolerance = ABSOLUTE[name] * widened
        torch.testing.assert_close(actual, expected, rtol=4e-7 * widened, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["program"][:70])
def test_numbers_are_those_of_jax(case):
    actual = eval(case["program"], namespace())
    assert_close_to_jax(case["program"], actual, stored(case))


def result(program):
    """What jax draws."""
    return stored(next(case for case in CASES if case["program"] == program))


# -- where the functions run -----------------------------------------------------------------------

DRAWS = {
    "split": lambda key: random.split(key, (2, 3)),
    "fold_in": lambda key: random.fold_in(key, 7),
    "key": lambda key: random.key(key[1]),
    "bits": lambda key: random.bits(key, (5,)),
    "bits 8": lambda key: random.bits(key, (5,), torch.uint8),
    "bits 64": lambda key: random.bits(key, (5,), torch.uint64),
    "uniform": lambda key: random.uniform(key, (5,), minval=-3.7, maxval=2.1),
    "uniform 16": lambda key: random.uniform(key, (5,), torch.float16, maxval=torch.ones(5)),
    "normal": lambda key: random.normal(key, (2, 3)),
    "normal 64": lambda key: random.normal(key, (), torch.float64),
    "truncated_normal": lambda key: random.truncated_normal(key, -1.0, torch.ones(3)),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (5,)),
    "bernoulli of tensor": lambda key: random.bernoulli(key, torch.tensor([0.3, 0.9])),
    "randint": lambda key: random.randint(key, (5,), 0, 10),
    "randint 64": lambda key: random.randint(key, (5,), -5, 2**62, torch.int64),
    "permutation": lambda key: random.permutation(key, 9),
    "permutation of rows": lambda key: random.permutation(key, torch.arange(6).reshape(3, 2)),
    "choice": lambda key: random.choice(key, 9, (2, 2)),
    "choice without": lambda key: random.choice(key, torch.arange(9.0), (4,), replace=False),
    "choice p": lambda key: random.choice(key, 3, (4,), p=[0.2, 0.3, 0.5]),
    "choice without p": lambda key: random.choice(key, 3, (2,), False, torch.tensor([1, 2, 3])),
    "exponential": lambda key: random.exponential(key, (5,)),
    "gumbel": lambda key: random.gumbel(key, (5,)),
    "laplace": lambda key: random.laplace(key, (5,)),
    "logistic": lambda key: random.logistic(key, (5,)),
    "categorical": lambda key: random.categorical(key, torch.zeros(3, 4)),
    "categorical without": lambda key: random.categorical(
        key, torch.zeros(3, 4), shape=(2, 3), replace=False
    ),
    "rademacher": lambda key: random.rademacher(key, (5,)),
    "empty": lambda key: random.normal(key, (2, 0)),
}


SOME = [
    "split", "bits", "uniform", "normal", "randint 64", "permutation", "choice p", "categorical",
]  # fmt: skip


def draw_all(key):
    return {name: draw(key) for name, draw in DRAWS.items()}


def draw_some(key):
    return {name: DRAWS[name](key) for name in SOME}


def assert_all_close(actual, expected):
    """Equal, but for the last places of numbers that come from a logarithm."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        found = actual[name].cpu() if isinstance(actual[name], tp.ShardedTensor) else actual[name]
        assert (found.shape, found.dtype) == (value.shape, value.dtype), name
        if name.split()[0] in (*ULPS, *ABSOLUTE):
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)
        else:
            assert found.tolist() == value.tolist(), name


def one_by_one(keys):
    drawn = [draw_all(key) for key in keys]
    return {name: torch.stack([draws[name] for draws in drawn]) for name in DRAWS}


@pytest.mark.parametrize("vmap", [tp.vmap, torch.func.vmap])
def test_keys_in_a_batch_draw_what_each_draws_alone(vmap):
    keys = random.split(random.key(5), 3)
    assert_all_close(vmap(draw_all)(keys), one_by_one(keys))


def test_keys_in_the_last_dim_of_a_batch_of_batches():
    keys = random.split(random.key(5), (2, 3)).permute(2, 1, 0)
    drawn = tp.vmap(tp.vmap(lambda key: random.permutation(key, 7), 1), 2)(keys)
    expected = [
        [random.permutation(key, 7).tolist() for key in row] for row in keys.permute(2, 1, 0)
    ]
    assert drawn.tolist() == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("pool", "compile"), [(2, EAGER), (4, EAGER), (4, False)], indirect=["pool"]
)
def test_one_key_per_device_draws_what_a_batch_of_keys_draws(pool, compile):
    keys = random.split(random.key(8), 4)
    assert_all_close(tp.pmap(draw_some, compile=compile)(keys), tp.vmap(draw_some)(keys))


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_the_axis_index_folded_in_gives_every_device_its_own_key(pool, mode):
    def draw(key):
        mine = random.fold_in(key, tp.axis_index("i"))
        return random.bits(mine, (3,)), random.normal(mine, (3,))

    mapped = tp.pmap(draw, "i", in_axes=None, axis_size=4, compile=mode)
    bits, normals = mapped(random.key(21))
    programs = [
        f"vmap(lambda i: {draw}(fold_in(key(21), i), (3,)))(array([0, 1, 2, 3], int32))"
        for draw in ("bits", "normal")
    ]
    assert_equal(bits.cpu(), result(programs[0]))
    assert_close_to_jax(programs[1], normals.cpu(), result(programs[1]))


def test_a_key_made_inside_or_closed_over_is_one_key(pool, mode):
    outside = random.key(9)

    def draw(x):
        return x + random.bits(random.key(9)).to(torch.int64), x + random.bits(outside).to(x.dtype)

    expected = [int(result("bits(key(9), ())"))] * 4
    first, second = tp.pmap(draw, compile=mode)(torch.zeros(4, dtype=torch.int64))
    assert first.tolist() == second.tolist() == expected


def test_a_key_on_the_devices_is_a_key(pool):
    keys = tp.pmap(random.split, compile=EAGER)(random.split(random.key(6), 4))
    assert isinstance(keys, tp.ShardedTensor)
    found = random.uniform(keys[2, 1], (3,))
    assert found.tolist() == random.uniform(keys.cpu()[2, 1], (3,)).tolist()


COMPILE = partial(torch.compile, backend="eager", fullgraph=True)  # without graph breaks


@pytest.mark.long
@pytest.mark.parametrize(
    "trace", [lambda f: make_fx(f)(random.key(0)), COMPILE], ids=["fx", "dynamo"]
)
def test_traced_functions_take_the_key_as_input(trace):
    drawn = trace(draw_some)
    for seed in (0, 3, -7):
        assert_all_close(drawn(random.key(seed)), draw_some(random.key(seed)))


def test_fake_tensors():
    real = draw_all(random.key(0))
    with FakeTensorMode():
        fake = draw_all(random.key(0))
    kinds = {name: (value.shape, value.dtype) for name, value in real.items()}
    assert {name: (value.shape, value.dtype) for name, value in fake.items()} == kinds


class Called(TorchDispatchMode):
    """Notes which operations are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.namespace)
        return func(*args, **(kwargs or {}))


@pytest.mark.inductor
@pytest.mark.skipif(not cpp_compiler(), reason="no C++ compiler")
@pytest.mark.cpu_only("it compiles here what it traces for the devices")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is")  # Inductor's imports
@pytest.mark.parametrize("pool", [1], indirect=True)
def test_inductor_makes_one_kernel_of_a_hash(pool):
    definition = (
        tp.pmap(random.normal, static_broadcasted_argnums=1)
        .lower(random.key(0)[None], (3,))
        ._plan.definition
    )
    from torch._inductor.utils import fresh_cache  # a long import

    with fresh_cache():
        warm_up()  # as the process does from which workers are forked
        run = compile_definition(definition, torch.tensor(0))
        with Called() as called:
            run([random.key(0)[None]])
    assert "torchpmap_random" not in called.names


def test_large_counts_use_both_words():
    """There is no memory for 2**32 numbers: some counters, as jax.extend.random.threefry_2x32."""
    counts = torch.tensor([2**32 - 1, 2**32, 2**40 + 5])
    found = threefry2x32((torch.tensor(1), torch.tensor(2**32 - 1)), (counts >> 32, counts % 2**32))
    assert found[0].tolist() == [3046119398, 3261087446, 670244327]
    assert found[1].tolist() == [2571910781, 1899787091, 1933018954]


@pytest.mark.parametrize("in_dims", [(0, 0, None, None), (None, None, 1, 0), (0, None, 2, None)])
def test_the_hash_as_one_operation(in_dims):
    """As a traced function has it, also batched, against the arithmetic that it stands for."""
    generator = torch.Generator().manual_seed(0)
    words = []
    for shape, dim in zip([(), (), (2, 1), (3,)], in_dims, strict=True):
        shape = list(shape)
        if dim is not None:
            shape.insert(dim, 5)
        words.append(torch.randint(2**32, shape, generator=generator))

    def hashed(a, b, c, d):
        return threefry2x32((a, b), (c, d))

    expected = torch.func.vmap(hashed, in_dims)(*words)
    with whole():
        found = torch.func.vmap(hashed, in_dims)(*words)
        graph = make_fx(torch.func.vmap(hashed, in_dims), tracing_mode="fake")(*words)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert [x.tolist() for x in graph(*words)] == [x.tolist() for x in expected]
    (node,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.torchpmap_random.threefry2x32.default
    )
    assert [(x.shape, x.dtype) for x in node.meta["val"]] == [((5, 2, 3), torch.int64)] * 2


# -- derivatives -----------------------------------------------------------------------------------


def test_gradients_of_the_bounds_of_uniform():
    key = random.key(1)
    low, high = torch.tensor([1.0, 2.0]), torch.tensor(5.0)
    jacobian = torch.func.jacrev(lambda *to: random.uniform(key, (2,), minval=to[0], maxval=to[1]))
    u = random.uniform(key, (2,))
    torch.testing.assert_close(jacobian(low, high), torch.diag(1 - u))
    forward = torch.func.jacfwd(lambda to: random.uniform(key, (2,), minval=low, maxval=to))(high)
    torch.testing.assert_close(forward, u)


def test_derivatives_of_the_limits_of_truncated_normal():
    key = random.key(1)

    def draw(limits):
        return random.truncated_normal(key, limits[0], limits[1], (4,), torch.float64)

    limits = torch.tensor([-0.7, 1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(draw, limits, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(draw, limits)
    single = torch.func.jacrev(
        lambda limits: random.truncated_normal(key, limits[0], limits[1], (4,))
    )(limits.detach().float())
    assert single.isfinite().all()


def test_numbers_are_limits_in_the_dtype_of_the_result():
    key, limits = random.key(1), torch.tensor([-0.1, 0.2], dtype=torch.float64)
    found = random.truncated_normal(key, -0.1, 0.2, (99,), torch.float64)
    assert torch.equal(found, random.truncated_normal(key, *limits, (99,), torch.float64))


def test_gradient_of_a_permutation_is_permuted_back():
    x, weights = torch.arange(6.0), torch.arange(6.0) ** 2
    key = random.key(1)
    found = tp.grad(lambda x: random.permutation(key, x) @ weights)(x)
    expected = torch.empty(6)
    expected[random.permutation(key, 6)] = weights
    assert found.tolist() == expected.tolist()


# -- properties ------------------------------------------------------------------------------------

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(
    SEEDS,
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2, unique=True).map(sorted),
    st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]),
)
def test_randint_stays_within_its_bounds(seed, bounds, dtype):
    info = torch.iinfo(dtype)
    low, high = (max(info.min, min(info.max, bound)) for bound in bounds)
    drawn = random.randint(random.key(seed), (50,), *bounds, dtype).tolist()
    assert all(low <= x <= max(low, high - (bounds[1] <= info.max)) for x in drawn)


@given(SEEDS, st.integers(1, 60), st.data())
def test_choice_without_replacement_picks_different_ones(seed, size, data):
    draws = data.draw(st.integers(0, size))
    p = data.draw(st.none() | st.lists(st.floats(0.01, 10), min_size=size, max_size=size))
    picked = random.choice(random.key(seed), size, (draws,), replace=False, p=p).tolist()
    assert len(set(picked)) == draws
    assert set(picked) <= set(range(size))


@given(SEEDS, st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_uniform_stays_below_1_and_normal_is_finite(seed, dtype):
    key = random.key(seed)
    drawn = random.uniform(key, (500,), dtype)
    assert ((drawn >= 0) & (drawn < 1)).all()
    for draw in (random.normal, random.gumbel, random.laplace, random.logistic, random.exponential):
        assert draw(key, (500,), dtype).isfinite().all()
    limited = random.truncated_normal(key, -0.5, 0.25, (500,), dtype)
    assert ((limited > -0.5) & (limited < 0.25)).all()


@given(SEEDS)
def test_what_has_no_probability_is_never_drawn(seed):
    key = random.key(seed)
    p = [0.0, 0.5, 0.0, 0.5, 0.0]
    assert set(random.choice(key, 5, (100,), p=p).tolist()) <= {1, 3}
    assert set(random.choice(key, 5, (2,), False, p).tolist()) == {1, 3}
    logits = torch.tensor(p).log()
    assert set(random.categorical(key, logits, shape=(100,)).tolist()) <= {1, 3}
    assert not random.bernoulli(key, 0.0, (100,)).any()
    assert random.bernoulli(key, 1.0, (100,)).all()


def test_keys_of_numpy_and_back():
    words = np.array([1797259609, 4294967295], np.uint32)
    key = torch.tensor(words, dtype=torch.int64)
    assert random.split(key).shape == (2, 2)
    assert key.numpy().astype(np.uint32).tolist() == words.tolist()  # it is not used up


def test_where_the_numbers_live():
    on_meta = random.key(torch.tensor(3), device="meta")
    assert random.key(3, device="meta").device.type == on_meta.device.type == "meta"
    for name in ("split", "fold_in", "key", *SOME[1:6]):
        assert DRAWS[name](on_meta).device.type == "meta", name


def test_public_names():
    assert random.__all__ == sorted(random.__all__)
    assert random is tp.random
    assert random.PRNGKey is random.key
    for name in random.__all__:
        assert "Example:" in getattr(random, name).__doc__
