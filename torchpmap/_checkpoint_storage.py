"""Blocks and tables on disk, by the classes of ``torch.distributed.checkpoint`` (DCP).

DCP plans who writes what (``create_global_plan``), writes the blocks and ``.metadata``
(``FileSystemWriter``), plans what to read (``create_read_items_for_chunk_list``) and reads the
blocks (``FileSystemReader``).  Its plans and results go from process to process as ours do:
``dcp.save`` uses collectives, which in a thread would meet those of the program.

What DCP does not do:

* ``FileSystemReader.read_metadata`` calls ``pickle.load``, which may run code.  So ``.metadata`` is
  for others, and ours is read from ``torchpmap.json``; a checkpoint that DCP saved has no other.
* ``_write_item`` keeps no checksum, and ``read_data`` calls ``torch.load``, which passes over those
  in the file.  So every block is read once more: when it is written, and before it is loaded.
* ``DefaultLoadPlanner.load_bytes`` calls ``torch.load(..., weights_only=False)``.
* ``finish`` syncs ``.metadata`` before it is flushed, and in place: ``Folder`` does the rest.

To import DCP takes a second or more.  So this module, and those that import it, are imported when a
process first saves or loads: in its main thread, as torch's modules import each other in circles.
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
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from torchpmap._checkpoint_files import METADATA, TABLE, Folder, broken, read_table
from torchpmap._errors import kind_of

__all__ = ["Extent", "Table", "Written", "describe", "finish", "write", "write_item"]

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a leaf."""
Written = tuple[WriteResult, int]
"""What was written, and its checksum."""
_MARK = "torchpmap"  # in ``.metadata``: there was a table beside it


def describe(kind: str, dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    """``float32[2, 3]``, or ``a Python int``."""
    return f"a Python {kind}" if dtype is None else kind_of(shape, dtype)


def write_item(
    key: str, dtype: torch.dtype | None, shape: Sequence[int], extent: Extent
) -> dcp.WriteItem:
    """A block of a leaf for a plan; a Python value has no dtype."""
    if dtype is None:
        return dcp.WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    chunk = dcp.ChunkStorageMetadata(*map(torch.Size, extent))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return dcp.WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


# -- saving ----------------------------------------------------------------------------------------


class _Values(dcp.DefaultSavePlanner):
    """Gives the writer values by their indices."""

    def __init__(self, values: Mapping[MetadataIndex, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values[index]


def write(
    folder: Path, writer: int | str, plan: dcp.SavePlan, values: Mapping[MetadataIndex, Any]
) -> list[Written]:
    """Write blocks and Python values to a file that is on disk afterwards."""
    # nothing to copy ahead: the values are on the host
    storage = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    # the file is named after the writer; nothing else depends on it
    storage.set_up_storage_writer(False, rank=writer, use_collectives=False)
    results = storage.write_data(storage.prepare_local_plan(plan), _Values(values)).wait()
    return [(result, _checksum(folder, result.storage_data)) for result in results]


def _checksum(folder: Path, place: _StorageInfo) -> int:
    """That of a block as it is in its file.

    Raises:
        CheckpointError: it is not there.
    """
    name, left, crc = place.relative_path, place.length, 0
    try:
        with (folder / name).open("rb") as file:
            file.seek(place.offset)
            while data := file.read(min(left, 2**24)):  # a block may be half of the memory
                left, crc = left - len(data), zlib.crc32(data, crc)
    except OSError as error:
        raise broken(folder, f"{name} cannot be read: {error.strerror}") from error
    if left:
        raise broken(folder, f"{name} ends before byte {place.offset + place.length}")
    return crc


class _Writer(dcp.FileSystemWriter):
    """Writes ``.metadata`` for a folder that is to be renamed."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.growing)
        self._final = folder.path

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(self._final, modules=[_MARK])


def finish(
    folder: Folder,
    metadata: dcp.Metadata,
    leaves: Mapping[str, dict[str, Any]],
    skeleton: Any,
    written: Sequence[Written],
) -> None:
    """Write the tables of all that was written, and give the folder its name.

    ``leaves`` are those of the JSON; their records come in here.
    """
    ends: dict[str, int] = {}
    for result, crc in written:
        index, place = result.index, result.storage_data
        record = {"offsets": (), "sizes": (), "file": place.relative_path}
        stored = metadata.state_dict_metadata[index.fqn]
        if isinstance(stored, dcp.TensorStorageMetadata):
            record |= vars(stored.chunks[index.index or 0])
        record |= {"position": place.offset, "length": place.length, "crc": crc}
        leaves[index.fqn]["records"].append(record)
        ends[place.relative_path] = place.offset + place.length  # in the order of the file
    folder.check_written(ends)
    _Writer(folder).finish(metadata, [[result for result, _ in written]])
    folder.commit(leaves, skeleton, ends)


# -- loading ---------------------------------------------------------------------------------------


class _Targets(dcp.DefaultLoadPlanner):
    """Gives the reader parts of leaves to fill, by their keys."""

    def __init__(self, targets: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = targets

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@dataclass(frozen=True)
class Table:
    """What is in a checkpoint and where."""

    folder: Path
    metadata: dcp.Metadata
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
        items, places, sums = [], {}, {}
        for key, row in body["leaves"].items():
            dtype = getattr(torch, row["dtype"]) if row["dtype"] else None
            for record in row["records"]:
                extent = record["offsets"], record["sizes"]
                items.append(write_item(key, dtype, row["shape"], extent))
                place = _StorageInfo(record["file"], record["position"], record["length"])
                places[items[-1].index], sums[items[-1].index] = place, record["crc"]
        _, metadata = create_default_global_save_plan([dcp.SavePlan(items)])
        metadata.storage_data = places
        kinds = {key: row["kind"] for key, row in body["leaves"].items()}
        return Table(folder, metadata, kinds, sums, body["tree"], digest)

    def describe(self, key: str) -> str:
        stored = self.metadata.state_dict_metadata[key]
        if isinstance(stored, dcp.TensorStorageMetadata):
            return describe(self.kinds[key], stored.properties.dtype, stored.size)
        return describe(self.kinds[key], None, ())

    def read(self, extents: Mapping[str, Extent | None]) -> dict[str, Any]:
        """Parts of tensors, by key; of others, and without offsets and sizes, all.

        Raises:
            CheckpointError: a block is damaged, or there is none.
        """
        targets: dict[str, Any] = {}
        items: list[dcp.ReadItem] = []
        for key, extent in extents.items():
            stored = self.metadata.state_dict_metadata[key]
            if isinstance(stored, dcp.TensorStorageMetadata):
                offsets, sizes = map(torch.Size, extent or ((0,) * len(stored.size), stored.size))
                targets[key] = torch.empty(sizes, dtype=stored.properties.dtype, device="cpu")
                chunk = dcp.ChunkStorageMetadata(offsets, sizes)
                found = create_read_items_for_chunk_list(key, stored, [chunk])
                if sum(prod(item.lengths) for item in found) < prod(sizes):
                    raise broken(self.folder, f"a part of {key} is in none of its files")
                items += found
            else:
                nothing, index = torch.Size(), MetadataIndex(key)
                places = (index, nothing, index, nothing, nothing)
                items.append(dcp.ReadItem(LoadItemType.BYTE_IO, *places))
        self._check(item.storage_index for item in items)
        reader = dcp.FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        reader.read_data(dcp.LoadPlan(items), _Targets(targets))
        return targets

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
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise broken(folder, f"{METADATA} cannot be read: {error}") from error
    if metadata.storage_meta is not None and _MARK in metadata.storage_meta.modules:
        raise broken(folder, f"the file {TABLE} is missing")
    kinds = {
        key: "tensor" if isinstance(stored, dcp.TensorStorageMetadata) else "value"
        for key, stored in metadata.state_dict_metadata.items()
    }
    digest = hashlib.blake2b((folder / METADATA).read_bytes(), digest_size=16).hexdigest()
    return Table(folder, metadata, kinds, {}, None, digest)
