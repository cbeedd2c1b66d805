"""Frames between the controller and its workers.

One stream socket per worker carries both directions::

    controller --- DEFINE CALL PUT FREE TASK GROUP FORGET LOAD FETCH ... --------> worker
    controller <-- READY REPLY FAILED DRAINED ------------------------------------ worker

A frame is a fixed header and a body.  The header is the ``length`` of the body in bytes, the
``kind``, and ``seq``, the number of a command: of this one, or of the one it answers.  The body is
64-bit integers for the hot kinds, a pickle for the rare ones, raw tensor bytes for data.  Pickles
travel only over these inherited, unnamed sockets.

A frame is read whole before anything is done with it, so that a failure never leaves a rest that
would be taken for a frame.

A worker's control socket carries pairs of integers (``CONTROL``), see ``_runtime/local/worker``.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import torch

from torchpmap._base.errors import kind_of

PLAIN_LINE = "\x1e"
"""First character of a line of output that the controller prints without naming the device."""

HEADER = struct.Struct("<QQq")  # body bytes, kind, seq

# controller -> worker
DEFINE, CALL, PUT, FREE, TASK, GROUP, FORGET, LOAD, FETCH, DRAIN, REGROUP = range(1, 12)
# worker -> controller
READY, REPLY, FAILED, DRAINED = range(101, 105)

PUT_HEAD = 24
"""Bytes of a frame PUT before the description of its tensor."""
_ALIGNMENT = 16
"""The bytes of a tensor begin at a multiple of it in the body of a frame PUT: torch's code for
``complex128`` ends the process if an element does not.
"""
BUFFER_BYTES = 1 << 16
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


Room = Callable[[int, int, int, memoryview], memoryview]
"""Gives the memory for the body of a frame that is larger than the buffer: kind, seq, length, and
what of the body has arrived.
"""


class FrameReader:
    """Puts together frames from the bytes of a socket (one thread)."""

    def __init__(self, sock: socket.socket, room: Room, size: int = BUFFER_BYTES) -> None:
        self._sock = sock
        self._room = room
        self._buffer = memoryview(bytearray(size))
        self._start = self._end = 0  # the part of the buffer that is received, but not used
        self.head = (0, 0, 0)
        """Kind, seq and length of the last frame that did not fit in the buffer."""
        self._body = memoryview(b"")  # of a frame that does not fit in the buffer
        self._filled = 0
        self._lost = 0  # bytes still to come of a body for which there was no memory
        self.when_idle: Callable[[], None] | None = None
        """Called before the process waits for a frame."""

    def frames(self, flags: int = 0, most: int = MAX_BODY) -> Iterator[tuple[int, int, memoryview]]:
        """(kind, seq, body) of each frame, valid until the next one is read; large bodies are in
        the memory that was given for them.

        Args:
            flags: with ``MSG_DONTWAIT`` it ends when nothing more has arrived.
            most: it ends when so many bytes were read.

        Raises:
            EOFError: the peer is gone.
            MemoryError: there is none for the body of frame ``head``, which is skipped.
        """
        received = 0
        while True:
            while self._end - self._start >= 24 and not self._lost and not self._body:
                length, kind, seq = HEADER.unpack_from(self._buffer, self._start)
                begin = self._start + 24
                if begin + length <= self._end:
                    self._start = begin + length
                    yield kind, seq, self._buffer[begin : begin + length]
                elif 24 + length <= len(self._buffer):
                    break
                else:
                    self._begin(kind, seq, length)
            if received >= most:
                return
            try:
                if self.when_idle is not None and self._start == self._end and not self._body:
                    self.when_idle()
                received += self._receive(flags)
            except BlockingIOError:
                return
            if self._body and self._filled == len(self._body):
                body, self._body = self._body, memoryview(b"")
                yield *self.head[:2], body

    def _begin(self, kind: int, seq: int, length: int) -> None:
        """The rest of the buffer is the begin of a body that does not fit."""
        given = self._buffer[self._start + 24 : self._end]
        self.head = kind, seq, length
        self._start, self._lost = self._end, length - len(given)
        self._body = self._room(kind, seq, length, given)
        self._lost, self._filled = 0, len(given)
        self._body[: self._filled] = given

    def _receive(self, flags: int) -> int:
        """Read into the body directly if it needs more than the buffer has."""
        if self._body:
            got = self._recv(self._body[self._filled :], flags)
            self._filled += got
            return got
        rest = self._end - self._start
        if self._start and rest:
            self._buffer[:rest] = bytes(self._buffer[self._start : self._end])
        got = self._recv(self._buffer[rest:], flags)
        passed = min(self._lost, got)
        self._lost -= passed
        self._start, self._end = passed, rest + got
        return got

    def _recv(self, target: memoryview, flags: int) -> int:
        try:
            got = self._sock.recv_into(target, 0, flags)
        except ConnectionError as error:
            raise EOFError from error
        if not got:
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


@cache
def call_packer(num_ints: int) -> Callable[..., bytes]:
    """A function that packs the header of a call and ``num_ints`` numbers."""
    return struct.Struct(f"<QQ{num_ints + 1}q").pack


def put_frame(
    seq: int, handle: int, tensor: torch.Tensor, offset: int = -1, is_common: bool = False
) -> list[Buffer]:
    """Frame that stores ``tensor`` (CPU) under ``handle``, in two parts: dtype, shape, raw bytes;
    or, instead of the bytes, where a copy lies in shared memory (``is_common``: of all workers).
    """
    meta, payload = pack_ints(handle, offset, is_common, *describe(tensor)), memoryview(b"")
    if offset < 0:
        meta += bytes(-len(meta) % _ALIGNMENT)
        payload = bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
    return [HEADER.pack(len(meta) + len(payload), PUT, seq) + meta, payload]


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


def read_tensor(body: memoryview) -> torch.Tensor:
    """The tensor that a description (see ``describe``) and its bytes say.  It is in the memory of
    the body, if that is too large for a buffer.
    """
    dtype, shape, start = read_kind(body)
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size != len(body) - start:
        raise FrameError(f"broken frame: {kind_of(shape, dtype)} in {len(body) - start} bytes")
    if len(body) > BUFFER_BYTES:
        return torch.frombuffer(body[start:], dtype=torch.uint8).view(dtype).view(shape).detach()
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        bytes_of(tensor)[:] = body[start:]
    return tensor


def read_kind(body: memoryview) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Dtype and shape, and where the bytes begin, of a description in a frame PUT."""
    code, dims = struct.unpack_from("<2q", body)
    if not (0 <= code < len(DTYPES) and 0 <= 8 * dims <= len(body) - 16):
        raise FrameError(f"broken frame: a tensor of dtype {code} with {dims} dims")
    start = 16 + 8 * dims
    start += -(PUT_HEAD + start) % _ALIGNMENT
    return DTYPES[code], struct.unpack_from(f"<{dims}q", body, 16), start


def no_memory(where: str, shape: Sequence[int], dtype: torch.dtype) -> MemoryError:
    size = math.prod(shape) * dtype.itemsize
    return MemoryError(f"no memory {where} for {kind_of(shape, dtype)}: {size} bytes")
