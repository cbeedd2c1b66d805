"""The checked table of a checkpoint (what it has, and where), and the reading of its blocks.

A folder may have been made, or changed, by any program.  So a table is used only after all of it
was checked: types are right; the blocks of a leaf cover it exactly once; they lie in regular files
of the folder, do not overlap, and are not larger than their records.  No memory is allocated beyond
the size of the files.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import re
import reprlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import torch

from torchpmap._base.data import DTYPES
from torchpmap._base.errors import CheckpointError, dtype_name, kind_of
from torchpmap.checkpoint._files import METADATA, TABLE, broken, opened, read_metadata, read_table
from torchpmap.checkpoint._pickles import Object, metadata_of, value_of
from torchpmap.checkpoint._tree import VALUES

Sizes = tuple[int, ...]
Extent = tuple[Sizes, Sizes]
"""Offsets and sizes of a part of a leaf."""
MARK = "torchpmap"
"""Its presence in ``.metadata`` says that there must be a table beside it."""
_NAMES = {kind.__name__ for kind in VALUES}
_VALUE = "value"
"""The kind of a leaf that DCP saved and that is not a tensor."""
_ARRAYS = ("tensor", "ndarray", "numpy scalar")
_MOST = 2**62
_MOST_CUT_DIMS = 12
_ODD = re.compile("q.*|bits.*|u?int[1-7]")
_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not _ODD.fullmatch(name)}
"""Dtypes that blocks can have; others have no tensors, or need more than the data of a tensor."""


def describe(kind: str, dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    """``float32[2, 3]``, or ``a Python int``."""
    return f"a Python {kind}" if dtype is None else kind_of(shape, dtype)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block of a leaf, or a value, in a file."""

    offsets: Sizes
    sizes: Sizes
    file: str
    position: int
    length: int
    crc: int | None
    """None if torchpmap did not write it."""

    def __str__(self) -> str:
        return f"bytes {self.position} to {self.position + self.length} of {self.file}"


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf."""

    kind: str
    shape: Sizes
    dtype: torch.dtype | None
    """None for a Python value."""
    records: tuple[BlockRecord, ...]


@dataclass(frozen=True)
class Table:
    """What is in a checkpoint and where."""

    folder: Path
    rows: Mapping[str, Row]
    """By key."""
    skeleton: Any
    """The containers of the tree (see ``checkpoint/_tree``); None if they are not known."""
    digest: str

    @staticmethod
    def of(folder: Path) -> Table:
        """The table of a checkpoint, whose files are checked to be there in full size.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: it is damaged.
        """
        found = read_table(folder)
        source = METADATA if found is None else TABLE
        try:
            body, digest = found or _of_dcp(folder)
            rows = {str(key): _row(key, row) for key, row in _dict(body, "leaves").items()}
            if found is not None:
                _check_tree(body["tree"], rows)
            _check_places(folder, rows, body.get("files"))
        except (_Wrong, RecursionError) as error:
            raise broken(folder, f"{source} is not what was written: {error}") from None
        return Table(folder, rows, body["tree"], digest)

    @staticmethod
    def known(folder: Path, digest: str, keys: Iterable[str]) -> Table:
        """Some rows of a table that another process has checked, and that has this digest.

        Raises:
            CheckpointError: there is another checkpoint now.
        """
        body, found = read_table(folder) or _of_dcp(folder)
        if found != digest:
            raise broken(folder, "it was replaced while it was loaded")
        return Table(folder, {key: _row(key, body["leaves"][key]) for key in keys}, None, digest)

    def describe(self, key: str) -> str:
        row = self.rows[key]
        return describe(row.kind, row.dtype, row.shape)

    def read(self, extents: Mapping[str, Extent | None]) -> dict[str, Any]:
        """The given parts of leaves, by key; None, or a leaf that is not a tensor: all of it.

        Raises:
            CheckpointError: a block is damaged.
        """
        with ExitStack() as stack:
            files = _Files(self.folder, stack)
            return {key: _read(files, self.rows[key], extent) for key, extent in extents.items()}


# -- reading ---------------------------------------------------------------------------------------


class _Files:
    """The files of a checkpoint, open for one read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._open: dict[str, BufferedReader] = {}

    def value(self, record: BlockRecord) -> Any:
        """The value of a record; its tensors are views of new memory."""
        file = self._open.get(record.file)
        if file is None:
            file = self._stack.enter_context(opened(self._folder, record.file))
            self._open[record.file] = file
        file.seek(record.position)
        data = mmap.mmap(-1, record.length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if file.readinto(data) != record.length:
            end = record.position + record.length
            raise broken(self._folder, f"{record.file} ends before byte {end}")
        if record.crc is not None and zlib.crc32(data) != record.crc:
            raise self.broken(record, "have changed since they were written (the checksum differs)")
        try:
            return value_of(data)
        except Exception as error:  # bytes that are not a pickle may raise anything
            raise self.broken(record, f"are no value that was saved: {error}") from None

    def broken(self, record: BlockRecord, what: str) -> CheckpointError:
        return broken(self._folder, f"{record} {what}")


def _read(files: _Files, row: Row, extent: Extent | None) -> Any:
    if row.dtype is None:
        (record,) = row.records
        value = files.value(record)
        if row.kind not in (_VALUE, type(value).__name__):
            raise files.broken(record, f"are of type {type(value).__name__}, not {row.kind}")
        return value
    offsets, sizes = extent or ((0,) * len(row.shape), row.shape)
    target = torch.empty(sizes, dtype=row.dtype, device="cpu")
    for record in row.records:
        part = _shared(record, offsets, sizes)
        if part is None:
            continue
        there, here = part
        block = files.value(record)
        is_right = type(block) is torch.Tensor and block.dtype is row.dtype
        if not is_right or tuple(block.shape) != record.sizes:
            raise files.broken(record, f"are not {kind_of(record.sizes, row.dtype)}")
        target[here].copy_(block[there])
    return target


Slices = tuple[slice, ...]


def _shared(record: BlockRecord, offsets: Sizes, sizes: Sizes) -> tuple[Slices, Slices] | None:
    """The overlap of a block and a part, as slices of both; None if there is no overlap."""
    there, here = [], []
    for begin, size, offset, length in zip(
        record.offsets, record.sizes, offsets, sizes, strict=True
    ):
        low, high = max(begin, offset), min(begin + size, offset + length)
        if low >= high:
            return None
        there.append(slice(low - begin, high - begin))
        here.append(slice(low - offset, high - offset))
    return tuple(there), tuple(here)


# -- checking --------------------------------------------------------------------------------------


class _Wrong(Exception):
    """What is wrong with a table."""


def _dict(parent: Any, name: str) -> dict[str, Any]:
    value = parent.get(name) if type(parent) is dict else None
    if type(value) is not dict:
        raise _Wrong(f"{name!r} is {reprlib.repr(value)}, which is no object")
    return value


def _number(parent: Mapping[str, Any], name: str) -> int:
    value = parent.get(name)
    if type(value) is not int or not 0 <= value < _MOST:
        raise _Wrong(f"{name!r} is {reprlib.repr(value)}, which is no size")
    return value


def _sizes(parent: Mapping[str, Any], name: str) -> Sizes:
    value = parent.get(name)
    if type(value) is not list or not all(type(x) is int and 0 <= x < _MOST for x in value):
        raise _Wrong(f"{name!r} is {reprlib.repr(value)}, which is no list of sizes")
    return tuple(value)


def _row(key: str, row: Any) -> Row:
    """Check a leaf by itself."""
    if type(row) is not dict:
        raise _Wrong(f"the leaf {key!r} is {reprlib.repr(row)}, which is no object")
    kind, name, records = row.get("kind"), row.get("dtype"), row.get("records")
    shape = _sizes(row, "shape")
    if type(name) is not str or (name and name not in _DTYPES):
        raise _Wrong(f"the dtype of {key!r} is {reprlib.repr(name)}, which blocks do not have")
    if type(kind) is not str or kind not in (_ARRAYS if name else _NAMES | {_VALUE}):
        raise _Wrong(f"the leaf {key!r} is of the kind {reprlib.repr(kind)}")
    if type(records) is not list:
        raise _Wrong(f"the records of {key!r} are {reprlib.repr(records)}")
    dtype = _DTYPES[name] if name else None
    found = Row(kind, shape, dtype, tuple(_record(key, record) for record in records))
    if kind in _ARRAYS[1:] and not _is_of_numpy(found):
        raise _Wrong(f"the leaf {key!r} is {kind_of(shape, _DTYPES[name])}, which numpy lacks")
    if dtype is None and (shape or len(records) != 1 or found.records[0].sizes):
        raise _Wrong(f"the leaf {key!r} is a value in {len(records)} records")
    if dtype is not None:
        _check_cover(key, found, dtype)
    return found


def _is_of_numpy(row: Row) -> bool:
    try:
        torch.empty(0, dtype=row.dtype, device="cpu").numpy()
    except (TypeError, RuntimeError):
        return False
    return row.kind == "ndarray" or not row.shape


def _record(key: str, record: Any) -> BlockRecord:
    if type(record) is not dict:
        raise _Wrong(f"a record of {key!r} is {reprlib.repr(record)}, which is no object")
    file, crc = record.get("file"), record.get("crc")
    if type(file) is not str:
        raise _Wrong(f"a file of {key!r} is {reprlib.repr(file)}")
    if crc is not None and type(crc) is not int:
        raise _Wrong(f"a checksum of {key!r} is {reprlib.repr(crc)}")
    offsets, sizes = _sizes(record, "offsets"), _sizes(record, "sizes")
    position, length = _number(record, "position"), _number(record, "length")
    if not length:
        raise _Wrong(f"a record of {key!r} has no bytes")
    return BlockRecord(offsets, sizes, file, position, length, crc)


def _check_cover(key: str, row: Row, dtype: torch.dtype) -> None:
    """Check that the blocks of a tensor lie in it, do not overlap, and cover it."""
    total = 0
    for record in row.records:
        dims = len(record.offsets), len(record.sizes)
        ends = map(sum, zip(record.offsets, record.sizes, strict=False))
        if dims != (len(row.shape),) * 2 or any(
            e > n for e, n in zip(ends, row.shape, strict=True)
        ):
            raise _Wrong(f"a block of {key!r} is outside of it")
        size = prod(record.sizes)
        if size * dtype.itemsize > record.length:
            raise _Wrong(f"a block of {key!r} is larger than its record")
        total += size
    if total < prod(row.shape):
        raise _Wrong(f"a part of {key!r} is in none of its files")
    if total > prod(row.shape) or (total and not _are_apart(row)):
        raise _Wrong(f"two blocks of {key!r} overlap")


def _are_apart(row: Row) -> bool:
    """Whether blocks that have as many elements as the whole cover it.

    The corners of blocks, counted with alternating signs, cancel out but for those of the whole: so
    they do if, and only if, every element is in one block.
    """
    blocks = [record for record in row.records if prod(record.sizes)]
    cut = [k for k, size in enumerate(row.shape) if any(b.sizes[k] != size for b in blocks)]
    if len(cut) > _MOST_CUT_DIMS:
        raise _Wrong(f"its blocks are cut along {len(cut)} dims")
    corners: Counter[Sizes] = Counter()
    origin = (0,) * len(row.shape)
    whole = (origin, row.shape, -1)
    for offsets, sizes, count in (*((b.offsets, b.sizes, 1) for b in blocks), whole):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[k] + end * sizes[k] for k, end in zip(cut, ends, strict=True))
            corners[corner] += count * (-1) ** sum(ends)
    return not any(corners.values())


def _check_places(folder: Path, rows: Mapping[str, Row], sizes: Any) -> None:
    """Check that the records lie in files of the folder and do not overlap."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows.values():
        for record in row.records:
            places[record.file].append((record.position, record.position + record.length))
    for name, extents in places.items():
        if sizes is not None and name not in sizes:
            raise _Wrong(f"the file {reprlib.repr(name)} is not in its list of files")
        with opened(folder, name) as file:
            size = file.seek(0, 2)
        end = 0
        for start, stop in sorted(extents):
            if start < end:
                raise _Wrong(f"two records of {name} overlap")
            end = stop
        if end > size:
            raise broken(folder, f"{name} ends before byte {end}")


def _check_tree(skeleton: Any, rows: Mapping[str, Row]) -> None:
    """Check that every leaf is in the tree exactly once."""
    left = set(rows)

    def walk(node: Any) -> None:
        if type(node) is str:
            if node not in left:
                raise _Wrong(f"the leaf {reprlib.repr(node)} is not there, or twice in the tree")
            left.remove(node)
            return
        ((kind, children),) = node.items() if type(node) is dict and len(node) == 1 else [(0, 0)]
        if kind not in ("dict", "list", "tuple", "fields") or type(children) is not list:
            raise _Wrong(f"the tree has {reprlib.repr(node)}")
        labels = []
        for pair in children:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int):
                raise _Wrong(f"the tree has {reprlib.repr(pair)}")
            labels.append(pair[0])
            walk(pair[1])
        if len(set(labels)) < len(labels):
            raise _Wrong(f"two parts of the tree are called {reprlib.repr(labels)}")

    walk(skeleton)
    if left:
        raise _Wrong(f"the leaves {reprlib.repr(sorted(left))} are not in the tree")


# -- checkpoints written by DCP alone --------------------------------------------------------------


def _of_dcp(folder: Path) -> tuple[dict[str, Any], str]:
    """The table that torchpmap would have written, and a digest."""
    data = read_metadata(folder)
    try:
        metadata = _state(metadata_of(data), "Metadata")
        meta = metadata.get("storage_meta")
        if meta is not None and MARK in (_state(meta, "StorageMeta").get("modules") or ()):
            raise broken(folder, f"the file {TABLE} is missing")
        places = {}
        for index, place in metadata["storage_data"].items():
            named, found = _state(index, "MetadataIndex"), _state(place, "_StorageInfo")
            if found.get("transform_descriptors"):
                raise ValueError("it is compressed, which torchpmap does not read")
            offset = named.get("offset")
            places[named["fqn"], None if offset is None else tuple(offset)] = {
                "file": found["relative_path"],
                "position": found["offset"],
                "length": found["length"],
            }
        leaves = {
            key: _leaf_of_dcp(key, stored, places)
            for key, stored in metadata["state_dict_metadata"].items()
        }
    except CheckpointError:
        raise
    except Exception as error:  # bytes that are not a pickle may raise anything
        raise broken(folder, f"{METADATA} cannot be read: {error}") from None
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return {"leaves": leaves, "tree": None}, digest


def _leaf_of_dcp(key: str, stored: Any, places: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    if type(stored) is Object and stored.kind == "BytesStorageMetadata":
        record = {"offsets": [], "sizes": [], **places[key, None]}
        return {"kind": _VALUE, "dtype": "", "shape": [], "records": [record]}
    state = _state(stored, "TensorStorageMetadata")
    properties = state["properties"]
    if type(properties) is not Object or properties.kind != "TensorProperties":
        raise ValueError(f"the leaf {key!r} has no dtype")
    records = []
    for chunk in state["chunks"]:
        block = _state(chunk, "ChunkStorageMetadata")
        extent = {"offsets": list(block["offsets"]), "sizes": list(block["sizes"])}
        if prod(extent["sizes"]):
            records.append({**extent, **places[key, tuple(block["offsets"])]})
    dtype, shape = properties.state[0], list(state["size"])
    return {"kind": "tensor", "dtype": dtype_name(dtype), "shape": shape, "records": records}


def _state(value: Any, kind: str) -> dict[str, Any]:
    if type(value) is not Object or value.kind != kind or type(value.state) is not dict:
        raise ValueError(f"there is {reprlib.repr(value)} instead of a {kind}")
    return value.state
