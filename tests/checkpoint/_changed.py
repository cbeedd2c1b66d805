"""Checkpoints as they were saved, for tests that change them, and what is loaded of the change."""

import zlib
from pathlib import Path
from typing import Any

import torch
from _values import sign, table_of

import torchpmap as tp
from torchpmap.checkpoint import load

TREE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "many": [torch.ones(1), torch.zeros(0, 2), (torch.tensor(True), "text", 2.5, None)],
    "array": torch.arange(3).numpy(),
    "step": 7,
}
DCP_TREE = {"w": TREE["w"], "c": torch.tensor([1 + 2j]).conj(), "step": 7, "names": ["a", b"b"]}


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
