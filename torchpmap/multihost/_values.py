"""What the functions of ``multihost`` send: leaves as blocks, trees in two parts, digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap._base.data import DTYPES, packed, unpacked
from torchpmap._base.errors import check_array, dtype_name, kind_of
from torchpmap._base.fingerprint import as_bytes
from torchpmap._layout.layout import Layout
from torchpmap._sharded.tensor import ShardedTensor
from torchpmap._sharded.transfer import host_tensor

_DATA = (torch.Tensor, np.ndarray)
_NUMBERS = (bool, int, float, complex, np.generic)
_GIVEN, _REFUSED = b"+", b"-"


def _host(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, ShardedTensor):
        return leaf.to_host()
    return host_tensor(leaf)


@dataclass(frozen=True)
class Share:
    """The part of this process in ``all_gather`` of one leaf."""

    block: torch.Tensor
    kind: str
    """Dtype and the part of the shape that must be equal in all processes."""
    layout: Layout | None
    """Of a value that has blocks in several processes; else None."""
    is_tiled: bool

    @classmethod
    def of(cls, leaf: Any, path: str, tiled: bool) -> Share:
        if isinstance(leaf, ShardedTensor) and not leaf.is_fully_addressable:
            layout, _ = leaf._alive()
            mine = leaf.addressable_shards
            block = (
                mine[0].data
                if mine
                else torch.zeros(layout.block_shape, dtype=layout.dtype, device="cpu")
            )
            where = " ".join(map(str, layout.devices))
            return cls(block, f"{kind_of(layout.shape, layout.dtype)} on {where}", layout, False)
        if not isinstance(leaf, (*_DATA, *_NUMBERS)):
            raise TypeError(
                f"torchpmap.multihost.all_gather: {path} has type {type(leaf).__name__}, but only "
                "tensors, arrays and numbers can be gathered. Leave it out, or send it with "
                "torchpmap.multihost.broadcast."
            )
        check_array(leaf, f"torchpmap.multihost.all_gather: {path}")
        block = _host(leaf)
        is_tiled = tiled and block.dim() > 0
        shape = ["*", *block.shape[1:]] if is_tiled else block.shape
        return cls(block, kind_of(shape, block.dtype), None, is_tiled)

    def joined(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result of the leaf, from the blocks of all processes."""
        if self.layout is not None:
            whole = torch.empty(self.layout.shape, dtype=self.layout.dtype, device="cpu")
            for device, index in zip(self.layout.devices, self.layout.slices, strict=True):
                whole[index] = blocks[device.process_index]
            return whole
        return torch.cat(list(blocks)) if self.is_tiled else torch.stack(list(blocks))


def padded(block: torch.Tensor, rows: int) -> torch.Tensor:
    """Gloo gathers equal sizes only."""
    missing = rows - len(block)
    return torch.cat([block, block.new_zeros(missing, *block.shape[1:])]) if missing else block


@dataclass(frozen=True)
class Parcel:
    """A tree of one process, for the others."""

    header: bytes
    """``_GIVEN`` and the tree without its tensors, or ``_REFUSED`` and the reason."""
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, tree: Any) -> Parcel:
        tensors: list[torch.Tensor] = []

        def aside(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, _DATA):
                return None
            value = _host(leaf)
            as_bytes(value)  # if it fails, then before the others wait for the tensor
            tensors.append(value)
            return [list(value.shape), dtype_name(value.dtype), isinstance(leaf, np.ndarray)]

        try:
            return cls(_GIVEN + packed(tree, "tree", aside), tensors)
        except Exception as error:  # the others wait for a header, so they get the error
            return cls(_REFUSED + f"{type(error).__name__}: {error}".encode(errors="replace"), [])


def opened(header: bytes, what: str) -> tuple[Any, list[torch.Tensor]]:
    """A tree, and its tensors, which are still to be filled; its arrays share their memory.

    Raises:
        ValueError: the process could not send its tree.
        PmapError: this is not a header.
    """
    places: list[torch.Tensor] = []

    def place(written: Any) -> Any:
        shape, dtype, is_array = written
        places.append(torch.empty(shape, dtype=DTYPES[dtype], device="cpu"))
        return places[-1].numpy() if is_array else places[-1]

    if header.startswith(_REFUSED):
        text = header.removeprefix(_REFUSED).decode(errors="replace")
        raise ValueError(f"{what}: that process cannot give its tree: {text}")
    return unpacked(header.removeprefix(_GIVEN), place), places
