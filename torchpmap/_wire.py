"""Frames between the controller and its workers.

One stream socket per worker carries both directions::

    controller --- DEFINE CALL PUT FREE EAGER GROUP FORGET STOP FETCH SYNC RING ... ---> worker
    controller <-- READY DONE DATA REPLY FAILED DRAINED ------------------------------- worker

A frame is a fixed header (``length`` of the body in bytes, ``kind``, ``seq``: the number of the
command it is or answers) and a body: 64-bit integers for the hot kinds, a pickle for the rare ones,
raw tensor bytes for data.  Pickles travel only over these inherited, unnamed sockets.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any, TypeVar

import torch

__all__ = [
    "HEADER",
    "Buffer",
    "FrameReader",
    "InheritedFd",
    "Stream",
    "bytes_of",
    "frame",
    "pack_ints",
    "put_frame",
    "read_tensor",
    "unpack_ints",
]

PLAIN_LINE = "\x1e"
"""What starts a line of output that the controller prints without saying where it is from."""

HEADER = struct.Struct("<QQq")  # body bytes, kind, seq

# controller -> worker
DEFINE, CALL, PUT, FREE, EAGER, GROUP, FORGET, STOP = range(1, 9)
FETCH, SYNC, RING, DRAIN, REGROUP = range(11, 16)
# worker -> controller
READY, DONE, DATA, REPLY, FAILED, DRAINED = range(101, 107)

EAGER_OUTPUTS = 1 << 20
"""Handles reserved for the outputs of a call whose outputs are not known yet."""

MAX_FUNCTIONS = 16
"""Functions of uncompiled calls that a worker keeps; another one is sent again."""

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Stream:
    """A connected socket that takes whole frames (owner: whoever holds the send lock)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all buffers in order; a peer that is gone is noticed by whoever reads, not here."""
        try:
            if len(buffers) == 1:
                self.sock.sendall(buffers[0])
            elif sum(len(b) for b in buffers) <= 1 << 16:
                self.sock.sendall(b"".join(buffers))
            else:
                for buffer in buffers:
                    self.sock.sendall(buffer)
        except (BrokenPipeError, ConnectionResetError):
            pass


class FrameReader:
    """Buffered frames from a blocking socket; ``EOFError`` when the peer is gone."""

    def __init__(self, sock: socket.socket, size: int = 1 << 16) -> None:
        self._sock = sock
        self._bytes = bytearray(size)
        self._view = memoryview(self._bytes)
        self._start = 0
        self._end = 0

    @property
    def buffered(self) -> bool:
        """Whether bytes are already here that a poll of the socket would not show."""
        return self._start < self._end

    def header(self) -> tuple[int, int, int]:
        """(length of the body, kind, seq) of the next frame."""
        self._need(24)
        found = HEADER.unpack_from(self._bytes, self._start)
        self._start += 24
        return found

    def body(self, length: int) -> memoryview:
        """The next ``length`` bytes, valid until the next read."""
        self._need(length)
        start = self._start
        self._start = start + length
        return self._view[start : start + length]

    def into(self, target: memoryview) -> None:
        """Fill ``target`` (large payloads go straight to their place)."""
        if not len(target):  # and perhaps not writable
            return
        have = min(len(target), self._end - self._start)
        target[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(target):
            got = self._sock.recv_into(target[have:])
            if not got:
                raise EOFError
            have += got

    def _need(self, length: int) -> None:
        if self._end - self._start >= length:
            return
        if length > len(self._bytes):
            grown = bytearray(max(length, 2 * len(self._bytes)))
            grown[: self._end - self._start] = self._view[self._start : self._end]
            self._bytes, self._view = grown, memoryview(grown)
            self._start, self._end = 0, self._end - self._start
        elif self._start + length > len(self._bytes):
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        elif self._start == self._end:
            self._start = self._end = 0
        while self._end - self._start < length:
            got = self._sock.recv_into(self._view[self._end :])
            if not got:
                raise EOFError
            self._end += got


def keep_latest(kept: dict[int, T], key: int, value: T) -> None:
    """Add to what both sides keep, and drop, of the functions sent: both must do the same in the
    same order.
    """
    kept.setdefault(key, value)
    if len(kept) > MAX_FUNCTIONS:
        del kept[next(iter(kept))]


def frame(kind: int, seq: int, body: Buffer = b"") -> bytes:
    return HEADER.pack(len(body), kind, seq) + bytes(body)


def pack_ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def unpack_ints(body: memoryview) -> list[int]:
    return body.cast("q").tolist()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    # a dim of size 1 counts as contiguous with any stride, but only stride 1 can be seen as bytes
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def put_frame(seq: int, handle: int, tensor: torch.Tensor) -> list[Buffer]:
    """Frame that stores ``tensor`` (CPU) under ``handle``: dtype, shape, raw bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    payload = bytes_of(tensor)
    meta = pack_ints(handle, *describe(tensor))
    return [HEADER.pack(len(meta) + len(payload), PUT, seq) + meta, payload]


def describe(tensor: torch.Tensor) -> tuple[int, ...]:
    """(dtype code, number of dims, *shape)."""
    return (_CODES[tensor.dtype], tensor.dim(), *tensor.shape)


def read_tensor(reader: FrameReader) -> torch.Tensor:
    """A tensor from a description (see ``describe``) followed by its bytes."""
    code, dims = struct.unpack("<2q", reader.body(16))
    shape = struct.unpack(f"<{dims}q", reader.body(8 * dims))
    tensor = torch.empty(shape, dtype=_DTYPES[code])
    reader.into(bytes_of(tensor))
    return tensor


class InheritedFd:
    """A file descriptor handed to a process that is being started."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_fd, (reduction.DupFd(self.fd),)

    def socket(self) -> socket.socket:
        return socket.socket(fileno=self.fd)

    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def close(self) -> None:
        os.close(self.fd)


def _receive_fd(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())
