"""What a program costs: the time of devices and controller, and memory (``torchpmap.profiler``)."""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from torchpmap._base.jax_names import missing_in as _missing_in
from torchpmap.profiler._memory import MemoryStats, memory_stats
from torchpmap.profiler._trace import trace

__all__ = ["MemoryStats", "memory_stats", "trace"]

if not _TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = _missing_in(__name__)
