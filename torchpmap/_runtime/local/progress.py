"""How far every worker has come: numbers in memory that they all share, and a bell.

A worker writes the number of each command it is done with.  A waiting thread of the controller
writes, for each rank that it waits for, the number that it wants, and sleeps; the last worker to
reach it rings.  So waiting for a finished value costs no message, and waiting for an unfinished one
costs a single wake-up.

::

    controller:  wanted[0] = wanted[2] = 7; until numbers[0, 2] >= 7: sleep until the bell rings
    worker:      numbers[rank] = 7; if numbers >= wanted for every rank that is waited for: ring

Nothing orders these stores and loads of different processors, so in rare cases each side misses
what the other has just written.  Therefore no sleep is long, and the thread looks again; so an
extra ring does no harm either.  Only one thread may sleep, because a ring wakes only one.  Others
look again and again meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
import time
from array import array
from collections.abc import Callable, Sequence

from torchpmap._runtime.local.waits import Rank

_SLEEP_MS = 50
"""How long a thread sleeps before it looks again."""
_LEAST_S, _MOST_S = 0.0002, 0.02
"""How soon, and how late, a thread looks again while another one sleeps."""
_NO_WAITER = 2**62
"""Stands in the place of a number that no thread wants."""


DONE, WANTED, FUNCTION, AT, HOST, COMPILES = range(6)
"""The numbers of a rank: the command that it is done with; the one that a thread waits for; the
last function or compilation that it has begun; then as in ``waits.Rank``.  The first of all ranks
come before the second of all ranks.
"""


def _size_of(numbers: memoryview) -> int:
    """How many ranks there are."""
    return len(numbers) // 6


def _late(numbers: memoryview) -> list[int]:
    """The ranks that a sleeping thread waits for."""
    size = _size_of(numbers)
    return [k for k in range(size) if numbers[k] < numbers[size + k] < _NO_WAITER]


class Progress:
    """The controller's side (any thread; the owner must call ``close``)."""

    def __init__(self, size: int) -> None:
        with contextlib.ExitStack() as undo:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._bell)
            self._fd = os.memfd_create("torchpmap-progress", os.MFD_CLOEXEC)
            undo.callback(os.close, self._fd)
            os.truncate(self._fd, 6 * 8 * size)
            memory = mmap.mmap(self._fd, 6 * 8 * size)
            undo.pop_all()
        self._sleeping = threading.Lock()  # held by the thread that sleeps
        self._is_closed = False
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._numbers = memoryview(memory).cast("q")
        self._numbers[size : 2 * size] = memoryview(array("q", [_NO_WAITER] * size))

    def inherited(self) -> tuple[int, int]:
        """The memory and the bell, for ``WorkerProgress``."""
        return self._fd, self._bell

    def __getitem__(self, rank: int) -> int:
        """The last command that ``rank`` is done with."""
        return self._numbers[rank]

    def reached(self, seq: int, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are done with everything up to command ``seq``."""
        numbers = self._numbers
        return all(numbers[rank] >= seq for rank in ranks)

    def wait(self, seq: int, ranks: Sequence[int], is_vain: Callable[[], bool]) -> bool:
        """Wait until ``reached``; False as soon as ``is_vain``, of which ``ring`` tells."""
        begin = time.monotonic()
        while not self.reached(seq, ranks):
            if is_vain():
                return False
            passed = time.monotonic() - begin
            if self._sleeping.acquire(timeout=min(max(_LEAST_S, passed / 8), _MOST_S)):
                try:
                    while not self.reached(seq, ranks) and not is_vain():
                        self._sleep(seq, ranks)
                finally:
                    self._sleeping.release()
                    if self._is_closed:
                        self.close()
        return True

    def _sleep(self, seq: int, ranks: Sequence[int]) -> None:
        """Sleep until the bell rings, or for a moment."""
        numbers = self._numbers
        size = _size_of(numbers)
        for rank in ranks:
            numbers[size + rank] = seq
        try:
            if not self.reached(seq, ranks) and self._poll.poll(_SLEEP_MS):
                os.eventfd_read(self._bell)
        finally:
            for rank in ranks:
                numbers[size + rank] = _NO_WAITER

    def awaited(self) -> list[int]:
        """The ranks that the sleeping thread, if there is one, waits for."""
        return _late(self._numbers)

    def begun(self) -> list[int]:
        """For each rank, the last function or compilation that it has begun."""
        size = _size_of(self._numbers)
        return self._numbers[FUNCTION * size : AT * size].tolist()

    def rank(self, rank: int) -> Rank:
        """How far ``rank`` has come."""
        done, _, _, at, host, compiles = self._numbers[rank :: _size_of(self._numbers)].tolist()
        return Rank(done, at, host, bool(compiles))

    def ring(self) -> None:
        """Wake the sleeping thread, or the next one that would sleep."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give back the memory and the bell, as soon as no thread sleeps; the numbers stay as they
        are.  Idempotent.
        """
        self._is_closed = True
        if self._sleeping.acquire(blocking=False):  # else the thread that sleeps calls this
            # kept: no thread sleeps from now on.  Others may be reading the numbers: the memory
            # goes when they have
            self._numbers = memoryview(bytearray(self._numbers)).cast("q")
            os.close(self._bell)
            os.close(self._fd)


class WorkerProgress:
    """A worker's side."""

    def __init__(self, rank: int, memory: int, bell: int) -> None:
        self._rank = rank
        self._numbers = memoryview(mmap.mmap(memory, 0)).cast("q")
        self._wanted = _size_of(self._numbers) + rank
        self._bell = bell

    def number(self, kind: int) -> memoryview:
        """A number of this rank, as a slice of length 1."""
        place = kind * _size_of(self._numbers) + self._rank
        return self._numbers[place : place + 1]

    def note(self, seq: int) -> None:
        """Record that everything up to command ``seq`` is done."""
        numbers = self._numbers
        numbers[self._rank] = seq
        if seq >= numbers[self._wanted] and not _late(numbers):
            self.ring()

    def ring(self) -> None:
        """Wake the thread of the controller that waits."""
        os.eventfd_write(self._bell, 1)
