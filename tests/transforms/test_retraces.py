"""Covers: _transforms/retraces.py, and that pmap speaks up."""

from __future__ import annotations

import warnings

import pytest
import torch

import torchpmap as tp
from torchpmap._transforms.retraces import Retraces

EAGER = {"backend": "eager"}


def test_says_once_what_changes() -> None:
    retraces = Retraces()
    said = [retraces.note({"x": "float32[4]", "n": f"static {k}"}) for k in range(40)]
    (text,) = [text for text in said if text is not None]
    assert said.index(text) == 15
    assert "argument n keeps changing: the last were static 13, static 14, static 15" in text
    retraces = Retraces()
    said = [retraces.note({"x": "float32[4]"}) for _ in range(16)]
    assert said[-1] is not None
    assert "what it closes over keeps changing" in said[-1]


@pytest.mark.usefixtures("pool")
def test_pmap_warns() -> None:
    f = tp.pmap(lambda x, n: x * n, static_broadcasted_argnums=1, compile=EAGER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(20):
            f(torch.ones(4), n)
    (warning,) = caught
    assert warning.filename == __file__
    assert "pmap(<lambda>, in_axes=0)(<inputs>): traced 16 times, because argument n" in str(
        warning.message
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g = tp.pmap(lambda x: x + 1, compile=EAGER)
        for rows in (1, 2, 3, 4):
            for width in (1, 2, 3):
                g(torch.ones(rows, width))


@pytest.mark.usefixtures("pool")
def test_new_pools_do_not_count() -> None:
    """... but traces in one pool do, however many were before it."""
    f = tp.pmap(lambda x: x * 2, compile=EAGER)
    for _ in range(17):
        tp.shutdown()
        tp.init(num_devices=1)
        assert f(torch.ones(1)).tolist() == [2.0]
    for width in range(1, 15):
        f(torch.ones(1, width))
    with pytest.warns(match="traced 16 times, because argument x keeps changing"):
        f(torch.ones(1, 15))


@pytest.mark.usefixtures("pool")
def test_lowering_in_a_new_pool() -> None:
    f = tp.pmap(lambda x: x * 2, compile=EAGER)
    for num_devices in (1, 1, 2):
        tp.shutdown()
        tp.init(num_devices=num_devices)
        assert f.lower(torch.ones(2)).compile()(torch.ones(2)).tolist() == [2.0, 2.0]
