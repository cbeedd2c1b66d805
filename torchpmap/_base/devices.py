"""Devices: what one copy of a mapped function runs on, how many there are, and their threads.

Nothing here starts a process, and only ``device_kind`` initialises CUDA: a process that has done so
can no longer fork, and the number of devices is needed before the workers exist.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

MAX_DEFAULT_CPU_DEVICES = 8


@dataclass(frozen=True, slots=True)
class Device:
    """One device: a GPU, or one worker process on the CPU.

    Args:
        id: number of the device among all devices.
        platform: ``"cpu"`` or ``"cuda"``.
        process_index: number of the controller process that the device belongs to.

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

    @property
    def torch_device(self) -> torch.device:
        """The torch device of its tensors in its worker; plain ``cpu`` for every CPU device."""
        return torch.device("cpu") if self.platform == "cpu" else torch.device("cuda", self.id)

    @property
    def device_kind(self) -> str:
        """Model of the hardware; asking for it initialises CUDA in this process."""
        return "cpu" if self.platform == "cpu" else torch.cuda.get_device_name(self.id)

    def __str__(self) -> str:
        return f"{self.platform}:{self.id}"

    def __repr__(self) -> str:
        return f"Device({self})"


def usable_cores() -> int:
    """Return how many CPU cores this process may run on."""
    return len(os.sched_getaffinity(0))


def num_cuda_devices() -> int:
    """Return the number of visible GPUs, without creating a CUDA context."""
    # torch counts through NVML, so that this process can still fork; without NVML it asks the CUDA
    # runtime.
    return torch.cuda.device_count()


def default_device_type() -> str:
    """Return ``"cuda"`` if there is a GPU, else ``"cpu"``."""
    return "cuda" if num_cuda_devices() > 0 else "cpu"


def default_num_devices(device_type: str) -> int:
    """Return the number of GPUs, or one CPU device per usable core, at most 8."""
    if device_type == "cuda":
        return num_cuda_devices()
    return min(usable_cores(), MAX_DEFAULT_CPU_DEVICES)


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
    if device_type == "cuda" and num_devices > (available := num_cuda_devices()):
        raise ValueError(
            f"{num_devices} cuda devices were asked for, but {available} are visible; "
            "ask for fewer, or for device_type='cpu'."
        )
    return tuple(Device(i, device_type) for i in range(num_devices))
