"""Covers: _runtime/local/watch.py, _runtime/local/stacks.py: calls that may take only so long
(whatever their ranks do: tests/faults/test_hangs.py).
"""

import os
import signal
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from _support import EAGER, LAGS, beside, running_pool, wait_for, worker_pids

import torchpmap as tp
from torchpmap._runtime.local.stacks import Look, Sight, answer, described

pytestmark = [pytest.mark.usefixtures("pool"), pytest.mark.parametrize("pool", [2], indirect=True)]

rows = torch.arange(2.0)
total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
LIMIT_S = 0.2


def loops(x):
    while int(tp.axis_index("i")) == 1:
        pass
    return tp.psum(x, "i")


def ends(x):
    return tp.psum(x, "i") * int(tp.axis_index("i"))


@pytest.fixture(autouse=True)
def loaded(pool):
    """The devices have imported all they need, which takes longer than the limits here."""
    total(rows).block_until_ready()
    tp.pmap(ends, "i", compile=False)(rows)
    tp.pmap(lambda x: lingers(x, 0.0), compile=EAGER)(rows).block_until_ready()


def kept():
    return tp.pmap(lambda x: x + 1, compile=EAGER)(rows).block_until_ready()


@torch.library.custom_op("torchpmap_tests::linger", mutates_args=())
def linger(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


@linger.register_fake
def _(x, seconds):
    return torch.empty_like(x)


def lingers(x, seconds=1e6):
    return torch.ops.torchpmap_tests.linger(x, seconds)


@pytest.mark.parametrize("use", [lambda y: y.tolist(), lambda y: y.block_until_ready(), total])
def test_error_of_a_compiled_call_is_raised_where_its_value_is_used(use):
    value, pids = kept(), worker_pids(2)
    y = tp.pmap(lingers, compile=EAGER, timeout=LIMIT_S)(value)
    with pytest.raises(tp.CallTimeout, match="lingers did not end within its timeout"):
        use(y).cpu()
    if not LAGS:  # a device's work cannot be interrupted: its worker is replaced
        assert worker_pids(2) == pids
        assert value.tolist() == [1, 2]


def test_a_call_whose_result_is_not_used_has_the_same_limit():
    y = tp.pmap(lingers, compile=EAGER, timeout=LIMIT_S)(rows)
    assert wait_for(lambda: running_pool().broken, 5)
    assert total(rows).tolist() == [1, 1]
    with pytest.raises(tp.CallTimeout):
        y.cpu()


def test_the_clock_begins_with_the_call():
    """Not while it stands behind others."""
    before = tp.pmap(lambda x: lingers(x, 1.5), compile=EAGER)
    limited = tp.pmap(lambda x: x + 1, compile=EAGER, timeout=LIMIT_S)
    before(rows)
    limited(rows).block_until_ready()
    waiting = before(rows)
    assert limited(rows).tolist() == [1, 2]
    assert waiting.tolist() == [0, 1]


def slow_backend(graph, examples):
    time.sleep(1)
    return graph


def test_compiling_does_not_count():
    f = tp.pmap(lambda x: x + 1, compile={"backend": slow_backend}, timeout=LIMIT_S)
    assert f(rows).tolist() == [1, 2]


def ending_backend(graph, examples):
    os._exit(3)


def test_a_worker_that_died_while_it_compiled_does_not_compile_any_more():
    tp.shutdown()
    tp.init(2)
    with pytest.raises(tp.WorkerDied):
        tp.pmap(lambda x: x + 1, compile={"backend": ending_backend})(rows)
    with pytest.raises(tp.CallTimeout):
        tp.pmap(loops, "i", compile=False, timeout=LIMIT_S)(rows)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


slow_back = torch.library.custom_op("torchpmap_tests::slow_back", mutates_args=())(_double)
slow_back.register_fake(torch.empty_like)
slow_back.register_autograd(lambda _, g: lingers(g))


def test_gradient_from_outside_has_the_limit():
    x = rows.clone().requires_grad_()
    y = tp.pmap(lambda x: slow_back(x), compile=EAGER, timeout=LIMIT_S)(x)
    with pytest.raises(tp.CallTimeout):
        y.sum().backward()
    assert total(rows).tolist() == [1, 1]


@pytest.mark.parametrize("compile", [False, EAGER])
@pytest.mark.long("compile1")
def test_setting_applies_at_once(compile):
    """To a pool that has started, and to a function that has been called and has no limit."""
    tp.init(2)
    mapped = tp.pmap(lambda x: lingers(x, 2.0), compile=compile)
    plain = tp.pmap(lambda x: x + 1, compile=compile)
    plain(rows)
    try:
        tp.config.timeout = 0.3
        with pytest.raises(tp.CallTimeout, match=r"timeout of 0\.3 s"):
            mapped(rows).tolist()
        tp.shutdown()  # the next pool starts with it
        with pytest.raises(tp.CallTimeout, match=r"timeout of 0\.3 s"):
            mapped(rows).tolist()
        for way in (EAGER, False):
            patient = tp.pmap(lambda x: lingers(x, 0.5), compile=way, timeout=60)
            assert patient(rows).tolist() == [0, 1]
        tp.config.timeout = None
        assert mapped(rows).tolist() == [0, 1]
        assert plain(rows).tolist() == [1, 2]
    finally:
        tp.config.reset()


STACK = f"""\
  File "{threading.__file__}", line 1 in wait
  File "{torch.__file__}", line 2 in g
  File "<eval_with_key>", line 3 in forward
  File "/home/me/train.py", line 7 in f
  File "/home/me/other.py", line 8 in g"""
AT = " at /home/me/train.py:7"
WAIT = "rank 1 in sum"


@pytest.mark.parametrize(
    ("sight", "text"),
    [
        (Sight("T", False, 0, "", None, STACK), "is stopped (SIGSTOP, or a debugger)"),
        (Sight("R", False, 0, "", None, ""), "does not answer"),
        (Sight("R", False, 0, "", None, STACK), f"is in C code that holds the GIL{AT}"),
        (Sight("S", True, 0, "running f", None, ""), "waits for a command"),
        (Sight("R", True, 4, "compiling g", None, ""), "has not begun it: it is still compiling g"),
        (Sight("R", True, 5, "compiling f", None, ""), "is compiling f"),
        (Sight("R", True, 5, "running f", None, STACK), f"runs f{AT}"),
        (Sight("S", True, 5, "running f", None, STACK), f"sleeps or waits in f{AT}"),
        (Sight("S", True, 5, "running f", WAIT, STACK), f"waits for {WAIT}{AT}"),
    ],
)
def test_what_a_rank_does(sight, text):
    assert described(sight, 5) == text


def test_a_rank_that_answers_late_answers_twice():
    """It held the GIL when it was asked before; and an answer is not read before it is complete."""
    worker = SimpleNamespace(stacks=os.memfd_create("stacks"), state="R", control=Mock())
    look = Look({0: worker}, interrupts=True)
    os.write(worker.stacks, b'\x1e[5, "runn')
    assert look.sights() is None
    os.ftruncate(worker.stacks, 0)
    os.lseek(worker.stacks, 0, os.SEEK_SET)
    for _ in range(2):
        answer(worker.stacks, 5, "running f", WAIT)
    assert look.sights() == {0: Sight("R", True, 5, "running f", WAIT, "")}
    os.close(worker.stacks)


def test_stacks_of_a_call_that_does_not_end(tmp_path):
    """Seen from another thread than that which waits; and of devices that wait for a command."""
    gate = tmp_path / "gate"

    def step(x):
        while int(tp.axis_index("i")) == 1 and not gate.exists():
            time.sleep(0.001)
        return tp.psum(x, "i")

    def looked():
        zero, one = tp.debug.stacks().values()
        return zero if zero.startswith("waits for rank 1 in ") and "in step" in one else None

    with beside(lambda: tp.pmap(step, "i", compile=False)(rows).tolist()) as ended:
        assert wait_for(looked, 10)
        gate.touch()
    assert ended.result() == [1, 1]
    assert list(tp.debug.stacks()) == tp.devices()
    assert wait_for(
        lambda: all(x.startswith("waits for a command") for x in tp.debug.stacks().values())
    )
    os.kill(worker_pids(2)[1], signal.SIGSTOP)
    assert wait_for(lambda: "is stopped" in tp.debug.stacks()[tp.devices()[1]])
    tp.shutdown()
    assert tp.debug.stacks() == {}
