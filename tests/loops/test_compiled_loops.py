"""Covers: _trace/compiled_loops.py and the code of bodies: what Inductor's code does with scans."""

import pytest
import torch
from _plain import GRAPH, check, printed
from _support import COMPILED

import torchpmap as tp
from torchpmap._trace.boxed import boxed_artifact, boxed_body, boxed_call
from torchpmap._trace.compiled_loops import running_with, with_compiled_loops

A = torch.tensor([[2.0, -1.0, 0.5], [0.25, 1.5, -0.5]])

pytestmark = pytest.mark.usefixtures("pool")


def both(program, *args):
    check(tp.pmap(program)(*args), tp.pmap(program, compile=False)(*args))


@pytest.mark.inductor
def test_scans_in_scans_branches_and_while_loops():
    def halves(x, n):
        return tp.scan(lambda c, t: (c * 0.5 + t, c), x, torch.arange(float(n)))

    def program(x):
        def step(c, t):
            inner, rows = halves(c, 3)
            more = tp.cond(t > 1, lambda v: halves(v, 2)[0], lambda v: v * 2, inner)
            return more, rows.sum()

        grown = tp.while_loop(lambda s: s.sum() < 30, lambda s: halves(s.abs() + 30, 2)[0], x)
        return tp.scan(step, x, torch.arange(4.0)), grown

    both(program, A)


@pytest.mark.parametrize("mode", [COMPILED, GRAPH])
def test_a_body_reads_what_lies_in_another_order_in_memory(mode):
    """Which reshapes are views depends on the order, and operands are contiguous."""
    orders = {
        "transposed": lambda x: x.t(),
        "with gaps": lambda x: x.t()[:2, ::2],
        "expanded": lambda x: x.t().expand(2, 3, 2),
    }
    uses = {
        "scan": lambda y, use: tp.scan(lambda c, t: (c * t + use(y), None), use(y), A[0])[0],
        "while": lambda y, use: tp.while_loop(
            lambda c: c.sum() < 9, lambda c: c.abs() + 1 + use(y).abs(), use(y)
        ),
        "cond": lambda y, use: tp.cond(y.sum() > 0, lambda c: c + use(y), lambda c: c, use(y)),
    }

    def program(x):
        x = torch.stack([x, x * 2])
        return {
            (order, loop): uses[loop](orders[order](x), lambda y: y.transpose(-1, -2).reshape(-1))
            for order in orders
            for loop in uses
        }

    found = tp.pmap(program, compile=mode)(A)
    for k, row in enumerate(A):
        for name, value in program(row).items():
            torch.testing.assert_close(found[name][k].cpu(), value)


@pytest.mark.parametrize("mode", [COMPILED, GRAPH])
def test_a_branch_in_a_derivative_in_a_body_reads_it_too(mode):
    """A branch under a derivative is traced twice, and what the first trace read is kept."""

    def factors(x):
        return torch.stack([x, x * 2]).t()

    def program(x):
        y = factors(x)

        def slope(c):
            def f(c):
                return tp.cond(c.sum() > 0, lambda c: c * y.sum(0), torch.abs, c)

            return torch.func.jvp(f, (c,), (c,))[1]

        scanned, _ = tp.scan(lambda c, row: (slope(c) + row, None), x[:2], x)
        return scanned, tp.cond(x.sum() > 0, slope, torch.neg, x[:2])

    def slope(x, c):
        return c * factors(x).sum(0) if c.sum() > 0 else c.abs()

    expected = []
    for x in A:
        c = x[:2]
        for row in x:
            c = slope(x, c) + row
        expected.append((c, slope(x, x[:2]) if x.sum() > 0 else -x[:2]))
    found = tp.pmap(program, compile=mode)(A)
    check(found, [torch.stack(values) for values in zip(*expected, strict=True)])


@pytest.mark.inductor
def test_a_carry_that_does_not_change_shares_no_memory_with_the_input():
    def program(x):
        doubled = x * 2
        same, rows = tp.scan(lambda c, t: (c, c * t), doubled, torch.arange(40.0))
        doubled.add_(1)  # the compiler writes to the memory of ``doubled`` where it may
        return same + 1, doubled, rows

    both(program, A)


@pytest.mark.inductor
def test_two_loops_of_equal_text_around_other_bodies():
    """Inductor caches the code around a loop by its text."""
    for rows in (lambda c: c, lambda c: c[:2], lambda c: c.to(torch.int32)):
        both(lambda x, rows=rows: tp.scan(lambda c, _: (c * 0.5, rows(c)), x, None, length=7), A)


OTHER = {"backend": "aot_eager"}


def say(i, x):
    tp.debug.print("{}", i)
    return x.mul_(2)


IN_BRANCHES = {
    "while_loop": lambda x: tp.while_loop(lambda x: x.sum() < 5, lambda x: say(0, x), x),
    "cond": lambda x: tp.cond(x.sum() > 0, lambda x: say(0, x), torch.sin, x),
    "scan in a cond": lambda x: tp.cond(
        x.sum() > 0, lambda x: tp.fori_loop(0, 9, say, x), torch.sin, x
    ),
    "cond in a scan": lambda x: tp.scan(
        lambda c, _: (tp.cond(c.sum() > 0, lambda x: say(0, x), torch.sin, c), None), x, length=9
    )[0],
}


@pytest.mark.parametrize("mode", [OTHER, COMPILED])
@pytest.mark.parametrize("name", IN_BRANCHES)
def test_what_a_back_end_cannot_print_is_an_error(name, mode):
    with pytest.raises(NotImplementedError, match="cannot print or check"):
        tp.pmap(IN_BRANCHES[name], compile=mode)(A[:1])


def test_effects_in_scans_are_an_error_with_other_back_ends():
    with pytest.raises(NotImplementedError, match=r"'aot_eager' cannot print .* in loops"):
        tp.pmap(lambda x: tp.fori_loop(0, 100, say, x), compile=OTHER)(A)
    found = tp.pmap(lambda x: tp.fori_loop(0, 100, lambda i, x: x.mul_(1) + i, x), compile=OTHER)(A)
    check(found, A + 4950)


@pytest.mark.parametrize("mode", [GRAPH, COMPILED, False])
@pytest.mark.parametrize("length", [1, 3, 100])
def test_a_map_without_results(mode, length, capfd):
    def program(xs):
        tp.map(lambda x: tp.debug.print("{}", x), xs)
        return xs, tp.map(lambda x: None, xs)

    xs = torch.arange(float(length))[None]
    found, nothing = tp.pmap(program, compile=mode)(xs)
    assert nothing is None
    assert torch.equal(found.cpu(), xs)
    lines = printed(capfd, lambda lines: len(lines) >= length)
    assert lines == [f"[0] {k}.0" for k in range(length)]


@pytest.mark.parametrize("mode", [GRAPH, COMPILED, False])
def test_a_loop_that_only_prints(mode, capfd):
    def program(x):
        def say(i, x):
            tp.debug.print("step {} of {}", i, tp.axis_index("i"))
            return x

        tp.debug.print("before")
        tp.fori_loop(0, 3, say, x)
        tp.debug.print("behind")
        return x

    tp.block_until_ready(tp.pmap(program, "i", compile=mode)(A[:1]))
    steps = [f"[i=0] step {k} of 0" for k in range(3)]
    assert capfd.readouterr().out.splitlines() == ["[i=0] before", *steps, "[i=0] behind"]


@pytest.mark.inductor
@pytest.mark.always
def test_the_gradient_of_a_scan_in_a_scan_from_outside():
    def f(x):
        def outer(c, _):
            return tp.scan(lambda d, _: (d * 0.5 + 1, None), c, None, length=100)[0], None

        return tp.scan(outer, x, None, length=3)[0]

    x = torch.arange(2.0).requires_grad_()
    tp.pmap(f)(x).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0]


def elementwise(x):
    return tp.scan(lambda c, t: (c * 0.5 + t, c.sin()), x, torch.linspace(0, 1, 59))


def products(x):
    return tp.scan(lambda c, t: (c @ torch.eye(3) + t, c.sin()), x, torch.linspace(0, 1, 60))


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        (elementwise, [(), (26,)]),  # of three operations each; 7 steps are left over
        (products, [(12,)]),  # of six; that it calls a library is known, and no step is left over
    ],
)
def test_steps_that_cpp_cannot_repeat_run_in_chunks(program, sizes):
    graph = tp.pmap(program, compile=GRAPH).lower(A).graph
    found = []

    def compile_body(graph, inputs, num_results):
        found.append(inputs[1].shape)
        return boxed_call(graph.forward)

    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fakes = [torch.empty(1, 3)]
    changed, loops = with_compiled_loops(graph, mode, fakes, compile_body, in_chunks=True)
    (loop,) = loops
    assert found == sizes
    assert loop.size == sizes[-1][0]
    run = running_with(boxed_call(changed.forward), loops)
    check(list(run([A[:1].clone()])), [y[None] for y in program(A[0])])


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_body_is_called_without_the_code_around_it():
    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: (x * 2 + 1,))(torch.ones(3))
    artifact = standalone_compile(graph, [torch.ones(3)], dynamic_shapes="from_example_inputs")
    body = boxed_body(artifact, 1)
    assert body != boxed_artifact(artifact)
    assert body([torch.ones(3)])[0].tolist() == [3.0, 3.0, 3.0]
    assert boxed_body(artifact, 2) == boxed_artifact(artifact)
