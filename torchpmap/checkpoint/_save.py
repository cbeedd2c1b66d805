"""A save: agree on what each rank writes, copy it, and write it in a thread.

Every process decides this for all ranks.  With several controllers, a process's row-sharded value
is a part of a larger value: process r of n has rows r*k to (r+1)*k of n*k.  If several devices hold
a block, the device that has least to write writes it.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from torchpmap._base.errors import CheckpointError, dtype_name
from torchpmap._base.fingerprint import digest
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import is_launched, process_count, process_index
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.everywhere import run_on
from torchpmap._sharded.device_put import block_until_ready
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import fetch_blocks, host_tensor
from torchpmap.checkpoint._blocks import RESERVED, Plan, Sizes, Written
from torchpmap.checkpoint._folder import Folder
from torchpmap.checkpoint._peers import Peers, peers
from torchpmap.checkpoint._table import Extent, describe, table_text, value_row
from torchpmap.checkpoint._tree import VALUES, Leaf, leaf_kind, leaves_of
from torchpmap.checkpoint._workers import (
    HOST,
    NAME,
    Answers,
    Pipes,
    Snapshot,
    attempt,
    file_of,
)

_SNAPSHOT_BYTES = 256 * 2**20
"""A worker copies its blocks in calls of this size, as a GPU briefly holds them twice."""


# -- leaves and their blocks -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """A leaf that is to be saved."""

    leaf: Leaf
    kind: str
    host: Any = None
    """The value, if it is on the host."""
    shape: Sizes = ()
    dtype: torch.dtype | None = None
    """None for a Python value, which is in the table."""
    blocks: Mapping[Extent, Sequence[int]] = field(default_factory=dict)
    """The ranks that have each block."""
    held: tuple[Layout, Handle] | None = None
    """Its layout and handle, if it is on the devices."""

    def block_bytes(self) -> int:
        assert self.dtype is not None
        return prod(next(iter(self.blocks))[1]) * self.dtype.itemsize

    def row(self, writers: Mapping[Sizes, int], files: Mapping[int, Written]) -> dict[str, Any]:
        """Its row of the table: ``writers`` of the blocks, by offsets, and what they wrote."""
        if self.dtype is None:
            return value_row(self.host)
        block_shape = next(iter(self.blocks))[1]
        return {
            "kind": self.kind,
            "dtype": dtype_name(self.dtype),
            "shape": self.shape,
            "cuts": [
                n // part if part else 1 for n, part in zip(self.shape, block_shape, strict=True)
            ],
            "blocks": [
                (file_of(writer), files[writer]["blocks"][self.leaf.key])
                for _, writer in sorted(writers.items())
            ],
        }

    def describe(self) -> str:
        """One line, which must be equal in all processes that save together."""
        text = describe(self.kind, self.dtype, self.shape)
        if self.held is not None:
            return f"{text} in the blocks {self.blocks}"
        if self.dtype is None:
            return f"{text}: {self.host!r:.200}"
        if self.host.numel() == 1:
            return f"{text}: {self.host.item()}"
        return f"{text} with the digest {digest(self.host)[:8].hex()}"


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
        if not _is_own_copy(layout):
            blocks: dict[Extent, list[int]] = {}
            for rank, extent in extents(layout).items():
                blocks.setdefault(extent, []).append(rank)
            held = layout, handle
            return _Saved(leaf, kind, None, whole(layout)[0], layout.dtype, blocks, held)
        value = value.to_host()
    try:
        tensor = host_tensor(value).resolve_conj().resolve_neg()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"torchpmap.checkpoint.save: {leaf.path} is an array of dtype {value.dtype}, which "
            "torch does not have. Save numbers, or a string."
        ) from error
    shape = tuple(tensor.shape)
    return _Saved(leaf, kind, tensor, shape, tensor.dtype, {((0,) * len(shape), shape): [HOST]})


def _is_own_copy(layout: Layout) -> bool:
    """Whether each of several controllers has its own copy of a value."""
    return layout.is_replicated and len(layout.devices) == 1 and process_count() > 1


def whole(layout: Layout) -> tuple[Sizes, int | None]:
    """Shape of the value over all controllers, and the dim that is divided between them, if any."""
    here = process_index()
    is_part = all(device.process_index == here for device in layout.devices)
    if process_count() == 1 or not is_part or _is_own_copy(layout):
        return layout.shape, None
    dim = layout.dim
    assert dim is not None, "of a layout on one device"
    rows = layout.shape[dim] * process_count()
    return (*layout.shape[:dim], rows, *layout.shape[dim + 1 :]), dim


def extents(layout: Layout) -> dict[int, Extent]:
    """Offsets and sizes of the block of each rank in the value over all controllers."""
    shape, dim = whole(layout)
    if dim is not None:
        origin, size = (0,) * len(shape), layout.shape[dim]
        return {
            rank: ((*origin[:dim], rank * size, *origin[dim + 1 :]), layout.shape)
            for rank in range(process_count())
        }
    return {
        rank: (
            tuple(part.indices(size)[0] for part, size in zip(where, shape, strict=True)),
            layout.block_shape,
        )
        for rank, where in zip(layout.ranks, layout.slices, strict=True)
    }


# -- what is written, and when it is complete ------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """All about a save but the values."""

    folder: Folder
    leaves: Mapping[str, _Saved]
    skeleton: Any
    writers: Mapping[str, Mapping[Sizes, int]]
    """Who writes each block, by key and offsets."""

    def plans(self) -> dict[int, Plan]:
        """What each writer writes."""
        plans: dict[int, dict[str, Sizes]] = {}
        for key, blocks in self.writers.items():
            for offsets, writer in blocks.items():
                plans.setdefault(writer, {})[key] = offsets
        return dict(sorted(plans.items()))

    def commit(self, given: Iterable[Answers]) -> None:
        """Write the table, and give the folder its name.

        Raises:
            CheckpointError: a file could not be written.
        """
        files: dict[int, Written] = {}
        try:
            for writer, (file, failure) in (pair for each in given for pair in each.items()):
                if file is None:
                    raise CheckpointError(failure)
                files[writer] = file
            rows = {key: saved.row(self.writers[key], files) for key, saved in self.leaves.items()}
            about = {
                file_of(writer): {"bytes": file["bytes"], "header": file["header"]}
                for writer, file in files.items()
            }
            self.folder.commit(
                table_text(rows, self.skeleton, about),
                {name: file["bytes"] for name, file in about.items()},
            )
        except Exception as error:
            self.folder.discard()
            what = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            raise CheckpointError(
                f"the checkpoint {self.folder.path} could not be saved: {what}{error}. What was "
                "there before is still there."
            ) from None


def begin(path: str | os.PathLike[str], tree: Any) -> Callable[[], None]:
    """Copy the values to write; the returned function writes them."""
    others, what = peers(), f"torchpmap.checkpoint.save({str(path)!r})"
    draft = _agreed(others, what, Folder(path), tree)
    mine = others.rank if is_launched() else HOST
    try:
        write = _copied(draft, mine)
    except Exception as error:
        others.decide({mine: (None, f"{type(error).__name__}: {error}")}, draft.commit, what)
        raise
    return lambda: others.decide(write(), draft.commit, what)


def _agreed(others: Peers, what: str, folder: Folder, tree: Any) -> _Draft:
    """What to save; raises in every process unless all processes save the same tree."""

    def draft() -> _Draft:
        found, _, skeleton = leaves_of(tree, "tree")
        leaves = {leaf.key: _saved(leaf) for leaf in found}
        block_until_ready(tree)
        if others.rank == 0:
            folder.prepare()
        return _Draft(folder, leaves, skeleton, _writers(leaves.values()))

    try:
        drafted = others.together(draft, what)
        if others.size > 1:
            lines = {saved.leaf.path: saved.describe() for saved in drafted.leaves.values()}
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
                    f"{theirs}. A value that is not a ShardedTensor is saved once, so it must be "
                    "the same in all processes. To save one value per process, make it a row: "
                    "torchpmap.device_put(value[None], torchpmap.local_devices())."
                )


def _writers(leaves: Iterable[_Saved]) -> dict[str, dict[Sizes, int]]:
    """The rank that writes each block, by key and offsets."""
    num_bytes: Counter[int] = Counter()
    writers: dict[str, dict[Sizes, int]] = {}
    for saved in leaves:
        found = writers[saved.leaf.key] = {}
        for (offsets, _), holders in saved.blocks.items():
            writer = min(holders, key=num_bytes.__getitem__)
            found[offsets] = writer = 0 if writer == HOST and is_launched() else writer
            num_bytes[writer] += saved.block_bytes()
    return writers


# -- copying ---------------------------------------------------------------------------------------


def _copied(draft: _Draft, mine: int) -> Callable[[], Answers]:
    """Copy the values to write; the returned function writes them."""
    growing, plans = draft.folder.growing, draft.plans()
    elsewhere = (
        {} if is_launched() else {rank: plan for rank, plan in plans.items() if rank != HOST}
    )
    pipes = Pipes(elsewhere)
    try:
        if elsewhere:
            _copy_on_workers(draft, elsewhere, pipes.path)
        copies = {key: _block_here(draft.leaves[key]) for key in plans.get(mine, {})}
    except BaseException:
        pipes.close()
        raise

    def write() -> Answers:
        answers = attempt(growing, mine, plans[mine], copies) if mine in plans else {}
        return answers | pipes.answers()

    return write


def _block_here(saved: _Saved) -> torch.Tensor:
    """A copy of the block that this process has."""
    if saved.held is None:
        copy: torch.Tensor = saved.host.clone(memory_format=torch.contiguous_format)
        return copy
    layout, handle = saved.held
    # each of several controllers has one device, whose id is the process index
    return fetch_blocks(layout, handle, [layout.ranks.index(process_index())])[0]


def _copy_on_workers(draft: _Draft, plans: Mapping[int, Plan], pipes: str) -> None:
    """Have worker processes copy their blocks and begin to write them."""
    by_team: dict[Sizes, list[_Saved]] = {}
    for saved in draft.leaves.values():
        if saved.held is not None:
            by_team.setdefault(saved.held[0].ranks, []).append(saved)
    for ranks, group in by_team.items():
        ends = itertools.accumulate(saved.block_bytes() for saved in group)
        for _, part in itertools.groupby(
            zip(group, ends, strict=True), lambda pair: pair[1] // _SNAPSHOT_BYTES
        ):
            some = [saved for saved, _ in part]
            todo = tuple(
                tuple((k, s.leaf.key) for k, s in enumerate(some) if s.leaf.key in plans.get(r, ()))
                for r in ranks
            )
            handles = [saved.held[1] for saved in some if saved.held]
            run_on(current_runtime().team(ranks), NAME, Snapshot(pipes, todo), handles)
    last = Snapshot(pipes, ((),) * len(plans), draft.folder.growing, tuple(plans.items()))
    run_on(current_runtime().team(tuple(plans)), NAME, last)
