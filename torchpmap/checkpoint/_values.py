"""Values as blocks: which rank has which part of a leaf, and which rank writes it.

Every process decides this for all ranks.  With several controllers, a process's row-sharded value
is a part of a larger value: process r of n has rows r*k to (r+1)*k of n*k.  If several devices hold
a block, the device that has least to write writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchpmap._base.errors import dtype_name
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import process_count, process_index
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.everywhere import run_on
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import fetch_blocks, host_tensor
from torchpmap.checkpoint._storage import write_item
from torchpmap.checkpoint._table import Extent, describe
from torchpmap.checkpoint._tree import VALUES, Leaf, leaf_kind
from torchpmap.checkpoint._workers import NAME, Snapshot, WriterConnections

HOST = -1
"""The controller of worker processes, as a writer; with several controllers, rank 0."""
_SNAPSHOT_BYTES = 256 * 2**20
"""A worker copies its blocks in calls of this size, as a GPU briefly holds them twice."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A leaf that is to be saved."""

    leaf: Leaf
    kind: str
    shape: Sizes
    dtype: torch.dtype | None
    """None for a Python value."""
    blocks: dict[Extent, list[int]]
    """The ranks that have each block."""
    host: Any
    """The value, if it is on the host."""
    held: tuple[Layout, Handle] | None = None
    """Its layout and handle, if it is on the devices."""

    def items(self) -> list[tuple[WriteItem, list[int]]]:
        """The blocks to write, and the ranks that have them."""
        key = self.leaf.key
        return [
            (write_item(key, self.dtype, self.shape, extent), holders)
            for extent, holders in self.blocks.items()
        ]

    def row(self) -> dict[str, Any]:
        """Its row of the table, still without records."""
        dtype = "" if self.dtype is None else dtype_name(self.dtype)
        row = {"kind": self.kind, "shape": self.shape, "dtype": dtype}
        return {**row, "route": self.leaf.route, "records": []}

    def describe(self) -> str:
        """One line, which must be equal in all processes that save together."""
        text = describe(self.kind, self.dtype, self.shape)
        if self.held is not None:
            return f"{text} in the blocks {self.blocks}"
        if self.dtype is None:
            return f"{text}: {self.host!r:.200}"
        if self.host.numel() == 1:
            return f"{text}: {self.host.item()}"
        raw = self.host.contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{text} with the digest {hashlib.blake2b(raw.data, digest_size=8).hexdigest()}"


def described(leaf: Leaf) -> Saved:
    """How a leaf is to be saved; fetches nothing from workers."""
    kind, value = leaf_kind(leaf), leaf.value
    if isinstance(value, ShardedTensor):
        layout, handle = value._alive()
        if not _is_own_copy(layout):
            blocks: dict[Extent, list[int]] = {}
            for rank, extent in extents(layout).items():
                blocks.setdefault(extent, []).append(rank)
            shape, _ = whole(layout)
            return Saved(leaf, kind, shape, layout.dtype, blocks, None, (layout, handle))
        value = value.to_host()
    if type(value) in VALUES:
        return Saved(leaf, kind, (), None, {((), ()): [HOST]}, value)
    try:
        tensor = host_tensor(value).resolve_conj().resolve_neg()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"torchpmap.checkpoint.save: {leaf.path} is an array of dtype {value.dtype}, which "
            "torch does not have. Save numbers, or a string."
        ) from error
    shape = tuple(tensor.shape)
    return Saved(leaf, kind, shape, tensor.dtype, {((0,) * len(shape), shape): [HOST]}, tensor)


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
    found = {}
    for rank, where in zip(layout.ranks, layout.slices, strict=True):
        ends = [part.indices(size)[:2] for part, size in zip(where, shape, strict=True)]
        sizes = tuple(stop - start for start, stop in ends)
        found[rank] = tuple(start for start, _ in ends), sizes
    return found


# -- saving ----------------------------------------------------------------------------------------


def planned(leaves: Sequence[Saved], host: int) -> tuple[dict[int, SavePlan], Metadata]:
    """What each rank writes, and DCP's table of it all; the rank ``host`` writes host values."""
    held: dict[int, list[WriteItem]] = {}
    for item, holders in (each for saved in leaves for each in saved.items()):
        for holder in holders:
            held.setdefault(host if holder == HOST else holder, []).append(item)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    given = [SavePlan(items) for items in held.values()]
    plans, metadata = planner.create_global_plan(given)  # leaves each block in one plan
    metadata.planner_data = {saved.leaf.key: saved.leaf.route for saved in leaves}
    return {rank: plan for rank, plan in zip(held, plans, strict=True) if plan.items}, metadata


def copy_here(plan: SavePlan, leaves: Mapping[str, Saved]) -> dict[MetadataIndex, Any]:
    """Copies of the values that this process writes."""
    copies = {}
    for item in plan.items:
        saved = leaves[item.index.fqn]
        value = saved.host
        if saved.held is not None:
            layout, handle = saved.held
            # each of several controllers has one device, whose id is the process index
            (value,) = fetch_blocks(layout, handle, [layout.ranks.index(process_index())])
        elif saved.dtype is not None:
            value = value.clone(memory_format=torch.contiguous_format)
        copies[item.index] = value
    return copies


def copy_on_workers(
    plans: Mapping[int, SavePlan], leaves: Mapping[str, Saved], connections: WriterConnections
) -> None:
    """Have worker processes copy their blocks and begin to write them."""
    writers = {item.index: rank for rank, plan in plans.items() for item in plan.items}
    by_team: dict[Sizes, list[Saved]] = {}
    for saved in leaves.values():
        if saved.held is not None:
            by_team.setdefault(saved.held[0].ranks, []).append(saved)
    for ranks, group in by_team.items():
        team = current_runtime().team(ranks)
        for part in _portions(group):
            todo: list[list[tuple[int, MetadataIndex]]] = [[] for _ in ranks]
            for position, saved in enumerate(part):
                for item, _ in saved.items():
                    todo[ranks.index(writers[item.index])].append((position, item.index))
            snapshot = Snapshot(connections.address, tuple(map(tuple, todo)))
            run_on(team, NAME, snapshot, [s.held[1] for s in part if s.held])
    ranks = tuple(sorted(plans))
    last = Snapshot(connections.address, ((),) * len(ranks), tuple((r, plans[r]) for r in ranks))
    run_on(current_runtime().team(ranks), NAME, last)


def _portions(leaves: Sequence[Saved]) -> list[list[Saved]]:
    portions: list[list[Saved]] = [[]]
    size = 0
    for saved in leaves:
        assert saved.dtype is not None
        num_bytes = max(prod(sizes) for _, sizes in saved.blocks) * saved.dtype.itemsize
        if portions[-1] and size + num_bytes > _SNAPSHOT_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(saved)
        size += num_bytes
    return portions
