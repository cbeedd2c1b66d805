"""Send blocks to the devices and fetch them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchpmap._base.arrays import for_torch
from torchpmap._base.data import packed, unpacked
from torchpmap._base.errors import POOL_CLOSED, RuntimeClosed, check_array, kind_of
from torchpmap._base.fingerprint import digest, shown
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.current import devices, process_index, runtime

EQUAL = (
    "Make them equal (torchpmap.multihost.broadcast), or give each process its own rows, as mapped "
    "arguments."
)
"""What to do about different values."""
_ABSENT = [b"", "nothing"]


def team_of(layout: Layout) -> Team:
    """The team that holds values of a layout, in the running pool."""
    return runtime().team(layout.ranks)


def store(layout: Layout, value: torch.Tensor) -> Handle:
    """Send a host tensor to the devices as ``layout`` says."""
    return store_on(team_of(layout), layout, value)


def store_on(team: Team, layout: Layout, value: torch.Tensor) -> Handle:
    """As ``store``, for a team that is known."""
    if value.dtype is not layout.dtype or value.shape != layout.shape:
        raise RuntimeError(
            f"a value of type {kind_of(value.shape, value.dtype)} is to be sent where "
            f"{kind_of(layout.shape, layout.dtype)} is expected. A tensor that a mapped function "
            "closes over must keep its shape and dtype (x.data = y can change them): pass it as an "
            "argument instead."
        )
    value = value.detach()
    if value.device.type != "cpu" and not team.runtime.runs_here:
        value = value.cpu()
    if layout.is_replicated:
        return team.runtime.put(team, [value] * len(layout.ranks))
    return team.runtime.put(team, [value[index] for index in layout.slices])


def gather(layout: Layout, handle: Handle) -> torch.Tensor:
    """Fetch a whole value; of a block that several devices hold, one copy."""
    if layout.is_replicated:
        return fetch_blocks(layout, handle, places_here(layout)[:1] or [0])[0]
    owner = handle.team.runtime
    whole = owner.memory(layout.shape, layout.dtype)
    owner.fetch(handle, [(places[0], -1, 0, whole[index]) for places, index in blocks_of(layout)])
    return whole


def blocks_of(layout: Layout) -> Collection[tuple[list[int], tuple[slice, ...]]]:
    """The blocks of a value: the places of the devices that hold each, and which part it is."""
    found: dict[str, tuple[list[int], tuple[slice, ...]]] = {}
    for place, index in enumerate(layout.slices):
        found.setdefault(str(index), ([], index))[0].append(place)
    return found.values()


def places_here(layout: Layout) -> list[int]:
    """Which of a layout's devices belong to this process: all, with one controller."""
    here = process_index()
    return [place for place, device in enumerate(layout.devices) if device.process_index == here]


def is_whole_here(layout: Layout) -> bool:
    """Whether this process has all blocks of a value, or a copy of it."""
    places = places_here(layout)
    return bool(places) and (layout.is_replicated or len(places) == len(layout.devices))


def check_equal_everywhere(
    values: Mapping[str, Any],
    ranks: Sequence[int] | None = None,
    remedy: str = EQUAL,
    difference: str = "another value",
    call: tuple[str, str] | None = None,
) -> None:
    """Raise ``ValueError`` in all processes (of ``ranks``) unless all give the same tensors,
    numbers or texts, by path.

    ``call``: the new call that takes them, as messages name it, and the place of its function.  The
    processes then meet where they compare the plan of a new call: so a process that makes another
    call is found, and no collective waits for it.
    """
    digests = list(map(digest, values.values()))
    ranks = [device.id for device in devices()] if ranks is None else sorted(ranks)
    what, running = f"comparing {', '.join(values)}", runtime()
    together = digests[0] if len(digests) == 1 else digest(b"".join(digests))
    if call is None:
        are_equal = running.agree(ranks, together, what)
    else:
        what = f"comparing what the processes give to {call[0]}"
        are_equal = len(set(running.exchange(ranks, together, what, call[1]))) == 1
    if are_equal:
        return
    texts = [x if isinstance(x, str) else shown(x) for x in values.values()]
    sent = dict(zip(values, map(list, zip(digests, texts, strict=True)), strict=True))
    given = [unpacked(data) for data in running.exchange(ranks, packed(sent), what)]
    for path in dict.fromkeys(itertools.chain(*given)):
        theirs = [each.get(path, _ABSENT) for each in given]
        first = theirs[0]
        other = next((k for k, each in enumerate(theirs) if each[0] != first[0]), None)
        if other is not None:
            raise ValueError(
                f"{path} must be the same in all processes, but rank {ranks[other]} has "
                f"{difference} than rank {ranks[0]}: {theirs[other][1]}, and not {first[1]}. "
                f"{remedy}"
            )


def fetch_blocks(layout: Layout, handle: Handle, places: Sequence[int]) -> list[torch.Tensor]:
    """The blocks of the ranks at ``places``."""
    owner = handle.team.runtime
    blocks = [owner.memory(layout.block_shape, layout.dtype) for _ in places]
    owner.fetch(
        handle, [(place, -1, 0, block) for place, block in zip(places, blocks, strict=True)]
    )
    return blocks


def host_tensor(value: Any) -> torch.Tensor:
    """A tensor, numpy array or number as a CPU tensor, without a copy where possible; dtypes are
    kept.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.device.type != "cpu" else value.detach()
    if isinstance(value, np.ndarray | np.generic):
        check_array(value, "an array that is to be put on a device")
        array = for_torch(value)
        if not array.flags.writeable:  # torch warns about read-only memory
            array = array.copy()
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    if hasattr(value, "__dlpack__"):
        return host_tensor(torch.from_dlpack(value))
    return torch.as_tensor(value, device="cpu")


def check_open(tensor: Any) -> Handle:
    """The handle of an argument; raises ``RuntimeClosed`` if its pool is not the running one."""
    _, handle = tensor._alive()
    if handle.team.runtime is not runtime():
        raise RuntimeClosed(POOL_CLOSED)
    return handle
