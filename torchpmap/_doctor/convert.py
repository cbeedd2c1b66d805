"""``python -m torchpmap convert``: a checkpoint of torchpmap 0.1 becomes one of today.

Its table is JSON with the tree, and the places of the blocks of each leaf, which are files of
``torch.save`` in larger files.  To be deleted in the next release.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.data import DTYPES
from torchpmap._base.errors import CheckpointError
from torchpmap.checkpoint import save
from torchpmap.checkpoint._blocks import Files
from torchpmap.checkpoint._folder import OLD_VERSION, Folder, broken, read_table
from torchpmap.checkpoint._table import VALUES, body_of


def convert(old: Path, new: Path) -> None:
    """Load the whole of an old checkpoint, and save it.  What its files hold is unpickled by
    ``torch.load(weights_only=True)``.

    Raises:
        FileExistsError: there is something at ``new``.
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged, or in another format.
        ValueError: a name in it is none for a checkpoint of today.
    """
    if new.exists():
        raise FileExistsError(f"{new} exists. Give the name of a new folder.")
    old = Folder(old).find()
    text = read_table(old)
    try:
        body, _ = body_of(old, text)
        if body["version"] != OLD_VERSION:
            raise CheckpointError(f"the checkpoint {old} is not of torchpmap 0.1.")
        with Files(old) as files:
            leaves = {key: _leaf(files, row) for key, row in body["leaves"].items()}
        tree = _tree(body["tree"], leaves)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # of any kind: torch reads what a program may have changed
        what = f"it is not what torchpmap 0.1 has written ({type(error).__name__}: {error!s:.100})"
        raise broken(old, what) from error
    save(new, tree)


def _leaf(files: Files, row: dict[str, Any]) -> Any:
    if not row["dtype"]:
        (record,) = row["records"]
        value = _value(files, record)
        if type(value) not in VALUES or type(value).__name__ != row["kind"]:
            raise TypeError(f"{row['kind']!r:.50} is a {type(value).__name__}")
        return value
    whole = torch.empty(row["shape"], dtype=DTYPES[row["dtype"]])
    is_there = torch.zeros(row["shape"], dtype=torch.bool)
    for record in row["records"]:
        offsets, sizes, block = record["offsets"], record["sizes"], _value(files, record)
        there = tuple(slice(k, k + n) for k, n in zip(offsets, sizes, strict=True))
        if block.dtype != whole.dtype or not list(block.shape) == sizes == [*whole[there].shape]:
            raise ValueError(f"a block of {sizes!r:.50} at {offsets!r:.50} is another")
        if is_there[there].any():
            raise ValueError("two blocks overlap")
        whole[there], is_there[there] = block, True
    if not is_there.all():
        raise ValueError("a part is in no block")
    if row["kind"] == "tensor":
        return whole
    return whole.numpy() if row["kind"] == "ndarray" else whole.numpy()[()]


def _value(files: Files, record: dict[str, Any]) -> Any:
    file = files.open(record["file"])
    file.seek(record["position"])
    data = file.read(record["length"])
    if zlib.crc32(data) != record["crc"]:
        where = f"bytes {record['position']} to {record['position'] + record['length']}"
        raise broken(files.folder, f"{where} of {record['file']} have changed")
    with torch.serialization.safe_globals([complex]):
        return torch.load(io.BytesIO(data), weights_only=True)


def _tree(node: Any, leaves: dict[str, Any]) -> Any:
    if isinstance(node, str):
        return leaves[node]
    ((kind, children),) = node.items()
    parts = {label: _tree(child, leaves) for label, child in children}
    if kind not in ("dict", "fields", "list", "tuple") or len(parts) < len(children):
        raise ValueError(f"{node!r:.50} is no part of a tree")
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(parts.values())
    return parts
