"""Imports of large packages, without looking for garbage meanwhile.

The modules of torch's compiler make a million objects, all of which stay.  Python's collector looks
through them again and again as their number grows, which is a quarter of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave the collector alone in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
