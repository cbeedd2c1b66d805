"""``memory_stats``: what the devices of this process hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.devices import Device
from torchpmap._base.errors import size_text
from torchpmap._runtime import inline_mode
from torchpmap._runtime.current import refuse_inside
from torchpmap._runtime.everywhere import ask_devices
from torchpmap._runtime.task import Rank


@dataclass(frozen=True)
class MemoryStats:
    """Memory of one device and of its process, in bytes."""

    device: Device
    value_bytes: int
    """Of the values that live on the device; memory that several share counts once."""
    process_bytes: int
    """Of the host, in use by the process of the device, as ``top`` shows it: what several processes
    share counts in each.
    """
    shared_bytes: int
    """Of the host, through which large values pass on their way to and from the device; what
    several devices hold together counts in each.
    """
    reserved_bytes: int
    """Of the device, held by torch's allocator; 0 on a CPU, whose memory is the process's."""

    def __str__(self) -> str:
        text = (
            f"{self.device}: {size_text(self.value_bytes)} in values, "
            f"{size_text(self.process_bytes)} in the process, "
            f"{size_text(self.shared_bytes)} shared with the controller"
        )
        if self.device.platform == "cpu":
            return text
        return f"{text}, {size_text(self.reserved_bytes)} reserved on the device"


class _HowMuch:
    def answer(self, rank: Rank) -> tuple[int, int, int, int]:
        """The fields of ``MemoryStats``, in bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        is_cpu = rank.index.device.type == "cpu"
        reserved = 0 if is_cpu else torch.accelerator.memory_reserved(rank.index.device)
        usage = rank.usage()
        return usage.value_bytes, pages * os.sysconf("SC_PAGE_SIZE"), usage.shared_bytes, reserved


@boundary
def memory_stats() -> dict[Device, MemoryStats]:
    """Return how much memory each device of this process uses, once all earlier calls are done.

    Under a launcher this is the device of the calling process, and the others need not call it.
    Under ``debug.fake_pmap`` there are no devices, so the result is empty.

    Returns:
        A ``MemoryStats`` per device, in the order of ``tp.local_devices()``; ``print`` it.

    Raises:
        RuntimeError: it was called inside a mapped function.

    Example:
        >>> import torch, torchpmap as tp
        >>> x = tp.device_put(torch.zeros(4, 256), tp.devices()[:4])
        >>> for stats in tp.memory_stats().values():
        ...     print(stats)
        cpu:0: ... in values, ... MB in the process, ... shared with the controller
        ...

    Source: ``jax.Device.memory_stats``; checked in tests/profiler/test_memory.py.
    """
    refuse_inside("memory_stats")
    if inline_mode.active():
        return {}
    sizes = ask_devices("torchpmap.memory_stats", _HowMuch())
    return {device: MemoryStats(device, *each) for device, each in sizes.items()}
