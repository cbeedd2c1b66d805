"""What is in a checkpoint, as values where the tree to fill has its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap import _inline
from torchpmap._checkpoint_files import Entry, Region, Table, read_record, region
from torchpmap._checkpoint_tree import Leaf, ShapeDtypeStruct, kind_of
from torchpmap._checkpoint_values import extent, is_own_copy, is_part, moved, whole
from torchpmap._checkpoint_workers import Restore, run_on
from torchpmap._current import check_devices, is_launched, process_index
from torchpmap._current import runtime as current_runtime
from torchpmap._layout import Layout, general_layout
from torchpmap._plan import host_tensor
from torchpmap._runtimes._base import Handle
from torchpmap._sharded import ShardedTensor, make_sharded

__all__ = ["Wanted", "restore", "wanted", "whole_value"]

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """A leaf to load, and where to put it."""

    leaf: Leaf
    entry: Entry
    layout: Layout | None
    """None: on the host."""
    regions: tuple[Region, ...]
    """What the devices of the layout need (only those here count); on the host, everything."""


def wanted(leaf: Leaf, table: Table) -> Wanted:
    """Check a leaf of the tree to fill against what is in the checkpoint.

    Raises:
        ValueError: shape, dtype or kind differ.
        TypeError: the leaf is of a kind that is not saved.
    """
    entry, like = table.entries[leaf.key], leaf.value
    if isinstance(like, ShapeDtypeStruct):
        on_host = like.sharding is None or _inline.active()
        layout = None if on_host else _layout_of(like, leaf.path)
        expected: tuple[Sizes, torch.dtype] | None = (tuple(like.shape), like.dtype)
    else:
        layout = like._alive()[0] if isinstance(like, ShardedTensor) else None
        expected = _expected(leaf)
    if layout is not None:
        check_devices(layout.devices)
        if not is_own_copy(layout):
            expected = whole(layout)[0], layout.dtype
    _check(leaf, entry, expected, table)
    if layout is None or not entry.is_array:
        return Wanted(leaf, entry, layout, ())
    regions = []
    for rank, where in zip(layout.ranks, layout.slices, strict=True):
        offsets, sizes = extent(where, layout.shape)
        if not is_own_copy(layout) and is_part(layout):
            assert layout.dim is not None
            offsets = moved(layout.shape, layout.dim, rank)
        regions.append(region(table.folder, leaf.key, entry, offsets, sizes))
    return Wanted(leaf, entry, layout, tuple(regions))


def _layout_of(like: ShapeDtypeStruct, path: str) -> Layout:
    assert like.sharding is not None
    try:
        return general_layout(like.shape, like.dtype, like.sharding)
    except ValueError as error:
        error.add_note(f"in {path}")
        raise


def _expected(leaf: Leaf) -> tuple[Sizes, torch.dtype] | None:
    """Shape and dtype of an array; None for a Python value."""
    kind = kind_of(leaf)
    if kind in ("tensor", "ndarray", "numpy scalar"):
        value = leaf.value if kind == "tensor" else host_tensor(leaf.value)
        return tuple(value.shape), value.dtype
    return None


def _check(
    leaf: Leaf, entry: Entry, expected: tuple[Sizes, torch.dtype] | None, table: Table
) -> None:
    if expected is None:
        given = type(leaf.value).__name__
        matches = not entry.is_array and entry.kind in (given, "value")
        asked = f"a Python {given}"
    else:
        shape, dtype = expected
        asked = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        matches = entry.is_array and asked == str(entry)
    if not matches:
        raise ValueError(
            f"torchpmap.checkpoint.load: {leaf.path} is {asked}, but {leaf.key!r} in the "
            f"checkpoint {table.folder} is {entry}. Give a tree of the shapes and dtypes that were "
            "saved (load without like= shows them), and convert what comes back."
        )


def whole_value(table: Table, key: str) -> Any:
    """A whole leaf on the host: a tensor, a numpy array or a Python value."""
    entry = table.entries[key]
    if not entry.is_array:
        buffer = read_record(table.folder, entry.records[0])
        return torch.load(buffer, map_location="cpu", weights_only=True)
    tensor = _read(table, key)
    if entry.kind in ("ndarray", "numpy scalar"):
        return _to_numpy(tensor, entry.kind)
    return tensor


def _to_numpy(tensor: torch.Tensor, kind: str) -> Any:
    return tensor.numpy() if kind == "ndarray" else tensor.numpy()[()]


def _read(table: Table, key: str) -> torch.Tensor:
    entry = table.entries[key]
    origin = (0,) * len(entry.shape)
    return region(table.folder, key, entry, origin, entry.shape).read(table.folder)


def restore(leaves: Sequence[Wanted], table: Table) -> list[Any]:
    """Read the leaves; nothing of the tree to fill is changed.

    Raises:
        CheckpointError: a block is damaged.
    """
    values: dict[str, Any] = {}
    by_team: dict[tuple[int, ...], list[Wanted]] = {}
    for want in leaves:
        if want.layout is None:
            values[want.leaf.key] = _on_host(want, table)
        else:
            by_team.setdefault(want.layout.ranks, []).append(want)
    for ranks, wants in by_team.items():
        for want, handle in zip(wants, _on_devices(ranks, wants, table), strict=True):
            assert want.layout is not None
            value = make_sharded(want.layout, handle)
            values[want.leaf.key] = _as_given(value, want.leaf.value)
    return [values[want.leaf.key] for want in leaves]


def _on_devices(ranks: Sizes, wants: Sequence[Wanted], table: Table) -> list[Handle]:
    runtime = current_runtime()
    team = runtime.team(ranks)
    if not is_launched():
        regions = tuple(zip(*(want.regions for want in wants), strict=True))
        return run_on(team, Restore(table.folder, regions), [])
    handles = []
    for want in wants:
        mine = [r for r, rank in zip(want.regions, ranks, strict=True) if rank == process_index()]
        block = mine[0].read(table.folder) if mine else torch.empty(0)
        handles.append(runtime.put(team, [block] * len(ranks)))
    return handles


def _on_host(want: Wanted, table: Table) -> Any:
    like = want.leaf.value
    if not want.entry.is_array:
        return whole_value(table, want.leaf.key)
    tensor = _read(table, want.leaf.key)
    if isinstance(like, np.ndarray | np.generic):
        return _to_numpy(tensor, kind_of(want.leaf))
    if isinstance(like, torch.Tensor) and like.device.type != "meta":
        tensor = tensor.to(like.device)
    return _as_given(tensor, like)


def _as_given(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Whether it is a parameter, and requires a gradient, is as before."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(value, like.requires_grad)
    if isinstance(like, torch.Tensor) and like.requires_grad:
        return value.requires_grad_()
    return value
