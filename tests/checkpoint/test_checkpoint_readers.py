"""Covers: checkpoint/_blocks.py: programs that do not know torchpmap read its files."""

import pytest
import torch
from _launched import run_program
from _values import HOST_LEAVES, WHOLE, put, rows, same
from safetensors.torch import load_file

import torchpmap as tp
from torchpmap._sharded.transfer import host_tensor
from torchpmap.checkpoint import save

pytestmark = pytest.mark.usefixtures("four_devices")

READER = """
import sys, torch
import torch.distributed.checkpoint as dcp
state = {"params.w": torch.zeros(8, 4), "params.layers.1": torch.zeros(3)}
state["half"] = torch.zeros(3, dtype=torch.bfloat16)
reader = dcp.HuggingFaceStorageReader(sys.argv[1])
dcp.load(state, storage_reader=reader, no_dist=True)
assert torch.equal(state["params.w"], torch.arange(32.0).reshape(8, 4))
assert torch.equal(state["params.layers.1"], torch.full((3,), 2.0))
assert torch.equal(state["half"], torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
assert "torchpmap" not in sys.modules
"""


@pytest.mark.long
@pytest.mark.parametrize("spec", [("x", "y"), (None, "y"), ()], ids=str)
def test_torch_alone_reads_the_whole(tmp_path, spec):
    layers = [tp.replicate(torch.ones(2)), torch.full((3,), 2.0)]
    tree = {"params": {"w": put(WHOLE, *spec), "layers": layers}, "step": 12}
    tree["half"] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    save(tmp_path / "c", tree)
    run_program("-c", READER, str(tmp_path / "c"))


def test_safetensors_reads_each_file(tmp_path):
    save(tmp_path / "c", {"w": rows(WHOLE[:4]), "host": HOST_LEAVES, "step": 1})
    for k in range(4):
        found = load_file(tmp_path / "c" / f"rank_{k}.safetensors")
        assert same(found, {"w": WHOLE[k : k + 1]})
    found = load_file(tmp_path / "c" / "host.safetensors")
    expected = {f"host.{key}": value for key, value in HOST_LEAVES.items()}
    assert found["host.complex128"].shape == (2, 16)  # as bytes: safetensors lacks the dtype
    found["host.complex128"] = found["host.complex128"].view(torch.complex128).squeeze(-1)
    assert all(same(found.pop(key), host_tensor(value)) for key, value in expected.items())
    assert not found
