"""Gradients taken inside a ``shard_map``, with what torch has and JAX has not.

Covers: the casts of values that meet, in writes in place, ``autograd.Function``, ``backward()``,
checkpoints, modules and optimizers, branches and loops; ``pcast``, ``mean_over``, and the warning
about gradients that are summed already.  Programs that JAX can run are compared with JAX in
tests/programs/test_jax_parity.py.

Expected values are those of the same function of whole values, in plain torch.
"""

import copy
import functools

import pytest
import torch
from _support import EAGER, WAYS
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

P = tp.P
W, X = torch.tensor(2.0), torch.arange(1.0, 5.0)
SPECS = (P(), P("x"))


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def run(f, way, *args, in_specs=SPECS, out=P):
    compile, around = WAYS[way]
    options = {"in_specs": in_specs, "out_specs": P() if out is P else out, "compile": compile}
    with around():
        found = tp.shard_map(f, mesh=tp.make_mesh((4,), ("x",)), **options)(*args)
    return pytree.tree_map(lambda x: x.cpu(), found)


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w, x):
        return w * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        w, x = ctx.saved_tensors
        return (cotangent * x).sum(), cotangent * w


def test_a_function_of_the_users_own_gives_each_devices_part(way):
    first = tp.grad(lambda w, x: (Product.apply(w, x) ** 3).sum())
    twice = tp.grad(lambda w, x: first(w, x) ** 2)
    plain = tp.grad(lambda w, x: tp.grad(lambda w: ((w * x) ** 3).sum())(w) ** 2)
    assert run(first, way, W, X).item() == 3 * W**2 * (X**3).sum()
    assert run(twice, way, W, X).item() == plain(W, X)


class Copied(torch.autograd.Function):
    """Megatron's: the copies of a weight get the sum of their gradients."""

    @staticmethod
    def forward(w):
        return w.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return tp.psum(cotangent, "x")


@pytest.mark.parametrize("compile", [EAGER, False])
@pytest.mark.parametrize("rows", ["pmap", "pmap of a pmap", "shard_map"])
def test_a_rule_that_sums_by_itself_in_a_gradient_from_outside(rows, compile):
    def f(w, x):
        return Copied.apply(w) ** 2 * x

    if rows == "pmap":
        call, given = tp.pmap(f, "x", in_axes=(None, 0), compile=compile), X
    elif rows == "shard_map":
        specs = {"in_specs": SPECS, "out_specs": P("x"), "compile": compile}
        call, given = tp.shard_map(f, mesh=tp.make_mesh((4,), ("x",)), **specs), X
    else:
        inner = tp.pmap(f, "y", in_axes=(None, 0))
        call = tp.pmap(inner, "x", in_axes=(None, 0), compile=compile)
        given = X.reshape(2, 2)
    devices = len(given)  # along x: each adds the sum of all
    slope = tp.grad(lambda w: call(w, given).sum())
    assert slope(W).item() == devices * 2 * W * X.sum()
    assert tp.grad(slope)(W).item() == devices**2 * 2 * X.sum()


def test_backward_and_checkpoints_inside(way):
    if way == "lanes":
        pytest.skip("torch.func.vmap has no backward()")

    def slope(w, x, again):
        w = w.clone().requires_grad_()

        def loss(w):
            return torch.sin(w * x).sum()

        (checkpoint(loss, w, use_reentrant=False) if again else loss(w)).backward()
        (alone,) = torch.autograd.grad(loss(w), w)
        return w.grad, alone

    expected = (torch.cos(W * X) * X).sum()
    for again in (False, True):
        found = run(functools.partial(slope, again=again), way, W, X, out=(P(), P()))
        torch.testing.assert_close(found, (expected, expected))


def test_a_module_trains_as_on_one_device(way):
    if way == "lanes":
        pytest.skip("torch.func.vmap has no backward()")
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(3, 2), torch.randn(8, 3)

    def train(x, reduce):
        own = copy.deepcopy(layer)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            reduce(own(x).square().mean()).backward()
            optimizer.step()
        return [p.detach() for p in own.parameters()]

    averaged = functools.partial(train, reduce=lambda loss: tp.pmean(loss, "x"))
    found = run(averaged, way, x, in_specs=P("x"))
    torch.testing.assert_close(found, train(x, lambda loss: loss))


def test_parameters_of_a_list_vary_each_by_itself():
    """Only ``cut`` varies after the step: the gradient of ``w`` is summed in the next one too."""

    def two_steps(w, cut, x):
        for _ in range(2):
            grads = tp.grad(lambda w, cut: (w * cut * x).sum(), (0, 1))(w, cut)
            w, cut = torch._foreach_sub([w, cut], torch._foreach_mul(list(grads), 0.1))
        return w.expand(1), cut

    cut = torch.tensor([1.0, -1.0, 0.5, 2.0])
    specs = (P(), P("x"), P("x"))
    found = run(two_steps, "graph", W, cut, X, in_specs=specs, out=P("x"))
    w, expected = two_steps(W, cut, X)
    torch.testing.assert_close(found, (w.expand(4), expected))


def test_a_buffer_without_gradient_takes_what_varies(way):
    def slope(w, x):
        def loss(w):
            buffer = torch.zeros(2, 1)
            buffer = buffer * x if way == "lanes" else buffer
            buffer[0], buffer[1] = w * x, w
            return buffer.sum()

        return tp.grad(loss)(w)

    assert run(slope, way, W, X).item() == X.sum() + 4


@pytest.mark.parametrize("write", ["index", "operator", "method", "out", "norm"])
def test_a_write_that_comes_too_late_is_refused(way, write):
    def loss(w, x, cast=False):
        own = tp.pcast(w.expand(1) * 1, "x", to="varying") if cast else w.expand(1) * 1
        if write == "index":
            own[0] = w * x[0]
        elif write == "operator":
            own *= x
        elif write == "method":
            own.mul_(x)
        elif write == "norm":
            torch.nn.functional.embedding(0 * x.long(), own[:, None], max_norm=1.0)
        else:
            torch._foreach_mul_([own], [x])
        return own.sum()

    with pytest.raises(ValueError, match=r"varies along 'x' into a tensor .* tp.pcast\(x, 'x', to"):
        run(tp.grad(loss), way, W, X)
    if write in ("operator", "method"):
        assert run(tp.grad(functools.partial(loss, cast=True)), way, W, X).item() == X.sum()


def test_a_cotangent_that_varies_more_than_its_output_is_refused(way):
    with pytest.raises(ValueError, match="a cotangent varies along 'x', but the output"):
        run(lambda w, x: torch.func.vjp(torch.sin, w)[1](x[0])[0], way, W, X)


def test_loops_cast_their_first_carry(way):
    def loss(w, x):
        return tp.scan(lambda c, _: (c * w * x[0], None), w, None, length=2)[0]

    assert run(tp.grad(loss), way, W, X).item() == 3 * W**2 * (X**2).sum()
    hessian = run(torch.func.hessian(loss), way, W, X)
    assert hessian.item() == 6 * W * (X**2).sum()


def test_a_carry_goes_on_to_vary(way):
    """As in JAX, once its body casts what it returns; without the cast JAX raises."""

    def pulled(steps, w, x):
        def total(x):
            return tp.fori_loop(0, steps, lambda _, c: tp.psum(c, "x"), x)

        result = torch.func.vjp(total, x)[1](-x)[0]
        return result

    for steps in (1, 3):
        found = run(functools.partial(pulled, steps), way, W, X, out=P("x"))
        assert found.tolist() == [-X.sum().item() * 4 ** (steps - 1)] * 4


def test_branches_vary_with_their_predicate_and_each_other(way):
    def by_device(w, x):
        return tp.cond(x[0] > 2.5, lambda w: w * 2, lambda w: w * 3, w)

    def by_weight(w, x):
        return tp.cond(w > 1.5, lambda w: w * 2, lambda w: w * x[0], w)

    assert run(tp.grad(by_device), way, W, X).item() == 10
    assert run(tp.grad(by_weight), way, W, X).item() == 8  # the result is one of each device


NOT_TAKEN = {
    "a branch": lambda w, x: tp.cond(w > 0, lambda: w * x, lambda: w),
    "a branch of rows": lambda w, x: tp.vmap(
        lambda v: tp.cond(v > 0, lambda: tp.cond(w > 0, lambda: w * x, lambda: w), lambda: w)
    )(torch.arange(2.0)).sum(),
    "a loop": lambda w, x: w * tp.while_loop(lambda c: c < 5, lambda c: c + 1, x),
    "a loop that varies later": lambda w, x: (
        w * tp.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + c[1], x), (0.0, 1.0))[0]
    ),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_the_other_branch_would_return(way, name):
    """The result is one of each device, as that of the other branch would be."""

    def loss(w, x):
        return tp.cond(w < 0, lambda w: NOT_TAKEN[name](w, x[0]), lambda w: w * 2, w)

    assert run(tp.grad(loss), way, W, X).item() == 8


def _other_collectives(name, a, b):
    is_first = int(tp.axis_index("b")) == 0
    if name == "in a branch":
        return tp.cond(a > 1, lambda b: tp.psum(b, "b") if is_first else b, lambda b: b, b)
    if name == "over the axis of the branch":
        return tp.cond(a > 1, lambda b: tp.psum(b, "a") if is_first else b, lambda b: b, b)
    assert name == "a branch of some"
    return tp.cond(a > 1, lambda b: tp.psum(b, "b"), lambda b: b, b) if is_first else b


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("in a branch", r"member 0: all_reduce.*\n.*1: the end of a br"),
        ("over the axis of the branch", r"member 0: all_reduce.*\n.*1: the end of a br"),
        ("a branch of some", r"rank 2: all_reduce.*\n.*3: return"),
    ],
)
def test_devices_of_one_branch_that_run_other_collectives(name, told, monkeypatch):
    """None waits for ever for one that is elsewhere."""
    monkeypatch.setattr(tp.config, "timeout", 60)
    mesh, specs = tp.make_mesh((2, 2), ("a", "b")), (P("a"), P("b"))

    def f(a, b):
        return _other_collectives(name, a[0], b[0]).reshape(1, 1)

    call = tp.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("a", "b"), compile=False)
    with pytest.raises(tp.CollectiveMismatch, match=told):
        call(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))


def test_a_gradient_in_a_branch_through_a_collective_before_it():
    """Only the devices that take the branch sum over the other axis."""

    def f(w, a, b):
        w = tp.pcast(w.clone().requires_grad_(), "a", to="varying")
        loss = tp.psum(w * b[0], "b") * w
        branches = lambda: torch.autograd.grad(loss, w)[0], lambda: w.detach()
        return tp.cond(a[0] > 1, *branches)[None]

    mesh, specs = tp.make_mesh((2, 2), ("a", "b")), (P(), P("a"), P("b"))
    call = tp.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("a"), compile=False)
    given = W, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert call(*given).tolist() == [2, 14 * 2]


@pytest.mark.parametrize("way", ["python", "serial"])
def test_another_branch_that_needs_values(way):
    def read(w, x):
        return w * (x if w.item() > 0 else 1)

    def loss(w, x, cast):
        branches = lambda w: read(w, x[0]), lambda w: tp.pcast(w * 2, "x" if cast else ())
        return tp.cond(w < 0, *branches, w)

    assert run(functools.partial(loss, cast=False), way, W, X).item() == 4
    assert run(tp.grad(functools.partial(loss, cast=True)), way, W, X).item() == 8
    with pytest.raises(ValueError, match=r"the branch of cond that is taken .* along 'x'.*pcast"):
        run(tp.grad(functools.partial(loss, cast=False)), way, W, X)


def test_devices_of_one_branch_sum_over_another_axis(way):
    def loss(w, a, b):
        def total(w):
            return tp.psum(w * b[0], "b") * w

        return tp.cond(a[0] > 1, total, lambda w: w * b[0], w)

    def count(w, a, b):
        return tp.while_loop(lambda c: tp.psum(c, "b") < 9, lambda c: c * tp.pmax(b[0], "b"), a[0])

    def later(w, a, b):
        def step(carry):
            _, total, count = carry
            return total, total + a[0], count + tp.psum(b[0], "b")

        return tp.while_loop(lambda c: c[0] < 6, step, (0.0, 0.0, 0.0))[2]

    compile, around = WAYS[way]
    mesh, specs = tp.make_mesh((2, 2), ("a", "b")), (P(), P("a"), P("b"))
    given = W, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for f, out, expected in (
        (lambda *xs: loss(*xs).reshape(1, 1), P("a", "b"), [[6, 8], [28, 28]]),
        (tp.grad(loss), P(), 7 + 2 * (2 * 2 * 7)),
        (tp.grad(tp.grad(loss)), P(), 2 * (2 * 7)),
        (lambda *xs: count(*xs)[None], P("a"), [16, 8]),
        (lambda *xs: later(*xs)[None], P("a"), [7 * 7, 4 * 7]),
    ):
        call = tp.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, compile=compile)
        with around():
            assert call(*given).tolist() == expected


@pytest.mark.parametrize("compile", [EAGER, False])
def test_a_branch_in_a_branch_sums_over_a_third_axis(compile, eight_devices):
    def f(x):
        total, least = lambda x: tp.psum(x, "c") + 0 * x, lambda x: x - tp.pmin(x, ("b", "c"))
        branches = total, lambda x: -total(2 * x)
        inner = functools.partial(tp.cond, tp.axis_index("b") > 0, *branches)
        return tp.cond(tp.axis_index("a") > 0, inner, least, x)

    mesh, spec = tp.make_mesh((2, 2, 2), ("a", "b", "c")), P("a", "b", "c")
    call = tp.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, compile=compile)
    expected = [[[0, 1], [2, 3]], [[-18, -18], [13, 13]]]
    assert call(torch.arange(8.0).reshape(2, 2, 2)).tolist() == expected


def test_without_a_trace_some_devices_may_reach_what_has_no_collectives():
    def f(a, b):
        if int(tp.axis_index("a")) == int(tp.axis_index("b")):
            a = tp.cond(a[0] > 1, lambda a: a * 2, lambda a: a + 4, a)
            a = tp.while_loop(lambda a: a[0] < 9, lambda a: a + 1, a)
        return a[:, None] + b

    mesh, specs = tp.make_mesh((2, 2), ("a", "b")), (P("a"), P("b"))
    call = tp.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("a", "b"), compile=False)
    given = torch.tensor([1.0, 7.0]), torch.tensor([10.0, 20.0])
    assert call(*given).tolist() == [[19.0, 21.0], [17.0, 34.0]]


def test_without_a_trace_a_branch_of_some_devices_takes_operands():
    def loss(w, x):
        return tp.cond(x[0] > 2.5, lambda: w * 2, lambda: w * 3)

    assert run(tp.grad(loss), "graph", W, X).item() == 10
    with pytest.raises(ValueError, match=r"the predicate of cond varies along 'x'.*as an operand"):
        run(tp.grad(loss), "python", W, X)


def test_branches_have_rows_where_one_of_them_has(way):
    def f(w, x):
        branches = lambda row, w: (w * 2, w * row), lambda row, w: (w.sin(), w)
        rows = tp.vmap(lambda row: tp.cond(x[0] > 2.5, *branches, row, w), out_axes=(None, 0))
        one, each = rows(torch.arange(3.0))
        return tp.psum(one + each.sum(), "x")

    expected = 2 * (2 * W + 3 * W) + 2 * (W.sin() + 3 * W)
    torch.testing.assert_close(run(f, way, W, X), expected)
    torch.testing.assert_close(run(tp.grad(f), way, W, X), 2 * (2 + 3) + 2 * (W.cos() + 3))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_rows_that_only_another_branch_has_in_each_step_of_a_loop(way, num_steps):
    def f(w, x):
        def of_row(row):
            branches = lambda w: w * row, lambda w: w * w
            return tp.psum(tp.cond(x[0] > 2.5, *branches, w), "x")

        steps = tp.scan(lambda c, _: (c, tp.vmap(of_row)(torch.arange(3.0))), w, None, num_steps)
        return steps[1]

    expected = 2 * (W * W + W * torch.arange(3.0)).expand(num_steps, 3)
    torch.testing.assert_close(run(f, way, W, X), expected)


def test_rows_of_another_branch_under_a_forward_derivative():
    def f(x):
        rows = torch.stack([x, x * 2, x - 1])
        branches = lambda row: (tp.psum(rows, "b"), row), lambda row: (torch.ones(3, 1), row)
        return tp.vmap(lambda row: tp.switch(torch.tensor(1), branches, row)[0])(rows)

    mesh = tp.make_mesh((2, 2), ("a", "b"))
    mapped = tp.shard_map(f, mesh=mesh, in_specs=P(("b", "a")), out_specs=P(None, None, "a"))
    with tp.debug.fake_pmap():
        found = torch.func.jacfwd(mapped)(X)
    assert torch.equal(found, torch.zeros(3, 3, 2, 4))


def test_a_branch_without_a_part_in_the_gradient(way):
    """All devices sum the gradient of the weight, also those that do not use it."""

    def loss(w, x):
        used = tp.cond(x[0] > 2.5, lambda w, x: w**2 * x, lambda w, x: x * 0, w, x[0])
        return tp.psum(used, "x")

    def along(w, x):
        return torch.func.jvp(lambda w: tp.grad(loss)(w, x), (w,), (w,))[1]

    def rows(w, x):
        return torch.func.vmap(lambda w: tp.grad(loss)(w, x))(torch.stack([w, w + 1]))

    each = X[2:].sum() * 2  # the second derivative
    assert run(tp.grad(loss), way, W, X).item() == each * W
    assert run(tp.grad(tp.grad(loss)), way, W, X).item() == each
    assert run(torch.func.jacrev(loss), way, W, X).item() == each * W
    assert run(along, way, W, X).item() == each * W
    assert run(rows, way, W, X).tolist() == [each * W, each * (W + 1)]


def test_a_branch_of_some_devices_returns_whole_numbers(way):
    """They have no tangents."""

    def program(w, x):
        branches = lambda w, n: (n, w * 2), lambda w, n: (n + 1, w * 3)
        count, used = tp.cond(x[0] > 2.5, *branches, w, torch.tensor(2))
        return tp.psum(count * used, "x")

    def along(w, x):
        return torch.func.jvp(lambda w: program(w, x), (w,), (w,))[1]

    def rows(w, x):
        return torch.func.vmap(lambda w: along(w, x))(torch.stack([w, w + 1]))

    slope = 2 * (2 * 2) + 2 * (3 * 3)
    assert run(tp.grad(program), way, W, X).item() == slope
    assert run(along, way, W, X).item() == slope * W
    assert run(rows, way, W, X).tolist() == [slope * W, slope * (W + 1)]


def test_a_derivative_within_a_branch_of_some_devices(way):
    def cube(x, w):
        first, second = tp.grad(lambda w: w**3), torch.func.hessian(lambda w: w**3)
        return tp.cond(x[0] > 2.5, lambda: second(w), lambda: first(w))[None]

    def product(x, w):
        branch = tp.grad(lambda w: w * x[0])
        return tp.cond(x[0] > 2.5, lambda: branch(w), lambda: w * 1)[None]

    found = run(lambda w, x: cube(x, w), way, W, X, out=P("x"))
    assert found.tolist() == [6 * W if x > 2.5 else 3 * W**2 for x in X]
    with pytest.raises(ValueError, match=r"the predicate (of cond varies|may differ) along"):
        run(lambda w, x: product(x, w), way, W, X, out=P("x"))


@pytest.mark.parametrize("source", range(4))
@pytest.mark.parametrize("way", ["graph", "python", "lanes"])
def test_a_broadcast_over_more_axes_than_its_operand_varies_along(way, source):
    """The loss is once the row of the source: its gradient is one there, and zero elsewhere."""

    def f(x):
        return tp.grad(lambda x: tp.pbroadcast(x, ("a", "b"), source).sum())(x)

    compile, around = WAYS[way]
    mesh = tp.make_mesh((2, 2), ("a", "b"))
    with around():
        got = tp.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"), compile=compile)(
            torch.ones(2)
        )
    assert got.tolist() == [float(row == source // 2) for row in range(2)]


def test_the_mean_over_an_axis(way):
    def slopes(w, x):
        own = tp.value_and_grad(lambda w: (w * x).sum(), mean_over="x")(w)
        return own, tp.grad(lambda w: tp.pmean((w * x).sum(), "x"), mean_over="x")(w)

    (value, slope), averaged = run(slopes, way, W, X)
    assert (value.item(), slope.item(), averaged.item()) == (5, 2.5, 2.5)
    cut = tp.grad(lambda x, w: tp.pmean((w * x).sum(), "x"), mean_over="x")
    own = run(lambda w, x: cut(x, w), way, W, X, out=P("x"))
    assert own.tolist() == [0.5] * 4  # the loss is its own mean
    with pytest.raises(ValueError, match=r"mean_over has 'x', but an argument of shape .1. varies"):
        run(tp.grad(lambda x, w: (w * x).sum(), mean_over="x"), way, X, W, in_specs=(P("x"), P()))


def test_a_gradient_that_is_summed_already_is_not_reduced_unseen():
    def slope(w, x):
        return tp.grad(lambda w: (w * x).sum())(w) / 2

    with pytest.warns(UserWarning, match="already summed over 'x'; psum multiplies it by 4") as log:
        assert run(lambda w, x: tp.psum(slope(w, x), "x"), "graph", W, X).item() == 20
    assert [each.filename for each in log] == [__file__]
    with pytest.warns(UserWarning, match="pmean leaves it as it is, 4 times the mean"):
        assert run(lambda w, x: tp.pmean({"w": slope(w, x)}, "x"), "graph", W, X)["w"].item() == 5
    # what varies is reduced as always
    own = tp.grad(lambda x, w: (w * x).sum())
    assert run(lambda w, x: tp.psum(own(x, w), "x"), "graph", W, X).item() == 8
