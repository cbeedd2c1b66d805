"""Covers: _transforms/vmap.py."""

import numpy as np
import pytest
import torch

from torchpmap._collectives import all_gather, psum
from torchpmap._transforms.grad import grad
from torchpmap._transforms.vmap import vmap

X = torch.arange(6.0).reshape(2, 3)
V = torch.tensor([1.0, 2.0, 3.0])


AXES = [
    (0, 0, X * 2),
    (1, 0, X.T * 2),
    (-1, 0, X.T * 2),
    (0, 1, X.T * 2),
    (1, -1, X * 2),
    ((1,), 1, X * 2),
    ([0], 0, X * 2),
]


@pytest.mark.parametrize(("in_axes", "out_axes", "expected"), AXES)
def test_axes(in_axes, out_axes, expected):
    assert torch.equal(vmap(lambda x: x * 2, in_axes, out_axes)(X), expected)


def test_axes_are_tree_prefixes():
    def f(t, y, n):
        return {"a": t["x"] + y, "b": (t["k"] * n, y)}

    mapped = vmap(f, ({"x": 1, "k": None}, 0, None), {"a": 0, "b": (None, 0)})
    out = mapped({"x": X, "k": torch.tensor(5.0)}, V, 2)
    assert torch.equal(out["a"], X.T + V[:, None])
    assert out["b"][0].item() == 10.0
    assert torch.equal(out["b"][1], V)


@pytest.mark.parametrize("array", [np.arange(3.0)[::-1], np.arange(3, dtype=">f4")])
def test_arrays_that_torch_does_not_take(array):
    assert vmap(lambda x: x * 2)(array).tolist() == (array * 2).tolist()
    assert vmap(lambda _: array)(array).tolist() == [array.tolist()] * 3
    gradient = grad(lambda x: (x * x).sum())(array)
    assert gradient.tolist() == (array * 2).tolist()


def test_keywords_over_dim_0_numpy_numbers_and_none():
    assert torch.equal(vmap(lambda x, *, y: x * y, in_axes=1)(X, y=V), X.T * V[:, None])
    x, y, z = vmap(lambda x: (x, 3, None))(np.arange(2))
    assert (x.tolist(), y.tolist(), z) == ([0, 1], [3, 3], None)
    assert vmap(lambda x, n: x if n is None else None)(V, None).tolist() == V.tolist()


def test_out_axes_none_is_checked_per_level():
    assert vmap(lambda x: psum(x, "j"), axis_name="j", out_axes=None)(V).item() == 6.0
    of_all = [[2, 0, 1]]
    total = vmap(lambda x: psum(x, "j", axis_index_groups=of_all), axis_name="j", out_axes=None)
    assert total(V).item() == 6.0
    gathered = vmap(lambda x: all_gather(x, "j", axis_index_groups=of_all), 0, None, axis_name="j")
    assert gathered(V).tolist() == V[of_all[0]].tolist()
    # Batched by the outer vmap only, which torch.func.vmap's own check refuses.
    f = vmap(vmap(lambda x: psum(x, "j"), axis_name="j", out_axes=None))
    assert f(X).tolist() == [3.0, 12.0]
    text = r"mapped output \(axis_name=j\) but out_axes is None: output\['b'\] differs"
    with pytest.raises(ValueError, match=text):
        vmap(lambda x: {"a": 1, "b": x}, axis_name="j", out_axes=None)(V)


def test_randomness():
    torch.manual_seed(0)
    different = vmap(lambda x: torch.rand(()), axis_size=4, in_axes=None)(0)
    assert len(set(different.tolist())) == 4
    same = vmap(lambda x: x * 0 + torch.rand(()), randomness="same")(V)
    assert len(set(same.tolist())) == 1


def test_keeps_the_name():
    def f(x):
        """Doc."""
        return x

    assert (vmap(f).__name__, vmap(f).__doc__) == ("f", "Doc.")


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: vmap(abs)(3.0), ValueError, "along axis 0, .* its rank should be at least 1"),
        (lambda: vmap(abs, in_axes=2)(X), ValueError, "along axis 2, .* but is only 2"),
        (lambda: vmap(abs, in_axes=None)(X), ValueError, "at least one non-None value in in_axes"),
        (lambda: vmap(lambda: 1)(), ValueError, "must be passed at least one argument"),
        (lambda: vmap(lambda x, y: x)(X, V), ValueError, "vmap got inconsistent sizes"),
        (lambda: vmap(abs, axis_size=5)(X), ValueError, "axis_size 5 doesn't match received"),
        (lambda: vmap(abs, in_axes=(0, 0))(X), ValueError, "vmap in_axes"),
        (lambda: vmap(abs, in_axes=0.5), TypeError, "vmap in_axes must be an int, None, or"),
        (lambda: vmap(abs, out_axes=(0, 0))(X), ValueError, "vmap out_axes"),
        (lambda: vmap(abs, out_axes=3)(X), ValueError, "axis 3 is out of bounds"),
        (lambda: vmap(lambda x: "text")(X), TypeError, "output is 'text' of type str"),
    ],
)
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
