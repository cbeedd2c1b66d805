"""Four devices to save and load on, and checkpoints that were saved."""

from pathlib import Path

import pytest
from _values import DCP_TREE, TREE, saved_by_torch

import torchpmap as tp
from torchpmap.checkpoint import save


@pytest.fixture
def four_devices(pool: int) -> None:
    """Every test starts with them, whatever the one before did."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of ours and one of DCP, which no test changes."""
    root = tmp_path_factory.mktemp("given")
    with tp.debug.fake_pmap():
        save(root / "ours", TREE)
    return {"ours": root / "ours", "dcp": saved_by_torch(root / "dcp", DCP_TREE)}
