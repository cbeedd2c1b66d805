"""Covers: axis_bound and the reductions that leave out unbound names, in
_collectives/queries.py.
"""

import pytest
import torch

import torchpmap as tp
from torchpmap._collectives import (
    axis_bound,
    pmax_if_bound,
    pmean_if_bound,
    pmin_if_bound,
    psum_if_bound,
)
from torchpmap._transforms.vmap import vmap

X = torch.tensor([1.0, 2.0, 6.0, 7.0])
PAIRS = [[0, 1], [2, 3]]


def test_axis_bound():
    seen = []

    def f(x):
        seen.extend([axis_bound("i"), axis_bound("j"), axis_bound(("i", "j")), axis_bound(["i"])])
        seen.extend([axis_bound(()), axis_bound(None)])
        return x

    vmap(f, axis_name="i")(X)
    assert seen == [True, False, False, True, True, False]
    assert not axis_bound("i")
    vmap(vmap(f, axis_name="j"), axis_name="i")(X[None])
    assert seen[6:] == [True, True, True, True, True, False]


def test_bound_on_devices(mode, pool):
    def f(x):
        return x * axis_bound("i"), x * axis_bound("j"), psum_if_bound(x, ("i", "j"))

    got = tp.pmap(f, axis_name="i", compile=mode)(X)
    assert [x.tolist() for x in got] == [X.tolist(), [0.0] * 4, [16.0] * 4]
    assert [x.tolist() for x in f(X)] == [[0.0] * 4, [0.0] * 4, X.tolist()]


@pytest.mark.parametrize(
    ("reduce", "over_axis"),
    [(psum_if_bound, 16.0), (pmean_if_bound, 4.0), (pmax_if_bound, 7.0), (pmin_if_bound, 1.0)],
)
def test_reductions(reduce, over_axis):
    assert reduce(X, "i").tolist() == X.tolist()
    assert reduce(X, None).tolist() == X.tolist()
    assert reduce({"a": X, "b": None}, ("i", "j"))["a"].tolist() == X.tolist()
    assert vmap(lambda x: reduce(x, "i"), axis_name="i")(X).tolist() == [over_axis] * 4
    assert vmap(lambda x: reduce(x, ("j", "i")), axis_name="i")(X).tolist() == [over_axis] * 4
    assert vmap(lambda x: reduce(x, "j"), axis_name="i")(X).tolist() == X.tolist()


def test_dtypes_and_constants_do_not_depend_on_what_is_bound():
    for f in (
        lambda: psum_if_bound(torch.tensor(True), "i"),
        lambda: pmean_if_bound(torch.tensor(3), "i"),
        lambda: pmax_if_bound(torch.tensor(3, dtype=torch.uint8), "i"),
    ):
        inside = vmap(f, axis_name="i", axis_size=1)()
        assert (f().dtype, [f().item()]) == (inside.dtype, inside.tolist())
    assert psum_if_bound(1, "i") == 1
    assert vmap(lambda x: x + psum_if_bound(1, "i"), axis_name="i")(X).tolist() == (X + 4).tolist()


def test_groups_and_dims():
    def f(x):
        return pmean_if_bound(x, "i", axis_index_groups=PAIRS)

    assert f(X).tolist() == X.tolist()
    assert vmap(f, axis_name="i")(X).tolist() == [1.5, 1.5, 6.5, 6.5]
    assert psum_if_bound(X, ("i", 0)).item() == 16.0
    assert (
        vmap(lambda x: psum_if_bound(x, ("i", 0)), axis_name="i")(X[:, None]).tolist() == [16] * 4
    )


def test_gradients():
    def f(x):
        return pmax_if_bound(psum_if_bound(x**2, "i"), "i")

    assert tp.grad(f)(X[2]).item() == 12.0
    assert vmap(tp.grad(f), axis_name="i")(X).tolist() == (8 * X).tolist()
