"""A process group of CPU processes on one host, over memory that they share.

Gloo sends every byte through a socket, which costs a quarter of a millisecond for four bytes and
five times the copy for large tensors.  Here each rank copies what it gives into a slot that all can
read, says so, waits until the others have said so too, and reads theirs::

    rank 0   slot 0 <- mine | meet | out <- slot 0 + slot 1
    rank 1   slot 1 <- mine | meet | out <- slot 0 + slot 1

There are two sets of slots, used in turn: a rank that meets the others again has read all it
wanted, so one meeting for each piece of a tensor is enough.  What does not fit in a slot goes in
several pieces.

Meeting means to count up a number of one's own and to wait for those of the others, a few times by
giving up the core and then asleep (a futex).  Beside the number stands what is being done, so ranks
that do different things raise instead of exchanging nonsense.

Stores must become visible in the order in which they are made, and Python has no fence to ask for
that, so this is for x86-64 on Linux only.  Everywhere else, and between hosts, ``connect`` returns
None.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import secrets
import select
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SharedMemoryGroup", "connect"]

_SLOT_BYTES = 1 << 20
_LINE = 8
"""Numbers of a rank, in a cache line of its own: how often it has met the others, and what for (the
last two times).
"""
_YIELDS = 100
"""How often a rank gives up the core for another one before it sleeps."""
_LOOK_AROUND_NS = 50_000_000
"""How long it sleeps before it makes sure that the others are still there."""
_SMALL_BYTES = 1 << 15
"""Up to here every rank adds up everything, instead of a part that it then hands on."""
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # numbers of x86-64

_REDUCTIONS: dict[Any, tuple[str, Callable[..., torch.Tensor]]] = {
    dist.ReduceOp.SUM: ("sum", torch.add),
    dist.ReduceOp.MAX: ("max", torch.maximum),
    dist.ReduceOp.MIN: ("min", torch.minimum),
}
_OPERATIONS = (
    *(name for name, _ in _REDUCTIONS.values()),
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
_KINDS = list(itertools.product(_OPERATIONS, _DTYPES))
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_COUNT_BITS = 48


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
_look_around = _Timespec(0, _LOOK_AROUND_NS)


class _Done(dist._Work):
    """All there is to wait for is over when a collective returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True


_done = _Done()


class _Memory:
    """What the ranks of a group share::

    a line of numbers per rank | abort | token | bounds, twice | slots and a result, twice
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._start, total = _extent(size)
        memory = mmap.mmap(fd, total)
        self.numbers = memoryview(memory)[: self._start].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.aborted, self.token = _LINE * size, _LINE * (size + 1)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def slots(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """[size + 1, elements]: a slot of each rank, and the one for results."""
        view = self._views.get((turn, dtype))
        if view is None:
            length = (self.size + 1) * _SLOT_BYTES
            start = self._start + turn * length
            part = self._bytes[start : start + length].view(dtype)
            view = self._views[turn, dtype] = part.view(self.size + 1, -1)
        return view

    def bounds(self, turn: int) -> list[memoryview]:
        """For each rank, where in what it gives the part of each rank begins, and the last ends."""
        width = self.size + 1
        table = self.numbers[_LINE * width + _LINE + turn * self.size * width :]
        return [table[k * width : (k + 1) * width] for k in range(self.size)]


def _extent(size: int) -> tuple[int, int]:
    """Bytes before the slots, and in all."""
    numbers = _LINE * (size + 2) + 2 * size * (size + 1)
    start = -(-8 * numbers // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, start + 2 * (size + 1) * _SLOT_BYTES


class SharedMemoryGroup(dist.ProcessGroup):
    """Collectives run in the thread that asks for them, and are over when they return.

    One thread at a time; ``abort_waiting`` may come from any.
    """

    def __init__(self, rank: int, memory: _Memory, pids: Sequence[int], timeout_s: float) -> None:
        super().__init__(rank, memory.size)
        self._rank, self._size = rank, memory.size
        self._memory = memory
        self._numbers = memory.numbers
        self._mine = _LINE * rank
        self._others = [_LINE * k for k in range(memory.size) if k != rank]
        self._met = 0
        self._turn = 0
        self._timeout_s = timeout_s
        self._peers = select.poll()
        self._pidfds = [os.pidfd_open(pid) for pid in pids if pid != os.getpid()]
        for pidfd in self._pidfds:
            self._peers.register(pidfd, select.POLLIN)

    def close(self) -> None:
        """Let go of the others, who raise if they wait for this process."""
        self.abort_waiting()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()

    # -- meeting -----------------------------------------------------------------------------------

    def _meet(self, kind: int) -> None:
        """Return when all ranks have come here; ``kind`` is what they do."""
        numbers, mine = self._numbers, self._mine
        self._met = met = self._met + 1
        beside = 1 + (met & 1)
        numbers[mine + beside] = kind
        numbers[mine] = met
        _wake(self._memory.address + 8 * mine)
        for theirs in self._others:
            if numbers[theirs] < met:
                self._wait(theirs, met)
            if numbers[theirs + beside] != kind:
                raise self._mismatch(theirs, kind, numbers[theirs + beside])

    def _wait(self, theirs: int, met: int) -> None:
        """Return when a rank has met the others ``met`` times."""
        numbers = self._numbers
        for _ in range(_YIELDS):
            os.sched_yield()
            if numbers[theirs] >= met:
                return
        address = self._memory.address + 8 * theirs
        end = time.monotonic() + self._timeout_s
        while (seen := numbers[theirs]) < met:
            if numbers[self._memory.aborted]:
                raise RuntimeError("process group: another process has left it, or it was cut")
            if self._peers.poll(0) and numbers[theirs] < met:
                raise RuntimeError("process group: another process of it has ended")
            if time.monotonic() > end:
                raise RuntimeError(
                    f"process group: rank {theirs // _LINE} of {self._size} did not come within "
                    f"{self._timeout_s:g} s"
                )
            _sleep(address, seen)

    def _mismatch(self, theirs: int, mine: int, other: int) -> RuntimeError:
        return RuntimeError(
            f"process group: the ranks do different things: rank {self._rank} of {self._size} is "
            f"in {_described(mine)}, rank {theirs // _LINE} in {_described(other)}"
        )

    def abort_waiting(self) -> None:
        """Make every rank that waits, or will, raise (from any thread)."""
        self._numbers[self._memory.aborted] = 1
        for rank in range(self._size):
            _wake(self._memory.address + 8 * _LINE * rank)

    # -- collectives, on plain tensors -------------------------------------------------------------

    def _slots(self, dtype: torch.dtype) -> torch.Tensor:
        """The slots for the next piece."""
        self._turn ^= 1
        return self._memory.slots(self._turn, dtype)

    def _all_reduce(self, x: torch.Tensor, operation: Any) -> None:
        name, reduce = _reduction(operation)
        if self._size == 1:
            return
        kind = _kind(name, x.dtype, x.numel())
        for piece in x.view(-1).split(_SLOT_BYTES // x.element_size()):
            self._reduce_piece(piece, reduce, kind)

    def _reduce_piece(
        self, piece: torch.Tensor, reduce: Callable[..., torch.Tensor], kind: int
    ) -> None:
        rank, size, count = self._rank, self._size, piece.numel()
        slots = self._slots(piece.dtype)[:, :count]
        slots[rank].copy_(piece)
        self._meet(kind)
        if size <= 2 or count * piece.element_size() <= _SMALL_BYTES:
            _reduce_rows(slots[:size], reduce, piece)
        else:
            share = -(-count // size)
            mine = slots[:, min(rank * share, count) : min((rank + 1) * share, count)]
            _reduce_rows(mine[:size], reduce, mine[size])
            self._meet(kind)
            piece.copy_(slots[size])

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        step = _SLOT_BYTES // x.element_size()
        kind = _kind("all_gather", x.dtype, x.numel())
        columns = out.view(self._size, x.numel()).split(step, 1)
        for given, taken in zip(x.reshape(-1).split(step), columns, strict=True):
            slots = self._slots(x.dtype)[: self._size, : given.numel()]
            slots[self._rank].copy_(given)
            self._meet(kind)
            taken.copy_(slots)

    def _reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, operation: Any) -> None:
        _, reduce = _reduction(operation)
        size, step = self._size, _SLOT_BYTES // x.element_size() // self._size
        kind = _kind("reduce_scatter", x.dtype, x.numel())
        columns = x.reshape(size, out.numel()).split(step, 1)
        for given, taken in zip(columns, out.view(-1).split(step), strict=True):
            count = taken.numel()
            slots = self._slots(x.dtype)[:size, : size * count].unflatten(1, (size, count))
            slots[self._rank].copy_(given)
            self._meet(kind)
            _reduce_rows(slots[:, self._rank], reduce, taken)

    def _all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> None:
        """Row counts say what is taken from and given to each rank; without them all is even."""
        size, kind = self._size, _kind("all_to_all", x.dtype, 0)
        mine, source, target = _bounds(x, given, size), _bytes_of(x), _bytes_of(out)
        places = _bounds(out, taken, size)
        begin, longest = 0, 1
        while begin < longest:
            slots = self._slots(torch.uint8)
            bounds = self._memory.bounds(self._turn)
            bounds[self._rank][:] = mine
            piece = source[begin : begin + _SLOT_BYTES]
            slots[self._rank, : piece.numel()].copy_(piece)
            self._meet(kind)
            for rank, theirs in enumerate(bounds):
                first, last = theirs[self._rank], theirs[self._rank + 1]
                if last - first != places[rank + 1] - places[rank]:
                    raise RuntimeError(
                        f"process group: rank {rank} gives rank {self._rank} {last - first} bytes "
                        f"in all_to_all, which takes {places[rank + 1] - places[rank]}"
                    )
                low, high = max(first, begin), min(last, begin + _SLOT_BYTES)
                if low < high:
                    place = places[rank] + low - first
                    there = slots[rank, low - begin : high - begin]
                    target[place : place + high - low].copy_(there)
                longest = max(longest, theirs[size])
            begin += _SLOT_BYTES

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        kind = _kind("broadcast", x.dtype, x.numel())
        for piece in x.view(-1).split(_SLOT_BYTES // x.element_size()):
            slot = self._slots(x.dtype)[root, : piece.numel()]
            if self._rank == root:
                slot.copy_(piece)
            self._meet(kind)
            if self._rank != root:
                piece.copy_(slot)

    # -- what torch asks for (names of torch 2.13, and those before) -------------------------------

    @torch.no_grad()
    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        for x in tensors:
            if x.is_contiguous():
                self._all_reduce(x, options.reduceOp)
            else:
                dense = x.contiguous()
                self._all_reduce(dense, options.reduceOp)
                x.copy_(dense)
        return _done

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def all_gather_single_coalesced(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], options: Any = None
    ) -> _Done:
        for out, x in zip(outs, xs, strict=True):
            self._all_gather(out, x)
        return _done

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @torch.no_grad()
    def reduce_scatter_single_coalesced(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], options: Any
    ) -> _Done:
        for out, x in zip(outs, xs, strict=True):
            self._reduce_scatter(out, x, options.reduceOp)
        return _done

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @torch.no_grad()
    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        taken: Sequence[int],
        given: Sequence[int],
        options: Any = None,
    ) -> _Done:
        self._all_to_all(out, x, taken, given)
        return _done

    alltoall_base = all_to_all_single

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        for x in tensors:
            self._broadcast(x, options.rootRank)
        return _done


def connect(
    store: dist.Store, rank: int, size: int, timeout_s: float, wait: Callable[[Sequence[str]], None]
) -> SharedMemoryGroup | None:
    """This rank's part of a new group; None, on all ranks, if they cannot share memory.

    ``wait`` waits for keys of the store.
    """
    fd, memory, token = -1, None, secrets.randbits(62)
    try:
        if rank == 0 and _is_possible():
            fd = os.memfd_create("torchpmap-group", os.MFD_CLOEXEC)
            os.truncate(fd, _extent(size)[1])
            memory = _Memory(fd, size)
            memory.numbers[memory.token] = token
        members = _exchanged(store, rank, size, wait, "member", (os.getpid(), fd, token))
        if rank > 0:
            memory = _found(*members[0], size)
        has_memory = _exchanged(store, rank, size, wait, "memory", (memory is not None,))
    finally:
        if fd >= 0:
            os.close(fd)
    if memory is None or not all(has for (has,) in has_memory):
        return None
    try:
        return SharedMemoryGroup(rank, memory, [pid for pid, _, _ in members], timeout_s)
    except ProcessLookupError as error:
        raise RuntimeError("process group: another process of it has ended") from error


def _exchanged(
    store: dist.Store,
    rank: int,
    size: int,
    wait: Callable[[Sequence[str]], None],
    name: str,
    mine: tuple[int, ...],
) -> list[tuple[int, ...]]:
    """What each rank gives."""
    store.set(f"{name}/{rank}", " ".join(str(int(number)) for number in mine))
    keys = [f"{name}/{k}" for k in range(size)]
    wait(keys)
    return [tuple(map(int, store.get(key).split())) for key in keys]


def _found(pid: int, fd: int, token: int, size: int) -> _Memory | None:
    """The memory that another process has made, if it is on this host and lets us."""
    if fd < 0:
        return None
    try:
        there = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # in a container of its own the number may stand for another file
        if os.fstat(there).st_size != _extent(size)[1]:
            return None
        memory = _Memory(there, size)
        return memory if memory.numbers[memory.token] == token else None
    finally:
        os.close(there)


def _is_possible() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _wake(address: int) -> None:
    _syscall(_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, None)


def _sleep(address: int, seen: int) -> None:
    """Until the number there changes from ``seen``, and not for long."""
    _syscall(_FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.addressof(_look_around))


def _kind(name: str, dtype: torch.dtype, count: int) -> int:
    return _NUMBERS[name, dtype] << _COUNT_BITS | count


def _described(kind: int) -> str:
    name, dtype = _KINDS[kind >> _COUNT_BITS]
    count = kind & (1 << _COUNT_BITS) - 1
    return f"{name} of {dtype}" + (f" x {count}" if count else "")


def _reduction(operation: Any) -> tuple[str, Callable[..., torch.Tensor]]:
    for known, reduction in _REDUCTIONS.items():
        if operation == known:
            return reduction
    raise NotImplementedError(f"process group: this one cannot reduce with {operation}")


def _reduce_rows(
    rows: torch.Tensor, reduce: Callable[..., torch.Tensor], out: torch.Tensor
) -> None:
    """In the order of the ranks, so that all get the same bits."""
    if len(rows) == 1:
        out.copy_(rows[0])
        return
    reduce(rows[0], rows[1], out=out)
    for row in rows[2:]:
        reduce(out, row, out=out)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _bounds(x: torch.Tensor, rows: Sequence[int], size: int) -> array[int]:
    """Where, in bytes, the part of each rank begins, and where the last one ends."""
    total = x.numel() * x.element_size()
    if not rows:
        return array("q", [k * (total // size) for k in range(size + 1)])
    row = total // max(1, sum(rows))
    return array("q", [row * sum(rows[:k]) for k in range(size + 1)])
