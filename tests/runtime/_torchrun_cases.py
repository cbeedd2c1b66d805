"""What every rank of test_torchrun.py does, and what it must get.

Each case is a function that runs in every rank, with the result that the rank must have beside it.
Run as a script (under torchrun) this file runs all of them and writes the results down.

The global axis has 4 rows in most cases, [0, 1, 2, 3]: 2 ranks with 2 rows each, as in the
measurements of JAX with 2 processes of 2 devices, or 4 ranks with one row each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _launched import Raised, host, run_cases

import torchpmap as tp
from torchpmap._base.ambient import ambient, applied

AXIS = "i"
GRAPH = {"backend": "eager"}
X = torch.arange(4.0)
RING = [(k, (k + 1) % 4) for k in range(4)]


@dataclass(frozen=True)
class Case:
    run: Callable[[], Any]
    expected: Callable[[int, int], Any]
    """(rank, number of ranks) -> what the rank must get."""


CASES: dict[str, Case] = {}


def _add(function: Callable[[], Any], expected: Callable[[int, int], Any]) -> None:
    name = function.__name__
    assert name not in CASES
    CASES[name] = Case(function, expected)


def part(rows: Any, rank: int, count: int, dim: int = 0) -> Any:
    """The rows of one rank."""
    size = rows.shape[dim] // count
    return rows.narrow(dim, rank * size, size)


def expect_rows(rows: Any, dim: int = 0) -> Callable[[Any], Any]:
    """Each rank gets its part of the rows."""
    rows = torch.as_tensor(rows)
    return lambda function: _add(function, lambda rank, count: part(rows, rank, count, dim))


def expect_same(value: Any) -> Callable[[Any], Any]:
    """All ranks get this."""
    return lambda function: _add(function, lambda rank, count: value)


def expect(expected: Callable[[int, int], Any]) -> Callable[[Any], Any]:
    """Each rank gets ``expected(rank, number of ranks)``."""
    return lambda function: _add(function, expected)


def expect_error(kind: type[Exception], text: str) -> Callable[[Any], Any]:
    """All ranks get an error with this in its text."""
    return expect_same(Raised(kind.__name__, text))


def in_both_modes(expecting: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The case with the mapped function traced, and run as it is."""

    def add(function: Callable[[Any], Any]) -> None:
        for mode, setting in (("traced", GRAPH), ("untraced", False)):

            def run(setting: Any = setting) -> Any:
                return function(setting)

            run.__name__ = f"{function.__name__}-{mode}"
            expecting(run)

    return add


def mine(values: torch.Tensor = X, dim: int = 0) -> torch.Tensor:
    """The rows of this rank."""
    return tp.multihost.local_rows(values, dim)


def mapped(function: Callable[..., Any], compile: Any = GRAPH, **options: Any) -> Any:
    return tp.pmap(function, AXIS, compile=compile, **options)


def spanning(values: torch.Tensor = X) -> tp.ShardedTensor:
    """A value with its rows on the devices of all ranks."""
    mesh = tp.Mesh(tp.devices(), ("d",))
    return tp.device_put(values, tp.NamedSharding(mesh, tp.P("d")))


# -- the table of JAX's multi-process pmap ---------------------------------------------------------


@in_both_modes(expect_rows([6.0, 6.0, 6.0, 6.0]))
def psum(compile):
    return mapped(lambda x: tp.psum(x, AXIS), compile)(mine())


@in_both_modes(expect_rows(X))
def identity(compile):
    return mapped(lambda x: x, compile)(mine())


@in_both_modes(expect_rows([[0, 4], [1, 4], [2, 4], [3, 4]]))
def axis_index_and_size(compile):
    def function(x):
        return torch.stack([tp.axis_index(AXIS), torch.tensor(tp.axis_size(AXIS))])

    return mapped(function, compile)(mine())


@in_both_modes(expect_rows([[0.0, 1.0, 2.0, 3.0]] * 4))
def all_gather(compile):
    return mapped(lambda x: tp.all_gather(x, AXIS), compile)(mine())


@in_both_modes(expect_rows([3.0, 0.0, 1.0, 2.0]))
def ppermute(compile):
    return mapped(lambda x: tp.ppermute(x, AXIS, RING), compile)(mine())


@in_both_modes(expect_rows([1.0, 1.0, 5.0, 5.0]))
def psum_in_groups(compile):
    groups = [[0, 1], [2, 3]]
    return mapped(lambda x: tp.psum(x, AXIS, axis_index_groups=groups), compile)(mine())


@in_both_modes(expect_rows([[0.0, 10.0, 20.0, 30.0], [1.0, 11.0, 21.0, 31.0],
                            [2.0, 12.0, 22.0, 32.0], [3.0, 13.0, 23.0, 33.0]]))  # fmt: skip
def all_to_all(compile):
    rows = 10 * X[:, None] + X
    return mapped(lambda x: tp.all_to_all(x, AXIS, 0, 0), compile)(mine(rows))


@in_both_modes(expect_same(torch.tensor(0.0)))
def out_axes_none_of_varying_values_is_the_first_rows(compile):  # JAX: 0 and 2
    return mapped(lambda x: x, compile, out_axes=None)(mine())


@in_both_modes(expect_same(torch.tensor(6.0)))
def out_axes_none_of_a_sum(compile):
    return mapped(lambda x: tp.psum(x, AXIS), compile, out_axes=None)(mine())


@in_both_modes(expect(lambda rank, count: part(X, rank, count) + 100 * rank))
def in_axes_none_is_each_processs_own(compile):
    function = mapped(lambda x, own: x + own, compile, in_axes=(0, None))
    return function(mine(), torch.tensor(100.0 * tp.process_index()))


@in_both_modes(
    expect(lambda rank, count: (4 // count) * sum(range(count)) * torch.ones(4 // count))
)
def in_axes_none_in_a_sum(compile):
    function = mapped(lambda x, own: tp.psum(own, AXIS), compile, in_axes=(0, None))
    return function(mine(), torch.tensor(float(tp.process_index())))


COLUMNS = torch.arange(8.0).reshape(2, 4)


@in_both_modes(expect_rows(COLUMNS * COLUMNS.sum(1, keepdim=True), dim=1))
def in_axes_one_out_axes_one(compile):
    function = mapped(lambda x: x * tp.psum(x, AXIS), compile, in_axes=1, out_axes=1)
    return function(mine(COLUMNS, 1))


@in_both_modes(expect(lambda rank, count: torch.tensor([[float(rank), 0.0]])))
def devices_of_this_process(compile):
    function = mapped(
        lambda x: torch.stack([tp.psum(x, AXIS), tp.axis_index(AXIS)]),
        compile,
        devices=tp.local_devices(),
    )
    return function(torch.tensor([float(tp.process_index())]))


@in_both_modes(expect(lambda rank, count: torch.tensor([[count - 1 - rank, sum(range(count))]])))
def devices_reversed(compile):
    function = mapped(
        lambda x: torch.stack([tp.axis_index(AXIS), tp.psum(x, AXIS)]),
        compile,
        devices=tp.devices()[::-1],
    )
    return function(torch.tensor([tp.process_index()]))


@expect(lambda rank, count: torch.tensor([1]) if rank < 2 else None)
def devices_of_some_processes():
    if tp.process_index() >= 2:
        return None
    function = mapped(lambda x: tp.psum(x, AXIS), devices=tp.devices()[:2])
    return function(torch.tensor([tp.process_index()]))


@in_both_modes(expect_rows([4, 4, 4, 4]))
def axis_size_is_that_of_all_processes(compile):
    return mapped(lambda: torch.tensor(tp.axis_size(AXIS)), compile, axis_size=4)()


@expect_same(torch.tensor([1]))
def axis_size_on_devices_of_this_process():
    function = mapped(
        lambda: torch.tensor(tp.axis_size(AXIS)), axis_size=1, devices=tp.local_devices()
    )
    return function()


@expect_error(ValueError, "axis_size=5 counts the rows of all processes, but does not divide over")
def axis_size_that_does_not_divide():
    return mapped(lambda: torch.tensor(1), axis_size=5)()


@in_both_modes(expect_rows([0.0, 2.0, 4.0, 6.0]))
def gradient_inside_of_a_mean(compile):
    return mapped(tp.grad(lambda x: tp.pmean(x * x, AXIS)), compile)(mine())


@expect_rows([6.0, 6.0, 6.0, 6.0])
def torch_compile_around_it():  # JAX: [1, 1] and [5, 5]
    function = mapped(lambda x: tp.psum(x, AXIS))
    return torch.compile(lambda x: function(x), backend="eager")(mine())


@in_both_modes(expect_rows([0.0, 8.0, 16.0, 24.0]))
def gradient_outside_of_a_sum(compile):  # JAX: [0, 4] and [8, 12]
    function = mapped(lambda x: tp.psum(x * x, AXIS), compile)
    return torch.func.grad(lambda x: function(x).sum())(mine())


@expect_rows([6.0, 6.0, 6.0, 6.0])
def through_inductor():
    return mapped(lambda x: tp.psum(x, AXIS), compile=True)(mine())


# -- JAX's own multi-process tests -----------------------------------------------------------------


@expect(lambda rank, count: torch.full((1, 2), float(sum(range(1, count + 1)))))
def local_rows_on_local_devices():  # testBasic
    rows = [torch.full((2,), 1.0 + tp.process_index())]
    placed = tp.device_put_sharded(rows, tp.local_devices())
    result = mapped(lambda x: tp.psum(x, AXIS))(placed)
    assert result.is_fully_addressable
    assert result.devices() == set(tp.local_devices())
    return result


@expect_same(["all_reduce"])
def lowering_without_running():  # test_global_axis_size_initial_style
    lowered = mapped(lambda x: tp.psum(x, AXIS)).lower(mine())
    return [name for name, _ in lowered.cost().collectives]


@expect_rows([0.0, 2.0, 4.0, 6.0])
def results_go_in_again():  # test_array_device_size_mismatch_with_mesh
    double = mapped(lambda x: x * 2)
    halve = mapped(lambda x: x / tp.axis_size(AXIS))
    return double(halve(double(double(mine()))))


@expect(lambda rank, count: torch.tensor([np.float32(sum(range(count)))]))
def numpy_scalars():  # test_pmap_with_scalars
    return mapped(lambda x: tp.psum(x, AXIS))(np.float32([tp.process_index()]))


@expect(lambda rank, count: torch.full((1, 2, 2), 4.0 * count))
def numpy_arrays():  # test_pmap_with_numpy_arrays
    return mapped(lambda x: tp.psum(x * 4, AXIS))(np.ones((1, 2, 2), np.float32))


@expect_same(4)
def random_keys_give_different_numbers():  # test_pmap_with_prng_keys
    keys = mine(tp.random.split(tp.random.key(0), 4))
    drawn = mapped(lambda key: tp.random.normal(key, ()))(keys)
    return len(set(tp.multihost.all_gather(drawn, tiled=True).tolist()))


@expect_same([True, True])
def replicated_output():  # test_replicated_output_sharding_multi_process
    result = mapped(lambda x: tp.psum(x, AXIS), out_axes=None)(mine())
    return [result.is_fully_replicated, result.devices() == set(tp.devices())]


@expect(lambda rank, count: part(X, rank, count)[0] * 2)
def indexing_a_result():  # testShardedArrayIndexing
    return mapped(lambda x: x * 2)(mine())[0]


# -- rows, counts, arguments -----------------------------------------------------------------------


@expect(lambda rank, count: [rank, count, count, 1, [rank], rank])
def counts():
    return [
        tp.process_index(),
        tp.process_count(),
        tp.device_count(),
        tp.local_device_count(),
        [device.id for device in tp.local_devices()],
        tp.local_devices()[0].process_index,
    ]


@in_both_modes(expect_rows([28.0 + k for k in range(8)]))
def eight_rows_fold(compile):
    return mapped(lambda x: tp.psum(x, AXIS) + tp.axis_index(AXIS), compile)(
        mine(torch.arange(8.0))
    )


@expect_rows([7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
def folded_rows_move_to_the_next_process():
    ring = [(k, (k + 1) % 8) for k in range(8)]
    return mapped(lambda x: tp.ppermute(x, AXIS, ring))(mine(torch.arange(8.0)))


@expect_rows([2.0, 5.0, 8.0, 11.0])
def static_argument():
    function = mapped(lambda n, x: x * n + 2, static_broadcasted_argnums=0)
    return function(3, mine())


@expect_same([6.0, 12.0, True])
def donated_argument():
    given = mapped(lambda x: x * 2)(mine())
    function = mapped(lambda x: x + tp.psum(x, AXIS), donate_argnums=0)
    result = tp.multihost.all_gather(function(given), tiled=True)
    return [float(result[3]) - 12, float(result[0]), given.is_deleted()]


@expect(lambda rank, count: {"a": (part(X, rank, count) + 1, None), "b": [torch.tensor(6.0)]})
def trees():
    def function(tree):
        return {"a": (tree["x"] + 1, None), "b": [tp.psum(tree["x"], AXIS)]}

    out_axes = {"a": (0, None), "b": None}
    return mapped(function, out_axes=out_axes)({"x": mine()})


@expect_rows([10.0, 11.0, 12.0, 13.0])
def closed_over_value_that_changes():
    weight = torch.tensor(1.0)
    function = mapped(lambda x: x + weight)
    function(mine())
    weight.fill_(10.0)
    return function(mine())


@in_both_modes(expect_same(torch.tensor(0.0)))
def out_axes_none_of_a_closure_that_differs(compile):
    own = torch.tensor(100.0 * tp.process_index())
    return mapped(lambda x: own, compile, out_axes=None)(mine())


@in_both_modes(expect(lambda rank, count: torch.full((4 // count,), 100.0 * rank)))
def closure_that_differs(compile):
    own = torch.tensor(100.0 * tp.process_index())
    return mapped(lambda x: own + 0 * x, compile)(mine())


@in_both_modes(
    expect_error(
        ValueError,
        "out_axes is None for the output of <lambda>, but its value differs between devices",
    )
)
def check_replicated_finds_a_closure_that_differs(compile):
    own = torch.tensor(100.0 * tp.process_index())
    return mapped(lambda x: own + 0 * x, compile, out_axes=None, check_replicated=True)(mine())


@expect_error(ValueError, "Got axis_size=2, num_local_devices=1")
def more_rows_than_listed_devices():
    return mapped(lambda x: x, devices=tp.devices())(torch.ones(2))


# -- transforms around a mapped function -----------------------------------------------------------


@expect_rows([0.0, 8.0, 16.0, 24.0])
def backward():
    x = mine().clone().requires_grad_()
    mapped(lambda x: tp.psum(x * x, AXIS))(x).sum().backward()
    return x.grad


@expect_rows([8.0, 8.0, 8.0, 8.0])
def second_derivative():
    function = mapped(lambda x: tp.psum(x * x, AXIS))
    gradient = torch.func.grad(lambda x: function(x).sum())
    return torch.func.grad(lambda x: gradient(x).sum())(mine())


@expect_rows([12.0, 12.0, 12.0, 12.0])
def forward_derivative():
    function = mapped(lambda x: tp.psum(x * x, AXIS))
    x = mine()
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


@expect_rows([[6.0, 12.0], [6.0, 12.0], [6.0, 12.0], [6.0, 12.0]])
def vmap_around():
    function = mapped(lambda x: tp.psum(x, AXIS))
    columns = torch.stack([mine(), 2 * mine()], 1)
    return torch.func.vmap(function, in_dims=1, out_dims=1)(columns)


@expect_same(torch.tensor(6.0))
def gradient_of_what_all_rows_share():
    function = mapped(lambda w, x: w * x, in_axes=(None, 0))
    return torch.func.grad(lambda w: function(w, mine()).sum())(torch.tensor(1.0))


@expect_same(torch.tensor(6.0))
def backward_to_what_all_devices_hold():
    weight = tp.replicate(torch.tensor(1.0)).requires_grad_()
    mapped(lambda w, x: w * x, in_axes=(None, 0))(weight, mine()).sum().backward()
    return weight.grad


# -- random numbers --------------------------------------------------------------------------------


def _drawn(compile: Any, rows: int) -> torch.Tensor:
    torch.manual_seed(7)
    return mapped(lambda x: torch.rand(2) + 0 * x, compile)(mine(torch.zeros(rows)))


@in_both_modes(expect_same((4, True)))
def every_row_draws_its_own(compile):
    everything = tp.multihost.all_gather(_drawn(compile, 4), tiled=True)
    return len({tuple(row) for row in everything.tolist()}), bool((everything < 1).all())


@expect_same(True)
def rows_draw_the_same_traced_and_not():
    return bool((_drawn(GRAPH, 8).cpu() == _drawn(False, 8).cpu()).all())


def draw_four() -> Any:
    """For comparison with a single controller."""
    return _drawn(GRAPH, 4)


# -- values ----------------------------------------------------------------------------------------


@expect(
    lambda rank, count: [part(X, rank, count).sum() * 2 + 4 // count, torch.tensor(0.5).double()]
)
def operations_on_local_rows():
    y = mapped(lambda x: x * 2)(mine())
    return [(y + 1).sum(), (y == y).double().mean() / 2]


@expect(lambda rank, count: [True, [f"cpu:{rank}"], part(X, rank, count), None])
def shards_of_local_rows():
    y = mapped(lambda x: x)(mine())
    (shard,) = y.addressable_shards
    return [y.is_fully_addressable, [str(shard.device)], shard.data, shard.index[0].start]


@expect(lambda rank, count: [False, [4], f"cpu:{rank}", rank * 4 // count, part(X, rank, count)])
def shards_of_a_spanning_value():
    g = spanning()
    (shard,) = g.addressable_shards
    start = shard.index[0].start or 0
    return [g.is_fully_addressable, list(g.shape), str(shard.device), start, shard.data]


@expect_error(RuntimeError, "belongs to another process")
def numpy_of_a_spanning_value():
    return spanning().numpy()


@expect_error(RuntimeError, "torchpmap.multihost.all_gather for the whole value in every process")
def printing_the_numbers_of_a_spanning_value():
    return spanning().tolist()


@expect(lambda rank, count: "ShardedTensor(shape=[4], dtype=torch.float32, rows of dim 0 on "
        + " ".join(f"cpu:{k}" for k in range(count)) + ")")  # fmt: skip
def text_of_a_spanning_value():
    return str(spanning())


@expect_same(X * 2 + 6)
def a_spanning_argument_makes_the_call_global():
    result = mapped(lambda x: x * 2 + tp.psum(x, AXIS))(spanning())
    assert not result.is_fully_addressable
    assert list(result.shape) == [4]
    return tp.multihost.all_gather(result)


@expect_same([X + 1, torch.tensor(6.0), torch.tensor(3.0), X * X])
def operations_on_a_spanning_value():
    g = spanning()
    return [
        tp.multihost.all_gather(g + 1),
        g.sum(),
        g.max(),
        tp.multihost.all_gather(g * g),
    ]


@expect_same(torch.tensor([0.0, 8.0, 16.0, 24.0]))
def gradient_of_a_spanning_value():
    function = mapped(lambda x: tp.psum(x * x, AXIS))
    return tp.multihost.all_gather(torch.func.grad(lambda x: function(x).sum())(spanning()))


@expect_same([torch.tensor([0.0, 8.0, 16.0, 24.0]), torch.full((4,), 8.0)])
def derivatives_of_a_spanning_value():
    function = mapped(lambda x: tp.psum(x * x, AXIS))
    x = spanning().requires_grad_()
    function(x).sum().backward()
    gradient = torch.func.grad(lambda x: function(x).sum())
    second = torch.func.grad(lambda x: gradient(x).sum())(spanning())
    return [tp.multihost.all_gather(x.grad), tp.multihost.all_gather(second)]


@expect_same(torch.stack([X + 6, 2 * (X + 6)], 1))
def vmap_of_a_spanning_value():
    function = mapped(lambda x: x + tp.psum(x, AXIS))
    columns = torch.stack([X, 2 * X], 1)
    return tp.multihost.all_gather(torch.func.vmap(function, 1, 1)(spanning(columns)))


@expect_same([torch.tensor(6.0)] * 2)
def host_and_spanning_arguments_of_one_shape_are_told_apart():
    function = mapped(lambda x: tp.psum(x, AXIS), out_axes=None)
    total = torch.func.grad_and_value(lambda x: function(x).sum())
    own = mine()
    first = total(own)[1]
    return [first, total(spanning())[1]]


@expect_same(torch.tensor([1.0, 2.0]))
def a_replicated_value_is_here_too():
    w = tp.replicate(torch.tensor([1.0, 2.0]))
    assert w.devices() == set(tp.devices())
    return w


# -- training --------------------------------------------------------------------------------------

POINTS = torch.linspace(-1, 1, 8)


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((w * x - 3 * x) ** 2).mean()


def _trained_alone() -> torch.Tensor:
    w = torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(w, POINTS).backward()
        optimizer.step()
    return w.detach()


@in_both_modes(expect_same(_trained_alone()))
def data_parallel_training(compile):
    optimizer = tp.optim.functional(torch.optim.SGD, lr=0.5, momentum=0.9)

    def step(w, state, x):
        gradient = tp.pmean(tp.grad(_loss)(w, x), AXIS)
        return optimizer.update(gradient, state, w)

    train = mapped(step, compile, in_axes=(None, None, 0), out_axes=None)
    w = torch.tensor(0.5)
    state = optimizer.init(w)
    for _ in range(3):
        w, state = train(w, state, mine(POINTS.reshape(4, 2)))
    return w


# -- torch's settings, which are those of the process ----------------------------------------------


@in_both_modes(expect_rows(X.double() / 3))
def another_default_dtype(compile):
    with applied(ambient()):  # is put back
        torch.set_default_dtype(torch.float64)
        return mapped(lambda x: x / 3, compile)(mine(X.long())).clone()


@in_both_modes(expect_same((torch.bfloat16, torch.float32)))
def autocast_and_where_it_is_off(compile):
    def function(x):
        square = torch.ones(2, 2) * x
        with torch.autocast("cpu", enabled=False):
            return square @ square

    def cast(x):
        square = torch.ones(2, 2) * x
        return square @ square

    with torch.autocast("cpu", torch.bfloat16):
        return mapped(cast, compile)(mine()).dtype, mapped(function, compile)(mine()).dtype


@in_both_modes(expect_rows(torch.full((4,), 1.0, dtype=torch.float64)))
def a_backward_pass_under_other_settings(compile):
    x = torch.ones(len(mine()), requires_grad=True)
    with applied(ambient()):
        torch.set_default_dtype(torch.float64)
        y = mapped(lambda x: (torch.arange(3) / 3 * x).sum(), compile)(x)
    y.sum().backward()
    return x.grad.double()


# -- torchpmap.multihost ---------------------------------------------------------------------------


@expect(lambda rank, count: {"w": torch.full((count,), count - 1.0), "n": count - 1, "e": [0, 3]})
def multihost_broadcast():
    count = tp.process_count()
    if tp.process_index() < count - 1:
        tree: Any = None
    else:
        tree = {"w": torch.full((count,), count - 1.0), "n": count - 1, "e": torch.empty(0, 3)}
    got = tp.multihost.broadcast(tree, source=count - 1)
    return {**got, "e": list(got["e"].shape)}


@expect_error(ValueError, "broadcast(source=0): that process cannot give its tree: TypeError")
def multihost_broadcast_of_what_cannot_be_pickled():
    return tp.multihost.broadcast(n for n in range(3))


@expect(lambda rank, count: [
    torch.arange(count),
    torch.tensor([[k % 2 == 1] * 2 for k in range(count)]),
    torch.tensor([[k * 1j] for k in range(count)], dtype=torch.complex64),
    torch.tensor([[k] for k in range(count)], dtype=torch.bfloat16),
    None,
])  # fmt: skip
def multihost_all_gather():
    rank = tp.process_index()
    tree = [
        rank,
        torch.full((2,), rank % 2 == 1),
        np.array([rank * 1j], np.complex64),
        torch.tensor([rank], dtype=torch.bfloat16),
        None,
    ]
    return tp.multihost.all_gather(tree)


@expect(lambda rank, count: [torch.tensor([k for k in range(count) for _ in range(k)]).float(),
                             torch.arange(count)])  # fmt: skip
def multihost_all_gather_of_different_numbers_of_rows():
    rank = tp.process_index()
    return tp.multihost.all_gather([torch.full((rank,), float(rank)), rank], tiled=True)


@expect_same([X, torch.tensor([1.0, 2.0]), X * 2])
def multihost_all_gather_of_results():
    y = mapped(lambda x: x * 2)(mine())
    return [
        tp.multihost.all_gather(spanning()),
        tp.multihost.all_gather(tp.replicate(torch.tensor([1.0, 2.0]))),
        tp.multihost.all_gather(y, tiled=True),
    ]


@expect(lambda rank, count: Raised(
    "AssertionError",
    "weights: the processes do not have the same values:\n"
    f"  rank {', '.join(str(k) for k in range(count - 1))}: tree['w'] = float32[2] [1.0, 1.0] (",
))  # fmt: skip
def multihost_assert_equal_shows_who_has_what():
    value = 2.0 if tp.process_index() == tp.process_count() - 1 else 1.0
    tree = {"b": "same", "w": torch.full((2,), value), "x": tp.process_index()}
    tp.multihost.assert_equal(tree, "weights")


@expect_same("equal")
def multihost_assert_equal():
    tree = {"w": tp.replicate(torch.tensor([1.0, float("nan")])), "n": (3, None, "text")}
    tp.multihost.assert_equal(tree)
    tp.multihost.barrier("after it")
    return "equal"


@expect(lambda rank, count: [torch.full((count, 1), 2.0), torch.tensor([2.0]), torch.tensor([2.0])])
def multihost_values_of_one_element_and_stride_0():
    expanded = torch.tensor(2.0).expand(1)
    tp.multihost.assert_equal(expanded)
    placed = tp.replicate(expanded)
    return [
        tp.multihost.all_gather(expanded),
        tp.multihost.all_gather(placed),
        tp.multihost.broadcast(expanded),
    ]


@expect_error(ValueError, "tree['x'] has 5 rows (shape [5, 2]), which do not divide over")
def multihost_local_rows_that_do_not_divide():
    return tp.multihost.local_rows({"x": np.ones((5, 2))})


if __name__ == "__main__":
    wanted = sys.argv[2:] or CASES
    cases = {name: lambda case=CASES[name]: host(case.run()) for name in wanted}
    run_cases({**cases, "draw_four": lambda: host(draw_four())}, sys.argv[1])
