"""Sends frames to several workers, whole and to all of them, without waiting.

Half a frame would garble everything after it, and a call that only some ranks got leaves them
waiting for the others.  So bytes without room are kept, in order, and sent before anything that is
posted later.  The pool waits for room without the send lock.

Ctrl-C may interrupt a sender.  Python runs a signal handler between two instructions, never
inside a builtin that does not wait.  So one builtin both sends and records what was sent
(``list.extend`` of what ``send`` returns), and what remains is exactly what was not sent.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from itertools import repeat, starmap

from torchpmap._runtime.wire import NO_WAIT, Buffer

_send = socket.socket.send
_NO_WAIT = repeat(NO_WAIT)


_Later = Sequence[tuple[Sequence[socket.socket], Sequence[Buffer]]]
_Unsent = tuple[Sequence[socket.socket], Sequence[Buffer], list[int], _Later]
"""Sockets; a message for each; how many bytes of each were sent (shorter while some have not been
tried); what to send after them.  A tuple, since a class takes 0.2 us more in every call.
"""


class Outbox:
    """Owner: the holder of the send lock."""

    def __init__(self) -> None:
        self.unsent: _Unsent | None = None
        """What found no room, or what an interrupted sender left."""
        self.rounds = 0
        """How many times a full socket was emptied again."""
        self.posts = 0
        """How many were posted.  Counted in the line that keeps what is to be sent, without a call
        between the two: an interrupted sender must know whether its own was posted.
        """

    @property
    def blocked(self) -> Sequence[socket.socket]:
        """The sockets that have no room (any thread)."""
        unsent = self.unsent
        rest = None if unsent is None else _rest(unsent)
        return () if rest is None else rest[0]

    def drop(self) -> None:
        """Free what a closed pool will not send: live values keep the pool alive (any thread).  A
        sender at work may put it back, and then finds that the sockets are closed.
        """
        self.unsent = None

    def post(
        self,
        sockets: Sequence[socket.socket],
        messages: Sequence[Buffer],
        later: Sequence[Sequence[Buffer]] = (),
    ) -> None:
        """Send a message to each socket, then one of each of ``later``, as far as there is room.

        The monitor notices a peer that is gone.
        """
        following: _Later = [(sockets, each) for each in later] if later else ()
        if self.unsent is not None and not self.finish() and (unsent := self.unsent) is not None:
            queue = [*unsent[3], (sockets, messages), *following]
            kept = *unsent[:3], queue
            self.unsent, self.posts = kept, self.posts + 1
            return
        sent: list[int] = []
        self.unsent, self.posts = (sockets, messages, sent, following), self.posts + 1
        try:  # noqa: SIM105 - which takes half a microsecond
            sent.extend(map(_send, sockets, messages, _NO_WAIT))
        except OSError:  # no room, or the peer is gone: ``finish`` finds out which
            pass
        if not later and sum(sent) == sum(map(len, messages)):
            self.unsent = None
        else:
            self.finish()

    def finish(self) -> bool:
        """Send what is left, as far as there is room; returns whether nothing is left."""
        while (unsent := self.unsent) is not None:
            self.unsent = rest = _rest(unsent)
            if rest is None:
                self.rounds += 1
                break
            sockets, messages, sent, _ = rest
            while (tried := len(sent)) < len(sockets):
                left = zip(sockets[tried:], messages[tried:], _NO_WAIT, strict=False)
                try:
                    sent.extend(starmap(_send, left))
                except BlockingIOError:
                    sent.append(0)
                except OSError:  # this peer is gone
                    sent.append(len(messages[len(sent)]))
            if not any(sent):
                return False
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
        return [sock for sock, _ in rest], [view for _, view in rest], [], later
    if later:
        return *later[0], [], later[1:]
    return None


def wait_for_room(sockets: Sequence[socket.socket], patience_ms: int) -> None:
    """Wait until one of some blocked sockets has room."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # the socket of a replaced worker is closed
        for sock in sockets:
            poll.register(sock, select.POLLOUT)
        poll.poll(patience_ms)
