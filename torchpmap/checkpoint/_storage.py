"""Blocks and tables on disk, written by the classes of ``torch.distributed.checkpoint`` (DCP).

DCP plans which rank writes what (``create_global_plan``), and writes the blocks and ``.metadata``
(``FileSystemWriter``).  torchpmap sends plans and results between processes itself: ``dcp.save``
uses collectives, which in a thread would mix with collectives of the script.

What DCP does not do:

* ``_write_item`` stores no checksum, so every written block is read once more to compute it.
* ``finish`` syncs ``.metadata`` before it is flushed, and in place: ``Folder`` does the rest.
* Other users can read its files, so they are made private.

Importing DCP takes a second or more, so this module, and the modules that import it, are imported
by the first save or load, in the main thread: torch's modules import each other in circles.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchpmap.checkpoint._files import Folder, broken, is_name, make_private
from torchpmap.checkpoint._pickles import place_in_file
from torchpmap.checkpoint._table import MARK, Extent


class Written(NamedTuple):
    """A block that was written; goes to other processes as data."""

    key: str
    offsets: torch.Size | None
    """None for a Python value."""
    chunk: int | None
    """Which block of the leaf it is."""
    file: str
    position: int
    length: int
    crc: int

    def result(self) -> WriteResult:
        """The same as a class of DCP."""
        stored = place_in_file(self.file, self.position, self.length)
        return WriteResult(MetadataIndex(self.key, self.offsets, self.chunk), self.length, stored)


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
    """Write blocks and Python values to a file, and sync it to disk."""
    # nothing to copy ahead: the values are on the host
    storage = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    # the file is named after the writer; nothing else depends on it
    storage.set_up_storage_writer(False, rank=writer, use_collectives=False)
    results = storage.write_data(storage.prepare_local_plan(plan), _Values(values)).wait()
    for name in {result.storage_data.relative_path for result in results}:
        make_private(folder / name)
    return [_written(folder, result.index, result.storage_data) for result in results]


def _written(folder: Path, index: MetadataIndex, stored: Any) -> Written:
    where = stored.relative_path, stored.offset, stored.length
    return Written(index.fqn, index.offset, index.index, *where, _checksum(folder, stored))


def _checksum(folder: Path, stored: Any) -> int:
    """The checksum of a block, read from its file.

    Raises:
        CheckpointError: the block is not there.
    """
    name, left, crc = stored.relative_path, stored.length, 0
    try:
        with (folder / name).open("rb") as file:
            file.seek(stored.offset)
            while data := file.read(min(left, 2**24)):  # a block may be half of the memory
                left, crc = left - len(data), zlib.crc32(data, crc)
    except OSError as error:
        raise broken(folder, f"{name} cannot be read: {error.strerror}") from error
    if left:
        raise broken(folder, f"{name} ends before byte {stored.offset + stored.length}")
    return crc


class _Writer(dcp.FileSystemWriter):
    """Writes ``.metadata`` for a folder that is to be renamed."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.growing)
        self._final = folder.path

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(self._final, modules=[MARK])


def finish(
    folder: Folder,
    metadata: dcp.Metadata,
    leaves: Mapping[str, dict[str, Any]],
    skeleton: Any,
    written: Sequence[Written],
) -> None:
    """Write the tables, and give the folder its name.

    ``leaves`` are the rows of the JSON table; the records of the written blocks are added to them.
    """
    ends: dict[str, int] = {}
    for each in written:
        if not is_name(each.file):
            raise ValueError(f"another process wrote to {each.file!r:.50}")
        record: dict[str, Any] = {"offsets": (), "sizes": (), "file": each.file}
        stored = metadata.state_dict_metadata[each.key]
        if isinstance(stored, dcp.TensorStorageMetadata):
            record |= vars(stored.chunks[each.chunk or 0])
        record |= {"position": each.position, "length": each.length, "crc": each.crc}
        leaves[each.key]["records"].append(record)
        ends[each.file] = each.position + each.length  # in the order of the file
    folder.check_written(ends)
    _Writer(folder).finish(metadata, [[each.result() for each in written]])
    folder.commit(leaves, skeleton, ends)
