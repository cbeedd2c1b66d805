"""Four devices to save and load on, and checkpoints that were saved."""

import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from _changed import DCP_TREE, TREE

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(DCP_TREE, checkpoint_id=root / "dcp", no_dist=True)
    return {"ours": root / "ours", "dcp": root / "dcp"}
