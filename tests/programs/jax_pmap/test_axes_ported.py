"""Covers: pmap together with vmap and pmap within pmap, as JAX tests them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from _ported import counting, on_host, pmap, same, sample

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


# vmap of pmap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", list(itertools.product([0, 1, 2], [0, 1])), ids=str)
@pytest.mark.parametrize("out_axes", list(itertools.product([0, 1], [0, 1])), ids=str)
def test_vmap_of_pmap(in_axes: Any, out_axes: Any) -> None:
    x = sample(4, 4, 4)

    def f(row: torch.Tensor) -> torch.Tensor:
        return row.cumsum(0)

    outer, inner = in_axes
    got = torch.func.vmap(pmap(f, in_axes=inner, out_axes=out_axes[1]), outer, out_axes[0])(x)
    expected = torch.func.vmap(torch.func.vmap(f, inner, out_axes[1]), outer, out_axes[0])(x)
    same(got, expected)


def test_vmap_of_pmap_with_several_arguments() -> None:
    """VmapOfPmapTest."""
    x, y, w = sample(2, 4, 3), sample(4, 2, 3, seed=1), sample(3, seed=2)

    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        return x * y + w, (x @ w) * y.sum()

    got = torch.func.vmap(pmap(f, in_axes=(0, 0, None), out_axes=(1, 0)), (0, 1, None))(x, y, w)
    inner = torch.func.vmap(f, (0, 0, None), (1, 0))
    expected = torch.func.vmap(inner, (0, 1, None))(x, y, w)
    for g, e in zip(got, expected, strict=True):
        same(g, e)


def test_vmap_of_pmap2() -> None:
    def f(key: torch.Tensor) -> torch.Tensor:
        return tp.random.normal(key, (2, 3))

    keys = tp.random.split(tp.random.key(0), (5, 4))
    expected = torch.stack([torch.stack([f(key) for key in row]) for row in keys])
    same(torch.func.vmap(pmap(f))(keys), expected)


def test_vmap_of_pmap3() -> None:
    x, scales = sample(4, 2), sample(5, seed=1)
    mapped = pmap(lambda x, scale: (x * scale).sin(), in_axes=(0, None))
    expected = torch.stack([mapped(x, scale).to_host() for scale in scales])
    same(torch.func.vmap(lambda s: mapped(x, s))(scales), expected)
    same(expected, (x * scales[:, None, None]).sin())


def test_vmap_of_pmap_non_leading_axis() -> None:
    x = sample(4, 5, 3)
    f = pmap(lambda x: 3 * x)
    same(torch.func.vmap(f, in_dims=2, out_dims=2)(x), 3 * x)


def test_vmap_of_pmap_tuple() -> None:
    f = pmap(lambda *xs: (xs[0] * 2, (xs[1] + 1, xs[2])))
    x, y, z = sample(4, 3, 5), sample(4, 5, seed=1), sample(4, seed=2)
    got = tp.vmap(f, in_axes=(2, 1, None), out_axes=(2, (1, 0)))(x, y, z)
    same(got[0], 2 * x)
    same(got[1][0], y + 1)
    same(got[1][1], z.expand(5, 4))


def test_vmap_of_pmap_tuple_unmapped() -> None:
    """testVmapOfPmapTuple with an output that no batched argument reaches."""
    x, z = sample(4, 5), sample(4, seed=2)
    f = tp.vmap(pmap(lambda x, z: (x * 2, z + 1)), in_axes=(1, None), out_axes=(1, None))
    same(f(x, z)[1], z + 1)


def test_axis_name_shadowing_with_vmap() -> None:
    g = tp.vmap(pmap(lambda x: tp.psum(x, "i"), "i"), axis_name="i")
    y = sample(2, 4)
    same(g(y), y.sum(1, keepdim=True).expand(2, 4))  # the inner one is meant


MAPPINGS = {
    "vmap of vmap": lambda f: tp.vmap(tp.vmap(f, axis_name="j"), axis_name="i"),
    "pmap of vmap": lambda f: pmap(tp.vmap(f, axis_name="j"), "i"),
    "vmap of pmap": lambda f: tp.vmap(pmap(f, "j"), axis_name="i"),
    "pmap of pmap": lambda f: pmap(pmap(f, "j"), "i"),
}
both_ways = pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)


@both_ways
@pytest.mark.parametrize("shape", [(4, 4), (4, 3), (8, 2)], ids=str)
@pytest.mark.parametrize(
    ("name", "reference"),
    [("psum", np.sum), ("pmean", np.mean), ("pmax", np.max), ("pmin", np.min)],
)
def test_collectives_with_vmap(name: str, reference: Any, shape: Any, mapping: Any) -> None:
    """Also testCollectivesWithVmap2."""
    x = sample(*shape, 2, dtype=torch.float64)
    collective = getattr(tp, name)

    def f(x: torch.Tensor) -> Any:
        return [x - collective(x, names) for names in (("i", "j"), ("j", "i"), "i", "j")]

    for result, dims in zip(mapping(f)(x), ((0, 1), (0, 1), 0, 1), strict=True):
        same(result, x.numpy() - reference(x.numpy(), axis=dims, keepdims=True))


@both_ways
def test_ppermute_with_vmap(mapping: Any) -> None:
    perm = [(0, 1), (1, 2), (2, 3), (3, 0)]
    x = sample(4, 4)
    got = mapping(lambda x: (tp.ppermute(x, "i", perm), tp.ppermute(x, "j", perm)))(x)
    same(got[0], x.roll(1, 0))
    same(got[1], x.roll(1, 1))


@pytest.mark.parametrize("perm", [[(0, 1), (1, 2), (2, 0), (3, 3)], [(3, 0), (1, 3)]], ids=str)
def test_ppermute_agrees_with_vmap(perm: Any) -> None:
    x = sample(4, 3)
    expected = np.zeros((4, 3), np.float32)
    for source, destination in perm:
        expected[destination] = x[source]
    same(pmap(lambda x: tp.ppermute(x, "i", perm), "i")(x), expected)
    same(tp.vmap(lambda x: tp.ppermute(x, "i", perm), axis_name="i")(x), expected)


@pytest.mark.parametrize("vmap_axis", [0, 1, 2])
@pytest.mark.parametrize(("split", "concat"), list(itertools.product([0, 1], [0, 1])))
def test_all_to_all_in_vmap(vmap_axis: int, split: int, concat: int) -> None:
    shape = [4, 4]
    shape.insert(vmap_axis, 5)
    x = sample(4, *shape)

    def f(x: torch.Tensor) -> torch.Tensor:
        return tp.vmap(lambda x: tp.all_to_all(x, "i", split, concat), vmap_axis, vmap_axis)(x)

    one = x.unbind(vmap_axis + 1)
    expected = [y.movedim((0, split + 1), (concat + 1, 0)) for y in one]
    same(pmap(f, "i")(x), torch.stack(expected, vmap_axis + 1))


@pytest.mark.parametrize(("split", "concat"), list(itertools.product(range(3), range(3))))
def test_all_to_all_vs_vmap(split: int, concat: int) -> None:
    shape = [4, 2, 2, 2]
    shape[split + 1] = 4
    x = sample(*shape)

    def f(x: torch.Tensor) -> torch.Tensor:
        return tp.all_to_all(x, "i", split, concat)

    expected = x.movedim((0, split + 1), (concat + 1, 0))
    same(pmap(f, "i")(x), expected)
    same(tp.vmap(f, axis_name="i")(x), expected)


def by_hand(name: str, x: torch.Tensor, tiled: bool) -> torch.Tensor:
    """all_gather or psum_scatter over dim 0 of ``x``."""
    if name == "all_gather":
        return (x.flatten(0, 1) if tiled else x).expand(x.shape[0], *(-1,) * (x.dim() - tiled))
    total = x.sum(0)
    return total.unflatten(0, (x.shape[0], -1)) if tiled else total


moves = pytest.mark.parametrize("name", ["all_gather", "psum_scatter"])


@moves
@pytest.mark.parametrize("tiled", [False, True], ids=["stacked", "tiled"])
def test_vs_vmap(name: str, tiled: bool) -> None:
    x = sample(4, 4, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return getattr(tp, name)(x, "i", tiled=tiled)

    same(pmap(f, "i")(x), by_hand(name, x, tiled))
    same(tp.vmap(f, axis_name="i")(x), by_hand(name, x, tiled))


@both_ways
@moves
@pytest.mark.parametrize("tiled", [False, True], ids=["stacked", "tiled"])
def test_with_vmap(name: str, tiled: bool, mapping: Any) -> None:
    x = sample(4, 4, 4)

    def f(x: torch.Tensor) -> Any:
        collective = getattr(tp, name)
        return collective(x, "i", tiled=tiled), collective(x, "j", tiled=tiled)

    over_i, over_j = mapping(f)(x)
    per_j = [by_hand(name, x[:, j], tiled) for j in range(4)]
    same(over_i, torch.stack(per_j, 1))
    same(over_j, torch.stack([by_hand(name, x[i], tiled) for i in range(4)]))


@moves
def test_vmap_of(name: str) -> None:
    x = sample(3, 4, 4, 2)
    f = pmap(lambda x: getattr(tp, name)(x, "i"), "i")
    same(torch.func.vmap(f)(x), torch.stack([by_hand(name, y, False) for y in x]))


def test_collective_broadcast_vmap() -> None:
    x = sample(4, 3, 2)
    f = pmap(tp.vmap(lambda x: tp.pbroadcast(x, "i", source=1)), "i")
    same(f(x), x[1].expand(4, 3, 2))


def test_pmap_map_vmap_combinations() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    def matrix(outer: Any, inner: Any) -> Any:
        return outer(inner(product, (0, None), 0), (None, 1), 1)

    def over_rows(f: Any, in_axes: Any, out_axes: int) -> Any:
        def mapped(*args: torch.Tensor) -> torch.Tensor:
            count = next(a.shape[k] for a, k in zip(args, in_axes, strict=True) if k is not None)
            rows = [
                f(*(a if k is None else a.select(k, j) for a, k in zip(args, in_axes, strict=True)))
                for j in range(count)
            ]
            return torch.stack([on_host(row) for row in rows], out_axes)

        return mapped

    def mapped(f: Any, in_axes: Any, out_axes: int) -> Any:
        return pmap(f, in_axes=in_axes, out_axes=out_axes)

    x, y = sample(4, 3), sample(3, 4, seed=1)
    kinds = (mapped, torch.func.vmap, over_rows)
    for outer, inner in itertools.product(kinds, kinds):
        if (outer, inner) != (torch.func.vmap, over_rows):
            same(matrix(outer, inner)(x, y), x @ y)


# pmap of pmap ------------------------------------------------------------------------------------

NESTS = {"pmap": pmap, "vmap": lambda f, name, **axes: tp.vmap(f, axis_name=name, **axes)}
nested = pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
SHAPES = [(4, 2), (2, 4), (8, 3), (1, 4)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@nested
@shapes
def test_nested_basic(nest: Any, shape: Any) -> None:
    x = sample(*shape, 2)
    f = pmap(nest(lambda x: tp.psum(tp.psum(x, "i"), "j"), "j"), "i")
    same(f(x), x.sum((0, 1)).expand(*shape, 2))


@nested
@shapes
def test_psum_multiple(nest: Any, shape: Any) -> None:
    x = sample(*shape, 2)
    f = pmap(nest(lambda x: x - tp.psum(x, ("i", "j")), "j"), "i")
    same(f(x), x - x.sum((0, 1)))


@nested
@shapes
def test_nested_sharding_and_stacking(nest: Any, shape: Any) -> None:
    x = counting(*shape, 3)
    same(pmap(nest(lambda x: x, "j"), "i")(x), x)


@nested
def test_partially_mapped_nested(nest: Any) -> None:
    x, y = sample(2, 4), sample(3, seed=1)
    inner = nest(lambda x, y: (x - tp.psum(y, "j"), y), "j", in_axes=(0, None))
    difference, copies = pmap(inner, "i", in_axes=(0, None))(x, y)
    same(difference, x[:, :, None] - 4 * y)
    same(copies, y.expand(2, 4, 3))


@nested
def test_nested_with_closure(nest: Any) -> None:
    x = sample(2, 4, 3)

    def nesting(outer: Any, inner: Any) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x.sin().sum()

            def g(row: torch.Tensor) -> torch.Tensor:
                z = row * y

                return inner(lambda cell: cell.cos() * y + z.sum().sin())(row) + z.cos()

            return outer(g)(x).sum()

        return function

    ours = nesting(lambda f: pmap(f, "i"), lambda f: nest(f, "j"))
    reference = nesting(torch.func.vmap, torch.func.vmap)
    same(ours(x), reference(x))
    same(torch.func.grad(ours)(x), torch.func.grad(reference)(x))


@nested
def test_nested_pmap_replica_groups(nest: Any) -> None:
    x = sample(4, 4)
    groups = [[0, 2], [1, 3]]

    def over(name: str) -> Any:
        return pmap(nest(lambda x: tp.psum(x, name, axis_index_groups=groups), "j"), "i")

    halves = x[[0, 1]] + x[[2, 3]]
    same(over("i")(x), halves.repeat(2, 1))
    same(over("j")(x), (x[:, [0, 1]] + x[:, [2, 3]]).repeat(1, 2))

    def imperfectly_nested(x: torch.Tensor) -> torch.Tensor:
        y = nest(lambda x: tp.psum(x, "j", axis_index_groups=groups), "j")(x)
        return tp.psum(y, "i", axis_index_groups=groups) * 2

    expected = 2 * (halves[:, [0, 1]] + halves[:, [2, 3]]).repeat(2, 2)
    same(pmap(imperfectly_nested, "i")(x), expected)


@nested
@shapes
def test_axis_index_nested_pmap(nest: Any, shape: Any) -> None:
    """Also testAxisIndexNd, testCollectiveConstantNested."""
    rows, columns = shape
    x = torch.zeros(shape)

    def f(x: torch.Tensor) -> Any:
        indices = [tp.axis_index(n) for n in ("i", "j", ("i", "j"), ("j", "i"))]
        sizes = [tp.axis_size(n) for n in ("i", "j", ("i", "j"))]
        return [torch.as_tensor(index).long() for index in indices], sizes

    indices, sizes = pmap(nest(f, "j"), "i")(x)
    i, j = np.indices(shape)
    for got, expected in zip(indices, (i, j, i * columns + j, j * rows + i), strict=True):
        same(got, expected)
    for size, expected in zip(sizes, (rows, columns, rows * columns), strict=True):
        same(size, np.full(shape, expected))


@nested
def test_nested_pmap_constant(nest: Any) -> None:
    f = pmap(nest(lambda x: 3, "j"), "i")
    same(f(torch.zeros(2, 4, 3)), np.full((2, 4), 3))


@nested
def test_nested_pmap_axis_swap(nest: Any) -> None:
    x = counting(2, 3, 4, 5)
    f = pmap(nest(lambda x: x + 0, "j", in_axes=1, out_axes=0), "i", in_axes=2, out_axes=1)
    # the outer takes dim 2, the inner the then dim 1: what is left is (2, 5)
    same(f(x), x.permute(1, 2, 0, 3))


@nested
@pytest.mark.parametrize("names", [("i", "j"), ("j", "i"), "i", "j"], ids=str)
def test_all_to_all_split_axis(nest: Any, names: Any) -> None:
    """Also testAllToAllMultipleAxesVsVmap."""
    order = (names,) if isinstance(names, str) else names
    sizes = {"i": 4, "j": 2}
    size = int(np.prod([sizes[name] for name in order]))
    x = sample(4, 2, size, 3)
    got = pmap(nest(lambda x: tp.all_to_all(x, names, 0, 0), "j"), "i")(x)
    rows = x if order != ("j", "i") else x.transpose(0, 1)
    if len(order) == 2:
        expected = rows.flatten(0, 1).transpose(0, 1).unflatten(0, rows.shape[:2])
        expected = expected.transpose(0, 1) if order == ("j", "i") else expected
    else:
        expected = x.transpose("ij".index(names), 2)
    same(got, expected)


@nested
def test_axis_groups(nest: Any) -> None:
    """Of a mesh of 4 by 2, devices along i are strided and along j contiguous."""

    def f(x: torch.Tensor) -> Any:
        flat = tp.axis_index(("i", "j"))
        return tp.all_gather(flat, "i"), tp.all_gather(flat, "j")

    along_i, along_j = pmap(nest(f, "j"), "i")(torch.zeros(4, 2))
    assert sorted(set(map(tuple, np.asarray(along_i).reshape(-1, 4).tolist()))) == [
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    ]
    assert np.asarray(along_j)[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
