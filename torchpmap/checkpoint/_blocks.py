"""Files of blocks, in the format of safetensors:

    8 bytes    the length n of the header, little-endian
    n bytes    JSON: {"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}, ...}
    the rest   the elements of the blocks, without gaps

The header also says where each block lies in the whole value, for torch's
``HuggingFaceStorageReader``.  A dtype that safetensors lacks is written as bytes in one dim more.

The checksums of a block are for pieces of ``PIECE_BYTES``.  They are made while it is written, and
a part of it is checked without the rest.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchpmap._base.errors import CheckpointError
from torchpmap._base.fingerprint import as_bytes
from torchpmap.checkpoint._folder import broken, created, opened

Sizes = tuple[int, ...]
Plan = Mapping[str, Sizes]
"""What is in a file: by key, the offsets of a block in the whole value."""
Written = dict[str, Any]
"""Of a file: its ``bytes``, the checksum of its ``header``, and those of its ``blocks``."""
PIECE_BYTES = 2**22
RESERVED = "__metadata__"
"""A name that a block cannot have."""
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors
_MAX_DIMS, _MAX_ELEMENTS = 64, 2**56
_NAMES = {
    **{getattr(torch, f"float{n}"): f"F{n}" for n in (16, 32, 64)},
    **{getattr(torch, f"int{n}"): f"I{n}" for n in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{n}"): f"U{n}" for n in (8, 16, 32, 64)},
    **{torch.bfloat16: "BF16", torch.complex64: "C64", torch.bool: "BOOL"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _NAMES.items()}


def stored_as(dtype: torch.dtype, shape: Sizes) -> tuple[str, Sizes]:
    """The dtype and shape of a block in its file."""
    return (_NAMES[dtype], shape) if dtype in _NAMES else ("U8", (*shape, dtype.itemsize))


def num_pieces(dtype: torch.dtype, shape: Sizes) -> int:
    """How many checksums a block has."""
    return -(-prod(shape) * dtype.itemsize // PIECE_BYTES)


def write(path: Path, plan: Plan, blocks: Mapping[str, torch.Tensor]) -> Written:
    """Write a new file, to the disk."""
    # the largest elements first, so that each block is aligned as its elements must be
    keys = sorted(plan, key=lambda key: -blocks[key].dtype.itemsize)
    entries: dict[str, Any] = {}
    places, end = {}, 0
    for key in keys:
        start, end = end, end + blocks[key].nbytes
        dtype, shape = stored_as(blocks[key].dtype, tuple(blocks[key].shape))
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        places[key] = {"saved_offsets": (*plan[key], 0)[: len(shape)]}
    dcp = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    header = json.dumps({RESERVED: {"format": "pt", **dcp}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(keys)} blocks are too many for one file: its header would have {len(header)} "
            f"bytes, and may have {_MAX_HEADER_BYTES}. Stack small tensors."
        )
    checksums: dict[str, list[int]] = {key: [] for key in keys}
    with created(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for key in keys:
            data = as_bytes(blocks[key]).numpy().data
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                file.write(piece)
                checksums[key].append(zlib.crc32(piece))
    return {"bytes": 8 + len(header) + end, "header": zlib.crc32(header), "blocks": checksums}


class Files(ExitStack):
    """The files of a checkpoint, each opened when it is needed, and closed together."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.open = cache(lambda name: self.enter_context(opened(folder, name)))


Entries = dict[str, tuple[tuple[str, Sizes], int]]
"""What a header says of each block: its dtype and shape in the file, and its first byte."""


def read_header(files: Files, name: str, size: int, checksum: int | None) -> Entries:
    """What is in a file, given its size and, if it is known, the checksum of its header.

    Raises:
        CheckpointError: it has changed since it was written.
        Exception: of any kind; it is not in the format.
    """
    file = files.open(name)
    found = os.fstat(file.fileno()).st_size
    if found != size:
        raise broken(files.folder, f"{name} has {found} bytes, but {size!r:.30} were written")
    length = int.from_bytes(file.read(8), "little")
    if length > min(_MAX_HEADER_BYTES, found - 8):
        raise broken(files.folder, f"{name} has a header of {length} bytes")
    header = file.read(length)
    if checksum is not None and zlib.crc32(header) != checksum:
        raise broken(files.folder, f"the header of {name} has changed since it was written")
    stored, entries = json.loads(header), Entries()
    stored.pop(RESERVED, None)
    origin = end = 8 + length
    for key, entry in sorted(stored.items(), key=lambda item: item[1]["data_offsets"]):
        shape = sizes_of(entry["shape"])
        start, end = end, end + prod(shape) * _ITEM_BYTES[entry["dtype"]]
        if entry["data_offsets"] != [start - origin, end - origin]:
            raise ValueError(f"{key!r:.50} is {entry!r:.150}, but lies from {start} to {end}")
        entries[key] = (entry["dtype"], shape), start
    if end != found:
        raise ValueError(f"its blocks end at byte {end} of {found}")
    return entries


def read_bytes(files: Files, name: str, entry: tuple[tuple[str, Sizes], int]) -> torch.Tensor:
    """The bytes of a whole block, as its header describes it; they are not checked."""
    (dtype, shape), start = entry
    data = torch.empty(prod(shape) * _ITEM_BYTES[dtype], dtype=torch.uint8, device="cpu")
    file = files.open(name)
    file.seek(start)
    file.readinto(data.numpy().data)
    return data


def sizes_of(value: Any) -> Sizes:
    """A list that may be the shape of a tensor; else a ``ValueError``."""
    if type(value) is not list or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value!r:.100} is no list of sizes")
    if len(value) > _MAX_DIMS or prod(size or 1 for size in value) > _MAX_ELEMENTS:
        raise ValueError(f"no tensor has the sizes {value!r:.100}")
    return tuple(value)


class Block(NamedTuple):
    """Where the elements of a block are."""

    file: str
    start: int
    checksums: list[int]

    def read(self, files: Files, shape: Sizes, first: Sizes, target: torch.Tensor) -> None:
        """Fill ``target`` with the part that begins at ``first`` of the block, which has a shape.

        Raises:
            CheckpointError: what is read is damaged.
        """
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        item = target.dtype.itemsize
        last = [k + n - 1 for k, n in zip(first, target.shape, strict=True)]
        start = item * sum(map(int.__mul__, first, strides))
        stop = item * (1 + sum(map(int.__mul__, last, strides)))
        begin = start - start % PIECE_BYTES
        end = min(stop + -stop % PIECE_BYTES, item * prod(shape))
        is_all = target.shape == shape and target.is_contiguous()
        around = torch.empty(0 if is_all else end - begin, dtype=torch.uint8, device="cpu")
        data = as_bytes(target) if is_all else around
        file = files.open(self.file)
        file.seek(self.start + begin)
        for number, piece in enumerate(data.split(PIECE_BYTES), begin // PIECE_BYTES):
            file.readinto(piece.numpy().data)
            if zlib.crc32(piece.numpy().data) != self.checksums[number]:
                where = self.start + number * PIECE_BYTES
                raise broken(
                    files.folder,
                    f"bytes {where} to {where + len(piece)} of {self.file} have changed since they "
                    "were written (the checksum differs)",
                )
        if not is_all:
            elements = data[start - begin : stop - begin].view(target.dtype)
            target.copy_(elements.as_strided(target.shape, strides))
