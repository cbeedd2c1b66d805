"""Puts together the frames of one worker from the bytes that have arrived; never waits."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from torchpmap._runtime.wire import HEADER

_TURN_BYTES = 1 << 20
"""How much is read at once, before it is the turn of another worker."""

Room = Callable[[int, int, int], memoryview]
"""Where the body of a frame goes, by kind, seq and length."""


class Inbox:
    """Reads from a socket (one thread)."""

    def __init__(self, sock: socket.socket, room: Room) -> None:
        self._sock = sock
        self._room = room
        self._buffer = memoryview(bytearray(1 << 16))
        self._start = self._end = 0  # the part of the buffer that is received, but not used
        self._head = (0, 0)
        self._body: memoryview | None = None  # of a frame that has begun
        self._filled = 0
        self._lost = 0  # bytes still to come of a body for which there was no memory

    def frames(self) -> Iterator[tuple[int, int, memoryview]]:
        """Read what has arrived; yields (kind, seq, body) of each frame that is complete now.

        Raises:
            EOFError: the peer is gone.
            MemoryError: there is none for the body of a frame, which is skipped.
        """
        received = 0
        while received < _TURN_BYTES:
            try:
                received += self._receive()
            except BlockingIOError:
                return
            while self._advance():
                assert self._body is not None
                body, self._body = self._body, None
                yield *self._head, body

    def _receive(self) -> int:
        """Read into the body directly if it needs more than the buffer has."""
        body, buffer = self._body, self._buffer
        if body is not None:  # then the buffer is empty
            got = self._sock.recv_into(body[self._filled :], 0, socket.MSG_DONTWAIT)
            self._filled += got
        else:
            rest = self._end - self._start
            buffer[:rest] = bytes(buffer[self._start : self._end])
            got = self._sock.recv_into(buffer[rest:], 0, socket.MSG_DONTWAIT)
            self._start, self._end = 0, rest + got
        if not got:
            raise EOFError
        return got

    def _advance(self) -> bool:
        """Use what is in the buffer; returns whether a frame is complete."""
        if self._lost:
            passed = min(self._lost, self._end - self._start)
            self._start += passed
            self._lost -= passed
        if self._body is None:
            if self._end - self._start < HEADER.size:
                return False
            length, kind, seq = HEADER.unpack_from(self._buffer, self._start)
            self._start += HEADER.size
            self._head = kind, seq
            self._lost = length
            self._body = self._room(kind, seq, length)
            self._filled = self._lost = 0
        size = min(len(self._body) - self._filled, self._end - self._start)
        if size:
            here = self._buffer[self._start : self._start + size]
            self._body[self._filled : self._filled + size] = here
            self._start += size
            self._filled += size
        return self._filled == len(self._body)
