"""Covers: check_array in _base/errors.py: arrays that mean more than their data are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


class Metres(np.ndarray):  # type: ignore[type-arg]
    """As astropy's or unyt's arrays: the data say less than the array."""


MASKED = np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 1])
PLAIN = np.arange(4.0)


def in_this_process(x: Any) -> None:
    with tp.debug.fake_pmap():
        tp.pmap(lambda x: x)(x)


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an argument": (lambda x: tp.pmap(lambda x: x, compile=EAGER)(x), "argument x is"),
    "uncompiled": (lambda x: tp.pmap(lambda x: x, compile=False)(x), "argument x is"),
    "in a tree": (lambda x: tp.pmap(lambda t: t["a"][1], compile=EAGER)({"a": [PLAIN, x]}),
        r"argument t\['a'\]\[1\] is"),
    "by keyword": (lambda x: tp.pmap(lambda *, k: k, compile=EAGER)(k=x), "argument k is"),
    "in the calling process": (in_this_process, "argument x is"),
    "not mapped": (lambda x: tp.pmap(lambda a, b: a, in_axes=(0, None), compile=EAGER)(PLAIN, x),
        "argument b is"),
    "after an array": (lambda x: [tp.pmap(lambda x: x, compile=EAGER)(each) for each in (PLAIN, x)],
        "argument x is"),
    "a result": (lambda x: tp.pmap(lambda a: x, compile=EAGER)(PLAIN), "output of <lambda> is"),
    "an uncompiled result": (lambda x: tp.pmap(lambda a: {"y": x}, compile=False)(PLAIN),
        r"output of <lambda>\['y'\] is"),
    "to a collective": (lambda x: tp.pmap(lambda a: tp.psum(x, "i"), "i", compile=EAGER)(PLAIN),
        "psum: the operand is"),
    "vmap": (lambda x: tp.vmap(lambda a: a)(x), "vmap: argument a is"),
    "grad": (lambda x: tp.grad(lambda a: a.sum())(x), "grad: an argument is"),
    "device_put": (lambda x: tp.device_put({"a": x}, tp.devices()[0]), r"\['a'\] is"),
    "device_put_sharded": (lambda x: tp.device_put_sharded([x] * 4, tp.devices()), "is"),
    "replicate": (lambda x: tp.replicate([x]), r"\[0\] is"),
    "compiled": (
        lambda x: tp.pmap(lambda x: x, compile=EAGER).lower(PLAIN).compile()(x), "argument x is"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("array", "text"),
    [
        (MASKED, r"a numpy masked array .*\.filled\(value\)"),
        (np.ma.masked, r"a numpy masked array .*\.filled\(value\)"),
        (PLAIN.view(Metres), r"a Metres, a subclass of numpy's array.*numpy\.asarray"),
    ],
    ids=["masked", "masked constant", "of another class"],
)
def test_refused(place: str, array: Any, text: str) -> None:
    call, where = PLACES[place]
    with pytest.raises(TypeError, match=rf"(?s){where} {text}"):
        call(array)


def test_refused_by_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save: .*\['a'\] is a numpy masked array"):
        tp.checkpoint.save(tmp_path / "c", {"a": MASKED})
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_that_are_their_data(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", dtype=np.float64, mode="w+", shape=(4,))
    mapped[:] = PLAIN
    matrix = np.asmatrix(PLAIN.reshape(4, 1))
    record = PLAIN.view(np.recarray)
    for array in (mapped, matrix, record, PLAIN):
        got = tp.pmap(lambda x: x * 2, compile=EAGER)(array)
        np.testing.assert_array_equal(got.numpy(), 2 * np.asarray(array))
    del mapped  # it has the file open


def test_operations_on_sharded_tensors() -> None:
    x = tp.device_put(torch.ones(4, dtype=torch.float64), tp.devices())
    with pytest.raises(TypeError):
        x + MASKED
