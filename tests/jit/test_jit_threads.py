"""Covers: _transforms/jit_program.py: threads and handlers that call functions with effects."""

import types

import pytest
import torch
from _support import EAGER, in_threads

import torchpmap as tp
from torchpmap._plan.plan import Plan
from torchpmap._sharded import views

pytestmark = pytest.mark.usefixtures("pool")

THREADS, CALLS = 4, 50


def repeated(work, calls=CALLS):
    def repeat(_):
        for _ in range(calls):
            work()

    in_threads(THREADS, repeat)


def test_threads_write_to_one_tensor():
    w = tp.replicate(torch.zeros(4, 3))
    row = w[1]  # a write to it is one to w
    add, add_to_row = tp.jit(lambda x: w.add_(x)), tp.jit(lambda: row.add_(1))

    def work():
        add(1)
        w.add_(1)
        add_to_row()
        row.add_(1)

    work()
    repeated(work)
    calls = THREADS * CALLS + 1
    assert w.tolist() == [[4.0 * calls if k == 1 else 2.0 * calls] * 3 for k in range(4)]


def trained(act, times, put=lambda x: x, jit=lambda f: f):
    model = put(torch.nn.Linear(3, 2))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(put(torch.arange(p.numel()).reshape(p.shape) / 8 + k))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    average = [p.detach().clone() for p in model.parameters()]

    @jit
    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.5)

    step()
    act(lambda: [step() for _ in range(times)])
    counts = [entry["step"] for entry in optimizer.state.values()]
    return [x.cpu().detach() for x in (*model.parameters(), *average, *counts)]


def test_threads_train_one_model():
    found = trained(repeated, 1, tp.replicate, tp.jit)
    expected = trained(lambda work: work(), THREADS * CALLS)
    torch.testing.assert_close(found, expected)


def test_threads_make_one_gradient():
    w, x = tp.replicate(torch.ones(3)).requires_grad_(), torch.tensor(1.0)
    step = tp.jit(lambda x: (w * x).sum().backward(), compile=EAGER)
    step(x)
    step(x)
    for _ in range(20):
        w.grad = None
        repeated(lambda: step(x), 1)
        assert w.grad.tolist() == [THREADS] * 3


def test_threads_store_in_turn():
    kept = types.SimpleNamespace(total=tp.replicate(torch.zeros(3)))

    @tp.jit(compile=EAGER)
    def step(x):
        kept.total = kept.total + x

    step(torch.tensor(1.0))
    repeated(lambda: step(torch.tensor(1.0)))
    assert kept.total.tolist() == [THREADS * CALLS + 1] * 3


def write_by_itself(w, f):
    w.mul_(2)


def write_by_a_step(w, f):
    f()


@pytest.mark.parametrize("act", [write_by_itself, write_by_a_step])
def test_a_handler_that_interrupts_a_write_cannot_write(monkeypatch, act):
    w = tp.replicate(torch.zeros(3))
    f = tp.jit(lambda: w.add_(1))
    f()
    real = Plan.run

    def interrupted(*given):
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=r"a signal handler or a finalizer.*for itself"):
            act(w, f)
        return real(*given)

    monkeypatch.setattr(Plan, "run", interrupted)
    f()
    assert w.tolist() == [2.0] * 3
    act(w, f)
    assert w.tolist() == [4.0 if act is write_by_itself else 3.0] * 3


def test_a_handler_that_interrupts_the_making_of_a_view_cannot_write():
    w = tp.replicate(torch.zeros(3))
    with views._linking, pytest.raises(RuntimeError, match="a signal handler or a finalizer"):
        w.add_(1)
    assert w.add_(1).tolist() == [1.0] * 3
