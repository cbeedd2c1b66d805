"""Workers know the module of a test before a fault is timed in it."""

import importlib

import pytest
from _rig import eagerly, rows


@pytest.fixture(autouse=True)
def imported(request: pytest.FixtureRequest) -> None:
    """Functions and exceptions of a test travel by the name of its module, which imports pytest."""
    if "pool" in request.fixturenames:
        request.getfixturevalue("pool")
        name = request.module.__name__
        eagerly(lambda x: [importlib.import_module(name), x][1])(rows)
