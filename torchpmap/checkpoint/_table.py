"""The table of a checkpoint: the tree, Python values, and for each tensor its layout and checksums.

    {"digest": ..., "checkpoint": {
      "version": 3,
      "tree": {"dict": [["step", 7], ["w", {"aside":
        {"kind": "tensor", "dtype": "float32", "shape": [4, 6], "cuts": [2, 1],
         "blocks": [["rank_0.safetensors", [crc, ...]], ["rank_1.safetensors", [crc, ...]]]}}]]},
      "files": {"rank_0.safetensors": {"bytes": 1064, "header": crc}, ...}}}

The tree is written as ``_base/data`` says, of dicts, lists and tuples: other containers become
dicts of their fields.  The key of a leaf in the files is the labels on the way to it, with dots
between them: ``params.w``, ``layers.0``.

A tensor is cut into equal blocks, ``cuts`` along each dim, which are listed in the order of the
rows: so they cannot overlap or leave a gap.  Where a block is in its file, the header says.

A folder may have been made, or changed, by any program.  So a table is used only after all of it
was checked, and no memory is allocated beyond the size of the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchpmap._base.data import DTYPES, json_of_file, read, written
from torchpmap._base.errors import CheckpointError, check_array, dtype_name
from torchpmap._base.pytree import MAPPINGS, Node, Structure, flatten
from torchpmap._sharded.tensor import ShardedTensor
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

VALUES = (type(None), bool, int, float, complex, str, bytes)
"""Types of leaves that the table has."""
ARRAYS = ("tensor", "ndarray", "numpy scalar")
"""Kinds of leaves that are in files of blocks."""
_VERSION = 3
"""Version 1 lay beside files of torch.distributed.checkpoint."""
_ROOT = "value"  # the key of a tree that is one leaf
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, ShardedTensor)
_ODD = re.compile("q.*|bits.*|u?int[1-7]")
_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not _ODD.fullmatch(name)}
"""Tensors of the others cannot be copied, or are more than their bytes."""


# -- leaves ----------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One leaf and its names."""

    key: str
    """In the checkpoint: ``params.w``."""
    path: str
    """In the script: ``tree['params']['w']``."""
    value: Any


@dataclass(frozen=True)
class Stored:
    """In the place of an array of a tree, what the table says of it."""

    row: Any


def leaves_of(tree: Any, name: str) -> tuple[list[Leaf], Structure]:
    """The leaves of ``tree``, which the caller knows as ``name``, and its structure.

    Raises:
        TypeError: a dict has a key that is neither a string nor an int.
        ValueError: two leaves would have the same key.
    """
    values, structure = flatten(tree)
    as_met: list[str] = []
    rebuilt(structure.root, as_met.append, name)
    keys, paths = structure.in_leaf_order(as_met), structure.paths(name)
    leaves: dict[str, Leaf] = {}
    for leaf in map(Leaf, keys, paths, values):
        if leaf.key in leaves:
            raise ValueError(
                f"torchpmap.checkpoint: {leaves[leaf.key].path} and {leaf.path} would both be "
                f"saved as {leaf.key!r}. Rename one of the keys."
            )
        leaves[leaf.key] = leaf
    return list(leaves.values()), structure


def rebuilt(
    node: Node | None, leaf: Callable[[str], Any], path: str = "tree", route: Sequence[str] = ()
) -> Any:
    """A tree of dicts, lists and tuples, with ``leaf(key)`` as its leaves."""
    if node is None:
        return leaf(".".join(route) if route else _ROOT)
    labels: Sequence[Any] = node.labels
    if node.kind in MAPPINGS:
        for label in labels:
            if type(label) not in (str, int):
                raise TypeError(
                    f"torchpmap.checkpoint: the dict {path} has the key {label!r}, but the keys "
                    "must be strings or ints: they become the names in the checkpoint."
                )
    elif node.kind not in (list, tuple):
        labels = [key.strip(".[]'\"") for key in node.keys]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"torchpmap.checkpoint: two of {', '.join(path + key for key in node.keys)} would "
                f"be saved under one name: {', '.join(labels)}. Rename one of the keys."
            )
    parts = {
        label: rebuilt(child, leaf, path + key, (*route, str(label)))
        for label, key, child in zip(labels, node.keys, node.children, strict=True)
    }
    return node.kind(parts.values()) if node.kind in (list, tuple) else parts


def leaf_kind(leaf: Leaf) -> str:
    """What a leaf is saved as.

    Raises:
        TypeError: it cannot be saved.
    """
    value, name = leaf.value, type(leaf.value).__name__
    if type(value) in _TENSORS:
        if value.layout == torch.strided and dtype_name(value.dtype) in _DTYPES:
            return "tensor"
        name = f"{name} ({dtype_name(value.dtype)}, {value.layout})"
    if isinstance(value, np.ndarray | np.generic):
        check_array(value, f"torchpmap.checkpoint.save: {leaf.path}")
        return "ndarray" if isinstance(value, np.ndarray) else "numpy scalar"
    if type(value) in VALUES:
        return name
    raise TypeError(
        f"torchpmap.checkpoint.save: {leaf.path} has type {name}, but what can be saved are "
        "ShardedTensors, dense tensors, numpy arrays, numbers, strings, bytes and None, in any "
        "pytree. For a module or an optimizer save its state_dict()."
    )


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


# -- rows ------------------------------------------------------------------------------------------


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

    def read(self, files: Files, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A part of a tensor, or all of it; raises ``CheckpointError`` for a damaged block."""
        parts = index or (slice(None),) * len(self.shape)
        spans = [part.indices(size)[:2] for part, size in zip(parts, self.shape, strict=True)]
        sizes = [high - low for low, high in spans]
        target = torch.empty(sizes, dtype=self.dtype, device="cpu")
        for cell, block in zip(itertools.product(*map(range, self.cuts)), self.blocks, strict=True):
            first, here = [], []
            for k, length, (low, high) in zip(cell, self.block_shape, spans, strict=True):
                start, stop = max(k * length, low), min((k + 1) * length, high)
                first.append(start - k * length)
                here.append(slice(start - low, max(start, stop) - low))
            part = target[tuple(here)]
            if part.numel():
                block.read(files, self.block_shape, tuple(first), part)
        return target


class Table(NamedTuple):
    """What is in a checkpoint and where."""

    rows: dict[str, Row]
    """By key, in the order of the leaves."""
    structure: Structure
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
            body, digest = body_of(folder, text)
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
        return Table(rows, structure, digest)


def body_of(folder: Path, text: bytes) -> tuple[Any, str]:
    """What a table says, in any version, and its digest, which is checked."""
    stored = json_of_file(text)
    body, digest = stored["checkpoint"], stored["digest"]
    if _digest(body) != digest:
        raise broken(folder, f"{TABLE} has changed since it was written")
    return body, digest


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
    dtype, shape, cuts = _DTYPES[row["dtype"]], sizes_of(row["shape"]), sizes_of(row["cuts"])
    names = [name for name, _ in row["blocks"]]
    # a file has one block of a leaf: else a small file would make a tensor of any size
    if 0 in cuts or len(names) != prod(cuts) or len(set(names)) < len(names):
        raise ValueError(f"{key!r:.50} is cut into {cuts}, but is in the files {names!r:.100}")
    block_shape = tuple(size // count for size, count in zip(shape, cuts, strict=True))
    if tuple(map(int.__mul__, block_shape, cuts)) != shape:
        raise ValueError(f"{key!r:.50} of shape {shape} is cut into {cuts}")
    blocks, expected, count = [], stored_as(dtype, block_shape), num_pieces(dtype, block_shape)
    for name, checksums in row["blocks"]:
        found, start = headers[name][key]
        if found != expected or type(checksums) is not list or len(checksums) != count:
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
