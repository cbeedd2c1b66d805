"""Covers: _transforms/call.py, _transforms/mapped.py: which calls share a trace: statics, orders of
keys, lowered calls, and what threads change.
"""

import copy
import dataclasses
import decimal
import functools
import math
import threading

import numpy as np
import pytest
import torch
from _spies import counted
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)

# Statics -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    value: object


class Named:
    """Equal by name alone."""

    def __init__(self, name, scale):
        self.name, self.scale = name, scale

    def __eq__(self, other):
        return type(other) is Named and self.name == other.name

    def __hash__(self):
        return hash(self.name)


STATICS = {
    "number": (
        lambda s: s * (1 if type(s) is int else 2 if type(s) is float else 3),
        [1, 1.0, True],
    ),
    "zero": (lambda s: math.copysign(1, s), [0.0, -0.0]),
    "tuple": (lambda s: s[0], [(2,), (2.0,), (True,)]),
    "frozenset": (lambda s: next(iter(s)), [frozenset([1]), frozenset([1.0])]),
    "order": (lambda s: next(iter(s)), [frozenset([0, 8]), frozenset([8, 0])]),
    "dataclass": (lambda s: s.value, [Config(1), Config(1.0), Config(True)]),
    "nested": (lambda s: s.value[0].value, [Config((Config(1),)), Config((Config(1.0),))]),
    "by name": (lambda s: s.scale, [Named("a", 1), Named("a", 2.0), Named("a", 3)]),
    "numpy": (lambda s: int(s), [np.float32(1), np.int64(1), 1.0]),
    "decimal": (lambda s: len(str(s)), [decimal.Decimal("1.0"), decimal.Decimal("1.00")]),
    "range": (lambda s: s.stop, [range(0, 3, 2), range(0, 4, 2)]),
}


@pytest.mark.parametrize(("read", "values"), STATICS.values(), ids=STATICS)
def test_statics_that_are_equal_but_differ(mode, read, values):
    f = tp.pmap(lambda x, s: torch.zeros(2) + read(s), static_broadcasted_argnums=1, compile=mode)
    for _ in range(2):
        for value in values:
            assert f(X, value).tolist() == [[read(value)] * 2] * 4
    g, traces = counted(lambda x, s: x * read(s), static_broadcasted_argnums=1)
    for _ in range(2):
        for value in values:
            expected = X * read(value)
            assert g(X, copy.copy(value)).dtype == expected.dtype
    assert traces.n == len(values)


def test_static_objects_are_what_they_are_at_each_call(mode):
    f = tp.pmap(lambda x, s: x * s.scale, static_broadcasted_argnums=1, compile=mode)
    one = Named("a", 2.0)
    assert f(X, one).tolist() == (X * 2).tolist()
    one.scale = 3.0
    assert f(X, one).tolist() == (X * 3).tolist()
    assert f(X, Named("a", 2.0)).tolist() == (X * 2).tolist()
    module = torch.nn.Dropout(1.0)
    g = tp.pmap(lambda x, m: m(x), static_broadcasted_argnums=1, compile=mode)
    for training in (True, False, True):
        assert g(X, module.train(training)).tolist() == (X * 0 if training else X).tolist()
    h = tp.pmap(lambda x, s: s(x), static_broadcasted_argnames="s", compile=mode)
    scale = 2.0
    assert h(X, s=lambda x: x * scale).tolist() == (X * 2).tolist()
    closure = lambda x: x * scale  # noqa: E731
    assert h(X, s=closure).tolist() == (X * 2).tolist()
    scale = 3.0
    assert h(X, s=closure).tolist() == (X * 3).tolist()


def test_static_objects_that_stay_are_traced_once():
    f, traces = counted(lambda x, m: m(x), static_broadcasted_argnums=1)
    module = torch.nn.Dropout(1.0)
    for training in (True, True, False, False, True, False):
        f(X, module.train(training))
    assert traces.n == 2
    for _ in range(2):
        f(X, torch.relu)
        f(X, functools.partial(torch.clamp, min=1.0))
    assert traces.n == 4


def test_a_static_object_that_changes_before_its_derivative_is_traced():
    module = torch.nn.Dropout(0.0)
    module.scale = 2.0
    f = tp.pmap(lambda x, m: x * m.scale, static_broadcasted_argnums=1, compile=False)
    x = X.clone().requires_grad_()
    f(x, module).sum().backward()
    assert x.grad.tolist() == [2.0] * 4
    y = f(x, module)
    (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    module.scale = 3.0
    with pytest.raises(RuntimeError, match="what the function reads from outside itself"):
        g.sum().backward()


# The order of dicts ------------------------------------------------------------------------------


def test_a_function_sees_its_own_order_of_keys_and_keywords(mode):
    stacked = tp.pmap(lambda d: torch.stack(list(d.values())), compile=mode)
    of_keywords = tp.pmap(lambda **d: torch.stack(list(d.values())), compile=mode)
    same_keys = tp.pmap(lambda d: {key: d[key] + 1 for key in d}, compile=mode)
    first = tp.pmap(lambda d: next(iter(d["c"].values())), compile=mode)
    for tree in ({"a": X, "b": -X}, {"b": -X, "a": X}) * 2:
        assert stacked(tree).tolist() == torch.stack(list(tree.values()), 1).tolist()
        assert of_keywords(**tree).tolist() == torch.stack(list(tree.values()), 1).tolist()
        assert list(same_keys(tree)) == list(tree)
        assert first({"c": tree}).tolist() == next(iter(tree.values())).tolist()


def test_gradients_with_the_keys_in_another_order():
    def loss(params, x):
        return (torch.stack(list(params.values())) * torch.tensor([1.0, 10.0])).sum() * x

    f = tp.pmap(tp.grad(loss), in_axes=(None, 0), compile=EAGER)
    w = torch.tensor(1.0)
    for order, expected in (("ab", (1.0, 10.0)), ("ba", (10.0, 1.0)), ("ab", (1.0, 10.0))):
        found = f(dict.fromkeys(order, w), X + 1)
        assert list(found) == list(order)
        assert (found["a"][0].item(), found["b"][0].item()) == expected


def test_lower_and_the_call_trace_once():
    f, traces = counted(lambda x: x + 1)
    f.lower(X)
    f.lower(torch.empty(4, device="meta"))
    assert f(X).tolist() == (X + 1).tolist()
    f.lower(X)
    assert traces.n == 1


def test_lower_keeps_a_limited_number_of_plans(monkeypatch):
    monkeypatch.setattr("torchpmap._transforms.mapped._MAX_PREPARED", 3)
    f, traces = counted(lambda x, n: x + n, static_broadcasted_argnums=1)
    for n in range(8):
        f.lower(X, n)
    assert f._preparation.num_plans <= 3
    assert traces.n == 8


def test_lowered_for_one_order_of_keys():
    f = tp.pmap(lambda d: torch.stack(list(d.values())), compile=EAGER)
    compiled = f.lower({"a": X, "b": -X}).compile()
    assert compiled({"a": X, "b": -X})[1].tolist() == [1.0, -1.0]
    with pytest.raises(TypeError, match=r"does not match.*'b': \*, 'a': \*"):
        compiled({"b": -X, "a": X})


RATE = 2.0


def test_a_global_that_a_thread_rebinds_during_the_trace(monkeypatch):
    go, done, end = threading.Event(), threading.Event(), threading.Event()

    def rebind():
        go.wait()
        monkeypatch.setitem(globals(), "RATE", 3.0)
        done.set()
        end.wait()

    thread = threading.Thread(target=rebind)
    thread.start()

    @tp.pmap(compile=EAGER)
    def f(x):
        y = x * RATE
        go.set()
        done.wait()
        return y

    try:
        assert [f(X).tolist() for _ in range(2)] == [(X * 3).tolist()] * 2
    finally:
        end.set()
        thread.join()
