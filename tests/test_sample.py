"""Covers: tests/_support.py, which cases of a test run by default."""

import itertools

import pytest
from _support import _covering, _is_long


@pytest.mark.parametrize(
    "sizes", [(1,), (7,), (3, 5), (4, 4), (2, 3, 12), (3, 3, 3), (1, 6)], ids=str
)
def test_every_value_of_every_parameter_stays(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    chosen = _covering({row: list(enumerate(row)) for row in rows})
    for column, size in zip(zip(*chosen, strict=True), sizes, strict=True):
        assert set(column) == set(range(size))
    assert len(chosen) == len(set(chosen)) == max(sizes)


def test_values_of_a_short_parameter_are_met_equally_often():
    rows = itertools.product(range(3), range(12))
    chosen = _covering({row: list(enumerate(row)) for row in rows})
    assert sorted(short for short, _ in chosen) == sorted([0, 1, 2] * 4)


def test_what_a_table_leaves_out_is_not_missed():
    """Two parameters that are one product only in part."""
    rows = [("a", 0), ("a", 1), ("b", 1), ("c", 1)]
    chosen = _covering({row: list(enumerate(row)) for row in rows})
    assert set(chosen) == {("a", 0), ("b", 1), ("c", 1)}


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("mode", ["two by two"])
def test_a_mark_names_whole_parts_of_ids(request, name, mode):
    assert _is_long(request.node, ())
    assert _is_long(request.node, ("none", mode))
    assert _is_long(request.node, ("two",)) == (name == "two")
    assert not _is_long(request.node, ("by",))
