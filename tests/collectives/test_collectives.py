"""Covers: _collectives/queries.py and its families, on devices, traced, and vmapped.

``CASES[name] = (function, inputs, expected)`` are programs over an axis ``i`` of size 4, with the
results of mathematics: device k gets row k of each input and must give row k of ``expected``.  They
are what the stored programs of JAX (tests/programs/test_jax_parity.py) and ``_axis_models`` do not
have: trees, constants, ties, backward(), and what only a vmap sees.
"""

import re

import numpy as np
import pytest
import torch
from _support import EAGER
from torch.utils import _pytree as pytree

import torchpmap as tp
from torchpmap import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    grad,
    pbroadcast,
    pmax,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    vmap,
)

pytestmark = pytest.mark.usefixtures("pool")

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


def unused_leaves(reduce):
    def f(x, w):
        leaf = x.detach().clone().requires_grad_()
        out = reduce({"a": leaf * 2, "b": w, "c": leaf * 3, "d": w.to(torch.int64)}, "i")
        (gradient,) = torch.autograd.grad(w * out["a"] + out["b"], leaf)
        return gradient

    return f


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

# What plain autograd does to leaves cannot be asked under a vmap of torch.
AUTOGRAD = {
    "backward": (backward, (X, W), 2222 * X),
    "second_order": (second_order, (X,), same(960.0)),
    "unused_extremes": (unused_leaves(pmax), (X, W), T([0.0, 0, 0, 2222])),
    "unused_leaves": (unused_leaves(psum), (X, W), same(2222.0)),
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
VMAPPED = [name for name in CASES if name.removeprefix("autograd-") not in AUTOGRAD]


def on_devices(f, *rows, mode=EAGER):
    return tp.pmap(f, "i", compile=mode)(*rows)


def by_vmap(f, *rows):
    return vmap(f, axis_name="i")(*rows)


def check(results, expected):
    """Compare results; numbers were the same on all devices, and have become tensors."""
    leaves, got_spec = pytree.tree_flatten(results)
    wanted, spec = pytree.tree_flatten(expected)
    assert got_spec == spec
    for got, want in zip(leaves, wanted, strict=True):
        if want is None:
            assert got is None
            continue
        is_tensor = isinstance(want, torch.Tensor)
        want = want if is_tensor else torch.full((4,), want)
        torch.testing.assert_close(
            got.cpu(), want, rtol=1e-5, atol=1e-5, equal_nan=True, check_dtype=is_tensor
        )


@pytest.mark.parametrize("name", CASES)
def test_on_devices(name, mode):
    function, inputs, expected = CASES[name]
    check(on_devices(function, *inputs, mode=mode), expected)


@pytest.mark.parametrize("name", VMAPPED)
def test_vmapped(name):
    function, inputs, expected = CASES[name]
    check(by_vmap(function, *inputs), expected)


# --- dtypes ---------------------------------------------------------------------------------------

# of which sums wrap, and the order of the second is not that of its bits
WHOLE = {
    torch.int8: torch.tensor([[90, 30, 0, 60], [-90, 100, -90, 100]] * 2, dtype=torch.int8),
    torch.uint8: torch.tensor([[90, 30, 0, 200]] * 4, dtype=torch.uint8),
    torch.uint64: torch.tensor([[0, -2, -3, -1], [-3, 2, -3, 4]] * 2).view(torch.uint64),
}


@pytest.mark.cpu_only("NCCL lacks some of the dtypes")
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("run", [on_devices, by_vmap])
def test_whole_numbers(dtype, run):
    """The result of numpy."""
    rows = WHOLE[dtype].numpy()
    total = rows.sum(0, dtype=rows.dtype)
    wanted = *(np.stack([x] * 4) for x in (total, rows.max(0), rows.min(0), rows[1])), total

    def f(x):
        return psum(x, "i"), pmax(x, "i"), pmin(x, "i"), pbroadcast(x, "i", 1), psum_scatter(x, "i")

    for got, want in zip(run(f, WHOLE[dtype]), wanted, strict=True):
        assert got.dtype == dtype
        assert got.tolist() == want.tolist()


# --- what is sent ---------------------------------------------------------------------------------


def sent(f, *rows):
    """The collectives of the graph: name, number of floats, groups."""
    found = tp.pmap(f, "i", compile=EAGER).lower(*rows).certificate().collectives
    return [(each.name, each.num_bytes // 4, each.groups) for each in found]


def test_the_transposes_are_sent_too():
    def f(x):
        total = psum((x, x, axis_index("i")), "i")
        largest = pmax(x, "i", axis_index_groups=UNEVEN)
        slope = grad(lambda x: (ppermute(x, "i", RING) * all_gather(x, "i")).sum())(x)
        return total, largest, slope, psum(3, "i")

    found = sent(f, torch.ones(4, 2))
    assert ("all_reduce", 2, ((0,), (1, 2, 3))) in found
    names = sorted(name for name, *_ in found)
    assert names == [
        *("all_gather_into_tensor", "all_reduce", "all_reduce", "all_reduce"),
        *("ppermute", "ppermute", "reduce_scatter_tensor"),
    ]


def test_misuse_leaves_the_axis_usable():
    """All devices raise before they communicate."""

    def f(x):
        raised = 0
        for misuse in (
            lambda: psum(x, "i", axis_index_groups=[[0, 1], [1, 2, 3]]),
            lambda: all_gather(x, "i", axis_index_groups=UNEVEN),
            lambda: psum_scatter(x[:2], "i"),
        ):
            try:
                misuse()
            except ValueError:  # texts are tested below
                raised += 1
        return psum(x, "i"), torch.tensor(raised)

    total, raised = on_devices(f, torch.ones(4, 4), mode=False)
    assert total.tolist() == [[4.0] * 4] * 4
    assert raised.tolist() == [3] * 4


def test_tree_travels_as_one_message_per_dtype():
    def f(x):
        return psum([x, x * 2, x.to(torch.int64), x[0]], "i")

    assert [name for name, *_ in sent(f, torch.ones(4, 3))] == ["all_reduce"] * 2


def test_every_message_is_waited_for():
    """But for those of ppermute, which waits by itself."""

    def f(x):
        y = ppermute(x, "i", RING) + psum(all_gather(x, "i").sum(0), "i", axis_index_groups=PAIRS)
        return (y + psum_scatter(all_to_all(x, "i", 0, 0), "i")).sum()

    text = tp.pmap(grad(f), "i", compile=EAGER).lower(torch.ones(4, 4)).as_text()
    begun = re.findall(r"%(\w+) : .*target=torch\.ops\._c10d_functional\.(?!wait_tensor)", text)
    assert begun == re.findall(r"wait_tensor\.default\]\(args = \(%(\w+),", text)
    assert len(begun) == 8  # and their transposes


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "kind", "text"),
    [
        (lambda x: psum(x, "j"), NameError, r"unbound axis name: j\. Bound here: 'i' \(size 4\)\."),
        (lambda x: axis_index(("i", "k")), NameError, "unbound axis name: k"),
        (lambda x: psum(x, ("i", "i")), ValueError, "repeated axis in axis_name="),
        (lambda x: psum(x, ("i", 0, -1)), ValueError, "duplicate positional axes"),
        (lambda x: psum(x, ("i", 5)), ValueError,
         "axis 5 is out of bounds for array of dimension 1"),
        (lambda x: all_gather(x, "i", axis=5), ValueError, "axis 5 is out of bounds .*dimension 2"),
        (lambda x: all_gather(x[0], "i", tiled=True), ValueError,
         "axis 0 is out of bounds for array of dimension 0"),
        (lambda x: psum(x, "i", axis_index_groups=[[0, 1]]), ValueError,
         "axis_index_groups must cover all indices exactly once"),
        (lambda x: pmax(x, "i", axis_index_groups=[[0, 1, 2], [2, 3]]), ValueError,
         "axis_index_groups must cover all indices exactly once"),
        (lambda x: psum(x, ("i", 0), axis_index_groups=PAIRS), ValueError,
         "axis_index_groups only supported for sums over just named axes"),
        (lambda x: vmap(lambda y: psum(y, ("i", "j"), axis_index_groups=PAIRS), axis_name="j")(x),
         ValueError,
         r"axis \('i', 'j'\) has the indices 0 to 15, but psum got \[\[0, 1\], \[2, 3\]\]"),
        *(
            (f, ValueError, "must all have the same size")
            for f in (
                lambda x: all_gather(x, "i", axis_index_groups=UNEVEN),
                lambda x: psum_scatter(x, "i", axis_index_groups=UNEVEN),
                lambda x: all_to_all(x, "i", 0, 0, axis_index_groups=UNEVEN),
            )
        ),
        (lambda x: psum_scatter(x[:2], "i"), ValueError,
         "reduce_scatter operand scatter dimension size 2 must match shard count 4"),
        (lambda x: psum_scatter(x[:2], "i", tiled=True), ValueError,
         "tiled reduce_scatter operand scatter dimension size 2 must be divisible by "
         "shard_count 4"),
        (lambda x: psum_scatter(x > 0, "i"), TypeError, "add does not accept dtype bool"),
        (lambda x: all_to_all(x[:2], "i", 0, 0), ValueError,
         r"all_to_all requires the size of the mapped axis axis_name to equal "
         r"x.shape\[split_axis\], but they are 4 and 2 respectively."),
        (lambda x: all_to_all(x[:2], "i", 0, 0, tiled=True), ValueError,
         r"The size of all_to_all split_axis \(2\) has to be divisible by the size of the named "
         r"axis i \(4\)"),
        (lambda x: ppermute(x, "i", [(0, 1), (2, 1)]), ValueError,
         r"ppermute sources and destinations must be unique, got \(\(0, 1\), \(2, 1\)\)\."),
        (lambda x: ppermute(x, "i", [(-1, 0), (3, 1)]), ValueError, "must be unique"),
        (lambda x: ppermute(x, "i", [(0, 4)]), IndexError, "index 4 is out of range .* size 4"),
        (lambda x: pbroadcast(x, "i", 4), IndexError, "pbroadcast: index 4 is out of range"),
        (lambda x: pshuffle(x, "i", [1, 1, 2, 3]), ValueError,
         r"`perm` does not represent a permutation: \[1, 1, 2, 3\]"),
        (lambda x: pmax(x * 1j, "i"), TypeError, "pmax does not accept dtype torch.complex64"),
        (lambda x: psum({"a": [x, "b"]}, "i"), TypeError, r"x\['a'\]\[1\] is 'b' of type str"),
    ],
)  # fmt: skip
def test_message(f, kind, text):
    with pytest.raises(kind, match=text):
        vmap(f, axis_name="i")(torch.ones(4, 4))


def test_result_is_not_a_view_of_the_operand():
    x = ROWS.clone()
    vmap(lambda x: all_gather(x, "i").mul_(0), axis_name="i", out_axes=None)(x)
    assert torch.equal(x, ROWS)


ALONE = [[0], [1], [2], [3]]
OVER_ONE = {
    "psum": lambda x, **how: psum(x, **how),
    "pmax": lambda x, **how: pmax(x, **how),
    "all_gather": lambda x, **how: all_gather(x, **how),
    "all_gather tiled": lambda x, **how: all_gather(x, tiled=True, **how),
    "psum_scatter": lambda x, **how: psum_scatter(x, tiled=True, **how),
    "all_to_all": lambda x, **how: all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **how),
}


@pytest.mark.parametrize("name", OVER_ONE)
def test_result_over_one_device_is_not_the_operand(name):
    def f(x):
        OVER_ONE[name](x, axis_name="i", axis_index_groups=ALONE).mul_(0)
        OVER_ONE[name](x, axis_name=()).mul_(0)
        ppermute(x, (), []).mul_(0)
        pbroadcast(x, (), 0).mul_(0)
        return x

    assert torch.equal(vmap(f, axis_name="i")(ROWS.clone()), ROWS)


@pytest.mark.cpu_only("NCCL may give either zero")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", [[-0.0, 0.0, 0.0, 0.0], [-0.0, -0.0, 0.0, -0.0]])
@pytest.mark.parametrize("run", [on_devices, by_vmap])
def test_signed_zeros_in_any_order(dtype, values, run):
    zeros = torch.tensor(values, dtype=dtype)
    signs = run(lambda x: torch.signbit(torch.stack([pmax(x, "i"), pmin(x, "i")])), zeros)
    assert signs.tolist() == [[False, True]] * 4
