"""Covers: _base/ambient.py: torch's settings around a call hold in it, and what it sets stays
inside.
"""

import contextlib
import functools

import pytest
import torch
from _support import EAGER, autocast, in_threads
from torch.overrides import TorchFunctionMode

import torchpmap as tp
from torchpmap._base.ambient import KEYED, SETTINGS, ambient, applied, keyed

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4)
INLINE = "inline"


@pytest.fixture(params=[EAGER, False, INLINE], ids=["graph", "python", "inline"])
def mapped(request):
    """``pmap`` in each of the ways to run."""

    if request.param == INLINE:
        with tp.debug.fake_pmap():
            yield tp.pmap
    else:
        yield functools.partial(tp.pmap, compile=request.param)


@pytest.fixture(autouse=True)
def nothing_stays_set():
    before = ambient()
    yield
    left = [s.name for s, old, new in zip(SETTINGS, before, ambient(), strict=True) if old != new]
    assert left == []


@contextlib.contextmanager
def put(write, value):
    with applied(ambient()):  # is put back
        write(value)
        yield


def default_dtype(dtype=torch.float64):
    return put(torch.set_default_dtype, dtype)


def newer_precision(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


# Settings that change results --------------------------------------------------------------------

CHANGED = {
    "division of integers": (default_dtype, lambda x: x / 3),
    "a factory": (default_dtype, lambda x: torch.zeros(2) + x),
    "a promotion": (default_dtype, lambda x: torch.cos(torch.arange(3)) * x),
    "a Python number": (default_dtype, lambda x: torch.tensor(0.1) + x),
    "bfloat16 by default": (lambda: default_dtype(torch.bfloat16), lambda x: x * 0.1),
    "autocast": (lambda: autocast(torch.bfloat16),
        lambda x: torch.eye(3) @ (torch.ones(3, 3) * x / 3)),
    "autocast, left inside": (
        lambda: autocast(torch.bfloat16), lambda x: _without_autocast(x)),
    "deterministic algorithms": (lambda: put(torch.use_deterministic_algorithms, True),
        lambda x: x + _new_memory_is_filled()),
    "flush denormal": (lambda: put(torch.set_flush_denormal, True),
        lambda x: torch.tensor(1e-310, dtype=torch.float64) * (x + 1)),
    "precision of products": (lambda: put(torch.set_float32_matmul_precision, "medium"),
        lambda x: x + {"highest": 1, "high": 2, "medium": 3}[torch.get_float32_matmul_precision()]),
    "newer precision of products": (lambda: put(newer_precision, "bf16"),
        lambda x: x + (torch.backends.mkldnn.matmul.fp32_precision == "bf16")),
    "attention": (lambda: put(torch.backends.cuda.enable_flash_sdp, False),
        lambda x: x + torch.backends.cuda.flash_sdp_enabled()),
}  # fmt: skip


def _new_memory_is_filled():
    fresh = torch.empty(2)
    found = fresh.isnan().all()
    fresh.zero_()  # it may be that of the next call
    return found


def _without_autocast(x):
    with autocast(enabled=False):
        return torch.eye(3) @ (torch.ones(3, 3) * x / 3)


@pytest.mark.parametrize("name", CHANGED)
def test_a_call_follows_the_settings_around_it(mapped, name):
    """... also those that changed since the same function was called."""
    around, fun = CHANGED[name]
    f = mapped(fun)
    for context in (contextlib.nullcontext, around, contextlib.nullcontext):
        with context():
            expected = torch.stack([fun(x) for x in X])
            result = f(X).cpu()
        assert result.dtype == expected.dtype
        assert result.view(-1).equal(expected.view(-1)), (result, expected)


def test_a_call_of_another_thread_follows_its_settings(mode):
    f = tp.pmap(lambda x: torch.ones(2, 2) @ (torch.ones(2, 2) * x), compile=mode)

    def call(in_half):
        with autocast(torch.bfloat16, enabled=bool(in_half)):  # of this thread only
            return f(X).cpu().dtype

    assert in_threads(2, call) == [torch.float32, torch.bfloat16]


def test_a_backward_pass_has_the_settings_of_its_call(mode):
    p = torch.ones(4, requires_grad=True)
    f = tp.pmap(lambda p: (torch.arange(3) / 3 * p).sum(), compile=mode)
    with default_dtype():
        y = f(p)
    y.sum().backward()  # traced now
    q = torch.ones(4, requires_grad=True)
    with default_dtype():
        expected = torch.stack([(torch.arange(3) / 3 * each).sum() for each in q])
    expected.sum().backward()
    assert y.dtype == expected.dtype
    assert p.grad.equal(q.grad)


@pytest.mark.filterwarnings("ignore:.*running without tracing.*changes a setting")
def test_what_a_function_sets_is_put_back(mapped):
    def fun(x):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        return torch.zeros(()) + x

    assert mapped(fun)(X).cpu().equal(X.double())
    assert mapped(lambda x: torch.zeros(()) + x)(X).dtype == torch.float32
    assert not mapped(lambda x: x * torch.are_deterministic_algorithms_enabled())(X + 1).any()
    assert torch.get_default_dtype() == torch.float32


def test_an_error_puts_the_settings_back_too(mapped):
    def fun(x):
        torch.set_default_dtype(torch.float64)
        raise LookupError("here")

    with pytest.raises(LookupError):
        mapped(fun)(X)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["nothing", *CHANGED])
def test_what_every_call_looks_at_is_the_head_of_the_table(name):
    with CHANGED[name][0]() if name != "nothing" else contextlib.nullcontext():
        assert keyed() == tuple(setting.read() for setting in KEYED) == ambient()[: len(KEYED)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_can_be_written_as_it_is_read(setting):
    with applied(ambient()):
        value = setting.read()
        setting.write(value)
        assert setting.read() == value


# What belongs to the caller alone ----------------------------------------------------------------


class Subtracts(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) - 1 if func is torch.add else func(*args)


def hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy)


CALLERS = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "anomaly detection": torch.autograd.detect_anomaly,
    "hooks on saved tensors": hooks,
    "a mode of torch functions": Subtracts,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", CALLERS)
def test_what_the_caller_does_with_its_own_operations(name, mode):
    w = torch.nn.Parameter(torch.tensor(3.0))

    def fun(x, scale):
        return torch.add(tp.grad(lambda a: (a * a * w).sum())(x), torch.ones(()) * scale)

    f = tp.pmap(fun, in_axes=(0, None), compile=mode)
    with CALLERS[name]():
        result = f(X.float().numpy(), 2.0)
        numbers = result.tolist()
    assert numbers == [2.0, 8.0, 14.0, 20.0]
