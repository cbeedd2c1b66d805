"""What every rank of test_torchrun.py does, and what it must get, in calls of mapped functions.

Each case is a function that runs in every rank, with the result that the rank must have beside it.
``_torchrun_values.py`` has more, and runs them all.

The global axis has 4 rows in most cases, [0, 1, 2, 3]: 2 ranks with 2 rows each, as in the
measurements of JAX with 2 processes of 2 devices, or 4 ranks with one row each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _launched import Raised

import torchpmap as tp

AXIS = "i"
GRAPH = {"backend": "eager"}
X = torch.arange(4.0)
RING = [(k, (k + 1) % 4) for k in range(4)]
PAIRS = [[0, 1], [2, 3]]
GRID = 10 * X[:, None] + X


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


ROWS: dict[str, Any] = {
    "psum": (lambda x: tp.psum(x, AXIS), [6.0, 6.0, 6.0, 6.0]),
    "identity": (lambda x: x, X),
    "axis_index_and_size": (
        lambda x: torch.stack([tp.axis_index(AXIS), torch.tensor(tp.axis_size(AXIS))]),
        [[0, 4], [1, 4], [2, 4], [3, 4]],
    ),
    "all_gather": (lambda x: tp.all_gather(x, AXIS), [[0.0, 1.0, 2.0, 3.0]] * 4),
    "ppermute": (lambda x: tp.ppermute(x, AXIS, RING), [3.0, 0.0, 1.0, 2.0]),
    "psum_in_groups": (lambda x: tp.psum(x, AXIS, axis_index_groups=PAIRS), [1.0, 1.0, 5.0, 5.0]),
    "all_to_all": (lambda x: tp.all_to_all(x, AXIS, 0, 0), GRID.T, GRID),
    "gradient_inside_of_a_mean": (tp.grad(lambda x: tp.pmean(x * x, AXIS)), [0.0, 2.0, 4.0, 6.0]),
}
"""Name -> what a row does, what all rows get, and the rows if they are not X."""


for _name, (_function, _expected, *_given) in ROWS.items():

    def _run(compile, function=_function, given=_given):
        return mapped(function, compile)(mine(*given))

    _run.__name__ = _name
    in_both_modes(expect_rows(_expected))(_run)


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


@expect(lambda rank, count: torch.tensor([2 * rank]))
def fake_pmap_takes_what_the_devices_take():
    function = mapped(lambda x: 2 * x, devices=tp.devices())
    with tp.debug.fake_pmap():
        return function(torch.tensor([tp.process_index()]))


@expect_error(ValueError, "must equal the number of local devices passed to pmap. Got axis_size=2")
def fake_pmap_refuses_what_the_devices_refuse():
    with tp.debug.fake_pmap():
        return mapped(lambda x: x, devices=tp.devices())(torch.ones(2))


@expect_same(("serial", "vmapped", "pmapped"))
def check_pmap_with_devices():
    rows = torch.tensor([[tp.process_index(), 1.0]])
    return tp.debug.check_pmap(lambda x: x.sin(), rows, devices=tp.devices()).values


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
    return [each.name for each in lowered.cost().collectives]


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
