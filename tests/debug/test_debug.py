"""Covers: debug.py, _runtime/inline_mode.py and _transforms/inline.py: mapped functions in the
calling process.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from _arrays import Foreign
from _spies import asked
from _support import DEVICE, EAGER, OTHER, in_threads

import torchpmap as tp
from torchpmap._runtime import current, inline_mode

X = torch.arange(4.0)

NOTHING_STARTS = """
import os, threading
import torch, torchpmap as tp

def step(w, x, n, *, y):
    return tp.psum(w * x, "i") + y, n

def run():
    tp.init(num_devices=4)
    w = tp.replicate(torch.tensor(2.0))
    f = tp.pmap(step, "i", in_axes=(None, 0, None), out_axes=(0, None))
    result, n = f(w, tp.device_put(torch.arange(4.0), tp.devices()), 3, y=torch.ones(4))
    assert result.tolist() == [13.0] * 4 and type(result) is torch.Tensor
    assert tp.unreplicate(n).item() == 3

with tp.debug.fake_pmap():
    run()
os.environ["TORCHPMAP_RUNTIME"] = "inline"
tp.config.reset()
run()
assert threading.active_count() == 1
children = open(f"/proc/self/task/{os.getpid()}/children").read()
assert children == "", children
"""


@pytest.fixture
def inline():
    with tp.debug.fake_pmap():
        yield


@pytest.fixture
def serial():
    with tp.debug.fake_pmap(serial=True):
        yield


def total(x):
    return tp.psum(x, "i")


# Where it runs -----------------------------------------------------------------------------------


@pytest.mark.long
def test_no_process_is_started_in_the_block_or_if_the_environment_chooses_it():
    subprocess.run([sys.executable, "-c", NOTHING_STARTS], check=True, timeout=60)


def test_a_running_pool_is_not_used(pool, monkeypatch):
    """In a block, in a function so decorated, and by the setting."""

    def run():
        return tp.pmap(total, "i")(X)

    f = tp.pmap(total, "i")
    decorated = tp.debug.fake_pmap()(run)
    calls = asked(monkeypatch)
    with tp.debug.fake_pmap():
        results = [f(X)]
    results += [decorated(), decorated()]
    tp.config.runtime = "inline"
    try:
        results.append(run())
    finally:
        tp.config.reset()
    assert calls == []
    assert [type(result) for result in results] == [torch.Tensor] * 4
    assert [result.tolist() for result in results] == [[6.0] * 4] * 4
    assert type(f(X)) is tp.ShardedTensor  # the function that was called in the block


def test_ends_with_the_block_also_after_an_error(pool):
    with pytest.raises(ZeroDivisionError), tp.debug.fake_pmap():
        tp.pmap(lambda x: 1 / 0)(X)
    assert type(tp.pmap(lambda x: x, compile=False)(X)) is tp.ShardedTensor


def test_other_threads_are_not_affected(inline):
    assert in_threads(1, lambda _: inline_mode.active()) == [False]
    assert inline_mode.active()


# What a call gives -------------------------------------------------------------------------------


def test_sharded_arguments_are_gathered_and_stay_if_donated(pool):
    rows = tp.pmap(lambda x: x + 1, compile=False)(X)
    with tp.debug.fake_pmap():
        assert tp.pmap(total, "i")(rows).tolist() == [10.0] * 4
        tp.pmap(lambda x: x * 2, donate_argnums=0)(rows)
    assert rows.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_replicate_and_unreplicate_are_inverse(inline):
    value = torch.tensor([1.0, 2.0])
    copy = tp.replicate({"w": value, "n": 3})
    value.zero_()
    assert tp.unreplicate(copy)["w"].tolist() == [1.0, 2.0]
    assert tp.unreplicate(copy)["n"].item() == 3
    stacked = tp.device_put_replicated(
        torch.tensor([1.0, 2.0]), [tp.Device(0, DEVICE), tp.Device(1, DEVICE)]
    )
    assert stacked.tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert tp.unreplicate(stacked).tolist() == [1.0, 2.0]


def test_results_are_new_tensors_and_arguments_may_be_written_to(inline):
    w = torch.ones(3)
    same, captured = tp.pmap(lambda x: (x, w))(X)
    same.add_(1)
    captured.add_(1)
    assert X.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert w.tolist() == [1.0] * 3
    array, tensor, foreign = np.zeros(4), torch.zeros(4), torch.zeros(4)
    result = tp.pmap(lambda a, b, c: a.add_(1) + b.add_(2) + c)(array, tensor, Foreign(foreign))
    assert result.tolist() == [3.0] * 4
    assert array.tolist() == tensor.tolist() == [0.0] * 4


# Derivatives around a call -----------------------------------------------------------------------


# loss = sum_k (w S x_k) = w S^2, with S = sum_k x_k


def loss(w, x):
    return tp.pmap(lambda w, x: tp.psum(w * x, "i") * x, "i", in_axes=(None, 0))(w, x).sum()


W = torch.tensor(3.0)  # X sums to 6


def test_backward_to_arguments_and_captured_parameters(inline):
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    loss(w, x).backward()
    assert w.grad.item() == 36.0
    assert x.grad.tolist() == [36.0] * 4
    layer = torch.nn.Linear(4, 1, bias=False)
    tp.pmap(lambda k: layer(X * k).sum())(torch.tensor([1.0, 2.0])).sum().backward()
    assert layer.weight.grad.tolist() == [[0.0, 3.0, 6.0, 9.0]]


def test_backward_to_a_sharded_argument(pool):
    x = tp.device_put(X, tp.devices()).requires_grad_()
    with tp.debug.fake_pmap():
        loss(W, x).backward()
    assert x.grad.tolist() == [36.0] * 4


# What raises -------------------------------------------------------------------------------------


def both_ways(call, kind):
    """The texts of the error on the devices and in this process."""
    texts = []
    for inline in (False, True):
        with pytest.raises(kind) as info, inline_mode.chosen(inline):
            call()
        texts.append(str(info.value))
    return texts


MISUSE = {
    "axis sizes": (lambda: tp.pmap(lambda x, y: x)(X, torch.zeros(3)), ValueError),
    "rows and devices": (lambda: tp.pmap(lambda x: x, devices=tp.devices()[:2])(X), ValueError),
    "unknown device": (
        lambda: tp.pmap(lambda x: x, devices=[tp.Device(99, DEVICE)])(X[:1]), ValueError),
    "backend": (lambda: tp.pmap(lambda x: x, backend=OTHER)(X), RuntimeError),
    "argument type": (lambda: tp.pmap(lambda x: x)("rows"), TypeError),
    "static": (lambda: tp.pmap(lambda x, k: x, static_broadcasted_argnums=1)(X, []), ValueError),
    "out axes": (lambda: tp.pmap(lambda x: x, out_axes=3)(X), ValueError),
    "output type": (lambda: tp.pmap(lambda x: "rows")(X), TypeError),
    "axis name": (lambda: tp.pmap(lambda x: tp.psum(x, "j"), "i")(X), NameError),
    "users error": (lambda: tp.pmap(lambda x: {}["key"])(X), KeyError),
    "no stream": (lambda: tp.pmap(lambda x: x + torch.binomial(x, x), compile=False)(X),
        NotImplementedError),
    "not replicated": (
        lambda: tp.pmap(lambda x: {"y": x}, out_axes=None, check_replicated=True)(X), ValueError),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
def test_errors_are_those_of_the_devices(pool, name):
    on_devices, here = both_ways(*MISUSE[name])
    assert here == on_devices


def test_what_is_on_the_devices_is_not_donated_twice(pool):
    x = tp.device_put(X, tp.devices())
    on_devices, here = both_ways(
        lambda: tp.pmap(lambda x, y: x, donate_argnums=0)(x, x), ValueError
    )
    assert "argument x is donated, but the same tensor is also argument y" in on_devices
    assert here == on_devices


def test_lost_writes_raise_before_they_happen(inline):
    total = torch.zeros(3)

    def f(x):
        total.add_(x)
        return x

    with pytest.raises(RuntimeError, match=r"writes in place to a captured tensor of type float32"):
        tp.pmap(f)(X)
    assert total.tolist() == [0.0] * 3


@pytest.mark.parametrize("serial", [False, True], ids=["lanes", "serial"])
def test_random_numbers_are_those_of_the_devices(pool, serial):
    f = tp.pmap(lambda x: (x + torch.rand(2), torch.randn(())), compile=EAGER)
    torch.manual_seed(0)
    expected = [f(X), f(X), torch.rand(3)]
    torch.manual_seed(0)
    with tp.debug.fake_pmap(serial=serial):
        results = [f(X), f(X), torch.rand(3)]
    torch.testing.assert_close(
        [(a.cpu(), b.cpu()) for a, b in expected[:2]], results[:2], rtol=0, atol=1e-6
    )
    assert torch.equal(expected[2], results[2])
    assert not torch.equal(results[0][0], results[1][0])


def test_generators_without_streams_are_put_back(inline):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)

    def unseen(x):
        with torch._C.DisableTorchFunction():
            return x + torch.rand(3)

    with pytest.raises(NotImplementedError, match="an operation in the function draws"):
        tp.pmap(unseen)(X)
    assert torch.equal(torch.rand(3), expected)


def backward_inside(x):
    w = torch.ones((), requires_grad=True)
    (w * x).backward()
    return w.grad


LANES_CANNOT = {
    "item": lambda x, s: x.item(),
    "if": lambda x, s: x if x > 0 else -x,
    "numpy": lambda x, s: x.numpy(),
    "nonzero": lambda x, s: x.nonzero(),
    "backward": lambda x, s: backward_inside(x),
    "write": lambda x, s: s.add_(x),
}


@pytest.mark.parametrize("name", LANES_CANNOT)
def test_what_lanes_cannot_do_comes_with_advice(inline, name):
    with pytest.raises(RuntimeError) as info:
        tp.pmap(LANES_CANNOT[name], in_axes=(0, None))(X, torch.zeros(()))
    (note,) = info.value.__notes__
    assert note.startswith("This call runs in the calling process (torchpmap.debug.fake_pmap")
    assert "torch.where for `if`" in note
    assert note.endswith("torchpmap.debug.fake_pmap(serial=True).")
    with pytest.raises(RuntimeError) as info:
        tp.pmap(lambda x: x @ torch.ones(3))(torch.ones(4, 2))
    assert not hasattr(info.value, "__notes__")


def test_a_closed_pools_values_raise(pool):
    rows = tp.pmap(lambda x: x, compile=False)(X)
    tp.shutdown()
    with tp.debug.fake_pmap(), pytest.raises(tp.RuntimeClosed):
        tp.pmap(lambda x: x)(rows)
    assert current._runtime is None


# One row after the other --------------------------------------------------------------------------


def test_rows_are_plain_python(serial):
    def f(x, k):
        w = torch.tensor(2.0, requires_grad=True)
        (w * x).backward()
        if x.item() > 1:
            x = x * 10
        return tp.psum(x, "i"), w.grad, k, tp.axis_index("i").item()

    results = tp.pmap(f, "i", in_axes=(0, None), out_axes=(None, 0, 0, 0))(X, 7)
    assert results[0].item() == 51.0
    assert [r.tolist() for r in results[1:]] == [[0.0, 1.0, 2.0, 3.0], [7] * 4, [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: tp.psum(x, "i"),
        lambda x: tp.pmax(x, "i"),
        lambda x: tp.all_gather(x, "i"),
        lambda x: tp.psum_scatter(x, "i", tiled=True),
        lambda x: tp.all_to_all(x, "i", 0, 0, tiled=True),
        lambda x: tp.ppermute(x, "i", [(k, (k + 1) % 4) for k in range(4)]),
    ],
)
def test_a_row_may_write_to_what_it_has_sent(serial, collective):
    def f(x):
        y = collective(x)
        x.add_(100)
        return y

    rows = torch.arange(16.0).reshape(4, 4)
    torch.testing.assert_close(tp.pmap(f, "i")(rows), tp.vmap(collective, axis_name="i")(rows))


def test_rows_run_in_order_between_collectives(serial):
    events = []

    def f(x):
        events.append(("before", int(x)))
        total = tp.psum(x, "i")
        events.append(("after", int(x)))
        return total

    tp.pmap(f, "i")(torch.arange(3))
    assert events == [(when, k) for when in ("before", "after") for k in range(3)]


def test_errors_name_the_row(serial):
    with pytest.raises(ZeroDivisionError) as info:
        tp.pmap(lambda x: 1 / (tp.psum(x, "i").item() - 6 + x.item() - 2), "i")(X)
    assert info.value.__notes__ == ["in row 2 of 4, axis 'i'"]
    with pytest.raises(ValueError, match=r"of \['int64\[0\]'\], row 1 .* of \['int64\[1\]'\]"):
        tp.pmap(lambda x: torch.zeros(int(x), dtype=torch.int64))(torch.arange(2))


def test_rows_in_different_collectives_raise(serial):
    def f(x):
        if x < 2:
            return tp.psum(x, "i")
        if x < 3:
            return x
        return tp.ppermute(x, "i", [(0, 1)])

    with pytest.raises(tp.CollectiveMismatch) as info:
        tp.pmap(f, "i")(X)
    first = f.__code__.co_firstlineno
    assert str(info.value) == (
        "rows run different collectives, so the result would be wrong:\n"
        "  row 0: all_reduce sum of float32[] for psum('i') of float32[] at "
        f"test_debug.py:{first + 2}:20 in f (collective 1)\n"
        "  row 1: all_reduce sum of float32[] for psum('i') of float32[] at "
        f"test_debug.py:{first + 2}:20 in f (collective 1)\n"
        "  row 2: returned\n"
        "  row 3: ppermute [0] [1] of float32[] for ppermute('i', (0, 1)) of float32[] at "
        f"test_debug.py:{first + 5}:16 in f (collective 1)\n"
        "Every row must run the same collectives in the same order, from the same lines of the "
        "script: do not put one under a condition on a row's own values or axis index."
    )


def test_serial_rows_refuse_transforms_around_them(serial):
    text = r"under fake_pmap\(serial=True\) a mapped function cannot be differentiated or batched"
    x = X.clone().requires_grad_()
    result = tp.pmap(total, "i")(x)
    assert result.tolist() == [6.0] * 4
    around = (
        result.sum().backward,
        lambda: torch.func.grad(loss)(W, X),
        lambda: tp.map(tp.pmap(total, "i"), torch.stack([X, X, X]), batch_size=2),
    )
    for call in around:
        with pytest.raises(NotImplementedError, match=text):
            call()
    with torch.no_grad():
        assert not tp.pmap(total, "i")(x).requires_grad


def test_autocast_reaches_the_rows(serial):
    with torch.autocast("cpu", torch.bfloat16):
        y = tp.pmap(lambda x: x @ x)(torch.ones(2, 3, 3))
    assert y.dtype == torch.bfloat16


# breakpoint --------------------------------------------------------------------------------------

STOPS = """
import torch, torchpmap as tp

def f(x):
    y = x * 2
    tp.debug.breakpoint(2)
    return tp.psum(y, "i")

for serial in (True, False):
    with tp.debug.fake_pmap(serial=serial):
        print("result", tp.pmap(f, "i")(torch.arange(4.0)).tolist())
"""


@pytest.mark.long
def test_breakpoint_stops_in_the_callers_process():
    command = [sys.executable, "-c", STOPS]
    typed = "p y\ncontinue\n" * 2
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=60, check=True
    )
    serial, lanes, end = done.stdout.split("result [12.0, 12.0, 12.0, 12.0]\n")
    assert "(Pdb) tensor(4.)" in serial
    assert "(Pdb) BatchedTensor(lvl=1, bdim=0, value=" in lanes
    for printed in (serial, lanes):
        assert printed.count("-> return tp.psum") + printed.count("-> tp.debug") <= 1
        assert ("All rows of 'i' (size 4) run at once" in printed) is (printed is lanes)
    assert end == ""


def test_breakpoint_elsewhere_says_what_to_do(pool):
    def f(x):
        tp.debug.breakpoint()
        return x

    text = r"out of a debugger's reach; run it under torchpmap.debug.fake_pmap\(serial=True\)"
    for compile in (False, EAGER):
        with pytest.raises(RuntimeError, match=text):
            tp.pmap(f, compile=compile)(X)
    with pytest.raises(RuntimeError, match=r"outside a mapped function; use Python's breakpoint\("):
        f(X)


def test_a_zero_tangent_in_an_operation_in_place(inline):
    """torch 2.13 would end the process, as in every dispatch mode."""
    shift = torch.tensor(0.5)

    def f(x):
        def branch(x):
            return torch.func.jvp(lambda x: x.clone().sub_(shift, alpha=2), (x,), (x,))

        return tp.cond(torch.tensor(True), branch, lambda x: (x, x), x)

    value, tangent = f(torch.ones(2))
    assert (value.tolist(), tangent.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    tp.debug.find_nan(f, torch.ones(2))
