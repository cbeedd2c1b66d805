"""Covers: _layout/grid.py, _transforms/row_preparation.py, and the meshes of
_layout/axis_stack.py: a pmap of a pmap shares the devices, in collectives too.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from _axis_models import (
    EVEN,
    LINEAR,
    UNEVEN,
    N,
    everyone,
    extreme_shares,
    grouped,
    sample,
    transposed,
)
from _nested import NAMES, mesh_of, nested, same
from _support import EAGER, TRACED, mostly_long

import torchpmap as tp
from torchpmap._transforms.row_preparation import counts_of_list, device_counts

pytestmark = pytest.mark.usefixtures("eight_devices")

# --- which devices --------------------------------------------------------------------------------


COUNTS = {
    (4, 4): (4, 2),  # not (2, 4): the outer axis first
    (6, 4): (2, 4),  # not (3, 2) or (6, 1): more devices first
    (11, 7): (1, 7),
    (11, 13): (1, 1),
    (2, 2, 4): (2, 2, 2),
    (12,): (6,),
}


@pytest.mark.parametrize("sizes", COUNTS, ids=str)
def test_device_counts(sizes):
    assert device_counts(sizes, 8) == COUNTS[sizes]


def test_counts_of_a_list():
    assert counts_of_list((2, 3, 2), 6) == (2, 3, 1)
    assert counts_of_list((1, 3), 1) == (1, 1)
    assert [counts_of_list((2, 3), n) for n in (1, 3, 4, 5, 12)] == [None] * 5


def test_rows_and_columns_have_a_device_each(mode):
    x = torch.arange(24.0).reshape(2, 4, 3)
    y = nested(lambda x: x * 2, compile=mode)(x)
    mesh = tp.make_mesh((2, 4), NAMES, devices=tp.devices())
    assert y.sharding == tp.NamedSharding(mesh, tp.P("rows", "cols"))
    assert y.devices() == set(tp.devices())
    for place, shard in enumerate(y.addressable_shards):
        row, column = divmod(place, 4)
        assert shard.device == tp.devices()[place]
        assert torch.equal(shard.data, 2 * x[row : row + 1, column : column + 1])


@pytest.mark.parametrize("backend", TRACED)
def test_processes(backend):
    ids = nested(lambda x: torch.tensor(os.getpid()), compile=False)(torch.zeros(2, 4))
    assert len(set(ids.flatten().tolist())) == 8
    total = nested(lambda x: tp.psum(x.sin(), NAMES), compile=backend)(torch.ones(2, 4).double())
    same(total, 8 * torch.ones(2, 4).double().sin())


@pytest.mark.parametrize(
    ("inner_axes", "outer_axes", "spec", "shape"),
    [
        ((0, 0), (0, 0), ("rows", "cols"), (2, 4, 5)),
        ((1, 1), (0, 0), ("rows", None, "cols"), (2, 5, 4)),
        ((-1, -1), (1, 1), (None, "rows", "cols"), (5, 2, 4)),
        ((0, -1), (-1, 1), (None, "rows", "cols"), (5, 2, 4)),
        ((0, 0), (2, -1), ("cols", None, "rows"), (4, 5, 2)),
        ((1, 0), (1, 1), ("cols", "rows"), (4, 2, 5)),
    ],
    ids=str,
)
def test_axes_in_front_and_behind(inner_axes, outer_axes, spec, shape, mode):
    x = sample(2, 4, 5)
    inner = dict(zip(("in_axes", "out_axes"), inner_axes, strict=True))
    outer = dict(zip(("in_axes", "out_axes"), outer_axes, strict=True))

    def placed(x, cols, rows):
        """[2, 4, 5] with the mapped dims where they belong."""
        columns = x.movedim(1, cols + 1 if cols >= 0 else cols)  # behind the rows
        return columns.movedim(0, rows)

    given = placed(x, inner_axes[0], outer_axes[0])
    got = nested(lambda x: x + 100 * tp.axis_index("rows"), inner, compile=mode, **outer)(given)
    wanted = placed(x + 100 * torch.arange(2.0)[:, None, None], inner_axes[1], outer_axes[1])
    assert tuple(got.shape) == shape
    assert got.sharding.spec == tp.P(*spec)
    same(got, wanted)


def test_shared_arguments_and_results(mode):
    x, w, v = sample(2, 4), sample(4, seed=1), sample(3, seed=2)

    def f(x, w, v):
        return x * w, tp.psum(x, NAMES), tp.psum(x, "rows"), tp.psum(x * v, "cols")

    inner = {"in_axes": (0, 0, None), "out_axes": (0, None, 0, None)}
    outer = {"in_axes": (0, None, None), "out_axes": (0, None, None, 0)}
    product, total, columns, rows = nested(f, inner, compile=mode, **outer)(x, w, v)
    same(product, x * w)
    same(total, x.sum())
    same(columns, x.sum(0))
    same(rows, x.sum(1)[:, None] * v)
    assert total.is_fully_replicated
    assert columns.sharding.spec == tp.P("cols")
    assert rows.sharding.spec == tp.P("rows")
    assert len(columns.devices()) == len(rows.devices()) == 8


@pytest.mark.parametrize("inner", [0, None])
@pytest.mark.parametrize("outer", [0, None])
def test_out_axes_none_is_the_value_of_the_first(outer, inner, mode):
    """On all devices, although nothing made it the same; also of several rows on a device."""
    for shape in ((2, 4), (4, 4), (9, 4)):
        x = sample(*shape, 2)
        y = nested(lambda x: x + 1, {"out_axes": inner}, out_axes=outer, compile=mode)(x)
        wanted = x + 1
        wanted = wanted[:, 0] if inner is None else wanted
        wanted = wanted[0] if outer is None else wanted
        same(y, wanted)
        for shard in y.addressable_shards:
            same(shard.data, wanted[shard.index])


def test_what_does_not_fit_is_folded(mode):
    """Indices, permutations and gathers of such rows: tests/programs/test_jax_parity.py."""
    over = ("rows", "cols", NAMES)
    f = nested(lambda x: [x - tp.psum(x, names) for names in over], compile=mode)
    for rows, columns, counts in (
        *((4, 4, (4, 2)), (3, 3, (3, 1)), (16, 2, (8, 1)), (9, 4, (3, 2)), (1, 8, (1, 8))),
        *((8, 1, (8, 1)), (6, 4, (2, 4)), (11, 3, (1, 3))),
    ):
        x = sample(rows, columns)
        for got, dims in zip(f(x), (0, 1, (0, 1)), strict=True):
            assert mesh_of(got) == dict(zip(NAMES, counts, strict=True))
            assert [d.id for d in got.sharding.mesh.devices.flat] == list(range(np.prod(counts)))
            same(got, x - x.sum(dims, keepdim=True))


def test_given_devices(mode):
    x = sample(2, 3)
    for count, mesh in ((2, (2, 1)), (6, (2, 3))):
        chosen = tp.devices()[::-1][:count]
        y = nested(lambda x: x - tp.psum(x, "cols"), devices=chosen, compile=mode)(x)
        same(y, x - x.sum(1, keepdim=True))
        assert list(y.sharding.mesh.devices.flat) == chosen
        assert y.sharding.mesh.devices.shape == mesh
    with pytest.raises(ValueError, match=r"equal the number of local devices.*axis_size=2.*") as e:
        nested(lambda x: x, devices=tp.devices()[:4], compile=mode)(x)
    assert str(e.value).endswith("For a pmap of a pmap, 2 * 3 = 6 devices will do too.")
    inner = {"devices": tp.devices()[:3]}
    with pytest.raises(ValueError, match="a pmap inside a mapped function runs on the device"):
        nested(lambda x: x, inner, compile=mode)(x)


def test_results_are_arguments_where_they_are():
    f = nested(lambda x: tp.pmean(x, "cols") + 1)
    x = sample(2, 4)
    y = f(x)
    with tp.debug.report_gathers() as gathers:
        z = f(f(y))
    assert not gathers
    same(z, x.mean(1, keepdim=True).expand(2, 4) + 3)
    prepared = [p for p in f._prepared.values() if p.in_place]
    assert len(prepared) == 1


def test_names_need_not_be_there_or_differ():
    x = sample(2, 4)
    unnamed = tp.pmap(tp.pmap(lambda x: x + 1), compile=EAGER)(x)
    same(unnamed, x + 1)
    assert mesh_of(unnamed) == {"devices0": 2, "devices1": 4}
    hidden = tp.pmap(tp.pmap(lambda x: tp.psum(x, "i"), "i"), "i", compile=EAGER)(x)
    same(hidden, x.sum(1, keepdim=True).expand(2, 4))
    assert mesh_of(hidden) == {"devices0": 2, "i": 4}


def test_three_levels(mode):
    x = sample(2, 2, 2, 3)

    def f(x):
        sums = [tp.psum(x, names) for names in ("a", "b", "c", ("a", "c"), ("c", "b"))]
        return *sums, tp.all_gather(x, ("c", "a")), tp.axis_index(("b", "c", "a"))

    g = tp.pmap(tp.pmap(tp.pmap(f, "c", in_axes=-1), "b"), "a", compile=mode)
    *sums, gathered, index = g(x.movedim(2, 3))
    assert mesh_of(gathered) == {"a": 2, "b": 2, "c": 2}
    for got, dims in zip(sums, (0, 1, 2, (0, 2), (1, 2)), strict=True):
        same(got, x.sum(dims, keepdim=True).expand_as(x))
    a, b, c = np.indices((2, 2, 2))
    same(index, b * 4 + c * 2 + a)
    same(gathered[1, 0, 1], x[:, 0].transpose(0, 1).reshape(4, 3))


# --- collectives ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nest:
    """How the eight rows of ``_axis_models`` lie in the argument of a pmap of a pmap."""

    num_devices: int
    shape: tuple[int, int]
    mesh: tuple[int, int]
    axis_name: Any

    def argument(self, rows):
        if self.axis_name == ("rows", "cols"):
            return rows.reshape(*self.shape, *rows.shape[1:])
        if self.axis_name == ("cols", "rows"):
            return rows.reshape(*self.shape[::-1], *rows.shape[1:]).transpose(0, 1)
        if self.axis_name == "rows":
            return rows.unsqueeze(1).repeat_interleave(self.shape[1], 1)
        return rows.unsqueeze(0).repeat_interleave(self.shape[0], 0)

    def rows(self, result):
        """What the eight rows got, once for each time they are there."""
        if self.axis_name == ("rows", "cols"):
            return [result.flatten(0, 1)]
        if self.axis_name == ("cols", "rows"):
            return [result.transpose(0, 1).flatten(0, 1)]
        return list(result.unbind(1 if self.axis_name == "rows" else 0))


NESTS = {
    "both": Nest(8, (2, 4), (2, 4), ("rows", "cols")),
    "both, swapped": Nest(8, (2, 4), (2, 4), ("cols", "rows")),
    "both, folded": Nest(4, (2, 4), (2, 2), ("rows", "cols")),
    "both, folded and swapped": Nest(4, (2, 4), (2, 2), ("cols", "rows")),
    "columns": Nest(8, (1, 8), (1, 8), "cols"),
    "columns, folded": Nest(8, (2, 8), (2, 4), "cols"),
    "rows, folded": Nest(6, (8, 3), (2, 3), "rows"),
}
OVER_ONE = ("columns, folded", "rows, folded")
PARTS = 7
"""Of all cases; not a divisor of the ten operations that each kind of groups has."""


@pytest.mark.parametrize("name", mostly_long(NESTS, "both, folded and swapped", *OVER_ONE))
@pytest.mark.parametrize("part", mostly_long(range(PARTS), 0))
def test_collectives(name, part):
    """Every collective with every kind of groups and permutation, and its transpose."""
    nest = NESTS[name]
    tp.init(nest.num_devices)
    inputs = {
        name: (x := sample(N, *case.shape), sample(*case.model(x.numpy()).shape, seed=1))
        for name, case in list(LINEAR.items())[part::PARTS]
    }

    def all_cases(given):
        results = {}
        for name, (x, w) in given.items():
            case = LINEAR[name]
            value, pull = torch.func.vjp(lambda x, case=case: case.run(x, nest.axis_name), x)
            results[name] = value, *pull(w)
        return results

    given = {name: tuple(map(nest.argument, pair)) for name, pair in inputs.items()}
    for name, (value, pulled) in nested(all_cases)(given).items():
        assert tuple(mesh_of(value).values()) == nest.mesh
        x, w = (t.numpy() for t in inputs[name])
        expected = LINEAR[name].model(x), transposed(LINEAR[name], w)
        for result, wanted in zip((value, pulled), expected, strict=True):
            for rows in nest.rows(result.cpu()):
                np.testing.assert_allclose(rows, wanted, rtol=1e-12, err_msg=name)


TIES = torch.tensor([[3.0, 1], [3, 1], [2, 1], [3, 0], [0, 0], [2, 5], [2, 5], [-1, 5]]).double()


@pytest.mark.parametrize("name", mostly_long(NESTS, "both, folded and swapped"))
def test_extremes_share_ties(name):
    nest = NESTS[name]
    tp.init(nest.num_devices)
    w = sample(N, 2, seed=3)
    cut = {"whole": None, "scattered": EVEN["scattered"], "uneven": UNEVEN["uneven_mixed"]}

    def f(x, w):
        results = {}
        for name, groups in cut.items():
            for take in (tp.pmax, tp.pmin):
                reduce = functools.partial(take, axis_name=nest.axis_name, axis_index_groups=groups)
                value, pull = torch.func.vjp(reduce, x)
                results[name, take.__name__] = value, *pull(w)
        return results

    got = nested(f)(nest.argument(TIES), nest.argument(w))
    for (name, op), results in got.items():
        take = np.max if op == "pmax" else np.min
        groups = cut[name]
        value = grouped(everyone(lambda rows, take=take: take(rows, 0)), groups)(TIES.numpy())
        total = grouped(everyone(lambda rows: rows.sum(0)), groups)(w.numpy())
        expected = value, extreme_shares(TIES.numpy(), groups, take) * total
        for result, wanted in zip(results, expected, strict=True):
            for rows in nest.rows(result.cpu()):
                np.testing.assert_allclose(rows, wanted, err_msg=f"{op} {name}")


def test_over_both_axes_one_message_is_sent():
    f = nested(lambda x: (tp.psum(x, NAMES), tp.pmax(x, NAMES), tp.all_gather(x, NAMES)))
    lowered = f.lower(torch.zeros(2, 4))
    names = [each.name for each in lowered.cost().collectives]
    assert names == ["all_reduce", "all_reduce", "all_gather_into_tensor"]
    assert list(lowered._plan.groups) == ["ranks:0,1,2,3,4,5,6,7"]
    folded = f.lower(torch.zeros(9, 4))  # 3 * 2 devices, with rows and columns on each
    assert [each.name for each in folded.cost().collectives][:2] == ["all_reduce", "all_reduce"]
    # along one axis only its devices meet
    groups = nested(lambda x: tp.psum(x, "cols")).lower(torch.zeros(2, 4))._plan.groups
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) in groups.values()
    assert len(groups) == 2  # that, and all devices
