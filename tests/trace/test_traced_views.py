"""Covers: views at traced positions: writes, reads after writes, derivatives; one_hot."""

import functools

import pytest
import torch
from _support import COMPILED, EAGER, WAYS, by_rows, check_rows
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(24.0).reshape(4, 3, 2) + 1
I = torch.tensor([1, 0, 1, 0])  # noqa: E741


def stacked(f):
    """With plain torch, where ``i`` has a value, row by row."""
    return by_rows(f, X, I)


def same(f, expected=None, **options):
    """In all modes the program gives what plain torch gives."""
    check_rows(f, X, I, expected=expected, **options)


# -- writes through a view -------------------------------------------------------------------------

WRITES = {
    "an element": lambda x, i: x[i].__setitem__(1, 7.0),
    "add_": lambda x, i: x[i].add_(x[0].clone()),
    "copy_": lambda x, i: x[i].copy_(x[2]),
    "fill_": lambda x, i: x[i].fill_(3.0),
    "a column": lambda x, i: x[:, i].fill_(3.0),
    "a view in a view": lambda x, i: x[i][i % 2].add_(5.0),
    "the row of a view": lambda x, i: x.t()[i].add_(1.0),
    "views of the row": lambda x, i: [part.mul_(3.0) for part in x[i].split(1)],
    "a mask": lambda x, i: x[i].masked_fill_(x[i] > 2, 0.0),
    "detached": lambda x, i: x[i].detach().add_(3.0),
    "select": lambda x, i: x.select(0, i).add_(1.0),
    "select by name": lambda x, i: torch.select(input=x, dim=-1, index=i).mul_(2.0),
    "narrow": lambda x, i: x.narrow(0, i, 2).add_(1.0),
    "narrow by name": lambda x, i: torch.narrow(input=x, dim=0, start=i, length=2).add_(1.0),
    "a slice": lambda x, i: x[i : i + 2].mul_(2.0),
    "a slice and a number": lambda x, i: x[i : i + 2, i % 2].sub_(7.0),
    "from the end": lambda x, i: x[i - 3].neg_(),
    "bernoulli": lambda x, i: x[i].uniform_(1.0, 1.0),
}


def in_way(way, f, x, i):
    compile, around = WAYS[way]
    with around():
        return tp.pmap(f, compile=compile)(x, i).cpu()


def on_a_copy(f):
    return lambda x, i: f(x.clone(), i)


def in_vmap(way, f):
    """What the vmap of a program gives in a mapped function, for all rows."""
    function = torch.func.vmap(on_a_copy(f), randomness="different")
    return in_way(way, function, X.reshape(2, 2, 3, 2), I.reshape(2, 2)).flatten(0, 1)


PLACES = {
    "a row per device": lambda f: in_way("graph", f, X[:2], I[:2]),
    "rows": lambda f: in_way("graph", f, X, I),
    "uncompiled rows": lambda f: in_way("python", f, X, I),
    **{f"a vmap, {way}": functools.partial(in_vmap, way) for way in WAYS},
    "a vmap alone": lambda f: tp.vmap(on_a_copy(f), randomness="different")(X, I),
    "a map alone": lambda f: tp.map(lambda row: on_a_copy(f)(*row), (X, I), batch_size=3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WRITES)
def test_writes_through_a_view(name, place):
    def f(x, i):
        WRITES[name](x, i)
        return x

    got = PLACES[place](f)
    torch.testing.assert_close(got, stacked(f)[0][: len(got)])
    assert len(got) == (2 if place == "a row per device" else 4)


@pytest.mark.parametrize("way", WAYS)
def test_a_view_that_leaves_a_vmap_is_read_again_and_then_alone(way):
    def g(x, i):
        (rows, _), whole = torch.func.vmap(lambda x, i: (returned(x, i), x))(x.clone(), i)
        whole.zero_()
        return rows

    got = in_way(way, g, X.reshape(2, 2, 3, 2), I.reshape(2, 2)).flatten(0, 1)
    torch.testing.assert_close(got, stacked(returned)[0])


@pytest.mark.parametrize("way", WAYS)
def test_views_beside_a_captured_tensor_on_the_devices(way):
    """It has no memory here, and none of it is fetched."""
    captured = tp.replicate(torch.ones(2))

    def f(x, i):
        row = x[i]
        row += captured
        return x + captured

    with tp.debug.report_gathers() as gathers:
        got = in_way(way, f, X[:2].clone(), I[:2])
    assert not [gather for gather in gathers if gather.name == "memory"]
    want = X[:2].clone()
    want[range(2), I[:2]] += 1
    torch.testing.assert_close(got, want + 1)


def by_functions_that_take_where_to_write(x, i):
    torch.mul(x[0].clone(), 2, out=x[i])
    torch._foreach_add_([x[i]], 2.0)
    return x


def running_statistics_in_a_row(x, i):
    means = torch.zeros(2, 2)
    F.batch_norm(x, means[i], torch.ones(2), training=True, momentum=0.5)
    return means


@pytest.mark.parametrize("f", [by_functions_that_take_where_to_write, running_statistics_in_a_row])
def test_writes_for_which_vmap_has_no_rules(f):
    same(f, modes=(EAGER,), most=1)


def two_parts(x, i):
    torch._foreach_add_([x[i], x[1 - i]], 1.0)
    return x


def a_list(x, i):
    x[i] = [1.0, 2.0]
    return x


def one_hot(x, i):
    return torch.func.grad(lambda y: (y * F.one_hot(i.int(), 3)[:, None]).sum())(x)


REFUSED = {
    two_parts: (NotImplementedError, r"writes to several parts .* a call of its own"),
    a_list: (TypeError, "can't assign a list"),
    one_hot: (RuntimeError, r"LongTensor|int64"),
}


@pytest.mark.parametrize("f", REFUSED)
def test_what_is_refused(f):
    error, text = REFUSED[f]
    with pytest.raises(error, match=text):
        tp.pmap(f, compile=EAGER)(X[:2], I[:2])


# -- reads after a write ---------------------------------------------------------------------------


def returned(x, i):
    row, part = x[i], x[i][1:]
    x.mul_(3.0)
    return row, part


def through_another_view(x, i):
    row = x[i]
    x.view(-1)[:] = 3.0
    return row * 1


def written_in_turn(x, i):
    row = x[i]
    inner = row[i % 2]
    inner.mul_(3.0)
    row.add_(1.0)
    x[0] += row
    return inner, row, x


def kept_position(x, i):
    row = x[i]
    i.add_(1)
    row.add_(5.0)
    x[i] = row
    return x


def swapped(x, i):
    x[i], x[2] = x[2], x[i]
    return x


def without_grad(x, i):
    with torch.no_grad():
        x[i].add_(1.0)
        row = x[i]
        x.mul_(2.0)
    return row, x


def in_a_loop(x, i):
    def body(k, c):
        c = c.clone()
        row = c[k]
        c.mul_(2.0)
        row.add_(1.0)
        c[(k + 1) % 3] += row
        c[k][i] = row[i] * 3
        return c

    return tp.fori_loop(0, 3, body, x)


def out_of_a_loop(x, i):
    def body(c, row):
        c = c.clone()
        c[i].add_(row)
        y = c[i]
        c.mul_(0.5)
        return c, y

    return tp.scan(body, x, x)


def in_a_branch(x, i):
    def one(x):
        x = x.clone()
        x[i].add_(1.0)
        return x

    def other(x):
        x = x.clone()
        row = x[i]
        x.mul_(3.0)
        return x + row

    return tp.cond(x.sum() > 20, one, other, x)


def around_a_gradient(x, i):
    row = x[i]
    x.mul_(2.0)
    return torch.func.grad(lambda y: (y**2 * row).sum())(row)


class Squared(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2 * ctx.saved_tensors[0]


def around_a_function(x, i):
    def loss(x):
        x = x * 1.0
        row = x[i]
        x.mul_(2.0)
        return Squared.apply(row).sum()

    return torch.func.grad(loss)(x)


def tangents(x, i):
    def f(x):
        x = x * 1.0
        row = x[i]
        x.mul_(x.clone())
        row.add_(1)
        return x * row

    return torch.func.jvp(f, (x,), (torch.ones_like(x),))


def second_order(x, i):
    def f(x):
        x = x * 1.0
        row = x[i]
        x.mul_(x.clone())
        row[0].mul_(3.0)
        return (x**2).sum()

    return torch.func.hessian(f)(x)


@pytest.mark.parametrize(
    "f",
    [
        *(returned, through_another_view, written_in_turn, kept_position, swapped),
        *(without_grad, in_a_loop, out_of_a_loop, in_a_branch),
        *(around_a_gradient, around_a_function, tangents, second_order),
    ],
)
def test_reads_after_writes(f):
    same(f)


@pytest.mark.parametrize("name", ["an element", "copy_", "a view in a view", "a slice", "narrow"])
def test_gradients_go_through_writes(name):
    def loss(x, i):
        y = x * 1.5
        WRITES[name](y, i)
        return (y**2).sum()

    same(torch.func.grad(loss))

    def own(x, i):
        x = x.clone().requires_grad_()
        loss(x, i).backward()
        return x.grad

    def recomputed(x, i):
        return checkpoint(loss, x, i, use_reentrant=False)

    same(own, torch.func.grad(loss), modes=(EAGER,), most=1)
    same(tp.grad(recomputed), torch.func.grad(loss), modes=(EAGER,), most=1)


# -- x[i] = value ----------------------------------------------------------------------------------


def leading_ones(x, i):
    x[i] = torch.ones(1, 1, 2)
    x[i, None] = torch.full((1, 1, 2), 2.0)
    return x


def beside_other_indices(x, i):
    x[i, torch.tensor([0, 1])] = 4.0
    x[torch.tensor([2, 0]), i % 2] = torch.tensor([8.0, 9.0])
    return x, x[i, torch.tensor([1, 1])], x[torch.tensor([1, 0]), i % 2]


def in_vmaps(x, i):
    def row(r):
        r[i] = 5.0
        r[i : i + 1] *= 2
        return r

    return torch.func.vmap(row)(x.clone())


def one_by_one(x, i):
    x = x.clone()
    x[:, i] = 10.0
    return x


@pytest.mark.parametrize(
    ("f", "expected"), [(leading_ones, None), (beside_other_indices, None), (in_vmaps, one_by_one)]
)
def test_assignments(f, expected):
    same(f, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_a_mask_without_dims_is_a_mask(dtype):
    def f(x, mask):
        return x[mask]

    masks = torch.ones(2, dtype=dtype)
    with pytest.warns(UserWarning, match="running without tracing"):
        got = tp.pmap(f, compile=EAGER)(X[:2], masks)
    assert got.shape[1:] == X[0][masks[0]].shape


@pytest.mark.cpu_only("an index out of range ends the worker of a GPU")
@pytest.mark.parametrize("mode", [EAGER, COMPILED])
def test_a_position_out_of_range_raises(mode):
    for f in (lambda x, i: x[i], lambda x, i: x.narrow(0, i, 2), lambda x, i: x[i : i + 2]):
        for position in (-4, 3):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
                tp.pmap(f, compile=mode)(X[:2], torch.tensor([position, 0])).cpu()
    across = tp.pmap(lambda x, i: x[i - 2 : i], compile=mode)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        across(X[:2], I[:2]).cpu()  # torch: x[-2:0] is empty


# -- slices ----------------------------------------------------------------------------------------

SLICES = {
    "start and more": lambda x, i: x[i : i + 2],
    "a product": lambda x, i: x[i * 2 : (i + 1) * 2 - 1],
    "before the stop": lambda x, i: x[i + 1 - 1 : 1 + i, i : i + 1],
    "steps": lambda x, i: x[1 - i : 3 - i : 2],
    "from the end": lambda x, i: x[i - 3 : i - 2],
    "beside None": lambda x, i: x[None, i : i + 2, ..., 0],
    "of another dtype": lambda x, i: x[i.to(torch.int16) : i.to(torch.int16) + 1],
    "narrow": lambda x, i: x.narrow(0, i, 2),
    "two of one tensor": lambda x, i: x[i : i + 2] + x.narrow(0, i, 2) ** 2,
}


def gradient_of_cubes(f):
    return tp.grad(lambda x, i: (f(x, i) ** 3).sum())


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("how", [lambda f: f, gradient_of_cubes], ids=["values", "gradients"])
@pytest.mark.parametrize("name", SLICES)
def test_slices_of_a_known_length(name, how, count):
    f = how(SLICES[name])
    got = tp.pmap(f, compile=EAGER, fullgraph=True)(X[:count], I[:count])
    torch.testing.assert_close(got.cpu(), stacked(f)[0][:count])


def test_a_slice_of_another_length_runs_uncompiled():
    def changed(x, i):
        stop = i + 2
        i.sub_(i)
        return x[i:stop].sum()

    def changed_through_a_view(x, i):
        start = i + 1
        i.view(()).sub_(i)
        return x[start : i + 2].sum()

    def with_a_factor(x, i):
        return x[1 - i : torch.rsub(i, 2, alpha=2)].sum()

    open_end, other = lambda x, i: x[i:].sum(), lambda x, i: x[i : i * 2].sum()
    for f in (open_end, other, changed, changed_through_a_view, with_a_factor):
        with pytest.warns(UserWarning, match="running without tracing"):
            got = tp.pmap(f, compile=EAGER)(X[:2], I[:2])
        torch.testing.assert_close(got.cpu(), stacked(f)[0][:2])


def test_numbers_of_a_slice_that_wrap_around():
    x = torch.arange(400.0).reshape(2, 200)
    narrow, wide = torch.tensor([127, 3], dtype=torch.int8), torch.tensor([150, 3])
    for f, i in (
        (lambda x, i: x[i : i + 1].sum(), narrow),
        (lambda x, i: x[i : i.to(torch.int8) + 2].sum(), wide),
    ):
        with pytest.warns(UserWarning, match="running without tracing"):
            got = tp.pmap(f, compile=EAGER)(x, i)
        torch.testing.assert_close(got.cpu(), torch.stack(list(map(f, x, i))))


def test_each_device_takes_its_slice():
    def f(x):
        start = tp.axis_index("i") * 8
        return x[start : start + 8], x.narrow(0, start, 8)

    x = torch.arange(32.0)
    for part in tp.pmap(f, axis_name="i", in_axes=None, axis_size=4, compile=EAGER)(x):
        torch.testing.assert_close(part.cpu(), x.reshape(4, 8))
