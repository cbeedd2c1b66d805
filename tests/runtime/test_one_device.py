"""Covers: what is different on one device.  ``make test-gpu`` runs it on a GPU, where the
collectives are those of NCCL in a world of one; elsewhere the device is a CPU.  What devices do
alike, the rest of the suite tests, there with workers that share the GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from _launched import run_program
from _support import COMPILED, DEVICE, EAGER, eagerly

import torchpmap as tp

pytestmark = pytest.mark.parametrize("pool", [1], indirect=True)

X = torch.arange(6.0).reshape(1, 6)


@pytest.fixture(params=[COMPILED, EAGER, False], ids=["inductor", "graph", "python"])
def how(request):
    return request.param


def assert_near(got, expected, **tolerance):
    torch.testing.assert_close(got.cpu(), expected, **tolerance)


COLLECTIVES = {
    "psum": lambda x: tp.psum(x, "i"),
    "pmean": lambda x: tp.pmean(x, "i"),
    "pmax": lambda x: tp.pmax(x, "i"),
    "all_gather": lambda x: tp.all_gather(x, "i")[0],
    "ppermute": lambda x: tp.ppermute(x, "i", [(0, 0)]),
    "psum_scatter": lambda x: tp.psum_scatter(x[None], "i"),
    "all_to_all": lambda x: tp.all_to_all(x[None], "i", 0, 0)[0],
    "pbroadcast": lambda x: tp.pbroadcast(x, "i", 0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_one(pool, name, mode):
    f = tp.pmap(COLLECTIVES[name], "i", compile=mode)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        if not (name == "pmean" and dtype == torch.int64):
            assert f(X.to(dtype)).cpu().equal(X.to(dtype)), dtype


@pytest.mark.inductor
def test_a_chain_of_compiled_collectives(pool):
    step = tp.pmap(lambda x: tp.psum(x, "i") + 1, "i")
    y = X
    for _ in range(20):
        y = step(y)
    assert y.tolist() == (X + 20).tolist()


def test_gradients(pool, how):
    torch.manual_seed(0)
    w, x = torch.randn(4, 3), torch.randn(1, 8, 4)

    def loss(w, x):
        return torch.tanh(x @ w).square().sum()

    value, grads = tp.pmap(
        lambda w, x: tp.psum(tp.value_and_grad(loss)(w, x), "i"),
        "i",
        in_axes=(None, 0),
        out_axes=None,
        compile=how,
    )(w, x)
    expected, expected_value = torch.func.grad_and_value(loss)(w, x[0])
    assert_near(value, expected_value)
    assert_near(grads, expected)


def test_attention(pool, how):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4, 16, 32)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    grads = tp.pmap(tp.grad(loss, (0, 1, 2)), compile=how)(q, k, v)
    expected = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    for got, wanted in zip(grads, expected, strict=True):
        assert_near(got, wanted, rtol=1e-3, atol=1e-4)


def test_dropout(pool, how):
    torch.manual_seed(0)
    x = torch.ones(1, 100_000)
    y = tp.pmap(lambda x: F.dropout(x, 0.5), compile=how)(x).cpu()
    assert y.unique().tolist() == [0.0, 2.0]
    assert abs((y == 0).double().mean() - 0.5) < 0.01  # six standard deviations


def test_autocast(pool, mode):
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, 16, 16)

    def f(a, b):
        with torch.autocast(DEVICE, torch.bfloat16):
            return a @ b

    y = tp.pmap(f, compile=mode)(a, b)
    assert y.dtype == torch.bfloat16
    assert_near(y.float(), a @ b, rtol=0.05, atol=0.1)


def test_a_large_value(pool, mode):
    x = torch.arange(1 << 24, dtype=torch.int32)[None]  # 64 MB
    y = tp.pmap(lambda x: x ^ 5, compile=mode)(x)
    assert y.cpu().equal(x ^ 5)


def test_no_memory_is_an_error_of_the_call_alone(pool):
    value = tp.device_put(X)
    huge = eagerly(lambda x: x.new_empty(1 << 50) * x.sum())
    with pytest.raises(RuntimeError, match=r"memory|allocate"):
        huge(X).block_until_ready()
    assert value.tolist() == X.tolist()


def test_an_index_out_of_range(pool):
    """On a GPU the assert of a kernel breaks the context, so the worker is replaced."""
    table, good, bad = torch.arange(5.0)[None], torch.tensor([[4]]), torch.tensor([[99]])
    pick = tp.pmap(lambda x, k: x.index_select(0, k), compile=EAGER)
    with pytest.raises((IndexError, RuntimeError)):
        pick(table, bad).cpu()
    assert pick(table, good).tolist() == [[4.0]]


USES_NO_DEVICE = f"""
import torch, torchpmap as tp
from torchpmap._base.devices import PLATFORMS

tp.init(1)
y = tp.pmap(lambda x: x * 2, compile={EAGER})(torch.ones(1, 3))
assert y.tolist() == [[2.0] * 3]
assert not PLATFORMS["{DEVICE}"].is_initialized()
"""


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing can use a CPU too early")
def test_the_process_of_a_program_uses_no_device(pool):
    """To trace an index or a derivative, as other tests here do, torch itself would use it."""
    run_program("-c", USES_NO_DEVICE)
