"""Load a checkpoint: every value is placed like its leaf in the tree to fill."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._base.errors import CheckpointError, kind_of
from torchpmap._layout.layout import Layout, general_layout
from torchpmap._layout.mesh import NamedSharding
from torchpmap._runtime import inline_mode
from torchpmap._runtime.base import Handle
from torchpmap._runtime.current import check_devices, is_launched, process_index
from torchpmap._runtime.current import runtime as current_runtime
from torchpmap._runtime.everywhere import run_on
from torchpmap._runtime.task import Rank
from torchpmap._sharded.global_view import over_processes
from torchpmap._sharded.tensor import ShardedTensor, make_sharded
from torchpmap._sharded.transfer import host_tensor
from torchpmap.checkpoint._blocks import Files, Sizes
from torchpmap.checkpoint._folder import Folder
from torchpmap.checkpoint._peers import Peers
from torchpmap.checkpoint._save import NAME
from torchpmap.checkpoint._table import (
    ARRAYS,
    Leaf,
    Row,
    Table,
    leaf_kind,
    leaves_of,
    some,
)


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """Shape, dtype and sharding of a value that does not exist yet, for ``load``.

    Args:
        shape: of the whole value.
        dtype: a torch dtype.
        sharding: where the value is placed; None: a CPU tensor.

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((4,), ("i",), devices=tp.devices())
        >>> rows = tp.NamedSharding(mesh, tp.P("i"))
        >>> tp.checkpoint.ShapeDtypeStruct((8, 3), torch.float32, rows).sharding.spec
        PartitionSpec('i',)

    Source: ``jax.ShapeDtypeStruct``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None = None


_Part = tuple[Row, tuple[slice, ...]]


class _Wanted(NamedTuple):
    """A leaf to load, and where to put it."""

    row: Row
    kind: str
    """What it becomes on the host."""
    like: Any = None
    layout: Layout | None = None
    """None: on the host."""


def load_tree(path: str | os.PathLike[str], like: Any) -> Any:
    """See ``torchpmap.checkpoint.load``."""
    others = Peers(f"torchpmap.checkpoint.load({str(path)!r})")
    found = folder, _ = _find(path)
    leaves, structure = leaves_of(like, "like")

    def read() -> tuple[Table, list[_Wanted]]:
        with _unless_replaced(path, found):
            table = Table.of(folder)
        if like is None:
            return table, [_Wanted(row, row.kind) for row in table.rows.values()]
        _check_names(folder, table.rows, {leaf.key: leaf.path for leaf in leaves})
        return table, [_wanted(leaf, table.rows[leaf.key], folder) for leaf in leaves]

    table, wants = others.together(read)
    digests = others.exchange(table.digest)
    if len(set(digests)) > 1:
        raise CheckpointError(
            f"{others.what}: the processes see different checkpoints: {digests}, by rank. Give the "
            "same path everywhere, on a file system that all hosts share."
        )

    def restore() -> list[Any]:
        with _unless_replaced(path, found):
            return _restore(wants, folder)

    values = others.together(restore)
    return (table.structure if like is None else structure).unflatten(values)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint of that name can be read, also while another one replaces it.

    Raises:
        CheckpointError: it is damaged, or in another format.
    """
    while True:
        found = folder, _ = _find(path)
        try:
            with _unless_replaced(path, found):
                Table.of(folder)
            return True
        except _Replaced:
            continue
        except FileNotFoundError:
            return False


class _Replaced(CheckpointError):
    """Another checkpoint has taken the name of one that was read."""


_Found = tuple[Path, tuple[int, int] | None]


def _find(path: str | os.PathLike[str]) -> _Found:
    """Where a checkpoint is now, and what differs between it and one that takes its name."""
    folder = Folder(path).find()
    try:
        stat = folder.stat()
    except OSError:
        return folder, None
    return folder, (stat.st_ino, stat.st_mtime_ns)


@contextmanager
def _unless_replaced(path: str | os.PathLike[str], found: _Found) -> Iterator[None]:
    """Tell a checkpoint that was replaced while it was read from a damaged one."""
    try:
        yield
    except (CheckpointError, FileNotFoundError) as error:
        if _find(path) == found:
            raise
        raise _Replaced(
            f"the checkpoint {found[0]} was replaced or removed while it was read. Load it again."
        ) from error


def _check_names(folder: Path, rows: Mapping[str, Row], paths: dict[str, str]) -> None:
    missing = [f"{path} ({key!r})" for key, path in paths.items() if key not in rows]
    unknown = [repr(key) for key in rows if key not in paths]
    parts = [f"the checkpoint lacks {some(missing)}"] if missing else []
    parts += [f"like has no place for {some(unknown)} of the checkpoint"] if unknown else []
    if parts:
        raise ValueError(
            f"torchpmap.checkpoint.load: {folder} has another structure: {'; '.join(parts)}. Give "
            "a tree of the structure that was saved (load without like= shows it)."
        )


def _wanted(leaf: Leaf, row: Row, folder: Path) -> _Wanted:
    """Check a leaf of the tree to fill against what is in the checkpoint.

    Raises:
        ValueError: shape, dtype or kind differ.
        TypeError: the leaf is of a kind that is not saved.
    """
    like, layout, kind = leaf.value, _layout_of(leaf), "tensor"
    dtype: torch.dtype | None = None
    shape: Sizes = ()
    if layout is not None:
        check_devices(layout.devices)
        dtype, shape = layout.dtype, over_processes(layout).shape
    elif isinstance(like, ShapeDtypeStruct):
        dtype, shape = like.dtype, tuple(like.shape)
    elif (kind := leaf_kind(leaf)) in ARRAYS:
        value = like if isinstance(like, torch.Tensor) else host_tensor(like)
        dtype, shape = value.dtype, tuple(value.shape)
    wanted = _described(type(like).__name__, dtype, shape)
    stored = _described(row.kind, row.dtype, row.shape)
    if wanted != stored:
        raise ValueError(
            f"torchpmap.checkpoint.load: {leaf.path} is {wanted}, but {leaf.key!r} in the "
            f"checkpoint {folder} is {stored}. Give a tree of the shapes and dtypes that were "
            "saved (load without like= shows them), and convert what comes back."
        )
    return _Wanted(row, kind, like, layout)


def _described(kind: str, dtype: torch.dtype | None, shape: Sizes) -> str:
    return f"a Python {kind}" if dtype is None else kind_of(shape, dtype)


def _layout_of(leaf: Leaf) -> Layout | None:
    like = leaf.value
    if isinstance(like, ShardedTensor):
        return like._alive()[0]
    if not isinstance(like, ShapeDtypeStruct) or like.sharding is None or inline_mode.active():
        return None
    if not isinstance(like.sharding, NamedSharding):
        raise TypeError(
            f"torchpmap.checkpoint.load: {leaf.path} has the sharding {like.sharding!r}, but a "
            "ShapeDtypeStruct takes a NamedSharding, or None for a CPU tensor."
        )
    try:
        return general_layout(like.shape, like.dtype, like.sharding)
    except ValueError as error:
        error.add_note(f"in {leaf.path}")
        raise


def _restore(wants: Sequence[_Wanted], folder: Path) -> list[Any]:
    """Read the leaves; the tree to fill is not changed.

    Raises:
        CheckpointError: a block is damaged.
    """
    values: list[Any] = []
    by_team: dict[Sizes, list[tuple[int, Row, Layout]]] = {}
    with Files(folder) as files:
        for place, (row, kind, _, layout) in enumerate(wants):
            values.append(_on_host(row, kind, files) if layout is None else None)
            if layout is not None:
                by_team.setdefault(layout.ranks, []).append((place, row, layout))
    for ranks, group in by_team.items():
        handles = _on_devices(ranks, group, folder)
        for (place, _, layout), handle in zip(group, handles, strict=True):
            values[place] = make_sharded(layout, handle)
    return [_as_given(value, want.like) for value, want in zip(values, wants, strict=True)]


def _on_host(row: Row, kind: str, files: Files) -> Any:
    """A value on the host, as a leaf of a kind; a Python value as it is."""
    if row.dtype is None:
        return row.value
    value = row.read(files)
    if kind == "tensor":
        return value
    return value.numpy() if kind == "ndarray" else value.numpy()[()]


def _on_devices(
    ranks: Sizes, wants: Sequence[tuple[int, Row, Layout]], folder: Path
) -> list[Handle]:
    parts: dict[int, list[_Part]] = {rank: [] for rank in ranks}
    for _, row, layout in wants:
        whole = over_processes(layout)
        for rank, index in zip(whole.ranks, whole.slices, strict=True):
            if rank in parts:
                parts[rank].append((row, index))
    work, team, here = Restore(folder, parts), current_runtime().team(ranks), process_index()
    if not is_launched():
        return run_on(team, NAME, work)[1]
    blocks = work.blocks(here) if here in ranks else [torch.empty(0, device="cpu")] * len(wants)
    return [team.runtime.put(team, [block] * len(ranks)) for block in blocks]


@dataclass(frozen=True)
class Restore:
    """Read blocks from files; they become values of the device."""

    folder: Path
    parts: Mapping[int, Sequence[_Part]]
    """By rank, what it reads."""

    def blocks(self, rank: int) -> Iterator[torch.Tensor]:
        with Files(self.folder) as files:
            for row, index in self.parts[rank]:
                yield row.read(files, index)

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[None, list[torch.Tensor]]:
        mine = self.blocks(rank.ranks[int(rank.index)])
        return None, [block.to(rank.index.device) for block in mine]


def _as_given(value: Any, like: Any) -> Any:
    """Put a tensor on the device of ``like``, and make it a parameter, or require grad, if that
    does.
    """
    if isinstance(like, torch.Tensor) and type(value) is torch.Tensor:
        value = value if like.device.type == "meta" else value.to(like.device)
    if isinstance(like, torch.nn.Parameter):
        value = torch.nn.Parameter(value, like.requires_grad)
    elif isinstance(like, torch.Tensor) and like.requires_grad:
        value.requires_grad_()
    if isinstance(like, torch.Tensor) and inline_mode.is_replicated(like):
        inline_mode.note_replicated(value)
    return value
