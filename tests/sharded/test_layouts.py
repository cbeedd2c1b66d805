"""Covers: _layout/common_grid.py, rules of values cut along several dims or by several axes."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from _sharded_values import each, functions, nothing_gathers, numbers, on_mesh
from _support import EAGER, entries

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
    return on_mesh(value, spec, (2, 2), ("x", "y"))


def check(result, right):
    """The numbers are torch's, in the block of every device."""
    assert type(result) is tp.ShardedTensor
    assert (result.shape, result.dtype) == (right.shape, right.dtype)
    torch.testing.assert_close(result.cpu(), right)
    for shard in result.addressable_shards:
        torch.testing.assert_close(shard.data, right[shard.index])


def plain(spec):
    """A spec without None at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        del entries[-1]
    return P(*entries)


def write_to_a_view(x):
    copy = x.clone()
    copy.T.mul_(2)
    return copy


# an operation -> the spec of its result by the entries of that of x
TABLE = """
    # elementwise
    x.sin() -> P(rows, columns); x + y -> P(rows, columns); x * 2 - 1 -> P(rows, columns)
    x + Y -> P(rows, columns); x * Y[0] -> P(rows, columns); x > y -> P(rows, columns)
    torch.where(x > 0, x, y) -> P(rows, columns); x.clamp(-1, 2) -> P(rows, columns)
    x.double() -> P(rows, columns); torch.zeros_like(x) -> P(rows, columns)
    x.clone() -> P(rows, columns)
    # reductions
    x.sum() -> P(); x.sum(1) -> P(rows); x.sum(0) -> P(columns); x.sum(1, keepdim=True) -> P(rows)
    x.mean() -> P(); x.mean(0) -> P(columns); x.max() -> P(); x.amax(1) -> P(rows)
    x.amin(0) -> P(columns); (x > 4).any(0) -> P(columns); x.norm() -> P(); x.norm(dim=1) -> P(rows)
    (x / 4).prod(1) -> P(rows); x.logsumexp(1) -> P(rows)
    # products
    x @ W -> P(rows); F.linear(x, W.T, W[0]) -> P(rows); x @ W[:, 0] -> P(rows)
    W.T @ x -> P(None, columns); torch.addmm(Y[:, :4], x, W, beta=2, alpha=3) -> P(rows)
    (x * y).sum() -> P()
    # views
    x.T -> P(columns, rows); x.unsqueeze(1) -> P(rows, None, columns)
    x[:, :, None].flatten(1) -> P(rows, columns); x.view(8, 4, 2) -> P(rows, columns)
    x.reshape(4, 2, 8) -> P(rows, None, columns); x.expand(3, 8, 8) -> P(None, rows, columns)
    torch.stack([x, y]) -> P(None, rows, columns)
    # in place
    x.clone().add_(y) -> P(rows, columns); x.clone().mul_(3) -> P(rows, columns)
    x.clone().masked_fill_(y > 0, 7) -> P(rows, columns); write_to_a_view(x) -> P(rows, columns)
"""


@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("row", entries(TABLE))
def test_nothing_gathers(row, spec):
    operation, spec_of = row.split(" -> ")
    function = eval(f"lambda x, y: {operation}")
    x, y = put(X, spec), put(Y, spec)
    with tp.debug.report_gathers() as gathers:
        result = function(x, y)
        assert gathers == []
    check(result, function(X, Y))
    rows, columns = (*spec, None, None)[:2]
    expected = eval(spec_of, {"P": P, "rows": rows, "columns": columns})
    assert plain(result.sharding.spec) == plain(expected)


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
    with nothing_gathers():
        for specs in ((mine, theirs), (theirs, mine)):
            result = put(X, specs[0]) * put(Y, specs[1])
            check(result, X * Y)
            assert result.sharding.spec == expected


def test_layouts_that_do_not_agree_gather():
    for specs in ((P("x"), P("y")), (P("x"), P(None, "x")), (P(("x", "y")), P(("y", "x")))):
        with tp.debug.report_gathers() as gathers:
            result = put(X, specs[0]) + put(Y, specs[1])
        check(result, X + Y)
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
    with nothing_gathers():
        metas = x.to("meta"), torch.zeros_like(x, device="meta"), x.new_ones(3, device="meta")
        for result in metas:
            assert (type(result), result.device.type) == (torch.Tensor, "meta")
        assert x.to("meta").stride() == X.T.stride()
        tangent = torch.func.jvp(torch.func.grad(lambda x: (x * x).sum()), (x,), (x,))[1]
    check(tangent, 2 * X.T)


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "x"), P()])
@pytest.mark.parametrize(
    "reduce",
    [
        *(torch.min, torch.aminmax, lambda x: x.min(0), lambda x: x.max(0), lambda x: x.mode(0)),
        *(lambda x: x.median(0), lambda x: x.argmax(0)),
    ],
)
def test_reductions_of_nothing_raise_where_they_are_called(reduce, spec):
    """torch checks on the CPU, not on meta tensors, that there is something to choose from."""
    with pytest.raises((IndexError, RuntimeError)) as caught:
        reduce(torch.zeros(0, 8))
    with pytest.raises(caught.type, match=re.escape(str(caught.value))):
        reduce(put(torch.zeros(0, 8), spec))


def test_operands_of_two_meshes_of_the_same_devices():
    row = on_mesh(X, P("i"))
    with nothing_gathers():
        for result in (row + put(Y, P(("x", "y"))), row + put(Y, P("x"))):
            check(result, X + Y)
        check(put(X, P("x")) + row, X + X)
    assert (put(X, P(("x", "y"))) + row).sharding.mesh == grid()


@pytest.mark.parametrize("pool", [6], indirect=True)
def test_meshes_without_a_common_grid_gather(pool):
    ones = torch.ones(6, 6)
    x, y = (on_mesh(ones, ("a", "b"), shape, ("a", "b")) for shape in ((2, 3), (3, 2)))
    with tp.debug.report_gathers() as gathers:
        assert (x + y).sum() == 72
    assert len(gathers) == 1
    check(x + x, 2 * ones)


@pytest.mark.parametrize("pool", [8], indirect=True)
@pytest.mark.parametrize("spec", [P("x", "y", "z"), P(("z", "x"), None, "y"), P(None, ("y", "z"))])
def test_three_axes(spec, pool):
    value = numbers(4, 4, 4)
    x = on_mesh(value, spec, (2, 2, 2), ("x", "y", "z"))
    computed = functions("a", "a * 2; a.sum(1); a.amax((0, 2)); a.mean(); a.transpose(0, 2)")
    with nothing_gathers():
        for function in computed.values():
            check(function(x), function(value))


def test_axes_of_size_one():
    for spec in (P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y")):
        x = on_mesh(X, spec, (4, 1), ("x", "y"))
        with nothing_gathers():
            check(x + 1, X + 1)
            check(x.T, X.T)
            if spec == P("x", "y"):
                check(x.cumsum(1), X.cumsum(1))  # the columns are all on one device


def check_gradients(loss, ours, theirs):
    with tp.debug.report_gathers() as gathers:
        result = loss(*ours)
        result.backward()
        assert gathers == []
    right = loss(*theirs)
    right.backward()
    torch.testing.assert_close(result.cpu(), right)
    for mine, other in zip(ours, theirs, strict=True):
        if other.requires_grad:
            check(mine.grad, other.grad)


@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients(spec):
    def loss(x, w, b):
        return ((F.linear(x, w, b) ** 2).mean(1) + x.sum(1)).sum() / 4

    ours = [put(X, spec).requires_grad_(), *(tp.replicate(v).requires_grad_() for v in (W.T, W[0]))]
    check_gradients(loss, ours, [v.clone().requires_grad_() for v in (X, W.T, W[0])])
    assert plain(ours[0].grad.sharding.spec) == spec


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_losses_of_blocks(loss):
    ours = [put(X, P("x", "y")).requires_grad_(), put(Y, P("x", "y"))]
    check_gradients(loss, ours, [X.clone().requires_grad_(), Y])


def test_half_precision_is_rounded_once():
    halves = torch.full((8, 8), 0.1).bfloat16()
    value = put(halves, P("x", "y"))
    assert value.sum().item() == halves.float().sum().bfloat16().item()
    check(value @ W.bfloat16(), halves @ W.bfloat16())


@pytest.mark.parametrize("after", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_moves_to_every_other(before, after):
    with nothing_gathers():  # it was asked for
        moved = tp.device_put(put(X, before), tp.NamedSharding(grid(), after))
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


SUMS = """
    (x * 2).sum(); x.sum(); (x + 1).mean(); (x * 2).sum(0).sum(); (x * 2).nansum()
    F.mse_loss(x * 2, torch.ones(4, 4))
"""


@each("sum_of", "x", SUMS)
def test_a_gradient_lies_as_its_tensor_whatever_was_summed_before(sum_of):
    value = torch.arange(16.0).reshape(4, 4)
    for order in itertools.permutations([("i",), (None, "i"), ()]):
        tensors = [on_mesh(value, spec).requires_grad_() for spec in order]
        sums = [sum_of(x) for x in tensors]
        with nothing_gathers():
            sum(sums[1:], sums[0]).backward()
        for x in tensors:
            assert x.grad.sharding.spec == x.sharding.spec
