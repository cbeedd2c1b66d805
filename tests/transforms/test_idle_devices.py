"""Covers: _transforms/row_preparation.py: a warning where idle devices would speed up a call."""

import warnings

import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


def test_rows_that_divide_badly_warn_once(mode):
    def double(x):
        return x * 2

    f = tp.pmap(double, compile=mode)
    with pytest.warns(UserWarning, match="5 rows run on 1 of 4") as seen:
        y = f(torch.ones(5, 2))
    text = (
        "pmap(double, in_axes=0)(<inputs>): 5 rows run on 1 of 4 devices, 5 on each, because each "
        "device gets equally many. Pass 4 rows or 8 rows (torchpmap.shard_batch(batch, "
        "stacked=True) pads a batch and returns a mask), or another number of devices to "
        "torchpmap.init."
    )
    assert [str(warning.message) for warning in seen] == [text]
    assert seen[0].filename == __file__
    assert len(y.devices()) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(torch.ones(5, 2))
        f(torch.ones(7, 3))  # another plan of the same function
    with pytest.warns(UserWarning, match="10 rows run on 2 of 4 devices, 5 on each"):
        tp.pmap(lambda x: x, "i", compile=mode)(torch.ones(10))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8, 9, 12])
def test_no_warning_where_more_devices_would_not_help(rows):
    tp.pmap(lambda x: x + 1, compile=EAGER)(torch.ones(rows))  # any warning is an error


def test_no_warning_for_devices_that_were_chosen():
    tp.pmap(lambda x: x + 1, devices=tp.devices()[:1], compile=EAGER)(torch.ones(1))
    tp.pmap(lambda x: x + 1, devices=tp.devices()[:3], compile=EAGER)(torch.ones(3))
    with tp.debug.fake_pmap():
        tp.pmap(lambda x: x + 1)(torch.ones(5))
    # a mesh of devices for rows and columns is as documented
    f = tp.pmap(tp.pmap(lambda x: x + 1, "c", compile=EAGER), "r", compile=EAGER)
    f(torch.ones(3, 3))
