"""The table of a checkpoint: the tree, Python values, and for each tensor its layout and checksums.

    {"digest": ..., "checkpoint": {
      "version": 3,
      "tree": {"dict": [["step", 7], ["w", {"aside":
        {"kind": "tensor", "dtype": "float32", "shape": [4, 6], "cuts": [2, 1],
         "blocks": [["rank_0.safetensors", [crc, ...]], ["rank_1.safetensors", [crc, ...]]]}}]]},
      "files": {"rank_0.safetensors": {"bytes": 1064, "header": crc}, ...}}}

The tree is written as ``_base/data`` says.  A tensor is cut into equal blocks, ``cuts`` along each
dim, which are listed in the order of the rows: so they cannot overlap or leave a gap.  Where a
block is in its file, the header says.

A folder may have been made, or changed, by any program.  So a table is used only after all of it
was checked, and no memory is allocated beyond the size of the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._base.data import read, written
from torchpmap._base.errors import CheckpointError, kind_of
from torchpmap._base.pytree import Node
from torchpmap.checkpoint._blocks import (
    Block,
    Entries,
    Files,
    Sizes,
    num_pieces,
    read_header,
    sizes_of,
    stored_as,
)
from torchpmap.checkpoint._folder import TABLE, broken, other_format, read_table
from torchpmap.checkpoint._tree import ARRAYS, SAVED_DTYPES, VALUES, Stored, leaves_of

Extent = tuple[Sizes, Sizes]
"""Offsets and sizes of a part of a leaf."""
_VERSION = 3
"""Version 1 lay beside files of torch.distributed.checkpoint."""


class Row(NamedTuple):
    """One leaf."""

    kind: str
    value: Any = None
    """Of a leaf that is not an array."""
    dtype: torch.dtype | None = None
    """None for a Python value."""
    shape: Sizes = ()
    cuts: Sizes = ()
    block_shape: Sizes = ()
    blocks: tuple[Block, ...] = ()

    def read(self, files: Files, extent: Extent | None = None) -> torch.Tensor:
        """A part of a tensor, or all of it.

        Raises:
            CheckpointError: a block is damaged.
        """
        offsets, sizes = extent or ((0,) * len(self.shape), self.shape)
        target = torch.empty(sizes, dtype=self.dtype, device="cpu")
        for cell, block in zip(itertools.product(*map(range, self.cuts)), self.blocks, strict=True):
            first, here = [], []
            for k, length, low, size in zip(cell, self.block_shape, offsets, sizes, strict=True):
                start, stop = max(k * length, low), min((k + 1) * length, low + size)
                first.append(start - k * length)
                here.append(slice(start - low, max(start, stop) - low))
            part = target[tuple(here)]
            if part.numel():
                block.read(files, self.block_shape, tuple(first), part)
        return target


def describe(kind: str, dtype: torch.dtype | None, shape: Sizes) -> str:
    """``float32[2, 3]``, or ``a Python int``."""
    return f"a Python {kind}" if dtype is None else kind_of(shape, dtype)


class Table(NamedTuple):
    """What is in a checkpoint and where."""

    rows: dict[str, Row]
    """By key."""
    root: Node | None
    """Its containers."""
    digest: str

    @staticmethod
    def of(folder: Path) -> Table:
        """The table of a checkpoint, whose files are there in full size.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: it is damaged, or in another format.
        """
        source, text = TABLE, read_table(folder)
        try:
            stored = json.loads(text)
            body, digest = stored["checkpoint"], stored["digest"]
            if _digest(body) != digest:
                raise broken(folder, f"{TABLE} has changed since it was written")
            if body["version"] != _VERSION:
                raise other_format(folder, body["version"])
            headers = {}
            with Files(folder) as files:
                for source, file in body["files"].items():
                    headers[source] = read_header(files, source, file["bytes"], file["header"])
            source = TABLE
            leaves, structure = leaves_of(read(body["tree"], Stored), "tree")
            rows = {leaf.key: _row(leaf.key, leaf.value, headers) for leaf in leaves}
        except CheckpointError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            what = f"{type(error).__name__}: {error!s:.300}"
            raise broken(folder, f"{source!r:.80} is not what was written ({what})") from None
        return Table(rows, structure.root, digest)


def table_text(tree: Any, files: Any) -> bytes:
    """The text of a table, of a tree with ``Stored`` in the place of arrays."""
    tree = written(tree, "tree", lambda stored, _: stored.row)
    body = {"version": _VERSION, "tree": tree, "files": files}
    return json.dumps({"digest": _digest(body), "checkpoint": body}).encode()


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _row(key: str, found: Any, headers: dict[str, Entries]) -> Row:
    if type(found) in VALUES:
        return Row(type(found).__name__, found)
    if type(found) is not Stored:
        raise ValueError(f"{found!r:.100} is no value")
    row, kind = found.row, found.row["kind"]
    if kind not in ARRAYS:
        raise ValueError(f"{kind!r:.50} is no kind of arrays")
    dtype, shape, cuts = SAVED_DTYPES[row["dtype"]], sizes_of(row["shape"]), sizes_of(row["cuts"])
    names = [name for name, _ in row["blocks"]]
    # a file has one block of a leaf: else a small file would make a tensor of any size
    if len(names) != prod(cuts) or len(set(names)) < len(names):
        raise ValueError(f"{key!r:.50} is cut into {cuts}, but is in the files {names!r:.100}")
    block_shape = tuple(size // count for size, count in zip(shape, cuts, strict=True))
    if tuple(map(int.__mul__, block_shape, cuts)) != shape:
        raise ValueError(f"{key!r:.50} of shape {shape} is cut into {cuts}")
    blocks, expected, count = [], stored_as(dtype, block_shape), num_pieces(dtype, block_shape)
    for name, checksums in row["blocks"]:
        found, start = headers[name][key]
        if found != expected or len(checksums) != count:
            raise ValueError(
                f"{name!r:.50} has {key!r:.50} as {found}, but {expected} with {count} "
                f"checksums is expected, and not {checksums!r:.50}"
            )
        blocks.append(Block(name, start, checksums))
    if kind != "tensor":
        torch.empty(0, dtype=dtype, device="cpu").numpy()  # a TypeError for what numpy lacks
    if kind == "numpy scalar" and shape:
        raise ValueError(f"{key!r:.50} is a scalar of shape {shape}")
    return Row(kind, None, dtype, shape, cuts, block_shape, tuple(blocks))
