"""Addresses of ShardedTensors, for code that reads memory: safetensors, ``save_pretrained``.

A ShardedTensor has no memory in this process.  Its address is that of a copy, which lives as long
as a tensor that was asked.  Tensors that share a value, and their views, have addresses in one
copy: such code finds tied weights by them.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch

from torchpmap._base.errors import warn
from torchpmap._runtime.base import Handle
from torchpmap._runtime.wire import bytes_of
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.strides import whole_memory
from torchpmap._sharded.views import aliases_of, view_of

_OTHER_BYTES = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)
"""Views that are not read as the memory of their parent is."""


class HostCopy:
    """The bytes of a whole value, in the order that its strides say."""

    def __init__(self, handle: Handle, whole: torch.Tensor) -> None:
        self.handle = handle
        self.flat = whole.reshape(-1)
        memory = bytes_of(self.flat)
        weakref.finalize(self, _check_unchanged, memory, zlib.crc32(memory)).atexit = False


def host_copy(tensor: Any) -> HostCopy:
    """The copy that holds a tensor, made when it is first asked for."""
    root = tensor
    while (view := view_of(root)) and view.func not in _OTHER_BYTES:
        root = view.parent
    _, handle = root._alive()
    for alias in aliases_of(root):
        copy: HostCopy | None = getattr(alias, "_copy", None)
        if copy is not None and copy.handle is handle:
            break
    else:
        whole = whole_memory(root)
        note_gather("memory", whole.nbytes)
        copy = HostCopy(handle, whole.to_host())
    root._copy = copy
    return copy


def _check_unchanged(memory: memoryview, seen: int) -> None:
    """Runs wherever Python finds that a copy is unused, such as in a trace: so no torch here."""
    if zlib.crc32(memory) != seen:
        warn(
            "the memory of a ShardedTensor was written to by its address (data_ptr(), "
            "untyped_storage()). That is the address of a copy, so the write is lost: the value is "
            "on the devices. Write by an operation, such as x.copy_(value)."
        )
