"""A checkpoint on disk: files of DCP and a table, in a folder that is named when it is complete.

    step_7/
      __0_0.distcp      the blocks that rank 0 wrote, one after the other (torch.save of a tensor)
      __host_0.distcp   the blocks of the controller
      .metadata         where the blocks are, for torch.distributed.checkpoint (DCP)
      torchpmap.json    the same, with checksums and the containers of the tree

Everything is written to ``.step_7.saving`` beside it, which is renamed when it is complete and on
disk.  An earlier checkpoint of that name becomes ``.step_7.replaced`` for the moment between two
renames.  Readers look there too, so they find a checkpoint at any moment.

``checkpoint/_storage`` writes with the classes of DCP; ``checkpoint/_table`` reads.  A folder may
come from anywhere, so its files are opened with care (see ``opened``).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from torchpmap._base.errors import CheckpointError

TABLE = "torchpmap.json"
METADATA = ".metadata"
_VERSION = 1
_MOST_BYTES = 2**28
"""Of a table, which is enough for a million blocks."""
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_ADVICE = (
    "Load an earlier checkpoint (torchpmap.checkpoint.latest passes over broken ones), or bring "
    "the files back from a copy."
)


def broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} is damaged: {what}. {_ADVICE}")


def read_table(folder: Path) -> tuple[dict[str, Any], str] | None:
    """The content of ``torchpmap.json``, and its digest; None if there is only a table of DCP.

    All files were checked to be there in full size; the rest of the table was not checked.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged.
    """
    if not _is_there(folder, TABLE):
        if _is_there(folder, METADATA):
            return None
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: "
            + (f"it has no {TABLE}." if folder.exists() else "nothing has this name.")
            + " Give the folder that torchpmap.checkpoint.save was given."
        )
    text = _read(folder, TABLE)
    try:
        stored = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refused)
        body, digest = stored["checkpoint"], stored["digest"]
        version, files = body["version"], body["files"]
        if _digest(body) != digest:
            raise broken(folder, f"{TABLE} has changed since it was written (its digest differs)")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise broken(folder, f"{TABLE} is not what was written: {error}") from None
    if type(version) is not int or type(files) is not dict or "tree" not in body:
        raise broken(folder, f"{TABLE} is not what was written: it has no version, files or tree")
    if version > _VERSION:
        raise CheckpointError(
            f"the checkpoint {folder} is in version {version} of the format, and this "
            f"release of torchpmap knows up to {_VERSION}. Use a later release."
        )
    for name, size in files.items():
        _check_size(folder, name, size)
    return body, digest


def read_metadata(folder: Path) -> bytes:
    """The bytes of DCP's table.

    Raises:
        CheckpointError: it cannot be read.
    """
    return _read(folder, METADATA)


def _read(folder: Path, name: str) -> bytes:
    with opened(folder, name) as file:
        if file.seek(0, os.SEEK_END) > _MOST_BYTES:
            raise broken(folder, f"{name} has more than {_MOST_BYTES} bytes")
        file.seek(0)
        return file.read(_MOST_BYTES)


def opened(folder: Path, name: str) -> BufferedReader:
    """A file of a checkpoint, to read: a regular one, in the folder itself.

    Raises:
        CheckpointError: it is missing, a link, a device, a pipe, or elsewhere.
    """
    if not is_name(name):
        raise broken(folder, f"{name!r:.50} is not the name of a file in it")
    try:
        # opening a pipe may wait forever, and a link may lead out of the folder
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(folder / name, flags)
    except FileNotFoundError as error:
        raise broken(folder, f"the file {name} is missing ({error.strerror})") from None
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise broken(folder, f"{name} cannot be read: {why}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise broken(folder, f"{name} is no regular file")
    return os.fdopen(descriptor, "rb")


def _is_there(folder: Path, name: str) -> bool:
    try:
        os.lstat(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise broken(folder, f"{name} cannot be read: {error.strerror}") from None
    return True


def is_name(name: str) -> bool:
    """Whether a text is a file name without a path."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable()


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _refused(text: str) -> Any:
    raise ValueError(f"it has the number {text}")


def _check_size(folder: Path, name: str, size: Any) -> None:
    with opened(folder, name) as file:
        found = file.seek(0, os.SEEK_END)
    if found != size:
        raise broken(folder, f"the file {name} has {found} bytes, but {size!r:.30} were written")


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Folder:
    """The paths of a checkpoint: complete, being written, and being replaced."""

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
            _remove(left)
        self.growing.mkdir(_FOLDER_MODE)

    def _is_replaceable(self) -> bool:
        known = (self.path / TABLE, self.path / METADATA)
        return self.path.is_dir() and (any(map(Path.exists, known)) or not any(self.path.iterdir()))

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.growing, ignore_errors=True)

    def check_written(self, sizes: Mapping[str, int]) -> None:
        """Check that this process sees the files of the others."""
        for name, size in sizes.items():
            path = self.growing / name
            if not path.exists() or path.stat().st_size != size:
                raise CheckpointError(
                    f"the file {name} with {size} bytes, which another process wrote to "
                    f"{self.growing}, is not seen here. A checkpoint must be on a file system that "
                    "all hosts share."
                )

    def commit(self, leaves: Mapping[str, Any], skeleton: Any, sizes: Mapping[str, int]) -> None:
        """Write the table, after all other files, and give the folder its name."""
        # FileSystemWriter.finish syncs it before it is flushed
        _sync(self.growing / METADATA)
        files = {**sizes, METADATA: (self.growing / METADATA).stat().st_size}
        body = {"version": _VERSION, "tree": skeleton, "leaves": leaves, "files": files}
        body = json.loads(json.dumps(body))  # tuples become lists, as the reader will see them
        text = json.dumps({"digest": _digest(body), "checkpoint": body})
        if len(text) > _MOST_BYTES:
            raise CheckpointError(
                f"{len(leaves)} leaves are too many for one checkpoint: its table would have "
                f"{len(text)} bytes, and may have {_MOST_BYTES}. Stack small tensors."
            )
        with (self.growing / TABLE).open("x") as file:
            file.write(text)
        for name in (TABLE, METADATA):
            make_private(self.growing / name)
        _sync(self.growing / TABLE)
        _sync(self.growing)
        if self.path.exists():
            self.path.rename(self.replaced)
        self.growing.rename(self.path)
        _sync(self.path.parent)
        _remove(self.replaced)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def make_private(path: Path) -> None:
    """Let only the user read a file, even if the folder is opened to others later."""
    path.chmod(_FILE_MODE)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
