"""What the tests of checkpoints save, and how they look at what is on disk."""

import json
import os
from pathlib import Path
from typing import Any

import torch

import torchpmap as tp
from torchpmap.checkpoint._files import _digest

WHOLE = torch.arange(32.0).reshape(8, 4)


def mesh() -> tp.Mesh:
    return tp.make_mesh((2, 2), ("x", "y"), devices=tp.devices())


def put(value: torch.Tensor, *spec) -> tp.ShardedTensor:
    return tp.device_put(value, tp.NamedSharding(mesh(), tp.P(*spec)))


def rows(value: torch.Tensor) -> tp.ShardedTensor:
    return tp.device_put(value, tp.devices())


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def table_of(folder: Path) -> Any:
    return json.loads((folder / "torchpmap.json").read_text())["checkpoint"]


def sign(folder: Path, body: Any) -> None:
    """Write a table as if torchpmap had written it."""
    text = json.dumps({"digest": _digest(body), "checkpoint": body})
    (folder / "torchpmap.json").write_text(text)
