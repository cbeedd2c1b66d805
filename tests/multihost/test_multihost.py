"""Covers: torchpmap.multihost of a single process (of several: test_torchrun.py)."""

import re

import numpy as np
import pytest
import torch

import torchpmap as tp
from torchpmap import multihost


@pytest.fixture(autouse=True)
def doubled(pool):
    """A result on the devices."""
    return tp.pmap(lambda x: x * 2, compile=False)(torch.arange(4.0))


def test_broadcast_gives_new_values_of_the_same_kinds(doubled):
    weight = torch.ones(2, requires_grad=True)
    array = np.arange(3)
    given = {"w": weight, "a": array, "name": "x", "none": None, "c": torch.tensor(1 + 2j).conj()}
    got = multihost.broadcast(given | {"doubled": doubled})
    assert list(got) == [*given, "doubled"]
    assert type(got["w"]) is type(got["doubled"]) is torch.Tensor
    assert got["doubled"].tolist() == [0, 2, 4, 6]
    assert not got["w"].requires_grad
    assert isinstance(got["a"], np.ndarray)
    assert (got["name"], got["none"], got["c"].item()) == ("x", None, 1 - 2j)
    got["w"].zero_()
    got["a"][:] = 0
    assert weight.tolist() == [1, 1]
    assert array.tolist() == [0, 1, 2]


def test_all_gather_stacks_one_process(doubled):
    got = multihost.all_gather({"x": torch.ones(2, dtype=torch.int16), "n": 3, "none": None})
    assert (got["x"].tolist(), got["x"].dtype) == ([[1, 1]], torch.int16)
    assert (got["n"].tolist(), got["none"]) == ([3], None)
    rows = np.arange(6).reshape(3, 2)
    got = multihost.all_gather((rows, 3.5), tiled=True)
    assert got[0].tolist() == rows.tolist()
    assert got[1].tolist() == [3.5]
    assert multihost.all_gather(doubled).tolist() == [[0, 2, 4, 6]]
    assert multihost.all_gather(doubled, tiled=True).tolist() == [0, 2, 4, 6]


def test_what_sends_nothing_returns():
    assert multihost.barrier() is multihost.barrier("with a name") is None
    multihost.assert_equal({"x": torch.tensor(float("nan")), "s": "text"}, "never shown")
    tree = {"x": torch.arange(5), "y": (np.ones((2, 3)), None)}
    assert multihost.local_rows(tree) is tree


MISUSES = [
    (lambda: multihost.broadcast(1, source=1), IndexError,
     "broadcast(source=1): there is no such process; thei"),
    (lambda: multihost.broadcast({"x": [(k for k in range(3))]}), ValueError,
     "cannot give its tree: TypeError: tree['x'][0] has type builtins.generator, but "),
    (lambda: multihost.all_gather({"s": "text"}), TypeError,
     "all_gather: tree['s'] has type str, but only tensors"),
    (lambda: multihost.local_rows({"x": 3}), TypeError,
     "tree['x'] has type int, but only tensors and arrays have rows."),
    (lambda: multihost.local_rows([torch.ones(())]), ValueError,
     "tree[0] has shape [], which has no such dim."),
    (lambda: multihost.local_rows(tp.device_put(torch.ones(4), tp.devices())), TypeError,
     "tree is a ShardedTensor, whose rows are on their devices"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), MISUSES)
def test_misuse(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    "call",
    [
        multihost.barrier,
        lambda: multihost.broadcast(1),
        lambda: multihost.all_gather(1),
        lambda: multihost.assert_equal(1),
    ],
)
def test_inside_a_mapped_function(call):
    def function(x):
        call()
        return x

    with pytest.raises(RuntimeError, match="is for the script around mapped functions, and cannot"):
        tp.pmap(function, "i", compile={"backend": "eager"})(torch.arange(4.0))
