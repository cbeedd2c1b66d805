"""What a program costs: the time of devices and controller, and memory (``torchpmap.profiler``)."""

from __future__ import annotations

from torchpmap.profiler._memory import MemoryStats, memory_stats
from torchpmap.profiler._trace import trace

__all__ = ["MemoryStats", "memory_stats", "trace"]
