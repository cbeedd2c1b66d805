"""A save: agree on the tree, copy what has to be written, and write it in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torchpmap._base.errors import CheckpointError
from torchpmap._runtime.current import is_launched
from torchpmap._sharded.device_put import block_until_ready
from torchpmap.checkpoint._files import Folder
from torchpmap.checkpoint._peers import Peers, peers, together
from torchpmap.checkpoint._storage import finish
from torchpmap.checkpoint._tree import leaves_of, skeleton_of
from torchpmap.checkpoint._values import (
    HOST,
    Saved,
    copy_here,
    copy_on_workers,
    described,
    planned,
)
from torchpmap.checkpoint._workers import WriteAnswer, WriterConnections, attempt


@dataclass(frozen=True)
class _Draft:
    """All about a save but the values."""

    folder: Folder
    plans: dict[int, SavePlan]
    metadata: Metadata
    rows: dict[str, dict[str, Any]]
    """The leaves in the table."""
    skeleton: Any

    def commit(self, given: Sequence[Sequence[WriteAnswer]]) -> str | None:
        """Give the folder its name; returns what went wrong, or None."""
        answers = [answer for each in given for answer in each]
        try:
            failures = [failure for _, failure in answers if failure is not None]
            if failures:
                raise CheckpointError(failures[0])
            written = [each for some, _ in answers for each in some or ()]
            finish(self.folder, self.metadata, self.rows, self.skeleton, written)
        except Exception as error:
            self.folder.discard()
            known = isinstance(error, CheckpointError)
            return str(error) if known else f"{type(error).__name__}: {error}"
        return None


def begin(path: str | os.PathLike[str], tree: Any) -> Callable[[], str | None]:
    """Copy the values to write; the returned function writes them, and returns what went wrong."""
    others, what = peers(), f"torchpmap.checkpoint.save({str(path)!r})"
    draft, leaves = _agreed(others, what, Folder(path), tree)
    try:
        write = _copied(draft, leaves, others.rank if is_launched() else HOST)
    except Exception as error:
        others.settle([(None, f"{type(error).__name__}: {error}")], draft.commit, what)
        raise
    return lambda: others.settle(write(), draft.commit, what)


def _agreed(others: Peers, what: str, folder: Folder, tree: Any) -> tuple[_Draft, dict[str, Saved]]:
    """What to save; raises in every process unless all processes save the same tree."""

    def draft() -> tuple[_Draft, dict[str, Saved]]:
        found, structure = leaves_of(tree, "tree")
        leaves = {leaf.key: described(leaf) for leaf in found}
        block_until_ready(tree)
        if others.rank == 0:
            folder.prepare()
        plans, metadata = planned(tuple(leaves.values()), 0 if is_launched() else HOST)
        rows = {key: saved.row() for key, saved in leaves.items()}
        return _Draft(folder, plans, metadata, rows, skeleton_of(structure)), leaves

    try:
        drafted, leaves = together(others, what, draft)
        if others.size > 1:
            lines = {saved.leaf.path: saved.describe() for saved in leaves.values()}
            _compare(others.exchange(lines, what), what)
    except Exception:
        if others.rank == 0:
            folder.discard()
        raise
    return drafted, leaves


def _compare(given: Sequence[dict[str, str]], what: str) -> None:
    for rank, lines in enumerate(given):
        for path in [*given[0], *lines]:
            mine, theirs = given[0].get(path, "nothing"), lines.get(path, "nothing")
            if mine != theirs:
                raise ValueError(
                    f"{what}: the processes differ at {path}: rank 0 has {mine}, rank {rank} has "
                    f"{theirs}. A value that is not a ShardedTensor is saved once, so it must be "
                    "the same in all processes. To save one value per process, make it a row: "
                    "torchpmap.device_put(value[None], torchpmap.local_devices())."
                )


def _copied(draft: _Draft, leaves: dict[str, Saved], mine: int) -> Callable[[], list[WriteAnswer]]:
    """Copy the values to write; the returned function writes them."""
    growing = draft.folder.growing
    here = draft.plans.get(mine)
    elsewhere = {rank: plan for rank, plan in draft.plans.items() if rank != HOST}
    line: WriterConnections | None = None
    if mine == HOST and elsewhere:
        line = WriterConnections(growing, len(elsewhere))
        try:
            copy_on_workers(elsewhere, leaves, line)
            line.accept()
        except BaseException:
            line.close()
            raise
    copies = {} if here is None else copy_here(here, leaves)

    def write() -> list[WriteAnswer]:
        writer = "host" if mine == HOST else mine
        answers = [] if here is None else [attempt(growing, writer, here, copies)]
        return answers if line is None else answers + line.answers()

    return write
