"""Covers: _collectives/groups.py and _collectives/permute.py, over every kind and tuple of axes."""

import numpy as np
import pytest
import torch
from _axis_models import (
    EVEN,
    LINEAR,
    ON_DEVICES,
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
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

WORLDS = {f"{name}, {way}": (world, mode)
    for name, world in ON_DEVICES.items() for way, mode in {"graph": EAGER, "python": False}.items()
} | {name: (world, None) for name, world in VMAPPED.items()}  # fmt: skip


LONG = ("folded, graph", "vmap inside, graph", "vmap first, graph", "vmap first, python")


def in_worlds(*long):
    """A test gets ``run(f, *rows)`` and the name of the axes of each world."""
    return pytest.mark.parametrize(
        ("run", "axis_name"),
        [
            pytest.param(
                lambda f, *rows, world=world, mode=mode: world(f, *rows, compile=mode),
                world.axis_name,
                id=name,
                marks=[pytest.mark.long] if name in long else [],
            )
            for name, (world, mode) in WORLDS.items()
        ],
    )


# --- values and transposes ------------------------------------------------------------------------


@in_worlds(*LONG, "three")
def test_values_and_transposes(run, axis_name):
    """Every collective with every kind of groups and permutation."""
    inputs = {
        name: (x := sample(N, *case.shape), sample(*case.of_tensor(x).shape, seed=1))
        for name, case in LINEAR.items()
    }

    def all_cases(given):
        results = {}
        for name, (x, w) in given.items():
            case = LINEAR[name]
            value, pull = torch.func.vjp(lambda x, case=case: case.run(x, axis_name), x)
            results[name] = value, *pull(w)
        return results

    for name, (value, pulled) in run(all_cases, inputs).items():
        x, w = (t.numpy() for t in inputs[name])
        np.testing.assert_allclose(value, LINEAR[name].model(x), rtol=1e-12, err_msg=name)
        wanted = transposed(LINEAR[name], w)
        np.testing.assert_allclose(pulled, wanted, rtol=1e-12, err_msg=f"transposed {name}")


# --- extremes -------------------------------------------------------------------------------------

TIES = torch.tensor([[3.0, 1], [3, 1], [2, 1], [3, 0], [0, 0], [2, 5], [2, 5], [-1, 5]]).double()
GROUPS = {**UNEVEN, **{name: EVEN[name] for name in ("scattered", "strided", "singles", "whole")}}


@in_worlds(*LONG, "vmap inside, python")
def test_extremes_share_ties_within_a_group(run, axis_name):
    w, t = sample(N, 2, seed=3), sample(N, 2, seed=4)

    def extremes(x, w, t):
        results = {}
        for name, groups in GROUPS.items():
            for take, reduce in ((np.max, tp.pmax), (np.min, tp.pmin)):

                def f(x, reduce=reduce, groups=groups):
                    return reduce(x, axis_name, axis_index_groups=groups)

                def pulled(x, f=f):
                    return torch.func.vjp(f, x)[1](w * f(x))[0]

                value, pull = torch.func.vjp(f, x)
                forward = [torch.func.jvp(g, (x,), (t,))[1] for g in (f, pulled)]
                results[name, take.__name__] = value, *pull(w), *forward
        return results

    x, w_, t_ = (rows.numpy() for rows in (TIES, w, t))
    for (name, take), results in run(extremes, TIES, w, t).items():
        groups, reduce = GROUPS[name], getattr(np, take)
        total = grouped(everyone(lambda rows: rows.sum(0)), groups)
        shares = extreme_shares(x, groups, reduce)
        wanted = {
            "value": grouped(everyone(lambda rows, reduce=reduce: reduce(rows, 0)), groups)(x),
            "pulled": shares * total(w_),
            "pushed": total(shares * t_),
            "pushed and pulled": shares * total(w_ * total(shares * t_)),
        }
        for (what, want), got in zip(wanted.items(), results, strict=True):
            np.testing.assert_allclose(got, want, err_msg=f"{what} {name} {take}")


@in_worlds(*LONG[1:], "vmap inside, python")
@pytest.mark.parametrize("name", ["scattered", "uneven_mixed"])
def test_groups_do_not_see_the_nan_of_others(name, run, axis_name):
    groups, nan, inf = GROUPS[name], float("nan"), float("inf")
    rows = torch.tensor([1, 2, nan, 4, inf, 6, -inf, 8], dtype=torch.float64)
    takes = {tp.psum: np.sum, tp.pmean: np.mean, tp.pmax: np.max, tp.pmin: np.min}

    def f(x):
        def reductions(x):
            return [kind(x, axis_name, axis_index_groups=groups) for kind in takes]

        slopes = [torch.func.grad(lambda x, k=k: reductions(x)[k])(x) for k in range(len(takes))]
        return reductions(x), slopes

    values, (total, mean, *extremes) = run(f, rows)
    for value, take in zip(values, takes.values(), strict=True):
        wanted = grouped(everyone(lambda r, take=take: take(r)), groups)(rows.numpy())
        np.testing.assert_array_equal(value, wanted)
    sizes = {k: float(len(group)) for group in groups for k in group}
    assert total.tolist() == [sizes[k] for k in range(N)]
    assert mean.tolist() == [1.0] * N
    for slopes in extremes:  # one holder in each group gets all that the members have
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
MIXED, SCATTERED = UNEVEN["uneven_mixed"], EVEN["scattered"]


def rows_of(dtype, bits=BITS):
    return bits.to(dtype) * (1 + 2j) if dtype.is_complex else bits.to(dtype)


def wide(x):
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


@pytest.mark.cpu_only("NCCL and the kernels of accelerators lack some of the dtypes")
@in_worlds(*LONG, "vmap inside, python", "two", "three")
def test_every_dtype(run, axis_name):
    def f(bits):
        results = {}
        for dtype in (*REAL, *OTHER):
            x = rows_of(dtype, bits)
            moved = {
                "ppermute": tp.ppermute(x, axis_name, PERMUTATIONS["partial"]),
                "pbroadcast": tp.pbroadcast(x, axis_name, 2),
                "all_gather": tp.all_gather(x, axis_name, axis_index_groups=SCATTERED),
                "all_to_all": tp.all_to_all(tp.all_gather(x, axis_name), axis_name, 0, 0),
            }
            summed = {}
            if dtype != torch.float8_e8m0fnu:
                summed["psum"] = tp.psum(x, axis_name)
                summed["psum of groups"] = tp.psum(x, axis_name, axis_index_groups=MIXED)
            if dtype in REAL:
                moved["pmax"] = tp.pmax(x, axis_name)
                moved["pmin of groups"] = tp.pmin(x, axis_name, axis_index_groups=MIXED)
            assert {y.dtype for y in moved.values()} == {dtype}
            wanted = torch.int32 if dtype == torch.bool else dtype
            assert {y.dtype for y in summed.values()} <= {wanted}
            results[str(dtype)] = {name: wide(y) for name, y in (moved | summed).items()}
        return results

    got = run(f, BITS)
    for dtype in (*REAL, *OTHER):
        bits = wide(rows_of(dtype)).numpy()
        zero = wide(torch.zeros((), dtype=dtype)).item()  # float8_e8m0fnu has none
        total = everyone(lambda r: r.sum(0))
        wanted = {
            "ppermute": LINEAR["ppermute-partial"].model(bits - zero) + zero,
            "pbroadcast": np.stack([bits[2]] * N),
            "all_gather": grouped(everyone(lambda r: r), SCATTERED)(bits),
            "all_to_all": np.stack([np.stack([row] * N) for row in bits]),  # k: what k has
            "psum": grouped(total, None)(bits),
            "psum of groups": grouped(total, MIXED)(bits),
        }
        if dtype in REAL:
            wanted["pmax"] = grouped(everyone(lambda r: r.max(0)), None)(bits)
            wanted["pmin of groups"] = grouped(everyone(lambda r: r.min(0)), MIXED)(bits)
        for name, found in got[str(dtype)].items():
            np.testing.assert_array_equal(found, wanted[name], err_msg=f"{name} {dtype}")


# --- constants, indices, what is sent -------------------------------------------------------------


@in_worlds()
def test_constants_fold(run, axis_name):
    """Python numbers stay numbers, the same on every device."""
    even, odd = {"axis_index_groups": SCATTERED}, {"axis_index_groups": UNEVEN["uneven"]}

    def f(x):
        i, ones = axis_name, np.ones(2, np.float32)
        sums = tp.psum(1, i), tp.psum(2.5, i, **even), tp.pmean(3, i), tp.pmean(4.0, i, **odd)
        assert sums == (8, 5.0, 3.0, 4.0)
        assert [type(value) for value in sums] == [int, float, float, float]
        others = tp.pmax(3, i), tp.pmin(True, i, **odd), tp.pbroadcast(2.5, i, 3), tp.axis_size(i)
        assert others == (3, True, 2.5, 8)
        assert (tp.psum((), i), tp.pmax({"a": None}, i)) == ((), {"a": None})
        return tp.psum(2.0, i, **odd) + (tp.psum(ones, i) + tp.pmax(ones, i))[0] + x * 0

    assert run(f, torch.zeros(N)).tolist() == [13.0, 13.0, *[21.0] * 6]


@in_worlds()
def test_trees_and_the_row_major_index(run, axis_name):
    def f(x):
        tree = {"a": x, "b": (x.to(torch.int32), None)}
        summed = tp.psum(tree, axis_name, axis_index_groups=MIXED)
        moved = tp.ppermute(tree, axis_name, PERMUTATIONS["ring"])
        assert summed["b"][1] is None
        index = tp.axis_index(axis_name), 0 * x + tp.axis_index(())
        return *index, summed["a"], summed["b"][0], moved["a"], moved["b"][0]

    index, zeros, *got = run(f, torch.arange(float(N)))
    assert index.tolist() == list(range(N))
    assert zeros.tolist() == [0] * N
    assert [x.dtype for x in got] == [torch.float32, torch.int32] * 2
    for summed, moved in zip(got[:2], got[2:], strict=True):
        assert summed.tolist() == [9, 3, 3, 9, 16, 16, 9, 16]
        assert moved.tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


ALL = ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("world_name", "name", "sent"),
    [
        # one value of two elements per device, and not the eight of all
        ("folded", "ppermute-ring", [("ppermute", 2, ALL)]),
        ("vmap first", "ppermute-ring", [("ppermute", 4, ALL)]),
        ("folded", "ppermute-by_two", [("ppermute", 4, ALL)]),
        ("folded", "ppermute-back", [("ppermute", 2, ALL)] * 2),
        ("folded", "ppermute-mirrored", [("ppermute", 4, ALL)] * 2),
        ("folded", "ppermute-stays", []),
        ("folded", "ppermute-nothing", []),
        # groups within a device; over all devices, with one sum per device or per row of it
        ("folded", "psum-neighbours", []),
        ("folded", "psum-singles", []),
        ("folded", "psum-whole", [("all_reduce", 6, ALL)]),
        ("folded", "psum-strided", [("all_reduce", 12, ALL)]),
        ("folded", "psum-halves", [("all_reduce", 6, ((2, 3), (0, 1)))]),
        ("folded", "psum-uneven", [("all_reduce", 6, ((0,), (1, 2, 3)))]),
        ("folded", "psum-scattered", [("all_gather_into_tensor", 12, ALL)]),
        ("vmap inside", "psum_scatter-whole", [("reduce_scatter_tensor", 16, ALL)]),
    ],
)
def test_no_more_is_sent_than_must_be(world_name, name, sent):
    """An operation, the number of elements, and the groups."""
    world, case = ON_DEVICES[world_name], LINEAR[name]
    f = world.mapped(lambda x: case.run(x, world.axis_name))
    certificate = f.lower(world.grid_of(sample(N, *case.shape))).certificate()
    assert [(c.name, c.num_bytes // 8, c.groups) for c in certificate.collectives] == sent
