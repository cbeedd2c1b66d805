"""Covers: _plan/plan.py, _trace/environment.py, _trace/capture.py: a function sees the present
outside and never writes to it.
"""

from __future__ import annotations

import argparse
import itertools
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _outside import ONES, check_follows
from _spies import Traces, asked
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)


# What the function sees of the outside is never stale --------------------------------------------

SCALE = ARRAY = 1.0


class Settings:
    scale = 1.0


class Derived(Settings):
    pass


class Named(torch.Tensor):
    """As torch.Tensor, by another name."""


class Amplified(torch.nn.Module):
    def forward(self, r):
        return r * SCALE


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])

    def forward(self, r):
        for layer in self.layers:
            r = layer(r)
        return r * (2 if self.training else 1)


# Each yields a function, and goes on to change what it sees.


def globals_of_the_module():
    global SCALE, ARRAY
    yield lambda r: r * SCALE * torch.as_tensor(ARRAY)
    SCALE = 2.0
    yield
    ARRAY = np.float32(3)
    yield
    SCALE = ARRAY = 1.0
    yield


def globals_of_methods():
    global SCALE
    module = torch.nn.Sequential(torch.nn.Identity(), Amplified())
    yield module
    SCALE = 5.0
    yield
    SCALE, before = 1.0, Amplified.forward
    Amplified.forward = lambda self, r: r * 7
    yield
    Amplified.forward = before


def class_attributes():
    instance = Derived()
    yield lambda r: r * instance.scale * Settings.scale
    Settings.scale = 2.0
    yield
    Derived.scale = 3.0
    yield
    del Derived.scale
    Settings.scale = 1.0


def namespaces():
    settings = argparse.Namespace(inner=types.SimpleNamespace(scale=1.0))
    yield lambda r: r * settings.inner.scale
    settings.inner.scale = 2.0
    yield
    settings.inner = types.SimpleNamespace(scale=3.0)
    yield


def cells():
    scale, helper = 1.0, lambda r: r * scale
    yield lambda r: helper(r)
    scale = -0.0
    yield
    helper = lambda r: r * 5  # noqa: E731
    yield


def containers():
    items, table = [1.0], {"a": 1.0}
    yield lambda r: r * sum(items) * sum(table.values())
    items[0] = 2.0
    yield
    items.append(3.0)
    table["b"] = 2.0
    yield
    del table["b"]
    yield


def attributes_of_the_function():
    def scaled(r):
        return r * scaled.scale

    for scaled.scale in (2.0, 7.0):
        yield scaled


def arrays():
    array = np.ones(1, np.float32)
    for value in (1.0, 2.0, 3.0, 1.0):
        array.fill(value)
        yield lambda r: r * torch.as_tensor(array)


def tensors():
    w = torch.ones(1)
    for value in (1.0, 2.0, 3.0, 1.0):
        w.fill_(value)
        yield lambda r: r * w
    w.view(1).data.copy_(torch.tensor([4.0]))
    w.add_(0)
    yield


def tensors_of_inference_mode():
    with torch.inference_mode():
        w = torch.ones(1)
    for value in (1.0, 2.0, 1.0):
        with torch.inference_mode():
            w.fill_(value)
        yield lambda r: r * w


def data_that_is_swapped():
    w = torch.nn.Parameter(torch.ones(1000))
    for value in (1.0, 2.0, 3.0, 1.0):
        before = w.data_ptr()
        for _ in range(100):  # the address of freed memory is soon used again
            w.data = torch.full((1000,), value)
            if w.data_ptr() == before:
                break
        yield lambda r: r * w.detach()[0]


def what_a_tensor_is_asked():
    t, q = torch.ones(3), torch.ones(3, requires_grad=True)
    t.tag = 2.0
    yield lambda r: r * t.numel() * t.shape[-1] * len(t) * t.tag * (2 if q.requires_grad else 3)
    t.resize_(5)
    yield
    t.data = torch.ones(4, 2)
    yield
    t.data = torch.ones(4, 3)
    yield
    t.tag = 3.0
    yield
    q.requires_grad_(False)
    yield


def gradients_of_captured_tensors():
    w = torch.ones(3, requires_grad=True)
    yield lambda r: r if w.grad is None else r + w.grad
    w.grad = torch.ones(3)
    yield
    w.grad.fill_(4)
    yield
    w.grad = torch.ones(3) * 2
    yield
    w.grad = None
    yield


def classes_of_tensors_that_are_only_names():
    t = (torch.ones(3) * 2).as_subclass(Named)
    yield lambda r: r * t + t.sum() + tp.grad(lambda z: (z * t).sin().sum())(r)
    t.mul_(2)
    yield


def parameters_of_modules():
    module = torch.nn.Linear(3, 1, bias=False)
    module.register_buffer("shift", torch.zeros(1))
    yield lambda r: (module(r) + module.shift).detach()
    with torch.no_grad():
        module.weight.fill_(2.0)
    yield
    module.weight.data = torch.full((1, 3), 3.0)
    yield
    state = {"weight": torch.full((1, 3), 4.0), "shift": torch.zeros(1)}
    module.load_state_dict(state)
    yield
    module.load_state_dict({"weight": state["weight"] + 1, "shift": torch.ones(1)}, assign=True)
    yield
    module.weight = torch.nn.Parameter(torch.full((1, 3), 7.0))
    yield
    module.shift = torch.full((1,), 10.0)
    yield
    module.register_forward_hook(lambda module, args, out: out * 2)
    yield


def modes_and_members_of_modules():
    model = Layers()
    yield model
    model.eval()
    yield
    model.layers.append(torch.nn.Softplus())
    yield


OUTSIDE = [
    *(globals_of_the_module, globals_of_methods, class_attributes, namespaces, cells, containers),
    *(attributes_of_the_function, arrays, tensors, tensors_of_inference_mode, data_that_is_swapped),
    *(what_a_tensor_is_asked, gradients_of_captured_tensors, parameters_of_modules),
    *(classes_of_tensors_that_are_only_names, modes_and_members_of_modules),
]


@pytest.mark.parametrize("changes", OUTSIDE, ids=lambda changes: changes.__name__)
def test_every_call_gives_what_plain_python_gives_now(changes, mode):
    """... and nothing is traced again without a change."""
    if mode is False and changes in (globals_of_methods, class_attributes):
        pytest.skip("classes of importable modules go to the workers by name")
    states, rows = changes(), torch.ones(4, 3)
    fun = next(states)
    mapped, seen = tp.pmap(fun, compile=mode), []
    for _ in itertools.chain([fun], states):
        seen.append(fun(rows[0]).tolist())
        for _ in range(2):
            assert mapped(rows).tolist() == [pytest.approx(seen[-1])] * 4
            assert mapped._latest[1].plan.holds()
            assert not mapped._environment.changed()
    assert all(a != b for a, b in itertools.pairwise(seen))


def reads_global(x):
    return x * SCALE


BY_NAME = pytest.mark.xfail(reason="functions of importable modules go to the workers by name")


@pytest.mark.parametrize(
    "mode", [EAGER, pytest.param(False, marks=BY_NAME)], ids=["graph", "python"]
)
def test_globals_of_imported_functions(mode, monkeypatch):
    f = tp.pmap(reads_global, compile=mode)
    check_follows(f, lambda v: monkeypatch.setitem(globals(), "SCALE", v), [2.0, 3.0, 1.0])


def test_sharded_tensors_changed_in_place(mode):
    w = tp.replicate(torch.ones(1))
    f = tp.pmap(lambda x: x * w, compile=mode)
    check_follows(f, lambda v: w.fill_(v), [2.0, 3.0, 1.0])
    w.delete()
    with pytest.raises((RuntimeError, TypeError), match=r"deleted by delete\(\)"):
        f(ONES)


def test_gradients_that_are_wanted_of_a_named_class(mode):
    t = torch.full((3,), 2.0).as_subclass(Named).requires_grad_()
    tp.pmap(lambda r: r * t, compile=mode)(torch.ones(2, 3)).sum().backward()
    assert t.grad.tolist() == [2.0] * 3


def test_values_that_were_read_are_looked_at_again():
    w = torch.tensor(1.0)
    traces = Traces()

    def f(x):
        traces.note()
        return x * (2 if float(w) > 0 else 3)

    g = tp.pmap(f, compile=EAGER)
    assert [g(ONES).tolist(), g(ONES).tolist()] == [[2.0] * 4] * 2
    assert traces.n == 1
    w.neg_()
    assert g(ONES).tolist() == [3.0] * 4
    w.data = torch.tensor(5.0)
    assert g(ONES).tolist() == [2.0] * 4


def test_unchanged_captured_tensors_are_sent_once(monkeypatch):
    w = torch.ones(1)
    f = tp.pmap(lambda x: x * w, compile=EAGER)
    f(ONES)
    x = tp.device_put(ONES, tp.devices())
    calls = asked(monkeypatch)
    f(x)
    assert [name for name, _ in calls] == ["execute"]
    w.add_(1)
    assert f(x).tolist() == [[2.0]] * 4
    assert [name for name, _ in calls] == ["execute", "put", "execute", "fetch"]


# Writes that would be lost -----------------------------------------------------------------------


def replaces_data(w, p, x):
    p.data = p.data - x


def steps(w, p, x):
    (p * x).sum().backward()
    torch.optim.SGD([p], lr=0.1).step()


LOST = {
    "add_": (lambda w, p, x: w.add_(x), r"tensor of type float32\[2\]"),
    "a view": (lambda w, p, x: w[0].copy_(x), r"tensor of type float32\[2\]"),
    "a view at a traced position": (lambda w, p, x: w[x.long()].add_(1), r"tensor of type float"),
    "out=": (lambda w, p, x: torch.add(w, x, out=w), r"tensor of type float32\[2\]"),
    ".data": (lambda w, p, x: w.data.add_(1), "tensor of type float32"),
    "numpy": (lambda w, p, x: w.numpy().fill(9), "tensor of type float32"),
    ".data.numpy": (lambda w, p, x: w.data.numpy().fill(9), "tensor of type float32"),
    "detach().numpy": (lambda w, p, x: w.detach().numpy().fill(9), "tensor of type float32"),
    "replaced data": (replaces_data, "parameter"),
    "an optimizer": (steps, "parameter.*optimizer"),
}


@pytest.mark.filterwarnings("ignore:.*running without tracing")
@pytest.mark.parametrize("name", LOST)
def test_writes_to_captured_tensors_raise(name, mode):
    write, text = LOST[name]
    w, p = torch.zeros(2), torch.nn.Parameter(torch.ones(2))
    text += r" \(aten\.add_" if mode and name == "add_" else ""
    f = tp.pmap(lambda x: (write(w, p, x), x)[1], compile=mode)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="writes in place to a captured " + text):
            f(ONES)
    assert (w.tolist(), p.tolist(), p.grad) == ([0.0, 0.0], [1.0, 1.0], None)


@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_python_functions_that_write_to_a_captured_tensor(name):
    w = torch.ones(3)
    arguments = {"apply_": (lambda v: v + 1,), "map_": (w, lambda a, b: a + b)}[name]
    with pytest.raises(RuntimeError, match=rf"writes in place to a captured .* \(.{name}\(\)\)"):
        tp.pmap(lambda x: (getattr(w, name)(*arguments), x)[1], compile=EAGER)(X)
    assert w.tolist() == [1.0] * 3


NORMS = {
    "batch norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "instance norm": lambda x, mean, var: F.instance_norm(x, mean, var),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_statistics_are_updated_also_if_the_result_is_of_no_use(norm, mode):
    def f(mean, var, x):
        mean, var = mean.clone(), var.clone()
        norm(x, mean, var)
        return mean, var

    x = torch.arange(120.0).reshape(4, 2, 3, 5)
    mapped = tp.pmap(f, in_axes=(None, None, 0), compile=mode)(torch.zeros(3), torch.ones(3), x)
    for k in range(4):
        for mine, theirs in zip(mapped, f(torch.zeros(3), torch.ones(3), x[k]), strict=True):
            torch.testing.assert_close(mine[k], theirs)


def test_batch_norm(mode):
    norm = torch.nn.BatchNorm1d(3)
    x = torch.arange(24.0).reshape(4, 2, 3)
    with pytest.raises(RuntimeError, match=r"writes in place to a captured.*BatchNorm: \.eval\(\)"):
        tp.pmap(norm, compile=mode)(x)
    assert norm.running_mean.tolist() == [0.0] * 3
    assert norm.num_batches_tracked == 0
    norm.eval()
    torch.testing.assert_close(
        tp.pmap(norm, compile=mode)(x).cpu(), norm(x.view(8, 3)).view(4, 2, 3)
    )
    norm.train()

    def f(buffers, x):
        state = {**dict(norm.named_parameters()), **buffers}
        y = torch.func.functional_call(norm, state, (x,))
        return y, tp.pmean(buffers["running_mean"], "i")

    buffers = dict(norm.named_buffers())
    _, mean = tp.pmap(f, "i", in_axes=(None, 0), out_axes=(0, None), compile=mode)(buffers, x)
    torch.testing.assert_close(mean.cpu(), 0.1 * x.mean((0, 1)))
    assert norm.running_mean.tolist() == [0.0] * 3


def test_gradients_left_behind_raise():
    w = torch.nn.Parameter(torch.ones(2))

    def f(x):
        (w * x).sum().backward()
        return x

    with pytest.raises(RuntimeError, match=r"leaves a gradient on a captured parameter.*\.grad"):
        tp.pmap(f, compile=EAGER)(X)
    assert w.grad is None


# What transforms around the call trace, and transforms inside the function use --------------------

OUTER = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).sum()),
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (w + 1,))[1],
    "vmap": lambda f: lambda w: torch.func.vmap(f)(torch.stack([w, w * 2])),
    "jacfwd": torch.func.jacfwd,
    "grad of vmap": lambda f: torch.func.grad(
        lambda w: torch.func.vmap(f)(torch.stack([w, w * 2])).sum()
    ),
}
INNER = {
    "grad": lambda h, x, w: torch.func.grad(lambda x: h(x, w).sum())(x),
    "jvp": lambda h, x, w: torch.func.jvp(lambda x: h(x, w), (x,), (w,))[1],
    "vmap": lambda h, x, w: torch.func.vmap(lambda x: h(x, w))(torch.stack([x, x * 3])),
    "jacrev": lambda h, x, w: torch.func.jacrev(lambda x: h(x, w))(x),
    "grad of what is captured": lambda h, x, w: torch.func.grad(lambda w: h(x, w).sum())(w),
    "vmap over what is captured": lambda h, x, w: torch.func.vmap(lambda w: h(x, w))(w),
    "vjp of what is captured": lambda h, x, w: torch.func.vjp(lambda w: h(x, w), w)[1](w)[0],
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_transforms_inside_of_what_transforms_around_trace(outer, inner, mode):
    def call(mapped):
        return lambda w: mapped(lambda x: inner(lambda x, w: (x * x * w).sin(), x, w))(rows)

    rows, w = torch.tensor([[0.3, 0.5], [-0.2, 1.0]]), torch.tensor([0.7, -0.4])
    expected = outer(call(torch.func.vmap))(w)
    got = outer(call(lambda f: tp.pmap(f, compile=mode)))(w)
    torch.testing.assert_close(got.cpu(), expected)


def test_a_captured_parameter_that_a_transform_inside_takes(mode):
    def loss(mapped):
        w = torch.tensor([0.7, -0.4], requires_grad=True)
        rows = torch.tensor([[0.3, 0.5], [-0.2, 1.0]])
        inner = torch.func.grad(lambda w, x: (x * w).sin().sum())
        mapped(lambda x: inner(w, x))(rows).sum().backward()
        return w.grad

    expected = loss(torch.func.vmap)
    torch.testing.assert_close(loss(lambda f: tp.pmap(f, compile=mode)), expected)
