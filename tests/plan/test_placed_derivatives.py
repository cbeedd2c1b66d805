"""Covers: _sharded/device_put.py, _sharded/tensor.py, _plan/derivatives.py: derivatives that pass
through values on the devices, and derivatives that are traced long after the call.

Expectations are plain torch's.
"""

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fw
from _support import EAGER

import torchpmap as tp

pytestmark = [pytest.mark.usefixtures("pool"), pytest.mark.parametrize("pool", [2], indirect=True)]

cube = tp.pmap(lambda u: u**3, compile=EAGER)


@pytest.fixture(params=["devices", "inline"])
def where(request):
    if request.param == "devices":
        yield
        return
    with tp.debug.fake_pmap():
        yield


def leaf(*numbers):
    return torch.tensor(numbers, requires_grad=True)


PUT = {
    "rows": lambda x: tp.device_put(x, tp.devices()[:2]),
    "one device": tp.device_put,
    "replicated": tp.replicate,
    "there and back": lambda x: tp.unreplicate(tp.replicate(x)),
    "cut": lambda x: tp.device_put(
        x, tp.NamedSharding(tp.Mesh(tp.devices()[:2], ("d",)), tp.P("d"))),
}  # fmt: skip


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
@pytest.mark.parametrize("start", [cube, lambda x: x**3], ids=["devices", "host"])
def test_what_was_computed_stays_part_of_derivatives(put, start):
    def f(x):
        y = start(x)
        return (y.cpu() * put(y).cpu()).sum()

    x = leaf(1.0, 2.0)
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    assert g.tolist() == [6.0, 192.0]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [30.0, 480.0]
    assert torch.func.grad(f)(x.detach()).tolist() == [6.0, 192.0]
    _, tangent = torch.func.jvp(f, (x.detach(),), (torch.ones(2),))
    assert tangent.item() == 198.0


@pytest.mark.usefixtures("where")
def test_parts_on_devices_of_their_own():
    x = leaf(1.0, 2.0)
    y = tp.device_put_sharded([2 * x[0], x[1]], tp.devices()[:2])
    assert torch.autograd.grad((y**2).sum(), x)[0].tolist() == [8.0, 4.0]
    y = tp.device_put_replicated(x, tp.devices()[:2])
    assert torch.autograd.grad((y**2).sum(), x)[0].tolist() == [4.0, 8.0]


def test_a_leaf_becomes_another_leaf():
    w = torch.nn.Parameter(torch.ones(2))
    placed = tp.replicate(w)
    assert placed.is_leaf
    assert placed.requires_grad
    (placed * 3).sum().backward()
    assert placed.grad.tolist() == [3.0, 3.0]
    assert w.grad is None


def test_not_for_one_lane():
    with pytest.raises(NotImplementedError, match="one row of a vmap cannot be moved alone"):
        torch.func.vmap(tp.replicate)(torch.ones(2))


@pytest.mark.usefixtures("where")
def test_tangents_reach_whatever_is_fetched():
    with fw.dual_level():
        v = fw.make_dual(torch.tensor([1.0, 2.0]), torch.ones(2))
        y = cube(v)
        found = {
            "cpu": y.cpu(),
            "to": y.to("cpu"),
            "row": torch.stack([y[0], y[1]]),
            "iteration": torch.stack(list(y)),
            "replicated": tp.replicate(y).cpu(),
            "back": tp.unreplicate(tp.replicate(y)),
        }
        tangents = {name: fw.unpack_dual(value).tangent for name, value in found.items()}
    for name, tangent in tangents.items():
        assert tangent.cpu().tolist() == [3.0, 12.0], name


def test_a_row_that_is_written_has_no_tangent():
    with fw.dual_level():
        y = cube(fw.make_dual(torch.tensor([1.0, 2.0]), torch.ones(2)))
        y[0] = 5.0
        value, tangent = fw.unpack_dual(y)
        assert value.tolist() == [5.0, 8.0]
        assert tangent.tolist() == [0.0, 12.0]


def test_gradcheck_in_both_modes():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cube(x).cpu(), (x,), check_forward_ad=True)


# -- long after the call ---------------------------------------------------------------------------

factor = 1.0


class Switch(torch.nn.Module):
    def forward(self, w):
        return w**3 if self.training else w


def set_factor(value):
    global factor
    factor = value


def global_number():
    set_factor(1.0)
    return lambda w: w**3 * factor, lambda: set_factor(100.0)


def training_mode():
    module = Switch()
    return module, module.eval


def array():
    n = np.ones(1)
    return lambda w: w**3 * float(n[0]), lambda: n.fill(100)


def number_of_a_tensor():
    n = torch.ones(1)
    return lambda w: w**3 * n.item(), lambda: n.fill_(100)


CHANGES = [global_number, training_mode, array, number_of_a_tensor]


@pytest.mark.parametrize("change", CHANGES)
def test_a_second_derivative_is_that_of_the_call(change, mode):
    """... or an error, if the function is another one by now."""
    function, act = change()
    mapped, w = tp.pmap(function, compile=mode), leaf(1.0, 2.0)
    (g,) = torch.autograd.grad(mapped(w).sum(), w, create_graph=True)
    act()
    with pytest.raises(RuntimeError, match=r"reads from outside itself .* has changed since"):
        g.sum().backward()


def test_what_the_function_itself_changes_is_no_change(mode):
    counts = {"calls": 0}

    def f(w):
        counts["calls"] += 1
        return w**3

    mapped, w = tp.pmap(f, compile=mode), leaf(1.0, 2.0)
    for _ in range(3):
        (g,) = torch.autograd.grad(mapped(w).sum(), w, create_graph=True)
        assert torch.autograd.grad(g.sum(), w)[0].tolist() == [6.0, 12.0]


def test_an_array_may_be_overwritten_after_the_call(mode):
    n, w = np.ones(2, np.float32), leaf(1.0, 2.0)
    mapped = tp.pmap(lambda w, n: w**3 * n, compile=mode)
    (g,) = torch.autograd.grad(mapped(w, n).sum(), w, create_graph=True)
    n[:] = 100
    assert torch.autograd.grad(g.sum(), w)[0].tolist() == [6.0, 12.0]


def test_inference_mode_in_this_process():
    with torch.inference_mode(), tp.debug.fake_pmap():
        w = torch.nn.Parameter(torch.ones(1))
        result = tp.pmap(lambda x: x * torch.tensor(2.0) * w[0])(torch.ones(2))
        assert result.tolist() == [2.0, 2.0]
        assert not result.requires_grad
