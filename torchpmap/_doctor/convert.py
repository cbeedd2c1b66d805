"""``python -m torchpmap convert``: a checkpoint of torchpmap 0.1 becomes one of today.

Its table is JSON with the tree, and the places of the blocks of each leaf, which are files of
``torch.save`` in larger files.  To be deleted in the next release.
"""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.data import DTYPES
from torchpmap._base.errors import CheckpointError
from torchpmap.checkpoint import save
from torchpmap.checkpoint._blocks import Files
from torchpmap.checkpoint._folder import OLD_VERSION, TABLE, broken, read_table
from torchpmap.checkpoint._table import body_of


def convert(old: Path, new: Path) -> None:
    """Load the whole of an old checkpoint, and save it.  What its files hold is unpickled by
    ``torch.load(weights_only=True)``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged, or in another format.
    """
    try:
        body, _ = body_of(old, read_table(old))
        if body["version"] != OLD_VERSION:
            raise CheckpointError(f"the checkpoint {old} is not of torchpmap 0.1.")
        with Files(old) as files:
            leaves = {key: _leaf(files, row) for key, row in body["leaves"].items()}
        tree = _tree(body["tree"], leaves)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"{TABLE} is not what was written ({type(error).__name__}: {error!s:.300})"
        raise broken(old, what) from error
    save(new, tree)


def _leaf(files: Files, row: dict[str, Any]) -> Any:
    if not row["dtype"]:
        (record,) = row["records"]
        return _value(files, record)
    whole = torch.empty(row["shape"], dtype=DTYPES[row["dtype"]])
    for record in row["records"]:
        offsets, sizes = record["offsets"], record["sizes"]
        there = [slice(k, k + n) for k, n in zip(offsets, sizes, strict=True)]
        whole[tuple(there)] = _value(files, record)
    if row["kind"] == "tensor":
        return whole
    return whole.numpy() if row["kind"] == "ndarray" else whole.numpy()[()]


def _value(files: Files, record: dict[str, Any]) -> Any:
    file = files.open(record["file"])
    file.seek(record["position"])
    data = file.read(record["length"])
    where = f"bytes {record['position']} to {record['position'] + record['length']}"
    if zlib.crc32(data) != record["crc"]:
        raise broken(files.folder, f"{where} of {record['file']} have changed")
    try:
        with torch.serialization.safe_globals([complex]):
            return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError:
        raise broken(files.folder, f"{where} of {record['file']} are no tensor or number") from None


def _tree(node: Any, leaves: dict[str, Any]) -> Any:
    if isinstance(node, str):
        return leaves[node]
    ((kind, children),) = node.items()
    parts = {label: _tree(child, leaves) for label, child in children}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(parts.values())
    return parts
