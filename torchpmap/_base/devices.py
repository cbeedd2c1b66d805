"""Devices: what one copy of a mapped function runs on, how many there are, and their threads.

Nothing here starts a process, and only ``device_kind`` initialises CUDA: a process that has done so
can no longer fork, and the number of devices is needed before the workers exist.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from torchpmap._base.platform import Cuda, Platform, Xpu, usable_cores

CUDA = Cuda()
PLATFORMS: dict[str, Platform] = {each.name: each for each in (Platform(), CUDA, Xpu())}
if _stand_in := os.environ.get("TORCHPMAP_TEST_PLATFORM"):  # "module:class", for tests
    _module, _, _class = _stand_in.partition(":")
    _platform: Platform = getattr(importlib.import_module(_module), _class)()
    PLATFORMS[_platform.name] = _platform


def default_platform() -> Platform:
    """The kind of accelerator that this host has, else the CPU."""
    return next((each for each in _present() if each.is_default), PLATFORMS["cpu"])


def has_accelerator() -> bool:
    """Whether this host has devices of any kind besides the CPU."""
    return any(_present())


def _present() -> Iterator[Platform]:
    return (each for each in PLATFORMS.values() if each.is_hardware and each.count())


@dataclass(frozen=True, slots=True)
class Device:
    """One device: a GPU, or one worker process on the CPU.

    Args:
        id: number of the device among all devices.
        platform: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        process_index: number of the controller process that the device belongs to.
        local_hardware_id: number of the device among those that this controller process sees; None
            if it belongs to another one.

    Example:
        >>> device = Device(1, "cpu")
        >>> device, str(device)
        (Device(cpu:1), 'cpu:1')
        >>> device.torch_device
        device(type='cpu')
    """

    id: int
    platform: str
    process_index: int = 0
    local_hardware_id: int | None = field(default=None, compare=False)

    @property
    def torch_device(self) -> torch.device:
        """The torch device, as the calling process sees it; plain ``cpu`` for every CPU device.

        Raises:
            RuntimeError: this process cannot use it: it belongs to another one.
        """
        return PLATFORMS[self.platform].device(self._number())

    @property
    def device_kind(self) -> str:
        """Model of the hardware; asking for it initialises CUDA in this process.

        Raises:
            RuntimeError: it belongs to another process.
        """
        return PLATFORMS[self.platform].model(self._number())

    def _number(self) -> int:
        """Its number in this process: a worker sees only its own device, as number 0."""
        platform = PLATFORMS[self.platform]
        if not platform.is_hardware:
            return 0
        own = platform.owned
        if own is None and self.local_hardware_id is not None:
            return self.local_hardware_id
        if own is not None and own.id == self.id:
            return own.number
        mine = "" if own is None else f", which has only {self.platform}:{own.id}"
        raise RuntimeError(
            f"{self} belongs to another process (process_index {self.process_index}) than this "
            f"one{mine}. Pass tensors to it through torchpmap, or choose from "
            "torchpmap.local_devices()."
        )

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"

    def __repr__(self) -> str:
        return f"Device({self})"


def threads_per_device(num_devices: int) -> int:
    """Return how many threads each device may use for its operations."""
    return max(1, usable_cores() // num_devices)


def enumerate_devices(num_devices: int, device_type: str) -> tuple[Device, ...]:
    """Return the devices 0 to ``num_devices - 1``.

    Raises:
        ValueError: fewer GPUs than that.

    Example:
        >>> enumerate_devices(2, "cpu")
        (Device(cpu:0), Device(cpu:1))
    """
    platform = PLATFORMS[device_type]
    if platform.is_hardware and num_devices > (available := platform.count()):
        raise ValueError(
            f"{num_devices} {device_type} devices were asked for, but {available} are visible; "
            "ask for fewer, or for device_type='cpu'."
        )
    return tuple(Device(i, device_type, local_hardware_id=i) for i in range(num_devices))
