"""Shared by the tests of recorded calls."""

import pytest

import torchpmap as tp


@pytest.fixture
def recording(tmp_path):
    with tp.debug.record(tmp_path / "calls", last=2) as active:
        yield active
