"""Values on four devices."""

import pytest
from _sharded_values import ROWS
from _support import EAGER

import torchpmap as tp


@pytest.fixture
def y():
    """Four rows on four devices."""
    return tp.pmap(lambda x: x + 0, "i", compile=EAGER)(ROWS)
