"""Covers: _transforms/call.py, _transforms/mapped.py, _plan/plan.py: which calls share a trace:
kinds of arguments, statics, orders of keys, lowered calls. Donation.
"""

import copy
import functools
import math
import re

import numpy as np
import pytest
import torch
from _spies import Traces, asked, counted
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.arange(4.0)

# Statics -----------------------------------------------------------------------------------------


class Named:
    """Equal by name alone."""

    def __init__(self, name, scale):
        self.name, self.scale = name, scale

    def __eq__(self, other):
        return type(other) is Named and self.name == other.name

    def __hash__(self):
        return hash(self.name)


STATICS = {
    "number": (lambda s: [int, float, bool].index(type(s)), [1, 1.0, True]),
    "zero": (lambda s: math.copysign(1, s), [0.0, -0.0]),
    "tuple": (lambda s: s[0], [(2,), (2.0,), (True,)]),
    "order": (lambda s: next(iter(s)), [frozenset([0, 8]), frozenset([8, 0])]),
    "by name": (lambda s: s.scale, [Named("a", 1), Named("a", 2.0), Named("a", 3)]),
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


def test_a_static_object_that_cannot_be_shown(mode):
    class Silent:
        times = 3

        def __repr__(self):
            raise KeyError("its text")

    call = tp.pmap(lambda x, s: x * s.times, static_broadcasted_argnums=1, compile=mode)
    assert call(torch.ones(2), Silent()).tolist() == [3.0, 3.0]


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
    (g,) = torch.autograd.grad((f(x, module) ** 2).sum(), x, create_graph=True)
    module.scale = 3.0
    with pytest.raises(RuntimeError, match="what the function reads from outside itself"):
        g.sum().backward()


# The order of dicts ------------------------------------------------------------------------------


def test_a_function_sees_its_own_order_of_keys_and_keywords(mode):
    stacked = tp.pmap(lambda d: torch.stack(list(d.values())), compile=mode)
    of_keywords = tp.pmap(lambda **d: torch.stack(list(d.values())), compile=mode)
    same_keys = tp.pmap(lambda d: {key: d[key] + 1 for key in d}, compile=mode)
    first = tp.pmap(lambda d: next(iter(d["c"].values())), compile=mode)
    weighted = lambda d: (torch.stack(list(d.values())) * torch.tensor([1.0, 10.0])).sum()  # noqa: E731
    gradient = tp.pmap(tp.grad(weighted), compile=mode)
    for tree in ({"a": X, "b": -X}, {"b": -X, "a": X}) * 2:
        assert stacked(tree).tolist() == torch.stack(list(tree.values()), 1).tolist()
        assert of_keywords(**tree).tolist() == torch.stack(list(tree.values()), 1).tolist()
        assert list(same_keys(tree)) == list(tree)
        assert first({"c": tree}).tolist() == next(iter(tree.values())).tolist()
        slopes = gradient(tree)
        assert list(slopes) == list(tree)
        assert [slope[0].item() for slope in slopes.values()] == [1.0, 10.0]


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
    assert len(f._preparation.prepared) <= 3
    assert traces.n == 8


def test_lowered_for_one_order_of_keys():
    f = tp.pmap(lambda d: torch.stack(list(d.values())), compile=EAGER)
    compiled = f.lower({"a": X, "b": -X}).compile()
    assert compiled({"a": X, "b": -X})[1].tolist() == [1.0, -1.0]
    with pytest.raises(TypeError, match=r"does not match.*'b': \*, 'a': \*"):
        compiled({"b": -X, "a": X})


def test_a_compiled_call_takes_arguments_as_the_function_does():
    """Those by name in any order, and static ones only with the values that it was compiled for."""
    f = tp.pmap(
        lambda a, b, n=0, *, none=None: a - b * n,
        static_broadcasted_argnames="n",
        compile=EAGER,
    )
    compiled = f.lower(b=X, a=X + 1, n=1, none=None).compile()
    for _ in range(2):
        assert compiled(none=None, n=1, a=X + 1, b=X).tolist() == [1.0] * 4
        assert compiled(b=X.numpy(), a=put(X + 1), n=1, none=None).tolist() == [1.0] * 4
    with pytest.raises(TypeError, match="argument n compiled with the static value 1 and called"):
        compiled(a=X + 1, b=X, n=2, none=None)
    with pytest.raises(TypeError, match=r"none compiled with None and called with float32\[4\]"):
        compiled(a=X + 1, b=X, n=1, none=X)
    with pytest.raises(TypeError, match=r"argument b compiled with float32\[4\] .* with None"):
        compiled(a=X + 1, b=None, n=1, none=None)
    with pytest.raises(TypeError, match=r"argument b has the layout torch\.sparse_coo"):
        compiled(a=X + 1, b=X.to_sparse(), n=1, none=None)
    with pytest.raises(TypeError, match="argument b is on the meta device"):
        compiled(a=X + 1, b=X.to("meta"), n=1, none=None)


def test_transforms_of_a_compiled_call():
    weight = torch.tensor(2.0, requires_grad=True)
    compiled = tp.pmap(lambda x: weight * x**3, compile=EAGER).lower(X).compile()
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    assert x.grad.tolist() == (6 * X**2).tolist()
    assert weight.grad.item() == (X**3).sum().item()
    grad = torch.func.grad(lambda x: compiled(x).sum())
    assert grad(X).tolist() == (6 * X**2).tolist()
    assert torch.func.jvp(compiled, (X,), (X,))[1].tolist() == (6 * X**3).tolist()
    rows = torch.arange(8.0).view(2, 4)
    assert torch.func.vmap(compiled)(rows).tolist() == (2 * rows**3).tolist()
    assert tp.pmap(lambda x: compiled(x * X), compile=EAGER)(X)[1].tolist() == (2 * X**3).tolist()


def test_a_compiled_call_notices_what_has_changed():
    number, read = [2.0], torch.tensor(2.0)
    for change, fun in (
        (lambda: number.__setitem__(0, 3.0), lambda x: x * number[0]),
        (lambda: read.fill_(3.0), lambda x: x * read.item()),
    ):
        f = tp.pmap(fun, compile=EAGER)
        compiled = f.lower(X).compile()
        assert compiled(X).tolist() == (X * 2).tolist()
        change()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="has changed since it was lowered"):
                compiled(X)
            assert f(X).tolist() == f.lower(X).compile()(X).tolist() == (X * 3).tolist()


# Number of traces --------------------------------------------------------------------------------


def put(x=X):
    return tp.device_put(x, tp.devices())


TRACES = {  # the arguments, and the number of traces after each
    "same": ([X, X + 1, -X], [1, 1, 1]),
    "kinds": ([X.numpy(), X, put], [1, 1, 1]),
    "sharded": ([put, X.numpy(), lambda: tp.replicate(X)], [1, 1, 1]),
    "parameter": ([X, torch.nn.Parameter(X), X], [1, 2, 2]),  # the second is its gradient's
    "dtype": ([X, X.double(), X, X.double().numpy()], [1, 2, 2, 2]),
    "shape": ([X, X.view(4, 1), X, X.view(4, 1)], [1, 2, 2, 2]),
    "size": ([X, X[:3], X, X[:2], X[:3]], [1, 2, 2, 3, 3]),
    "containers": ([(X, X), [X, X], (X, X), [X, X]], [1, 2, 2, 2]),
    "order": ([{"a": X, "b": X}, {"b": X, "a": X}, {"a": X, "b": X}], [1, 2, 2]),
    "none": ([{"a": X, "b": None}, {"a": X, "b": X}, {"a": X, "b": None}], [1, 2, 2]),
}


def traces_of(f, traces, calls):
    """The number of traces after each call."""
    seen = []
    for args, kwargs in calls:
        f(*args, **kwargs)
        seen.append(traces.n)
    return seen


@pytest.mark.parametrize(("calls", "expected"), TRACES.values(), ids=TRACES)
def test_traces_per_argument(calls, expected):
    given = [((call() if callable(call) else call,), {}) for call in calls]
    assert traces_of(*counted(lambda tree: tree), given) == expected


def test_traces_per_call_form():
    traces = Traces()

    @tp.pmap(compile=EAGER)
    def f(x, y=0, z=0):
        traces.note()
        return x - y

    swapped = {"z": X, "y": X}  # the function does not see the order of keywords
    calls = [((X,), {"y": X, "z": X}), ((X,), swapped), ((X, X, X), {})]
    calls += [((X,), {}), ((X,), swapped)]
    assert traces_of(f, traces, calls) == [1, 1, 2, 3, 3]


def test_traces_per_scalar_type():
    f, traces = counted(lambda x, s: x * s, in_axes=(0, None))
    scalars = (2.0, 3.0, 2, 5, True, np.float32(2), torch.tensor(2.0), 2j, 2.0)
    assert traces_of(f, traces, [((X, s), {}) for s in scalars]) == [1, 1, 2, 2, 3, 3, 3, 4, 4]
    assert f(X, 4.0).tolist() == (X * 4).tolist()
    g, traces = counted(lambda x, h: h(x), static_broadcasted_argnums=1)
    assert traces_of(g, traces, [((X, lambda x: x), {}) for _ in range(2)]) == [1, 2]


def test_backward_inside(mode):
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    w.grad = torch.tensor([5.0, 5.0])

    def f(x):
        ((w * x) ** 2).sum().backward()
        return w.grad

    g = tp.pmap(f, compile=mode)
    for _ in range(2):  # and nothing is added up from call to call
        torch.testing.assert_close(g(X).cpu(), 2 * X[:, None] ** 2 * w.detach(), rtol=0, atol=0)
    assert w.grad.tolist() == [5.0, 5.0]


# Donation ----------------------------------------------------------------------------------------


def test_donated_tensors_are_gone(mode):
    f = tp.pmap(lambda x, y: x + y, donate_argnums=0, compile=mode)
    x, y = put(), put()
    assert f(x, y).tolist() == (2 * X).tolist()
    assert x.is_deleted()
    assert not y.is_deleted()
    call = re.escape("pmap(<lambda>, in_axes=0)(<inputs>)")
    message = rf"float32\[4\] has been deleted by {call}, which it was donated to"
    for use in (lambda: x + 1, lambda: f(y, x), lambda: f(x, y), lambda: x.numpy(), lambda: x[0]):
        with pytest.raises(RuntimeError, match=message):
            use()
    assert y.tolist() == X.tolist()
    assert x.shape == (4,)
    assert "deleted by pmap" in repr(x)


def test_donated_trees_and_keywords(mode):
    donated = {"donate_argnums": (0, 7), "donate_argnames": ("y", "other")}
    f = tp.pmap(lambda state, *, y, z: state["a"] + state["b"][0] + y + z, compile=mode, **donated)
    a, b, y, z = put(), put(), put(), put()
    f({"a": a, "b": [b]}, y=y, z=z)
    assert [t.is_deleted() for t in (a, b, y, z)] == [True, True, True, False]


def test_what_is_on_the_host_may_be_donated_twice(mode):
    """As the first state of an average is: its parameters, and the same as their average."""
    once = tp.pmap(lambda x: x.add_(1), donate_argnums=0, compile=mode)
    twice = tp.pmap(lambda x, y: (x.add_(1), y * 2), donate_argnums=(0, 1), compile=mode)
    for x in (X.clone(), X.numpy().copy()):
        once(x)
        assert x.tolist() == X.tolist()
        first, second = twice(x, x)
        assert first.tolist() == (X + 1).tolist()
        assert second.tolist() == (X * 2).tolist()
        assert x.tolist() == X.tolist()


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("donate", [0, (0, 1)])
def test_donating_an_alias_raises_before_anything_is_sent(mode, seen_before, donate, monkeypatch):
    f = tp.pmap(lambda x, y: x + y, donate_argnums=donate, compile=mode)
    if seen_before:
        f(put(), put())
    x = put()
    calls = asked(monkeypatch)
    with pytest.raises(ValueError, match="donated") as error:
        f(x, x)
    assert str(error.value) == (
        "pmap(<lambda>, in_axes=0)(<inputs>): argument x is donated, but the same tensor is also "
        "argument y. Donate it once and pass it once, or pass a copy."
    )
    assert calls == []
    assert not x.is_deleted()
    assert x.tolist() == X.tolist()


def test_a_failed_call_consumes_nothing():
    f = tp.pmap(lambda x, y: x @ y, donate_argnums=0, compile=EAGER)
    x = put(torch.ones(4, 3))
    with pytest.raises(RuntimeError):
        f(x, put(torch.ones(4, 2)))
    assert not x.is_deleted()
