"""The place of this process among those that a launcher started, and which device it owns.

torchrun, SLURM's ``srun`` and the ``mpirun``s each use their own environment variables for it; here
they become one ``JobPlace``.  torchrun shows all GPUs of a host to each of its processes, others
show each process only its own.  So the processes tell each other what they have chosen before
anything connects the devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchpmap._base.data import not_ours
from torchpmap._base.devices import Device
from torchpmap._base.platform import Platform

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class JobPlace:
    """One process among those that a launcher started together."""

    rank: int
    size: int
    local_rank: int
    """The rank among the processes on this host."""
    local_size: int
    host: str
    """Where process 0 can be reached."""
    port: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """The variables that ``torch.distributed`` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


_OPEN_MPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # a batch script has SLURM_PROCID too, but only srun sets SLURM_STEP_NUM_TASKS
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "mpirun": tuple(_OPEN_MPI + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    # MPICH, Intel MPI and others
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""What launchers call the rank of a process, their number, and both within its host."""


def found_place(environ: Mapping[str, str] = os.environ) -> JobPlace | None:
    """The place of this process; None if no launcher started it.

    Raises:
        ValueError: a launcher's variables are incomplete, or are no numbers.
    """
    for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        is_srun = launcher == "srun"
        if rank not in environ or size not in environ:
            continue
        if is_srun and environ[size] == "1":  # an interactive shell
            continue
        here = _tasks_here(environ) if is_srun else environ.get(local_size, "")
        numbers = environ[rank], environ[size], environ.get(local_rank, environ[rank]), here
        return _place(launcher, numbers, environ)
    return None


def _tasks_here(environ: Mapping[str, str]) -> str:
    """The number of tasks on this node: ``3(x2),1`` gives 1 on node 2."""
    counts: list[str] = []
    for count, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        counts += [count] * int(times or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else ""


def _place(launcher: str, numbers: tuple[str, ...], environ: Mapping[str, str]) -> JobPlace:
    try:
        rank, size, local_rank = (int(text) for text in numbers[:3])
        local_size = int(numbers[3]) if numbers[3] else size
        port = int(environ.get("MASTER_PORT", DEFAULT_PORT))
    except ValueError as error:
        raise ValueError(
            f"the variables that {launcher} sets say rank {numbers[0]!r} of {numbers[1]!r}, local "
            f"rank {numbers[2]!r}, but these must be whole numbers: {error}."
        ) from None
    if not 0 <= rank < size or not 0 <= local_rank < local_size:
        raise ValueError(
            f"the variables that {launcher} sets say rank {rank} of {size}, local rank "
            f"{local_rank} of {local_size}, but a rank is below its count."
        )
    host = environ.get("MASTER_ADDR") or _first_host(environ)
    if host is None:
        if size > 1 and local_size < size:
            raise ValueError(
                f"{launcher} started {size} processes on several hosts, but nothing says where "
                "rank 0 is. Set MASTER_ADDR to its host name (and MASTER_PORT to a free port)."
            )
        host = "127.0.0.1"
    return JobPlace(rank, size, local_rank, local_size, host, port, launcher)


def _first_host(environ: Mapping[str, str]) -> str | None:
    """The first of SLURM's hosts: ``node[07-09,12],gpu3`` -> ``node07``."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    if not hosts:
        return None
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", hosts)
    assert match is not None
    return match[1] + (match[2] or "")


# -- devices -------------------------------------------------------------------------------------


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
