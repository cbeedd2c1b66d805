"""Programs over an axis ``i`` of size 4, with the results of mathematics.

They are what the stored programs of JAX (tests/programs/test_jax_parity.py) and the models of
``_axis_models`` do not have: trees, constants, ties, backward(), and what only a vmap sees.
``CASES[name] = (function, inputs, expected)``: device k gets row k of each input and must give row
k of ``expected``. The same table runs on processes, as traced graphs on processes, and vmapped.
"""

import numpy as np
import torch

from torchpmap._collectives import (
    all_gather,
    all_to_all,
    axis_size,
    pbroadcast,
    pmax,
    pmin,
    ppermute,
    psum,
)
from torchpmap._transforms.grad import grad
from torchpmap._transforms.vmap import vmap

T = torch.tensor
func = torch.func

NAN, INF = float("nan"), float("inf")
X = T([1.0, 2.0, 3.0, 4.0])
W = T([1.0, 10.0, 100.0, 1000.0])

ROWS = torch.arange(16.0).reshape(4, 4)
CUBE = torch.arange(32.0).reshape(4, 4, 2)

TWO = torch.arange(8.0).reshape(4, 2)
PAIRS = [[0, 1], [2, 3]]
CROSSED = [[0, 2], [3, 1]]
UNEVEN = [[0], [1, 2, 3]]
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def same(value):
    """A result that is equal on all four devices."""
    tensor = torch.as_tensor(value)
    return tensor.expand(4, *tensor.shape)


# --- values -------------------------------------------------------------------------------------

VALUES = {
    "psum_ndarray_groups": (
        lambda x: psum(x, "i", axis_index_groups=np.array(CROSSED)), (X,), T([4.0, 6, 4, 6])),
    "psum_not_contiguous": (lambda x: psum(x.T, "i"), (CUBE,), same(CUBE.sum(0).T)),
    "psum_empty": (lambda x: psum(x[:0], "i"), (ROWS,), torch.zeros(4, 0)),
    "psum_tree": (lambda x: psum({"a": x, "b": [x * 2, None], "c": x.to(torch.int64), "d": 3}, "i"),
        (X,), {"a": same(10.0), "b": [same(20.0), None], "c": same(10), "d": 12}),
    "psum_constants": (
        lambda x: psum((1, True, 2.5, np.ones(2, np.float32), np.array([True])), "i"), (X,),
        (4, 4, 10.0, same([4.0, 4.0]), same(T([4], dtype=torch.int32)))),
    "pmax_positional": (lambda x: pmax(x, (1, "i")), (CUBE,), same(CUBE.amax((0, 2)))),
    "pmax_nan": (lambda x: (pmax(x, "i"), pmin(x, "i")),
        (T([[NAN, 1, -INF, -0.5], [1, NAN, 3, -7], [2, 3, INF, -2], [3, 4, 1, -1]]),),
        (same([NAN, NAN, INF, -0.5]), same([NAN, NAN, -INF, -7]))),
    "axis_size": (lambda x: (axis_size("i"), axis_size(()), axis_size(("i",))), (X,), (4, 1, 4)),
    "all_gather_bool": (lambda x: all_gather({"a": x > 1, "b": 3}, "i"), (X,),
        {"a": same(X > 1), "b": same([3] * 4)}),
    "pbroadcast": (lambda x: pbroadcast((x, x > 2, -0.0 * x), "i", -2), (X,),
        (same(3.0), same(True), same(-0.0))),
}  # fmt: skip

# --- derivatives inside the mapped function ------------------------------------------------------


def backward(x, w):
    leaf = x.detach().clone().requires_grad_()
    (w * psum(leaf**2, "i")).backward()
    assert leaf.grad is not None
    return leaf.grad


def second_order(x):
    leaf = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(psum(leaf, "i") ** 3, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf)
    return second


def unused_leaves(x, w):
    leaf = x.detach().clone().requires_grad_()
    out = psum({"a": leaf * 2, "b": w, "c": leaf * 3, "d": w.to(torch.int64)}, "i")
    (gradient,) = torch.autograd.grad(w * out["a"] + out["b"], leaf)
    return gradient


def unused_extremes(x, w):
    leaf = x.detach().clone().requires_grad_()
    out = pmax({"a": leaf * 2, "b": w, "c": leaf * 3, "d": w.to(torch.int64)}, "i")
    (gradient,) = torch.autograd.grad(w * out["a"] + out["b"], leaf)
    return gradient


def weighted(collective):
    """grad of sum(w * collective(x)) for x, the transpose of the collective applied to w."""
    return grad(lambda x, w: (w * collective(x)).sum())


GRADIENTS = {
    "pmax_nan": (weighted(lambda x: pmax(x, "i")), (T([1, NAN, 3, 2]), W), T([0.0, 1111, 0, 0])),
    "pmax_positional_ties": (grad(lambda x: pmax(x, ("i", 0))),
        (T([[1.0, 7], [7, 2], [7, 0], [7, 7]]),), T([[0, 0.8], [0.8, 0], [0.8, 0], [0.8, 0.8]])),
    "pmax_tree": (
        grad(lambda t, w: (lambda a, b: w * a + w * b.sum())(*pmax((t["a"], t["b"]), "i"))),
        ({"a": X, "b": TWO}, W),
        {"a": T([0.0, 0, 0, 1111]), "b": T([[0.0, 0], [0, 0], [0, 0], [1111, 1111]])}),
    "jvp_psum_tree": (  # along with a leaf that has no tangent, and two that can have none
        lambda x, w: func.jvp(lambda x: psum((w, x, x > 2, x.long()), "i")[1], (x,), (w,)), (X, W),
        (same(10.0), same(1111.0))),
    "jvp_pmax_tree": (
        lambda x, w: func.jvp(lambda x: pmax((w, x, x > 2, x.long()), "i")[1], (x,), (w,)), (X, W),
        (same(4.0), same(1000.0))),
    "jvp_ppermute_tree": (
        lambda x, w: func.jvp(lambda x: ppermute((w, x, x > 2), "i", RING)[1], (x,), (w,)), (X, W),
        (X.roll(1), W.roll(1))),
}  # fmt: skip

# What plain autograd does to leaves cannot be asked under a vmap.
AUTOGRAD = {
    "backward": (backward, (X, W), 2222 * X),
    "second_order": (second_order, (X,), same(960.0)),
    "unused_extremes": (unused_extremes, (X, W), T([0.0, 0, 0, 2222])),
    "unused_leaves": (unused_leaves, (X, W), same(2222.0)),
}

# --- other batch dims and axes -------------------------------------------------------------------

BATCHED = {
    "partly_batched": (
        lambda x: func.vmap(lambda a: psum((a, x), "i"), out_dims=(0, None))(x * torch.arange(3.0)),
        (X,), (same([0.0, 10, 20]), same(10.0))),
    "partly_batched_gather": (
        lambda x: func.vmap(lambda a: all_gather((a, x), "i"), 0, (0, None))(x * torch.arange(2.0)),
        (X,), (same(torch.stack([X * 0, X])), same(X))),
    "unnamed_pmax_grad": (
        lambda x, w: func.vmap(grad(lambda a: w * pmax(a, "i")))(x * T([1.0, -1])), (X, W),
        T([[0.0, 1111], [0, 0], [0, 0], [1111, 0]])),
    "grad_of_vmap": (
        grad(lambda x: vmap(lambda a: psum(a**2, ("j", "i")), axis_name="j")(x).sum()), (TWO,),
        16 * TWO),
    "all_to_all_groups_inside": (
        func.vmap(lambda x: all_to_all(x, "i", 0, 0, axis_index_groups=PAIRS)),
        (torch.arange(16.0).reshape(4, 2, 2),),
        T([[[0.0, 4], [2, 6]], [[1, 5], [3, 7]], [[8, 12], [10, 14]], [[9, 13], [11, 15]]])),
}  # fmt: skip

FAMILIES = {"values": VALUES, "gradients": GRADIENTS, "autograd": AUTOGRAD, "batched": BATCHED}
CASES = {
    f"{family}-{name}": case for family, cases in FAMILIES.items() for name, case in cases.items()
}
