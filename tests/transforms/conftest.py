"""More devices than the pool of other tests has."""

from __future__ import annotations

import pytest
import torch

import torchpmap as tp


@pytest.fixture
def eight_devices() -> None:
    """Nothing is starting any more."""
    tp.init(8)
    tp.block_until_ready(tp.replicate(torch.zeros(())))
