"""How far every worker has come: one number per rank in memory they all share, and a bell.

A worker writes the number of each command it is done with.  A waiting thread of the controller
writes the number it waits for, and sleeps; the last worker to reach it rings.  So waiting for a
finished value costs no message, and waiting for an unfinished one costs a single wake-up.

::

    controller:  wanted = 7; until all numbers >= 7: sleep until the bell rings
    worker:      numbers[rank] = 7; if all numbers >= wanted: ring

Nothing orders these stores and loads of different processors, so in rare cases each side misses
what the other has just written.  Therefore the first sleep is short, and before a long one the
worker is *told* to ring (``RING``), which cannot be missed.  An extra ring does no harm: the woken
thread reads the numbers again.  Only one thread may sleep, because a ring wakes only one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
from collections.abc import Sequence

from torchpmap._runtime.wire import InheritedFd

_NO_WAITER = 2**62


class Progress:
    """The controller's side (any thread; the owner must call ``close``)."""

    def __init__(self, size: int) -> None:
        with contextlib.ExitStack() as undo:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._bell)
            self._fd = os.memfd_create("torchpmap-progress", os.MFD_CLOEXEC)
            undo.callback(os.close, self._fd)
            os.truncate(self._fd, 8 * (size + 2))
            self._memory = mmap.mmap(self._fd, 8 * (size + 2))
            undo.pop_all()
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        # one per rank; then the command that a thread waits for, and a bit for each of its ranks
        self._numbers = memoryview(self._memory).cast("q")
        self._numbers[-2] = _NO_WAITER

    def inherited(self) -> tuple[InheritedFd, InheritedFd]:
        """The memory and the bell, for ``WorkerProgress``."""
        return InheritedFd(self._fd), InheritedFd(self._bell)

    def __getitem__(self, rank: int) -> int:
        """The last command that ``rank`` is done with."""
        return self._numbers[rank]

    def reached(self, seq: int, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are done with everything up to command ``seq``."""
        numbers = self._numbers
        return all(numbers[rank] >= seq for rank in ranks)

    def wait(self, seq: int, ranks: Sequence[int], patience_ms: int) -> bool:
        """``reached``, after sleeping if need be (a spurious ring ends the sleep too)."""
        numbers = self._numbers
        numbers[-1] = sum([1 << rank for rank in ranks])
        numbers[-2] = seq
        try:
            if not self.reached(seq, ranks) and self._poll.poll(patience_ms):
                os.eventfd_read(self._bell)
        finally:
            numbers[-2] = _NO_WAITER
        return self.reached(seq, ranks)

    def awaited(self) -> list[int]:
        """The ranks that the sleeping thread, if there is one, waits for."""
        wanted, ranks = self._numbers[-2], self._numbers[-1]
        if wanted == _NO_WAITER:
            return []
        members = (rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
        return [rank for rank in members if self._numbers[rank] < wanted]

    def ring(self) -> None:
        """Wake the sleeping thread, or the next one that would sleep."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give back the memory and the bell (no thread sleeps, and none will); the numbers stay as
        they are.
        """
        shared, memory = self._numbers, self._memory
        self._numbers = memoryview(bytearray(shared)).cast("q")
        shared.release()
        memory.close()
        os.close(self._bell)
        os.close(self._fd)


class WorkerProgress:
    """A worker's side."""

    def __init__(self, rank: int, memory: InheritedFd, bell: InheritedFd) -> None:
        self._rank = rank
        self._numbers = memoryview(mmap.mmap(memory.fd, 0)).cast("q")
        self._bell = bell.fd

    def note(self, seq: int) -> None:
        """Record that everything up to command ``seq`` is done."""
        numbers = self._numbers
        numbers[self._rank] = seq
        if seq >= numbers[-2]:
            self._ring_if_last(numbers[-2], numbers[-1])

    def _ring_if_last(self, wanted: int, ranks: int) -> None:
        numbers = self._numbers
        if all(numbers[k] >= wanted for k in range(ranks.bit_length()) if ranks >> k & 1):
            self.ring()

    def ring(self) -> None:
        """Wake the thread of the controller that waits."""
        os.eventfd_write(self._bell, 1)
