"""Values on four devices."""

import pytest
from _sharded_values import ROWS
from _support import EAGER

import torchpmap as tp


@pytest.fixture
def y():
    """Four rows on four devices."""
    return tp.pmap(lambda x: x + 0, "i", compile=EAGER)(ROWS)


@pytest.fixture
def columns():
    return tp.pmap(lambda x: x + 0, in_axes=0, out_axes=1, compile=EAGER)(ROWS)
