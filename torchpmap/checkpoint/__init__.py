"""Checkpoints: pytrees of tensors on disk.  Every device writes its own blocks, and a checkpoint
appears complete or not at all.

A save describes the tree, copies the values and returns.  A thread of this process, and one of
every worker, then write the copies; when all are done, the folder gets its name.  With several
controllers each writes the blocks of its device, and rank 0 names the folder.  See
``docs/checkpoint.md``.

Files are tensors as raw bytes and one JSON table; nothing in them is code: see
``checkpoint/_blocks`` and ``checkpoint/_table``.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from torchpmap._base.boundary import boundary
from torchpmap._base.errors import CheckpointError, warn
from torchpmap._runtime import current
from torchpmap.checkpoint._folder import OtherFormat
from torchpmap.checkpoint._load import ShapeDtypeStruct, is_complete, load_tree
from torchpmap.checkpoint._save import begin

__all__ = ["Saving", "ShapeDtypeStruct", "latest", "load", "save"]

PathLike = str | os.PathLike[str]


class Saving:
    """A checkpoint that is being written; ``save(..., asynchronous=True)`` returns it."""

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self._path = path
        self._error: Exception | None = None
        self._unseen: Exception | None = None
        """The error until a caller gets it."""
        # not a daemon: the script waits for it at its end
        self._thread = threading.Thread(target=self._run, args=[write], name="torchpmap-checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = self._unseen = error

    def done(self) -> bool:
        """Whether the save has ended, complete or failed."""
        return not self._thread.is_alive()

    @boundary
    def wait(self) -> None:
        """Wait until the checkpoint is complete and on disk.

        Raises:
            CheckpointError: it could not be written; an earlier one at the path is unchanged.
        """
        self._thread.join()
        self._unseen = None
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._error else "complete"
        return f"<Saving {self._path}: {state}>"


_saving: Saving | None = None  # the last one
_turn = threading.RLock()
"""Of the thread that saves; a handler of a signal may save while its thread does."""


def _begin_anew() -> None:
    """In a forked child: the thread that held the lock is the parent's."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


def _wait_for_previous() -> None:
    """Wait, so that a reader finds the latest save; ``wait`` or the next save raises its error."""
    if _saving is not None:
        _saving._thread.join()


current.unfinished.append(_wait_for_previous)


def _tell_of_failure() -> None:
    if _saving is not None and _saving._unseen is not None:
        print(f"torchpmap: {_saving._unseen}", file=sys.stderr)


# -- saving ----------------------------------------------------------------------------------------


@overload
def save(path: PathLike, tree: Any, *, asynchronous: Literal[False] = ...) -> None: ...
@overload
def save(path: PathLike, tree: Any, *, asynchronous: Literal[True]) -> Saving: ...
@boundary
def save(path: PathLike, tree: Any, *, asynchronous: bool = False) -> Saving | None:
    """Save a pytree to the folder ``path``; every device writes its own blocks.

    The folder gets its name when it is complete and on disk, so a kill at any moment leaves the
    earlier checkpoint or the new one.  With several controllers (torchrun) each calls it with the
    same path and its own tree; the rows of a row-sharded value are joined in process order.

    Args:
        path: a folder on a file system that all hosts share; its parents are created, and a
            checkpoint of that name is replaced.
        tree: pytree of ShardedTensors, tensors, numpy arrays, numbers, strings, bytes and None.
        asynchronous: return as soon as the values are copied; after that, you may change or donate
            them.

    Returns:
        None; with ``asynchronous=True`` a ``Saving`` with ``wait()`` and ``done()``.

    Raises:
        TypeError: a leaf of another type, or a dict key that is neither a string nor an int.
        ValueError: two leaves with one name, or processes with different trees.
        FileExistsError: ``path`` exists and is not a checkpoint.
        CheckpointError: this save, or an asynchronous save before it, could not be written; or
            another process saves to ``path``.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> folder = tempfile.mkdtemp()
        >>> params = {"w": tp.device_put(torch.arange(4.0), tp.devices())}
        >>> tp.checkpoint.save(f"{folder}/step_10", {"params": params, "step": 10})
        >>> tp.checkpoint.load(f"{folder}/step_10")
        {'params': {'w': tensor([0., 1., 2., 3.])}, 'step': 10}

    Source: the files of blocks are in the format of ``safetensors``, which can read them.
    """
    global _saving
    current.refuse_inside("checkpoint.save")
    with _turn:
        _wait_for_previous()
        if _saving is not None and _saving._unseen is not None:
            _saving._unseen.add_note("in an asynchronous save before this one")
            _saving.wait()
        before, finish = _saving, begin(path, tree)
        if _saving is not before:  # a handler of a signal has saved meanwhile, and did not wait
            _wait_for_previous()
            _tell_of_failure()
        if _saving is None:
            atexit.register(_tell_of_failure)
        saving = _saving = Saving(Path(os.path.abspath(path)), finish)
        if asynchronous:
            return saving
        saving.wait()
        return None


# -- loading ---------------------------------------------------------------------------------------


@boundary
def load(path: PathLike, like: Any = None) -> Any:
    """Return the pytree that was saved to ``path``.

    The numbers of devices and processes may differ from those of the save.  Every device reads its
    own blocks.  With several controllers (torchrun) all of them call it.

    Args:
        path: the path given to ``save``.
        like: pytree of the expected structure, shapes and dtypes; each value is placed like its
            leaf: ShardedTensors on the same devices in the same layout, tensors on their device,
            numpy arrays as such, a ``ShapeDtypeStruct`` by its sharding.  The values of ``like``
            are neither used nor changed.

    Returns:
        a tree like ``like``; without it the saved tree, of CPU tensors, numpy arrays and Python
        values, with dicts in place of containers other than dicts, lists and tuples.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged, or in the format of another release.
        ValueError: it does not match ``like``; names the leaf.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> folder = tempfile.mkdtemp()
        >>> tp.checkpoint.save(folder, {"w": torch.arange(4.0)})
        >>> tp.checkpoint.load(folder, like={"w": tp.replicate(torch.zeros(4))})
        {'w': ShardedTensor([0., 1., 2., 3.], replicated on cpu:0 cpu:1 cpu:2 cpu:3)}
    """
    current.refuse_inside("checkpoint.load")
    _wait_for_previous()
    return load_tree(path, like)


@boundary
def latest(directory: PathLike) -> Path | None:
    """Return the checkpoint with the highest number in ``directory``; None if there is none.

    Only complete checkpoints count, in folders whose names end in a number (``step_200``).  Damaged
    checkpoints are skipped with a warning.

    Raises:
        CheckpointError: that checkpoint is in the format of another release.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> folder = tempfile.mkdtemp()
        >>> for step in (9, 10):
        ...     tp.checkpoint.save(f"{folder}/step_{step}", {"step": step})
        >>> tp.checkpoint.latest(folder).name
        'step_10'
    """
    _wait_for_previous()
    root = Path(directory)
    found: dict[str, int] = {}
    for entry in root.iterdir() if root.is_dir() else ():
        name = re.sub(r"^\.(.*)\.replaced$", r"\1", entry.name)
        number = re.search(r"[0-9]+$", name)
        if number is not None and not name.startswith(".") and entry.is_dir():
            found[name] = int(number[0])
    for name in sorted(found, key=lambda name: (found[name], name), reverse=True):
        try:
            if is_complete(root / name):
                return root / name
        except OtherFormat:
            raise  # rather than begin again with an earlier one
        except CheckpointError as error:
            warn(f"torchpmap.checkpoint.latest passes over {name}: {error}")
    return None
