"""The blocks of one value on their way to the workers: which file each takes, and its frame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from torchpmap._runtime import wire
from torchpmap._runtime.local.staging import Region, Staging
from torchpmap._runtime.wire import put_frame

Stored = list[tuple[Staging, Region | None]]
"""For each block, the file that it is to take, and where it lies there; None if it does not."""


def store_blocks(
    blocks: Sequence[torch.Tensor], own: Sequence[Staging], common: Staging, stored: Stored
) -> None:
    """Copy a block for each worker: to its own file, or once for all that get the same memory.

    Whatever happens, ``stored`` has what was stored, and the caller must free it.
    """
    keys = [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()) for x in blocks]
    counts, places = Counter(keys), dict[Any, int]()
    for place, (block, file, key) in enumerate(zip(blocks, own, keys, strict=True)):
        if counts[key] == 1 or not common.is_used:
            stored.append((file, file.store(block)))
        elif (first := places.setdefault(key, place)) == place:
            stored.append((common, common.store(block)))
        else:
            stored.append(stored[first])


def free_blocks(stored: Stored) -> None:
    for region in {region for _, region in stored}:
        if region is not None:
            region.free()


def block_frames(
    seq: int, handle: int, blocks: Sequence[torch.Tensor], regions: Sequence[Region | None]
) -> list[Sequence[wire.Buffer]]:
    """For each rank, the frame that stores its block, in two parts."""
    frames: list[Sequence[wire.Buffer]] = []
    packed, previous = None, None
    for block, region in zip_longest(blocks, regions):
        if region is not None:
            frames.append(put_frame(seq, handle, block, region.offset, region.is_common))
            continue
        if block is not previous or packed is None:
            packed, previous = put_frame(seq, handle, block), block
        frames.append(packed)
    return frames
