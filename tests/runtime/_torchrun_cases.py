"""What every rank of test_torchrun.py does, and what it must get, in calls of mapped functions.

Each case is a function that runs in every rank, with the result that the rank must have beside it.
``_torchrun_values.py`` has more, and runs them all.

The global axis has 4 rows in most cases, [0, 1, 2, 3]: 2 ranks with 2 rows each, as in the
measurements of JAX with 2 processes of 2 devices, or 4 ranks with one row each.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _launched import Raised
from torch.utils import _pytree as pytree

import torchpmap as tp
from torchpmap._runtime import current
from torchpmap._sharded.tensor import make_sharded
from torchpmap._transforms.timing import times

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


# -- calls, traced and not -------------------------------------------------------------------------


def _sum(x):
    return tp.psum(x, AXIS)


def _sum_of_squares(x):
    return tp.psum(x * x, AXIS)


def _index_and_sum(x):
    return torch.stack([tp.axis_index(AXIS), tp.psum(x, AXIS)])


def _axis_size():
    return torch.tensor(tp.axis_size(AXIS))


def _number():
    """That of this process."""
    return torch.tensor([tp.process_index()])


def _with_closure(compile, **options):
    own = torch.tensor(100.0 * tp.process_index())
    return mapped(lambda x: own + 0 * x, compile, **options)(mine())


def _drawn(compile: Any, rows: int) -> torch.Tensor:
    torch.manual_seed(7)
    return mapped(lambda x: torch.rand(2) + 0 * x, compile)(mine(torch.zeros(rows)))


ROWS: dict[str, Any] = {
    "psum": (_sum, [6.0, 6.0, 6.0, 6.0]),
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
    "eight_rows_fold": (
        lambda x: tp.psum(x, AXIS) + tp.axis_index(AXIS), torch.arange(28.0, 36.0),
        torch.arange(8.0)),
}  # fmt: skip
"""Name -> what a row does, what all rows get, and the rows if they are not X."""


for _name, (_function, _expected, *_given) in ROWS.items():

    def _run(compile, function=_function, given=_given):
        return mapped(function, compile)(mine(*given))

    _run.__name__ = _name
    in_both_modes(expect_rows(_expected))(_run)

COLUMNS = torch.arange(8.0).reshape(2, 4)

IN_BOTH_MODES: dict[str, Any] = {
    "out_axes_none_of_varying_values_is_the_first_rows": (  # JAX: 0 and 2
        expect_same(torch.tensor(0.0)),
        lambda compile: mapped(lambda x: x, compile, out_axes=None)(mine())),
    "out_axes_none_of_a_sum": (
        expect_same(torch.tensor(6.0)),
        lambda compile: mapped(_sum, compile, out_axes=None)(mine())),
    "in_axes_none_is_each_processs_own": (
        expect(lambda rank, count: part(X, rank, count) + 100 * rank),
        lambda compile: mapped(lambda x, own: x + own, compile, in_axes=(0, None))(
            mine(), 100.0 * _number()[0])),
    "in_axes_none_in_a_sum": (
        expect(lambda rank, count: (4 // count) * sum(range(count)) * torch.ones(4 // count)),
        lambda compile: mapped(lambda x, own: _sum(own), compile, in_axes=(0, None))(
            mine(), _number()[0].float())),
    "in_axes_one_out_axes_one": (
        expect_rows(COLUMNS * COLUMNS.sum(1, keepdim=True), dim=1),
        lambda compile: mapped(lambda x: x * _sum(x), compile, in_axes=1, out_axes=1)(
            mine(COLUMNS, 1))),
    "devices_of_this_process": (
        expect(lambda rank, count: torch.tensor([[0.0, float(rank)]])),
        lambda compile: mapped(_index_and_sum, compile, devices=tp.local_devices())(
            _number().float())),
    "devices_reversed": (
        expect(lambda rank, count: torch.tensor([[count - 1 - rank, sum(range(count))]])),
        lambda compile: mapped(_index_and_sum, compile, devices=tp.devices()[::-1])(_number())),
    "axis_size_is_that_of_all_processes": (
        expect_rows([4, 4, 4, 4]),
        lambda compile: mapped(_axis_size, compile, axis_size=4)()),
    "closure_that_differs": (
        expect(lambda rank, count: torch.full((4 // count,), 100.0 * rank)), _with_closure),
    "check_replicated_finds_a_closure_that_differs": (
        expect_error(ValueError, "out_axes is None for the output of <lambda>, but its value "
                     "differs between devices"),
        lambda compile: _with_closure(compile, out_axes=None, check_replicated=True)),
}  # fmt: skip

for _name, (_expecting, _run) in IN_BOTH_MODES.items():
    _run.__name__ = _name
    in_both_modes(_expecting)(_run)


@in_both_modes(expect_rows([0.0, 8.0, 16.0, 24.0]))
def gradient_outside_of_a_sum(compile):  # JAX: [0, 4] and [8, 12]
    function = mapped(_sum_of_squares, compile)
    return torch.func.grad(lambda x: function(x).sum())(mine())


@in_both_modes(expect_same(torch.tensor(0.0)))
def out_axes_none_of_a_closure_that_differs(compile):
    own = torch.tensor(100.0 * tp.process_index())
    return mapped(lambda x: own, compile, out_axes=None)(mine())


@in_both_modes(expect_same((4, True)))
def every_row_draws_its_own(compile):
    everything = tp.multihost.all_gather(_drawn(compile, 4), tiled=True)
    return len({tuple(row) for row in everything.tolist()}), bool((everything < 1).all())


class Silent:
    """A container that cannot be shown."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __repr__(self) -> str:
        raise ValueError("it cannot be shown")


pytree.register_pytree_node(Silent, lambda each: ([each.x], None), lambda xs, _: Silent(*xs))


@in_both_modes(expect_rows(2 * X))
def a_container_that_cannot_be_shown(compile):
    return mapped(lambda x: Silent(2 * x), compile)(mine()).x


# -- calls, traced ---------------------------------------------------------------------------------

RING_OF_8 = [(k, (k + 1) % 8) for k in range(8)]


def _agreement(certificate: tp.debug.Certificate) -> Any:
    groups = [group for each in certificate.collectives for group in each.groups]
    return [certificate.is_proved, *groups]


TRACED: dict[str, Any] = {
    "axis_size_on_devices_of_this_process": (
        expect_same(torch.tensor([1])),
        lambda: mapped(_axis_size, axis_size=1, devices=tp.local_devices())()),
    "axis_size_that_does_not_divide": (
        expect_error(
            ValueError, "axis_size=5 counts the rows of all processes, but does not divide over"),
        lambda: mapped(lambda: torch.tensor(1), axis_size=5)()),
    "more_rows_than_listed_devices": (
        expect_error(ValueError, "Got axis_size=2, num_local_devices=1"),
        lambda: mapped(lambda x: x, devices=tp.devices())(torch.ones(2))),
    "through_inductor": (
        expect_rows([6.0, 6.0, 6.0, 6.0]),
        lambda: mapped(_sum, compile=True)(mine())),
    "folded_rows_move_to_the_next_process": (
        expect_rows([7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        lambda: mapped(lambda x: tp.ppermute(x, AXIS, RING_OF_8))(mine(torch.arange(8.0)))),
    "lowering_without_running": (  # JAX: test_global_axis_size_initial_style
        expect_same(["all_reduce"]),
        lambda: [each.name for each in mapped(_sum).lower(mine()).cost().collectives]),
    "a_certificate": (  # only a run tells whether the other processes make the call
        expect(lambda rank, count: [count == 1, *[tuple(range(count))][: count - 1]]),
        lambda: _agreement(mapped(_sum).lower(mine()).certificate())),
    "numpy_scalars": (  # JAX: test_pmap_with_scalars
        expect(lambda rank, count: torch.tensor([np.float32(sum(range(count)))])),
        lambda: mapped(_sum)(np.float32([tp.process_index()]))),
    "numpy_arrays": (  # JAX: test_pmap_with_numpy_arrays
        expect(lambda rank, count: torch.full((1, 2, 2), 4.0 * count)),
        lambda: mapped(lambda x: tp.psum(x * 4, AXIS))(np.ones((1, 2, 2), np.float32))),
    "indexing_a_result": (  # JAX: testShardedArrayIndexing
        expect(lambda rank, count: part(X, rank, count)[0] * 2),
        lambda: mapped(lambda x: x * 2)(mine())[0]),
    "rows_draw_the_same_traced_and_not": (
        expect_same(True),
        lambda: bool((_drawn(GRAPH, 8).cpu() == _drawn(False, 8).cpu()).all())),
    "forward_derivative": (
        expect_rows([12.0, 12.0, 12.0, 12.0]),
        lambda: torch.func.jvp(mapped(_sum_of_squares), (mine(),), (torch.ones(len(mine())),))[1]),
    "vmap_around": (
        expect_rows([[6.0, 12.0], [6.0, 12.0], [6.0, 12.0], [6.0, 12.0]]),
        lambda: torch.func.vmap(mapped(_sum), 1, 1)(torch.stack([mine(), 2 * mine()], 1))),
}  # fmt: skip

for _name, (_expecting, _run) in TRACED.items():
    _run.__name__ = _name
    _expecting(_run)


@expect_rows([6.0, 6.0, 6.0, 6.0])
def torch_compile_around_it():  # JAX: [1, 1] and [5, 5]
    function = mapped(_sum)
    return torch.compile(lambda x: function(x), backend="eager")(mine())


@expect(lambda rank, count: torch.tensor([1]) if rank < 2 else None)
def devices_of_some_processes():
    if tp.process_index() >= 2:
        return None
    return mapped(_sum, devices=tp.devices()[:2])(_number())


@expect(lambda rank, count: torch.tensor([2 * rank]))
def fake_pmap_takes_what_the_devices_take():
    function = mapped(lambda x: 2 * x, devices=tp.devices())
    with tp.debug.fake_pmap():
        return function(_number())


@expect_error(ValueError, "must equal the number of local devices passed to pmap. Got axis_size=2")
def fake_pmap_refuses_what_the_devices_refuse():
    with tp.debug.fake_pmap():
        return mapped(lambda x: x, devices=tp.devices())(torch.ones(2))


@expect_error(RuntimeError, "cannot change how many processes a launcher has started")
def resize_needs_a_controller():
    tp.resize(1)


@expect_same(("serial", "vmapped", "pmapped"))
def check_pmap_with_devices():
    rows = torch.tensor([[tp.process_index(), 1.0]])
    return tp.debug.check_pmap(lambda x: x.sin(), rows, devices=tp.devices()).values


@expect_error(ValueError, "assert_replicated: x differs between processes")
def copies_that_differ_between_processes():
    layout, handle = tp.replicate(torch.ones(3))._alive()
    tp.debug.assert_replicated(make_sharded(layout, handle))
    team = current.runtime().team(layout.ranks)
    own = [torch.full((3,), float(tp.process_index()))] * len(layout.ranks)
    tp.debug.assert_replicated(make_sharded(layout, current.runtime().put(team, own)))


@expect_same(1)
def calls_that_are_timed_are_as_many_in_every_process():
    total, calls = mapped(_sum), []
    times(lambda: (calls.append(0), total(mine()))[1])
    return len({*tp.multihost.all_gather(len(calls)).tolist()})


# -- JAX's own multi-process tests -----------------------------------------------------------------


@expect(lambda rank, count: torch.full((1, 2), float(sum(range(1, count + 1)))))
def local_rows_on_local_devices():  # testBasic
    rows = [torch.full((2,), 1.0 + tp.process_index())]
    placed = tp.device_put_sharded(rows, tp.local_devices())
    result = mapped(_sum)(placed)
    assert result.is_fully_addressable
    assert result.devices() == set(tp.local_devices())
    return result


@expect_rows([0.0, 2.0, 4.0, 6.0])
def results_go_in_again():  # test_array_device_size_mismatch_with_mesh
    double = mapped(lambda x: x * 2)
    halve = mapped(lambda x: x / tp.axis_size(AXIS))
    return double(halve(double(double(mine()))))


@expect_same(4)
def random_keys_give_different_numbers():  # test_pmap_with_prng_keys
    keys = mine(tp.random.split(tp.random.key(0), 4))
    drawn = mapped(lambda key: tp.random.normal(key, ()))(keys)
    return len(set(tp.multihost.all_gather(drawn, tiled=True).tolist()))


@expect_same([True, True])
def replicated_output():  # test_replicated_output_sharding_multi_process
    result = mapped(_sum, out_axes=None)(mine())
    return [result.is_fully_replicated, result.devices() == set(tp.devices())]


# -- counts, arguments -----------------------------------------------------------------------------


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


@expect_same([6.0, 12.0, True])
def donated_argument():
    given = mapped(lambda x: x * 2)(mine())
    function = mapped(lambda x: x + tp.psum(x, AXIS), donate_argnums=0)
    result = tp.multihost.all_gather(function(given), tiled=True)
    return [float(result[3]) - 12, float(result[0]), given.is_deleted()]


@expect_rows([10.0, 11.0, 12.0, 13.0])
def closed_over_value_that_changes():
    weight = torch.tensor(1.0)
    function = mapped(lambda x: x + weight)
    function(mine())
    weight.fill_(10.0)
    return function(mine())


# -- transforms around a mapped function -----------------------------------------------------------


@expect_rows([0.0, 8.0, 16.0, 24.0])
def backward():
    x = mine().clone().requires_grad_()
    mapped(_sum_of_squares)(x).sum().backward()
    return x.grad


@expect_same(torch.tensor(6.0))
def gradient_of_what_all_rows_share():
    function = mapped(lambda w, x: w * x, in_axes=(None, 0))
    return torch.func.grad(lambda w: function(w, mine()).sum())(torch.tensor(1.0))


@expect_same(torch.tensor(6.0))
def backward_to_what_all_devices_hold():
    weight = tp.replicate(torch.tensor(1.0)).requires_grad_()
    mapped(lambda w, x: w * x, in_axes=(None, 0))(weight, mine()).sum().backward()
    return weight.grad


def draw_four() -> Any:
    """For comparison with a single controller."""
    return _drawn(GRAPH, 4)


# -- debug_nans ------------------------------------------------------------------------------------


def _sought(function: Callable[[Any], Any], given: Any, compile: Any) -> Any:
    tp.config.debug_nans = True
    try:
        return mapped(function, compile)(given)
    finally:
        tp.config.debug_nans = False


def _rooted(x):
    return tp.psum(x.sqrt(), AXIS) + x


_in_last_row = expect_error(FloatingPointError, f"from -1 to -1\n  in row 3 of 4, axis '{AXIS}'")


@in_both_modes(_in_last_row)
def a_nan_that_only_one_process_has(setting):
    return _sought(torch.sqrt, mine(2 - X), setting)


@in_both_modes(_in_last_row)
def a_nan_that_one_process_makes_and_all_get(setting):
    return _sought(_rooted, mine(2 - X), setting)


@in_both_modes(expect_error(FloatingPointError, "aten.div.Tensor gave NaN in 1 of 1 numbers"))
def a_nan_that_only_the_rows_of_all_processes_make(setting):
    return _sought(lambda x: x * 0 / (tp.psum(x, AXIS) - 6), mine(), setting)


@in_both_modes(_in_last_row)
def a_nan_in_a_value_of_all_processes(setting):
    return _sought(_rooted, spanning(2 - X), setting)


@_in_last_row
def a_nan_that_find_nan_finds_in_a_value_of_all_processes():
    return tp.debug.find_nan(mapped(_rooted), spanning(2 - X))


@in_both_modes(expect_rows([6.0, 7.0, 10.0, 15.0]))
def no_nan_though_it_is_sought(setting):
    return _sought(_rooted, mine(X**2), setting)


@expect_error(FloatingPointError, "in 1 of 4 numbers of float32[4], and its inputs hold none")
def a_nan_in_a_jitted_function():
    tp.config.debug_nans = True
    try:
        return tp.jit(torch.sqrt, compile=GRAPH)(tp.shard_batch(2 - X))
    finally:
        tp.config.debug_nans = False


@expect_error(FloatingPointError, "those that it got hold none. Call torchpmap.debug.find_nan on")
def a_nan_in_the_backward_pass_of_one_process():
    w = torch.ones((), requires_grad=True)
    y = _sought(lambda x: (x * w).sqrt(), mine(), GRAPH)
    (y.sum() * 0).backward()


@expect(lambda rank, count: Raised("FloatingPointError", f"\n  in process {count - 1}"))
def a_captured_nan_of_one_process():
    is_last = tp.process_index() == tp.process_count() - 1
    w = torch.tensor(float("nan") if is_last else 1.0)
    return _sought(lambda x: x * w, mine(), GRAPH)


# -- a recorded call -------------------------------------------------------------------------------


def _each_its_part(function):
    _add(function, lambda rank, count: [[6.0] * (4 // count), part(3 * X, rank, count).tolist()])


@_each_its_part
def recorded_and_replayed():
    folder = tempfile.mkdtemp()
    folder = bytes(tp.multihost.broadcast(torch.tensor([*folder.encode()])).tolist()).decode()

    def f(x):
        return tp.psum(x, AXIS), 3 * x

    with tp.debug.record(folder):
        if tp.process_index() == 0:  # a call that the others do not make does not count for them
            mapped(f, devices=tp.local_devices())(torch.ones(1))
        mapped(f)(mine())
        mapped(f)(-mine())
        path = tp.debug.dump()[-2]
    tp.multihost.barrier()  # all parts are written
    results = tp.debug.replay(path).results
    tp.multihost.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return [each.tolist() for each in results.values()]
