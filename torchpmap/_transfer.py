"""Blocks to the devices and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchpmap._current import process_index, runtime
from torchpmap._layout import Layout
from torchpmap._runtimes._base import Handle, Team

__all__ = ["fetch_blocks", "fetch_row", "gather", "places_here", "store", "store_on", "team_of"]


def team_of(layout: Layout) -> Team:
    """The team that holds values of a layout, in the running pool."""
    return runtime().team(layout.ranks)


def store(layout: Layout, value: torch.Tensor) -> Handle:
    """Send a host tensor to the devices as ``layout`` says."""
    return store_on(team_of(layout), layout, value)


def store_on(team: Team, layout: Layout, value: torch.Tensor) -> Handle:
    """``store`` on a team of a given pool."""
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    if layout.is_replicated:
        return team.runtime.put(team, [value] * len(layout.ranks))
    return team.runtime.put(team, [value[index] for index in layout.slices])


def gather(layout: Layout, handle: Handle) -> torch.Tensor:
    """Fetch a whole value."""
    if layout.is_replicated:
        return fetch_blocks(layout, handle, [_first_here(layout)])[0]
    whole = torch.empty(layout.shape, dtype=layout.dtype)
    parts = [whole[index] for index in layout.slices]
    direct = all(part.is_contiguous() for part in parts)
    targets = (
        parts if direct else [torch.empty(layout.block_shape, dtype=layout.dtype) for _ in parts]
    )
    handle.team.runtime.fetch(
        handle, [(place, -1, 0, target) for place, target in enumerate(targets)]
    )
    if not direct:
        for part, target in zip(parts, targets, strict=True):
            part.copy_(target)
    return whole


def places_here(layout: Layout) -> list[int]:
    """Which of a layout's devices belong to this process: all, with one controller."""
    here = process_index()
    return [place for place, device in enumerate(layout.devices) if device.process_index == here]


def _first_here(layout: Layout) -> int:
    """Of equal blocks the nearest."""
    return next(iter(places_here(layout)), 0)


def fetch_blocks(layout: Layout, handle: Handle, places: Sequence[int]) -> list[torch.Tensor]:
    """The blocks of the ranks at ``places``."""
    blocks = [torch.empty(layout.block_shape, dtype=layout.dtype) for _ in places]
    handle.team.runtime.fetch(
        handle, [(place, -1, 0, block) for place, block in zip(places, blocks, strict=True)]
    )
    return blocks


def fetch_row(layout: Layout, handle: Handle, row: int) -> torch.Tensor | None:
    """``x[row]`` from the device that holds it, or from the first if all do; None if it is spread
    over several.
    """
    if layout.dim == 0:
        rows = layout.shape[0] // len(layout.ranks)
        place, position = row // rows, row % rows
    elif layout.is_replicated:
        place, position = _first_here(layout), row
    else:
        return None
    target = torch.empty(layout.shape[1:], dtype=layout.dtype)
    handle.team.runtime.fetch(handle, [(place, 0, position, target)])
    return target
