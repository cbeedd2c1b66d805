"""Checks that devices which run a function as plain Python all run the same collectives.

Different collectives that move equal shapes would exchange wrong numbers without an error.  So the
devices compare a *fingerprint* of each before they run it: what it does, what for (see
``axis_stack.serving``), and its *call site*: the calls in the user's code that led to it, each with
its line and column.  Two calls of a helper function have two call sites.

A call site names file, function and position in the bytecode.  It contains no path and no address,
because these differ between processes and hosts.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from types import CodeType, FrameType

import torch

from torchpmap._base.deadline import Deadline
from torchpmap._base.errors import CollectiveMismatch
from torchpmap._base.sources import users_frames
from torchpmap._base.torch_groups import group_named
from torchpmap._collectives.backend import c10d
from torchpmap._layout import axis_stack
from torchpmap._layout.axis_stack import CollectiveSignature

ADVICE = (
    "must run the same collectives in the same order, from the same lines of the script: do not "
    "put one under a condition on"
)
"""Part of the message about a mismatch."""


class Fingerprint:
    """The collective that a thread is about to run; equal on all devices or rows that agree."""

    def __init__(self, what: str, group: str = "", within: CodeType | None = None) -> None:
        """``within``: where the user's code was called from."""
        self._what = what
        self._number = axis_stack.ordinal()
        self._purpose = axis_stack.purpose()
        self._frames = list(users_frames(within))
        self.key = "|".join((what, group, self._purpose, *map(_call_site, self._frames)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def digest(self) -> bytes:
        """16 bytes that stand for the fingerprint."""
        return hashlib.blake2b(self.key.encode(), digest_size=16).digest()

    def __str__(self) -> str:
        """Includes the call site, which is right only until the thread goes on."""
        reason = f" for {self._purpose}" if self._purpose else ""
        sites = [
            f"{_file(frame.f_code) or '<string>'}:{frame.f_lineno}{_column(frame)} in "
            f"{frame.f_code.co_name}"
            for frame in self._frames
        ]
        site = f" at {', called at '.join(sites)}" if sites else ""
        return self._what + reason + (f"{site} (collective {self._number})" if site else "")


def _call_site(frame: FrameType) -> str:
    code = frame.f_code
    lines = zlib.crc32(code.co_linetable)  # with columns: two lambdas may share a line
    place = _place(code, frame.f_lasti)
    return f"{_file(code)}:{code.co_qualname}:{code.co_firstlineno}:{lines}:{place}"


@functools.lru_cache(1024)
def _place(code: CodeType, instruction: int) -> int | tuple[int, ...]:
    """Where an instruction comes from in the source; Python 3.13 may have it twice, as a call that
    stands after ``a if b else c`` is compiled for both.
    """
    found = next(itertools.islice(code.co_positions(), instruction // 2, None), ())
    place = tuple(number for number in found if number is not None)
    return place if len(place) == 4 else instruction


def _file(code: CodeType) -> str:
    """Empty for code from no file, such as a notebook cell: its name may differ by process."""
    return "" if code.co_filename.startswith("<") else code.co_filename.rpartition(os.sep)[2]


def _column(frame: FrameType) -> str:
    """``":12"``; empty if Python runs without columns (``-X no_debug_ranges``)."""
    place = _place(frame.f_code, frame.f_lasti)
    return f":{place[2] + 1}" if isinstance(place, tuple) else ""


class Agreement:
    """Compares the collectives of one device with those of the others during a call; made where the
    function is called, and used by that thread.
    """

    def __init__(self, name: str, ranks: Sequence[int], group: str) -> None:
        """``group``: the process group of all devices of the call."""
        self._name = name
        self._ranks = ranks
        self._group = group
        self._within = sys._getframe(1).f_code
        self._thread = threading.get_ident()
        self._mismatch: str | None = None
        """An earlier mismatch: raised again at each check, as the function may catch the error."""

    def check(self, signature: CollectiveSignature) -> bool:
        """Raise on all devices unless all are about to run the same collective; those that come to
        a ``PART`` alone get False instead, and the others wait for them.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"{self._name}: a collective ran on a thread that the function has started. The "
                "order among threads is left to chance and may differ between devices: run "
                "collectives on the thread that the function is called on."
            )
        if len(self._ranks) == 1:
            return True
        if self._mismatch is not None:
            raise CollectiveMismatch(self._mismatch)
        operation = " ".join(
            str(part) for k, part in enumerate(signature) if k != _GROUP and part != ""
        )
        mine = Fingerprint(operation, str(signature[_GROUP:]), self._within)
        part, groups = axis_stack.split(), list[tuple[str, list[str]]]()
        apart = axis_stack.apart()  # the devices that are not in it may be elsewhere
        while part is not None:  # first with those that go together: one may have gone on
            size = group_named(part.group).size()
            groups.append((part.group, [f"member {k}" for k in range(size)]))
            part = part.enclosing if part is not apart else None
        if apart is None:
            groups.append((self._group, [f"rank {k}" for k in self._ranks]))
        for group, names in groups:
            while not is_equal(mine.digest(), len(names), group):
                rows = gathered(str(mine).encode(), _ROW_BYTES, len(names), group)
                texts = [row.decode(errors="replace").rstrip() for row in rows]
                if not any(text.startswith(axis_stack.PART) for text in texts):
                    _await_all(len(names), group)
                    self._mismatch = self._told(names, texts)
                    raise CollectiveMismatch(self._mismatch)
                if signature[0] == axis_stack.PART:
                    return False
        return True

    def _told(self, names: Sequence[str], texts: Sequence[str]) -> str:
        table = "\n".join(f"  {name}: {text}" for name, text in zip(names, texts, strict=True))
        return (
            f"{self._name}: devices run different collectives, so the result would be wrong:\n"
            f"{table}\nEvery device {ADVICE} a device's own values or axis index."
        )


def is_equal(digest: bytes, size: int, group: str) -> bool:
    """Whether all ``size`` members of a process group give the same 16 bytes."""
    agree = getattr(group_named(group), "agree", None)
    if agree is not None:  # through shared memory: quicker
        equal: bool = agree(int.from_bytes(digest) >> 66)
        return equal
    return set(gathered(digest, len(digest), size, group)) == {digest}


def gathered(
    mine: bytes, length: int, size: int, group: str, device: torch.device | str = "cpu"
) -> list[bytes]:
    """Every member's bytes, cut or padded to ``length``."""
    sent = torch.frombuffer(bytearray(mine[:length].ljust(length)), dtype=torch.uint8).to(device)
    theirs = c10d.wait_tensor(c10d.all_gather_into_tensor(sent.unsqueeze(0), size, group))
    return [bytes(row.tolist()) for row in theirs.cpu()]


def _await_all(size: int, group: str) -> None:
    """Wait until all members have come here, or for a second, as one of them may have died.

    The first that raises ends its connections.  A member that still sends to it might then wait
    without end: Gloo (torch 2.13) tells operations that a connection is lost, but not a
    send that is under way (``Pair::signalException`` skips those of an ``UnboundBuffer``).
    """
    store = group_named(group).get_group_store()
    if store is None:  # members share memory
        return
    here = store.add("here", 1)
    everyone = -(-here // size) * size  # all may have been here before
    for pause in Deadline(1.0).pauses():
        if store.add("here", 0) >= everyone:
            return
        time.sleep(pause)


_GROUP = 2
"""Position of the process group in a signature."""
_ROW_BYTES = 2048
"""Length of one device's line in the message."""
