"""Covers: _plan/cost.py, through debug.cost, with numbers worked out by hand, and _plan/stages.py:
what a mapped call will do, before it does it.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from _support import DEVICE, EAGER

import torchpmap as tp
from torchpmap._base.devices import PLATFORMS

pytestmark = pytest.mark.usefixtures("pool")

X = torch.ones(4)
IN_ORDER = PLATFORMS[DEVICE].bucket_bytes is None
"""Whether sums stay where they are: else they begin early, and share messages."""


def cost(f, *shapes, **options):
    """Of one row on each of four devices."""
    args = [torch.empty(4, *shape, device="meta") for shape in shapes]
    return tp.debug.cost(tp.pmap(f, "i", compile=EAGER, **options), *args)


# flops -------------------------------------------------------------------------------------------

B, H, S, T, D, E = 2, 3, 5, 7, 16, 8
SCORES, MIXED = 2 * B * H * S * T * D, 2 * B * H * S * T * E


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def mlp(w1, w2, x):
    return (torch.relu(x @ w1) @ w2).sum()


def attention_backward(q, k, v):
    """Scores again, then the gradients of values, mixing, queries and keys."""
    return tp.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))(q, k, v)


def branching(x):
    x = x @ x
    return tp.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x @ x, x)


FLOPS = {
    "matrices": (lambda a, b: a @ b, [(5, 6), (6, 7)], 2 * 5 * 6 * 7),
    "a vector": (lambda a, b: a @ b, [(5, 6), (6,)], 2 * 5 * 6),
    "vectors": (lambda a, b: a @ b, [(6,), (6,)], 2 * 6),
    "addmm": (lambda a, b: torch.addmm(a[0], a, b), [(5, 5), (5, 5)], 2 * 5 * 5 * 5),
    "einsum": (
        lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(3, 5, 6), (3, 6, 7)],
        3 * 2 * 5 * 6 * 7),
    "convolution": (
        lambda x, w: F.conv2d(x, w), [(2, 3, 10, 10), (8, 3, 3, 3)], 2 * 2 * 8 * 8 * 8 * 3 * 9),
    "attention": (attention, [(B, H, S, D), (B, H, T, D), (B, H, T, E)], SCORES + MIXED),
    "attention backward": (attention_backward, [(B, H, S, D)] * 3, (2 + 5) * 2 * B * H * S * S * D),
    "two layers": (mlp, [(6, 9), (9, 4), (5, 6)], 2 * 5 * 6 * 9 + 2 * 5 * 9 * 4),
    "their gradient": (  # two products per layer in the backward pass, but none for x
        tp.grad(mlp, (0, 1)), [(6, 9), (9, 4), (5, 6)],
        2 * (2 * 5 * 6 * 9) + 3 * (2 * 5 * 9 * 4)),
    "the larger of two branches": (branching, [(5, 5)], (1 + 2) * 2 * 5**3),
    "a sum": (lambda x: (x * x).sum(), [(100,)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOPS)
def test_flops(name):
    f, shapes, flops = FLOPS[name]
    found = cost(f, *shapes)
    assert found.flops == flops
    assert found.uncounted == ()


def test_rows_on_one_device_count_together():
    f = tp.pmap(lambda w, x: x @ w, in_axes=(None, 0), compile=EAGER)
    w, x = torch.empty(6, 7, device="meta"), torch.empty(12, 5, 6, device="meta")
    assert tp.debug.cost(f, w, x).flops == 3 * 2 * 5 * 6 * 7


def test_captured_tensors_are_arguments():
    found = cost(torch.nn.Linear(6, 7), (5, 6))
    assert found.flops == 2 * 5 * 6 * 7
    assert found.argument_bytes == 4 * (6 * 7 + 7 + 5 * 6)


@pytest.mark.cpu_only("on GPUs a recurrent layer is plain operations, which are counted")
def test_operations_that_cannot_be_counted_are_named():
    @torch.library.custom_op("counted::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    found = cost(lambda x: twice(x) @ x, (5, 5))
    assert (found.flops, found.uncounted) == (2 * 5**3, ("counted.twice",))
    assert str(found).splitlines()[-1] == "flops not counted: counted.twice"
    in_a_loop = cost(lambda x: tp.fori_loop(0, 700, lambda _, x: twice(x), x), (5, 5))
    assert in_a_loop.uncounted == ("counted.twice",)
    assert "rnn" in "".join(cost(torch.nn.LSTM(3, 4), (5, 2, 3)).uncounted)


def test_collectives():
    def step(x):
        tp.debug.print("{}", x[0])  # no collective of the function
        return tp.psum(x, "i"), tp.all_gather(x.half(), "i"), tp.pshuffle(x[:2], "i", [1, 0, 3, 2])

    found = cost(step, (10,))
    names = [(each.name, each.num_bytes, each.axis) for each in found.collectives]
    expected = {("all_reduce", 40, "i"), ("all_gather_into_tensor", 20, "i"), ("ppermute", 8, "i")}
    assert expected <= set(names)
    assert "debug_print" not in {name for name, *_ in names}
    assert found.collective_bytes == sum(size for _, size, _ in names)


def test_collectives_of_several_axes():
    def step(x):
        groups = [[0], [1]]
        return (
            tp.psum(x, "rows"),
            tp.pmax(x, "cols"),
            tp.psum(x[:2], ("rows", "cols")),
            tp.psum(x[:3], "cols", axis_index_groups=[[1, 0]]),
            tp.psum(x, "cols", axis_index_groups=groups),
        )

    inner = tp.pmap(step, "cols", compile=EAGER)
    found = tp.debug.cost(tp.pmap(inner, "rows", compile=EAGER), torch.empty(2, 2, 10))
    sizes = [(each.num_bytes, each.axis) for each in found.collectives]
    expected = [(40, "rows"), (40, "cols"), (8, "rows, cols"), (12, "cols")]
    if not IN_ORDER:
        sizes, expected = sorted(sizes), sorted(expected)
    assert sizes == expected


# memory ------------------------------------------------------------------------------------------

KIB = 1024


def test_memory_of_a_chain():
    """Each step needs the value before it: two at once, the last of which is the result."""
    found = cost(lambda x: x.sin().cos().tan(), (256,))
    assert (found.argument_bytes, found.output_bytes) == (KIB, KIB)
    assert found.temporary_bytes == 2 * KIB
    assert found.peak_bytes == 3 * KIB
    found = cost(lambda x: x.expand(8, 256).sin().sum(0), (256,))
    assert found.temporary_bytes == 8 * KIB  # they are gone before the results
    assert found.peak_bytes == 10 * KIB


def test_memory_of_views():
    """A value lives until the last use of its views."""

    def f(x):
        y = x.sin()
        rows = y.view(16, 16)
        z = x.cos()
        return (rows.sum(), z.sum())

    found = cost(f, (256,))
    assert found.output_bytes == 8
    assert found.temporary_bytes == 2 * KIB  # y, until the sum of its rows, and z
    assert cost(lambda x: x.view(16, 16), (256,)).temporary_bytes == 0


TABLE = 16 * KIB  # float32[64, 64]


def two_tables(x):
    return (x[:, None] * x).sin().sum(1)


LOOPS = {
    "scan": lambda x: tp.scan(lambda c, _: (two_tables(c), None), x, None, length=7)[0],
    "while": lambda x: tp.while_loop(lambda c: c.sum() > 0, two_tables, x),
    "test of while": lambda x: tp.while_loop(lambda c: two_tables(c).sum() > 0, torch.sin, x),
    "cond": lambda x: tp.cond(x.sum() > 0, two_tables, torch.sin, x),
}


@pytest.mark.parametrize("f", LOOPS.values(), ids=LOOPS)
def test_memory_inside_loops_and_branches(f):
    """One step at a time: two tables, and some vectors around them."""
    assert 2 * TABLE <= cost(f, (64,)).temporary_bytes <= 2 * TABLE + 4 * 256


def test_text():
    text = str(cost(lambda w, x: (tp.psum(x @ w, "i"), tp.psum(x, "i")), (200, 100), (50, 200)))
    flops, collectives, memory = text.splitlines()
    assert flops == "2,000,000 flops on each device"
    times = " (2 times)" if IN_ORDER else ""
    assert collectives == f"all_reduce over i{times}: 60 kB"
    known = "memory: 120 kB arguments, 60 kB results, at most "
    assert re.fullmatch(known + r"\d+ kB temporaries", memory)


def test_what_is_not_mapped():
    text = r"debug.cost takes a function that is mapped, but got .*sin"
    with pytest.raises(TypeError, match=text):
        tp.debug.cost(torch.sin, torch.ones(3))
    uncompiled = tp.pmap(torch.sin, compile=False)
    for ask in (lambda: tp.debug.cost(uncompiled, torch.ones(4)), lambda: uncompiled.lower(X)):
        with pytest.raises(tp.TraceError, match="runs as Python code"):
            ask()
    with pytest.raises(ValueError, match="along axis 0"):
        tp.debug.cost(tp.pmap(torch.sin), torch.tensor(1.0))


def project(w, x):
    return tp.pmean(x["a"] @ w, "i"), tp.ppermute(x["a"][0], "i", [(0, 1)])


@pytest.fixture
def lowered():
    f = tp.pmap(project, "i", in_axes=(None, 0), out_axes=(None, 0), compile=EAGER)
    x = torch.empty(4, 5, 8, device="meta")
    return f.lower(torch.empty(8, 16, device="meta"), {"a": x})


def test_layouts_and_text_of_a_lowered_call(lowered):
    assert list(lowered.in_layouts) == ["w", "x['a']"]
    assert lowered.in_layouts["w"].is_replicated
    assert lowered.in_layouts["x['a']"].block_shape == (1, 5, 8)
    assert [layout.shape for layout in lowered.out_layouts] == [(5, 16), (4, 8)]
    assert "aten.mm.default" in lowered.as_text()
    assert "all_reduce" in lowered.as_text()
    assert "project" in repr(lowered)


@pytest.mark.inductor
def test_a_lowered_call_compiled(lowered):
    compiled = lowered.compile()
    w, x = torch.rand(8, 16), torch.rand(4, 5, 8)
    mean, moved = compiled(w, {"a": x})
    torch.testing.assert_close(mean.cpu(), (x @ w).mean(0))
    torch.testing.assert_close(moved[1], x[0, 0])
    text = r"argument types differ .* argument x\['a'\] compiled with float32\[4, 5, 8\] and called"
    with pytest.raises(TypeError, match=text + r" with int64\[4, 5, 8\]"):
        compiled(w, {"a": x.long()})
    with pytest.raises(TypeError, match="does not match the input pytree"):
        compiled(w, [x])
