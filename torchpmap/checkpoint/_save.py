"""A save: agree on what each rank writes, copy it, and write it in threads.

Every process decides this for all ranks.  With several controllers, a process's row-sharded value
is a part of a larger value: process r of n has rows r*k to (r+1)*k of n*k.  If several devices hold
a block, the device that has least to write writes it.

A worker copies its blocks in tasks, like calls with ``compile=False``, so they run after all
earlier calls.  Its background thread writes them, and answers the controller:

    controller                          worker k
    Pipes, reads
    Snapshot, one per team     ------>  copies its blocks
    the last Snapshot          ------>  opens its pipe, starts the thread
    answers()                  <------  what it wrote, or what went wrong
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._base.data import packed
from torchpmap._base.errors import CheckpointError, dtype_name, kind_of
from torchpmap._base.pytree import Structure
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import is_launched, process_count, process_index
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.everywhere import run_on
from torchpmap._runtime.task import Rank
from torchpmap._sharded.device_put import block_until_ready
from torchpmap._sharded.global_view import over_processes
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import blocks_of, check_equal_everywhere, host_tensor
from torchpmap.checkpoint._blocks import RESERVED, Plan, Sizes, write
from torchpmap.checkpoint._folder import HOST, Folder, file_of
from torchpmap.checkpoint._peers import Peers, Pipes
from torchpmap.checkpoint._table import (
    VALUES,
    Leaf,
    Stored,
    leaf_kind,
    leaves_of,
    rebuilt,
    some,
    table_text,
)

NAME = "torchpmap.checkpoint"
"""Of the tasks, in messages."""
Plans = dict[int, dict[str, Sizes]]
"""By writer: what is in its file."""
Answers = dict[int, Any]
"""By writer, what it wrote (see ``write``), or the text of what went wrong."""
_EQUAL = (
    "A value that is not a ShardedTensor is saved once. To save one value per process, make it a "
    "row: torchpmap.device_put(value[None], torchpmap.local_devices())."
)
"""What to do about trees that differ between processes."""
_copies: dict[str, dict[str, torch.Tensor]] = {}
"""In a worker: what it has copied for the save that is being prepared, by the save's pipes."""


# -- leaves and their blocks -----------------------------------------------------------------------


class _Array(NamedTuple):
    """A leaf that is to be saved in files of blocks."""

    kind: str
    dtype: torch.dtype
    shape: Sizes
    block_shape: Sizes
    holders: dict[Sizes, list[int]]
    """The writers that have the block at each offsets."""
    value: torch.Tensor
    """A ShardedTensor, or one of the host."""

    def row(self, key: str, plans: Plans) -> dict[str, Any]:
        """Its row of the table, with the writers in place of the blocks."""
        where = sorted((plan[key], writer) for writer, plan in plans.items() if key in plan)
        sizes = zip(self.shape, self.block_shape, strict=True)
        return {
            "kind": self.kind,
            "dtype": dtype_name(self.dtype),
            "shape": self.shape,
            "cuts": [size // part if part else 1 for size, part in sizes],
            "blocks": [writer for _, writer in where],
        }


def _array(leaf: Leaf) -> _Array | None:
    """How a leaf is to be saved; None for a Python value, which is in the table.  Fetches nothing
    from workers.
    """
    kind, value = leaf_kind(leaf), leaf.value
    if type(value) in VALUES:
        return None
    is_text = leaf.key.encode(errors="ignore").decode() == leaf.key  # no lone surrogate
    if leaf.key == RESERVED or not is_text:
        why = "a name that safetensors keeps for itself" if is_text else "which is no Unicode text"
        raise ValueError(
            f"torchpmap.checkpoint.save: {leaf.path} would be saved as {leaf.key!r}, {why}. Rename "
            "the key."
        )
    if isinstance(value, ShardedTensor):
        layout, _ = value._alive()
        if process_count() == 1 or not layout.is_replicated or len(layout.devices) > 1:
            layout = over_processes(layout)
            holders = {
                tuple(part.start or 0 for part in index): [layout.ranks[k] for k in places]
                for places, index in blocks_of(layout)
            }
            return _Array(kind, layout.dtype, layout.shape, layout.block_shape, holders, value)
        value = value.to_host()  # each of several controllers has its own copy
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise TypeError(
            f"torchpmap.checkpoint.save: {leaf.path} is on the device 'meta', so it has no values."
        )
    try:
        host = host_tensor(value).resolve_conj().resolve_neg()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"torchpmap.checkpoint.save: {leaf.path} is an array of dtype {value.dtype}, which "
            "torch does not have. Save numbers, or a string."
        ) from error
    shape, writer = tuple(host.shape), 0 if is_launched() else HOST
    return _Array(kind, host.dtype, shape, shape, {(0,) * host.dim(): [writer]}, host)


def _told(value: Any, array: _Array | None) -> Any:
    """What must be equal in all processes that save together."""
    if array is None or not isinstance(array.value, ShardedTensor):
        return value if array is None else array.value
    return f"{kind_of(array.shape, array.dtype)} in the blocks {array.holders}"


def _plans(arrays: Mapping[str, _Array]) -> Plans:
    """What each writer writes."""
    num_bytes: Counter[int] = Counter()
    plans: Plans = {}
    for key, array in arrays.items():
        for offsets, holders in array.holders.items():
            writer = min(holders, key=num_bytes.__getitem__)
            num_bytes[writer] += prod(array.block_shape) * array.dtype.itemsize
            plans.setdefault(writer, {})[key] = offsets
    return plans


# -- agreeing, and naming the folder ---------------------------------------------------------------


def begin(path: str | os.PathLike[str], tree: Any) -> Callable[[], None]:
    """Copy the values to write; the returned function writes them, and has no others."""
    others, folder = Peers(f"torchpmap.checkpoint.save({str(path)!r})"), Folder(path)

    def described() -> tuple[list[Leaf], Structure, dict[str, _Array]]:
        leaves, structure = leaves_of(tree, "tree")
        found = {leaf.key: _array(leaf) for leaf in leaves}
        block_until_ready(tree)
        if others.rank == 0:
            folder.prepare()
        return leaves, structure, {key: each for key, each in found.items() if each is not None}

    try:
        leaves, structure, arrays = others.together(described)
        if others.size > 1:
            _check_names(others, [leaf.path for leaf in leaves])
            told = {leaf.path: _told(leaf.value, arrays.get(leaf.key)) for leaf in leaves}
            check_equal_everywhere(told, None, _EQUAL)
        plans = _plans(arrays)
        write = others.together(lambda: _copied(folder, arrays, plans))
    except BaseException:
        if others.rank == 0:
            folder.discard()
        raise
    rows = {key: array.row(key, plans) for key, array in arrays.items()}
    values = {leaf.key: leaf.value for leaf in leaves if leaf.key not in rows}
    plain = rebuilt(structure.root, lambda key: Stored(rows[key]) if key in rows else values[key])
    commit = functools.partial(_commit, folder, rows, plain)
    return lambda: others.decide(write(), commit)


def _check_names(others: Peers, mine: list[str]) -> None:
    """Raise, in all processes, unless their trees have the same leaves."""
    for rank, theirs in enumerate(others.exchange(mine)):
        if theirs != mine:
            odd = sorted({*mine} ^ {*theirs})
            what = f"one of them lacks {some(odd)}" if odd else "its leaves are in another order"
            raise ValueError(
                f"{others.what}: the trees of ranks {others.rank} and {rank} differ: {what}. All "
                "processes must save the same tree."
            )


def _commit(
    folder: Folder, rows: dict[str, dict[str, Any]], tree: Any, given: Sequence[Answers]
) -> None:
    """Write the table, and give the folder its name.

    Raises:
        CheckpointError: a file could not be written.
    """
    files = {file_of(writer): file for each in given for writer, file in each.items()}
    try:
        for file in files.values():
            if isinstance(file, str):
                raise CheckpointError(file)
        for key, row in rows.items():
            names = map(file_of, row["blocks"])
            row["blocks"] = [(name, files[name]["blocks"][key]) for name in names]
        about = {name: {"bytes": x["bytes"], "header": x["header"]} for name, x in files.items()}
        folder.commit(table_text(tree, about), about)
    except Exception as error:
        folder.discard()
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"the checkpoint {folder.path} could not be saved: {kind}{error}. What was there "
            "before is still there."
        ) from None


# -- copying and writing ---------------------------------------------------------------------------


def _copied(folder: Folder, arrays: Mapping[str, _Array], plans: Plans) -> Callable[[], Answers]:
    """Copy the values to write; the returned function writes them."""
    mine = process_index() if is_launched() else HOST
    elsewhere = {} if is_launched() else {k: plan for k, plan in plans.items() if k != HOST}
    plan = plans.get(mine, {})
    with Pipes() as pipes:
        if elsewhere:
            pipes.open(elsewhere)
            _copy_on_workers(folder.growing, arrays, elsewhere, pipes.path)
        copies = {key: _block_here(arrays[key]) for key in plan}
        opened = pipes.pop_all()

    def write() -> Answers:
        with opened:
            return _answer(folder.growing, mine, plan, copies) | pipes.answers()

    return write


def _block_here(array: _Array) -> torch.Tensor:
    """A copy of the block that this process has."""
    if isinstance(array.value, ShardedTensor):
        return array.value.addressable_data(0)  # each of several controllers has one device
    return array.value.clone(memory_format=torch.contiguous_format)


def _copy_on_workers(
    folder: Path, arrays: Mapping[str, _Array], plans: Mapping[int, Plan], pipes: str
) -> None:
    """Have worker processes copy their blocks and begin to write them."""
    by_team: dict[Sizes, dict[str, Handle]] = {}
    for key, array in arrays.items():
        if isinstance(array.value, ShardedTensor):
            _, handle = array.value._alive()
            by_team.setdefault(handle.team.ranks, {})[key] = handle
    for ranks, held in by_team.items():
        work = Snapshot(pipes, plans, tuple(held))
        run_on(current_runtime().team(ranks), NAME, work, list(held.values()))
    run_on(current_runtime().team(tuple(plans)), NAME, Snapshot(pipes, plans, (), folder))


@dataclass(frozen=True)
class Snapshot:
    """Copy blocks; the last call also writes what all calls have copied."""

    pipes: str
    """Path of the writers' pipes, without their ranks."""
    plans: Mapping[int, Plan]
    """By rank, what it writes."""
    keys: tuple[str, ...]
    """Of the blocks that are given."""
    folder: Path | None = None
    """Where to write now; None: more calls follow."""

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[None, list[torch.Tensor]]:
        writer = rank.ranks[int(rank.index)]
        plan = self.plans.get(writer, {})
        for left in [pipes for pipes in _copies if not os.path.exists(f"{pipes}{writer}")]:
            del _copies[left]  # of a save that failed; one that a handler interrupts has its pipes
        copies = _copies.setdefault(self.pipes, {})
        for key, block in zip(self.keys, blocks, strict=True):
            if key in plan:
                copies[key] = block.cpu().contiguous()
        if self.folder is not None:
            # without a reader this raises, rather than waits for one
            pipe = os.open(f"{self.pipes}{writer}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(pipe, True)
            arguments = (pipe, self.folder, writer, plan, _copies.pop(self.pipes))
            threading.Thread(target=_answer_through, args=arguments, daemon=True).start()
        return None, []


def _answer_through(pipe: int, *arguments: Any) -> None:
    with os.fdopen(pipe, "wb") as file:
        file.write(packed(_answer(*arguments)))


def _answer(folder: Path, writer: int, plan: Plan, blocks: Mapping[str, torch.Tensor]) -> Answers:
    """Write a file, if anything is to be written."""
    try:
        return {writer: write(folder / file_of(writer), plan, blocks)} if plan else {}
    except Exception as error:
        return {writer: f"{type(error).__name__}: {error}"}
