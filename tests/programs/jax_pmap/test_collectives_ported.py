"""Covers: the collectives' values inside pmap, as JAX tests them."""

from typing import Any

import numpy as np
import pytest
import torch
from _ported import counting, pmap, rows, same, sample, strided

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

n = rows(4, 8, 3)  # on four devices: one each, two each, one device idle
even = rows(4, 8)


@pytest.mark.parametrize(
    ("collective", "whole"),
    [(tp.psum, torch.sum), (tp.pmean, torch.mean), (tp.pmax, torch.amax), (tp.pmin, torch.amin)],
    ids=["psum", "pmean", "pmax", "pmin"],
)
def test_reductions(n: int, collective: Any, whole: Any) -> None:
    """testBasic, testMean, testReduceMax, testReduceMin."""
    x = sample(n, 4)
    same(pmap(lambda x: x - collective(x, "i"), "i")(x), x - whole(x, 0))


def test_basic_in_python() -> None:
    """testBasic without a graph."""
    x = sample(4, 4)
    same(pmap(lambda x: x - tp.psum(x, "i"), "i", compile=False)(x), x - x.sum(0))


def test_complex_psum(n: int) -> None:
    x = torch.complex(sample(n, 4), sample(n, 4, seed=1))
    same(pmap(lambda x: x - tp.psum(x, "i"), "i")(x), x - x.sum(0))


# all_gather --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((4,), {}, lambda x, n: x.expand(n, n, 4)),
        ((3,), {"axis": -1}, lambda x, n: x.T.expand(n, 3, n)),
        ((4,), {"tiled": True}, lambda x, n: x.reshape(-1).expand(n, n * 4)),
        (
            (4, 3),
            {"tiled": True, "axis": -1},
            lambda x, n: torch.cat(tuple(x), -1).expand(n, 4, -1),
        ),
    ],
    ids=["stacked", "negative_axis", "tiled", "tiled_negative_axis"],
)
def test_gather(n: int, shape: Any, options: Any, expected: Any) -> None:
    """testGather, testGatherBool, testGatherNegativeAxis, testGatherTiled, and both of these."""
    x = sample(n, *shape)
    for y in (x, x > 0):
        same(pmap(lambda y: tp.all_gather(y, "i", **options), "i")(y), expected(y, n))


# psum_scatter ------------------------------------------------------------------------------------


def test_reduce_scatter(n: int) -> None:
    x = sample(n, n, 2)
    got = pmap(lambda x: tp.psum_scatter(x, "i"), "i")(x)
    same(got, x.sum(0))


def test_reduce_scatter_tiled(n: int) -> None:
    x = sample(n, 2 * n, 3)
    got = pmap(lambda x: tp.psum_scatter(x, "i", tiled=True), "i")(x)
    same(got, x.sum(0).reshape(n, 2, 3))


@pytest.mark.parametrize("tiled", [False, True])
def test_reduce_scatter_negative_scatter_dimension(n: int, tiled: bool) -> None:
    x = sample(n, 3, n)
    f = pmap(lambda x: tp.psum_scatter(x, "i", scatter_dimension=-1, tiled=tiled), "i")
    expected = x.sum(0).T
    same(f(x), expected[:, :, None] if tiled else expected)


# Trees and dtypes --------------------------------------------------------------------------------

TREE_CASES = [
    ("pmax", lambda x: tp.pmax(x, "i"), lambda x: x.max(0, keepdims=True) + 0 * x),
    ("pmin", lambda x: tp.pmin(x, "i"), lambda x: x.min(0, keepdims=True) + 0 * x),
    ("psum", lambda x: tp.psum(x, "i"), lambda x: x.sum(0, keepdims=True) + 0 * x),
    ("pmean", lambda x: tp.pmean(x, "i"), lambda x: x.mean(0, keepdims=True) + 0 * x),
    ("all_to_all", lambda x: tp.all_to_all(x, "i", 0, 0), lambda x: x.swapaxes(0, 1)),
    (
        "ppermute",
        lambda x: tp.ppermute(x, "i", [(k, (k + 1) % 4) for k in range(4)]),
        lambda x: np.roll(x, 1, 0),
    ),
]


@pytest.mark.parametrize(("name", "f", "reference"), TREE_CASES, ids=[c[0] for c in TREE_CASES])
def test_trees(name: str, f: Any, reference: Any) -> None:
    tree = {"a": sample(4, 4, 2, seed=1), "b": [sample(4, 4, seed=2), {"c": sample(4, 4, 3, 2)}]}
    got = pmap(f, "i")(tree)
    same(got["a"], reference(tree["a"].numpy()))
    same(got["b"][0], reference(tree["b"][0].numpy()))
    same(got["b"][1]["c"], reference(tree["b"][1]["c"].numpy()))


def test_collectives_with_trees_of_different_dtypes(n: int) -> None:
    tree = {
        "float": sample(n, 2),
        "double": sample(n, 3, dtype=torch.float64),
        "int": counting(n, 2, dtype=torch.int32),
        "int8": counting(n, dtype=torch.int8),
    }
    for f, reference in ((tp.psum, np.sum), (tp.pmax, np.max), (tp.pmin, np.min)):
        got = pmap(lambda x, f=f: f(x, "i"), "i")(tree)
        for name, x in tree.items():
            expected = reference(x.numpy(), axis=0, keepdims=True) + 0 * x.numpy()
            same(got[name], expected.astype(x.numpy().dtype))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float64, torch.complex64),
        *(torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool),
    ],
    ids=str,
)
@pytest.mark.parametrize("concat_axis", [0, 1])
@pytest.mark.parametrize("split_axis", [0, 1])
def test_all_to_all(split_axis: int, concat_axis: int, dtype: torch.dtype) -> None:
    x = (counting(4, 4, 4, dtype=torch.int64) % 7 - 3 * (dtype.is_signed)).to(dtype)
    f = pmap(lambda x: tp.all_to_all(x, "i", split_axis, concat_axis), "i")
    same(f(x), x.movedim((0, split_axis + 1), (concat_axis + 1, 0)))


@pytest.mark.parametrize("concat_axis", [-1, -2])
@pytest.mark.parametrize("split_axis", [-1, -2])
def test_all_to_all_negative_axes(n: int, split_axis: int, concat_axis: int) -> None:
    x = sample(n, n, n)
    f = pmap(lambda x: tp.all_to_all(x, "i", split_axis, concat_axis), "i")
    same(f(x), x.movedim((0, split_axis), (concat_axis, 0)))


def test_psum_on_boolean_dtype() -> None:
    x = torch.tensor([True, False, True, True])
    total, mean = pmap(lambda x: (tp.psum(x, "i"), tp.pmean(x, "i")), "i")(x)
    same(total, torch.full((4,), 3, dtype=torch.int32))
    same(mean, torch.full((4,), 0.75))


def test_pmap_dtype() -> None:
    for kind in (np.float32, np.int32):
        out = pmap(lambda _, kind=kind: tp.psum(kind(0), "i"), "i")(torch.ones(4))
        same(out, np.zeros(4, dtype=kind))


def test_arg_all_reduce(n: int) -> None:
    x = sample(n, seed=5)

    def arg(reduce: Any, x: torch.Tensor) -> torch.Tensor:
        found = torch.where(x == reduce(x, "i"), tp.axis_index("i"), tp.axis_size("i"))
        return tp.pmin(found, "i")

    f = pmap(lambda x: (arg(tp.pmax, x), arg(tp.pmin, x)), "i", out_axes=None)
    for y in (x, x[0].expand(n).contiguous()):  # among ties the first
        largest, smallest = f(y)
        assert int(largest) == np.argmax(y.numpy())
        assert int(smallest) == np.argmin(y.numpy())


# Constants and indices ---------------------------------------------------------------------------


def test_collective_constant(n: int) -> None:
    sizes = []

    def f(x: torch.Tensor) -> torch.Tensor:
        size = tp.axis_size("i")
        sizes.append(size)
        return x * tp.psum(1, "i") + size

    same(pmap(f, "i")(torch.arange(n)), torch.arange(n) * n + n)
    assert all(type(size) is int and size == n for size in sizes)


def test_axis_index(n: int) -> None:
    f = pmap(lambda x: x + tp.axis_index("i"), "i")
    same(f(torch.ones(n, dtype=torch.int64)), torch.arange(1, n + 1))


# pbroadcast and ppermute -------------------------------------------------------------------------


def test_collective_broadcast(n: int) -> None:
    x = counting(n, 1)
    same(pmap(lambda x: tp.pbroadcast(x, "i", source=0), "i")(x), torch.zeros(n, 1))
    last = pmap(lambda x: tp.pbroadcast(x, "i", source=n - 1), "i")(x)
    same(last, x[-1].expand(n, 1))


def test_collective_permute(n: int) -> None:
    x = counting(n, 1)
    rotation = [(k, (k + 1) % n) for k in range(n)]
    same(pmap(lambda x: tp.ppermute(x, "i", rotation), "i")(x), x.roll(1, 0))


def test_collective_permute_to_some() -> None:
    """testCollectivePermute, with devices that nothing is sent to."""
    x = counting(4, 2) + 1
    f = pmap(lambda x: tp.ppermute(x, "i", [(0, 2), (3, 0)]), "i")
    same(f(x), torch.stack([x[3], 0 * x[0], x[0], 0 * x[0]]))


def test_collective_permute_cyclic_with_p_shuffle(n: int) -> None:
    values = torch.arange(n).repeat_interleave(2).reshape(n, 2)
    perm = [(k - 1) % n for k in range(n)]
    same(pmap(lambda x: tp.pshuffle(x, "i", perm), "i")(values), values.roll(1, 0))


def test_p_shuffle_with_bad_perm() -> None:
    with pytest.raises(
        ValueError, match=r"`perm` does not represent a permutation: \[1, 1, 2, 3\]"
    ):
        pmap(lambda x: tp.pshuffle(x, "i", [1, 1, 2, 3]), "i")(torch.arange(4))


def test_ppermute_with_zip_object() -> None:
    x = {"a": counting(4, 2), "b": counting(4, 3), "c": counting(4)}
    f = pmap(lambda x: tp.ppermute(x, "i", zip(range(4), [1, 2, 3, 0], strict=True)), "i")
    for name, got in f(x).items():
        same(got, x[name].roll(1, 0))


PICTURE = """
                   #
                  ###
                 ##  #
                ## ####
               ##  #   #
              ## #### ###
             ##  #    #  #
            ## ####  ######
           ##  #   ###     #
          ## #### ##  #   ###
         ##  #    # #### ##  #
"""


@pytest.mark.parametrize("num_rows", [8, 4])
def test_rule30(num_rows: int) -> None:
    def next_generation(board: torch.Tensor) -> torch.Tensor:
        size = tp.axis_size("i")
        to_right = [(k, k + 1) for k in range(size - 1)]  # beyond the ends there are zeros
        to_left = [(k + 1, k) for k in range(size - 1)]
        before = tp.ppermute(board[-1:], "i", to_right)
        after = tp.ppermute(board[:1], "i", to_left)
        cells = torch.cat([before, board, after])
        return cells[:-2] ^ (cells[1:-1] | cells[2:])

    step = pmap(next_generation, "i")
    board: Any = torch.zeros(40, dtype=torch.bool)
    board[19] = True
    board = board.reshape(num_rows, -1)
    lines = []
    for _ in range(11):
        lines.append("".join("#" if cell else " " for cell in np.asarray(board).ravel()).rstrip())
        board = step(board)
    assert "\n".join(lines) == PICTURE.strip("\n")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pswapaxes(n: int, dim: int) -> None:
    shape = [n, 2, 3, 5]
    shape[dim + 1] = n
    x = sample(*shape)
    same(pmap(lambda x: tp.pswapaxes(x, "i", dim), "i")(x), x.transpose(0, dim + 1))


# Groups ------------------------------------------------------------------------------------------


def halves(n: int) -> list[list[int]]:
    return [list(range(n))[: n // 2], list(range(n))[n // 2 :]]


@pytest.mark.parametrize("groups", [halves, strided])
def test_psum_replica_groups(even: int, groups: Any) -> None:
    x = sample(even, 4)
    got = pmap(lambda x: x - tp.psum(x, "i", axis_index_groups=groups(even)), "i")(x)
    expected = x.clone()
    for group in groups(even):
        expected[group] -= x[group].sum(0)
    same(got, expected)


def test_psum_uneven_replica_groups(even: int) -> None:
    x = sample(even, 4)
    groups = [[0], list(range(1, even))]
    got = pmap(lambda x: x - tp.psum(x, "i", axis_index_groups=groups), "i")(x)
    expected = torch.cat([torch.zeros(1, 4), x[1:] - x[1:].sum(0)])
    same(got, expected)


def test_psum_constant_replica_groups(even: int) -> None:
    x = sample(even, 4)
    same(pmap(lambda x: x - tp.psum(2.0, "i", axis_index_groups=strided(even)), "i")(x), x - even)


def test_psum_constant_uneven_replica_groups() -> None:
    """testPsumConstantReplicaGroups with groups of several sizes."""
    f = pmap(lambda x: x + tp.psum(1, "i", axis_index_groups=[[2], [0, 1, 3]]), "i")
    same(f(torch.zeros(4)), torch.tensor([3.0, 3, 1, 3]))


@pytest.mark.parametrize("interleaved", [False, True], ids=["in order", "reversed"])
def test_gather_replica_groups(even: int, interleaved: bool) -> None:
    """Also testGatherReplicaGroupsInterleaved."""
    x, groups = sample(even, 4), strided(even)
    groups = [group[::-1] for group in groups][::-1] if interleaved else groups
    got = pmap(lambda x: tp.all_gather(x, "i", axis_index_groups=groups), "i")(x)
    assert got.shape == (even, even // 2, 4)
    for group in groups:
        for k in group:
            same(got[k], x[group])


def test_reduce_scatter_replica_groups_tiled(even: int) -> None:
    x = sample(even, even, 3)
    f = pmap(lambda x: tp.psum_scatter(x, "i", axis_index_groups=strided(even), tiled=True), "i")
    got = f(x)
    assert got.shape == (even, 2, 3)
    for group in strided(even):
        total = x[group].sum(0)
        for place, k in enumerate(group):
            same(got[k], total[2 * place : 2 * place + 2])


@pytest.mark.parametrize("concat_axis", [0, 1])
@pytest.mark.parametrize("split_axis", [0, 1])
def test_all_to_all_replica_groups(even: int, split_axis: int, concat_axis: int) -> None:
    half = even // 2
    x = sample(even, half, half, 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        return tp.all_to_all(x, "i", split_axis, concat_axis, axis_index_groups=strided(even))

    got = pmap(f, "i")(x)
    for group in strided(even):
        expected = x[group].movedim((0, split_axis + 1), (concat_axis + 1, 0))
        same(got[group], expected)


def test_statistics_of_batches() -> None:
    """testPsumReplicaGroups and testMean together, as batch normalisation uses them."""
    x = sample(8, 5, dtype=torch.float64)
    pairs = [[k, k + 1] for k in range(0, 8, 2)]

    def f(x: torch.Tensor) -> torch.Tensor:
        mean = tp.pmean(x, "i", axis_index_groups=pairs)
        variance = tp.pmean((x - mean) ** 2, "i", axis_index_groups=pairs)
        return (x - mean) / variance.sqrt()

    by_pair = x.reshape(4, 2, 5)
    expected = (by_pair - by_pair.mean(1, keepdim=True)) / by_pair.std(1, False, keepdim=True)
    same(pmap(f, "i")(x), expected.reshape(8, 5))
