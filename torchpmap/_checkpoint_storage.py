"""Blocks and tables on disk, by the classes of ``torch.distributed.checkpoint`` (DCP).

DCP plans who writes what (``create_global_plan``), writes the blocks and ``.metadata``
(``FileSystemWriter``), plans what to read (``create_read_items_for_chunk_list``) and reads the
blocks (``FileSystemReader``).  Its plans and results are passed on by ours: ``dcp.save`` would do
it by collectives, and those of a thread that saves would meet those of the program.

What is ours, and why:

* The table is read from JSON, because ``FileSystemReader.read_metadata`` calls ``pickle.load``,
  which may run code.  Only what DCP saved by itself is read so.
* Checksums: ``_write_item`` keeps none, and ``read_data`` calls ``torch.load``, which does not
  check those in its files.
* ``DefaultLoadPlanner.load_bytes`` calls ``torch.load(..., weights_only=False)``.

Importing DCP takes a second or more, so this module, and those that import it, are imported by the
first save or load of a process; in its main thread, since torch's modules import each other.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from torchpmap._checkpoint_files import METADATA, TABLE, Folder, broken, read_table

__all__ = ["Extent", "Table", "Written", "describe", "finish", "write", "write_item"]

Extent = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a part of a leaf."""
Written = tuple[WriteResult, int]
"""What was written, and its checksum."""
_MARK = "torchpmap"  # in ``.metadata``: there was a table beside it


def describe(kind: str, dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    """``float32[2, 3]``, or ``a Python int``."""
    return f"a Python {kind}" if dtype is None else f"{_name(dtype)}{list(shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- saving ----------------------------------------------------------------------------------------


def write_item(
    key: str, dtype: torch.dtype | None, shape: Sequence[int], extent: Extent
) -> WriteItem:
    """A block of a leaf for the plan; a Python value has no dtype."""
    if dtype is None:
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(*map(torch.Size, extent))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _Values(DefaultSavePlanner):
    """Gives the writer values by their indices."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index]


def write(
    folder: Path, writer: int | str, plan: SavePlan, values: Mapping[MetadataIndex, Any]
) -> list[Written]:
    """Write blocks and Python values to a file that is on disk afterwards."""
    # nothing to copy ahead: the values are on the host
    storage = FileSystemWriter(folder, per_thread_copy_ahead=0)
    # the file is named after the writer; nothing else depends on it
    storage.set_up_storage_writer(False, rank=writer, use_collectives=False)
    planner = _Values(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(values))
    results = storage.write_data(storage.prepare_local_plan(plan), planner).wait()
    return [(result, _checksum(folder, result.storage_data)) for result in results]


def _checksum(folder: Path, place: _StorageInfo) -> int:
    """That of a block as it is in its file.

    Raises:
        CheckpointError: it is not there.
    """
    name, end = place.relative_path, place.offset + place.length
    try:
        with (folder / name).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
    except OSError as error:
        raise broken(folder, f"{name} cannot be read: {error.strerror}") from error
    if len(data) != place.length:
        raise broken(folder, f"{name} ends before byte {end}")
    return zlib.crc32(data)


class _Writer(FileSystemWriter):
    """Writes ``.metadata`` for a folder that is to be renamed."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.growing)
        self._final = folder.path

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(self._final, modules=[_MARK])


def finish(
    folder: Folder,
    metadata: Metadata,
    kinds: Mapping[str, str],
    skeleton: Any,
    written: Sequence[Written],
) -> None:
    """Write the tables of all that was written, and give the folder its name."""
    sizes: dict[str, int] = {}
    for place in (result.storage_data for result, _ in written):
        end = place.offset + place.length
        sizes[place.relative_path] = max(end, sizes.get(place.relative_path, 0))
    folder.check_written(sizes)
    _Writer(folder).finish(metadata, [[result for result, _ in written]])
    sums = {result.index: crc for result, crc in written}
    leaves = {key: _row(key, kind, metadata, sums) for key, kind in kinds.items()}
    folder.commit(leaves, skeleton, sizes)


def _row(
    key: str, kind: str, metadata: Metadata, sums: Mapping[MetadataIndex, int]
) -> dict[str, Any]:
    """A leaf for the table."""
    stored = metadata.state_dict_metadata[key]
    shape: Sequence[int] = ()
    dtype, blocks = "", [(MetadataIndex(key), ChunkStorageMetadata(torch.Size(), torch.Size()))]
    if isinstance(stored, TensorStorageMetadata):
        shape, dtype = stored.size, _name(stored.properties.dtype)
        blocks = [(MetadataIndex(key, chunk.offsets), chunk) for chunk in stored.chunks]
    records = []
    for index, chunk in blocks:
        place = metadata.storage_data[index]
        record = {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": place.relative_path}
        record |= {"position": place.offset, "length": place.length, "crc": sums[index]}
        records.append(record)
    route = metadata.planner_data[key]
    return {"kind": kind, "shape": shape, "dtype": dtype, "route": route, "records": records}


# -- loading ---------------------------------------------------------------------------------------


class _Targets(DefaultLoadPlanner):
    """Gives the reader parts of leaves to fill, by their keys."""

    def __init__(self, targets: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = targets

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@dataclass(frozen=True)
class Table:
    """What is in a checkpoint and where."""

    folder: Path
    metadata: Metadata
    kinds: dict[str, str]
    """By key: ``tensor``, ``ndarray``, ``numpy scalar`` or the name of a Python type."""
    sums: dict[MetadataIndex, int]
    """None of what torchpmap did not write."""
    skeleton: Any
    """The containers of the tree (see ``_checkpoint_tree``); None if they are not known."""
    digest: str

    @staticmethod
    def of(folder: Path) -> Table:
        """That of a checkpoint, all of whose files are there in their full size.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: it is damaged.
        """
        found = read_table(folder)
        if found is None:
            return _foreign(folder)
        body, digest = found
        described: dict[str, STORAGE_TYPES] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        sums = {}
        for key, row in body["leaves"].items():
            chunks = []
            for record in row["records"]:
                index = MetadataIndex(key, record["offsets"] if row["dtype"] else None)
                place = (record["file"], record["position"], record["length"])
                places[index], sums[index] = _StorageInfo(*place), record["crc"]
                extent = (torch.Size(record[name]) for name in ("offsets", "sizes"))
                chunks.append(ChunkStorageMetadata(*extent))
            described[key] = BytesStorageMetadata()
            if row["dtype"]:
                properties = TensorProperties(getattr(torch, row["dtype"]))
                size = torch.Size(row["shape"])
                described[key] = TensorStorageMetadata(properties, size, chunks)
        kinds = {key: row["kind"] for key, row in body["leaves"].items()}
        metadata = Metadata(described, storage_data=places)
        return Table(folder, metadata, kinds, sums, body["tree"], digest)

    def describe(self, key: str) -> str:
        stored = self.metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            return describe(self.kinds[key], stored.properties.dtype, stored.size)
        return describe(self.kinds[key], None, ())

    def read(self, extents: Mapping[str, Extent | None]) -> dict[str, Any]:
        """Parts of tensors, by key; of others, and without offsets and sizes, all.

        Raises:
            CheckpointError: a block is damaged, or there is none.
        """
        targets: dict[str, Any] = {}
        items: list[ReadItem] = []
        for key, extent in extents.items():
            stored = self.metadata.state_dict_metadata[key]
            if isinstance(stored, TensorStorageMetadata):
                offsets, sizes = extent or ((0,) * len(stored.size), stored.size)
                dtype = stored.properties.dtype
                targets[key] = torch.empty(sizes, dtype=dtype, device="cpu")
                items += self._items(key, stored, offsets, sizes)
            else:
                nothing, index = torch.Size(), MetadataIndex(key)
                places = (index, nothing, index, nothing, nothing)
                items.append(ReadItem(LoadItemType.BYTE_IO, *places))
        self._check({item.storage_index for item in items})
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        reader.read_data(LoadPlan(items), _Targets(targets))
        return targets

    def _items(
        self, key: str, stored: TensorStorageMetadata, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[ReadItem]:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        if sum(prod(item.lengths) for item in items) < prod(sizes):
            raise broken(self.folder, f"a part of {key} is in none of its files")
        return items

    def _check(self, indices: Iterable[MetadataIndex]) -> None:
        for index in indices:
            place = self.metadata.storage_data[index]
            found = _checksum(self.folder, place)
            if self.sums.get(index, found) != found:
                raise broken(
                    self.folder,
                    f"bytes {place.offset} to {place.offset + place.length} of "
                    f"{place.relative_path} have changed since they were written (the checksum "
                    "differs)",
                )


def _foreign(folder: Path) -> Table:
    """That of a checkpoint which DCP saved by itself."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise broken(folder, f"{METADATA} cannot be read: {error}") from error
    if metadata.storage_meta is not None and _MARK in metadata.storage_meta.modules:
        raise broken(folder, f"the file {TABLE} is missing")
    kinds = {
        key: "tensor" if isinstance(stored, TensorStorageMetadata) else "value"
        for key, stored in metadata.state_dict_metadata.items()
    }
    digest = hashlib.blake2b((folder / METADATA).read_bytes(), digest_size=16).hexdigest()
    return Table(folder, metadata, kinds, {}, None, digest)
