"""Covers: _trace/reach.py: changes of classes, modules, partials and what hides behind names."""

import abc
import contextvars
import functools
import importlib
import sys
import threading
import types

import numpy as np
import pytest
import torch
from _outside import a_class, check_follows, noticed

import torchpmap as tp

VALUE = 1


def reads_global():
    return VALUE


def calls_another():
    return reads_global()


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * VALUE


class Doubling(torch.nn.Module):
    def forward(self, x):
        return x * 2


class Meta(type):
    rate = 1


class Made(metaclass=Meta):
    pass


def test_classes_that_are_assigned():
    One, Two = a_class(rate=1), a_class(rate=2)
    Derived, Slotted, Other = a_class(One), a_class(__slots__=()), a_class(__slots__=())
    module, instance, slotted = Scaled(), One(), Slotted()
    assert noticed(lambda: module(1), lambda: setattr(module, "__class__", Doubling))
    assert noticed(lambda: instance.rate, lambda: setattr(instance, "__class__", Two))
    assert noticed(lambda: slotted, lambda: setattr(slotted, "__class__", Other))
    assert noticed(lambda: Derived.rate, lambda: setattr(Derived, "__bases__", (Two,)))
    derived = Derived()
    assert noticed(lambda: derived.rate, lambda: setattr(Derived, "__bases__", (One,)))


def test_metaclasses():
    assert noticed(lambda: Made.rate, lambda: setattr(Meta, "rate", 2))
    assert noticed(lambda: Made.rate, lambda: setattr(Made, "__class__", a_class(type, rate=3)))
    Made.__class__ = Meta


def test_classes_that_are_registered_with_an_abstract_one():
    class Abstract(abc.ABC):  # noqa: B024
        pass

    First, Second = a_class(), a_class()
    value = First()
    assert noticed(lambda: isinstance(value, Abstract), lambda: Abstract.register(First))
    assert noticed(lambda: isinstance(value, Abstract), lambda: Abstract.register(Second))


def test_dicts_of_instances_that_are_assigned():
    module, instance, plain = Scaled(), types.SimpleNamespace(a=1), a_class()()
    assert noticed(lambda: plain.a, lambda: setattr(plain, "__dict__", {"a": 2}))
    assert noticed(lambda: plain.a, lambda: plain.__dict__.update(a=3))
    state = {**vars(module), "extra": 1}
    assert noticed(lambda: module(1), lambda: setattr(module, "__dict__", state))
    assert noticed(lambda: instance, lambda: instance.__init__(a=2))


def test_parts_of_partials():
    inner = functools.partial(reads_global, 1, rate=1)
    assert noticed(lambda: inner(), lambda: inner.keywords.update(rate=2))
    state = (calls_another, (1,), {"rate": 2}, {})
    assert noticed(lambda: inner(), lambda: inner.__setstate__(state))
    assert noticed(lambda: inner(), lambda: setattr(inner, "tag", 2))
    assert noticed(inner, lambda: inner.keywords.update(rate=3))


def test_names_that_come_to_hide_those_of_python(monkeypatch):
    fun = eval("lambda x: sum(x)", globals())
    assert noticed(fun, lambda: monkeypatch.setitem(globals(), "sum", max))
    assert noticed(fun, lambda: monkeypatch.delitem(globals(), "sum"))


@pytest.mark.parametrize(("one", "other"), [(np, torch), (torch.nn.ReLU, torch.nn.Tanh)])
def test_names_of_modules_and_foreign_classes(one, other):
    table = {"library": one}
    fun = eval("lambda x: library", table)
    assert noticed(fun, lambda: table.update(library=other))
    module = types.ModuleType("users_module")
    module.library = one
    through = eval("lambda: settings.library", {"settings": module})
    assert not noticed(through, lambda: setattr(module, "other", 2))
    assert noticed(through, lambda: setattr(module, "library", other))


def test_attributes_that_a_module_lacks():
    module = types.ModuleType("users_module")
    names = {"settings": module}
    asks = eval("lambda: getattr(settings, 'rate', 1)", names)
    assert noticed(asks, lambda: setattr(module, "rate", 2))
    table = {"extra": 1}
    module.__getattr__ = lambda name: table[name]
    computed = eval("lambda: settings.extra", names)
    assert noticed(computed, lambda: table.update(extra=2))
    assert noticed(computed, lambda: setattr(module, "__getattr__", lambda name: 3))
    assert noticed(computed, lambda: setattr(module, "extra", 4))


def test_context_variables_and_locals_of_threads():
    variable, local = contextvars.ContextVar("variable", default=1), threading.local()
    local.rate = 1
    assert noticed(lambda: variable.get(), lambda: variable.set(2))
    assert noticed(lambda: local.rate, lambda: setattr(local, "rate", 2))


def test_wrappers_named_like_what_they_wrap(monkeypatch):
    @functools.wraps(torch.nn.functional.gelu)
    def wrapper(x):
        return x * VALUE

    @functools.lru_cache
    def cached():
        return VALUE

    for fun in (wrapper, lambda: wrapper(1), lambda: cached()):
        assert noticed(fun, lambda: monkeypatch.setitem(globals(), "VALUE", VALUE + 1))


@pytest.mark.parametrize("name", ["trace", "code", "profile", "calendar", "test.settings"])
def test_modules_named_like_those_of_python(tmp_path, monkeypatch, name):
    folder = tmp_path
    for part in name.split(".")[:-1]:
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / f"{name.split('.')[-1]}.py").write_text(
        "RATE = 1\n"
        "def scaled(x):\n    return x * RATE\n"
        "class Scale:\n    rate = 1\n"
        "    def __init__(self):\n        self.own = 1\n"
    )
    package = name.partition(".")[0]
    for known in [known for known in sys.modules if known.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.syspath_prepend(tmp_path)
    for known in {package, name}:
        monkeypatch.setitem(sys.modules, known, None)  # afterwards it is Python's again
        del sys.modules[known]
    module = importlib.import_module(name)
    instance = module.Scale()
    assert noticed(lambda: module.RATE, lambda: setattr(module, "RATE", 2))
    assert noticed(lambda: module.scaled(1), lambda: setattr(module, "RATE", 3))
    assert noticed(module.scaled, lambda: setattr(module, "RATE", 4))
    assert noticed(lambda: instance.own, lambda: setattr(instance, "own", 2))
    assert noticed(lambda: instance.rate, lambda: setattr(module.Scale, "rate", 2))


def test_functions_that_are_chosen_by_type():
    @functools.singledispatch
    def scale(value):
        return 1

    class Scale:
        @functools.singledispatchmethod
        def of(self, value):
            return 1

    instance = Scale()
    assert noticed(lambda: scale(3), lambda: scale.register(int, lambda value: 2))
    assert noticed(lambda: instance.of(3), lambda: Scale.of.register(int, lambda self, value: 2))


def rebased():
    Double, Parent = a_class(metaclass=Meta, rate=2.0), a_class(metaclass=Meta, rate=1.0)
    Child = a_class(Parent)
    child = Child()
    return lambda x: x * child.rate, lambda: setattr(Child, "__bases__", (Double,))


def of_another_metaclass():
    One, Doubling = a_class(type, rate=1.0), a_class(type, rate=2.0)
    Other = a_class(metaclass=One)
    return lambda x: x * Other.rate, lambda: setattr(Other, "__class__", Doubling)


def with_less():
    Parent = a_class(metaclass=Meta, rate=2.0)
    Child = a_class(Parent, rate=1.0)
    child = Child()
    return lambda x: x * child.rate, lambda: delattr(Child, "rate")


def with_a_cached_property():
    cached = functools.cached_property(lambda self: self.rate)
    Parent = a_class(metaclass=Meta, rate=1.0)
    Child = a_class(Parent, rate=1.0, cached=cached)
    child = Child()

    def change():
        Child.rate = 2.0
        child.__dict__.pop("cached", None)

    return lambda x: x * child.cached, change


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("make", [rebased, of_another_metaclass, with_less, with_a_cached_property])
def test_classes_that_the_workers_know_from_before(make, mode):
    f, change = make()
    check_follows(tp.pmap(f, compile=mode), lambda _: change(), [2.0])
