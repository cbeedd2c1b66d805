"""Covers: sums of float16, bfloat16 and float8 are taken in float32 and rounded once.

Accelerators add float16 and bfloat16 in the dtype itself: there the numbers are such that every sum
is exact.

Expected numbers are those of exact arithmetic, rounded.  Those of ``psum``, ``pmean``,
``psum_scatter`` and the gradients over one axis in bfloat16 are also what jax 0.10.2 gives on CPU
(``psum`` of 256, 1, 1, 1 is 260); over several axes it rounds once per axis, and it adds float16 in
float16.
"""

import numpy as np
import pytest
import torch
from _support import DEVICE, EAGER, WAYS, pool_with

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

N = 4
BIG = {
    torch.bfloat16: 256.0,  # 256 + 1 is 256
    torch.float16: 2048.0,
    torch.float8_e4m3fn: 16.0,
    torch.float8_e5m2: 8.0,
}
if DEVICE != "cpu":
    BIG = dict.fromkeys(BIG, 1.0)
GROUPS = {
    "uneven": [[0, 1, 2], [3]],
    "even": [[0, 2], [1, 3]],
    "of lanes": [[0, 3, 4, 5], [1, 2, 6, 7]],
}
ALL = (torch.bfloat16, torch.float16)


def rows(dtype, count=N):
    """Numbers of which the first swallows each of the others, but not their sum."""
    values = torch.ones(count)
    values[0] = BIG[dtype]
    return values.to(dtype)


def rounded(value, dtype):
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).to(dtype).item()


# -- every sum, of everything that is summed -------------------------------------------------------


def sums(x):
    """What adds ``x`` over the axis "i", each as a scalar."""
    size = tp.axis_size("i")
    own = tp.axis_index("i") == 0

    def gradient(f):
        return tp.grad(f)(torch.ones_like(x))

    found = {
        "psum": tp.psum(x, "i"),
        "psum of a tree": tp.psum({"a": x, "b": (x.expand(2), torch.ones(3))}, "i")["b"][0][0],
        "pmean": tp.pmean(x, "i") * size,
        "psum_scatter": tp.psum_scatter(x.expand(size), "i"),
        "psum_scatter tiled": tp.psum_scatter(x.expand(size), "i", tiled=True)[0],
        "transposed psum": gradient(lambda y: tp.psum(y, "i") * x),
        "transposed pmean": gradient(lambda y: tp.pmean(y, "i") * x) * size,
        "transposed all_gather": gradient(lambda y: (tp.all_gather(y, "i") * x).sum()),
        "transposed pbroadcast": tp.psum(
            torch.where(own, gradient(lambda y: tp.pbroadcast(y, "i", 0) * x), 0.0).to(x.dtype), "i"
        ),
        "transposed pmax": gradient(lambda y: tp.pmax(y, "i") * x) * size,
    }
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [N, 2 * N], ids=["devices", "devices and lanes"])
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_sum(dtype, count, way):
    x = rows(dtype, count)
    compile, around = WAYS[way]
    with around():
        results = tp.pmap(sums, axis_name="i", compile=compile)(x)
    want = rounded(x.double().sum().item(), dtype)
    for name, value in results.items():
        assert value.dtype == dtype, name
        assert value.tolist() == [want] * count, name


@pytest.mark.cpu_only("where there is a GPU, CPU devices are not in use")
def test_every_sum_over_gloo():
    x = torch.tensor([258.0, 1.0], dtype=torch.bfloat16)  # 259 is rounded to 260, not to 258
    with pool_with(2, shared_memory=False):
        for name, value in tp.pmap(sums, axis_name="i", compile=False)(x).items():
            assert value.tolist() == [260.0] * 2, name


# -- several axes, groups, other dtypes ------------------------------------------------------------


@pytest.mark.parametrize("dtype", BIG, ids=str)
def test_over_several_axes_is_rounded_once(dtype):
    x = rows(dtype, 2 * N).reshape(N, 2)

    def over_both(x):
        return tp.psum(x, ("i", "j")), tp.psum_scatter(x.expand(2 * N), ("i", "j"))

    total, part = tp.pmap(tp.vmap(over_both, axis_name="j"), axis_name="i", compile=EAGER)(x)
    want = rounded(BIG[dtype] + 7, dtype)  # rounded twice: + 6
    assert total.float().unique().tolist() == [want]
    assert part.float().unique().tolist() == [want]


def test_over_a_mesh_and_a_dim():
    x = rows(torch.bfloat16, 8).reshape(2, 2, 2)
    f = tp.pmap(tp.pmap(lambda x: tp.psum(x, ("j", 0, "i")), "j"), "i", compile=EAGER)
    want = rounded(BIG[x.dtype] + 7, x.dtype)  # 263 is between 262 and 264
    assert f(x).unique().tolist() == [want]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_in_groups(groups):
    x = rows(torch.bfloat16, sum(map(len, groups)))

    def f(x):
        def gathered(y):
            return (tp.all_gather(y, "i", axis_index_groups=groups) * x).sum()

        total = tp.psum(x, "i", axis_index_groups=groups)
        means = tp.pmean(x, "i", axis_index_groups=groups)
        if len(groups[0]) != len(groups[1]):  # all_gather needs groups of one size
            return means, total
        return means, total, tp.grad(gathered)(x)

    means, *totals = tp.pmap(f, axis_name="i", compile=EAGER)(x)
    for group in groups:
        exact = sum(x[k].item() for k in group)
        for k in group:
            assert means[k].item() == rounded(exact / len(group), x.dtype)
            for total in totals:
                assert total[k].item() == rounded(exact, x.dtype)


@pytest.mark.cpu_only("accelerators add in float16")
def test_sum_beyond_the_range_that_comes_back():
    x = torch.tensor([60000.0, 60000.0, -60000.0, -59968.0], dtype=torch.float16)
    high = torch.full((N,), 60000.0, dtype=torch.float16)
    f = tp.pmap(lambda x, y: (tp.psum(x, "i"), tp.pmean(y, "i")), "i", compile=EAGER)
    assert [y.tolist() for y in f(x, high)] == [[32.0] * N, [60000.0] * N]


def test_mean_of_numpy_halves():
    halves = np.array([2048, 1, 1, 1], np.float16)

    def f(x):
        return tp.psum(halves, ("i", 0)) + 0 * x, tp.pmean(halves, ("i", 0)) + 0 * x

    total, mean = tp.pmap(f, "i", compile=EAGER)(torch.zeros(2, dtype=torch.float16))
    assert total.tolist() == [4104.0] * 2  # 4102, of which 4 divides the nearest
    assert mean.tolist() == [513.0] * 2  # 512.75


# -- from outside ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_gradient_of_what_devices_share(dtype):
    x = rows(dtype)
    f = tp.pmap(lambda w, x: w * x, in_axes=(None, 0), compile=EAGER)
    w = torch.ones((), dtype=dtype, requires_grad=True)
    f(w, x).sum().backward()
    assert w.grad.item() == rounded(BIG[dtype] + 3, dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_reductions_of_what_is_cut(dtype):
    host = rows(dtype, 2 * N)
    x = tp.pmap(lambda row: row, compile=EAGER)(host)
    columns = tp.pmap(lambda row: row, compile=EAGER)(host[:, None].expand(-1, 2))
    exact = host.double()
    assert x.sum().item() == x.sum(0, dtype=dtype).item() == rounded(exact.sum().item(), dtype)
    assert x.mean().item() == rounded(exact.mean().item(), dtype)
    assert x.sum(dtype=torch.float64).item() == exact.sum().item()
    assert x.norm().item() == rounded(exact.norm().item(), dtype)
    product = columns.T @ torch.ones(2 * N, 1, dtype=dtype)
    assert product.flatten().tolist() == [rounded(exact.sum().item(), dtype)] * 2
