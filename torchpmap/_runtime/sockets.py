"""Sockets that torch's C++ keeps to itself, found among the descriptors of this process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable


def open_sockets() -> dict[str, int]:
    """Identity and descriptor of every socket; a closed descriptor's number is used again."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            link = os.readlink(f"/proc/self/fd/{entry}")
            if link.startswith("socket:"):
                found[link] = int(entry)
    return found


def connected(fds: Iterable[int], port: int | None = None) -> list[socket.socket]:
    """Duplicates of the sockets in ``fds`` that have a peer (at ``port``)."""
    found = []
    for fd in fds:
        try:
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed by now, by an earlier attempt to connect
            continue
        peer = _peer(duplicate)
        if peer is None or (port is not None and peer[1:2] != (port,)):
            duplicate.close()
        else:
            found.append(duplicate)
    return found


def _peer(connection: socket.socket) -> tuple[object, ...] | None:
    try:
        peer = connection.getpeername()
    except OSError:
        return None
    return peer if isinstance(peer, tuple) else (peer,)  # the path of a Unix socket
