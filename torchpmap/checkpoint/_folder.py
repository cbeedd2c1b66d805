"""A checkpoint on disk: files of blocks and a table, in a folder that is named when it is complete.

    step_7/
      rank_0.safetensors   the blocks that rank 0 wrote (see ``checkpoint/_blocks``)
      host.safetensors     the values on the host
      torchpmap.json       the tree, which file has which block, checksums (``checkpoint/_table``)

Everything is written to ``.step_7.saving`` beside it, which is renamed when it is complete and on
disk.  An earlier checkpoint of that name becomes ``.step_7.replaced`` for the moment between two
renames.  Readers look there too, so they find a checkpoint at any moment.

A folder may come from anywhere, so its files are opened with care (see ``opened``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from shlex import quote
from typing import Any

from torchpmap._base.errors import CheckpointError

TABLE = "torchpmap.json"
_DCP_TABLE = ".metadata"
_MAX_TABLE_BYTES = 2**28
"""Enough for a million blocks."""
_OURS = re.compile(r"torchpmap\.json|(host|rank_\d+)\.\w+")
"""Names of the files of a checkpoint, also of an old one."""
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
HOST = -1
"""The controller of worker processes, as a writer; with several controllers, rank 0."""


def file_of(writer: int) -> str:
    return "host.safetensors" if writer == HOST else f"rank_{writer}.safetensors"


class OtherFormat(CheckpointError):
    """A checkpoint that is complete, but that this release does not read."""


OLD_VERSION = 1
"""Of torchpmap 0.1, whose blocks are files of ``torch.save``."""


def other_format(folder: Path, version: Any) -> OtherFormat:
    """The error for a checkpoint in another version of the format."""
    which = (
        f"version {version!r:.50} of the format, which this release of torchpmap does not know. "
        "Use the one that wrote it."
    )
    if version == OLD_VERSION:
        which = (
            "the format of torchpmap 0.1, whose files are not read as data alone. If it is yours, "
            f"convert it: python -m torchpmap convert {quote(str(folder))} NEW. The next release "
            "cannot."
        )
    return OtherFormat(f"the checkpoint {folder} is in {which}")


def broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {folder} is damaged: {what}. Load an earlier checkpoint "
        "(torchpmap.checkpoint.latest passes over broken ones), or bring the files back from a "
        "copy."
    )


def opened(folder: Path, name: str) -> BufferedReader:
    """A file of a checkpoint, to read: a regular one, in the folder itself.

    Raises:
        CheckpointError: it is missing, a link, a device, a pipe, or elsewhere.
    """
    try:
        if name not in os.listdir(folder):  # as every path with a slash or dots
            raise broken(folder, f"the file {name!r:.80} is missing")
        # opening a pipe may wait forever, and a link may lead out of the folder
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(folder / name, flags)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise broken(folder, f"{name} cannot be read: {why}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise broken(folder, f"{name} is no regular file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def created(path: Path) -> Iterator[BufferedWriter]:
    """A new file, which is on the disk in the end.  Only the user can read it, even if the folder
    is opened to others later.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)


def read_table(folder: Path) -> bytes:
    """The text of the table.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged, or in another format.
    """
    if not os.path.lexists(folder / TABLE):
        if os.path.lexists(folder / _DCP_TABLE):
            raise OtherFormat(
                f"the checkpoint {folder} is in the format of torch.distributed.checkpoint. If you "
                "trust it, make one file for torch.load of it: python -m "
                "torch.distributed.checkpoint.format_utils dcp_to_torch "
                f"{quote(str(folder))} FILE."
            )
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: "
            + (f"it has no {TABLE}." if folder.exists() else "nothing has this name.")
            + " Give the folder that torchpmap.checkpoint.save was given."
        )
    with opened(folder, TABLE) as file:
        if os.fstat(file.fileno()).st_size > _MAX_TABLE_BYTES:
            raise broken(folder, f"{TABLE} has more than {_MAX_TABLE_BYTES} bytes")
        return file.read(_MAX_TABLE_BYTES)


class Folder:
    """The paths of a checkpoint: complete, being written, and being replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        if not self.path.name:
            raise ValueError(
                f"torchpmap.checkpoint: {self.path} is the root folder, which cannot be a "
                'checkpoint. Give a folder in it, such as "/step_1".'
            )
        self.growing = self.path.with_name(f".{self.path.name}.saving")
        self.replaced = self.path.with_name(f".{self.path.name}.replaced")
        self._locked: list[int] = []
        """Descriptors of the folders that this process has locked."""
        self._is_growing = False
        """Whether this has made the folder to write to."""

    def find(self) -> Path:
        """The checkpoint of this name, also between the two renames that replace it."""
        if not self.path.exists() and self.replaced.exists():
            return self.replaced
        return self.path

    def prepare(self) -> None:
        """Clear away what a killed save has left, and make the folder to write to.

        Raises:
            CheckpointError: another process saves to this name.
            FileExistsError: there is something else of this name, or in the folder.
        """
        is_ours = self.path.is_dir() and (
            (self.path / TABLE).exists() or not any(self.path.iterdir())
        )
        if os.path.lexists(self.path) and not is_ours:
            raise FileExistsError(
                f"torchpmap.checkpoint.save: {self.path} exists and is no checkpoint, so it is not "
                "replaced. Choose another name, or remove it."
            )
        if is_ours and os.path.exists(".") and os.path.samefile(self.path, "."):
            raise FileExistsError(
                f"torchpmap.checkpoint.save: {self.path} is the current folder, which a checkpoint "
                'would replace. Choose another name, such as "step_1".'
            )
        present = os.listdir(self.path) if is_ours else []
        others = sorted(name for name in present if not _OURS.fullmatch(name))
        if others:
            raise FileExistsError(
                f"torchpmap.checkpoint.save: {self.path} holds {', '.join(others[:5])} too, which "
                "is no part of a checkpoint, and would be lost with the old one. Move it "
                "elsewhere, or choose another name."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = _unfinished.get(self.growing)
        if earlier is not None:  # of a save that failed, or that a signal handler has interrupted
            earlier.discard()
        _unfinished[self.growing] = self
        for folder in (self.growing, self.path):  # a save that ends renames the first to the second
            if folder.is_dir():
                self._lock(folder)
        if not self.path.exists() and self.replaced.exists():
            self.replaced.rename(self.path)
        for left in (self.replaced, self.growing):
            _remove(left)
        self.growing.mkdir(_FOLDER_MODE)
        self._is_growing = True
        self._lock(self.growing)

    def _lock(self, folder: Path) -> None:
        """Keep other processes from saving here, until this save or this process has ended.

        Raises:
            CheckpointError: another process has done so.
        """
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            self._locked.append(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except (BlockingIOError, FileNotFoundError):
            is_free = False
        except OSError:
            is_free = True  # a file system without locks
        if not is_free:
            raise CheckpointError(
                f"torchpmap.checkpoint.save: another process saves to {self.path}. Wait until it "
                "is done, or give each its own folder."
            )

    def leave(self) -> None:
        """Let others save here; in a forked child, which has the locks too: let its parent."""
        while self._locked:
            os.close(self._locked.pop())
        self._is_growing = False
        if _unfinished.get(self.growing) is self:
            del _unfinished[self.growing]

    def discard(self) -> None:
        """Remove what was written so far."""
        if self._is_growing:
            shutil.rmtree(self.growing, ignore_errors=True)
        self.leave()

    def commit(self, table: bytes, files: Mapping[str, Mapping[str, int]]) -> None:
        """Write the table, after the other files, and give the folder its name.  ``files`` says how
        many ``bytes`` they have.
        """
        for name, about in files.items():
            path, size = self.growing / name, about["bytes"]
            if not path.exists() or path.stat().st_size != size:
                raise CheckpointError(
                    f"the file {name} with {size} bytes, which another process wrote to "
                    f"{self.growing}, is not seen here. A checkpoint must be on a file system that "
                    "all hosts share."
                )
        if len(table) > _MAX_TABLE_BYTES:
            raise CheckpointError(
                f"its table would have {len(table)} bytes, and may have {_MAX_TABLE_BYTES}. Stack "
                "small tensors, and save long texts and bytes as tensors."
            )
        with created(self.growing / TABLE) as file:
            file.write(table)
        _sync(self.growing)
        if self.path.exists():
            self.path.rename(self.replaced)
        self.growing.rename(self.path)
        _sync(self.path.parent)
        with suppress(OSError):  # the new one is there; the next save of this name tries again
            _remove(self.replaced)
        self.leave()


_unfinished: dict[Path, Folder] = {}
"""What this process writes to -> whose it is."""


def _in_forked_child() -> None:
    for folder in tuple(_unfinished.values()):
        folder.leave()


os.register_at_fork(after_in_child=_in_forked_child)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
