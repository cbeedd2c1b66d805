"""Checkpoints: pytrees of tensors on disk, written by every device for itself, and found whole or
not at all.

Saving is: describe the tree, copy what has to be written, and return; a thread of this process, and
one of every worker, write, and when all have, the folder gets its name.  With several controllers
each writes what its device has, and rank 0 gives the name.  See ``docs/checkpoint.md``.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from torchpmap import _axes
from torchpmap._checkpoint_files import Entry, Folder, Record, Table, write_records
from torchpmap._checkpoint_load import restore, wanted, whole_value
from torchpmap._checkpoint_peers import Peers, peers
from torchpmap._checkpoint_tree import ShapeDtypeStruct, leaves_of, rebuild, skeleton_of
from torchpmap._checkpoint_values import (
    HOST,
    Job,
    Saved,
    copy_here,
    copy_on_workers,
    described,
    jobs_of,
)
from torchpmap._checkpoint_workers import Answer, Line
from torchpmap._current import is_launched
from torchpmap._errors import CheckpointError, warn
from torchpmap._placement import block_until_ready

__all__ = ["Saving", "ShapeDtypeStruct", "latest", "load", "save"]

PathLike = str | os.PathLike[str]
_T = TypeVar("_T")


class Saving:
    """A checkpoint that is being written; ``save(..., asynchronous=True)`` returns it."""

    def __init__(self, path: Path, write: Callable[[], str | None]) -> None:
        self._path = path
        self._write = write
        self._error: Exception | None = None
        self._is_known = False
        # not a daemon: a program that ends waits for it
        self._thread = threading.Thread(target=self._run, name="torchpmap-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            failure = self._write()
            if failure is not None:
                self._error = CheckpointError(_not_saved(self._path, failure))
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete and on disk.

        Raises:
            CheckpointError: it could not be written; what was there before is still there.
        """
        self._thread.join()
        self._is_known = True
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "in progress" if not self.done() else "failed" if self._error else "complete"
        return f"<Saving {self._path}: {state}>"


_saving: Saving | None = None  # the last one


def _finish_previous() -> None:
    """Wait for the save in progress; raise its error unless somebody has seen it."""
    if _saving is not None:
        was_known, _saving._is_known = _saving._is_known, True
        _saving._thread.join()
        if _saving._error is not None and not was_known:
            _saving._error.add_note("in an asynchronous save before this one")
            raise _saving._error


def _wait_for_previous() -> None:
    """Whoever reads shall find what was saved; an error is for who saves."""
    if _saving is not None:
        _saving._thread.join()


def _report_at_exit() -> None:
    if _saving is not None and _saving._error is not None and not _saving._is_known:
        print(f"torchpmap: {_saving._error}", file=sys.stderr)


def _not_saved(path: Path, failure: str) -> str:
    return (
        f"the checkpoint {path} could not be saved: {failure}. What was there before is still "
        "there."
    )


# -- saving ----------------------------------------------------------------------------------------


@overload
def save(path: PathLike, tree: Any, *, asynchronous: Literal[False] = ...) -> None: ...
@overload
def save(path: PathLike, tree: Any, *, asynchronous: Literal[True]) -> Saving: ...
def save(path: PathLike, tree: Any, *, asynchronous: bool = False) -> Saving | None:
    """Save a pytree to the folder ``path``; every device writes its own blocks.

    The folder appears when it is whole and on disk, so a kill at any moment leaves the checkpoint
    that was there before, or the new one.  With several controllers (torchrun) all of them call it
    with the same path and their own trees; what each has of a row-sharded value is saved as a part
    of the whole, process by process.

    Args:
        path: a folder on a file system that all hosts see; its parents are made, and a checkpoint
            of that name is replaced.
        tree: pytree of ShardedTensors, tensors, numpy arrays, numbers, strings, bytes and None.
        asynchronous: return as soon as the values are copied; they may be changed or donated then.

    Returns:
        None; with ``asynchronous=True`` a ``Saving`` with ``wait()`` and ``done()``.

    Raises:
        TypeError: a leaf of another type, or a dict key that is neither a string nor an int.
        ValueError: two leaves with one name, or processes with different trees.
        FileExistsError: there is something at ``path`` that is no checkpoint.
        CheckpointError: it could not be written, or the asynchronous save before could not.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> folder = tempfile.mkdtemp()
        >>> params = {"w": tp.device_put(torch.arange(4.0), tp.devices())}
        >>> tp.checkpoint.save(f"{folder}/step_10", {"params": params, "step": 10})
        >>> tp.checkpoint.load(f"{folder}/step_10")
        {'params': {'w': tensor([0., 1., 2., 3.])}, 'step': 10}

    Source: the file format is that of ``torch.distributed.checkpoint``, which can read it.
    """
    global _saving
    _refuse_inside("save")
    _finish_previous()
    folder, others = Folder(path), peers()
    what = f"torchpmap.checkpoint.save({str(path)!r})"
    draft = _agreed(others, what, folder, tree)
    has_workers = not is_launched()
    jobs = jobs_of(draft.leaves, HOST if has_workers else 0)
    try:
        write = _copied(jobs, folder, HOST if has_workers else others.rank)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        others.settle([(None, failure)], lambda given: _committed(given, folder, draft), what)
        raise
    draft = draft.without_values()

    def finish() -> str | None:
        return others.settle(write(), lambda given: _committed(given, folder, draft), what)

    if _saving is None:
        atexit.register(_report_at_exit)
    saving = _saving = Saving(folder.path, finish)
    if asynchronous:
        return saving
    saving.wait()
    return None


@dataclass(frozen=True)
class _Draft:
    """What is going to be saved."""

    entries: dict[str, Entry]
    """Without records: nothing is written yet."""
    skeleton: Any
    leaves: tuple[Saved, ...] = ()

    def without_values(self) -> _Draft:
        return _Draft(self.entries, self.skeleton)


def _agreed(others: Peers, what: str, folder: Folder, tree: Any) -> _Draft:
    """What to save; nobody goes on unless all processes are about to save the same."""

    def draft() -> _Draft:
        leaves, structure = leaves_of(tree, "tree")
        saved = tuple(described(leaf) for leaf in leaves)
        block_until_ready(tree)
        if others.rank == 0:
            folder.prepare()
        entries = {each.leaf.key: each.entry() for each in saved}
        return _Draft(entries, skeleton_of(structure), saved)

    try:
        drafted = _together(others, what, draft)
        if others.size > 1:
            lines = {each.leaf.path: each.describe() for each in drafted.leaves}
            _compare(others.exchange(lines, what), what)
    except Exception:
        if others.rank == 0:
            folder.discard()
        raise
    return drafted


def _compare(given: Sequence[dict[str, str]], what: str) -> None:
    for rank, lines in enumerate(given):
        for path in [*given[0], *lines]:
            mine, theirs = given[0].get(path, "nothing"), lines.get(path, "nothing")
            if mine != theirs:
                raise ValueError(
                    f"{what}: the processes differ at {path}: rank 0 has {mine}, rank {rank} has "
                    f"{theirs}. What is no ShardedTensor is saved once, so it must be the same in "
                    "all processes. To save a value of each, make it a row: "
                    "torchpmap.device_put(value[None], torchpmap.local_devices())."
                )


def _copied(jobs: dict[int, list[Job]], folder: Folder, mine: int) -> Callable[[], list[Answer]]:
    """Copy what has to be written; what is returned writes it."""
    files = {writer: f"__{writer}_0.distcp" for writer in jobs}
    files[HOST] = "__host_0.distcp"
    here = jobs.get(mine, [])
    elsewhere = {writer: given for writer, given in jobs.items() if writer != HOST}
    line: Line | None = None
    if mine == HOST and elsewhere:
        line = Line(folder.growing, len(elsewhere))
        try:
            copy_on_workers(elsewhere, line, files)
            line.accept(len(elsewhere))
        except BaseException:
            line.close()
            raise
    copies = copy_here(here)

    def write() -> list[Answer]:
        answers: list[Answer] = []
        if copies:
            try:
                answers.append((write_records(folder.growing / files[mine], copies), None))
            except Exception as error:
                answers.append((None, f"{type(error).__name__}: {error}"))
        return answers if line is None else answers + line.answers()

    return write


def _committed(given: Sequence[Sequence[Answer]], folder: Folder, draft: _Draft) -> str | None:
    """Give the folder its name if all is well; else what is not."""
    answers = [answer for each in given for answer in each]
    try:
        failures = [failure for _, failure in answers if failure is not None]
        if failures:
            raise CheckpointError(failures[0])
        records: dict[str, list[Record]] = {key: [] for key in draft.entries}
        for written, _ in answers:
            for key, record in written or ():
                records[key].append(record)
        folder.commit(
            {key: e.with_records(records[key]) for key, e in draft.entries.items()}, draft.skeleton
        )
    except Exception as error:
        folder.discard()
        known = isinstance(error, CheckpointError)
        return str(error) if known else f"{type(error).__name__}: {error}"
    return None


# -- loading ---------------------------------------------------------------------------------------


def load(path: PathLike, like: Any = None) -> Any:
    """Return the pytree that was saved to ``path``.

    The number of devices, and of processes, may be another than when it was saved.  Every device
    reads its own blocks.  With several controllers (torchrun) all of them call it.

    Args:
        path: what ``save`` was given, or a checkpoint of ``torch.distributed.checkpoint``.
        like: pytree with the structure, shapes and dtypes that are expected; each value is placed
            as the leaf here: ShardedTensors on the same devices in the same way, tensors on their
            device, numpy arrays as such, a ``ShapeDtypeStruct`` by its sharding.  Its own values
            are not used and not changed.

    Returns:
        a tree like ``like``; without it the tree as it was saved, of CPU tensors, numpy arrays and
        Python values, with dicts in place of containers other than dicts, lists and tuples.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is damaged.
        ValueError: it does not match ``like``; names the leaf.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> folder = tempfile.mkdtemp()
        >>> tp.checkpoint.save(folder, {"w": torch.arange(4.0)})
        >>> tp.checkpoint.load(folder, like={"w": tp.replicate(torch.zeros(4))})
        {'w': ShardedTensor([0., 1., 2., 3.], replicated on cpu:0 cpu:1 cpu:2 cpu:3)}
    """
    _refuse_inside("load")
    _wait_for_previous()
    others, what = peers(), f"torchpmap.checkpoint.load({str(path)!r})"
    folder = Folder(path).find()
    leaves, structure = leaves_of(like, "like")

    def plan() -> tuple[Table, list[Any]]:
        table = Table.read(folder)
        if like is None:
            return table, []
        _check_names(table, {leaf.key: leaf.path for leaf in leaves})
        return table, [wanted(leaf, table) for leaf in leaves]

    table, wants = _together(others, what, plan)
    digests = others.exchange(table.digest, what)
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"{what}: the processes see different checkpoints: {digests}, by rank. Give the same "
            "path everywhere, on a file system that all hosts share."
        )
    if like is not None:
        return structure.unflatten(_together(others, what, lambda: restore(wants, table)))

    def everything() -> dict[str, Any]:
        return {key: whole_value(table, key) for key in table.entries}

    values = _together(others, what, everything)
    return values if table.skeleton is None else rebuild(table.skeleton, values)


def _check_names(table: Table, paths: dict[str, str]) -> None:
    missing = [f"{path} ({key!r})" for key, path in paths.items() if key not in table.entries]
    unknown = [repr(key) for key in table.entries if key not in paths]
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"the checkpoint lacks {_some(missing)}")
        if unknown:
            parts.append(f"like has no place for {_some(unknown)} of the checkpoint")
        raise ValueError(
            f"torchpmap.checkpoint.load: {table.folder} has another structure: "
            f"{'; '.join(parts)}. Give a tree of the structure that was saved (load without like= "
            "shows it)."
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _together(others: Peers, what: str, work: Callable[[], _T]) -> _T:
    """Do a thing in all processes; if it fails in one, it fails in all."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failures = others.exchange(None if error is None else f"{type(error).__name__}: {error}", what)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"{what}: rank {rank} failed: {failure}")
    return result


def latest(directory: PathLike) -> Path | None:
    """Return the checkpoint with the highest number in ``directory``; None if there is none.

    Folders count whose names end in a number (``step_200``) and in which nothing is missing; others
    that look like a checkpoint are passed over with a warning.

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
        folder = Folder(root / name).find()
        try:
            Table.read(folder)
            return root / name
        except FileNotFoundError:
            continue  # something else
        except CheckpointError as error:
            warn(f"torchpmap.checkpoint.latest passes over {name}: {error}")
    return None


def _refuse_inside(name: str) -> None:
    if _axes.bound():
        raise RuntimeError(
            f"torchpmap.checkpoint.{name} was called inside a mapped function, where values are "
            "those of one row. Return what shall be saved, and save it outside."
        )
