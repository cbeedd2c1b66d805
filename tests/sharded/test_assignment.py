"""Covers: _sharded/indexing.py: ``x[index] = value`` is torch's, and where it gathers."""

import itertools

import numpy as np
import pytest
import torch
from _sharded_values import nothing_gathers, numbers
from _sharded_values import on_mesh as put
from _spies import asked

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

HERE = numbers(4, 4, 8)
EVEN = torch.tensor([True, False, True, False])
ALL = slice(None)
INDICES = {
    "number": (0,), "negative": -1, "numpy number": np.int64(1),
    "tensor of a number": torch.tensor(1), "slice": slice(1, 3), "past the end": slice(3, 9),
    "nothing": slice(2, 2), "all": ALL, "dots": ..., "no index": (), "column": (ALL, 0),
    "last column": (ALL, -1), "columns": (ALL, slice(1, 3)),
    "steps": (ALL, slice(None, None, 2)), "tensor number of column": (ALL, torch.tensor(1)),
    "dots and number": (..., 0), "dots and slice": (..., slice(1, 3)),
    "new dims": (None, ALL, None, 1, None), "true": True, "false": False, "element": (0, 1, 2),
    "places": torch.tensor([2, 0]), "places of columns": (ALL, torch.tensor([2, 0])),
    "list": (ALL, [0, 3]), "array": (ALL, np.array([0, 3])), "only a list": [0, 3],
    "empty list": [], "empty list of columns": (ALL, []),
    "grid of places": (ALL, torch.tensor([[0, 1], [2, 3]])),
    "places of two": (ALL, torch.tensor([0, 3]), torch.tensor([1, 2])),
    "places apart": (torch.tensor([0, 3]), ALL, torch.tensor([1, 2])),
    "number and places": (ALL, 1, [0, 3]), "mask": HERE > 0, "mask of rows": EVEN,
    "mask of columns": (ALL, EVEN), "list of booleans": (ALL, EVEN.tolist()),
    "mask of planes": (ALL, HERE[0] > 0), "mask and places": (ALL, EVEN, torch.tensor([1, 2])),
    "wrong mask": torch.tensor([True, False]), "out of range": (ALL, 9),
    "too many": (0, 0, 0, 0),
}  # fmt: skip
LAYOUTS = {"rows": ("i",), "columns": (None, "i"), "last": (None, None, "i"), "whole": ()}


def values_for(index):
    """A number, and tensors that suit, or do not."""
    try:
        part = HERE[index]
    except (IndexError, RuntimeError):
        return [5.0]
    tensors = [torch.tensor(3.0), numbers(*part.shape) + 0.5, torch.tensor([1.0]).double()]
    return [5.0, 7, True, *tensors]


def error_of(write, x):
    try:
        write(x)
    except (IndexError, RuntimeError) as error:
        return type(error)
    return None


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)
def test_assignments(index, spec):
    for value in values_for(index):
        expected, x = HERE.clone(), put(HERE, spec)
        error = error_of(lambda x, v=value: x.__setitem__(index, v), expected)
        assert error_of(lambda x, v=value: x.__setitem__(index, v), x) == error
        assert torch.equal(x.cpu(), expected)
        assert x.sharding.spec == put(HERE, spec).sharding.spec
        if error is None and isinstance(value, torch.Tensor):
            x = put(HERE, spec)
            x[index] = tp.replicate(value)
            assert torch.equal(x.cpu(), expected)


IN_PLACE = {
    "rows": ["column", "columns", "steps", "dots and number", "new dims", "places of columns"],
    "columns": ["number", "slice", "dots and slice", "places", "only a list", "mask of rows"],
    "last": ["number", "column", "grid of places"],
    "whole": [name for name in INDICES if name not in ("wrong mask", "out of range", "too many")],
}
ANYWHERE = ["dots", "all", "true", "mask", "mask of rows", "mask of columns", "mask of planes"]
STAYING = [
    *((layout, name) for layout, names in IN_PLACE.items() for name in names),
    *itertools.product(LAYOUTS, ANYWHERE),
    *(("rows", name) for name in ("number", "negative", "numpy number", "element")),
]


@pytest.mark.parametrize(("layout", "name"), STAYING)
def test_assignments_to_whole_dims_stay_on_the_devices(layout, name):
    x = put(HERE, LAYOUTS[layout])
    with nothing_gathers():
        x[INDICES[name]] = 5.0
        x[INDICES[name]] = torch.tensor(2.0)


def test_values_of_masks_fetch_the_mask_alone():
    x, mask = put(HERE, ("i",)), tp.replicate(EVEN)
    expected = HERE.clone()
    expected[:, EVEN] = HERE[:, ~EVEN]
    with tp.debug.report_gathers() as gathers:
        x[:, mask] = x[:, ~EVEN]
    assert [gather.num_bytes for gather in gathers] == [4]
    assert torch.equal(x.cpu(), expected)
    with nothing_gathers():
        part = x[:, EVEN]
    assert torch.equal(part.cpu(), expected[:, EVEN])


def test_assignments_to_cut_dims_fetch_and_send_the_value_once(monkeypatch):
    for name in ("slice", "past the end"):
        x = put(HERE, ("i",))
        version = x._version
        calls = asked(monkeypatch)
        with tp.debug.report_gathers() as gathers:
            x[INDICES[name]] = 5.0
        assert [gather.num_bytes for gather in gathers] == [HERE.nbytes]
        assert [call for call, _ in calls] == ["fetch", "put"]
        assert x._version == version + 1


def test_assignments_to_tensors_of_inference_mode():
    with torch.inference_mode():
        x = put(HERE, ("i",))
        x[0] = 5.0
    assert x[0].tolist() == torch.full(HERE.shape[1:], 5.0).tolist()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        x[0] = 6.0


def test_a_part_of_the_same_tensor_is_assigned():
    expected = HERE.clone()
    expected[1:3] = expected[0]
    expected[:] = expected[-1]
    for spec in LAYOUTS.values():
        x = put(HERE, spec)
        x[1:3] = x[0]
        x[:] = x[-1]
        assert torch.equal(x.cpu(), expected)
