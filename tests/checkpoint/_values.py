"""What the tests of checkpoints save, how they look at what is on disk, and how they change it."""

import json
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import torchpmap as tp
from torchpmap.checkpoint import load
from torchpmap.checkpoint._files import _digest

WHOLE = torch.arange(32.0).reshape(8, 4)
TREE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "many": [torch.ones(1), torch.zeros(0, 2), (torch.tensor(True), "text", 2.5, None)],
    "array": torch.arange(3).numpy(),
    "step": 7,
}
DCP_TREE = {"w": TREE["w"], "c": torch.tensor([1 + 2j]).conj(), "step": 7, "names": ["a", b"b"]}


def mesh() -> tp.Mesh:
    return tp.make_mesh((2, 2), ("x", "y"), devices=tp.devices())


def put(value: torch.Tensor, *spec) -> tp.ShardedTensor:
    return tp.device_put(value, tp.NamedSharding(mesh(), tp.P(*spec)))


def rows(value: torch.Tensor) -> tp.ShardedTensor:
    return tp.device_put(value, tp.devices())


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, in types and dtypes too."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        wide = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in (a, b))
        return a.dtype == b.dtype and torch.equal(*wide)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def saved_by_torch(folder: Path, state: Any) -> Path:
    """A checkpoint that torch saves without torchpmap."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def table_of(folder: Path) -> Any:
    return json.loads((folder / "torchpmap.json").read_text())["checkpoint"]


def sign(folder: Path, body: Any) -> None:
    """Write a table as if torchpmap had written it."""
    text = json.dumps({"digest": _digest(body), "checkpoint": body})
    (folder / "torchpmap.json").write_text(text)


def loaded(folder: Path) -> Any:
    with tp.debug.fake_pmap():
        return load(folder)


def leaf(body: Any, key: str = "w") -> Any:
    return body["leaves"][key]


def record(body: Any, key: str = "w") -> Any:
    return leaf(body, key)["records"][0]


def replaced_block(folder: Path, key: str, block: bytes) -> None:
    """Put other bytes in the place of a block, with their checksum."""
    body = table_of(folder)
    (folder / "own.distcp").write_bytes(block)
    body["files"]["own.distcp"] = len(block)
    record(body, key).update(file="own.distcp", position=0, length=len(block))
    record(body, key)["crc"] = zlib.crc32(block)
    sign(folder, body)
