"""Covers: _trace/reach.py: what code reads that no code of the user's calls by its name."""

import collections
import enum
import functools
import operator
import threading
import typing
import weakref

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from _outside import noticed, watched

from torchpmap._trace.environment import Environment

FACTOR = 1
getter = operator.attrgetter
get_attribute = object.__getattribute__


TEMPLATE = "{0.scale}"


class Owner:
    def __init__(self):
        self.scale = 1

    def of_scale(self):
        return self.scale

    taken = property(operator.methodcaller("of_scale"))


class Act(enum.IntEnum):
    A = 1
    B = 2

    def __call__(self):
        return int(self)


class OfScale:
    def __init__(self, owner):
        self.value = owner.scale


class Generic(OfScale, typing.Generic[typing.TypeVar("T")]):
    pass


ALIAS = Generic[int]


class New:
    def __new__(cls, owner):
        self = object.__new__(cls)
        self.value = owner.scale
        return self


class OfFactor:
    def __init__(self):
        self.value = FACTOR

    def another(self):
        return type(self)()

    @classmethod
    def made(cls):
        return cls()


class Partly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale = torch.nn.Parameter(torch.ones(1)), 1

    def named_parameters(self, *args, **kwargs):
        return list(super().named_parameters(*args, **kwargs)) * self.scale

    def get_extra_state(self):
        return self.scale


class Slotted(torch.nn.Module):
    __slots__ = ("scale",)

    def __init__(self):
        super().__init__()
        self.scale = 1

    def forward(self):
        return self.scale


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2), 1

    @property
    def current(self):
        return self.a if self.scale == 1 else self.b


class Multiplied(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return x * self.blocks.scale


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vjp(ctx, cotangent):
        return cotangent * FACTOR


class Doubling(property):
    def __get__(self, instance, owner=None):
        return super().__get__(instance, owner) * FACTOR


class OfThread(threading.local):
    def of_factor(self):
        return FACTOR


class Rows(np.ndarray):
    pass


class Node:
    def __init__(self, owner):
        self.owner = owner


class Interface:
    def __init__(self):
        self.keep = np.ones(1), np.zeros(1)
        self.__array_interface__ = self.keep[0].__array_interface__


pytree.register_pytree_node(Node, lambda node: ([node.owner.scale], None), lambda *_: None)


def calls_a_value():
    owner = Owner()
    owner.act = Act.A
    return lambda: owner.act(), lambda: setattr(owner, "act", Act.B)


def of_a_proxy():
    owner = Owner()
    proxy = weakref.proxy(owner)
    return lambda: proxy.scale, scaled(owner)


def of_a_bound_method():
    table = {"a": 1}
    get = table.get
    return lambda: get("a"), lambda: table.update(a=2)


def of_a_bound_wrapper():
    owner = Owner()
    get = owner.__getattribute__
    return lambda name="sca": get(name + "le"), scaled(owner)


def of_an_array():
    rows = np.ones(1).view(Rows)
    rows.scale = 1
    return lambda: rows.scale, scaled(rows)


def of_an_interface():
    owner = Interface()
    other = owner.keep[1].__array_interface__
    return lambda: np.asarray(owner).tolist(), lambda: setattr(owner, "__array_interface__", other)


def of_a_node():
    owner = Owner()
    node = Node(owner)
    return lambda: pytree.tree_leaves(node), scaled(owner)


def of_a_default():
    table = collections.defaultdict(lambda: FACTOR)

    def call():
        table.clear()
        return table["a"]

    return call, lambda: globals().update(FACTOR=2)


def of_compiled_code():
    """JAX's library of C++ reads the attributes of its nodes."""
    jax = pytest.importorskip("jax")
    kind = jax.tree_util.register_dataclass(type("Kind", (Owner,), {}), ["scale"], [])
    owner = kind()
    return lambda: jax.tree_util.tree_leaves(owner), scaled(owner)


def of_a_mapped_partial():
    owner = Owner()
    mapped = torch.func.vmap(functools.partial(lambda owner, x: x * owner.scale, owner))
    return lambda: mapped(torch.ones(1)).item(), scaled(owner)


def of_a_mapped_container():
    blocks = Blocks()
    mapped = torch.func.vmap(torch.nn.Sequential(Multiplied(blocks)))
    return lambda: mapped(torch.ones(1)).item(), scaled(blocks)


def scaled(owner):
    return lambda: setattr(owner, "scale", 2)


def of(make, read):
    """A case in which a function reads something of an owner."""

    def case():
        owner = make()
        return lambda: read(owner), scaled(owner)

    return case


def of_factor(read):
    return lambda: (read, lambda: globals().update(FACTOR=2))


def gradient():
    x = torch.ones(1, requires_grad=True)
    Scaled.apply(x).backward()
    return x.grad.item()


def matched(owner):
    match owner:
        case WithProperty(total=total):
            return total


class WithProperty(Owner):
    total = property(lambda self: FACTOR)


call = operator.methodcaller("of_scale")
THREAD = OfThread()
DOUBLING = type("Of", (), {"x": Doubling(lambda self: 1)})()
OF_FACTOR, WITH_PROPERTY = OfFactor(), WithProperty()


@pytest.mark.parametrize(
    "case",
    [
        *(calls_a_value, of_a_proxy, of_a_bound_method, of_a_bound_wrapper, of_an_array),
        *(of_an_interface, of_a_node, of_a_default, of_compiled_code),
        *(of_a_mapped_partial, of_a_mapped_container),
        of(Owner, lambda owner: call(owner)),
        of(Owner, lambda owner: owner.taken),
        of(Owner, lambda owner, name="sca": getter(name + "le")(owner)),
        of(Owner, lambda owner, name="sca": get_attribute(owner, name + "le")),
        of(Owner, lambda owner: OfScale(owner).value),
        of(Owner, lambda owner: New(owner).value),
        of(Owner, lambda owner: TEMPLATE.format(owner)),
        of(Owner, lambda owner: ALIAS(owner).value),
        of(Partly, lambda module: len(list(module.parameters()))),
        of(Partly, lambda module: module.state_dict()["_extra_state"]),
        of(Slotted, lambda module: module()),
        of(Blocks, lambda x: torch.nn.Sequential(x).get_submodule("0.current").out_features),
        of_factor(lambda: OfFactor().value),
        of_factor(lambda: OF_FACTOR.another().value),
        of_factor(lambda: OF_FACTOR.made().value),
        of_factor(gradient),
        of_factor(lambda: DOUBLING.x),
        of_factor(lambda: THREAD.of_factor()),
        of_factor(lambda: matched(WITH_PROPERTY)),
    ],
)
def test_it_is_watched(case, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1)
    fun, change = case()
    before, environment = fun(), watched(fun)
    change()
    has_changed = environment.changed()
    assert fun() != before
    assert has_changed


def test_a_class_that_is_given():
    owner, instance = Owner(), OfScale(Owner())
    environment = Environment(lambda kind: (instance, kind(owner)), (OfScale,))
    environment.refresh()
    assert not environment.changed()
    owner.scale = 2
    assert environment.changed()


class Base:
    def of_rate(self):
        return 1


class Trainer(Base):
    """No code makes one of these."""

    def __init__(self):
        self.count, self.losses = 0, []
        self.next = self.count + 1

    def of_rate(self):
        return super().of_rate()


def test_what_makes_an_instance_that_is_there_is_not_watched():
    trainer = Trainer()
    assert not noticed(trainer.of_rate, lambda: setattr(trainer, "count", 1))
    assert not noticed(trainer.of_rate, lambda: trainer.losses.append(1))
