"""Whether mapped functions run in the calling process, and what has to be remembered if they do.

The runtime ``inline`` has no devices: all rows of a call are lanes of one ``torch.func.vmap`` in
the calling process, or run there one after the other (``serial``).  It is chosen for a block of
code (``chosen``, per thread), or for all of it by the setting ``runtime``.

A replicated value is a plain tensor there, and nothing about a plain tensor says whether its dim 0
is a dim of devices.  So the replicated ones are noted, for ``unreplicate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchpmap._base.config import config

# Per thread: a thread that is started in the block begins as configured.
_chosen: ContextVar[bool | None] = ContextVar("torchpmap_inline", default=None)
_serial: ContextVar[bool] = ContextVar("torchpmap_serial", default=False)

_replicated = WeakTensorKeyDictionary()


def active() -> bool:
    """Whether a pmap called now runs in this process."""
    here = _chosen.get()
    return config.is_inline if here is None else here


def serial() -> bool:
    """Whether the rows of such a call run one after the other, and not as lanes."""
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
    """Remember that ``value`` stands for one that all devices hold."""
    _replicated[value] = True
    return value


def is_replicated(value: torch.Tensor) -> bool:
    """Whether ``note_replicated`` was told about this very tensor."""
    return value in _replicated
