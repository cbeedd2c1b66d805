"""Covers: _layout/common_grid.py, and _sharded/rules, graphs and blocks for values that are cut
along several dims, or along a dim by several axes.

A table of operations and layouts: the numbers are those of plain torch, on every device, and
nothing gathers.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from _sharded_values import numbers
from _support import EAGER

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

SHAPE = (8, 8)
LAYOUTS = {
    "rows of x": P("x"),
    "blocks": P("x", "y"),
    "rows of both": P(("x", "y")),
    "rows of both, swapped": P(("y", "x")),
    "blocks, swapped": P("y", "x"),
    "columns of x": P(None, "x"),
    "columns of both": P(None, ("x", "y")),
    "whole": P(),
}
X = numbers(*SHAPE)
Y = numbers(*SHAPE).flip(0) + 0.5
W = numbers(8, 4)


def grid():
    return tp.make_mesh((2, 2), ("x", "y"))


def put(value, spec):
    return tp.device_put(value, tp.NamedSharding(grid(), spec))


def check(result, right):
    """The numbers are torch's, in the block of every device."""
    assert type(result) is tp.ShardedTensor
    assert (result.shape, result.dtype) == (right.shape, right.dtype)
    torch.testing.assert_close(result.cpu(), right)
    for shard in result.addressable_shards:
        torch.testing.assert_close(shard.data, right[shard.index])


def first_axes(spec):
    """The entries of a spec for two dims."""
    return (*spec, None, None)[:2]


def same(rows, columns):
    return P(rows, columns)


def of_rows(rows, _):
    return P(rows)


def of_columns(_, columns):
    return P(columns)


def turned(rows, columns):
    return P(columns, rows)


def whole(*_):
    return P()


def plain(spec):
    """A spec without None at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        del entries[-1]
    return P(*entries)


# name -> the operation on (x, y), and the spec of its result by those of the rows and columns of x
OPERATIONS = {
    # elementwise
    "sin": (lambda x, y: x.sin(), same),
    "add": (lambda x, y: x + y, same),
    "add number": (lambda x, y: x * 2 - 1, same),
    "add host": (lambda x, y: x + Y, same),
    "add host row": (lambda x, y: x * Y[0], same),
    "gt": (lambda x, y: x > y, same),
    "where": (lambda x, y: torch.where(x > 0, x, y), same),
    "clamp": (lambda x, y: x.clamp(-1, 2), same),
    "double": (lambda x, y: x.double(), same),
    "zeros_like": (lambda x, y: torch.zeros_like(x), same),
    "clone": (lambda x, y: x.clone(), same),
    # reductions
    "sum": (lambda x, y: x.sum(), whole),
    "sum of rows": (lambda x, y: x.sum(1), of_rows),
    "sum of columns": (lambda x, y: x.sum(0), of_columns),
    "sum keepdim": (lambda x, y: x.sum(1, keepdim=True), of_rows),
    "mean": (lambda x, y: x.mean(), whole),
    "mean of columns": (lambda x, y: x.mean(0), of_columns),
    "max": (lambda x, y: x.max(), whole),
    "amax of rows": (lambda x, y: x.amax(1), of_rows),
    "amin of columns": (lambda x, y: x.amin(0), of_columns),
    "any": (lambda x, y: (x > 4).any(0), of_columns),
    "norm": (lambda x, y: x.norm(), whole),
    "norm of rows": (lambda x, y: x.norm(dim=1), of_rows),
    "prod": (lambda x, y: (x / 4).prod(1), of_rows),
    "logsumexp": (lambda x, y: x.logsumexp(1), of_rows),
    # products
    "matmul": (lambda x, y: x @ W, of_rows),
    "linear": (lambda x, y: F.linear(x, W.T, W[0]), of_rows),
    "mv": (lambda x, y: x @ W[:, 0], of_rows),
    "matmul from the left": (lambda x, y: W.T @ x, lambda _, columns: P(None, columns)),
    "addmm": (lambda x, y: torch.addmm(Y[:, :4], x, W, beta=2, alpha=3), of_rows),
    "product of products": (lambda x, y: (x * y).sum(), whole),
    # views
    "transpose": (lambda x, y: x.T, turned),
    "unsqueeze": (lambda x, y: x.unsqueeze(1), lambda rows, columns: P(rows, None, columns)),
    "flatten": (lambda x, y: x[:, :, None].flatten(1), same),
    "unflatten": (lambda x, y: x.view(8, 4, 2), same),
    "reshape": (lambda x, y: x.reshape(4, 2, 8), lambda rows, columns: P(rows, None, columns)),
    "expand": (lambda x, y: x.expand(3, 8, 8), lambda *entries: P(None, *entries)),
    "stack": (lambda x, y: torch.stack([x, y]), lambda *entries: P(None, *entries)),
    # in place
    "add_": (lambda x, y: x.clone().add_(y), same),
    "mul_ number": (lambda x, y: x.clone().mul_(3), same),
    "masked_fill_": (lambda x, y: x.clone().masked_fill_(y > 0, 7), same),
    "write to a view": (lambda x, y: write(x), same),
}  # fmt: skip


def write(x):
    copy = x.clone()
    copy.T.mul_(2)
    return copy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_gathers(name, spec):
    function, of = OPERATIONS[name]
    if name == "unflatten" and spec == P(None, ("x", "y")):
        of = lambda *entries: P(*entries)  # noqa: E731
    x, y = put(X, spec), put(Y, spec)
    with tp.debug.report_gathers() as gathers:
        result = function(x, y)
        assert gathers == []
    check(result, function(X, Y))
    assert plain(result.sharding.spec) == plain(of(*first_axes(spec)))


# Two operands in two layouts that agree: the part that a device lacks is cut from what it has.
MIXED = {
    "rows by blocks": (P("x"), P("x", "y"), P("x", "y")),
    "columns by blocks": (P(None, "y"), P("x", "y"), P("x", "y")),
    "rows and columns": (P("x"), P(None, "y"), P("x", "y")),
    "rows by rows of both": (P("x"), P(("x", "y")), P(("x", "y"))),
    "whole by blocks": (P(), P("y", "x"), P("y", "x")),
}


@pytest.mark.parametrize(("mine", "theirs", "expected"), MIXED.values(), ids=MIXED)
def test_layouts_that_agree(mine, theirs, expected):
    with tp.debug.report_gathers() as gathers:
        for specs in ((mine, theirs), (theirs, mine)):
            result = put(X, specs[0]) * put(Y, specs[1])
            check(result, X * Y)
            assert result.sharding.spec == expected
    assert gathers == []


def test_layouts_that_do_not_agree_gather():
    for specs in ((P("x"), P("y")), (P("x"), P(None, "x")), (P(("x", "y")), P(("y", "x")))):
        with tp.debug.report_gathers() as gathers:
            result = put(X, specs[0]) + put(Y, specs[1])
        torch.testing.assert_close(torch.as_tensor(result), X + Y)
        assert [gather.name for gather in gathers] == ["aten.add.Tensor"]


def test_a_write_keeps_the_layout_of_its_target():
    x, y = put(X, P("x")), put(Y, P("x", "y"))
    y += x
    assert y.sharding.spec == P("x", "y")
    check(y, X + Y)
    with tp.debug.report_gathers() as gathers:
        x += y  # each device would need the columns of another
    assert len(gathers) == 1
    assert x.sharding.spec == P("x")
    check(x, X + X + Y)


@pytest.mark.parametrize("spec", [P("x", "y"), P()])
def test_nothing_is_fetched_for_the_meta_device(spec):
    x = put(X, spec).T
    with tp.debug.report_gathers() as gathers:
        for result in (
            x.to("meta"),
            torch.zeros_like(x, device="meta"),
            x.new_ones(3, device="meta"),
        ):
            assert (type(result), result.device.type) == (torch.Tensor, "meta")
        assert x.to("meta").stride() == X.T.stride()
        tangent = torch.func.jvp(torch.func.grad(lambda x: (x * x).sum()), (x,), (x,))[1]
    assert gathers == []
    check(tangent, 2 * X.T)


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "x"), P()])
@pytest.mark.parametrize(
    "reduce",
    [
        torch.min,
        torch.aminmax,
        lambda x: x.min(0),
        lambda x: x.max(0),
        lambda x: x.mode(0),
        lambda x: x.median(0),
        lambda x: x.argmax(0),
    ],
)
def test_reductions_of_nothing_raise_where_they_are_called(reduce, spec):
    """torch checks on the CPU, not on meta tensors, that there is something to choose from."""
    with pytest.raises((IndexError, RuntimeError)) as caught:
        reduce(torch.zeros(0, 8))
    with pytest.raises(caught.type, match=re.escape(str(caught.value))):
        reduce(put(torch.zeros(0, 8), spec))


def test_operands_of_two_meshes_of_the_same_devices():
    row = tp.device_put(X, tp.NamedSharding(tp.make_mesh((4,), ("i",)), P("i")))
    with tp.debug.report_gathers() as gathers:
        for result in (row + put(Y, P(("x", "y"))), row + put(Y, P("x"))):
            check(result, X + Y)
        check(put(X, P("x")) + row, X + X)
    assert gathers == []
    assert (put(X, P(("x", "y"))) + row).sharding.mesh == grid()


def test_meshes_without_a_common_grid_gather():
    tp.init(num_devices=6)
    try:
        meshes = [tp.make_mesh(shape, ("a", "b")) for shape in ((2, 3), (3, 2))]
        x, y = (tp.device_put(torch.ones(6, 6), tp.NamedSharding(m, P("a", "b"))) for m in meshes)
        with tp.debug.report_gathers() as gathers:
            assert (x + y).sum() == 72
        assert len(gathers) == 1
        check(x + x, torch.full((6, 6), 2.0))
    finally:
        tp.init(num_devices=4)


def test_three_axes():
    tp.init(num_devices=8)
    try:
        mesh = tp.make_mesh((2, 2, 2), ("x", "y", "z"))
        value = numbers(4, 4, 4)
        for spec in (P("x", "y", "z"), P(("z", "x"), None, "y"), P(None, ("y", "z"))):
            a = tp.device_put(value, tp.NamedSharding(mesh, spec))
            with tp.debug.report_gathers() as gathers:
                results = (a * 2, a.sum(1), a.amax((0, 2)), a.mean(), a.transpose(0, 2))
            assert gathers == []
            b = value
            right = (b * 2, b.sum(1), b.amax((0, 2)), b.mean(), b.transpose(0, 2))
            for result, wanted in zip(results, right, strict=True):
                check(result, wanted)
    finally:
        tp.init(num_devices=4)


def test_axes_of_size_one():
    mesh = tp.make_mesh((4, 1), ("x", "y"))
    for spec in (P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y")):
        a = tp.device_put(X, tp.NamedSharding(mesh, spec))
        with tp.debug.report_gathers() as gathers:
            check(a + 1, X + 1)
            check(a.T, X.T)
        assert gathers == []
    a = tp.device_put(X, tp.NamedSharding(mesh, P("x", "y")))
    with tp.debug.report_gathers() as gathers:
        check(a.cumsum(1), X.cumsum(1))  # the columns are all on one device
    assert gathers == []


@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients(spec):
    def loss(x, w, b):
        return ((F.linear(x, w, b) ** 2).mean(1) + x.sum(1)).sum() / 4

    ours = [put(X, spec).requires_grad_(), *(tp.replicate(v).requires_grad_() for v in (W.T, W[0]))]
    theirs = [v.clone().requires_grad_() for v in (X, W.T, W[0])]
    with tp.debug.report_gathers() as gathers:
        loss(*ours).backward()
        assert gathers == []
    loss(*theirs).backward()
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), right.grad)
    assert plain(ours[0].grad.sharding.spec) == spec


def test_half_precision_is_rounded_once():
    halves = torch.full((8, 8), 0.1).bfloat16()
    value = put(halves, P("x", "y"))
    assert value.sum().item() == halves.float().sum().bfloat16().item()
    check(value @ W.bfloat16(), halves @ W.bfloat16())


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss"])
def test_losses_of_blocks(name):
    function = getattr(F, name)
    x, y = put(X, P("x", "y")).requires_grad_(), put(Y, P("x", "y"))
    here = X.clone().requires_grad_()
    with tp.debug.report_gathers() as gathers:
        loss = function(x, y)
        loss.backward()
        assert gathers == []
    right = function(here, Y)
    right.backward()
    torch.testing.assert_close(loss.cpu(), right)
    check(x.grad, here.grad)


# Moves (of several processes: test_torchrun_layouts.py) -------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_moves_to_every_other(before, after):
    with tp.debug.report_gathers() as gathers:
        moved = tp.device_put(put(X, before), tp.NamedSharding(grid(), after))
    assert gathers == []  # it was asked for
    check(moved, X)
    assert plain(moved.sharding.spec) == after


def test_an_argument_that_is_moved_is_reported():
    double = tp.shard_map(
        lambda x: x * 2, mesh=grid(), in_specs=P("x", "y"), out_specs=P("x"), compile=EAGER,
        check_vma=False,
    )  # fmt: skip
    with tp.debug.report_gathers() as gathers:
        double(put(X, P(None, "x")))
        assert [(gather.name, gather.num_bytes) for gather in gathers] == [("move", X.nbytes)]
        assert gathers[0].where.startswith(__file__)
        gathers.clear()
        double(put(X, P("x", "y")))
        double(X)
    assert gathers == []


SUMS = {
    "sum": lambda x: (x * 2).sum(),
    "of the tensor itself": lambda x: x.sum(),
    "mean": lambda x: (x + 1).mean(),
    "of one dim": lambda x: (x * 2).sum(0).sum(),
    "nansum": lambda x: (x * 2).nansum(),
    "loss": lambda x: torch.nn.functional.mse_loss(x * 2, torch.ones(4, 4)),
}


@pytest.mark.parametrize("sum_of", SUMS.values(), ids=SUMS)
def test_a_gradient_lies_as_its_tensor_whatever_was_summed_before(sum_of):
    value = torch.arange(16.0).reshape(4, 4)
    mesh = tp.make_mesh((4,), ("i",), devices=tp.devices())
    for order in itertools.permutations([("i",), (None, "i"), ()]):
        tensors = [
            tp.device_put(value, tp.NamedSharding(mesh, tp.P(*spec))).requires_grad_()
            for spec in order
        ]
        sums = [sum_of(x) for x in tensors]
        with tp.debug.report_gathers() as gathers:
            sum(sums[1:], sums[0]).backward()
        assert not gathers
        for x in tensors:
            assert x.grad.sharding.spec == x.sharding.spec
