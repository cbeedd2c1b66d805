"""Frames between the controller and its workers.

One stream socket per worker carries both directions::

    controller --- DEFINE CALL PUT PLACE FREE TASK GROUP FORGET LOAD FETCH SYNC ... ---> worker
    controller <-- READY DONE DATA REPLY FAILED DRAINED ------------------------------- worker

A frame is a fixed header and a body.  The header is the ``length`` of the body in bytes, the
``kind``, and ``seq``, the number of a command: of this one, or of the one it answers.  The body is
64-bit integers for the hot kinds, a pickle for the rare ones, raw tensor bytes for data.  Pickles
travel only over these inherited, unnamed sockets.

The reader counts the bytes left of a body.  If a handler fails, the rest of its body is skipped, so
it is never taken for a frame.  Reading past a body is refused.

A worker's control socket carries pairs of integers (``CONTROL``), see ``_runtime/local/worker``.
"""

from __future__ import annotations

import enum
import math
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import TypeVar

import torch

from torchpmap._base.errors import kind_of

PLAIN_LINE = "\x1e"
"""First character of a line of output that the controller prints without naming the device."""

HEADER = struct.Struct("<QQq")  # body bytes, kind, seq

# controller -> worker
DEFINE, CALL, PUT, FREE, TASK, GROUP, FORGET, PLACE, LOAD = range(1, 10)
FETCH, SYNC, DRAIN, REGROUP = range(11, 15)
# worker -> controller
READY, DONE, DATA, REPLY, FAILED, DRAINED = range(101, 107)

MAX_BODY = 1 << 44
"""More bytes than any value has."""

CONTROL = struct.Struct("<qq")  # kind, value
ABORT, CANCEL, DUMP = 1, 2, 3
"""Leave collectives up to an epoch; end calls from a seq on; report the current activity."""

NO_SIGNAL = socket.MSG_NOSIGNAL
"""To send without SIGPIPE, which ends a process that has given it back its default."""
NO_WAIT = socket.MSG_DONTWAIT | NO_SIGNAL

TASK_OUTPUTS = 1 << 20
"""Handles reserved for the outputs of a call whose outputs are not known yet."""

MAX_BODIES = 16
"""How many functions of uncompiled calls a worker keeps; others are sent again."""

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
)
"""All of torch, in an order that is the same in all processes."""
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Origin(enum.IntEnum):
    """Where the exception of a failed call comes from; all but the first are consequences."""

    USER = 0
    COMMUNICATION = 1
    CANCELLED = 2


class FrameError(EOFError):
    """The peer sends no valid frames; nothing more can be read."""


class Stream:
    """A connected socket that takes whole frames, from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._is_torn = False

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all buffers in order; the reading side notices a peer that is gone."""
        with self._lock:
            self._is_torn = True
            try:
                if len(buffers) == 1:
                    self.sock.sendall(buffers[0], NO_SIGNAL)
                elif sum(len(b) for b in buffers) <= 1 << 16:
                    self.sock.sendall(b"".join(buffers), NO_SIGNAL)
                else:
                    for buffer in buffers:
                        self.sock.sendall(buffer, NO_SIGNAL)
            except (BrokenPipeError, ConnectionResetError):
                pass
            self._is_torn = False

    def is_torn(self) -> bool:
        """Whether a frame was sent in part; waits for a thread that is sending one."""
        with self._lock:
            return self._is_torn


class FrameReader:
    """Buffered frames from a blocking socket; ``EOFError`` when the peer is gone or sends no
    frames.
    """

    def __init__(self, sock: socket.socket, size: int = 1 << 16) -> None:
        self._sock = sock
        self._bytes = bytearray(size)
        self._view = memoryview(self._bytes)
        self._start = 0
        self._end = 0
        self.left = 0
        """Bytes of the current body that have not been read."""
        self.has_ended = False
        """Whether the socket has ended. If it has not, the exception came from elsewhere."""

    def header(self) -> tuple[int, int, int]:
        """(length of the body, kind, seq) of the next frame."""
        if self.left:
            raise self.broken(f"{self.left} bytes of a frame were not expected")
        self._need(24)
        found = HEADER.unpack_from(self._bytes, self._start)
        self._start += 24
        self.left = found[0]
        return found

    def body(self, length: int) -> memoryview:
        """The next ``length`` bytes of the body, valid until the next read.

        Without memory for them, raises ``MemoryError`` before it reads anything.
        """
        if length > self.left:
            raise self._beyond(length)
        if length > len(self._bytes):
            whole = memoryview(bytearray(length))
            self.into(whole)
            return whole
        self._need(length)
        start = self._start
        self._start = start + length
        self.left -= length
        return self._view[start : start + length]

    def into(self, target: memoryview) -> None:
        """Fill ``target`` (large payloads go straight to their place)."""
        length = len(target)
        if length > self.left:
            raise self._beyond(length)
        if not length:  # an empty target may be read-only
            return
        have = min(length, self._end - self._start)
        target[:have] = self._view[self._start : self._start + have]
        self._start += have
        self.left -= have
        while have < length:
            got = self._receive(target[have:])
            have += got
            self.left -= got

    def skip(self) -> None:
        """Pass over what is left of the body, in pieces that fit in the buffer."""
        while self.left:
            self._need(1)
            have = min(self.left, self._end - self._start)
            self._start += have
            self.left -= have

    def broken(self, why: str) -> FrameError:
        """The error to raise; the start of the next frame is no longer known."""
        self.has_ended = True
        return FrameError(f"broken frame: {why}")

    def _beyond(self, length: int) -> FrameError:
        return self.broken(f"{length} bytes are expected, but {self.left} are left")

    def _need(self, length: int) -> None:
        if self._end - self._start >= length:
            return
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + length > len(self._bytes):
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        while self._end - self._start < length:
            self._end += self._receive(self._view[self._end :])

    def _receive(self, target: memoryview) -> int:
        try:
            got = self._sock.recv_into(target)
        except ConnectionError as error:
            self.has_ended = True
            raise EOFError from error
        if not got:
            self.has_ended = True
            raise EOFError
        return got


def keep_latest(kept: dict[int, T], key: int, value: T) -> None:
    """Add a sent function to those kept, and drop the oldest if there are too many.  Controller and
    worker must do this for the same functions in the same order.
    """
    kept.setdefault(key, value)
    if len(kept) > MAX_BODIES:
        del kept[next(iter(kept))]


def frame(kind: int, seq: int, body: Buffer = b"") -> bytes:
    return HEADER.pack(len(body), kind, seq) + bytes(body)


def pack_ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


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


def place_frame(seq: int, handle: int, tensor: torch.Tensor, offset: int) -> bytes:
    """Frame that stores under ``handle`` a copy of ``tensor`` that lies in shared memory."""
    return frame(PLACE, seq, pack_ints(handle, offset, *describe(tensor)))


def describe(tensor: torch.Tensor) -> tuple[int, ...]:
    """(dtype code, number of dims, *shape)."""
    return (_CODES[tensor.dtype], tensor.dim(), *tensor.shape)


def refuse_other(tensor: torch.Tensor, expected: Sequence[int], where: str) -> None:
    """Raise unless a tensor has the dtype and shape of a description."""
    if describe(tensor) != tuple(expected):
        code, _, *shape = expected
        raise RuntimeError(
            f"the value {where} is {kind_of(tensor.shape, tensor.dtype)}, but "
            f"{kind_of(shape, DTYPES[code])} was expected: the operation that computed it gives "
            "another shape or dtype when it runs than when it is traced."
        )


def read_tensor(reader: FrameReader, where: str) -> torch.Tensor:
    """A tensor from a description (see ``describe``) followed by its bytes, the rest of the body.

    Without memory ``where``, raises ``MemoryError``; the bytes are then still to be skipped.
    """
    code, dims = struct.unpack("<2q", reader.body(16))
    if not (0 <= code < len(DTYPES) and 0 <= 8 * dims <= reader.left):
        raise reader.broken(f"a tensor of dtype {code} with {dims} dims")
    dtype, shape = DTYPES[code], struct.unpack(f"<{dims}q", reader.body(8 * dims))
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size != reader.left:
        raise reader.broken(f"{kind_of(shape, dtype)} in {reader.left} bytes")
    try:
        tensor = torch.empty(shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise no_memory(where, shape, dtype) from error
    reader.into(bytes_of(tensor))
    return tensor


def no_memory(where: str, shape: Sequence[int], dtype: torch.dtype) -> MemoryError:
    size = math.prod(shape) * dtype.itemsize
    return MemoryError(f"no memory {where} for {kind_of(shape, dtype)}: {size} bytes")


class InheritedFd:
    """A file descriptor that a worker inherited."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def socket(self) -> socket.socket:
        return socket.socket(fileno=self.fd)

    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def close(self) -> None:
        os.close(self.fd)
