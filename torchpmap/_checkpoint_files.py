"""A checkpoint on disk: files of DCP, a table beside them, and a folder that appears at once.

    step_7/
      __0_0.distcp      the blocks that rank 0 wrote, one behind the other (torch.save of a tensor)
      __host_0.distcp   those of the controller
      .metadata         where they are, as torch.distributed.checkpoint (DCP) wants to know it
      torchpmap.json    the same, with checksums and the containers of the tree

Everything is written to ``.step_7.saving`` beside it, which is renamed when it is whole and on
disk.  A checkpoint that was there before becomes ``.step_7.replaced`` for the moment between two
renames, and readers look there too: at no moment is there no checkpoint to be found.

What DCP's classes write and read is in ``_checkpoint_storage``; nothing here imports them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchpmap._errors import CheckpointError

__all__ = ["METADATA", "TABLE", "Folder", "broken", "read_table"]

TABLE = "torchpmap.json"
METADATA = ".metadata"
_VERSION = 1
_ADVICE = (
    "Load an earlier checkpoint (torchpmap.checkpoint.latest passes over broken ones), or bring "
    "the files back from a copy."
)


def broken(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} is damaged: {what}. {_ADVICE}")


def read_table(folder: Path) -> tuple[dict[str, Any], str] | None:
    """What ``torchpmap.json`` says, and its digest; None if there is only a table of DCP.

    All files are there in their full size then.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged.
    """
    try:
        text = (folder / TABLE).read_bytes()
    except FileNotFoundError:
        if (folder / METADATA).is_file():
            return None
        raise FileNotFoundError(
            f"there is no checkpoint at {folder}: "
            + (f"it has no {TABLE}." if folder.exists() else "nothing has this name.")
            + " Give the folder that torchpmap.checkpoint.save was given."
        ) from None
    except OSError as error:
        raise broken(folder, f"{TABLE} cannot be read: {error.strerror}") from error
    try:
        stored = json.loads(text)
        body, digest = stored["checkpoint"], stored["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise broken(folder, f"{TABLE} is not what was written: {error}") from error
    if _digest(body) != digest:
        raise broken(folder, f"{TABLE} has changed since it was written (its digest differs)")
    if body["version"] > _VERSION:
        raise CheckpointError(
            f"the checkpoint {folder} is in version {body['version']} of the format, and this "
            f"release of torchpmap knows up to {_VERSION}. Use a later release."
        )
    for name, size in body["files"].items():
        _check_size(folder, name, size)
    return body, digest


def _check_size(folder: Path, name: str, size: int) -> None:
    try:
        found = (folder / name).stat().st_size
    except OSError as error:
        raise broken(folder, f"the file {name} is missing ({error.strerror})") from error
    if found != size:
        raise broken(folder, f"the file {name} has {found} bytes, but {size} were written")


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
        return self.path.is_dir() and (any(map(Path.exists, known)) or not any(self.path.iterdir()))

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.growing, ignore_errors=True)

    def check_written(self, sizes: Mapping[str, int]) -> None:
        """See that what other processes wrote has come."""
        for name, size in sizes.items():
            path = self.growing / name
            if not path.exists() or path.stat().st_size != size:
                raise CheckpointError(
                    f"the file {name} with {size} bytes, which another process wrote to "
                    f"{self.growing}, is not seen here. A checkpoint must be on a file system that "
                    "all hosts share."
                )

    def commit(self, leaves: Mapping[str, Any], skeleton: Any, sizes: Mapping[str, int]) -> None:
        """Write the table, when all else is written, and give the folder its name."""
        # FileSystemWriter.finish syncs it before it is flushed
        _sync(self.growing / METADATA)
        files = {**sizes, METADATA: (self.growing / METADATA).stat().st_size}
        body = {"version": _VERSION, "tree": skeleton, "leaves": leaves, "files": files}
        body = json.loads(json.dumps(body))  # tuples become lists, as the reader will see them
        with (self.growing / TABLE).open("x") as file:
            json.dump({"digest": _digest(body), "checkpoint": body}, file)
        _sync(self.growing / TABLE)
        _sync(self.growing)
        if self.path.exists():
            self.path.rename(self.replaced)
        self.growing.rename(self.path)
        _sync(self.path.parent)
        if self.replaced.exists():
            shutil.rmtree(self.replaced)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
