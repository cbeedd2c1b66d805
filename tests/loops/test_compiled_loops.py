"""Covers: _trace/compiled_loops.py and the code of bodies: what Inductor's code does with scans.

Bodies of other orders in memory are in JAX's programs ``me_...`` of
``programs/parity/loop_cases.json``.
"""

import pytest
import torch
from _everywhere import GRAPH, check, printed
from _support import COMPILED

import torchpmap as tp
from torchpmap._trace.boxed import boxed_artifact, boxed_body, boxed_call
from torchpmap._trace.compiled_loops import running_with, with_compiled_loops

A = torch.tensor([[2.0, -1.0, 0.5], [0.25, 1.5, -0.5]])

pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.inductor
def test_a_carry_that_does_not_change_shares_no_memory_with_the_input():
    def program(x):
        doubled = x * 2
        same, rows = tp.scan(lambda c, t: (c, c * t), doubled, torch.arange(40.0))
        doubled.add_(1)  # the compiler writes to the memory of ``doubled`` where it may
        return same + 1, doubled, rows

    rows = 2 * A[:, None] * torch.arange(40.0)[:, None]
    check(tp.pmap(program)(A), (2 * A + 1, 2 * A + 1, rows))


@pytest.mark.inductor
def test_a_carry_that_lies_in_memory_by_channels():
    """As Inductor lets bytes of four dims lie that it joins."""

    def add(c, t):
        new = torch.where((t == t) | True, c, c)
        new[None].expand(1, *c.shape)[0, :, 1].add_(1)
        return new + t, c

    def program(x):
        y = x[:, torch.tensor([1, 0, 3, 2])].clamp(-50, 50)
        return tp.scan(add, y, torch.stack([y, x, y] * 9))

    x = torch.arange(48, dtype=torch.int8).reshape(1, 2, 4, 2, 3)
    check(tp.pmap(program)(x), tp.pmap(program, compile=False)(x))


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
@pytest.mark.cpu_only("it compiles here what it traces for the devices")
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
