"""Imports of large packages without garbage collection.

The modules of torch's compiler make a million objects, which all stay.  Python's collector scans
them again and again as their number grows, which is a quarter of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off in the block."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
