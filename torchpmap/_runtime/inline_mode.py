"""Whether mapped functions run in the calling process, and which of its tensors are replicated.

The runtime ``inline`` has no devices: all rows of a call are lanes of one ``torch.func.vmap`` in
the calling process, or run there one after the other (``serial``).  ``chosen`` selects it for a
block of code in one thread, the setting ``runtime`` for the whole script.

A replicated value is a plain tensor there, and a plain tensor does not show whether its dim 0
stands for devices.  So replicated tensors are recorded, for ``unreplicate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchpmap._base.config import config

# Per thread: a thread that is started in the block follows the settings.
_chosen: ContextVar[bool | None] = ContextVar("torchpmap_inline", default=None)
_serial: ContextVar[bool] = ContextVar("torchpmap_serial", default=False)

_replicated = WeakTensorKeyDictionary()


def active() -> bool:
    """Whether a pmap called now runs in this process."""
    here = _chosen.get()
    return config.is_inline if here is None else here


def serial() -> bool:
    """Whether the rows of an inline call (or its devices) run one after the other, not as lanes."""
    return _serial.get()


@contextmanager
def chosen(inline: bool, *, serial: bool = False) -> Iterator[None]:
    """Run mapped functions in this process, or on the devices, whatever the settings say."""
    tokens = _chosen.set(inline), _serial.set(serial)
    try:
        yield
    finally:
        _chosen.reset(tokens[0])
        _serial.reset(tokens[1])


def note_replicated(value: torch.Tensor) -> torch.Tensor:
    """Record that ``value`` stands for a value that all devices hold."""
    _replicated[value] = True
    return value


def is_replicated(value: torch.Tensor) -> bool:
    """Whether ``note_replicated`` was called with this very tensor."""
    return value in _replicated
