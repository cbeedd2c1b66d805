"""Which device each process of a job owns.

Launchers differ: torchrun shows all GPUs of a host to each of its processes, others show each
process only its own.  The processes tell each other what they have chosen before anything connects
the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchpmap._base.data import not_ours
from torchpmap._base.devices import Device
from torchpmap._base.platform import Platform
from torchpmap._runtime.torchrun.launcher import JobPlace


class Placement(NamedTuple):
    """What a process tells the others of its device."""

    host: str
    hardware: str
    """Equal only for the same device; empty if processes may share it."""
    number: int
    """Among those that the process sees: graphs, and the keys of compiled code, contain it."""

    @classmethod
    def of(cls, data: Any) -> Placement:
        """Raises ``PmapError`` if these are no data of a placement."""
        if type(data) is not tuple or tuple(map(type, data)) != (str, str, int):
            raise not_ours(f"{data!r:.100} instead of a placement")
        return cls(*data)


def devices_of(place: JobPlace, platform: Platform) -> tuple[Device, ...]:
    """The devices of a job, one per process."""
    mine = own_number(place, platform)
    return tuple(
        Device(rank, platform.name, rank, mine if rank == place.rank else None)
        for rank in range(place.size)
    )


def own_number(place: JobPlace, platform: Platform) -> int:
    """The number of this process's device among those that it sees.

    Raises:
        ValueError: there is none for it.
    """
    if not platform.is_hardware:
        return 0
    return choose(platform.count(), place.local_rank, platform.chosen())


def choose(visible: int, local_rank: int, chosen: int | None) -> int:
    """The device of a process that sees ``visible`` ones; ``chosen``: what its script has made the
    current one (``torch.cuda.set_device``), None if it has not used any.

    Raises:
        ValueError: there is none for it.
    """
    if chosen:  # 0 may be just the default
        return chosen
    number = local_rank if visible > 1 else 0  # some launchers show a process only its GPU
    if number >= visible:
        raise ValueError(
            f"local rank {local_rank} has no device of its own: {visible} are visible, and each "
            "process needs one. Start fewer processes per host, or use TORCHPMAP_DEVICE_TYPE=cpu."
        )
    return number


def refuse_shared(placements: Sequence[Placement]) -> None:
    """Raise if two processes have one device: their collectives would hang or fail.

    Raises:
        ValueError: names the first two ranks.
    """
    first: dict[str, int] = {}
    for rank, mine in enumerate(placements):
        other = first.setdefault(mine.hardware, rank)
        if mine.hardware and other != rank:
            theirs = placements[other]
            raise ValueError(
                f"rank {other} (device {theirs.number} of those that it sees, host {theirs.host}) "
                f"and rank {rank} (device {mine.number}, host {mine.host}) have the same device: "
                f"{mine.hardware}. Each process needs one of its own. Start at most as many "
                "processes per host as it has devices; if you choose devices yourself (with "
                "CUDA_VISIBLE_DEVICES, or as torch's current device), give each process another "
                "one. TORCHPMAP_DEVICE_TYPE=cpu needs none."
            )


def share_code(placements: Sequence[Placement]) -> bool:
    """Whether code that one process has compiled fits the others."""
    return len({placement.number for placement in placements}) == 1
