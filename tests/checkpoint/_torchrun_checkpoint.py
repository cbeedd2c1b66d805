"""Started by torchrun in tests/checkpoint/test_checkpoint.py, with two processes: checkpoints of
both.

Expectations are computed here from the numbers that go in; an assertion ends the job.
"""

import resource
import signal
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchpmap as tp

folder = Path(sys.argv[1])
EAGER = {"backend": "eager"}


def mine(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The rows of this process."""
    return whole.chunk(tp.process_count(), dim)[tp.process_index()]


def rows(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """On the device of this process, its rows."""
    return tp.pmap(lambda x: x, in_axes=dim, out_axes=dim, compile=EAGER)(mine(whole, dim))


def mesh() -> tp.Mesh:
    return tp.make_mesh((2,), ("i",), devices=tp.devices())


ROWS = torch.arange(8.0).reshape(4, 2)
COLUMNS = torch.arange(12).reshape(3, 4)
SPREAD = torch.arange(6, dtype=torch.bfloat16)
DIFFERS = r"tree\['seed'\] must be the same in all processes, but rank 1 has .*make it a row"


def state() -> dict:
    shared = tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i", out_axes=None, compile=EAGER)
    return {
        "rows": rows(ROWS),
        "columns": rows(COLUMNS, 1),
        "shared": shared(torch.ones(1, 3)),
        "spread": tp.device_put(SPREAD, tp.NamedSharding(mesh(), tp.P("i"))),
        "own": tp.device_put(torch.tensor(3.0), tp.local_devices()[0]),
        "host": torch.arange(3),
        "step": 7,
    }


def test_what_one_controller_saved_is_taken_apart() -> None:
    like = {"rows": rows(torch.zeros(4, 2)), "shared": torch.zeros(3), "step": 0}
    like["copies"] = tp.replicate(torch.zeros(2))
    loaded = tp.checkpoint.load(folder / "local", like)
    assert torch.equal(loaded["rows"].to_host(), mine(ROWS))
    assert torch.equal(loaded["shared"], torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(loaded["copies"].to_host(), torch.tensor([5.0, 6.0]))
    assert loaded["copies"].devices() == set(tp.devices())
    assert loaded["step"] == 5
    doubled = tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i", compile=EAGER)(loaded["rows"])
    assert torch.equal(doubled.to_host(), ROWS.sum(0).expand(2, 2))


def test_both_save_and_load() -> None:
    tree = state()
    tp.checkpoint.save(folder / "both", tree)
    assert all((folder / "both" / f"rank_{rank}.safetensors").exists() for rank in (0, 1))
    loaded = tp.checkpoint.load(folder / "both", tree)
    assert torch.equal(loaded["rows"].to_host(), mine(ROWS))
    assert torch.equal(loaded["columns"].to_host(), mine(COLUMNS, 1))
    assert torch.equal(loaded["shared"].to_host(), torch.full((3,), 2.0))
    assert torch.equal(loaded["spread"].addressable_data(0), mine(SPREAD))
    assert torch.equal(loaded["own"].to_host(), torch.tensor(3.0))
    for name in ("rows", "columns", "shared", "spread", "own"):
        assert loaded[name].sharding == tree[name].sharding
    assert torch.equal(loaded["host"], torch.arange(3))
    whole = tp.checkpoint.load(folder / "both")
    assert torch.equal(whole["rows"], ROWS)
    assert torch.equal(whole["columns"], COLUMNS)
    assert torch.equal(whole["spread"], SPREAD)
    assert whole["step"] == 7
    sharding = tp.NamedSharding(mesh(), tp.P(None, "i"))
    spread = tp.checkpoint.ShapeDtypeStruct((4, 2), torch.float32, sharding)
    loaded = tp.checkpoint.load(folder / "both", {**whole, "rows": spread})
    assert torch.equal(loaded["rows"].addressable_data(0), mine(ROWS, 1))


def test_a_value_of_each_process() -> None:
    value = torch.tensor([10 + tp.process_index()])
    kept = tp.device_put(value[None], tp.local_devices())
    tp.checkpoint.save(folder / "each", {"kept": kept})
    loaded = tp.checkpoint.load(folder / "each", {"kept": kept})
    assert torch.equal(loaded["kept"].to_host()[0], value)
    assert tp.checkpoint.load(folder / "each")["kept"].tolist() == [[10], [11]]


def test_asynchronous() -> None:
    value, host = rows(ROWS), torch.ones(3)
    saving = tp.checkpoint.save(folder / "later", {"a": value, "b": host}, asynchronous=True)
    host.zero_()
    tp.pmap(lambda x: x * 0, donate_argnums=0, compile=EAGER)(value)
    assert value.is_deleted()
    saving.wait()
    loaded = tp.checkpoint.load(folder / "later")
    assert torch.equal(loaded["a"], ROWS)
    assert torch.equal(loaded["b"], torch.ones(3))


def test_the_processes_differ() -> None:
    rank = tp.process_index()
    for value in (rank, torch.tensor([rank, 2]), "a" * 300 + str(rank), np.ones(1) * rank):
        with pytest.raises(ValueError, match=DIFFERS):
            tp.checkpoint.save(folder / "differ", {"same": 1, "seed": value})
    wide = tp.device_put(torch.zeros(1, 2 + rank), tp.local_devices())
    with pytest.raises(ValueError, match=r"float32\[2, 3\] in the blocks .*float32\[2, 2\] in the"):
        tp.checkpoint.save(folder / "differ", {"w": wide})
    many = dict.fromkeys(map(str, range(1000)), 1)
    names = r"save.*differ'\): the trees .* lacks tree\['w_0'\], tree\['w_1'\]\. All"
    with pytest.raises(ValueError, match=names):
        tp.checkpoint.save(folder / "differ", many | {f"w_{rank}": wide})
    orders = {rank: 1, 1 - rank: 1}
    with pytest.raises(ValueError, match="in another order"):
        tp.checkpoint.save(folder / "differ", OrderedDict(orders))
    dist.barrier()
    assert not (folder / "differ").exists()
    assert not (folder / ".differ.saving").exists()


def test_one_cannot_write() -> None:
    tp.checkpoint.save(folder / "full", {"a": rows(ROWS)})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if tp.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    with pytest.raises(tp.CheckpointError, match=r"File too large.*before is still there"):
        tp.checkpoint.save(folder / "full", {"a": rows(ROWS + 1)})
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(tp.checkpoint.load(folder / "full")["a"], ROWS)


def test_damage_that_one_sees() -> None:
    tree = {"a": rows(ROWS)}
    tp.checkpoint.save(folder / "damaged", tree)
    file = folder / "damaged" / "rank_1.safetensors"
    if tp.process_index() == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(tp.CheckpointError, match=r"rank_1.safetensors have changed") as raised:
        tp.checkpoint.load(folder / "damaged", tree)
    assert ("rank 1 failed" in str(raised.value)) == (tp.process_index() == 0)


if __name__ == "__main__":
    tp.init()
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            if tp.process_index() == 0:
                print("passed", name, flush=True)
