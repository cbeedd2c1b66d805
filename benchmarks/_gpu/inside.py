"""What is measured inside a worker: this module is imported there, and keeps its profiler."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from typing import Any

import torch

_profiler: Any = None


def pid() -> list[float]:
    return [os.getpid()]


def forget_peak() -> list[float]:
    """Peaks count from now on."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return [0]


def memory() -> list[float]:
    """Bytes in use now, and at most since ``forget_peak``; without a GPU those of the process."""
    if not torch.cuda.is_initialized():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return [peak, peak]
    torch.cuda.synchronize()
    return [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]


def start_profiler() -> list[float]:
    global _profiler
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # torch 2.11 warns about events of earlier cycles otherwise, though there is one cycle
    _profiler = torch.profiler.profile(activities=activities, acc_events=True)
    _profiler.start()
    return [0]


def stop_profiler(path: str) -> list[float]:
    """Write the trace; returns the share of time in which the GPU did nothing (-1: no GPU)."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    _profiler.stop()
    _profiler.export_chrome_trace(path)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in _profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)  # which span what happens inside
    ]
    return [idle_share(spans)]


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """The share of time, from the first begin to the last end, that no span covers.

    >>> idle_share([(0, 2), (1, 3), (5, 10)])
    0.2
    """
    if not spans:
        return -1.0
    busy, until = 0.0, min(begin for begin, _ in spans)
    first, last = until, max(end for _, end in spans)
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - busy / (last - first) if last > first else -1.0
