"""Covers: loops and branches with collectives in them, on devices, what they draw and print.

Their values are those of JAX's programs in ``programs/parity/loop_cases.json``.
"""

import dataclasses

import pytest
import torch
from _everywhere import GRAPH, check
from _support import COMPILED
from torch.func import vmap

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

A = torch.tensor([2.0, -1.0, 2.5, -0.5])


@pytest.mark.parametrize("mode", [GRAPH, False, COMPILED])
def test_gradient_inside_for_a_captured_parameter(mode):
    w = torch.tensor([1.0, -2.0], requires_grad=True)

    def loss(x):
        carry, _ = tp.scan(lambda c, t: (c * w + t * x, None), torch.ones(2), torch.arange(3.0))
        return carry.sum()

    def inside(x):
        loss(x).backward()
        return w.grad

    rows = []
    for x in A:
        w.grad = None
        ((w * w + x) * w + 2 * x).sum().backward()  # from 1 in three steps
        rows.append(w.grad)
    w.grad = None
    check(tp.pmap(inside, "i", compile=mode)(A), torch.stack(rows))
    tp.pmap(loss, "i", compile=mode)(A).sum().backward()
    check(w.grad, torch.stack(rows).sum(0))


def draws(x):
    first = torch.rand(2)
    carry, ys = tp.scan(lambda c, _: (c + torch.rand(2), torch.randn(2)), x, None, length=3)
    done = tp.while_loop(lambda s: s[1] < 2, lambda s: (s[0] + torch.rand(2), s[1] + 1), (x, 0))
    chosen = tp.cond(x.sum() > 1, lambda: torch.rand(2) + torch.rand(2), lambda: torch.rand(2))
    branches = [lambda n=n: sum(torch.rand(2) for _ in range(n)) for n in (1, 2, 3)]
    switched = tp.switch((x.sum() > 1).long(), branches)
    return first, carry, ys, done[0], chosen, switched, torch.rand(2)


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [4, 8])
def test_random_numbers_are_the_same_in_all_modes(num_rows):
    rows = torch.arange(2.0 * num_rows).reshape(num_rows, 2)
    expected, *others = in_modes(draws, rows)
    for found in others:
        check(found, expected)
    assert len(expected[2].flatten().unique()) == 6 * num_rows  # each step and row has its own


def waits(x):
    """How many draws it takes to get a number that is not below 0.5, and other draws until then."""

    def step(state):
        k, drawn = state
        return k + 1, torch.where(torch.arange(30) == k, torch.rand(()), drawn)

    return tp.while_loop(lambda s: (s[0] < 30) & (torch.rand(()) < 0.5), step, (0, torch.zeros(30)))


def in_modes(f, rows):
    """The results when compiled, uncompiled, and in this process."""
    for mode in (GRAPH, False):
        torch.manual_seed(3)
        yield tp.pmap(f, compile=mode)(rows)
    torch.manual_seed(3)
    with tp.debug.fake_pmap():
        yield tp.pmap(f)(rows)


def waits_in_vmaps(x):
    return tp.vmap(lambda _: waits(x), randomness="different")(torch.zeros(8))


@pytest.mark.long
@pytest.mark.parametrize("f", [waits, waits_in_vmaps])
def test_a_test_that_draws_gets_a_number_of_its_own_in_each_step(f):
    expected, *others = in_modes(lambda x: (*f(x), torch.rand(2)), torch.zeros(8))
    for found in others:
        check(found, expected)
    count, drawn = expected[0].cpu().flatten(), expected[1].cpu().reshape(-1, 30)
    assert 2 < len(count.unique()) < 20  # neither all the same, nor without an end
    assert (drawn != 0).sum(-1).tolist() == count.tolist()
    assert len(drawn[drawn != 0].unique()) == count.sum()


SEEDED = {
    "cond": lambda x: tp.cond(
        x > 0, lambda: (torch.manual_seed(0), torch.rand(2))[1], lambda: torch.rand(2)
    ),
    "scan": lambda x: tp.scan(lambda c, _: (torch.manual_seed(0), (c, None))[1], x, length=3)[0],
    "while_loop": lambda x: tp.while_loop(
        lambda v: v < 3, lambda v: (torch.manual_seed(0), v + 1)[1], x
    ),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_body_sets_no_seed(name, mode):
    with pytest.raises(NotImplementedError, match=rf"manual_seed in the body of a .* \({name}\)"):
        tp.pmap(SEEDED[name], compile=mode)(torch.ones(4))


DEADLOCKS = {
    "while_loop: its test": lambda x: tp.while_loop(
        lambda v: v + 0 * tp.psum(v, "i") < 3, lambda v: v + 1, x
    ),
    "while_loop": lambda x: tp.while_loop(lambda v: v < 3, lambda v: v + tp.psum(v**2, "i"), x),
    "fori_loop": lambda x: tp.fori_loop(0, x.int(), lambda _, c: tp.psum(c, "i"), x),
    "cond": lambda x: tp.cond(x > 0, lambda: tp.psum(x, "i"), lambda: x),
    "cond: in a scan": lambda x: tp.scan(
        lambda c, _: (tp.cond(c > 0, lambda: tp.psum(c, "i"), lambda: c), None), x, length=2
    )[0],
    "switch": lambda x: tp.switch((x > 0).int(), [lambda: tp.psum(x, "i"), lambda: x]),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlocks_are_found(name):
    """While tracing, in this process, without a trace, and along the rows of a vmap."""
    f, called = DEADLOCKS[name], name.partition(":")[0]
    text = rf"{called}: the predicate may differ along axis 'i'.*\(reduce it"
    with pytest.raises(ValueError, match=text):
        tp.pmap(f, "i", compile=GRAPH)(A)
    with pytest.raises(ValueError, match=text), tp.debug.fake_pmap():
        tp.pmap(f, "i")(A)
    with pytest.raises(tp.CollectiveMismatch, match="rank 1"):
        tp.pmap(f, "i", compile=False)(torch.tensor([1.0, -1.0, 5.0, 5.0]))
    for mode in (GRAPH, False):
        with pytest.raises(ValueError, match=text):
            tp.pmap(tp.vmap(f, axis_name="i"), compile=mode)(A.reshape(1, 4))


def shout(x, ordered):
    tp.debug.print("{}", x, ordered=ordered)
    return x * 2


@pytest.mark.parametrize("axis_name", ["i", None])
def test_a_print_in_a_branch_that_only_some_devices_take(axis_name, capfd):
    def program(ordered):
        return lambda x: tp.cond(x > 1, lambda x: shout(x, ordered), lambda x: x, x)

    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"cond: .* an ordered print, .* print with ordered=False"):
        tp.pmap(program(True), axis_name, compile=GRAPH)(x)
    with pytest.raises(tp.CollectiveMismatch, match="print"):
        tp.pmap(program(True), axis_name, compile=False)(x)
    for mode in (GRAPH, False):
        found = tp.pmap(program(False), axis_name, compile=mode)(x)
        assert found.tolist() == [0.0, 1.0, 4.0, 6.0]
    both = tp.pmap(lambda x: tp.cond(tp.psum(x, "i") > 1, lambda: shout(x, True), lambda: x), "i")
    capfd.readouterr()
    with tp.debug.fake_pmap():
        assert both(x).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_the_graph_does_not_grow_with_the_length_unless_steps_are_unrolled():
    def nodes(length, unroll=1):
        def program(x):
            return tp.scan(lambda c, _: (torch.sin(c), c), x, None, length=length, unroll=unroll)

        lowered = tp.pmap(program, compile=GRAPH).lower(torch.ones(1))
        return [str(node.target) for node in lowered.graph.graph.nodes]

    assert "scan" in nodes(10)
    assert len(nodes(10)) == len(nodes(1000))
    assert "scan" not in nodes(10, unroll=True)


@pytest.mark.parametrize(("length", "num_loops"), [(20, 0), (1001, 1)])
def test_a_short_scan_is_part_of_the_graph_around_it(length, num_loops):
    def program(x):
        return tp.scan(lambda c, t: (torch.sin(c) * 0.9 + t, c * 2), x, torch.arange(1.0 * length))

    compiled = {"backend": "aot_eager"}
    graph = tp.pmap(program, compile=compiled).lower(A).graph.graph
    loops = graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert len(loops) == num_loops
    check(tp.pmap(program, compile=compiled)(A), tp.pmap(program, compile=GRAPH)(A))


@pytest.mark.parametrize("length", [3, 100])
def test_scans_of_what_a_short_scan_has_stacked(length):
    rows = torch.linspace(0, 1, 8 * length).view(4, length, 2)

    def program(x):
        ys = tp.map(torch.cos, tp.map(torch.sin, x))
        return tp.psum(ys, "i"), tp.scan(lambda c, y: (c + tp.psum(y, "i"), c), ys[0], ys)

    check(
        tp.pmap(program, "i", compile={"backend": "aot_eager"})(rows),
        tp.pmap(program, "i", compile=GRAPH)(rows),
    )


@pytest.mark.parametrize("mode", [GRAPH, COMPILED])
def test_the_cost_counts_every_step(mode):
    def program(x):
        return tp.scan(lambda c, _: (tp.psum(torch.outer(c, c) @ c, "i"), None), x, length=5)[0]

    cost = tp.pmap(program, "i", compile=mode).lower(torch.ones(4, 3)).cost()
    assert cost.flops == 5 * 2 * 3 * 3
    assert [each.num_bytes * each.times for each in cost.collectives] in ([12 * 5], [12] * 5)
    assert cost.collective_bytes == 12 * 5


def test_a_backward_pass_stores_no_sums_of_each_step():
    """The gradient of w is summed up over the steps; what each step adds to it is not wanted."""

    def held(length):
        def loss(w, x):
            return tp.scan(lambda c, _: (torch.tanh(w @ c), None), x, None, length=length)[0].sum()

        f = tp.pmap(tp.grad(loss), "i", in_axes=(None, 0), compile=GRAPH)
        return tp.debug.cost(f, torch.empty(32, 32), torch.empty(4, 32)).peak_bytes

    carry = 32 * 4  # it is stored, and so is the order from the last step to the first
    assert held(20) - held(10) <= 10 * 2 * carry


def test_unread_outputs_of_a_scan_are_not_computed():
    def f(x, ys):
        def inner(c, y):
            return c * y, (c.sin(), c.cos())

        def step(c, _):
            c, (sines, _) = tp.scan(inner, c, ys)
            return c, (sines.sum(), sines)

        c, (sums, _) = tp.scan(step, x, None, length=3)
        return c, sums

    mapped = tp.pmap(f, in_axes=(0, None), compile=GRAPH)
    x, ys = torch.tensor([1.0, 0.5, 2.0, -1.0]), torch.tensor([0.9, 1.1])
    modules = mapped.lower(x, ys).graph.modules()
    text = "".join(str(each.graph) for each in modules if isinstance(each, torch.fx.GraphModule))
    assert "aten.sin.default" in text
    assert "aten.cos.default" not in text
    check(mapped(x, ys), tuple(vmap(f, (0, None))(x, ys)))


def test_a_carry_of_a_class_that_workers_do_not_know(mode):
    @dataclasses.dataclass
    class State:
        total: torch.Tensor

        def plus(self, x):
            return State(self.total + x)

    torch.utils._pytree.register_dataclass(State)
    x = torch.arange(24.0).reshape(4, 2, 3)

    def program(x):
        return tp.scan(lambda c, row: (c.plus(row), c.total), State(x[0]), x)[0].total

    for _ in range(2):  # also once it is known
        found = tp.pmap(lambda x: program(x), compile=mode)(x)
        assert torch.equal(found.cpu(), x[:, 0] + x.sum(1))


def test_a_constant_of_an_inner_gradient_in_a_loop_under_an_outer_one():
    def inner(x):
        factor = torch.tensor(1) + 2
        return tp.scan(lambda c, _: (c * c * factor, None), x, None, length=2)[0].sum()

    f = tp.pmap(lambda x: torch.func.grad(inner)(x), compile=GRAPH, fullgraph=True)
    # inner is 27 x^4, its derivative 108 x^3, and that one's 324 x^2
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).sum())(x).cpu(), 324 * x**2)
