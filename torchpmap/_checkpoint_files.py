"""A checkpoint on disk: records in data files, a table of them, and a folder that appears at once.

    step_7/
      __0_0.distcp      the records that rank 0 wrote, one behind the other (torch.save of a block)
      __host_0.distcp   those of the controller
      .metadata         where they are, as torch.distributed.checkpoint wants to know it
      torchpmap.json    the same, with checksums and the containers of the tree: ``Table``

Everything is written to ``.step_7.saving`` beside it, which is renamed when it is whole and on
disk.  A checkpoint that was there before becomes ``.step_7.replaced`` for the moment between two
renames, and readers look there too: at no moment is there no checkpoint to be found.

The table is read instead of ``.metadata`` because that is a pickle, which may run code, and because
nothing else in the format notices a flipped bit: ``torch.load`` does not check its checksums.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchpmap._errors import CheckpointError

__all__ = [
    "TABLE",
    "Entry",
    "Folder",
    "Record",
    "Region",
    "Table",
    "read_record",
    "region",
    "write_records",
]

TABLE = "torchpmap.json"
METADATA = ".metadata"
_VERSION = 1
_ADVICE = (
    "Load an earlier checkpoint (torchpmap.checkpoint.latest passes over broken ones), or bring "
    "the files back from a copy."
)


@dataclass(frozen=True, slots=True)
class Record:
    """One block of a leaf, or a whole Python value, in a data file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    length: int
    crc: int | None
    """None in a checkpoint that torchpmap did not write."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of the saved tree."""

    kind: str
    """``tensor``, ``ndarray``, ``numpy scalar`` or the name of a Python type."""
    shape: tuple[int, ...]
    dtype: str
    """Of torch; empty for a Python value."""
    route: tuple[str | int, ...]
    records: tuple[Record, ...]

    def with_records(self, records: Sequence[Record]) -> Entry:
        return replace(self, records=tuple(sorted(records, key=lambda record: record.offsets)))

    @property
    def is_array(self) -> bool:
        return bool(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.is_array else f"a Python {self.kind}"


# -- data files ------------------------------------------------------------------------------------


class _Summed:
    """A file that is written to, with the checksum of what was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_records(
    path: Path, pieces: Iterable[tuple[str, Sequence[int], torch.Tensor | bytes]]
) -> list[tuple[str, Record]]:
    """Write (key, offsets, block or bytes) to a new file that is on disk afterwards."""
    written = []
    with path.open("xb") as file:
        for key, offsets, value in pieces:
            position, summed = file.tell(), _Summed(file)
            if isinstance(value, bytes):
                summed.write(value)
            else:
                torch.save(value, summed)  # type: ignore[arg-type]
            sizes = () if isinstance(value, bytes) else tuple(value.shape)
            length = file.tell() - position
            record = Record(tuple(offsets), sizes, path.name, position, length, summed.crc)
            written.append((key, record))
        file.flush()
        os.fsync(file.fileno())
    return written


def read_record(folder: Path, record: Record) -> io.BytesIO:
    """The bytes of a record.

    Raises:
        CheckpointError: they are not there, or not what was written.
    """
    path = folder / record.file
    try:
        with path.open("rb") as file:
            file.seek(record.position)
            data = file.read(record.length)
    except OSError as error:
        raise _broken(folder, f"{record.file} cannot be read: {error.strerror}") from error
    if len(data) != record.length:
        raise _broken(folder, f"{record.file} ends before byte {record.position + record.length}")
    if record.crc is not None and zlib.crc32(data) != record.crc:
        end = record.position + record.length
        raise _broken(
            folder,
            f"bytes {record.position} to {end} of {record.file} have changed since they were "
            "written (the checksum differs)",
        )
    return io.BytesIO(data)


def _broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} is damaged: {what}. {_ADVICE}")


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a leaf, and the records that it is in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Record, tuple[slice, ...], tuple[slice, ...]], ...]
    """Record, where in its block, where in the region."""

    def read(self, folder: Path) -> torch.Tensor:
        target = torch.empty(self.shape, dtype=self.dtype)
        for record, source, place in self.parts:
            block = torch.load(read_record(folder, record), map_location="cpu", weights_only=True)
            if block.dtype != self.dtype or tuple(block.shape) != record.sizes:
                kind = f"{block.dtype}{list(block.shape)}"
                raise _broken(folder, f"a block in {record.file} is {kind}, which it should not be")
            target[place] = block[source]
        return target


def region(
    folder: Path, key: str, entry: Entry, offsets: Sequence[int], sizes: Sequence[int]
) -> Region:
    """The part of a leaf that begins at ``offsets``.

    Example: rows 2 to 5 of a leaf whose records have rows 0 to 3 and 3 to 6 are rows 2 to 3 of the
    first, which come to 0 to 1, and rows 0 to 2 of the second, which come to 1 to 3.
    """
    parts, found = [], 0
    for record in entry.records:
        spans = [
            (max(start, begin), min(start + size, begin + length), start, begin)
            for start, size, begin, length in zip(
                record.offsets, record.sizes, offsets, sizes, strict=True
            )
        ]
        extents = [high - low for low, high, _, _ in spans]
        if all(extent > 0 for extent in extents):
            source = tuple(slice(low - start, high - start) for low, high, start, _ in spans)
            place = tuple(slice(low - begin, high - begin) for low, high, _, begin in spans)
            parts.append((record, source, place))
            found += _product(extents)
    if found < _product(sizes):
        raise _broken(folder, f"a part of {key} is in none of its files")
    return Region(tuple(sizes), getattr(torch, entry.dtype), tuple(parts))


def _product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """What is in a checkpoint and where."""

    folder: Path
    entries: dict[str, Entry]
    skeleton: Any
    """The containers of the tree (see ``_checkpoint_tree``); None if they are not known."""
    digest: str

    @staticmethod
    def read(folder: Path) -> Table:
        """Read it, and see that all files are there in their full size.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: it is damaged.
        """
        try:
            text = (folder / TABLE).read_bytes()
        except FileNotFoundError:
            return _foreign(folder)
        except OSError as error:
            raise _broken(folder, f"{TABLE} cannot be read: {error.strerror}") from error
        try:
            stored = json.loads(text)
            body, digest = stored["checkpoint"], stored["digest"]
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(folder, f"{TABLE} is not what was written: {error}") from error
        if _digest(body) != digest:
            raise _broken(folder, f"{TABLE} has changed since it was written (its digest differs)")
        if body["version"] > _VERSION:
            raise CheckpointError(
                f"the checkpoint {folder} is in version {body['version']} of the format, and this "
                f"release of torchpmap knows up to {_VERSION}. Use a later release."
            )
        for name, size in body["files"].items():
            _check_size(folder, name, size)
        entries = {key: _entry(**fields) for key, fields in body["leaves"].items()}
        return Table(folder, entries, body["tree"], digest)


def _entry(records: list[Any], shape: list[int], route: list[Any], **fields: Any) -> Entry:
    parsed = [Record(tuple(r.pop("offsets")), tuple(r.pop("sizes")), **r) for r in records]
    return Entry(shape=tuple(shape), route=tuple(route), records=tuple(parsed), **fields)


def _check_size(folder: Path, name: str, size: int) -> None:
    try:
        found = (folder / name).stat().st_size
    except OSError as error:
        raise _broken(folder, f"the file {name} is missing ({error.strerror})") from error
    if found != size:
        raise _broken(folder, f"the file {name} has {found} bytes, but {size} were written")


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _foreign(folder: Path) -> Table:
    """The table of a checkpoint that ``torch.distributed.checkpoint`` wrote by itself."""
    if not (folder / METADATA).is_file():
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: "
            + (f"it has no {TABLE}." if folder.exists() else "nothing has this name.")
            + " Give the folder that torchpmap.checkpoint.save was given."
        )
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    try:
        metadata = FileSystemReader(folder).read_metadata()
        places: Any = metadata.storage_data
    except Exception as error:  # a damaged pickle may raise anything
        raise _broken(folder, f"{METADATA} cannot be read: {error}") from error
    if metadata.storage_meta is not None and MARK in metadata.storage_meta.modules:
        raise _broken(folder, f"the file {TABLE} is missing")

    def record(index: MetadataIndex, sizes: Sequence[int]) -> Record:
        info = places[index]
        offsets = tuple(index.offset or (0,) * len(sizes))
        return Record(offsets, tuple(sizes), info.relative_path, info.offset, info.length, None)

    entries = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            records = [record(MetadataIndex(key, c.offsets), c.sizes) for c in stored.chunks]
            entries[key] = Entry("tensor", tuple(stored.size), dtype, (key,), tuple(records))
        else:
            entries[key] = Entry("value", (), "", (key,), (record(MetadataIndex(key), ()),))
    digest = hashlib.blake2b((folder / METADATA).read_bytes(), digest_size=16).hexdigest()
    return Table(folder, entries, None, digest)


MARK = "torchpmap"
"""In ``.metadata``: there was a table beside it."""


# -- the folder ------------------------------------------------------------------------------------


class Folder:
    """Where one checkpoint is, and where the next one of that name grows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self.growing = self.path.with_name(f".{self.path.name}.saving")
        self.replaced = self.path.with_name(f".{self.path.name}.replaced")

    def find(self) -> Path:
        """The checkpoint of this name, also between the two renames that replace it."""
        if not self.path.exists() and self.replaced.exists():
            return self.replaced
        return self.path

    def prepare(self) -> None:
        """Clear away what a killed save has left, and make the folder to write to.

        Raises:
            FileExistsError: there is something else of this name.
        """
        if self.path.exists() and not self._is_replaceable():
            raise FileExistsError(
                f"torchpmap.checkpoint.save: {self.path} exists and is no checkpoint, so it is not "
                "replaced. Choose another name, or remove it."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() and self.replaced.exists():
            self.replaced.rename(self.path)
        for left in (self.replaced, self.growing):
            if left.exists():
                shutil.rmtree(left)
        self.growing.mkdir()

    def _is_replaceable(self) -> bool:
        known = (self.path / TABLE, self.path / METADATA)
        return self.path.is_dir() and (any(map(Path.exists, known)) or not any(_files(self.path)))

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.growing, ignore_errors=True)

    def commit(self, entries: dict[str, Entry], skeleton: Any) -> None:
        """Finish the folder and give it its name."""
        sizes: dict[str, int] = {}
        for record in (record for entry in entries.values() for record in entry.records):
            end = record.position + record.length
            sizes[record.file] = max(end, sizes.get(record.file, 0))
        for name, size in sizes.items():
            _check_written(self.growing, name, size)
        self._write_metadata(entries)
        sizes[METADATA] = (self.growing / METADATA).stat().st_size
        body = {
            "version": _VERSION,
            "tree": skeleton,
            "leaves": {key: asdict(entry) for key, entry in entries.items()},
            "files": sizes,
        }
        body = json.loads(json.dumps(body))  # tuples become lists, as the reader will see them
        with (self.growing / TABLE).open("x") as file:
            json.dump({"digest": _digest(body), "checkpoint": body}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.growing)
        if self.path.exists():
            self.path.rename(self.replaced)
        self.growing.rename(self.path)
        _sync(self.path.parent)
        if self.replaced.exists():
            shutil.rmtree(self.replaced)

    def _write_metadata(self, entries: dict[str, Entry]) -> None:
        # three seconds of imports, only for those who save
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult

        final = self.path

        class Writer(FileSystemWriter):
            def storage_meta(self) -> dcp.StorageMeta:
                return dcp.StorageMeta(final, modules=[MARK])

        described: dict[str, dcp.STORAGE_TYPES] = {}
        results = []
        for key, entry in entries.items():
            chunks: list[dcp.ChunkStorageMetadata] = []
            for record in entry.records:
                offsets = torch.Size(record.offsets) if entry.is_array else None
                info = _StorageInfo(record.file, record.position, record.length)
                index = dcp.MetadataIndex(key, offsets, len(chunks) if entry.is_array else None)
                results.append(WriteResult(index, record.length, info))
                chunks.append(
                    dcp.ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.sizes))
                )
            described[key] = dcp.BytesStorageMetadata()
            if entry.is_array:
                properties = dcp.TensorProperties(getattr(torch, entry.dtype))
                size = torch.Size(entry.shape)
                described[key] = dcp.TensorStorageMetadata(properties, size, chunks)
        routes = {key: entry.route for key, entry in entries.items()}
        Writer(self.growing).finish(dcp.Metadata(described, routes), [results])


def _check_written(folder: Path, name: str, size: int) -> None:
    try:
        found: int | None = (folder / name).stat().st_size
    except FileNotFoundError:
        found = None
    if found != size:
        raise CheckpointError(
            f"the file {name} with {size} bytes, which another process wrote to {folder}, is not "
            "seen here. A checkpoint must be on a file system that all hosts share."
        )


def _files(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as found:
        yield from (entry.name for entry in found)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
