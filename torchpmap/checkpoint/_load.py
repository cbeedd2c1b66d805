"""Load a checkpoint: every value is placed like its leaf in the tree to fill."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap._base.errors import CheckpointError
from torchpmap._layout.layout import Layout, general_layout
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import check_devices, is_launched, process_index
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.everywhere import run_on
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import host_tensor
from torchpmap.checkpoint._files import Folder
from torchpmap.checkpoint._peers import peers, together
from torchpmap.checkpoint._table import Table, describe
from torchpmap.checkpoint._tree import Leaf, ShapeDtypeStruct, leaf_kind, leaves_of, rebuild
from torchpmap.checkpoint._values import extents, whole
from torchpmap.checkpoint._workers import NAME, Restore

Sizes = tuple[int, ...]


def load_tree(path: str | os.PathLike[str], like: Any) -> Any:
    """See ``torchpmap.checkpoint.load``."""
    others, what = peers(), f"torchpmap.checkpoint.load({str(path)!r})"
    folder = Folder(path).find()
    leaves, structure = leaves_of(like, "like")

    def read() -> tuple[Table, list[_Wanted]]:
        table = Table.of(folder)
        if like is None:
            return table, []
        _check_names(table, {leaf.key: leaf.path for leaf in leaves})
        return table, [_wanted(leaf, table) for leaf in leaves]

    table, wants = together(others, what, read)
    digests = others.exchange(table.digest, what)
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"{what}: the processes see different checkpoints: {digests}, by rank. Give the same "
            "path everywhere, on a file system that all hosts share."
        )
    if like is not None:
        return structure.unflatten(together(others, what, lambda: _restore(wants, table)))

    def everything() -> dict[str, Any]:
        found = table.read(dict.fromkeys(table.rows))
        return {key: _as_kind(value, table.rows[key].kind) for key, value in found.items()}

    values = together(others, what, everything)
    return values if table.skeleton is None else rebuild(table.skeleton, values)


def _check_names(table: Table, paths: dict[str, str]) -> None:
    missing = [f"{path} ({key!r})" for key, path in paths.items() if key not in table.rows]
    unknown = [repr(key) for key in table.rows if key not in paths]
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


@dataclass(frozen=True)
class _Wanted:
    """A leaf to load, and where to put it."""

    leaf: Leaf
    layout: Layout | None
    """None: on the host."""


def _wanted(leaf: Leaf, table: Table) -> _Wanted:
    """Check a leaf of the tree to fill against what is in the checkpoint.

    Raises:
        ValueError: shape, dtype or kind differ.
        TypeError: the leaf is of a kind that is not saved.
    """
    like = leaf.value
    if isinstance(like, ShapeDtypeStruct):
        on_host = like.sharding is None or inline_mode.active()
        layout = None if on_host else _layout_of(like, leaf.path)
        expected: tuple[Sizes, torch.dtype] | None = (tuple(like.shape), like.dtype)
    else:
        layout = like._alive()[0] if isinstance(like, ShardedTensor) else None
        expected = _expected(leaf)
    if layout is not None:
        check_devices(layout.devices)
        expected = whole(layout)[0], layout.dtype
    _check(leaf, expected, table)
    return _Wanted(leaf, layout)


def _layout_of(like: ShapeDtypeStruct, path: str) -> Layout:
    assert like.sharding is not None
    try:
        return general_layout(like.shape, like.dtype, like.sharding)
    except ValueError as error:
        error.add_note(f"in {path}")
        raise


def _expected(leaf: Leaf) -> tuple[Sizes, torch.dtype] | None:
    """Shape and dtype of an array; None for a Python value."""
    kind = leaf_kind(leaf)
    if kind in ("tensor", "ndarray", "numpy scalar"):
        value = leaf.value if kind == "tensor" else host_tensor(leaf.value)
        return tuple(value.shape), value.dtype
    return None


def _check(leaf: Leaf, expected: tuple[Sizes, torch.dtype] | None, table: Table) -> None:
    shape, dtype = expected or ((), None)
    asked = describe(type(leaf.value).__name__, dtype, shape)
    stored = table.describe(leaf.key)
    if asked != stored and (expected is not None or stored != describe("value", None, ())):
        raise ValueError(
            f"torchpmap.checkpoint.load: {leaf.path} is {asked}, but {leaf.key!r} in the "
            f"checkpoint {table.folder} is {stored}. Give a tree of the shapes and dtypes that "
            "were saved (load without like= shows them), and convert what comes back."
        )


def _as_kind(value: Any, kind: str) -> Any:
    """A value on the host as a leaf of a kind."""
    if kind in ("ndarray", "numpy scalar"):
        return value.numpy() if kind == "ndarray" else value.numpy()[()]
    return value


def _restore(wants: Sequence[_Wanted], table: Table) -> list[Any]:
    """Read the leaves; the tree to fill is not changed.

    Raises:
        CheckpointError: a block is damaged.
    """
    values = table.read({want.leaf.key: None for want in wants if want.layout is None})
    by_team: dict[Sizes, list[_Wanted]] = {}
    for want in wants:
        if want.layout is None:
            values[want.leaf.key] = _on_host(values[want.leaf.key], want.leaf)
        else:
            by_team.setdefault(want.layout.ranks, []).append(want)
    for ranks, group in by_team.items():
        for want, handle in zip(group, _on_devices(ranks, group, table), strict=True):
            assert want.layout is not None
            value = make_sharded(want.layout, handle)
            values[want.leaf.key] = _as_given(value, want.leaf.value)
    return [values[want.leaf.key] for want in wants]


def _on_devices(ranks: Sizes, wants: Sequence[_Wanted], table: Table) -> list[Handle]:
    runtime = current_runtime()
    team = runtime.team(ranks)
    places = {want.leaf.key: extents(want.layout) for want in wants if want.layout}
    if not is_launched():
        parts = ({key: where[rank] for key, where in places.items()} for rank in ranks)
        return run_on(team, NAME, Restore(table.folder, table.digest, tuple(parts)))[1]
    handles, here = [], process_index()
    for key, where in places.items():
        block = (
            table.read({key: where[here]})[key] if here in ranks else torch.empty(0, device="cpu")
        )
        handles.append(runtime.put(team, [block] * len(ranks)))
    return handles


def _on_host(value: Any, leaf: Leaf) -> Any:
    like = leaf.value
    if isinstance(like, np.ndarray | np.generic):
        return _as_kind(value, leaf_kind(leaf))
    if isinstance(like, torch.Tensor) and like.device.type != "meta":
        value = value.to(like.device)
    return _as_given(value, like)


def _as_given(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Make ``value`` a parameter, or require grad, if ``like`` does."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(value, like.requires_grad)
    if isinstance(like, torch.Tensor) and like.requires_grad:
        return value.requires_grad_()
    return value
