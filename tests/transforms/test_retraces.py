"""Covers: _transforms/retraces.py, that pmap warns, and what the logger says (_base/log.py)."""

import logging
import re
import warnings

import pytest
import torch
from _spies import Traces
from _support import EAGER

import torchpmap as tp
from torchpmap._transforms.retraces import Retraces

X = {"argument x": "float32[4]"}


def test_what_is_no_argument_is_named_too():
    retraces = Retraces()
    *said, text = [retraces.note(X) for _ in range(16)]
    assert said == [None] * 15
    assert "what it closes over keeps changing" in text


@pytest.mark.usefixtures("pool")
def test_jit_names_the_parameter():
    f = tp.jit(lambda x, options: x * options["rate"], compile=EAGER)
    x = tp.replicate(torch.ones(4))
    for rate in range(15):
        f(x, {"rate": rate})
    text = r"jit\(<lambda>\): traced 16 times, because argument options\['rate'\] keeps changing"
    with pytest.warns(match=text):
        f(x, {"rate": 15})


@pytest.mark.usefixtures("pool")
def test_pmap_warns():
    f = tp.pmap(lambda x, n: x * n, static_broadcasted_argnums=1, compile=EAGER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(40):
            f(torch.ones(4), n)
    (warning,) = caught
    assert warning.filename == __file__
    text = "pmap(<lambda>, in_axes=0)(<inputs>): traced 16 times, because argument n"
    assert text in str(warning.message)
    assert "keeps changing: the last were the static value 13, " in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g = tp.pmap(lambda x: x + 1, compile=EAGER)
        for rows in (1, 2, 3, 4):
            for width in (1, 2, 3):
                g(torch.ones(rows, width))


@pytest.mark.usefixtures("pool")
def test_new_pools_do_not_count():
    """Each traces again. But traces in one pool count, however many were before it."""
    traces = Traces()

    @tp.pmap(compile=EAGER)
    def f(x):
        traces.note()
        return x * 2

    x = torch.ones(2)
    for pools, (num_devices, is_lowered) in enumerate(
        [(1, True), (1, True), (2, True), (2, False)], start=1
    ):
        tp.shutdown()
        tp.init(num_devices=num_devices)
        call = f.lower(x).compile() if is_lowered else f  # the first thing in a new pool
        assert call(x).tolist() == [2.0, 2.0]
        for width in range(1, 8):
            assert f(torch.ones(2, width)).tolist() == [[2.0] * width] * 2
        assert traces.n == 8 * pools
    for width in range(8, 15):
        f(torch.ones(2, width))
    with pytest.warns(match="traced 16 times, because argument x keeps changing"):
        f(torch.ones(2, 15))


# The reason ---------------------------------------------------------------------------------------

A = {**X, "argument n": "1"}
REASONS = [  # the kinds of earlier traces, those of this one, and why it is made
    ([], A, "first trace"),
    ([A], A, "what it closes over has changed"),
    ([A], {**A, "argument n": "2"}, "argument n is 2, and was 1"),
    ([A], X, "argument n is gone"),
    ([X], A, "argument n is new"),
    ([A, {"argument x": "int64[1]", "argument n": "3"}, {**A, "argument n": "5"}],
     {**A, "argument n": "4"}, "argument n is 4, and was 5"),
    ([dict.fromkeys("abcdef", 1)], dict.fromkeys("abcdef", 2),
     "a is 2, and was 1; b is 2, and was 1; c is 2, and was 1; d is 2, and was 1 and 2 more"),
]  # fmt: skip


@pytest.mark.parametrize(("earlier", "now", "why"), REASONS)
def test_the_reason_is_the_difference_to_the_nearest_trace(earlier, now, why):
    retraces = Retraces()
    for kinds in earlier:
        retraces.note(kinds)
    assert retraces.why(now) == why


@pytest.fixture
def said(caplog):
    """What the logger has said since the last call."""
    caplog.set_level(logging.DEBUG, "torchpmap")

    def take():
        texts = [record.getMessage() for record in caplog.records if record.name == "torchpmap"]
        caplog.clear()
        return [re.sub(r"\d+\.\d{3} s", "T s", text) for text in texts]

    return take


scale = 2.0


@pytest.mark.cpu_only("the texts name CPU devices")
@pytest.mark.usefixtures("pool")
def test_the_logger_says_what_is_traced_and_why(said):
    global scale

    def step(w, x, n):
        return w * x["a"].sum() * n * scale

    f = tp.pmap(step, in_axes=(None, 0, None), static_broadcasted_argnums=2, compile=EAGER)
    w = torch.ones(3)
    f(w, {"a": torch.ones(4, 2)}, 1)
    what = "`step` (arguments w float32[3], x['a'] float32[2], n = 1)"
    assert said() == [
        f"tracing {what}: first trace",
        f"traced {what} in T s, lowered in T s",
        f"compiled {what} on cpu:0 with eager in T s (T s in the worker, cache unused)",
    ]
    f(w, {"a": torch.ones(4, 2)}, 1)
    assert said() == []

    def why(*args):
        f(*args)
        return said()[0].partition("): ")[2]

    x = {"a": torch.ones(4, 5)}
    assert why(w, x, 1) == "argument x['a'] is float32[4, 5], and was float32[4, 2]"
    assert why(w, x, 3) == "argument n is the static value 3, and was the static value 1"
    assert why(w, {"a": x["a"].int()}, 3) == "argument x['a'] is int32[4, 5], and was float32[4, 5]"
    scale = 3.0
    assert why(w, x, 3) == "what it reads from outside has changed ('scale')"
    torch.set_default_dtype(torch.float64)
    try:
        assert why(w, x, 3) == "torch's default dtype is torch.float64, and was torch.float32"
    finally:
        torch.set_default_dtype(torch.float32)
    reason = "argument n is the static value 4, and was the static value 3"
    assert why(tp.replicate(w), x, 4) == reason


@pytest.mark.usefixtures("pool")
def test_the_logger_names_what_a_plan_baked_in(said):
    table, w = torch.tensor(2.0), torch.ones(3)
    f = tp.pmap(lambda x: x * table.item() * w.sum(), compile=EAGER)

    def why():
        said()
        assert f(torch.ones(4)).shape == (4,)
        return said()[0].partition("): ")[2]

    assert why() == "first trace"
    table.fill_(3.0)
    assert why() == "a value that it read of a tensor (.item(), .numpy()) has changed"
    w.data = torch.ones(5)
    text = "a tensor that it closes over is float32[5] (requires_grad=False), and was float32[3]"
    assert why() == text


@pytest.mark.usefixtures("pool")
def test_derivatives_and_operations_are_reported(said):
    f = tp.pmap(lambda w, x: w * x, in_axes=(None, 0), compile=EAGER)
    tp.grad(lambda w: f(w, torch.ones(4)).sum())(torch.tensor(1.0))
    text = "\n".join(said())
    assert "traced a derivative of `<lambda>` (arguments w float32[], x float32[]) in T s" in text
    assert "compiled aten.sum.default of ShardedTensors float32[4] on" in text


@pytest.mark.inductor
@pytest.mark.cpu_only("Inductor's cache for CPUs")
@pytest.mark.usefixtures("pool")
def test_the_cache_is_reported(said):
    for expected in ("(miss|hit)", "hit"):
        tp.pmap(lambda x: x * 2.125 + 7)(torch.ones(4, 3))
        *_, compiled = said()
        text = rf"on cpu:0 with inductor in T s \(T s in the worker, cache {expected}\)$"
        assert re.search(text, compiled)


@pytest.mark.usefixtures("pool")
def test_log_compiles_makes_them_warnings(caplog):
    tp.config.log_compiles = True
    try:
        tp.pmap(lambda x: x * 2, compile=EAGER)(torch.ones(4))
    finally:
        tp.config.reset()
    levels = {record.levelname for record in caplog.records if record.name == "torchpmap"}
    assert levels == {"WARNING"}
    caplog.clear()
    tp.pmap(lambda x: x * 3, compile=EAGER)(torch.ones(4))
    assert [r for r in caplog.records if r.name == "torchpmap"] == []


@pytest.mark.cpu_only("the texts name CPU devices")
@pytest.mark.usefixtures("pool")
def test_a_jitted_function_says_why_too(said):
    f, mesh = tp.jit(lambda x: x * 2, compile=EAGER), tp.make_mesh((2,), ("i",))

    def why(x):
        f(x)
        told = [text for text in said() if text.startswith("tracing `<lambda>`: ")]
        return [text.partition(": ")[2] for text in told]

    def on(*spec, size=4):
        return tp.device_put(torch.ones(size), tp.NamedSharding(mesh, tp.P(*spec)))

    f.lower(on("i"))
    assert said()[0] == "tracing `<lambda>`: first trace"
    assert why(on("i")) == []
    [longer] = why(on("i", size=6))
    assert longer.endswith(" is float32[6], and was float32[4]")
    [place] = why(on())
    assert place.startswith("the place of ")
    assert "is PartitionSpec() on cpu:0 cpu:1, and was PartitionSpec('i',) on" in place
    x = on("i").requires_grad_()
    [grad] = why(x)
    assert grad.startswith("requires_grad of ")
    with torch.no_grad():
        [mode] = why(x)
    assert mode == "grad mode is False, and was True"
    torch.func.grad(lambda x: f(x).sum())(on("i"))
    assert "a transform around it is True, and was False" in said()[0]
