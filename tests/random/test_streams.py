"""Covers: random/_streams.py: torch's random functions inside a mapped function.

Shapes and dtypes are those of torch outside; distributions are checked by their moments.
"""

from math import e, pi

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _support import EAGER, mostly_long
from torch import distributions
from torch.nn import init

import torchpmap as tp
from torchpmap.random._samples import poisson

pytestmark = pytest.mark.usefixtures("pool")

LOG_NORMAL_DEVIATION = ((e**0.25 - 1) * e**0.25) ** 0.5
WEIGHTS = torch.tensor([0.1, 0.0, 0.7, 0.2])  # of mean 2 and variance 0.6
X = torch.tensor([[0.2, 0.4, 0.6], [0.1, 0.3, 0.5], [0.7, 0.8, 0.9], [0.15, 0.25, 0.35]])

SAMPLERS = {
    "rand": lambda x: torch.rand(5),
    "rand of a numpy size": lambda x: torch.rand(np.int64(3)),
    "rand of a shape": lambda x: torch.rand((2, 3), dtype=torch.float64),
    "rand complex": lambda x: torch.rand(4, dtype=torch.complex64),
    "randn": lambda x: torch.randn(5, 2),
    "randn complex": lambda x: torch.randn(5, dtype=torch.complex64),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(10, (50,)),
    "randint from": lambda x: torch.randint(-5, 5, size=(50,), dtype=torch.int32),
    "randint_like": lambda x: torch.randint_like(x, 3, 900),
    "randperm": lambda x: torch.randperm(20),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x),
    "normal of a shape": lambda x: torch.normal(1.0, 2.0, (3, 2)),
    "bernoulli": lambda x: torch.bernoulli(x.repeat(20)),
    "bernoulli with p": lambda x: torch.bernoulli(x.repeat(20), 0.3),
    "method bernoulli": lambda x: x.repeat(10).bernoulli(0.5),
    "multinomial": lambda x: torch.multinomial(x.repeat(9), 20),
    "method multinomial": lambda x: x.expand(5, 3).multinomial(9, replacement=True),
    "poisson": lambda x: torch.poisson(100 * x.repeat(3)),
    "operation": lambda x: torch.ops.aten.rand.default([3]),
}
IN_PLACE = {
    "uniform_": lambda x: x.clone().uniform_(2, 3),
    "uniform_ named": lambda x: x.clone().uniform_(to=4),
    "normal_": lambda x: torch.empty(3).normal_(mean=1.0),
    "log_normal_": lambda x: torch.empty(3).log_normal_(),
    "bernoulli_": lambda x: torch.empty(40).bernoulli_(0.5),
    "bernoulli_ of tensors": lambda x: torch.empty(60).bernoulli_(x.repeat(20)),
    "exponential_": lambda x: x.new(3).exponential_(2.0),
    "cauchy_": lambda x: torch.empty(3).cauchy_(1.0, 2.0),
    "geometric_": lambda x: torch.empty(30, dtype=torch.int64).geometric_(0.1),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(100),
    "random_ named": lambda x: x.new_empty(3).random_(**{"from": 3, "to": 1000}),
    "scatter_": lambda x: F.gumbel_softmax(torch.zeros(20, 5), hard=True),
    "a part": lambda x: (out := torch.empty(2, 3), out[0].normal_(), out[1].uniform_())[0],
}
DROPOUTS = {
    "dropout": lambda x: F.dropout(x.repeat(10), 0.5),
    "in place": lambda x: F.dropout(x.repeat(10), 0.5, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x.repeat(10), 0.5, True),
    "native_dropout": lambda x: torch.native_dropout(x.repeat(10), 0.5, True)[0],
    "module": lambda x: torch.nn.Dropout(0.5)(x.repeat(10)),
    "dropout1d": lambda x: F.dropout1d(x.repeat(20, 1), 0.5),
    "dropout2d": lambda x: F.dropout2d(x.repeat(1, 20, 1, 1), 0.5),
    "dropout3d": lambda x: F.dropout3d(x.repeat(1, 20, 1, 1, 1), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x.repeat(10), 0.5, training=True),
    "feature_alpha_dropout": lambda x: torch.nn.FeatureAlphaDropout(0.5)(x.repeat(1, 20, 1)),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu in place": lambda x: torch.nn.RReLU(inplace=True)(-x),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=0),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        torch.arange(3600.0).reshape(1, 60, 60).repeat(9, 1, 1) + x.sum(), 2, output_size=9
    ),
    "svd_lowrank": lambda x: torch.svd_lowrank(torch.eye(5, 4) + x[0], 2)[1],
}
INITS = {
    "uniform_": lambda x: init.uniform_(torch.empty(3, 4)),
    "normal_": lambda x: init.normal_(torch.empty(3, 4)),
    "trunc_normal_": lambda x: init.trunc_normal_(torch.empty(3, 4)),
    "trunc_normal_ of a tail": lambda x: init.trunc_normal_(torch.empty(3, 4), a=1.5, b=9.0),
    "xavier_uniform_": lambda x: init.xavier_uniform_(torch.empty(3, 4)),
    "xavier_normal_": lambda x: init.xavier_normal_(torch.empty(3, 4)),
    "kaiming_uniform_": lambda x: init.kaiming_uniform_(torch.empty(3, 4)),
    "kaiming_normal_": lambda x: init.kaiming_normal_(torch.empty(3, 4)),
    "orthogonal_": lambda x: init.orthogonal_(torch.empty(3, 4)),
    "sparse_": lambda x: init.sparse_(torch.empty(9, 4), 0.3),
    "beside constants": lambda x: (
        init.eye_(torch.empty(2, 2)) + init.ones_(x.new_empty(2, 2)) * x[0]
    ),
}
UNCHECKED = {"validate_args": False}  # a check reads values
DISTRIBUTIONS = {
    "Normal": lambda x: distributions.Normal(x, x, **UNCHECKED).rsample(),
    "Exponential": lambda x: distributions.Exponential(x, **UNCHECKED).rsample((2,)),
    "Laplace": lambda x: distributions.Laplace(x, x, **UNCHECKED).sample((2,)),
    "Categorical": lambda x: distributions.Categorical(x, **UNCHECKED).sample((40,)),
    "Poisson": lambda x: distributions.Poisson(100 * x, **UNCHECKED).sample(),
    "Geometric": lambda x: distributions.Geometric(x / 9, **UNCHECKED).sample((20,)),
    "Gamma": lambda x: distributions.Gamma(x, x, **UNCHECKED).sample((2,)),
}
GROUPS = {
    "samplers": SAMPLERS,
    "in place": IN_PLACE,
    "dropouts": DROPOUTS,
    "inits": INITS,
    "distributions": DISTRIBUTIONS,
}


def drawn(draw, mode=EAGER, rows=X, **options):
    torch.manual_seed(0)
    return tp.pmap(draw, compile=mode, **options)(rows).cpu()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of pools in vmap
@pytest.mark.parametrize("group", mostly_long(GROUPS, "in place"))
def test_every_row_draws_its_own_numbers(group):
    draws = GROUPS[group]
    expected = {name: torch.stack([draw(row) for row in X]) for name, draw in draws.items()}

    def all_of_them(x):
        return {name: draw(x) for name, draw in draws.items()}

    def run(rows, **options):
        torch.manual_seed(0)
        found = tp.pmap(all_of_them, **options)(rows)
        return {name: value.cpu() for name, value in found.items()}

    rows = torch.cat([X, X.flip(0)])  # two on every device
    shared = run(rows, compile=EAGER)
    others = {"alone": run(X, compile=EAGER), "uncompiled, alone": run(X, compile=False)}
    others["uncompiled"] = run(rows, compile=False)
    with tp.debug.fake_pmap(serial=True):
        others["serial"] = run(rows)
    for name, found in shared.items():
        assert (found[:4].shape, found.dtype) == (expected[name].shape, expected[name].dtype), name
        numbers = [row.tolist() for row in found]
        if name != "beside constants":
            assert all(a != b for k, a in enumerate(numbers) for b in numbers[:k]), name
        for mode, other in others.items():
            where = f"{name}, {mode}".format
            torch.testing.assert_close(
                other[name], found[: len(other[name])], msg=lambda text, of=where: f"{of()}: {text}"
            )


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda x: torch.rand(20_000), 0.5, 12**-0.5),
        (lambda x: torch.randn(20_000), 0.0, 1.0),
        (lambda x: torch.normal(3.0, 2.0, (20_000,)), 3.0, 2.0),
        (lambda x: torch.empty(20_000).exponential_(4.0), 0.25, 0.25),
        (lambda x: torch.empty(20_000).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
        (lambda x: torch.randint(0, 11, (20_000,)), 5.0, 10**0.5),
        (lambda x: torch.randint(5, high=16, size=(20_000,)), 10.0, 10**0.5),
        (lambda x: torch.bernoulli(torch.full((20_000,), 0.3)), 0.3, 0.21**0.5),
        (lambda x: F.dropout(torch.ones(20_000), 0.2), 1.0, 0.5),
        (lambda x: F.alpha_dropout(torch.randn(20_000), 0.3, True), 0.0, 1.0),
        (lambda x: F.rrelu(-torch.ones(20_000), 0.1, 0.5, True), -0.3, 0.4 * 12**-0.5),
        (lambda x: torch.poisson(torch.full((20_000,), 3.0)), 3.0, 3**0.5),
        (lambda x: torch.poisson(torch.full((20_000,), 1e6, dtype=torch.float64)), 1e6, 1e3),
        (lambda x: torch.empty(20_000).geometric_(0.25), 4.0, 12**0.5),
        (lambda x: torch.empty(20_000).log_normal_(0.0, 0.5), e**0.125, LOG_NORMAL_DEVIATION),
        (lambda x: torch.empty(20_000).cauchy_().atan(), 0.0, pi * 12**-0.5),
        (lambda x: torch.multinomial(WEIGHTS, 20_000, True), 2.0, 0.6**0.5),
        (lambda x: torch.multinomial(WEIGHTS.expand(20_000, 4), 1)[:, 0], 2.0, 0.6**0.5),
        (lambda x: torch.multinomial(WEIGHTS.expand(20_000, 4), 2)[:, 0], 2.0, 0.6**0.5),
        (lambda x: init.trunc_normal_(torch.empty(20_000)), 0.0, 0.8796),
        (lambda x: torch._standard_gamma(torch.full((20_000,), 0.5)), 0.5, 0.5**0.5),
        (lambda x: torch._standard_gamma(torch.full((20_000,), 9.0)), 9.0, 3.0),
    ],
)
def test_distributions(draw, mean, deviation):
    numbers = drawn(draw).double()
    assert numbers.mean(1).tolist() == pytest.approx([mean] * 4, abs=5 * deviation / 141)
    assert numbers.std(1).tolist() == pytest.approx([deviation] * 4, rel=0.05)
    correlations = torch.corrcoef(numbers) - torch.eye(4)
    assert correlations.abs().max() < 5 / 141


def test_random_gives_the_largest_number_and_takes_a_lower_limit_alone():
    numbers = drawn(lambda x: torch.empty(4000, dtype=torch.uint8).random_())
    assert (numbers.min(), numbers.max()) == (0, 255)  # as torch
    assert drawn(lambda x: torch.empty(60).random_(5, None)).min() >= 5


def several(x):
    return torch.stack([torch.randn(3), torch.rand(3), F.dropout(x, 0.5)])


@pytest.mark.long
@pytest.mark.parametrize("pool", [4, 2, 1], indirect=True)
def test_rows_draw_the_same_wherever_they_are(pool, mode):
    names = {4: (None, "i"), 2: ("i",), 1: (None,)}
    for axis_name in names[pool]:
        got = drawn(several, mode, axis_name=axis_name)
        assert torch.equal(EXPECTED.setdefault("rows", got), got)


EXPECTED = {}


def wrapped(x):
    q = x.repeat(1, 2, 5, 2)
    attention = F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)
    counts = torch.poisson(x * torch.tensor([1.0, 30.0, 3000.0]))
    picked = torch.multinomial(x, 3, replacement=True)
    return torch.cat([attention.flatten(), counts, picked, init.trunc_normal_(torch.empty(4))])


@pytest.mark.inductor
def test_compiled_by_inductor():
    assert torch.equal(drawn(several, True), drawn(several, EAGER))
    rows = torch.cat([X, X])  # two on each device
    torch.testing.assert_close(drawn(wrapped, True, rows), drawn(wrapped, EAGER, rows))


@pytest.mark.parametrize("mean", [0.0, 0.01, 2.0, 9.9, 10.0, 37.5, 2e3, 1e7])
def test_poisson_is_the_inverse_of_the_distribution_function(mean):
    rate = torch.full((2000,), mean, dtype=torch.float64)
    key = tp.random.key(3)
    unit, count = tp.random.uniform(key, (2000,), torch.float64), poisson(key, rate)
    assert (torch.special.gammaincc(count + 1, rate) > unit).all()
    assert ((torch.special.gammaincc(count.clamp_min(1), rate) <= unit) | (count == 0)).all()


def test_a_function_without_random_numbers_takes_none(mode):
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    tp.pmap(lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0), compile=mode)(X)
    assert torch.equal(torch.rand(2), expected)


def test_refused(mode):
    with pytest.raises(RuntimeError, match=r"draws random numbers \(randn\), but randomness='err"):
        drawn(lambda x: torch.randn(3), mode, randomness="error")
    with pytest.raises(ValueError, match="randn got a generator inside a mapped function"):
        drawn(lambda x: torch.randn(3, generator=torch.Generator()), mode)
    with pytest.raises(
        NotImplementedError, match=r"torch\.binomial.*: binomial draws random numbers"
    ):
        drawn(lambda x: torch.binomial(torch.full((3,), 5.0), x), mode)
    with pytest.raises(NotImplementedError, match=r"aten\.uniform.*uniform\.default draws random"):
        drawn(lambda x: torch.ops.aten.uniform.default(x), mode)
    with pytest.raises(RuntimeError, match=r"zeros.*uniform_ draws other numbers for every row"):
        drawn(lambda x: torch.zeros(3).uniform_(), mode, torch.cat([X, X]))
    same = drawn(lambda x: torch.zeros(3).uniform_(), mode, torch.cat([X, X]), randomness="same")
    assert torch.equal(same, same[:1].expand(8, 3))


class DrawsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        # torch runs this outside of all modes, also those that choose a device
        return cotangent * torch.rand(3, device=cotangent.device)


def test_a_draw_that_no_mode_sees_is_refused_with_its_line():
    def f(x):
        x = x.clone().requires_grad_()
        DrawsBackward.apply(x).sum().backward()
        assert x.grad is not None
        return x.grad

    with pytest.raises(
        NotImplementedError, match=r"cotangent \* torch\.rand.*aten\.rand\.default draws"
    ):
        drawn(f)
    with pytest.raises(NotImplementedError, match="an operation in the function draws"):
        drawn(f, False)


def test_a_seed_inside_is_that_of_the_streams(mode):
    def f(x, seed):
        first = torch.rand(3)
        torch.manual_seed(seed)
        return torch.stack([first, torch.rand(3), torch.rand(3)])

    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    mapped = tp.pmap(f, compile=mode, static_broadcasted_argnums=1)
    a, b, other = mapped(X, 3).cpu(), mapped(X, 3).cpu(), mapped(X, -5).cpu()
    torch.manual_seed(1)
    shared = mapped(torch.cat([X, X]), 3).cpu()
    torch.manual_seed(1)
    with tp.debug.fake_pmap(serial=True):
        serial = mapped(X, 3)
    assert torch.equal(a[:, 1:], b[:, 1:])
    assert not torch.equal(a[:, 0], b[:, 0])
    assert not torch.isin(other, a).any()
    assert len(set(a.flatten().tolist())) == a.numel()
    assert torch.equal(shared[:4], a)
    assert torch.equal(serial, a)
    torch.manual_seed(1)
    tp.pmap(lambda x: (torch.manual_seed(0), x + 1)[1], compile=mode)(X)
    assert torch.equal(torch.rand(2), expected)  # the caller's generator stays


def test_rows_own_the_memory_that_they_write_to(mode):
    def f(x):
        out = torch.empty(2, 3)
        out[0] = x
        torch.mul(x, 2, out=out[1])
        return out + torch.eye(2, 3, out=torch.empty(2, 3))

    rows = torch.cat([X, X])
    expected = torch.stack([rows, 2 * rows], 1) + torch.eye(2, 3)
    torch.testing.assert_close(tp.pmap(f, compile=mode)(rows).cpu(), expected)


def test_inner_vmaps_say_whether_rows_differ(mode):
    rows = torch.zeros(4, 5)
    different = drawn(lambda x: tp.vmap(lambda _: torch.rand(()))(x), mode, rows)
    assert len(set(different.flatten().tolist())) == 20
    same = drawn(lambda x: tp.vmap(lambda _: torch.rand(()), randomness="same")(x), mode, rows)
    assert [len(set(row)) for row in same.tolist()] == [1] * 4
    assert len(set(same[:, 0].tolist())) == 4
    with pytest.raises(RuntimeError, match="randomness error mode"):
        drawn(lambda x: torch.func.vmap(lambda _: torch.rand(()))(x), mode, rows)
    nested = drawn(lambda x: tp.pmap(lambda _: torch.rand(()))(x), mode, rows)
    assert len(set(nested.flatten().tolist())) == 20


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_call_inside_a_named_vmap_draws_only_what_it_uses(randomness):
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    double = tp.vmap(tp.pmap(lambda x: 2 * x), axis_name="j", randomness=randomness)
    assert torch.equal(double(X), 2 * X)
    assert torch.rand(()) == expected
    drawn = tp.vmap(tp.pmap(lambda x: x + torch.rand(())), axis_name="j", randomness="error")
    with pytest.raises(RuntimeError, match="randomness error mode"):
        drawn(X)


def test_vmap_from_outside_says_whether_rows_differ(mode):
    f = tp.pmap(lambda x: torch.rand(()) + 0 * x.sum(), compile=mode)
    batch = torch.stack([X, X, X])
    different = torch.func.vmap(f, randomness="different")(batch).cpu()
    assert len(set(different.flatten().tolist())) == 12
    same = torch.func.vmap(f, randomness="same")(batch).cpu()
    assert torch.equal(same, same[:1].expand(3, 4))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.func.vmap(f)(batch)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("around", [tp.vmap, torch.func.vmap])
def test_a_vmap_around_a_call_draws_the_same_numbers_everywhere(around, randomness):
    """With "different", those of one call after the other."""

    def draw(x):
        total, _ = tp.scan(lambda c, _: (c + torch.rand(()), None), x, None, length=2)
        return total + torch.vmap(lambda x: x + torch.rand(()), randomness="different")(x[None])

    def rows(compile):
        torch.manual_seed(3)
        f = tp.pmap(draw, compile=compile)
        return around(lambda x: f(x), randomness=randomness)(torch.zeros(3, 8)), torch.rand(1)

    torch.manual_seed(3)
    calls = torch.stack([tp.pmap(draw, compile=EAGER)(torch.zeros(8)).cpu() for _ in range(3)])
    expected = calls if randomness == "different" else calls[:1].expand(3, 8, 1)
    after = torch.rand(1)
    for compile in (EAGER, False):
        torch.testing.assert_close(rows(compile)[0].cpu(), expected)
    with tp.debug.fake_pmap():
        found, next_number = rows(EAGER)
    torch.testing.assert_close(found, expected)
    assert torch.equal(next_number, after) == (randomness == "different")


@pytest.mark.parametrize(
    "around", [torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]]
)
def test_a_mapped_function_made_inside_a_transform_draws_as_others_do(mode, around):
    """Where rows share a device, too."""
    rows = torch.cat([X, X])

    def derivative(make):
        torch.manual_seed(0)
        return around(lambda x: make()(x).square().sum())(rows)

    made = tp.pmap(several, compile=mode)
    expected = derivative(lambda: made)
    torch.testing.assert_close(derivative(lambda: tp.pmap(several, compile=mode)), expected)
