"""Frames for several workers, sent whole and to all of them also if Ctrl-C comes meanwhile.

Half a frame would garble everything after it, and a call that only some ranks got leaves them
waiting for the others.  Python runs a signal handler between two steps of a program, never inside a
builtin that does not wait: so what was sent is written down by the very call that sends it
(``list.extend`` of what ``send`` returns), and that call never waits for room.  Whoever is
interrupted leaves behind exactly what remains, and the next one to send anything sends that first.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from torchpmap._wire import Buffer

__all__ = ["Outbox"]

_send = socket.socket.send
_NO_WAIT = repeat(socket.MSG_DONTWAIT)


class _Unsent(NamedTuple):
    sockets: Sequence[socket.socket]
    messages: Sequence[Buffer]
    """One for each socket."""
    sent: list[int]
    """Bytes of each message; shorter while some have not been tried."""
    later: Sequence[tuple[Sequence[socket.socket], Sequence[Buffer]]]


class Outbox:
    """Owner: whoever holds the send lock."""

    def __init__(self) -> None:
        self._unsent: _Unsent | None = None

    @property
    def is_empty(self) -> bool:
        return self._unsent is None

    def post(
        self,
        sockets: Sequence[socket.socket],
        messages: Sequence[Buffer],
        later: Sequence[Sequence[Buffer]] = (),
    ) -> None:
        """Send a message to each socket, then one of each of ``later``; waits for room.

        A peer that is gone is noticed by whoever reads, not here.
        """
        self.finish()
        sent: list[int] = []
        self._unsent = _Unsent(sockets, messages, sent, [(sockets, each) for each in later])
        try:  # noqa: SIM105 - which takes half a microsecond
            sent.extend(map(_send, sockets, messages, _NO_WAIT))
        except OSError:  # no room, or gone: ``finish`` tells
            pass
        if not later and sum(sent) == sum(map(len, messages)):
            self._unsent = None
        else:
            self.finish()

    def finish(self, *, wait: bool = True) -> bool:
        """Send what is left; False if that would mean to wait."""
        while self._unsent is not None:
            self._unsent = rest = _rest(self._unsent)
            if rest is None:
                break
            try:
                rest.sent.extend(map(_send, rest.sockets, rest.messages, _NO_WAIT))
            except BlockingIOError:
                if not rest.sent:
                    if not wait:
                        return False
                    _wait_for_room(rest.sockets[0])
            except OSError:  # this peer is gone
                rest.sent.append(len(rest.messages[len(rest.sent)]))
        return True


def _rest(unsent: _Unsent) -> _Unsent | None:
    sockets, messages, sent, later = unsent
    tried = [*sent, *repeat(0, len(messages) - len(sent))]
    rest = [
        (sock, memoryview(message)[count:])
        for sock, message, count in zip(sockets, messages, tried, strict=True)
        if count < len(message)
    ]
    if rest:
        return _Unsent([sock for sock, _ in rest], [view for _, view in rest], [], later)
    if later:
        return _Unsent(*later[0], [], later[1:])
    return None


def _wait_for_room(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    poll.poll()
