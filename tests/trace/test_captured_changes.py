"""Covers: _trace/environment.py, _trace/capture.py, _trace/pickling.py: changes outside that a call
must see.
"""

from __future__ import annotations

import array
import collections

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.ones(2, 3)
GAIN = 2.0


class Amplified(torch.nn.Module):
    def forward(self, r):
        return r * GAIN


class Named(torch.Tensor):
    """As torch.Tensor, by another name."""


def check(fun, mode, *changes):
    """Every call gives what plain Python gives, and nothing is traced again without a change."""
    mapped = tp.pmap(fun, compile=mode)
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            assert mapped(X)[0].tolist() == pytest.approx(fun(X[0]).tolist())
            assert mapped._latest[1].plan.holds()
            assert not mapped._environment.changed()


def test_globals_of_methods(monkeypatch):
    modules = Amplified(), torch.nn.Sequential(torch.nn.Identity(), Amplified())
    for module in modules:
        check(lambda r, m=module: m(r), EAGER, lambda: monkeypatch.setitem(globals(), "GAIN", 5.0))
        monkeypatch.setitem(globals(), "GAIN", 2.0)
    new = lambda self, r: r * 7  # noqa: E731
    check(modules[0], EAGER, lambda: monkeypatch.setattr(Amplified, "forward", new))


def test_learning_rates(mode):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    groups = optimizer.param_groups
    check(lambda r: r * optimizer.param_groups[0]["lr"], mode, lambda: groups[0].update(lr=0.05))
    change = lambda: (optimizer.step(), schedule.step())  # noqa: E731
    check(lambda r: r * schedule.get_last_lr()[0], mode, change)


def test_signs_and_order(mode):
    table = collections.OrderedDict(a=0.0, b=2.0)
    check(
        lambda r: torch.copysign(r, torch.full((), table["a"])) * next(iter(table.values())),
        mode,
        lambda: table.update(a=-0.0),
        lambda: table.move_to_end("a"),
    )


def test_attributes_of_the_function(mode):
    def scaled(r):
        return r * scaled.scale

    scaled.scale = 2.0
    check(scaled, mode, lambda: setattr(scaled, "scale", 7.0))


def test_what_a_tensor_is_asked(mode):
    t = torch.ones(3)
    check(lambda r: r * t.numel(), mode, lambda: t.resize_(5))
    check(lambda r: r * t.shape[-1] + len(t), mode, lambda: setattr(t, "data", torch.ones(4, 2)))
    check(lambda r: r * t.size(1), mode, lambda: setattr(t, "data", torch.ones(4, 3)))
    q = torch.ones(3, requires_grad=True)
    freeze = lambda: q.requires_grad_(False)  # noqa: E731
    check(lambda r: r * (2 if q.requires_grad else 3), mode, freeze)
    t.tag = 2.0
    check(lambda r: r * t.tag, mode, lambda: setattr(t, "tag", 3.0))


def test_gradients_of_captured_tensors(mode):
    w = torch.ones(3, requires_grad=True)
    check(
        lambda r: r + w.grad if w.grad is not None else r,
        mode,
        lambda: setattr(w, "grad", torch.ones(3)),
        lambda: w.grad.fill_(4),
        lambda: setattr(w, "grad", torch.ones(3) * 2),
        lambda: setattr(w, "grad", None),
    )


def test_objects_that_know_no_other_names(mode):
    class Table(dict):
        __getattr__ = dict.__getitem__

    table = Table(a=1.0)
    check(lambda r: r * table.a, mode, lambda: table.update(a=2.0))


def test_objects_whose_getattr_raises():
    class Strict:
        def __getattr__(self, name):
            raise KeyError(name)

    strict = Strict()
    strict.value = 1.0
    check(lambda r: r * strict.value, EAGER, lambda: setattr(strict, "value", 2.0))


def test_memoryviews(mode):
    view = memoryview(array.array("f", [1.0, 5.0]))
    check(lambda r: r * view[1], mode, lambda: view.__setitem__(1, 2.0))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_classes_of_tensors_that_are_only_names(requires_grad, mode):
    t = (torch.ones(3) * 2).as_subclass(Named).requires_grad_(requires_grad)

    def double():
        with torch.no_grad():
            t.mul_(2)

    check(lambda r: r * t + t.sum(), mode, double)
    check(lambda r: tp.grad(lambda z: (z * t).sin().sum())(r), mode, double)
    if requires_grad:
        tp.pmap(lambda r: r * t, compile=mode)(X).sum().backward()
        assert t.grad.tolist() == [2.0] * 3
