"""Values to blocks: who has which part of a leaf, and who writes it.

Every process sees the whole plan.  Beside other controllers a value with rows only here is a part
of a larger one: process r of n has rows r*k to (r+1)*k of n*k.  What several devices hold is
written by the one of them that has least to write.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchpmap._checkpoint_files import Entry
from torchpmap._checkpoint_tree import VALUES, Leaf, kind_of
from torchpmap._checkpoint_workers import Line, Snapshot, run_on
from torchpmap._current import process_count, process_index
from torchpmap._current import runtime as current_runtime
from torchpmap._layout import Layout
from torchpmap._plan import host_tensor
from torchpmap._runtimes._base import Handle
from torchpmap._sharded import ShardedTensor
from torchpmap._transfer import fetch_blocks

__all__ = [
    "HOST",
    "Job",
    "Saved",
    "copy_here",
    "copy_on_workers",
    "described",
    "extent",
    "is_own_copy",
    "is_part",
    "jobs_of",
    "moved",
    "whole",
]

HOST = -1
"""The controller of worker processes, as a writer; with several controllers, rank 0 is meant."""
_SNAPSHOT_BYTES = 256 * 2**20
"""A worker copies its blocks in calls of this size: on a GPU they are there twice for a moment."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A block of a leaf and the ranks that have it."""

    offsets: Sizes
    sizes: Sizes
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A leaf that is to be saved."""

    leaf: Leaf
    kind: str
    shape: Sizes
    dtype: torch.dtype | None
    pieces: tuple[Piece, ...]
    host: torch.Tensor | bytes | None
    """The value, if it is on the host."""
    held: tuple[Layout, Handle] | None
    """Where it is, if not."""

    def entry(self) -> Entry:
        """As in the table, before anything is written."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return Entry(self.kind, self.shape, dtype, self.leaf.route, ())

    def describe(self) -> str:
        """One line, equal in all processes that may save together."""
        text = str(self.entry())
        if self.host is None:
            return f"{text} in the blocks {[(p.offsets, p.sizes, p.holders) for p in self.pieces]}"
        if isinstance(self.host, bytes):
            return f"{text}: {self.leaf.value!r:.200}"
        if self.host.numel() == 1:
            return f"{text}: {self.host.item()}"
        raw = self.host.contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{text} with the digest {hashlib.blake2b(raw.data, digest_size=8).hexdigest()}"


def described(leaf: Leaf) -> Saved:
    """What is to be saved of a leaf, without fetching anything from workers."""
    kind, value = kind_of(leaf), leaf.value
    if isinstance(value, ShardedTensor):
        layout, handle = value._alive()
        if not is_own_copy(layout):
            shape, pieces = _pieces(layout)
            return Saved(leaf, kind, shape, layout.dtype, pieces, None, (layout, handle))
        value = value.to_host()
    if type(value) in VALUES:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return Saved(leaf, kind, (), None, (Piece((), (), (HOST,)),), buffer.getvalue(), None)
    try:
        tensor = host_tensor(value).resolve_conj().resolve_neg()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"torchpmap.checkpoint.save: {leaf.path} is an array of dtype {value.dtype}, which "
            "torch does not have. Save numbers, or a string."
        ) from error
    shape = tuple(tensor.shape)
    piece = Piece((0,) * len(shape), shape, (HOST,))
    return Saved(leaf, kind, shape, tensor.dtype, (piece,), tensor, None)


def is_own_copy(layout: Layout) -> bool:
    """Whether a value is, beside other controllers, one that each process has for itself."""
    return layout.is_replicated and len(layout.devices) == 1 and process_count() > 1


def is_part(layout: Layout) -> bool:
    """Whether a value is the rows that this controller has of a larger one."""
    if process_count() == 1:
        return False
    here = process_index()
    return all(device.process_index == here for device in layout.devices)


def whole(layout: Layout) -> tuple[Sizes, int | None]:
    """Shape of the value of all controllers, and the dim along which they have parts of it."""
    if not is_part(layout):
        return layout.shape, None
    dim = layout.dim
    assert dim is not None, "of a layout on one device"
    rows = layout.shape[dim] * process_count()
    return (*layout.shape[:dim], rows, *layout.shape[dim + 1 :]), dim


def _pieces(layout: Layout) -> tuple[Sizes, tuple[Piece, ...]]:
    shape, dim = whole(layout)
    if dim is not None:
        parts = [
            Piece(moved(layout.shape, dim, rank), layout.shape, (rank,))
            for rank in range(process_count())
        ]
        return shape, tuple(parts)
    holders: dict[tuple[Sizes, Sizes], list[int]] = {}
    for rank, where in zip(layout.ranks, layout.slices, strict=True):
        holders.setdefault(extent(where, shape), []).append(rank)
    return shape, tuple(Piece(*extent, tuple(ranks)) for extent, ranks in holders.items())


def moved(shape: Sizes, dim: int, rank: int) -> Sizes:
    return tuple(rank * size if k == dim else 0 for k, size in enumerate(shape))


def extent(where: Sequence[slice], shape: Sizes) -> tuple[Sizes, Sizes]:
    """Offsets and sizes of an index."""
    ends = [part.indices(size)[:2] for part, size in zip(where, shape, strict=True)]
    return tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends)


# -- saving ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One block that somebody has to write."""

    saved: Saved
    piece: Piece


def jobs_of(leaves: Sequence[Saved], host: int) -> dict[int, list[Job]]:
    """The blocks that each writer has to write; ``host`` writes what is on the host."""
    jobs: dict[int, list[Job]] = {}
    load: Counter[int] = Counter()
    for saved in leaves:
        for piece in saved.pieces:
            holders = [host if holder == HOST else holder for holder in piece.holders]
            writer = min(holders, key=lambda rank: (load[rank], rank))
            load[writer] += _num_bytes(saved, piece)
            jobs.setdefault(writer, []).append(Job(saved, piece))
    return jobs


def _num_bytes(saved: Saved, piece: Piece) -> int:
    if saved.dtype is None:
        return 0
    return int(np.prod(piece.sizes, dtype=np.int64)) * saved.dtype.itemsize


def copy_here(jobs: Sequence[Job]) -> list[tuple[str, Sizes, torch.Tensor | bytes]]:
    """Copies of blocks that this process has."""
    copies: list[tuple[str, Sizes, torch.Tensor | bytes]] = []
    for job in jobs:
        value = job.saved.host
        if isinstance(value, torch.Tensor):
            value = value.clone(memory_format=torch.contiguous_format)
        elif value is None:
            assert job.saved.held is not None
            layout, handle = job.saved.held
            # a controller beside others has one device, of its own number
            (value,) = fetch_blocks(layout, handle, [layout.ranks.index(process_index())])
        copies.append((job.saved.leaf.key, job.piece.offsets, value))
    return copies


def copy_on_workers(jobs: dict[int, list[Job]], line: Line, files: dict[int, str]) -> None:
    """Have worker processes copy their blocks and begin to write them."""
    writer_of = {id(job.piece): rank for rank, given in jobs.items() for job in given}
    by_team: dict[tuple[int, ...], dict[int, Saved]] = {}
    for job in (job for given in jobs.values() for job in given):
        assert job.saved.held is not None
        by_team.setdefault(job.saved.held[0].ranks, {})[id(job.saved)] = job.saved
    for ranks, leaves in by_team.items():
        for part in _portions(list(leaves.values())):
            todo: list[list[tuple[int, str, Sizes]]] = [[] for _ in ranks]
            for position, saved in enumerate(part):
                for piece in saved.pieces:
                    place = ranks.index(writer_of[id(piece)])
                    todo[place].append((position, saved.leaf.key, piece.offsets))
            snapshot = Snapshot(line.address, tuple(map(tuple, todo)))
            run_on(current_runtime().team(ranks), snapshot, [s.held[1] for s in part if s.held])
    ranks = tuple(sorted(jobs))
    names = tuple(files[rank] for rank in ranks)
    last = Snapshot(line.address, ((),) * len(ranks), names)
    run_on(current_runtime().team(ranks), last, [])


def _portions(leaves: Sequence[Saved]) -> list[list[Saved]]:
    portions: list[list[Saved]] = [[]]
    size = 0
    for saved in leaves:
        num_bytes = max(_num_bytes(saved, piece) for piece in saved.pieces)
        if portions[-1] and size + num_bytes > _SNAPSHOT_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(saved)
        size += num_bytes
    return portions
