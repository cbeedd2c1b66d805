"""Covers: _base/platform.py: what is done about errors of an accelerator, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from torchpmap._base.devices import CUDA

pytestmark = pytest.mark.cpu_only("it stands in for the device")

BROKEN = torch.AcceleratorError("CUDA error: device-side assert triggered")


@pytest.fixture
def device(monkeypatch):
    """What is asked of a device; ``error``: what each use of it raises."""
    seen = SimpleNamespace(asked=[], error=None)

    def use(name):
        def using(*args, **kwargs):
            seen.asked.append((name, *args))
            if seen.error is not None:
                raise seen.error

        return using

    monkeypatch.setattr(torch.accelerator, "empty_cache", use("empty_cache"))
    monkeypatch.setattr(torch.accelerator, "synchronize", use("synchronize"))
    return seen


def test_out_of_memory_gives_cached_memory_back(device):
    assert CUDA.recover(torch.OutOfMemoryError("CUDA out of memory"))
    assert device.asked == [("empty_cache",), ("synchronize", 0)]


def test_an_error_of_the_function_costs_nothing(device):
    assert CUDA.recover(ValueError("mine"))
    assert device.asked == [("synchronize", 0)]


@pytest.mark.parametrize("error", [ValueError("mine"), BROKEN])
def test_a_device_that_raises_at_every_use_is_lost(device, error):
    """Whatever was seen first: a function may hide the error of a kernel behind its own."""
    device.error = BROKEN
    assert not CUDA.recover(error)


@pytest.mark.parametrize("refusal", [0, 2])
def test_memory_is_pinned_where_it_can_be(monkeypatch, refusal):
    """CUDA keeps a refusal, and the next kernel would raise it: a small one takes it."""
    asked, kernels, zeros = [], [], torch.zeros

    def register(*args):
        asked.append(args)
        return refusal

    def launch(*size, device):
        kernels.append(str(device))
        raise torch.AcceleratorError("CUDA error: out of memory")

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=asked.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", launch)
    CUDA.pin(4096, 8192)
    CUDA.unpin(4096)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert asked == [(4096, 8192, 0), 4096]
    assert kernels == (["cuda:0"] if refusal else [])


IN_USE = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchpmap._runtime.local.worker":
            from torchpmap._base.platform import Platform
            Platform.is_initialized = lambda self: True
sys.meta_path.insert(0, Finder())
"""


def test_a_worker_does_not_use_a_device_that_was_used_before_the_fork(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(IN_USE)
    code = "import torch, torchpmap as tp; tp.pmap(lambda x: x + 1, compile=False)(torch.ones(2))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "TORCHPMAP_NUM_DEVICES": "2",
        },
    )
    assert done.returncode != 0
    assert "cpu was initialised in the process that forks the workers" in done.stderr
    assert "Something that Python imports at its start does that" in done.stderr
