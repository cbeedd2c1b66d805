"""Covers: _trace/loop_report.py: what ``lower()`` says about how loops run."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._trace.inner import has_effects

pytestmark = pytest.mark.usefixtures("pool")

CHUNKED = {"backend": "aot_eager"}
X = torch.ones(4, 3)


def last_lines(f, mode):
    lowered = tp.pmap(f, "i", compile=mode).lower(X)
    lines = [f"# {loop}" for loop in lowered.loops]
    assert lowered.as_text().splitlines()[-len(lines) :] == lines
    return [line.partition(" at ")[0] + ":" + line.rpartition("`:")[2] for line in lines]


def steps(length):
    return lambda x: tp.scan(lambda c, _: (c.sin() * 2, c.sum()), x, None, length=length)


def products(length):
    return lambda x: tp.scan(lambda c, _: (torch.outer(c, c) @ c, None), x, None, length=length)


def test_a_scan_in_chunks():
    lowered = tp.pmap(steps(1000), compile=CHUNKED).lower(X)
    (loop,) = lowered.loops
    assert (loop.kind, loop.length, loop.carry_bytes) == ("scan", 1000, 12)
    assert f"{__file__}:" in loop.line
    (node,) = lowered.graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    body = getattr(lowered.graph, node.args[0].target).graph
    detached = body.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    total = sum(each.op == "call_function" for each in body.nodes)
    assert loop.num_operations == total - len(detached)
    sines = body.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert loop.steps_at_once == len(sines) > 1
    text = f"Python runs {1000 // loop.steps_at_once} chunks of {loop.steps_at_once} steps, "
    assert f": 1000 steps, carry 12 B; {text}{loop.num_operations} operations each" in str(loop)


@pytest.mark.inductor
@pytest.mark.parametrize(("of", "expected"), [(steps, True), (products, False)])
def test_inductors_kernels_are_repeated_by_cpp(of, expected):
    (loop,) = tp.pmap(of(1000)).lower(X).loops
    assert loop.is_in_cpp == expected
    assert ("C++ runs it step by step, 3 operations each" in str(loop)) == expected
    assert ("Python runs" in str(loop)) != expected


def test_steps_that_are_left_over():
    (line,) = last_lines(steps(1009), CHUNKED)  # a prime
    assert line.endswith("more behind them")
    _, _, count, size, _, rest = numbers(line)
    assert count * size + rest == 1009


def numbers(line):
    return [int(word) for word in line.replace(",", " ").split() if word.isdigit()]


@pytest.mark.parametrize(
    ("length", "mode", "how"),
    [
        (1000, EAGER, "Python runs it step by step, 3 operations each"),
        (2, CHUNKED, "unrolled into the graph, 6 operations"),
    ],
)
def test_a_scan_that_is_not_in_chunks(length, mode, how):
    assert last_lines(steps(length), mode) == [f"# scan: {length} steps, carry 12 B; {how}"]


def test_while_loops_and_loops_in_loops():
    def f(x):
        def outer(c, _):
            done = tp.while_loop(lambda v: v.sum() < 5, lambda v: v * 2, c)
            return tp.psum(done, "i"), None

        return tp.scan(outer, x, None, length=100)[0]

    for mode in (EAGER, CHUNKED):
        first, second = last_lines(f, mode)
        assert first.startswith("# scan: 100 steps, carry 12 B; Python runs it step by step, ")
        assert second == "# while_loop: carry 12 B; Python runs it step by step, 3 operations each"


def test_a_function_without_loops():
    lowered = tp.pmap(lambda x: x + 1, compile=EAGER).lower(X)
    assert lowered.loops == ()
    assert "#" not in lowered.as_text()


@pytest.mark.parametrize(
    "product",
    [
        lambda c, w: c @ w,
        lambda c, w: w @ c,
        lambda c, w: (w * c).sum(0).unsqueeze_(0).squeeze_(0),
        lambda c, w: (w * c).t_().sum(0),
        lambda c, w: (w * c).transpose_(0, 1).sum(0),
    ],
    ids=["vector @ matrix", "matrix @ vector", "squeeze_", "t_", "transpose_"],
)
def test_what_changes_only_a_shape_is_no_effect(product):
    """torch squeezes the product of a vector in place."""
    w, c = torch.arange(36.0).view(4, 3, 3) / 36, torch.ones(4, 3)
    f = tp.pmap(
        lambda w, c: tp.scan(lambda c, _: (product(c, w), None), c, None, length=3)[0],
        compile=EAGER,
    )
    (node,) = f.lower(w, c).graph.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.scan
    )
    assert not has_effects(node)
    expected = c
    for _ in range(3):
        expected = torch.stack([product(*each) for each in zip(expected, w, strict=True)])
    torch.testing.assert_close(torch.from_numpy(tp.device_get(f(w, c))), expected)


def test_a_shape_that_others_see_changes_in_place():
    def body(c, _):
        y = c * 2
        z = y.view(3)
        y.unsqueeze_(0)
        return y.sum(0) + z, y

    f = tp.pmap(lambda c: tp.scan(body, c, None, length=2), compile=EAGER)
    last, ys = f(X)
    assert last.tolist() == (X * 16).tolist()
    assert tuple(ys.shape) == (4, 2, 1, 3)
