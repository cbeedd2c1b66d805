"""Covers: _base/exact.py: keys that are equal only for values that no code can tell apart."""

import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import uuid
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from torchpmap._base.exact import Pictures, exact

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: object


class Named:
    """Equal by name alone."""

    def __init__(self, name, scale):
        self.name, self.scale = name, scale

    def __eq__(self, other):
        return type(other) is Named and self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Text(str):
    pass


class Settings(dict):
    __hash__ = None


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


def text(value, **attributes):
    made = Text(value)
    vars(made).update(attributes)
    return made


DIFFERENT = [
    *(lambda: None, lambda: 1, lambda: 1.0, lambda: True, lambda: 1 + 0j, lambda: "1"),
    *(lambda: b"1", lambda: decimal.Decimal("1.0"), lambda: decimal.Decimal("1.00")),
    *(lambda: 0.0, lambda: -0.0, lambda: float("nan"), lambda: complex(0, -0.0), lambda: 0j),
    *(lambda: (1,), lambda: (1.0,), lambda: (True,), lambda: [1], lambda: ((1,),), lambda: ([1],)),
    *(lambda: {1}, lambda: {1.0}, lambda: frozenset([1]), lambda: frozenset([1.0])),
    *(lambda: frozenset([0, 8]), lambda: frozenset([8, 0])),
    *(lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}, lambda: OrderedDict(a=1, b=2)),
    *(lambda: Pair(1, 2), lambda: Pair(1, 2.0), lambda: (1, 2), lambda: torch.Size([1, 2])),
    *(lambda: Frozen(1), lambda: Frozen(1.0), lambda: Frozen([1]), lambda: Frozen(Frozen(1))),
    *(lambda: Slotted(1), lambda: Slotted(True)),
    *(lambda: Named("a", 1), lambda: Named("a", 2), lambda: Named("b", 1)),
    *(lambda: Text("1"), lambda: text("1", unit="m"), lambda: text("1", unit="s")),
    *(lambda: Settings(a=1), lambda: Settings(a=1.0)),
    *(lambda: Color.RED, lambda: Color.BLUE, lambda: int, lambda: float),
    lambda: fractions.Fraction(1),
    *(lambda: datetime.date(2020, 1, 1), lambda: datetime.datetime(2020, 1, 1)),
    *(lambda: datetime.datetime(2020, 1, 1, fold=1), lambda: uuid.UUID(int=1)),
    *(lambda: pathlib.PurePosixPath("a"), lambda: pathlib.PureWindowsPath("a")),
    *(lambda: range(0, 3, 2), lambda: range(0, 4, 2), lambda: slice(0, 1), lambda: slice(0, 1.0)),
    *(lambda: list[int], lambda: list[float], lambda: ..., lambda: print, lambda: torch.relu),
    *(lambda: np.float32(1), lambda: np.float64(1), lambda: np.int64(1), lambda: np.float32(-0.0)),
    *(lambda: np.datetime64(1, "s"), lambda: np.datetime64(1000, "ms"), lambda: np.dtype("f4")),
    *(lambda: np.zeros(2), lambda: np.zeros(2, "f4"), lambda: np.zeros((2, 1))),
    lambda: -np.zeros(2),
    *(lambda: torch.float32, lambda: torch.float64, lambda: torch.device("cpu"), lambda: "cpu"),
    *(lambda: functools.partial(print, 1), lambda: functools.partial(print, 1.0)),
    *(lambda: functools.partial(print, end=1), lambda: "".join, lambda: torch.strided),
]


def test_equal_only_to_what_is_made_in_the_same_way():
    keys = [exact(make()) for make in DIFFERENT]
    again = [exact(make()) for make in DIFFERENT]
    for k, key in enumerate(keys):
        assert [other for other, found in enumerate(again) if found == key] == [k]
        assert hash(key) == hash(again[k])


@pytest.mark.parametrize(
    "make", [object, lambda: torch.ones(1), lambda: torch.nn.Linear(1, 1), lambda: lambda: 1]
)
def test_what_has_no_value_is_equal_to_itself(make):
    one, other = make(), make()
    assert exact(one) == exact(one)
    assert exact((1, one)) == exact((1, one))
    assert exact(one) != exact(other)
    assert exact(Frozen(one)) != exact(Frozen(other))


def test_a_key_keeps_what_a_value_was():
    for value, change in [
        ([1], lambda v: v.append(2)),
        (Named("a", 1), lambda v: setattr(v, "scale", 2)),
        (Frozen({"a": [1]}), lambda v: v.value["a"].append(2)),
        (np.zeros(2), lambda v: v.fill(1)),
        (functools.partial(print, end=1), lambda v: v.keywords.update(end=2)),
    ]:
        before = exact(value)
        assert exact(value) == before
        change(value)
        assert exact(value) != before


@dataclasses.dataclass(frozen=True)
class Config:
    size: int

    @functools.cached_property
    def twice(self):
        return 2 * self.size


def test_cycles_and_properties_that_were_computed_are_no_part_of_a_value():
    loop, other, config = [], [], Config(2)
    loop.append(loop)
    other.append([other])
    assert exact(loop) == exact(loop)
    assert exact(loop) != exact(other)
    before = exact(config)
    assert config.twice == 4
    assert exact(config) == before


def test_values_that_cannot_be_read_are_equal_to_themselves():
    class Odd:
        __slots__ = ()

        def __eq__(self, other):
            raise AssertionError("no code of the class is called")

        def __hash__(self):
            return 0

        def __reduce_ex__(self, protocol):
            raise TypeError("not readable")

    odd = Odd()
    assert exact(odd) == exact(odd)
    assert exact(odd) != exact(Odd())


def test_what_may_change_unseen_is_told():
    module = torch.nn.Linear(1, 1)
    pictures = Pictures()
    pictures.of((1, "a", Frozen(module)))
    assert pictures.identities == [module]
    assert pictures.has_parts
    pictures = Pictures()
    pictures.of((1, "a", (2.5, torch.float32)))
    assert not pictures.identities
    assert not pictures.has_parts
