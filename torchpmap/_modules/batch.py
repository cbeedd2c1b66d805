"""``shard_batch``: a batch of the host, cut over the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._base.pytree import Tree, flatten
from torchpmap._layout.layout import Layout, replicated_layout, row_layout
from torchpmap._runtime.current import check_devices, refuse_inside
from torchpmap._runtime.current import devices as all_devices
from torchpmap._sharded.device_put import put_as
from torchpmap._sharded.transfer import host_tensor


@overload
def shard_batch(
    batch: Tree, *, stacked: Literal[False] = False, devices: Sequence[Device] | None = None
) -> Tree: ...
@overload
def shard_batch(
    batch: Tree, *, stacked: Literal[True], devices: Sequence[Device] | None = None
) -> tuple[Tree, torch.Tensor]: ...
@boundary
def shard_batch(
    batch: Any, *, stacked: bool = False, devices: Sequence[Device] | None = None
) -> Any:
    """Return a batch with its rows (dim 0) cut over the devices, for a replicated module.

    shard_batch: T[n, *s] on the host -> T[n, *s], n/d rows on each of d devices
    shard_batch(stacked=True): T[n, *s] -> T[d, ceil(n/d), *s], and a mask bool[d, ceil(n/d)]

    A batch whose length does not divide by the number of devices is not cut: every device gets all
    of it. So a loss, its gradients and the statistics of a batch norm are those of one device for
    any length; the batch only takes as long as on one device.

    With ``stacked=True`` the batch gets a leading dim for ``pmap``. If the length does not divide,
    copies of the last row fill it up. The mask is False for them: leave them out of every sum and
    mean, and give the mask to ``functional``'s ``apply`` for batch norms.

    Under a launcher every process passes the same whole batch, and keeps its rows. If each process
    has loaded its own rows, use ``global_view`` instead.

    Args:
        batch: tensor, array or pytree of them; all have the same number of rows. None stays None.
        stacked: whether to add a dim of devices, and to return a mask.
        devices: default: all.

    Raises:
        TypeError: a leaf is no tensor or array.
        ValueError: a leaf has no dims, leaves differ in length, there are no rows; or the processes
            of a job give different batches.

    Example:
        >>> import torch, torchpmap as tp
        >>> x, y = tp.shard_batch((torch.ones(8, 3), torch.arange(8)))
        >>> y
        ShardedTensor([0, 1, 2, 3, 4, 5, 6, 7], rows of dim 0 on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> tp.shard_batch(torch.arange(6))
        ShardedTensor([0, 1, 2, 3, 4, 5], replicated on cpu:0 cpu:1 cpu:2 cpu:3)
        >>> rows, mask = tp.shard_batch(torch.arange(6), stacked=True)
        >>> rows.tolist(), mask.tolist()[3]
        ([[0, 1], [2, 3], [4, 5], [5, 5]], [False, False])
    """
    refuse_inside("shard_batch")
    chosen = tuple(all_devices() if devices is None else devices)
    check_devices(chosen)
    leaves, structure = flatten(batch)
    paths = structure.paths("batch")
    rows = [_rows(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
    length = _length(rows, paths)

    def layout(shape: tuple[int, ...], dtype: torch.dtype, path: str) -> Layout:
        if length % len(chosen) and not stacked:
            return replicated_layout(shape, dtype, chosen)
        return row_layout(shape, dtype, chosen, 0, None)

    if not stacked:
        return put_as(structure.unflatten(rows), layout, "batch")
    real = torch.ones(length, dtype=torch.bool, device="cpu")
    filled = [None if x is None else _stack(x, len(chosen), x[-1:]) for x in rows]
    filled.append(_stack(real, len(chosen), ~real[-1:]))
    *placed, mask = put_as(filled, layout, "batch")
    return structure.unflatten(placed), mask


def _rows(leaf: Any, path: str) -> torch.Tensor | None:
    if leaf is None:
        return None
    if isinstance(leaf, torch.Tensor):
        # of a leaf that requires grad, device_put would make a leaf of its own
        return leaf.view_as(leaf) if leaf.requires_grad and leaf.is_leaf else leaf
    if isinstance(leaf, np.ndarray):
        return host_tensor(leaf)
    raise TypeError(
        f"shard_batch: {path} has type {type(leaf).__name__}, but a batch consists of tensors and "
        "arrays with one row per example. Leave it out of what is passed."
    )


def _length(rows: Sequence[torch.Tensor | None], paths: Sequence[str]) -> int:
    """How many rows all leaves have."""
    lengths = {}
    for x, path in zip(rows, paths, strict=True):
        if x is None:
            continue
        if not x.dim():
            raise ValueError(
                f"shard_batch: {path} is a number (no dims), so it has no rows to cut. Use "
                "torchpmap.replicate for a value that all devices need."
            )
        lengths[path] = x.shape[0]
    counts = Counter(lengths.values())
    if len(counts) > 1:
        most = counts.most_common(1)[0][0]
        other = next(path for path, length in lengths.items() if length != most)
        like = next(path for path, length in lengths.items() if length == most)
        raise ValueError(
            f"shard_batch: all leaves of a batch must have the same number of rows (dim 0), but "
            f"{like} has {most} and {other} has {lengths[other]}."
        )
    if not counts or not (length := counts.most_common(1)[0][0]):
        raise ValueError("shard_batch: the batch has no rows. Leave out empty batches.")
    return length


def _stack(x: torch.Tensor, num_devices: int, last: torch.Tensor) -> torch.Tensor:
    """[n, *s] -> [d, ceil(n/d), *s], filled up with copies of ``last``."""
    missing = -len(x) % num_devices
    if missing:
        x = torch.cat([x, last.expand(missing, *x.shape[1:])])
    return x.unflatten(0, (num_devices, -1))
