"""Covers: _layout/common_grid.py."""

import pytest
import torch

from torchpmap._base.devices import Device
from torchpmap._layout.common_grid import common_grid, trimmed
from torchpmap._layout.layout import general_layout, replicated_layout, row_layout
from torchpmap._layout.mesh import NamedSharding, P, mesh_of

CPUS = tuple(Device(i, "cpu") for i in range(12))
SHAPE = (24, 24)


def layout(sizes, *entries):
    mesh = mesh_of(sizes, tuple("abc"[: len(sizes)]), CPUS)
    return general_layout(SHAPE, torch.float32, NamedSharding(mesh, P(*entries)), stacked=True)


ROWS = row_layout(SHAPE, torch.float32, CPUS, 0, "i")
WHOLE = replicated_layout(SHAPE, torch.float32, CPUS)


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
        again = grid.layout(SHAPE, torch.float32, cut)
        assert again is not None
        assert again.same_place(each)


def test_meshes_that_do_not_fit():
    assert common_grid([layout((3, 4), "a"), layout((4, 3), "a")]) is None


def test_a_cut_that_no_mesh_has():
    grid = common_grid([layout((6, 2), "a"), layout((3, 4), "b")])
    assert grid is not None
    assert grid.layout(SHAPE, torch.float32, ((1,),)) is None
    found = grid.layout(SHAPE, torch.float32, ((2,), (0, 1)))
    assert found is not None
    assert found.sharding.spec == P("b", "a")


def test_lines():
    grid = common_grid([layout((6, 2), "a")])
    assert grid is not None
    assert grid.lines((1,)) == tuple((k, k + 1) for k in range(0, 12, 2))
    assert grid.lines((0, 1)) == (tuple(range(12)),)
    assert grid.parts((0, 1)) == 12


def test_a_cut_has_no_empty_end():
    assert trimmed([(0,), (), (1,), (), ()]) == ((0,), (), (1,))
    assert trimmed([(), ()]) == ()
