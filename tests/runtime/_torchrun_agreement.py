"""What every rank of test_torchrun.py gets when the ranks do different things with one value, and
that the checks let equal things pass.  See ``_torchrun_cases.py``.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from _launched import Raised
from _support import DEVICE
from _torchrun_cases import (
    CASES,
    GRAPH,
    X,
    expect,
    expect_error,
    expect_same,
    in_both_modes,
    mapped,
    spanning,
)

import torchpmap as tp
from torchpmap import P

__all__ = ["CASES"]

Rank = int


def whole(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tp.replicate(torch.ones(2, dtype=dtype))


def number(rank: Rank) -> float:
    """One that no other case has given, and that differs by rank."""
    number.drawn += 1  # type: ignore[attr-defined]
    return 1000.5 + 10 * number.drawn + rank  # type: ignore[attr-defined]


number.drawn = 0  # type: ignore[attr-defined]


def stepped(rank: Rank, kind: Any, **options: Any) -> None:
    model = tp.replicate(torch.nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad = tp.replicate(torch.ones(1, 2))
    kind(model.parameters(), lr=number(rank), **options).step()


def set_item(rank: Rank) -> None:
    whole()[0] = float(rank)


def multiplied(rank: Rank) -> Any:
    return whole() * number(rank)


def seeded(draw: Callable[[Any], Any], given: Any, seed: int = 5) -> Any:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        return draw(given)
    finally:
        torch.set_rng_state(state)


DIFFERENT: dict[str, Callable[[Rank], Any]] = {
    "a_number": multiplied,
    "a_number_in_place": lambda rank: whole().mul_(number(rank)),
    "an_integer": lambda rank: whole(torch.int64) + int(number(rank)),
    "a_bool": lambda rank: whole(torch.int64).fill_(number(rank) > 0 and rank == 0),
    "a_filling": lambda rank: whole().fill_(number(rank)),
    "a_host_tensor": lambda rank: whole() + torch.full((2,), float(rank)),
    "a_host_tensor_in_place": lambda rank: whole().add_(torch.full((2,), float(rank))),
    "a_host_scalar": lambda rank: whole() * torch.tensor(float(rank)),
    "a_copy": lambda rank: whole().copy_(torch.full((2,), float(rank))),
    "a_host_tensor_for_rows": lambda rank: spanning() + torch.full((4,), float(rank)),
    "an_item": set_item,
    "a_clamp": lambda rank: whole().clamp_(max=number(rank)),
    "a_lerp": lambda rank: whole().lerp_(whole(), number(rank)),
    "a_learning_rate_of_sgd": lambda rank: stepped(rank, torch.optim.SGD),
    "a_learning_rate_of_adam": lambda rank: stepped(rank, torch.optim.AdamW),
    "a_seed_in_place": lambda rank: seeded(lambda x: x.normal_(), whole(), rank),
    "a_seed_in_place_in_half": lambda rank: seeded(
        lambda x: x.bfloat16().uniform_(), whole(), rank
    ),
    "weights": lambda rank: tp.replicate(torch.full((2,), float(rank))),
    "a_view_of_local_rows": lambda rank: tp.global_view(
        tp.replicate(torch.full((2,), float(rank)), tp.local_devices())
    ),
}
"""What the processes must not do differently: all raise, and go on."""


DIFFERS = "must be the same in all processes, but rank 1 has another value than rank 0: "

for _name, _run in DIFFERENT.items():

    def _differ(run: Any = _run) -> Any:
        return run(tp.process_index())

    _differ.__name__ = f"different_by_{_name}"
    expect_error(ValueError, DIFFERS)(_differ)


OTHER_ROWS: dict[str, tuple[str, Callable[[bool], Any]]] = {
    "numbers_of_rows": (
        "x['a'] must be the same in all processes, but rank 1 has another shape or dtype than rank "
        "0: float32[2, 3], and not float32[1, 3]. All",
        lambda other: tp.global_view({"a": torch.ones(1 + other, 3), "b": None})),
    "numbers_of_rows_on_the_devices": (
        "x must be the same in all processes, but rank 1 has another shape or",
        lambda other: tp.global_view(tp.replicate(torch.ones(1 + other), tp.local_devices()))),
    "dtypes_of_rows": (
        "another shape or dtype than rank 0: float64[1], and not float32[1]",
        lambda other: tp.global_view(torch.ones(1, dtype=torch.float64 if other else None))),
    "numbers_of_rows_of_a_batch": (
        "batch must be the same in all processes",
        lambda other: tp.shard_batch(torch.ones(8 if other else 4))),
    "batches": (
        "batch['x'] must be the same in all processes, but rank 1",
        lambda other: tp.shard_batch({"x": torch.full((4,), float(other))})),
    "modules": (
        "module['weight'] must be the same in all processes, but rank 1",
        lambda other: tp.replicate(
            torch.nn.Embedding.from_pretrained(torch.full((1, 1), float(other))))),
}  # fmt: skip
"""The error, and what the processes do; all but the first are another one."""

for _name, (_text, _other) in OTHER_ROWS.items():

    def _differ_in_rows(run: Any = _other) -> Any:
        return run(tp.process_index() > 0)

    _differ_in_rows.__name__ = f"different_{_name}"
    expect_error(ValueError, _text)(_differ_in_rows)


@expect_same([3.0, 3.0])
def equal_operations_pass():
    w = whole().add_(torch.ones(2)).mul_(2)
    w[0] = 3.0
    w[1].sub_(1)
    return w.tolist()


@expect_same(6.0)
def an_operation_by_one_process_alone_may_read():
    g = (spanning(X) * 1).sum()
    return g.item() if tp.process_index() == 0 else float(g)


@expect_same(None)
def equal_trees():
    """What pickles to other bytes in each process: order, identity and hashes differ."""
    rank = tp.process_index()
    names = [f"name {k}" for k in range(8)]
    order = names if rank == 0 else names[::-1]
    twice = [names[0], names[0] if rank == 0 else str(os.fspath("name") + " 0")]
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(float("nan"))  # type: ignore[operator]
    tp.multihost.assert_equal(
        {
            "set": set(order),
            "frozen": frozenset(order),
            "dict": Attributes({name: len(name) for name in order}),
            **dict.fromkeys(order, 1),
            "twice": Attributes(twice),
            "module": model,
            "nan": float("nan"),
        }
    )


class Attributes:
    def __init__(self, value: Any) -> None:
        self.value = value


for _name, _values in {
    "signs_of_zero": [0.0, -0.0],
    "types": [1, True],
    "a_set": [{"a"}, {"b"}],
    "an_attribute": [Attributes({"x": 1}), Attributes({"x": 2})],
    "an_attribute_that_is_a_tensor": [Attributes(torch.zeros(1)), Attributes(torch.ones(1))],
    "a_class": [int, float],
}.items():

    def _unequal(values: Any = _values) -> None:
        tp.multihost.assert_equal({"x": values[min(tp.process_index(), 1)]})

    _unequal.__name__ = f"unequal_by_{_name}"
    expect_error(AssertionError, "tree['x'] = ")(_unequal)


@expect_error(TypeError, "cannot be compared between processes")
def a_lambda_is_not_compared():
    tp.multihost.assert_equal({"x": lambda: 0})


@expect_same(2.0)
def the_first_call_of_a_shared_value():
    function = mapped(
        lambda w: w * 2, GRAPH, in_axes=None, out_axes=None, axis_size=tp.process_count()
    )
    return function(tp.replicate(torch.ones(()))).item()


@expect(
    lambda rank, count: (
        [0.0, 2.0]
        if rank < count - 1
        else Raised(
            "ValueError",
            f"double: this process (rank {rank}) has none of the devices "
            f"{', '.join(f'{DEVICE}:{k}' for k in range(count - 1))}; only the processes of these "
            "devices may call it.",
        )
    )
)
def devices_of_other_processes():
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    others = tp.devices()[:-1]
    mesh = tp.make_mesh((len(others),), ("x",), devices=others)
    mapped = tp.shard_map(double, mesh=mesh, in_specs=P(), out_specs=P(), compile=GRAPH)
    return mapped(torch.arange(2.0)).tolist()


def of_blocks(function: Callable[..., Any], compile: Any) -> Any:
    mesh = tp.make_mesh((tp.process_count(),), ("x",))
    return tp.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), compile=compile)


def on_blocks(given: torch.Tensor, value: torch.Tensor, compile: Any) -> Any:
    return of_blocks(lambda x: x * value, compile)(given.repeat(tp.process_count()))


def of_a_module(rank: Rank, compile: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.constant_(model[0].weight, rank)
    return of_blocks(model, compile)(torch.ones(tp.process_count(), 1))


def a_second_time(rank: Rank, compile: Any) -> Any:
    value = torch.full((2,), float(rank))
    call = of_blocks(lambda x: x * value, compile)
    with contextlib.suppress(ValueError):
        call(torch.ones(2 * tp.process_count()))
    return call(torch.ones(2 * tp.process_count()))


ONE = torch.ones(2)
OF_BLOCKS: dict[str, tuple[str, Callable[[Rank, Any], Any]]] = {
    "an_argument": ("argument x", lambda rank, compile: on_blocks(ONE * rank, ONE, compile)),
    "a_closure": ("('value')", lambda rank, compile: on_blocks(ONE, ONE * rank, compile)),
    "a_closure_of_a_module": ("(the function itself, 0.weight)", of_a_module),
    "a_closure_a_second_time": ("('value')", a_second_time),
}
"""What the error names, and a call of a shard_map to which the processes give different things."""


def _expect_differences(name: str) -> None:
    what, run = OF_BLOCKS[name]

    def differ(compile: Any) -> Any:
        return run(tp.process_index(), compile)

    differ.__name__ = f"different_by_{name}_of_a_shard_map"
    in_both_modes(expect_error(ValueError, f"{what} {DIFFERS}"))(differ)


for _name in OF_BLOCKS:
    _expect_differences(_name)


@in_both_modes(expect_same([1.0, 2.0]))
def equal_closures_of_a_shard_map_pass(compile):
    result = on_blocks(ONE, torch.tensor([1.0, 2.0]), compile)
    return tp.multihost.all_gather(result)[:2].tolist()


@expect_same(None)
def one_process_alone_may_lower_a_shard_map():
    if tp.process_index() == 0:
        of_blocks(torch.neg, GRAPH).lower(torch.ones(tp.process_count()))


# -- operations along the cut dim ------------------------------------------------------------------

ROWS = torch.arange(8.0).reshape(4, 2)

TAKEN: dict[str, Callable[[Any], Any]] = {
    "cat": lambda g: torch.cat([g, g + 1]),
    "cat_with_a_host_tensor": lambda g: torch.cat([torch.ones(1, 2), g]),
    "a_row": lambda g: g[1],
    "rows": lambda g: g[1:3],
    "merged_dims": lambda g: g.T.reshape(-1),
    "divided_rows": lambda g: g.view(2, 2, 2).transpose(0, 1) * 1,
    "operands_that_are_cut_differently": lambda g: g[:2] * g[:2].T,
    "a_cut_value_added_to_a_whole_one": lambda g: (g.sum(0).expand(4, 2) * 1).add_(g),
    "a_permutation": lambda g: g[torch.tensor([2, 0, 3, 1])],
    "std": lambda g: g.std(),
    "the_place_of_the_largest": lambda g: g.argmax(),
    "cumsum": lambda g: g.cumsum(0),
    "sort": lambda g: g.sort(0, descending=True).values,
    "an_inverse": lambda g: torch.linalg.inv(g[:2] + torch.eye(2)),
    "in_place": lambda g: (g * 2).cumsum_(0),
    "all_rows": lambda g: sum(g),
    "into_another": lambda g: torch.sum(g, 0, out=torch.zeros_like(g[0])),
}
"""What runs on the devices although it needs rows of other processes."""

for _name, _take in TAKEN.items():

    def _taken(take: Any = _take) -> Any:
        return tp.multihost.all_gather(take(spanning(ROWS)))

    _taken.__name__ = f"taking_{_name}"
    expect_same(_take(ROWS))(_taken)


def gradient(x: Any) -> Any:
    x = x.requires_grad_()
    y = torch.cat([x * 2, x[1:3], x[0:1] * x.T.reshape(-1)[:2], x[:2] * x[:2].T])
    y = y + y.sin().cumsum(0).softmax(0) * y[torch.arange(len(y)).flip(0)]
    (y * y * y).sum().backward()
    return x.grad


@expect_same(gradient(ROWS.clone()))
def gradient_of_cat_and_slices():
    return tp.multihost.all_gather(gradient(spanning(ROWS)))


@expect_same(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [6.0, 0.0]]))
def writing_to_rows():
    g = spanning(ROWS)
    g[1:3].zero_()
    g.view(2, 4)[:, 3].zero_()
    return tp.multihost.all_gather(g)


@expect_same(torch.tensor([[7.0, 7.0], [2.0, 3.0], [0.0, 1.0], [2.0, 3.0]]))
def assigning_rows():
    g = spanning(ROWS)
    g[2:] = g[:2]
    g[0] = 7.0
    return tp.multihost.all_gather(g)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.index.Tensor": lambda g: g[torch.tensor([True, False, True, False])],
    "aten.equal.default": lambda g: torch.equal(g, g),
    "aten.allclose.default": lambda g: torch.allclose(g, g),
    "aten.nonzero.default": lambda g: g.nonzero(),
}
"""What raises on every rank, by the name that the error has for it."""

for _name, _refused in REFUSED.items():

    def _refuse(run: Any = _refused) -> Any:
        return run(spanning(ROWS))

    _refuse.__name__ = f"refused_{_name}"
    expect_error(RuntimeError, f"{_name} needs the whole value float32[4, 2], as")(_refuse)


# -- random numbers of values on the devices -------------------------------------------------------

PROBABILITIES = torch.linspace(0.1, 0.9, 8).reshape(4, 2)

DRAWS: dict[str, Callable[[Any], Any]] = {
    "rand_like": torch.rand_like,
    "randn_like_in_double": lambda p: torch.randn_like(p, dtype=torch.float64),
    "randint_like": lambda p: torch.randint_like(p, 3, 10),
    "rand_like_of_a_transpose": lambda p: torch.rand_like(p.t()).t(),
    "bernoulli": torch.bernoulli,
    "bernoulli_in_half": lambda p: torch.bernoulli(p.bfloat16()),
    "bernoulli_of_a_number": lambda p: torch.bernoulli(p, 0.3),
    "bernoulli_in_place": lambda p: torch.zeros_like(p).bernoulli_(p),
    "normal": lambda p: torch.normal(p, 0.5),
    "normal_of_two": lambda p: torch.normal(p, p),
    "normal_of_deviations": lambda p: torch.normal(0.5, p),
    "native_dropout": lambda p: torch.native_dropout(p, 0.4, True)[0],
    "dropout": lambda p: torch.nn.functional.dropout(p, 0.4),
    "gumbel_softmax": lambda p: torch.nn.functional.gumbel_softmax(p, dim=1),
    "poisson": lambda p: torch.poisson(10 * p),
    "multinomial": lambda p: torch.multinomial(p, 1),
    "binomial": lambda p: torch.binomial(torch.full_like(p, 5.0), p),
}


for _name, _draw in DRAWS.items():

    def _drawn(draw: Any = _draw) -> Any:
        cut = seeded(draw, spanning(PROBABILITIES))
        whole = seeded(draw, tp.replicate(PROBABILITIES)).cpu()
        assert isinstance(cut, tp.ShardedTensor)
        return [tp.multihost.all_gather(cut), whole]

    _drawn.__name__ = f"drawing_{_name}"
    expect_same([seeded(_draw, PROBABILITIES)] * 2)(_drawn)


DIFFERENT_DRAWS = {name: DRAWS[name] for name in ("rand_like", "bernoulli", "normal", "dropout")}

for _name, _draw in DIFFERENT_DRAWS.items():

    def _differ_in_seeds(draw: Any = _draw) -> Any:
        return seeded(lambda x: draw(x / 2), whole(), tp.process_index())

    _differ_in_seeds.__name__ = f"different_by_seeds_of_{_name}"
    expect_error(ValueError, "must be the same in all processes")(_differ_in_seeds)
