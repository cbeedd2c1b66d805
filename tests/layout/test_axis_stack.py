"""Covers: _layout/axis_stack.py."""

import torch
from _support import in_threads

from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import Axis


def axis(name, size=4):
    return Axis(name, size, torch.tensor(0), f"group of {name}")


def test_innermost_binding_wins():
    key = object()  # any hashable is a name
    outer, other, inner = axis("i"), axis(key, 2), axis("i", 3)
    with axis_stack.bind(outer), axis_stack.bind(other) as bound:
        assert axis_stack.lookup(key) is bound
        with axis_stack.bind(inner):
            assert axis_stack.lookup("i") == (inner,)
            assert axis_stack.lookup(key) == (other,)
            assert axis_stack.bound() == ((outer,), (other,), (inner,))
        assert axis_stack.lookup("i") == (outer,)
    assert axis_stack.bound() == ()


def test_axes_are_bound_per_thread():
    with axis_stack.bind(axis("i")):
        assert in_threads(1, lambda _: len(axis_stack.bound())) == [0]


def test_recording_nests_and_hears_other_threads():
    outer, inner = [], []
    axis_stack.record(("no call", "listens"))
    with axis_stack.recording(outer.append):
        axis_stack.record(("a",))
        with axis_stack.recording(inner.append):
            axis_stack.record(("b",))
        axis_stack.record(("c",))
        in_threads(1, lambda _: axis_stack.record(("backward",)))
    axis_stack.record(("d",))
    assert outer == [("a",), ("c",), ("backward",)]
    assert inner == [("b",)]


def test_subgroup_names_are_distinct_and_readable():
    assert axis_stack.subgroup_name("i", ((0, 2), (3, 1))) == "i[0,2|3,1]"
    names = [axis_stack.subgroup_name("i", lists) for lists in (((1, 2), (3,)), ((12,), (3,)))]
    assert names[0] != names[1]
