"""A mesh, and more devices than the pool of other tests has."""

import pytest
import torch

import torchpmap as tp


@pytest.fixture
def eight_devices():
    """Nothing is starting any more."""
    tp.init(8)
    tp.block_until_ready(tp.replicate(torch.zeros(())))


@pytest.fixture
def mesh(pool):
    return tp.make_mesh((2, 2), ("x", "y"))
