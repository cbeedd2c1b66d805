"""What every rank of test_torchrun.py does with values: operations, training, torch's settings, and
torchpmap.multihost.

Run as a script (under torchrun) this file runs all cases and writes the results down.
"""

import gc
import json
import sys
import tempfile
from typing import Any

import _torchrun_agreement  # adds cases
import numpy as np
import torch
from _launched import Raised, host, run_cases
from _support import DEVICE, LAGS, autocast
from _torchrun_cases import (
    AXIS,
    CASES,
    GRAPH,
    Case,
    X,
    draw_four,
    expect,
    expect_error,
    expect_rows,
    expect_same,
    in_both_modes,
    mapped,
    mine,
    part,
    spanning,
)

import torchpmap as tp
from torchpmap._base.ambient import ambient, applied

__all__ = ["CASES", "GRAPH", "Case", "_torchrun_agreement"]

# -- values ----------------------------------------------------------------------------------------


@expect(
    lambda rank, count: [part(X, rank, count).sum() * 2 + 4 // count, torch.tensor(0.5).double()]
)
def operations_on_local_rows():
    y = mapped(lambda x: x * 2)(mine())
    return [(y + 1).sum(), (y == y).double().mean() / 2]


@expect(lambda rank, count: [True, [f"{DEVICE}:{rank}"], part(X, rank, count), None])
def shards_of_local_rows():
    y = mapped(lambda x: x)(mine())
    (shard,) = y.addressable_shards
    return [y.is_fully_addressable, [str(shard.device)], shard.data, shard.index[0].start]


@expect(
    lambda rank, count: [False, [4], f"{DEVICE}:{rank}", rank * 4 // count, part(X, rank, count)]
)
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
        + " ".join(f"{DEVICE}:{k}" for k in range(count)) + ")")  # fmt: skip
def text_of_a_spanning_value():
    return str(spanning())


@expect(lambda rank, count: [[f"{DEVICE}:{rank}"], 40 * 4 // count])
def memory_of_this_process():
    gc.collect()  # else values of earlier cases may go between the two counts
    before = {device: stats.value_bytes for device, stats in tp.memory_stats().items()}
    x = mapped(lambda x: x.expand(10) + 0)(mine())
    ((device, stats),) = tp.memory_stats().items()
    assert x.is_ready()
    return [[str(device)], stats.value_bytes - before[device]]


# what runs on a lagging device's own thread is in no call, so its axis is not known
SEEN = 0 if LAGS else 1


@expect(lambda rank, count: [[f"{DEVICE}:{k}", ["running step"], SEEN] for k in range(count)])
def trace_of_all_processes():
    def step(x):
        return tp.psum(x, AXIS)

    with tp.profiler.trace(tempfile.mkdtemp()) as path:
        mapped(step)(mine()).block_until_ready()
    tp.multihost.barrier("written")
    tracks: dict[int, list[Any]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        track = tracks.setdefault(event["pid"], ["", [], 0])
        if event["name"] == "process_name":
            track[0] = event["args"]["name"]
        if event["ph"] == "X" and event["name"].startswith("running"):
            track[1].append(event["name"])
        track[2] += event["name"].startswith(f"all_reduce over {AXIS}, ")
    return list(tracks.values())


@expect(lambda rank, count: [True, rank == 0])
def trace_of_a_process_that_raises():
    try:
        with tp.profiler.trace(tempfile.mkdtemp()) as path:
            if tp.process_index() == 0:
                raise ValueError
            raise KeyError
    except (ValueError, KeyError) as error:
        own = path.with_name(f"trace-process-{tp.process_index()}.json")
        return [own.exists() and not path.exists(), isinstance(error, ValueError)]


@expect_same(X * 2 + 6)
def a_spanning_argument_makes_the_call_global():
    result = mapped(lambda x: x * 2 + tp.psum(x, AXIS))(spanning())
    assert not result.is_fully_addressable
    assert list(result.shape) == [4]
    return tp.multihost.all_gather(result)


@expect_same([X + 1, torch.tensor(6.0), torch.tensor(3.0), X * X])
def operations_on_a_spanning_value():
    g = spanning()
    return [tp.multihost.all_gather(g + 1), g.sum(), g.max(), tp.multihost.all_gather(g * g)]


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
        with autocast(enabled=False):
            return square @ square

    def cast(x):
        square = torch.ones(2, 2) * x
        return square @ square

    with autocast(torch.bfloat16):
        return mapped(cast, compile)(mine()).dtype, mapped(function, compile)(mine()).dtype


@in_both_modes(expect_rows(torch.ones(4, dtype=torch.bool)))
def backward_passes_under_other_settings(compile):
    function = mapped(lambda x: (torch.arange(3) / 3 * x).sum(), compile)
    x = torch.ones(len(mine()), dtype=torch.float64, requires_grad=True)
    with applied(ambient()):
        torch.set_default_dtype(torch.float64)
        results = [function(x) for _ in range(3)]
        results[0].sum().backward()  # its plan is made under these settings
    for each in results[1:]:
        each.sum().backward()
    return (x.grad - 3).abs() < 1e-12  # numbers in float32 are 1e-8 off


if LAGS:  # a call there runs later, when the setting of the process is another one
    for _name in (
        *("another_default_dtype", "autocast_and_where_it_is_off"),
        "backward_passes_under_other_settings",
    ):
        del CASES[f"{_name}-traced"], CASES[f"{_name}-untraced"]


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


# -- modules ---------------------------------------------------------------------------------------


@expect_same([6.0, 1.5])
def a_batch_norm_sees_the_rows_of_all_processes():
    norm = tp.replicate(torch.nn.BatchNorm1d(1, momentum=1.0))
    x = tp.shard_batch(torch.arange(4.0)[:, None])
    norm(x)
    return [x.sum().item(), norm.running_mean.item()]


if __name__ == "__main__":
    cases = {name: lambda case=CASES[name]: host(case.run()) for name in sys.argv[2:]}
    run_cases({**cases, "draw_four": lambda: host(draw_four())}, sys.argv[1])
