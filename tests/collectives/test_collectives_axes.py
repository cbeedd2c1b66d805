"""Covers: _collectives/groups.py and _collectives/permute.py, over every kind and tuple of axes."""

from functools import partial

import numpy as np
import pytest
import torch
from _axis_models import (
    EVEN,
    LINEAR,
    ON_PROCESSES,
    PERMUTATIONS,
    UNEVEN,
    VMAPPED,
    N,
    everyone,
    extreme_shares,
    grouped,
    sample,
    transposed,
)
from _spmd import spmd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchpmap._collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
)
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis

WORLDS = {**ON_PROCESSES, **VMAPPED}
TRACED = [
    *("psum-whole", "psum-strided", "psum-scattered", "pmean-uneven_mixed", "psum-singles"),
    *("all_gather_tiled-scattered", "all_gather-halves", "psum_scatter_tiled-two_orders"),
    *("all_to_all-scattered", "all_to_all_tiled-neighbours", "ppermute-any", "ppermute-partial"),
]


# --- run on the processes -------------------------------------------------------------------------


def linear_inputs(name):
    x = sample(N, *LINEAR[name].shape)
    return x, sample(*LINEAR[name].model(x.numpy()).shape, seed=1)


def value_and_pullback(name):
    """A function of (axis name, row, cotangent)."""

    def both(axis_name, x, w):
        value, pull = torch.func.vjp(lambda x: LINEAR[name].run(x, axis_name), x)
        return value, *pull(w)

    return both


def run_linear(world_name, name):
    return apply(world_name, value_and_pullback(name), *linear_inputs(name))


def run_traced(world_name):
    world, results = ON_PROCESSES[world_name], {}
    (axis,) = axis_stack.lookup("i")
    for name in TRACED:
        f = partial(value_and_pullback(name), world.axis_name)
        blocks = [world.block(x, int(axis.index)) for x in linear_inputs(name)]

        def body(index, *blocks, f=f):
            return world.mapped(f, Axis("i", 4, index, axis.group, axis.subgroup), *blocks)

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            graph = make_fx(body)(*(mode.from_tensor(x) for x in (torch.tensor(0), *blocks)))
        results[name] = graph(axis.index, *blocks), graph.code
    return results


@pytest.fixture(scope="module")
def run():
    with spmd(4) as run:
        yield run


def in_world(run, world_name, function, *args):
    """The results of a function of (world name, *args) on all rows, put together."""
    if world_name in VMAPPED:
        blocks = [function(world_name, *args)]
    else:
        blocks = run(function, world_name, *args)
    return [WORLDS[world_name].rows(parts) for parts in zip(*blocks, strict=True)]


def apply(world_name, f, *rows):
    """``f(axis_name, *row)`` on the rows of this process, or all of them."""
    world, axis, rank = WORLDS[world_name], None, 0
    if world_name in ON_PROCESSES:
        (axis,) = axis_stack.lookup("i")
        rank = int(axis.index)
    return world.mapped(partial(f, world.axis_name), axis, *(world.block(x, rank) for x in rows))


# --- values and transposes ------------------------------------------------------------------------


def check_linear(name, value, pulled):
    x, w = (t.numpy() for t in linear_inputs(name))
    np.testing.assert_allclose(value.numpy(), LINEAR[name].model(x), rtol=1e-12)
    np.testing.assert_allclose(pulled.numpy(), transposed(LINEAR[name], w), rtol=1e-12)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("world_name", ON_PROCESSES)
def test_on_processes(world_name, name, run):
    check_linear(name, *in_world(run, world_name, run_linear, name))


@pytest.mark.parametrize("world_name", VMAPPED)
@pytest.mark.long("three")
def test_vmapped(world_name):
    for name in LINEAR:
        check_linear(name, *in_world(None, world_name, run_linear, name))


@pytest.mark.parametrize("world_name", ["folded", "vmapped_process"])
@pytest.mark.long("vmapped_process")
def test_traced_graph(world_name, run):
    results = run(run_traced, world_name)
    for name in TRACED:
        assert len({result[name][1] for result in results}) == 1, f"{name}: ranks differ"
        blocks = zip(*(result[name][0] for result in results), strict=True)
        check_linear(name, *(WORLDS[world_name].rows(parts) for parts in blocks))


# --- extremes -------------------------------------------------------------------------------------

TIES = torch.tensor([[3.0, 1], [3, 1], [2, 1], [3, 0], [0, 0], [2, 5], [2, 5], [-1, 5]]).double()
COTANGENTS = sample(N, 2, seed=3)
TANGENTS = sample(N, 2, seed=4)


def extremes(axis_name, groups, x, w, t):
    results = []
    for reduce in (pmax, pmin):

        def f(x, reduce=reduce):
            return reduce(x, axis_name, axis_index_groups=groups)

        value, pull = torch.func.vjp(f, x)
        _, pushed = torch.func.jvp(f, (x,), (t,))
        _, again = torch.func.jvp(lambda x, f=f: torch.func.vjp(f, x)[1](w * f(x))[0], (x,), (t,))
        results += [value, *pull(w), pushed, again]
    return tuple(results)


def run_extremes(world_name, groups):
    return apply(world_name, lambda i, *xs: extremes(i, groups, *xs), TIES, COTANGENTS, TANGENTS)


@pytest.mark.parametrize("world_name", ["folded", "vmapped_process", "two"])
@pytest.mark.long("folded")
def test_extremes_share_ties_within_a_group(world_name, run):
    x, w, t = TIES.numpy(), COTANGENTS.numpy(), TANGENTS.numpy()
    for groups in (*UNEVEN.values(), *(EVEN[k] for k in ("scattered", "strided", "singles")), None):
        got = in_world(run, world_name, run_extremes, groups)
        total = grouped(everyone(lambda rows: rows.sum(0)), groups)
        for (value, pulled, pushed, again), take in zip(
            (got[:4], got[4:]), (np.max, np.min), strict=True
        ):
            shares = extreme_shares(x, groups, take)
            wanted = grouped(everyone(lambda rows, take=take: take(rows, 0)), groups)(x)
            np.testing.assert_allclose(value, wanted)
            np.testing.assert_allclose(pulled, shares * total(w))
            np.testing.assert_allclose(pushed, total(shares * t))
            np.testing.assert_allclose(again, shares * total(w * total(shares * t)))


def run_special(world_name, groups, rows):
    def f(i, x):
        kinds = (psum, pmean, pmax, pmin)
        values = [kind(x, i, axis_index_groups=groups) for kind in kinds]
        slopes = [
            torch.func.grad(lambda x, kind=kind: kind(x, i, axis_index_groups=groups))(x)
            for kind in kinds
        ]
        return (*values, *slopes)

    return apply(world_name, f, rows)


@pytest.mark.parametrize("world_name", ["folded", "two"])
@pytest.mark.parametrize("groups", [EVEN["scattered"], UNEVEN["uneven_mixed"]])
def test_groups_do_not_see_the_nan_of_others(world_name, groups, run):
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([1, 2, nan, 4, inf, 6, -inf, 8], dtype=torch.float64)
    got = in_world(run, world_name, run_special, groups, rows)
    takes = (np.sum, np.mean, np.max, np.min)
    for value, take in zip(got[:4], takes, strict=True):
        wanted = grouped(everyone(lambda r, take=take: take(r)), groups)(rows.numpy())
        np.testing.assert_array_equal(value, wanted)
    sizes = {k: float(len(group)) for group in groups for k in group}
    assert got[4].tolist() == [sizes[k] for k in range(N)]
    assert got[5].tolist() == [1.0] * N
    for slopes in got[6:]:  # one holder in each group gets all that the members have
        assert sorted(slopes.tolist()) == sorted(
            value for group in groups for value in [float(len(group)), *[0.0] * (len(group) - 1)]
        )


# --- dtypes ---------------------------------------------------------------------------------------

REAL = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
OTHER = [torch.complex64, torch.complex128, torch.float8_e8m0fnu]
BITS = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1], [1, 0], [0, 0], [1, 0]])


def rows_of(dtype):
    return BITS.to(dtype) * (1 + 2j) if dtype.is_complex else BITS.to(dtype)


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def run_dtypes(world_name):
    groups = UNEVEN["uneven_mixed"]

    def f(i, *xs):
        out = []
        for x in xs:
            moved = [
                ppermute(x, i, PERMUTATIONS["partial"]),
                pbroadcast(x, i, 2),
                all_gather(x, i, axis_index_groups=EVEN["scattered"]),
                all_to_all(all_gather(x, i), i, 0, 0),
            ]
            if x.dtype != torch.float8_e8m0fnu:
                moved += [psum(x, i), psum(x, i, axis_index_groups=groups)]
            if not x.is_complex() and x.dtype != torch.float8_e8m0fnu:
                moved += [pmax(x, i), pmin(x, i, axis_index_groups=groups)]
            summed = torch.int32 if x.dtype == torch.bool else x.dtype
            dtypes = [*[x.dtype] * 4, summed, summed, x.dtype, x.dtype]
            assert [y.dtype for y in moved] == dtypes[: len(moved)]
            out += map(wide, moved)
        return tuple(out)

    return apply(world_name, f, *map(rows_of, (*REAL, *OTHER)))


@pytest.mark.parametrize("world_name", [*ON_PROCESSES, "two"])
def test_every_dtype(world_name, run):
    got = iter(in_world(run, world_name, run_dtypes))
    groups = UNEVEN["uneven_mixed"]
    for dtype in (*REAL, *OTHER):
        bits = wide(rows_of(dtype)).numpy()
        zero = wide(torch.zeros((), dtype=dtype)).item()  # float8_e8m0fnu has none
        sent = LINEAR["ppermute-partial"].model(bits - zero) + zero
        wanted = [
            sent,
            np.stack([bits[2]] * N),
            grouped(everyone(lambda r: r), EVEN["scattered"])(bits),
            np.stack([np.stack([bits[k]] * N) for k in range(N)]),  # all send k what k has
        ]
        if dtype != torch.float8_e8m0fnu:
            total = everyone(lambda r: r.sum(0))
            wanted += [grouped(total, None)(bits), grouped(total, groups)(bits)]
        if dtype in REAL:
            wanted += [
                grouped(everyone(lambda r: r.max(0)), None)(bits),
                grouped(everyone(lambda r: r.min(0)), groups)(bits),
            ]
        for want in wanted:
            np.testing.assert_array_equal(next(got).numpy(), want, err_msg=str(dtype))


# --- constants, indices, what is sent -------------------------------------------------------------


def run_constants(world_name):
    """Python numbers stay numbers, the same on every device, and nothing is sent."""
    found = []

    def f(i, x):
        even = {"axis_index_groups": EVEN["scattered"]}
        odd = {"axis_index_groups": UNEVEN["uneven"]}
        found.append((psum(1, i), psum(2.5, i, **even), pmean(3, i), pmean(4.0, i, **odd)))
        found.append((pmax(3, i), pmin(True, i, **odd), pbroadcast(2.5, i, 3), axis_size(i)))
        found.append((psum((), i), pmax({"a": None}, i)))
        array = psum(np.ones(2, np.float32), i) + pmax(np.ones(2, np.float32), i)
        return psum(2.0, i, **odd) + array[0] + x * 0

    with axis_stack.recording() as calls:
        rows = apply(world_name, f, torch.zeros(N))
    return [found, calls, rows]


@pytest.mark.parametrize("world_name", WORLDS)
def test_constants_fold(world_name, run):
    on = [run_constants(world_name)] if world_name in VMAPPED else run(run_constants, world_name)
    for found, calls, _ in on:
        assert found == [(8, 5.0, 3.0, 4.0), (3, True, 2.5, 8), ((), {"a": None})]
        assert [type(value) for value in found[0]] == [int, float, float, float]
        assert calls == []
    rows = WORLDS[world_name].rows([rows for *_, rows in on])
    assert rows.tolist() == [13.0, 13.0, *[21.0] * 6]


def run_index_and_tree(world_name):
    groups = UNEVEN["uneven_mixed"]

    def f(i, x):
        tree = {"a": x, "b": (x.to(torch.int32), None)}
        summed = psum(tree, i, axis_index_groups=groups)
        moved = ppermute(tree, i, PERMUTATIONS["ring"])
        assert summed["b"][1] is None
        index = axis_index(i), 0 * x + axis_index(())
        return *index, summed["a"], summed["b"][0], moved["a"], moved["b"][0]

    return apply(world_name, f, torch.arange(float(N)))


@pytest.mark.parametrize("world_name", WORLDS)
def test_trees_and_the_row_major_index(world_name, run):
    index, zeros, *got = in_world(run, world_name, run_index_and_tree)
    assert index.tolist() == list(range(N))
    assert zeros.tolist() == [0] * N
    assert [x.dtype for x in got] == [torch.float32, torch.int32] * 2
    for summed, moved in zip(got[:2], got[2:], strict=True):
        assert summed.tolist() == [9, 3, 3, 9, 16, 16, 9, 16]
        assert moved.tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


def run_record(world_name, name):
    """What the processes exchange for one case, without its values."""
    with axis_stack.recording() as calls:
        apply(world_name, lambda i, x: LINEAR[name].run(x, i), linear_inputs(name)[0])
    return [(call[0], call[2], call[3]) for call in calls]


@pytest.mark.parametrize(
    ("world_name", "name", "sent"),
    [
        # one value of two elements per device, and not the eight of all
        ("folded", "ppermute-ring", [("permute", "axis", (1, 2))]),
        ("vmapped_process", "ppermute-ring", [("permute", "axis", (2, 2))]),
        ("folded", "ppermute-by_two", [("permute", "axis", (2, 2))]),
        ("folded", "ppermute-back", [("permute", "axis", (1, 2)), ("permute", "axis", (1, 2))]),
        ("folded", "ppermute-mirrored", [("permute", "axis", (2, 2))] * 2),
        ("folded", "ppermute-stays", []),
        ("folded", "ppermute-nothing", []),
        # groups within a device; over all devices, with one sum per device or per row of it
        ("folded", "psum-neighbours", []),
        ("folded", "psum-singles", []),
        ("folded", "psum-whole", [("all_reduce", "axis", (2, 3))]),
        ("folded", "psum-strided", [("all_reduce", "axis", (2, 2, 3))]),
        ("folded", "psum-halves", [("all_reduce", "axis[2,3|0,1]", (2, 3))]),
        ("folded", "psum-uneven", [("all_reduce", "axis[0|1,2,3]", (2, 3))]),
        ("folded", "psum-scattered", [("all_gather", "axis", (2, 2, 3))]),
        ("process_vmapped", "psum_scatter-whole", [("reduce_scatter", "axis", (4, 2, 2))]),
    ],
)
def test_no_more_is_sent_than_must_be(world_name, name, sent, run):
    for calls in run(run_record, world_name, name):
        assert calls == sent
