"""The store of a job, with a time limit for every answer.

A ``TCPStore`` waits without end for the answer to ``check``, ``get``, ``set``, ``add`` and
``delete_key`` (torch 2.13: only ``wait`` has a timeout).  If the host of the store is cut off, or
the process that keeps it is stopped, every process of the job would hang.  So the kernel gets time
limits for the store's socket, which is found by the port of its peer.  The store reports a passed
limit as ``DistNetworkError``.

A late answer would be taken for the answer to the next question.  So the connection is shut down at
the first failure, and all later calls fail at once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from torchpmap._runtime.sockets import connected, open_sockets

T = TypeVar("T")


class JobStore:
    """A store of ``torch.distributed``; all its calls end in time."""

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self.raw = store
        """The store to pass to torch; the limits hold there, too."""
        self._connection = _Connection(store)
        self.limit(limit_s)

    def prefixed(self, prefix: str) -> JobStore:
        """The part of this store whose keys begin with ``prefix``."""
        part = JobStore.__new__(JobStore)
        part.raw, part._connection = dist.PrefixStore(prefix, self.raw), self._connection
        return part

    def limit(self, seconds: float) -> None:
        """Set how long an answer may take from now on."""
        self._connection.limit_s = seconds
        for end in self._connection.sockets:
            limit_waits(end, seconds)

    def abort(self) -> None:
        """End all waiting for answers, from any thread; later calls fail at once."""
        self._connection.is_aborted = True
        for end in self._connection.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def check(self, keys: Sequence[str]) -> bool:
        return self._asked(self.raw.check, list(keys))

    def get(self, key: str) -> bytes:
        """The value of a key that is known to be there."""
        return self._asked(self.raw.get, key)

    def set(self, key: str, value: bytes) -> None:
        given: Any = value  # the stores take bytes, but are annotated otherwise
        self._asked(self.raw.set, key, given)

    def add(self, key: str, amount: int) -> int:
        return self._asked(self.raw.add, key, amount)

    def delete_key(self, key: str) -> None:
        self._asked(self.raw.delete_key, key)

    def _asked(self, ask: Callable[..., T], *question: Any) -> T:
        connection = self._connection
        if not connection.in_use.acquire(timeout=connection.limit_s):
            self.abort()  # another thread has waited for an answer all the while
            raise dist.DistNetworkError(f"it did not answer within {connection.limit_s:g} s")
        try:
            # asking again, torch would print a warning with a stack of C++ for each call
            if connection.is_aborted:
                raise dist.DistNetworkError("the connection to it broke off before")
            return ask(*question)
        except dist.DistNetworkError:
            self.abort()
            raise
        finally:
            connection.in_use.release()


class _Connection:
    """The connection of a store, and of all its parts."""

    def __init__(self, store: dist.Store) -> None:
        self.sockets = _connections(store)
        self.limit_s = 0.0
        self.is_aborted = False
        self.in_use = threading.Lock()

    def __del__(self) -> None:
        for end in self.sockets:
            end.close()


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Limit how long a blocking call on a socket waits for its peer, in C++ too."""
    # 0 would mean no limit
    whole, rest = divmod(max(1, int(seconds * 1e6)), 1_000_000)
    limit = struct.pack("ll", whole, rest)
    with contextlib.suppress(OSError):  # the socket is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _connections(store: dist.Store) -> list[socket.socket]:
    """Duplicates of the sockets of this process that a ``TCPStore`` may have."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return []
    return connected(open_sockets().values(), store.port)
