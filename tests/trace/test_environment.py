"""Covers: _trace/environment.py: which changes outside a function are noticed."""

import argparse
import array
import collections
import functools
import queue
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from _outside import noticed, watched

from torchpmap._trace.environment import Environment

VALUE = 1


def reads_global():
    return VALUE


def calls_another():
    return reads_global()


DRIVEN = 1
INSIDE = {"a": 1}


class Held(list):
    """Takes weak references."""


HELD = Held()


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * VALUE

    def scaled(self):
        return VALUE

    @staticmethod
    def fixed():
        return VALUE

    @property
    def doubled(self):
        return VALUE * 2

    def drive(self):
        return DRIVEN


INSTANCE = Scaled()


def settings():
    module = torch.nn.Identity()
    module.settings = {"a": 1}
    return module


@pytest.mark.parametrize(
    "fun", [reads_global, calls_another, lambda: [calls_another() for _ in "a"]]
)
def test_globals(fun, monkeypatch):
    assert noticed(fun, lambda: monkeypatch.setitem(globals(), "VALUE", 2))
    assert not noticed(fun, lambda: monkeypatch.setitem(globals(), "OTHER", 2))
    assert noticed(fun, lambda: monkeypatch.delitem(globals(), "VALUE"))


def test_cells_and_defaults():
    value, later = 1, [1]

    def outer(x, table=later):
        def inner():
            return value, table

        return inner

    def change():
        nonlocal value
        value += 1

    assert noticed(outer, change)
    assert noticed(outer, lambda: later.append(2))
    assert noticed(outer, lambda: later.clear())
    environment = watched(lambda: unassigned)
    unassigned = 1
    assert environment.changed()


def test_partials_methods_and_wrappers():
    table = {"a": 1}

    class Owner:
        def __init__(self):
            self.value = 1

        def method(self):
            return self.value

        def __call__(self):
            return self.value

    @functools.wraps(reads_global)
    def wrapper():
        return 0

    owner = Owner()
    assert noticed(functools.partial(reads_global, table), lambda: table.update(a=2))
    assert noticed(functools.partial(reads_global, x=table), lambda: table.update(b=2))
    assert noticed(functools.partial(owner.method), lambda: setattr(owner, "value", 2))
    assert noticed(owner, lambda: setattr(owner, "value", 3))
    assert noticed(owner.method, lambda: setattr(owner, "new", 3))
    assert noticed(owner.method, lambda: setattr(Owner, "new", 3))
    environment = watched(wrapper)
    globals()["VALUE"] += 1
    assert environment.changed()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ({"a": 1000}, lambda v: v.update(a=1000.0)),
        ([1, 2], lambda v: v.__setitem__(0, 2)),
        ([1, 2], lambda v: v.pop()),
        ({"a": 1}, lambda v: v.update(a=2)),
        ({"a": 1}, lambda v: v.update(b=2)),
        ({"a": 1}, lambda v: v.pop("a")),
        (collections.OrderedDict(a=1), lambda v: v.update(a=2)),
        (([1],), lambda v: v[0].append(1)),
        ({1, 2}, lambda v: v.add(3)),
        ({1, 2}, lambda v: v.symmetric_difference_update({2, 3})),
        (collections.deque([1]), lambda v: v.append(3)),
        (types.SimpleNamespace(a=1), lambda v: setattr(v, "a", 2)),
        (argparse.Namespace(a=1), lambda v: setattr(v, "b", 2)),
        (np.zeros(3), lambda v: v.fill(1)),
        (np.zeros((2, 3))[:, ::2], lambda v: v.fill(1)),
        (torch.nn.Linear(1, 1), lambda v: setattr(v, "weight", torch.nn.Parameter(v.weight + 1))),
        (torch.nn.Linear(1, 1), lambda v: v.eval()),
        (torch.nn.Linear(1, 1), lambda v: v.register_buffer("b", torch.ones(1))),
        (torch.nn.Linear(1, 1), lambda v: v.register_forward_hook(print)),
        (torch.nn.Linear(1, 1), lambda v: setattr(v, "scale", 2)),
        (torch.nn.Sequential(torch.nn.Identity()), lambda v: v.append(torch.nn.Identity())),
        (torch.nn.Sequential(torch.nn.Dropout(0.5)), lambda v: setattr(v[0], "p", 0.1)),
        # in depth
        ([[[[[[[[[1]]]]]]]]], lambda v: v[0][0][0][0][0][0][0].append(1)),
        ([0.0], lambda v: v.__setitem__(0, -0.0)),
        ({"a": 0.0}, lambda v: v.update(a=-0.0)),
        ([complex(0, 0.0)], lambda v: v.__setitem__(0, complex(0, -0.0))),
        ([(1, 0.0)], lambda v: v.__setitem__(0, (1, -0.0))),
        ([1], lambda v: v.__setitem__(0, True)),
        ({1}, lambda v: (v.clear(), v.add(True))),
        ({1: 2}, lambda v: (v.clear(), v.update({True: 2}))),
        ([np.float32(0.0)], lambda v: v.__setitem__(0, np.float32(-0.0))),
        (collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
        ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
        (types.MappingProxyType(INSIDE), lambda v: INSIDE.update(a=2)),
        (collections.ChainMap({"a": 1}), lambda v: v.update(a=2)),
        (collections.UserDict({"a": 1}), lambda v: v.update(a=2)),
        (collections.UserList([1]), lambda v: v.append(2)),
        (weakref.ref(HELD), lambda v: HELD.append(2)),
        (weakref.WeakValueDictionary(a=HELD), lambda v: v.update(a=INSTANCE)),
        (weakref.WeakKeyDictionary({INSTANCE: 1}), lambda v: v.update({INSTANCE: 2})),
        (weakref.WeakSet([INSTANCE]), lambda v: v.add(Scaled)),
        (queue.Queue(), lambda v: v.put(1)),
        (memoryview(bytearray(3)), lambda v: v.__setitem__(0, 1)),
        (memoryview(array.array("f", [1.0, 5.0])), lambda v: v.__setitem__(1, 2.0)),
        (argparse.Namespace(inner=settings()), lambda v: setattr(v.inner, "settings", {"a": 2})),
        (torch.nn.Sequential(settings()), lambda v: v[0].settings.update(a=2)),
    ],
    ids=lambda given: None if callable(given) else type(given).__name__,
)
def test_values(value, change):
    assert noticed(lambda: value, lambda: change(value))


@pytest.mark.parametrize(
    "make",
    [
        lambda: int("1000"),
        lambda: "".join(["text"] * 10),
        lambda: float("2.5"),
        lambda: float("nan"),
        lambda: complex(float("nan"), 1),
        lambda: (1, "a", (float("2.5"),)),
        lambda: torch.Size([1000, 2]),
        lambda: torch.device("cpu"),
        lambda: np.float32(2.5),
        lambda: HELD.append,
        lambda: INSTANCE.scaled,
        lambda: slice(1000, None),
    ],
)
def test_values_made_anew_are_the_same(make):
    table = {"a": make()}
    assert not noticed(lambda: table, lambda: table.update(a=make()))


def test_code_of_methods(monkeypatch):
    module = torch.nn.Sequential(Scaled())
    followed = [INSTANCE, INSTANCE.scaled, lambda: INSTANCE.scaled(), module, lambda: module(1)]
    followed += [lambda: Scaled.fixed(), lambda: INSTANCE.doubled]
    for fun in followed:
        if fun is not INSTANCE:
            assert noticed(fun, lambda: monkeypatch.setitem(globals(), "VALUE", VALUE + 1))
    for fun in (lambda: INSTANCE.scaled(), lambda: module(1)):
        assert not noticed(fun, lambda: monkeypatch.setitem(globals(), "DRIVEN", DRIVEN + 1))
    replaced = {"scaled": lambda self: 1, "fixed": staticmethod(reads_global)}
    for name, new in replaced.items():
        fun = eval(f"lambda: INSTANCE.{name}()", {"INSTANCE": INSTANCE})
        assert noticed(fun, lambda name=name, new=new: monkeypatch.setattr(Scaled, name, new))
    assert noticed(module, lambda: monkeypatch.setattr(Scaled, "forward", reads_global))


def test_functions_themselves():
    def scaled(r, by=1, *, also=1):
        return r * scaled.scale

    scaled.scale = 2.0
    scaled.calls = 0
    assert noticed(scaled, lambda: setattr(scaled, "scale", 7.0))
    assert noticed(lambda r: scaled(r), lambda: setattr(scaled, "scale", 8.0))
    assert not noticed(scaled, lambda: setattr(scaled, "calls", 1))
    assert noticed(scaled, lambda: setattr(scaled, "__defaults__", (2,)))
    assert noticed(scaled, lambda: setattr(scaled, "__kwdefaults__", {"also": 2}))
    assert noticed(scaled, lambda: scaled.__kwdefaults__.update(also=3))
    other = reads_global
    fun = types.FunctionType(other.__code__, {"VALUE": 1})
    assert noticed(fun, lambda: setattr(fun, "__code__", calls_another.__code__))


def test_modules_imported_by_the_function(monkeypatch):
    module = types.ModuleType("torchpmaps_users_settings")
    module.inner = types.ModuleType("torchpmaps_users_settings.inner")
    module.rate = module.inner.rate = 1
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def fun():
        import torchpmaps_users_settings as settings

        return settings.rate + settings.inner.rate

    assert noticed(fun, lambda: setattr(module, "rate", 2))
    assert noticed(fun, lambda: setattr(module.inner, "rate", 2))
    assert noticed(lambda: module.rate, lambda: setattr(module, "rate", 3))


def test_attributes():
    class Strict:
        __slots__ = ("unset", "value")

        def __getattr__(self, name):
            raise KeyError(name)

    class Table(dict):
        __getattr__ = dict.__getitem__

    class Derived(Strict):
        rate = 1

    strict, w, table, derived = Strict(), torch.ones(1), Table(a=1), Derived()
    strict.value = w.tag = 1
    assert noticed(lambda: table.a, lambda: table.update(a=2))
    assert noticed(lambda: Derived.rate, lambda: setattr(Derived, "rate", 2))
    assert noticed(lambda: derived.rate, lambda: setattr(Derived, "rate", 3))
    assert noticed(lambda: derived.rate, lambda: setattr(Strict, "rate", 4))
    assert noticed(lambda: strict.value, lambda: setattr(strict, "value", 2))
    assert noticed(lambda: strict.value, lambda: setattr(strict, "unset", 2))
    assert noticed(lambda r: r * w.tag, lambda: setattr(w, "tag", 2))
    assert not noticed(lambda r: r * w, lambda: setattr(w, "tag", 3))


def test_attributes_that_a_function_gets_later():
    def helper():
        return 1

    def ask(function):
        return getattr(function, "rate", 1)

    assert noticed(lambda: ask(helper), lambda: setattr(helper, "rate", 2))
    assert noticed(lambda: ask(helper), lambda: delattr(helper, "rate"))
    assert not noticed(lambda: helper(), lambda: setattr(helper, "rate", 2))


def test_attributes_and_texts_with_the_name_of_a_global(monkeypatch):
    fun = eval("lambda r: r.STEP(axis='VALUE')", globals())
    for name in ("STEP", "VALUE"):
        monkeypatch.setitem(globals(), name, 1)
        assert not noticed(fun, lambda name=name: monkeypatch.setitem(globals(), name, 2))


def test_in_place_changes_of_tensors_are_noticed_elsewhere():
    w, module = torch.ones(1), torch.nn.Linear(1, 1)

    def change():
        w.add_(1)
        with torch.no_grad():
            module.weight.add_(1)

    assert not noticed(lambda: (w, module), change)


def test_what_the_function_itself_made_is_no_change():
    cache = {}

    def f():
        cache["x"] = cache.get("x", 0) + 1

    environment = Environment(f)
    f()
    environment.refresh()
    assert not environment.changed()


def test_foreign_code_is_not_followed(monkeypatch):
    assert not noticed(
        torch.nn.functional.relu, lambda: monkeypatch.setattr(torch, "q", 1, raising=False)
    )
    environment = watched(lambda: (torch.sin, np.sin, functools.reduce))
    assert len(environment._watched) < 5


def test_cycles_and_large_structures_end():
    loop = []
    loop.append(loop)
    watched(lambda: loop)
    many = list(range(50_000))
    environment = watched(lambda: many)
    assert len(environment._watched) < 10
    many[-1] = 0
    assert environment.changed()


def test_what_leads_too_far_is_named_once():
    objects = [[number] for number in range(21_000)]
    environment = Environment(lambda: objects)
    environment.refresh()
    with pytest.warns(UserWarning, match=r"closes over 'objects'.*Pass what changes as an argum"):
        assert not environment.changed()
    assert not environment.changed()
    objects[0][0] = 1
    assert environment.changed()
