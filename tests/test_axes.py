"""Covers: _axes.py."""

from __future__ import annotations

import threading

import pytest
import torch

from torchpmap import _axes
from torchpmap._axes import Axis


def axis(name: str, size: int = 4) -> Axis:
    return Axis(name, size, torch.tensor(0), f"group of {name}")


def test_innermost_binding_wins() -> None:
    outer, other, inner = axis("i"), axis("j", 2), axis("i", 3)
    with _axes.bind(outer), _axes.bind(other):
        with _axes.bind(inner):
            assert _axes.lookup("i") == (inner,)
            assert _axes.lookup("j") == (other,)
            assert _axes.bound() == ((outer,), (other,), (inner,))
        assert _axes.lookup("i") == (outer,)
    assert _axes.bound() == ()


def test_error_unbinds() -> None:
    def fail() -> None:
        with _axes.bind(axis("i")):
            raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        fail()
    assert _axes.bound() == ()


def test_any_hashable_is_a_name() -> None:
    key = object()
    with _axes.bind(axis(key)) as bound:  # type: ignore[arg-type]
        assert _axes.lookup(key) is bound


def test_unbound_name_says_what_is_bound() -> None:
    with pytest.raises(NameError, match=r"^unbound axis name: j\. Bound here: nothing\. Name the"):
        _axes.lookup("j")
    with _axes.bind(axis("i")), _axes.bind(axis("k", 2)), pytest.raises(NameError) as caught:
        _axes.lookup("j")
    assert str(caught.value) == (
        "unbound axis name: j. Bound here: 'i' (size 4), 'k' (size 2). Name the axis where the "
        "function is mapped: pmap(f, axis_name='j') or vmap(f, axis_name='j')."
    )


def test_axes_are_bound_per_thread() -> None:
    seen: list[int] = []
    with _axes.bind(axis("i")):
        thread = threading.Thread(target=lambda: seen.append(len(_axes.bound())))
        thread.start()
        thread.join()
    assert seen == [0]


def test_recording_collects_and_nests() -> None:
    _axes.record(("nobody", "listens"))
    with _axes.recording() as outer:
        _axes.record(("a",))
        with _axes.recording() as inner:
            _axes.record(("b",))
        _axes.record(("c",))
    _axes.record(("d",))
    assert outer == [("a",), ("c",)]
    assert inner == [("b",)]


def test_recording_hears_other_threads() -> None:
    with _axes.recording() as calls:
        thread = threading.Thread(target=_axes.record, args=(("backward",),))
        thread.start()
        thread.join()
    assert calls == [("backward",)]


def test_subgroup_names_are_distinct_and_readable() -> None:
    assert _axes.subgroup_name("i", ((0, 2), (3, 1))) == "i[0,2|3,1]"
    assert _axes.subgroup_name("i", ((1, 2), (3,))) != _axes.subgroup_name("i", ((12,), (3,)))
