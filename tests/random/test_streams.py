"""Covers: random/_streams.py: torch's random functions inside a mapped function.

Shapes and dtypes are those of torch outside; distributions are checked by their moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

EAGER = {"backend": "eager"}
X = torch.tensor([[0.2, 0.4, 0.6], [0.1, 0.3, 0.5], [0.7, 0.8, 0.9], [0.15, 0.25, 0.35]])

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: torch.rand(5),
    "rand of a shape": lambda x: torch.rand((2, 3), dtype=torch.float64),
    "randn": lambda x: torch.randn(5, 2),
    "randn complex": lambda x: torch.randn(5, dtype=torch.complex64),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(10, (50,)),
    "randint from": lambda x: torch.randint(-5, 5, size=(50,), dtype=torch.int32),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "randperm": lambda x: torch.randperm(20),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of a shape": lambda x: torch.normal(1.0, 2.0, (3, 2)),
    "bernoulli": torch.bernoulli,
    "method bernoulli": lambda x: x.repeat(10).bernoulli(0.5),
    "uniform_": lambda x: x.clone().uniform_(2, 3),
    "uniform_ named": lambda x: x.clone().uniform_(to=4),
    "normal_": lambda x: x.clone().normal_(mean=1.0),
    "bernoulli_": lambda x: x.repeat(10).bernoulli_(0.5),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(100),
    "dropout": lambda x: F.dropout(x.repeat(10), 0.5),
    "torch.dropout": lambda x: torch.dropout(x.repeat(10), 0.5, True),
    "module": lambda x: torch.nn.Dropout(0.5)(x.repeat(10)),
    "dropout1d": lambda x: F.dropout1d(x.repeat(20, 1), 0.5),
    "dropout2d": lambda x: F.dropout2d(x.repeat(1, 20, 1, 1), 0.5),
    "init": lambda x: torch.nn.init.xavier_uniform_(torch.empty(3, 4)),
}


def drawn(draw: Any, mode: Any = EAGER, rows: Any = X, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return tp.pmap(draw, compile=mode, **options)(rows).cpu()


@pytest.mark.parametrize("name", DRAWS)
def test_every_row_draws_its_own_numbers(name: str) -> None:
    expected = torch.stack([DRAWS[name](row) for row in X])
    results = []
    for mode in (EAGER, False):
        f = tp.pmap(DRAWS[name], compile=mode)
        for _ in range(2):  # traced once, as a trace is hundreds of operations
            torch.manual_seed(0)
            results.append(f(X).cpu())
    got = results[0]
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    numbers = [row.tolist() for row in got] if name != "bernoulli" else []  # of 3 numbers
    assert all(a != b for k, a in enumerate(numbers) for b in numbers[:k])
    assert all(torch.equal(other, got) for other in results[1:])


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda x: torch.rand(20_000), 0.5, 12**-0.5),
        (lambda x: torch.randn(20_000), 0.0, 1.0),
        (lambda x: torch.normal(3.0, 2.0, (20_000,)), 3.0, 2.0),
        (lambda x: torch.empty(20_000).exponential_(4.0), 0.25, 0.25),
        (lambda x: torch.empty(20_000).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
        (lambda x: torch.randint(0, 11, (20_000,)), 5.0, 10**0.5),
        (lambda x: torch.bernoulli(torch.full((20_000,), 0.3)), 0.3, 0.21**0.5),
        (lambda x: F.dropout(torch.ones(20_000), 0.2), 1.0, 0.5),
    ],
)
def test_distributions(draw: Any, mean: float, deviation: float) -> None:
    numbers = drawn(draw).double()
    assert numbers.mean(1).tolist() == pytest.approx([mean] * 4, abs=5 * deviation / 141)
    assert numbers.std(1).tolist() == pytest.approx([deviation] * 4, rel=0.05)
    correlations = torch.corrcoef(numbers) - torch.eye(4)
    assert correlations.abs().max() < 5 / 141


def several(x: torch.Tensor) -> Any:
    return torch.stack([torch.randn(3), torch.rand(3), F.dropout(x, 0.5)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pool", [4, 2, 1], indirect=True)
def test_rows_draw_the_same_wherever_they_are(pool: int, mode: Any) -> None:
    names = {4: (None, "i"), 2: ("i",), 1: (None,)}
    for axis_name in names[pool]:
        got = drawn(several, mode, axis_name=axis_name)
        assert torch.equal(EXPECTED.setdefault("rows", got), got)


EXPECTED: dict[str, torch.Tensor] = {}


@pytest.mark.inductor
def test_compiled_by_inductor() -> None:
    assert torch.equal(drawn(several, True), drawn(several, EAGER))


def test_calls_and_draws_differ(mode: Any) -> None:
    torch.manual_seed(0)
    f = tp.pmap(lambda x: torch.stack([torch.randn(3), torch.randn(3)]), compile=mode)
    one, two = f(X).cpu(), f(X).cpu()
    assert not torch.equal(one, two)
    assert not torch.equal(one[:, 0], one[:, 1])
    torch.manual_seed(0)
    assert torch.equal(f(X).cpu(), one)
    assert torch.equal(f(X).cpu(), two)


def test_a_function_without_random_numbers_takes_none(mode: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    tp.pmap(lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0), compile=mode)(X)
    assert torch.equal(torch.rand(2), expected)


def test_same_numbers_for_all(mode: Any) -> None:
    got = drawn(lambda x: torch.randn(3), mode, randomness="same")
    assert torch.equal(got, got[:1].expand(4, 3))
    lanes = drawn(lambda x: torch.randn(3), mode, torch.zeros(8), randomness="same")
    assert torch.equal(lanes, got[:1].expand(8, 3))


def test_refused(mode: Any) -> None:
    with pytest.raises(RuntimeError, match=r"draws random numbers \(randn\), but randomness='err"):
        drawn(lambda x: torch.randn(3), mode, randomness="error")
    with pytest.raises(ValueError, match="randn got a generator inside a mapped function"):
        drawn(lambda x: torch.randn(3, generator=torch.Generator()), mode)
    with pytest.raises(NotImplementedError, match=r"no streams per device\. Use torch\.rand"):
        drawn(lambda x: torch.multinomial(x, 2), mode)


def test_inner_vmaps_say_whether_rows_differ(mode: Any) -> None:
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


def test_a_gradient_sees_the_numbers_of_its_call(mode: Any) -> None:
    f = tp.pmap(lambda x: (F.dropout(x, 0.5) ** 2).sum(), compile=mode)
    x = X.repeat(1, 10).requires_grad_()
    out = f(x)
    out.sum().backward()
    assert x.grad is not None
    kept = x.grad != 0
    assert 20 < int(kept.sum()) < 100
    torch.testing.assert_close(x.grad, torch.where(kept, 8 * x.detach(), 0.0))
    torch.testing.assert_close(
        out.detach().cpu(), (torch.where(kept, 2 * x, 0.0) ** 2).sum(1).detach()
    )
    inside = drawn(lambda x: tp.grad(lambda v: F.dropout(v, 0.5).sum())(x), mode, X.repeat(1, 10))
    assert set(inside.flatten().tolist()) == {0.0, 2.0}


def test_vmap_from_outside_says_whether_rows_differ(mode: Any) -> None:
    f = tp.pmap(lambda x: torch.rand(()) + 0 * x.sum(), compile=mode)
    batch = torch.stack([X, X, X])
    different = torch.func.vmap(f, randomness="different")(batch).cpu()
    assert len(set(different.flatten().tolist())) == 12
    same = torch.func.vmap(f, randomness="same")(batch).cpu()
    assert torch.equal(same, same[:1].expand(3, 4))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.func.vmap(f)(batch)


def test_attention_without_dropout_draws_nothing_and_differentiates():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, 2, 8, 4).double()  # [device, batch, head, position, feature]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (attend(q, k, v) ** 2).sum()

    scores = (q @ k.mT / 2).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    plain = scores.softmax(-1) @ v
    torch.testing.assert_close(tp.pmap(attend, compile=EAGER)(q, k, v).cpu(), plain)
    grads = tp.pmap(tp.grad(loss, argnums=(0, 2)), compile=EAGER)(q, k, v)

    q, v = q.requires_grad_(), v.requires_grad_()
    scores = (q @ k.mT / 2).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    ((scores.softmax(-1) @ v) ** 2).sum().backward()
    torch.testing.assert_close(grads[0].cpu(), q.grad)
    torch.testing.assert_close(grads[1].cpu(), v.grad)


def test_dropout_inside_attention_is_refused():
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    with pytest.raises(NotImplementedError, match=r"no streams per device\. Use torch\.rand"):
        tp.pmap(attend, compile=EAGER)(torch.randn(4, 1, 2, 8, 4))
