"""Four devices to save and load on, and checkpoints that were saved."""

from pathlib import Path

import pytest
from _values import TREE

import torchpmap as tp
from torchpmap.checkpoint import save


@pytest.fixture
def four_devices(pool: int) -> None:
    """Every test starts with them, whatever the one before did."""


@pytest.fixture(scope="module")
def given_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    path = tmp_path_factory.mktemp("given") / "ours"
    with tp.debug.fake_pmap():
        save(path, TREE)
    return path
