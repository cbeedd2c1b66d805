"""Covers: _layout/layout.py, _layout/common_grid.py."""

import gc
import itertools

import pytest
import torch

from torchpmap._base.devices import Device
from torchpmap._layout.common_grid import common_grid, trimmed
from torchpmap._layout.layout import _interned, general_layout, replicated_layout, row_layout
from torchpmap._layout.mesh import NamedSharding, P, mesh_of
from torchpmap._runtime.meshes import make_mesh

CPUS = tuple(Device(i, "cpu") for i in range(4))
F32 = torch.float32


def sharding(shape, names, *entries):
    return NamedSharding(make_mesh(shape, names, devices=CPUS), P(*entries))


def test_rows():
    layout = row_layout([3, 4], F32, CPUS, 1, "i")
    assert (layout.shape, layout.block_shape, layout.dim) == ((3, 4), (3, 1), 1)
    assert layout.ranks == (0, 1, 2, 3)
    assert [index[1] for index in layout.slices] == [slice(k, k + 1) for k in range(4)]
    assert not layout.is_replicated
    assert layout.sharding.spec == P(None, "i")
    assert row_layout((4,), F32, CPUS, 0, None).sharding.spec == P("devices")


def test_replicated():
    layout = replicated_layout((3, 4), F32, CPUS[1:])
    assert (layout.block_shape, layout.dim, layout.is_replicated) == ((3, 4), None, True)
    assert layout.slices == ((slice(None), slice(None)),) * 3
    assert layout.ranks == (1, 2, 3)


def test_interned_while_they_are_in_use():
    assert row_layout((4, 2), F32, CPUS, 0, "i") is row_layout([4, 2], F32, CPUS, 0, "i")
    kinds = [
        row_layout((4, 4), F32, CPUS, 0, "i"),
        row_layout((4, 4), F32, CPUS, 1, "i"),
        row_layout((4, 4), F32, CPUS, 0, "j"),
        row_layout((4, 4), torch.float64, CPUS, 0, "i"),
        row_layout((4, 4), F32, CPUS[::-1], 0, "i"),
        replicated_layout((4, 4), F32, CPUS),
        general_layout((4, 4), F32, sharding((2, 2), ("x", "y"), "x", "y")),
    ]
    assert len({id(kind) for kind in kinds}) == len(kinds)
    del kinds
    gc.collect()
    before = len(_interned)
    layout = row_layout((4, 77), F32, CPUS, 0, "only here")
    assert len(_interned) == before + 1
    del layout
    assert len(_interned) == before


PLACES = {
    "rows": [
        lambda: row_layout((4, 4), F32, CPUS, 0, "i"),
        lambda: row_layout((4, 4), F32, CPUS, 0, "j"),
        lambda: general_layout((4, 4), F32, sharding((4,), ("x",), "x")),
        lambda: general_layout((4, 4), F32, sharding((2, 2), ("x", "y"), ("x", "y"))),
    ],
    "columns": [
        lambda: row_layout((4, 4), F32, CPUS, 1, "i"),
        lambda: general_layout((4, 4), F32, sharding((4,), ("x",), None, "x")),
    ],
    "reversed": [lambda: row_layout((4, 4), F32, CPUS[::-1], 0, "i")],
    "replicated": [
        lambda: replicated_layout((4, 4), F32, CPUS),
        lambda: general_layout((4, 4), F32, sharding((4,), ("x",))),
        lambda: general_layout((4, 4), F32, sharding((2, 2), ("x", "y"))),
    ],
    "two": [lambda: row_layout((2, 4), F32, CPUS[:2], 0, "i")],
    "halves": [lambda: general_layout((4, 4), F32, sharding((2,), ("x",), "x"))],
    "quarters": [
        lambda: general_layout((4, 4), F32, sharding((2, 2), ("x", "y"), "x", "y")),
        lambda: general_layout((4, 4), F32, sharding((2, 2), ("a", "b"), "a", "b")),
    ],
    "other quarters": [lambda: general_layout((4, 4), F32, sharding((2, 2), ("x", "y"), "y", "x"))],
    "half and copy": [lambda: general_layout((4, 4), F32, sharding((2, 2), ("x", "y"), "x"))],
    "swapped rows": [lambda: general_layout((4, 4), F32, sharding((2, 2), ("x", "y"), ("y", "x")))],
    "other dtype": [lambda: row_layout((4, 4), torch.float64, CPUS, 0, "i")],
    "on one device": [  # all layouts of a shape are one place
        lambda: row_layout((1, 3), F32, CPUS[2:3], 0, "i"),
        lambda: replicated_layout((1, 3), F32, CPUS[2:3]),
    ],
    "on another device": [lambda: row_layout((1, 3), F32, CPUS[:1], 0, "i")],
}


@pytest.mark.parametrize(("a", "b"), list(itertools.product(PLACES, repeat=2)))
def test_same_place(a, b):
    for one, other in itertools.product(PLACES[a], PLACES[b]):
        assert one().same_place(other()) == (a == b)


def test_general_layouts_know_when_they_are_rows():
    assert general_layout((4, 2), F32, sharding((4,), ("x",), "x")).dim == 0
    assert general_layout((8, 2), F32, sharding((4,), ("x",), "x")).dim == 0
    assert general_layout((2, 4), F32, sharding((4,), ("x",), None, "x")).dim == 1
    assert general_layout((2, 2), F32, sharding((2, 2), ("x", "y"), "x")).dim is None
    with pytest.raises(ValueError, match="partitioned 4 times"):
        general_layout((6, 2), F32, sharding((4,), ("x",), "x"))


# common grids ------------------------------------------------------------------------------------

TWELVE = tuple(Device(i, "cpu") for i in range(12))
SHAPE = (24, 24)


def layout(sizes, *entries):
    mesh = mesh_of(sizes, tuple("abc"[: len(sizes)]), TWELVE)
    return general_layout(SHAPE, F32, NamedSharding(mesh, P(*entries)), stacked=True)


ROWS = row_layout(SHAPE, F32, TWELVE, 0, "i")
WHOLE = replicated_layout(SHAPE, F32, TWELVE)


@pytest.mark.parametrize(
    ("layouts", "sizes", "cuts"),
    [
        ([ROWS], (12,), [((0,),)]),
        ([WHOLE, ROWS], (12,), [(), ((0,),)]),
        ([WHOLE], (12,), [()]),
        ([layout((3, 4), "b", "a")], (3, 4), [((1,), (0,))]),
        ([layout((3, 4), ("b", "a"))], (3, 4), [((1, 0),)]),
        ([layout((3, 4), None, "a"), ROWS], (3, 4), [((), (0,)), ((0, 1),)]),
        ([layout((6, 2), "a"), layout((3, 4), "b")], (3, 2, 2), [((0, 1),), ((1, 2),)]),
        ([layout((12, 1), "b", "a")], (12, 1), [((1,), (0,))]),
        ([layout((12, 1), "b", "a"), ROWS], (12,), [((), (0,)), ((0,),)]),
    ],
)
def test_cuts(layouts, sizes, cuts):
    grid = common_grid(layouts)
    assert grid is not None
    assert grid.sizes == sizes
    assert [grid.cut_of(each) for each in layouts] == cuts
    for each, cut in zip(layouts, cuts, strict=True):
        assert grid.layout(SHAPE, F32, cut).same_place(each)


def test_meshes_and_cuts_that_do_not_fit():
    assert common_grid([layout((3, 4), "a"), layout((4, 3), "a")]) is None
    grid = common_grid([layout((6, 2), "a"), layout((3, 4), "b")])
    assert grid is not None
    own = grid.layout(SHAPE, F32, ((1,),))
    assert own.sharding.mesh not in grid.meshes
    assert (own.block_shape, grid.cut_of(own)) == ((12, 24), ((1,),))
    assert grid.layout(SHAPE, F32, ((2,), (0, 1))).sharding.spec == P("b", "a")


def test_lines():
    grid = common_grid([layout((6, 2), "a")])
    assert grid is not None
    assert grid.lines((1,)) == tuple((k, k + 1) for k in range(0, 12, 2))
    assert grid.lines((0, 1)) == (tuple(range(12)),)
    assert grid.parts((0, 1)) == 12


def test_blocks_without_elements_that_are_cut_otherwise_are_other_blocks():
    both, columns = (
        general_layout((8, 0), F32, sharding((2, 2), ("x", "y"), *entries))
        for entries in (("x", "y"), (None, "y"))
    )
    assert (both.block_shape, columns.block_shape) == ((4, 0), (8, 0))
    assert not both.same_place(columns)
    assert columns.same_place(row_layout((8, 0), F32, CPUS, 1, "i"))


def test_a_cut_has_no_empty_end():
    assert trimmed([(0,), (), (1,), (), ()]) == ((0,), (), (1,))
    assert trimmed([(), ()]) == ()
