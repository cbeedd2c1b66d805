"""Memory that processes of one host share, and how they meet in it.

::

    a line of numbers per rank | aborted | token | bounds, twice | slots, twice

To meet, each rank increments its own number and waits for the numbers of the others.  It yields the
core a few times, then sleeps (a futex).  Beside the number stands the rank's purpose, so that ranks
with different purposes raise instead of exchanging wrong data.

The library of ``kernel`` does this if it is there, else Python; of the ranks that meet, some may
use either.  Stores must become visible in program order, and Python has no memory fence: so without
the library this is for x86-64 only.  Everywhere else, and between hosts, ``connect`` returns None.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import select
import sys
import time
from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchpmap._base.errors import CallTimeout, CollectiveMismatch, GroupLost
from torchpmap._runtime.groups import kernel
from torchpmap._runtime.groups.kernel import DONE, LATE, ODD

SLOT_BYTES = 1 << 19
"""Size of a slot: what is written there is still in the cache of a core when the others read it."""
_CACHE_LINE = 8
"""Numbers of a rank, in a cache line of its own: how often it has met the others, and the purpose,
the occasion and the history of its last two meetings.
"""
_YIELDS = 100
"""How often a rank yields the core before it sleeps."""
_LOOK_AROUND_NS = 50_000_000
"""How long a rank sleeps before it checks that the others are still there."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The size of the memory stays as it is."""
_FUTEX = 202 if platform.machine() == "x86_64" else 98
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
_look_around = _Timespec(0, _LOOK_AROUND_NS)


class _Memory:
    """The shared bytes, as numbers and as tensors."""

    def __init__(self, fd: int, size: int) -> None:
        """``fd``: -1 for memory that no other process has."""
        self.size = size
        self._start, total = _extent(size)
        memory = mmap.mmap(fd, total)
        self.numbers = memoryview(memory)[: self._start].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.aborted, self.token = _CACHE_LINE * size, _CACHE_LINE * (size + 1)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        width = size + 1
        bounds = self.numbers[_CACHE_LINE * (size + 2) :]
        lines = [bounds[k * width : (k + 1) * width] for k in range(2 * size)]
        self.bounds = lines[:size], lines[size:]

    def slots(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        length = self.size * SLOT_BYTES
        start = self._start + turn * length
        return self._bytes[start : start + length].view(dtype).view(self.size, -1)

    def state(self, place: int) -> kernel.State:
        """What the library knows of a rank."""
        bounds = self.address + 8 * _CACHE_LINE * (self.size + 2)
        slots = self.address + self._start
        return kernel.State(
            numbers=self.address,
            slots=(slots, slots + self.size * SLOT_BYTES),
            bounds=(bounds, bounds + 8 * self.size * (self.size + 1)),
            slot_bytes=SLOT_BYTES,
            place=place,
            size=self.size,
            sleep_ns=_LOOK_AROUND_NS,
            awaited=-1,
        )


def _extent(size: int) -> tuple[int, int]:
    """The number of bytes before the slots, and in total."""
    numbers = _CACHE_LINE * (size + 2) + 2 * size * (size + 1)
    start = -(-8 * numbers // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, start + 2 * size * SLOT_BYTES


class Peers:
    """The processes that a process shares groups with: one descriptor for each, however many groups
    there are.  Not for several threads at once.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        """By rank."""

    def add(self, pids: Mapping[int, int]) -> None:
        """``pids``: by rank.  Raises ``ProcessLookupError`` if one has ended."""
        for rank, pid in pids.items():
            if rank not in self._pidfds and pid != os.getpid():
                self._pidfds[rank] = os.pidfd_open(pid)

    def lost(self, among: Container[int] | None = None) -> list[int]:
        """The ranks, among some or all, whose processes have ended."""
        poll = select.poll()  # one for each look: no two threads may use one at the same time
        ranks = {}
        for rank, pidfd in tuple(self._pidfds.items()):
            if among is None or rank in among:
                ranks[pidfd] = rank
                poll.register(pidfd, select.POLLIN)
        return [ranks[pidfd] for pidfd, _ in poll.poll(0)]

    def close(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def _refuse_any(axis: tuple[int, ...], ranks: Sequence[int]) -> NoReturn:
    raise CollectiveMismatch(f"the ranks {list(ranks)} have done different things before")


class Occasion:
    """The call that a process runs, as numbers that are the same in all processes."""

    number = 0
    """Of the call."""
    history = 0
    """Of all that was done before with values that the ranks of the call hold."""
    axis: tuple[int, ...] = ()
    """The ranks of the call."""
    differ: Callable[[tuple[int, ...], Sequence[int]], NoReturn] = staticmethod(_refuse_any)
    """Raises, on all of the given ranks, as their histories of an axis differ (written by the
    runtime).
    """

    def begin(self, number: int, history: int, axis: tuple[int, ...]) -> None:
        self.number, self.history, self.axis = number, history, axis

    def end(self) -> None:
        self.number = self.history = 0


class Meeting:
    """One rank's part of the memory; one thread at a time uses it, but any may ``abort``.

    There are two sets of slots, used in turn: a rank that comes to the next meeting has read the
    slots of the last one.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        place: int,
        memory: _Memory,
        has_lost_peer: Callable[[], bool],
        limit_s: float,
        occasion: Occasion,
    ) -> None:
        """``ranks``: the members, as messages name them; ``place``: of this process among them;
        ``has_lost_peer``: whether another one of them has ended.
        """
        self.ranks = ranks
        self.place = place
        self._use(memory)
        self.limit_s = limit_s
        """How long it waits for the others."""
        self._occasion = occasion
        self._has_lost_peer = has_lost_peer

    def _use(self, memory: _Memory) -> None:
        self._memory, self._numbers, self.state = memory, memory.numbers, memory.state(self.place)

    def slots(self, dtype: torch.dtype) -> torch.Tensor:
        """[size, elements]: the slot of each rank for the next meeting."""
        self._refuse_interrupted()
        return self._memory.slots((self.state.met + 1) & 1, dtype)

    def bounds(self, meeting: int) -> list[memoryview]:
        """For each rank, beside its slot for a meeting: where the part for each rank begins in its
        input, and where the last part ends.
        """
        return self._memory.bounds[meeting & 1]

    def meet(self, purpose: int, *, patient: bool = False) -> int | None:
        """Wait for all ranks; returns the first that came for another purpose or on another
        occasion, if any did.

        With ``patient`` all have come then, too, and may meet again.  Without it they must not meet
        again: a late rank would read the purpose of a later meeting.
        """
        library = kernel.library()
        step = self._step if library is None else library.meet
        return self.state.odd if self.finish(purpose, step, patient) == ODD else None

    def finish(self, purpose: int, step: Callable[[Any, Any], int], given: Any) -> int:
        """Repeat a step until it is not ``LATE``, and return its answer."""
        self._refuse_interrupted()
        state, occasion = self.state, self._occasion
        state.purpose, state.occasion, state.history = purpose, occasion.number, occasion.history
        end = None
        while (answer := step(ctypes.byref(state), given)) == LATE:
            end = time.monotonic() + self.limit_s if end is None else end
            self._raise_if_in_vain(end)
        return answer

    def _refuse_interrupted(self) -> None:
        """Raise, on all ranks, if an exception ended this rank's last meeting before all had come:
        one that comes late may still read what this one would overwrite.
        """
        if self.state.awaited >= 0:
            self.abort()
            raise GroupLost("process group: an exception ended an earlier collective half-way")

    def _raise_if_in_vain(self, end: float) -> None:
        """Raise if it is in vain to wait on."""
        state = self.state
        theirs = _CACHE_LINE * state.awaited
        if self._numbers[self._memory.aborted]:
            raise GroupLost("process group: another process has left it, or it was cut")
        if self._has_lost_peer() and self._numbers[theirs] < state.met:
            raise GroupLost("process group: another process of it has ended")
        if time.monotonic() > end:
            raise CallTimeout(
                f"rank {self.ranks[state.awaited]} did not come to a collective within "
                f"torchpmap.config.timeout ({self.limit_s:g} s)"
            )

    def _step(self, _: Any, patient: bool) -> int:
        """``meet`` of ``kernel.cpp``."""
        state, numbers = self.state, self._numbers
        mine, met = _CACHE_LINE * self.place, state.met + (state.awaited < 0)
        beside = 1 + 3 * (met & 1)
        said = array("q", (state.purpose, state.occasion, state.history))
        if state.awaited < 0:
            state.met, state.odd, state.has_slept, state.awaited = met, -1, 0, 0
            numbers[mine + beside : mine + beside + 3] = said
            numbers[mine] = met
            self._wake(mine)
        while state.awaited < self._memory.size:
            theirs = _CACHE_LINE * state.awaited
            if numbers[theirs] < met and not self._has_come(theirs):
                return LATE
            if numbers[theirs + beside : theirs + beside + 3] != said:
                state.odd = state.awaited if state.odd < 0 else state.odd
                if not patient:
                    break
            state.awaited, state.has_slept = state.awaited + 1, 0
        state.awaited = -1
        return DONE if state.odd < 0 else ODD

    def _has_come(self, theirs: int) -> bool:
        state, numbers = self.state, self._numbers
        for _ in range(0 if state.has_slept else _YIELDS):
            os.sched_yield()
            if numbers[theirs] >= state.met:
                return True
        state.has_slept = 1
        seen, address = numbers[theirs], self._memory.address + 8 * theirs
        if seen < state.met and not numbers[self._memory.aborted]:
            _syscall(
                _FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.addressof(_look_around)
            )
        return numbers[theirs] >= state.met

    def purpose_of(self, place: int) -> tuple[int, int, int]:
        """The purpose, the occasion and the history of a rank at the last meeting."""
        beside = _CACHE_LINE * place + 1 + 3 * (self.state.met & 1)
        purpose, occasion, history = self._numbers[beside : beside + 3]
        return purpose, occasion, history

    def refuse_history(self) -> NoReturn:
        """Raise on all ranks, as their histories differ."""
        self._occasion.differ(self._occasion.axis, self.ranks)

    @property
    def waits(self) -> tuple[int, int] | None:
        """The purpose of this rank and the rank that it waits for; None if it does not wait (any
        thread).
        """
        state = self.state
        awaited, has_slept = state.awaited, state.has_slept
        if not has_slept or not 0 <= awaited < len(self.ranks):
            return None
        return self.purpose_of(self.place)[0], self.ranks[awaited]

    def _wake(self, number: int) -> None:
        """Wake the processes that wait for a number to change."""
        _syscall(_FUTEX, self._memory.address + 8 * number, _FUTEX_WAKE, 0x7FFFFFFF, None)

    def abort(self) -> None:
        """Make every rank raise that waits, now or later (from any thread)."""
        self._numbers[self._memory.aborted] = 1
        for place in range(self._memory.size):
            self._wake(_CACHE_LINE * place)

    def in_forked_child(self) -> None:
        """In a forked child: meeting raises, and writes no more to the shared memory."""
        self._use(_Memory(-1, self._memory.size))
        self._numbers[self._memory.aborted] = 1


def connect(
    store: dist.Store,
    ranks: Sequence[int],
    place: int,
    limit_s: float,
    occasion: Occasion,
    peers: Peers,
    wait: Callable[[Sequence[str]], None],
    *,
    willing: bool,
) -> Meeting | None:
    """Meet the other ``ranks`` for the first time; None on all of them if they cannot share memory,
    or if one of them is not ``willing``.

    ``peers`` gets them; ``wait`` waits for keys of the store.
    """
    if willing:
        kernel.seek()
    size, able = len(ranks), willing and is_able()

    def exchanged(name: str, *mine: int) -> list[list[int]]:
        store.set(f"{name}/{place}", " ".join(map(str, mine)))
        keys = [f"{name}/{k}" for k in range(size)]
        wait(keys)
        return [list(map(int, store.get(key).split())) for key in keys]

    fd, memory, token = -1, None, secrets.randbits(62)
    try:
        if place == 0 and able:
            fd = os.memfd_create("torchpmap-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.truncate(fd, _extent(size)[1])
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = _Memory(fd, size)
            memory.numbers[memory.token] = token
        members = exchanged("member", os.getpid(), fd, token)
        if place > 0 and able:
            pid, there, their_token = members[0]
            memory = _found(pid, there, their_token, size)
        shares = exchanged("shares", int(memory is not None))
    finally:
        if fd >= 0:
            os.close(fd)
    if memory is None or not all(mine for (mine,) in shares):
        return None
    pids = [pid for pid, _, _ in members]
    try:
        peers.add(dict(zip(ranks, pids, strict=True)))
    except ProcessLookupError as error:
        raise GroupLost("process group: another process of it has ended") from error
    return Meeting(ranks, place, memory, lambda: bool(peers.lost(ranks)), limit_s, occasion)


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no file of memory
        return 0


def is_able() -> bool:
    if sys.platform != "linux" or (platform.machine() != "x86_64" and kernel.library() is None):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a sandbox
        return False
    return True


def _found(pid: int, fd: int, token: int, size: int) -> _Memory | None:
    """The memory that another process made; None on another host, or without permission."""
    if fd < 0:
        return None
    try:
        here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # in another container, or on another host, the same pid and fd stand for another file.  One
        # that may shrink is not ours, and reading what it has lost would end this process
        if os.fstat(here).st_size != _extent(size)[1] or _seals(here) & _SEALS != _SEALS:
            return None
        memory = _Memory(here, size)
        return memory if memory.numbers[memory.token] == token else None
    finally:
        os.close(here)
