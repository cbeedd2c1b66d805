"""A save: agree on what each rank writes, copy it, and write it in a thread.

Every process decides this for all ranks.  With several controllers, a process's row-sharded value
is a part of a larger value: process r of n has rows r*k to (r+1)*k of n*k.  If several devices hold
a block, the device that has least to write writes it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from torchpmap._base.errors import CheckpointError, dtype_name
from torchpmap._base.fingerprint import digest, shown
from torchpmap._base.pytree import Node
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import is_launched, process_count, process_index
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.everywhere import run_on
from torchpmap._sharded.device_put import block_until_ready
from torchpmap._sharded.global_view import over_processes
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import fetch_blocks, host_tensor
from torchpmap.checkpoint._blocks import RESERVED, Plan, Sizes, Written
from torchpmap.checkpoint._folder import Folder
from torchpmap.checkpoint._peers import Peers
from torchpmap.checkpoint._table import describe, table_text
from torchpmap.checkpoint._tree import VALUES, Leaf, Stored, leaf_kind, leaves_of, rebuilt
from torchpmap.checkpoint._workers import HOST, NAME, Answers, Pipes, Snapshot, attempt, file_of

Plans = dict[int, dict[str, Sizes]]
"""By writer: what is in its file."""


# -- leaves and their blocks -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """A leaf that is to be saved."""

    leaf: Leaf
    kind: str
    host: Any = None
    """The value, if it is on the host."""
    layout: Layout | None = None
    """That of the rows of all controllers, if the value is on the devices."""
    handle: Handle | None = None

    @property
    def array(self) -> Layout | torch.Tensor | None:
        """What has its dtype and shape; None for a Python value, which is in the table."""
        return self.host if isinstance(self.host, torch.Tensor) else self.layout

    @property
    def block_shape(self) -> Sizes:
        return self.layout.block_shape if self.layout else tuple(self.host.shape)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.array.dtype.itemsize if self.array is not None else 0

    def holders(self) -> dict[Sizes, list[int]]:
        """The ranks that have the block at each offsets."""
        if self.layout is None:
            return {} if self.array is None else {(0,) * self.host.dim(): [HOST]}
        found: dict[Sizes, list[int]] = {}
        for rank, offsets in origins(self.layout).items():
            found.setdefault(offsets, []).append(rank)
        return found

    def row(self, plans: Plans) -> dict[str, Any]:
        """Its row of the table, with the writers in place of the blocks; it does not keep the
        values in memory.
        """
        assert self.array is not None
        key, shape = self.leaf.key, tuple(self.array.shape)
        writers = sorted((plan[key], writer) for writer, plan in plans.items() if key in plan)
        sizes = zip(shape, self.block_shape, strict=True)
        return {
            "kind": self.kind,
            "dtype": dtype_name(self.array.dtype),
            "shape": shape,
            "cuts": [size // part if part else 1 for size, part in sizes],
            "blocks": [writer for _, writer in writers],
        }

    def describe(self) -> str:
        """One line, which must be equal in all processes that save together."""
        if self.layout is not None:
            kind = describe(self.kind, self.layout.dtype, self.layout.shape)
            return f"{kind} in the blocks {self.holders()}"
        return f"{shown(self.host):.200} (digest {digest(self.host)[:8].hex()})"


def _saved(leaf: Leaf) -> _Saved:
    """How a leaf is to be saved; fetches nothing from workers."""
    kind, value = leaf_kind(leaf), leaf.value
    if type(value) in VALUES:
        return _Saved(leaf, kind, value)
    if leaf.key == RESERVED:
        raise ValueError(
            f"torchpmap.checkpoint.save: {leaf.path} would be saved as {RESERVED!r}, a name that "
            "safetensors keeps for itself. Rename the key."
        )
    if isinstance(value, ShardedTensor):
        layout, handle = value._alive()
        if process_count() == 1 or not layout.is_replicated or len(layout.devices) > 1:
            return _Saved(leaf, kind, None, over_processes(layout), handle)
        value = value.to_host()  # each of several controllers has its own copy
    try:
        return _Saved(leaf, kind, host_tensor(value).resolve_conj().resolve_neg())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"torchpmap.checkpoint.save: {leaf.path} is an array of dtype {value.dtype}, which "
            "torch does not have. Save numbers, or a string."
        ) from error


def origins(layout: Layout) -> dict[int, Sizes]:
    """Where the block of each rank begins in the whole value."""
    where = zip(layout.ranks, layout.slices, strict=True)
    return {rank: tuple(part.start or 0 for part in parts) for rank, parts in where}


def _plans(leaves: Iterable[_Saved]) -> Plans:
    """What each rank writes."""
    num_bytes: Counter[int] = Counter()
    plans: Plans = {}
    for saved in leaves:
        for offsets, holders in saved.holders().items():
            writer = min(holders, key=num_bytes.__getitem__)
            writer = 0 if writer == HOST and is_launched() else writer
            num_bytes[writer] += saved.block_bytes
            plans.setdefault(writer, {})[saved.leaf.key] = offsets
    return plans


# -- agreeing, and naming the folder ---------------------------------------------------------------


def begin(path: str | os.PathLike[str], tree: Any) -> Callable[[], None]:
    """Copy the values to write; the returned function writes them, and has no others."""
    others, folder = Peers(f"torchpmap.checkpoint.save({str(path)!r})"), Folder(path)
    leaves, root = _agreed(others, folder, tree)
    plans = _plans(leaves)
    rows = {saved.leaf.key: saved.row(plans) for saved in leaves if saved.array is not None}
    values = {saved.leaf.key: saved.host for saved in leaves if saved.array is None}
    plain = rebuilt(root, lambda key: Stored(rows[key]) if key in rows else values[key])
    commit = functools.partial(_commit, folder, rows, plain)
    mine = others.rank if is_launched() else HOST
    try:
        write = _copied(folder, leaves, plans, mine)
    except Exception as error:
        with contextlib.suppress(CheckpointError):  # which the other processes raise
            others.decide({mine: (None, f"{type(error).__name__}: {error}")}, commit)
        raise
    return lambda: others.decide(write(), commit)


def _agreed(others: Peers, folder: Folder, tree: Any) -> tuple[list[_Saved], Node | None]:
    """Leaves and root; raises in every process unless all processes save the same tree."""

    def described() -> tuple[list[_Saved], Node | None]:
        found, structure = leaves_of(tree, "tree")
        leaves = [_saved(leaf) for leaf in found]
        block_until_ready(tree)
        if others.rank == 0:
            folder.prepare()
        return leaves, structure.root

    try:
        leaves, root = others.together(described)
        if others.size > 1:
            _compare(others.exchange({x.leaf.path: x.describe() for x in leaves}), others.what)
    except Exception:
        if others.rank == 0:
            folder.discard()
        raise
    return leaves, root


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


def _commit(
    folder: Folder, rows: dict[str, dict[str, Any]], tree: Any, given: Sequence[Answers]
) -> None:
    """Write the table, and give the folder its name.

    Raises:
        CheckpointError: a file could not be written.
    """
    files: dict[int, Written] = {}
    try:
        for writer, (file, failure) in itertools.chain(*(answers.items() for answers in given)):
            if file is None:
                raise CheckpointError(failure)
            files[writer] = file
        for key, row in rows.items():
            row["blocks"] = [(file_of(k), files[k]["blocks"][key]) for k in row["blocks"]]
        about = {
            file_of(writer): {"bytes": file["bytes"], "header": file["header"]}
            for writer, file in files.items()
        }
        folder.commit(table_text(tree, about), about)
    except Exception as error:
        folder.discard()
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"the checkpoint {folder.path} could not be saved: {kind}{error}. What was there "
            "before is still there."
        ) from None


# -- copying ---------------------------------------------------------------------------------------


def _copied(
    folder: Folder, leaves: Sequence[_Saved], plans: Plans, mine: int
) -> Callable[[], Answers]:
    """Copy the values to write; the returned function writes them."""
    elsewhere = {} if is_launched() else {rank: plans[rank] for rank in plans if rank != HOST}
    plan = plans.get(mine, {})
    pipes = Pipes(elsewhere)
    try:
        if elsewhere:
            _copy_on_workers(folder, leaves, elsewhere, pipes.path)
        copies = {saved.leaf.key: _block_here(saved) for saved in leaves if saved.leaf.key in plan}
    except BaseException:
        pipes.close()
        raise

    def write() -> Answers:
        return (attempt(folder.growing, mine, plan, copies) if plan else {}) | pipes.answers()

    return write


def _block_here(saved: _Saved) -> torch.Tensor:
    """A copy of the block that this process has."""
    if saved.layout is None or saved.handle is None:
        copy: torch.Tensor = saved.host.clone(memory_format=torch.contiguous_format)
        return copy
    # each of several controllers has one device, whose id is the process index
    here = saved.handle.team.ranks.index(process_index())
    return fetch_blocks(saved.layout, saved.handle, [here])[0]


def _copy_on_workers(
    folder: Folder, leaves: Iterable[_Saved], plans: Mapping[int, Plan], pipes: str
) -> None:
    """Have worker processes copy their blocks and begin to write them."""
    by_team: dict[Sizes, dict[str, Handle]] = {}
    for saved in leaves:
        if saved.handle is not None:
            by_team.setdefault(saved.handle.team.ranks, {})[saved.leaf.key] = saved.handle
    for ranks, held in by_team.items():
        work = Snapshot(pipes, plans, tuple(held))
        run_on(current_runtime().team(ranks), NAME, work, list(held.values()))
    last = Snapshot(pipes, plans, (), folder.growing)
    run_on(current_runtime().team(tuple(plans)), NAME, last)
