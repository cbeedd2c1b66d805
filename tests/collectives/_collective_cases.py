"""Programs over an axis ``i`` of size 4, with the results of JAX (or mathematics, where it errs).

``CASES[name] = (function, inputs, expected)``: device k gets row k of each input and must give row
k of ``expected``. The same table runs on processes, as traced graphs on processes, and vmapped.
"""

import numpy as np
import torch

from torchpmap._collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
)
from torchpmap._transforms.grad import grad, value_and_grad
from torchpmap._transforms.vmap import vmap

T = torch.tensor
func = torch.func

NAN, INF = float("nan"), float("inf")
X = T([1.0, 2.0, 3.0, 4.0])
W = T([1.0, 10.0, 100.0, 1000.0])
TIES = T([2.0, 4.0, 4.0, 1.0])
ROWS = torch.arange(16.0).reshape(4, 4)
CUBE = torch.arange(32.0).reshape(4, 4, 2)
WIDE = torch.arange(32.0).reshape(4, 8)
SQUARES = (ROWS + 1) ** 2
CUBE_SQUARES = (torch.arange(64.0).reshape(4, 4, 4) + 1) ** 2
TWO = torch.arange(8.0).reshape(4, 2)
PAIRS = [[0, 1], [2, 3]]
CROSSED = [[0, 2], [3, 1]]
UNEVEN = [[0], [1, 2, 3]]
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SOME = [(0, 1), (1, 2)]


def same(value):
    """A result that is equal on all four devices."""
    tensor = torch.as_tensor(value)
    return tensor.expand(4, *tensor.shape)


def vary(f):
    return vmap(f, axis_name="j")


# --- values -------------------------------------------------------------------------------------

VALUES = {
    "psum": (lambda x: psum(x, "i"), (X,), same(10.0)),
    "psum_groups": (lambda x: psum(x, "i", axis_index_groups=PAIRS), (X,), T([3.0, 3, 7, 7])),
    "psum_uneven": (lambda x: psum(x, "i", axis_index_groups=UNEVEN), (X,), T([1.0, 9, 9, 9])),
    "psum_ndarray_groups": (
        lambda x: psum(x, "i", axis_index_groups=np.array(CROSSED)), (X,), T([4.0, 6, 4, 6])),
    "psum_bool": (lambda x: psum(x > 1, "i"), (X,), same(T(3, dtype=torch.int32))),
    "psum_int8_wraps": (lambda x: psum(x, "i"), (torch.full((4,), 100, dtype=torch.int8),),
        same(T(400 - 512, dtype=torch.int8))),
    "psum_positional": (lambda x: psum(x, ("i", 0)), (ROWS,), same(120.0)),
    "psum_only_positional": (lambda x: psum(x, -1), (ROWS,), ROWS.sum(1)),
    "psum_not_contiguous": (lambda x: psum(x.T, "i"), (CUBE,), same(CUBE.sum(0).T)),
    "psum_no_axis": (lambda x: psum(x, ()), (X,), X),
    "psum_empty": (lambda x: psum(x[:0], "i"), (ROWS,), torch.zeros(4, 0)),
    "psum_tree": (lambda x: psum({"a": x, "b": [x * 2, None], "c": x.to(torch.int64), "d": 3}, "i"),
        (X,), {"a": same(10.0), "b": [same(20.0), None], "c": same(10), "d": 12}),
    "psum_constants": (
        lambda x: psum((1, True, 2.5, np.ones(2, np.float32), np.array([True])), "i"), (X,),
        (4, 4, 10.0, same([4.0, 4.0]), same(T([4], dtype=torch.int32)))),
    "psum_constants_groups": (lambda x: (psum(2.0, "i", axis_index_groups=PAIRS),
        psum(np.float32(2), "i", axis_index_groups=UNEVEN)), (X,), (4.0, T([2.0, 6, 6, 6]))),
    "pmean": (lambda x: pmean(x, "i"), (X,), same(2.5)),
    "pmean_int": (
        lambda x: pmean((x.to(torch.int32), x > 1, 3), "i"), (X,), (same(2.5), same(0.75), 3)),
    "pmean_uint8_does_not_wrap": (
        lambda x: pmean(x, "i"), (torch.full((4,), 200, dtype=torch.uint8),), same(200.0)),
    "pmean_groups": (lambda x: pmean(x, "i", axis_index_groups=CROSSED), (X,), T([2.0, 3, 2, 3])),
    "pmean_uneven": (lambda x: pmean(x, "i", axis_index_groups=UNEVEN), (X,), T([1.0, 3, 3, 3])),
    "pmean_positional": (lambda x: pmean(x, ("i", -1)), (CUBE,), same(CUBE.mean((0, 2)))),
    "pmax": (lambda x: pmax(x, "i"), (X,), same(4.0)),
    "pmax_groups": (
        lambda x: pmax(x, "i", axis_index_groups=UNEVEN), (W,), T([1.0] + [1000.0] * 3)),
    "pmin_tree": (lambda x: pmin((x, -x, x > 1), "i"), (X,), (same(1.0), same(-4.0), same(False))),
    "pmax_positional": (lambda x: pmax(x, (1, "i")), (CUBE,), same(CUBE.amax((0, 2)))),
    "pmax_nan": (lambda x: (pmax(x, "i"), pmin(x, "i")),
        (T([[NAN, 1, -INF, -0.5], [1, NAN, 3, -7], [2, 3, INF, -2], [3, 4, 1, -1]]),),
        (same([NAN, NAN, INF, -0.5]), same([NAN, NAN, -INF, -7]))),
    "axis_index": (lambda x: axis_index("i"), (X,), torch.arange(4)),
    "axis_size": (lambda x: (axis_size("i"), axis_size(()), axis_size(("i",))), (X,), (4, 1, 4)),
    "all_gather": (lambda x: all_gather(x, "i"), (X,), same(X)),
    "all_gather_1": (lambda x: all_gather(x, "i", axis=1), (TWO,), same(TWO.T)),
    "all_gather_last": (lambda x: all_gather(x, "i", axis=-1), (TWO,), same(TWO.T)),
    "all_gather_tiled": (lambda x: all_gather(x, "i", tiled=True), (TWO,), same(torch.arange(8.0))),
    "all_gather_tiled_1": (lambda x: all_gather(x, "i", axis=-1, tiled=True), (CUBE,),
        same(torch.cat(tuple(CUBE), 1))),
    "all_gather_groups": (lambda x: all_gather(x, "i", axis_index_groups=CROSSED), (X,),
        T([[1.0, 3], [4, 2], [1, 3], [4, 2]])),
    "all_gather_pairs": (lambda x: all_gather(x, "i", axis_index_groups=PAIRS), (X,),
        T([[1.0, 2], [1, 2], [3, 4], [3, 4]])),
    "all_gather_bool": (lambda x: all_gather({"a": x > 1, "b": 3}, "i"), (X,),
        {"a": same(X > 1), "b": same([3] * 4)}),
    "psum_scatter": (lambda x: psum_scatter(x, "i"), (ROWS,), T([24.0, 28, 32, 36])),
    "psum_scatter_last": (lambda x: psum_scatter(x, "i", scatter_dimension=-1),
        (torch.arange(32.0).reshape(4, 2, 4),), T([[48.0, 64], [52, 68], [56, 72], [60, 76]])),
    "psum_scatter_tiled": (lambda x: psum_scatter(x, "i", tiled=True), (WIDE,),
        T([[48.0, 52], [56, 60], [64, 68], [72, 76]])),
    "psum_scatter_groups": (lambda x: psum_scatter(x, "i", axis_index_groups=CROSSED, tiled=True),
        (ROWS,), T([[8.0, 10], [20, 22], [12, 14], [16, 18]])),
    "all_to_all": (lambda x: all_to_all(x, "i", 0, 0), (ROWS,), ROWS.T),
    "all_to_all_01": (lambda x: all_to_all(x, "i", 0, 1), (CUBE,), CUBE.permute(1, 2, 0)),
    "all_to_all_negative": (lambda x: all_to_all(x, "i", -2, -1), (CUBE,), CUBE.permute(1, 2, 0)),
    "all_to_all_tiled": (lambda x: all_to_all(x, "i", 0, 0, tiled=True), (WIDE,),
        WIDE.reshape(4, 4, 2).transpose(0, 1).reshape(4, 8)),
    "all_to_all_tiled_01": (lambda x: all_to_all(x, "i", 0, 1, tiled=True), (CUBE,),
        CUBE.transpose(0, 1).reshape(4, 1, 8)),
    "all_to_all_groups": (lambda x: all_to_all(x, "i", 0, 0, axis_index_groups=CROSSED, tiled=True),
        (ROWS,), T([[0.0, 1, 8, 9], [14, 15, 6, 7], [2, 3, 10, 11], [12, 13, 4, 5]])),
    "ppermute": (lambda x: ppermute(x, "i", RING), (X,), T([4.0, 1, 2, 3])),
    "ppermute_partial": (lambda x: ppermute(x, "i", SOME), (X,), T([0.0, 1, 2, 0])),
    "ppermute_negative": (lambda x: ppermute(x, "i", [(-1, 0)]), (X,), T([4.0, 0, 0, 0])),
    "ppermute_empty": (lambda x: ppermute(x, "i", []), (X,), torch.zeros(4)),
    "ppermute_zip": (lambda x: ppermute((x, x > 1), "i", zip([0, 1], [1, 2], strict=True)), (X,),
        (T([0.0, 1, 2, 0]), T([False, False, True, False]))),
    "pshuffle": (lambda x: pshuffle(x, "i", [3, 1, 0, 2]), (X,), T([4.0, 2, 1, 3])),
    "pswapaxes": (lambda x: pswapaxes(x, "i", 0), (ROWS,), ROWS.T),
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
    "psum_xw": (grad(lambda x, w: psum(x * w, "i")), (X, W), 4 * W),
    "w_psum": (weighted(lambda x: psum(x, "i")), (X, W), same(1111.0)),
    "w_psum_sq": (weighted(lambda x: psum(x**2, "i")), (X, W), 2222 * X),
    "pmean_xw": (grad(lambda x, w: pmean(x * w, "i")), (X, W), W),
    "w_pmean_sq": (weighted(lambda x: pmean(x**2, "i")), (X, W), 555.5 * X),
    "w_psum_groups": (weighted(lambda x: psum(x, "i", axis_index_groups=PAIRS)), (X, W),
        T([11.0, 11, 1100, 1100])),
    "w_pmean_uneven": (weighted(lambda x: pmean(x, "i", axis_index_groups=UNEVEN)), (X, W),
        T([1.0, 370, 370, 370])),
    "psum_of_psum": (grad(lambda x, w: psum(w * psum(x, "i"), "i")), (X, W), same(4444.0)),
    "psum_squared": (grad(lambda x: psum(x, "i") ** 2), (X,), same(80.0)),
    "x_psum": (grad(lambda x: x * psum(x, "i")), (X,), same(20.0)),
    "softmax": (grad(lambda x, w: w * torch.exp(x) / psum(torch.exp(x), "i")), (X / 2, W),
        T([-49.0857391, -79.4220581, -106.1044464, 234.6121826])),
    "pmax": (weighted(lambda x: pmax(x, "i")), (X, W), T([0.0, 0, 0, 1111])),
    "pmax_ties": (weighted(lambda x: pmax(x, "i")), (TIES, W), T([0, 555.5, 555.5, 0])),
    "pmin_groups": (weighted(lambda x: pmin(x, "i", axis_index_groups=CROSSED)), (TIES, W),
        T([101.0, 0, 0, 1010])),
    "pmax_nan": (weighted(lambda x: pmax(x, "i")), (T([1, NAN, 3, 2]), W), T([0.0, 1111, 0, 0])),
    "pmax_positional_ties": (grad(lambda x: pmax(x, ("i", 0))),
        (T([[1.0, 7], [7, 2], [7, 0], [7, 7]]),), T([[0, 0.8], [0.8, 0], [0.8, 0], [0.8, 0.8]])),
    "pmax_jvp": (lambda x, w: func.jvp(lambda x: pmax(x, "i"), (x,), (w,)), (TIES, W),
        (same(4.0), same(55.0))),
    "pmax_tree": (
        grad(lambda t, w: (lambda a, b: w * a + w * b.sum())(*pmax((t["a"], t["b"]), "i"))),
        ({"a": X, "b": TWO}, W),
        {"a": T([0.0, 0, 0, 1111]), "b": T([[0.0, 0], [0, 0], [0, 0], [1111, 1111]])}),
    "pmax_second_order": (func.hessian(lambda x: pmax(x, "i") ** 3), (X,), T([0.0, 0, 0, 96])),
    "ppermute": (weighted(lambda x: ppermute(x, "i", RING)), (X, W), T([10.0, 100, 1000, 1])),
    "ppermute_some": (weighted(lambda x: ppermute(x, "i", SOME)), (X, W), T([10.0, 100, 0, 0])),
    "pshuffle": (
        weighted(lambda x: pshuffle(x, "i", [3, 1, 0, 2])), (X, W), T([100.0, 10, 1000, 1])),
    "pbroadcast": (weighted(lambda x: pbroadcast(x, "i", 1)), (X, W), T([0.0, 1111, 0, 0])),
    "all_gather": (weighted(lambda x: all_gather(x, "i")), (X, SQUARES), T([276.0, 336, 404, 480])),
    "psum_scatter": (weighted(lambda x: psum_scatter(x, "i")), (ROWS, W), same(W)),
    "psum_scatter_groups": (weighted(lambda x: psum_scatter(x, "i", axis_index_groups=CROSSED)),
        (TWO, W), T([[1.0, 100], [1000, 10], [1, 100], [1000, 10]])),
    "all_to_all": (weighted(lambda x: all_to_all(x, "i", 0, 0)), (ROWS, SQUARES), SQUARES.T),
    "all_to_all_01": (weighted(lambda x: all_to_all(x, "i", 0, 1)), (CUBE_SQUARES, CUBE_SQUARES),
        CUBE_SQUARES.permute(2, 0, 1)),
    "vjp": (lambda x, t: func.vjp(lambda x: psum(x**2, "i"), x)[1](t), (X, W), (2222 * X,)),
    "jvp": (lambda x, t: func.jvp(lambda x: pmean(x**2, "i"), (x,), (t,)), (X, X),
        (same(7.5), same(15.0))),
    "jvp_psum_tree": (  # along with a leaf that has no tangent, and two that can have none
        lambda x, w: func.jvp(lambda x: psum((w, x, x > 2, x.long()), "i")[1], (x,), (w,)), (X, W),
        (same(10.0), same(1111.0))),
    "jvp_pmax_tree": (
        lambda x, w: func.jvp(lambda x: pmax((w, x, x > 2, x.long()), "i")[1], (x,), (w,)), (X, W),
        (same(4.0), same(1000.0))),
    "jvp_ppermute_tree": (
        lambda x, w: func.jvp(lambda x: ppermute((w, x, x > 2), "i", RING)[1], (x,), (w,)), (X, W),
        (X.roll(1), W.roll(1))),
    "jacfwd": (func.jacfwd(lambda x: psum(x**2, "i")), (X,), same(20.0)),
    "jacrev": (func.jacrev(lambda x: psum(x**2, "i")), (X,), 8 * X),
    "jacfwd_all_gather": (func.jacfwd(lambda x: all_gather(x, "i")), (X,), torch.ones(4, 4)),
    "jacrev_all_gather": (func.jacrev(lambda x: all_gather(x, "i")), (X,), 4 * torch.eye(4)),
    "hessian": (func.hessian(lambda x: psum(x, "i") ** 3), (X,), same(960.0)),
    "grad_of_grad": (grad(grad(lambda x: psum(x, "i") ** 3)), (X,), same(960.0)),
    "value_and_grad": (value_and_grad(lambda w, x: pmean((w * x) ** 2, "i")), (same(2.0), X),
        (same(30.0), T([4.0, 16, 36, 64]))),
    "tree": (grad(lambda t: sum(psum({"a": t["a"] ** 2, "b": t["b"] * 3}, "i").values()).sum()),
        ({"a": X, "b": TWO},), {"a": 8 * X * 2, "b": torch.full((4, 2), 12.0)}),
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
    "unnamed_psum_scatter": (func.vmap(lambda x: psum_scatter(x, "i")),
        (torch.arange(32.0).reshape(4, 2, 4),), T([[48.0, 64], [52, 68], [56, 72], [60, 76]])),
    "unnamed_all_to_all": (func.vmap(lambda x: all_to_all(x, "i", 0, 0), in_dims=1, out_dims=1),
        (CUBE,), CUBE.transpose(0, 1)),
    "unnamed_all_gather": (func.vmap(lambda x: all_gather(x, "i", axis=1), in_dims=1), (CUBE,),
        same(CUBE.permute(2, 1, 0))),
    "partly_batched": (
        lambda x: func.vmap(lambda a: psum((a, x), "i"), out_dims=(0, None))(x * torch.arange(3.0)),
        (X,), (same([0.0, 10, 20]), same(10.0))),
    "partly_batched_gather": (
        lambda x: func.vmap(lambda a: all_gather((a, x), "i"), 0, (0, None))(x * torch.arange(2.0)),
        (X,), (same(torch.stack([X * 0, X])), same(X))),
    "per_sample_grad": (
        lambda x, w: func.vmap(grad(lambda a: w * psum(a**2, "i")))(x * torch.arange(2.0)), (X, W),
        torch.stack([X * 0, 2222 * X], 1)),
    "unnamed_pmax_grad": (
        lambda x, w: func.vmap(grad(lambda a: w * pmax(a, "i")))(x * T([1.0, -1])), (X, W),
        T([[0.0, 1111], [0, 0], [0, 0], [1111, 0]])),
    "psum_j": (vary(lambda x: psum(x, "j")), (TWO,), TWO.sum(1, keepdim=True).expand(4, 2)),
    "psum_ij": (vary(lambda x: psum(x, ("i", "j"))), (TWO,), torch.full((4, 2), 28.0)),
    "psum_constant_ij": (
        vary(lambda x: x * 0 + psum(1, ("i", "j"))), (TWO,), torch.full((4, 2), 8.0)),
    "pmean_ji": (vary(lambda x: pmean(x, ["j", "i"])), (TWO,), torch.full((4, 2), 3.5)),
    "shadow": (
        vmap(lambda x: psum(x, "i"), axis_name="i"), (TWO,), TWO.sum(1, keepdim=True).expand(4, 2)),
    "axis_index_ij": (vary(lambda x: axis_index(("i", "j"))), (TWO,), TWO.to(torch.int64)),
    "axis_index_ji": (
        vary(lambda x: axis_index(("j", "i"))), (TWO,), T([[0, 4], [1, 5], [2, 6], [3, 7]])),
    "all_gather_ij": (
        vary(lambda x: all_gather(x, ("i", "j"))), (TWO,), torch.arange(8.0).expand(4, 2, 8)),
    "all_gather_ji_tiled": (vary(lambda x: all_gather(x[None], ("j", "i"), tiled=True)), (TWO,),
        TWO.T.reshape(8).expand(4, 2, 8)),
    "psum_scatter_ij": (vary(lambda x: psum_scatter(x, ("i", "j"))),
        (torch.arange(64.0).reshape(4, 2, 8),),
        torch.arange(64.0).reshape(8, 8).sum(0).reshape(4, 2)),
    "all_to_all_ij": (vary(lambda x: all_to_all(x, ("i", "j"), 0, 0)),
        (torch.arange(64.0).reshape(4, 2, 8),),
        torch.arange(64.0).reshape(8, 8).T.reshape(4, 2, 8)),
    "all_to_all_ji": (vary(lambda x: all_to_all(x, ("j", "i"), 0, 0)),
        (torch.arange(64.0).reshape(4, 2, 8),),
        torch.arange(64.0).reshape(4, 2, 2, 4).permute(3, 2, 1, 0).reshape(4, 2, 8)),
    "ppermute_ij": (vary(lambda x: ppermute(x, ("i", "j"), [(k, (k + 3) % 8) for k in range(7)])),
        (TWO + 1,), T([[6.0, 7], [0, 1], [2, 3], [4, 5]])),
    "pbroadcast_ij": (
        vary(lambda x: pbroadcast(x, ("i", "j"), 5)), (TWO,), torch.full((4, 2), 5.0)),
    "pmax_ij_ties_grad": (vary(grad(lambda x: pmax(x, ("i", "j")))),
        (T([[7.0, 7], [7, 0], [0, 0], [0, 0]]),), T([[8 / 3, 8 / 3], [8 / 3, 0], [0, 0], [0, 0]])),
    "grad_of_vmap": (
        grad(lambda x: vary(lambda a: psum(a**2, ("j", "i")))(x).sum()), (TWO,), 16 * TWO),
    "groups_inside_j": (vary(lambda x: psum(x, "i", axis_index_groups=PAIRS)), (TWO,),
        T([[2.0, 4], [2, 4], [10, 12], [10, 12]])),
    "all_to_all_groups_inside": (
        func.vmap(lambda x: all_to_all(x, "i", 0, 0, axis_index_groups=PAIRS)),
        (torch.arange(16.0).reshape(4, 2, 2),),
        T([[[0.0, 4], [2, 6]], [[1, 5], [3, 7]], [[8, 12], [10, 14]], [[9, 13], [11, 15]]])),
}  # fmt: skip

FAMILIES = {"values": VALUES, "gradients": GRADIENTS, "autograd": AUTOGRAD, "batched": BATCHED}
CASES = {
    f"{family}-{name}": case for family, cases in FAMILIES.items() for name, case in cases.items()
}
