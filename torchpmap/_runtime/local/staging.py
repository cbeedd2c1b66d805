"""Memory that the controller and workers share, for large blocks on their way.

::

    controller                      a file without a name                     worker
    store(block) -- one copy -->  | state | bytes | state | bytes | ...  -->  tensor(offset, ...)
    landing.tensor(shape)    <--  | state | bytes | state | bytes | ...  <--  one copy of its block

A block takes a *region* of the file.  On a CPU the worker's value is a view of it.  On an
accelerator the device copies from it by itself, since the worker has pinned it.  When the worker
needs the region no more, it frees it, and the next block of about this size takes it: its pages are
there already, and new pages take longer than the copy.

A worker has a file for what is sent to it.  What the controller fetches comes through one file of
the pool: each worker writes its block to its place in the whole, and the tensor that the user gets
is that memory.

A block that several workers hold lies in one more file of the pool, once.  Each of them sees the
same pages.  A page to which a worker writes becomes a copy that it alone has (``MAP_PRIVATE``), and
the worker drops these copies before it frees the region.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np
import torch

STAGED_BYTES = 1 << 18
"""Smaller blocks are copied through the socket, which is then as fast."""
_IDLE_S = 10.0
"""How long a region that no block needs keeps its memory."""
_ON_THE_WAY_BYTES = 1 << 26
"""How much may be on the way to a worker: what comes then goes through the socket, which waits for
the worker, so that calls far ahead do not fill the memory.
"""
_LENT_BYTES = 1 << 30
"""How much of the memory that workers wrote to the user may have.  What is fetched then is copied.
"""
_TRIED = 8
"""How many regions are asked whether they are free before a new one is made."""

GONE, FREE, HELD, TAKEN = range(4)
"""States of a region: taken while its block is on the way, held while the worker uses it.  Only the
controller changes one that is free, only the worker one that is taken or held.  The pages of one
that is gone are the system's again: they read as zeros.

In the file for several workers each has a state of its own, and so has the controller: it has taken
the region until it has given it to the workers.
"""
_HEAD = mmap.PAGESIZE
"""Bytes before those of the block, which begin with the states."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_FAILED = ctypes.c_void_p(-1).value
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_PUNCH_HOLE = 1 | 2  # and keep the size
_COPIED = {0b010, 0b100, 0b110}
"""Top bits of an entry of ``/proc/self/pagemap``: in memory or swapped, and no page of a file."""


def copy(block: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of any device to one of the host."""
    block = block.detach().resolve_conj().resolve_neg()
    if block.is_cpu and block.is_contiguous() and target.is_contiguous():
        # torch would copy with several threads, for whose cores it may have to wait
        ctypes.memmove(target.data_ptr(), block.data_ptr(), block.nbytes)
    else:
        target.copy_(block)


def _room(num_bytes: int) -> int:
    """How many bytes a region has for a block: one of eight sizes per power of two, so that regions
    are used again for blocks of other sizes.
    """
    step = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


class Region:
    """A part of the file in the memory of this process, as long as this object lives.

    Mapped through ``ctypes``, because ``mmap.mmap`` keeps a descriptor open for each mapping.
    """

    def __init__(self, fd: int, offset: int, room: int, own: int = 0, num_states: int = 1) -> None:
        """``own``: which state this process changes.  With another than the first, it is one of
        several workers.
        """
        self.fd = fd
        self.offset = offset
        self.room = room
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | (0 if own else mmap.MAP_POPULATE)
        self._address = _mapped(None, _HEAD + room, protection, flags, fd, offset)
        self._states = (ctypes.c_int64 * num_states).from_address(self._address + 8 * own)
        self._is_private = own > 0 and room > 0
        if self._is_private:
            self._drop_copies()
        self.used_at = 0.0
        self.is_apart = False
        """Whether the memory is no part of the file any more."""
        self.is_filled = False
        """Whether no worker writes to it until it is free."""

    @property
    def state(self) -> int:
        return GONE if self.is_apart else max(self._states)

    @state.setter
    def state(self, state: int) -> None:
        self._states[0] = state

    @property
    def is_common(self) -> bool:
        """Whether several workers can hold it (controller)."""
        return len(self._states) > 1

    def change(self, rank: int, state: int) -> None:
        """Set the state of a worker that does not hold it, or that has ended (controller)."""
        self._states[1 + rank] = state

    @property
    def address(self) -> int:
        """Of the block's bytes."""
        return self._address + _HEAD

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, at_end: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Its bytes as a tensor; ``at_end`` is called when the last view of them is gone."""
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(self.address)
        if at_end is not None:
            weakref.finalize(memory, at_end).atexit = False
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
        return tensor.detach()  # no view of another tensor

    def keep_apart(self) -> None:
        """Make it memory of this process alone, with the same bytes, also if a thread writes to it
        meanwhile.
        """
        size, protection = _HEAD + self.room, mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        if _libc.mmap(self._address, size, protection, flags, self.fd, self.offset) == _FAILED:
            raise OSError(ctypes.get_errno(), "what was fetched cannot be kept apart")
        self.is_apart = True
        # before Linux 5.14 a page is copied when it is written, and the file keeps the others
        if _libc.madvise(self._address, size, _MADV_POPULATE_WRITE) == 0:
            _libc.fallocate(self.fd, _PUNCH_HOLE, self.offset, size)

    def take(self) -> Region:
        self.state, self.is_filled = TAKEN, False
        self.used_at = time.monotonic()
        return self

    def free(self) -> None:
        """Let the controller use it for another block."""
        self.used_at = time.monotonic()
        if self._is_private and self._has_copies():
            self._drop_copies()
        if not self.is_apart:
            self.state = FREE

    def _has_copies(self) -> bool:
        """Whether a page is no more that of the file."""
        first, count = self.address // mmap.PAGESIZE, self.room // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                entries = os.pread(pages.fileno(), 8 * count, 8 * first)
        except OSError:  # it is not known
            return True
        kinds = np.unique(np.frombuffer(entries, np.uint64) >> np.uint64(61))
        return len(entries) < 8 * count or not _COPIED.isdisjoint(kinds.tolist())

    def _drop_copies(self) -> None:
        """Show the pages of the file, of which the next write makes copies."""
        # with the right to write, the system would copy each page at once
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE | _MAP_FIXED
        start = self.offset + _HEAD
        _mapped(self.address, self.room, mmap.PROT_READ, flags, self.fd, start)
        if _libc.mprotect(self.address, self.room, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "the pages of a block cannot be made private")

    def free_memory(self) -> None:
        """Give its pages back to the system, in all processes: it is gone.  One of several workers
        gives back only those with the states.
        """
        _libc.madvise(self._address, _HEAD + self.room, _MADV_REMOVE)

    def __del__(self) -> None:
        if hasattr(self, "_address"):  # else it could not be mapped
            _libc.munmap(self._address, _HEAD + self.room)


def _mapped(
    address: int | None, size: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    found: int = _libc.mmap(address, size, protection, flags, fd, offset)
    if found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return found


class Staging:
    """The controller's side (any thread; the owner must call ``close``)."""

    most = _ON_THE_WAY_BYTES
    """How much may be taken at a time, but for a block that is larger."""
    _is_closed = False

    def __init__(self, *, is_used: bool = True, num_workers: int = 0) -> None:
        """``num_workers``: how many can hold a region together; 0: it goes to one worker."""
        self._num_states = 1 + num_workers
        self.is_used = is_used and 8 * self._num_states <= _HEAD
        self.fd = os.memfd_create("torchpmap-staging", os.MFD_CLOEXEC)
        self._lock = threading.RLock()  # the end of a tensor may come anywhere
        self._regions: defaultdict[int, deque[Region]] = defaultdict(deque)  # by their room
        self._end = 0
        self._sent: deque[Region] = deque()
        """Those that were on the way when this was last looked at."""

    def store(self, block: torch.Tensor) -> Region | None:
        """Copy a block to a region, which the worker will free; None if there is no memory."""
        region = self.lend(block.nbytes)
        if region is None:
            return None
        try:
            copy(block, region.tensor(tuple(block.shape), block.dtype))
        except BaseException:  # Ctrl-C
            region.free()
            raise
        return region

    def lend(self, num_bytes: int, more: int = 0) -> Region | None:
        """A region for so many bytes, which is taken until it is freed; None if there is none.

        ``more``: how much more than ``most`` may be taken.
        """
        if not self.is_used:
            return None
        room = _room(num_bytes)
        with self._lock:
            while self._sent and self._sent[0].state != TAKEN:
                self._sent.popleft()
            if self._is_closed or not self._has_room(room, self.most + more):
                return None
            region = self._found(self._regions[room]) or self._added(room)
            if region is not None:
                self._sent.append(region)
            return region

    def _has_room(self, room: int, most: int) -> bool:
        """Whether so much more may be on the way."""
        if sum(region.room for region in self._sent) + room > most:
            self._drop_arrived()
        on_the_way = sum(region.room for region in self._sent)
        return not on_the_way or on_the_way + room <= most

    def _drop_arrived(self) -> None:
        """Some have arrived after one that has not, or are there twice: used again since."""
        self._sent = deque(dict.fromkeys(each for each in self._sent if each.state == TAKEN))

    def _found(self, regions: deque[Region]) -> Region | None:
        for _ in range(min(_TRIED, len(regions))):
            regions.rotate(-1)
            region = regions[-1]
            if region.state == FREE:
                return region.take()
        return None

    def _added(self, room: int) -> Region | None:
        size = _HEAD + room
        try:
            # asks for the memory now: a page that cannot be had later ends the process
            os.posix_fallocate(self.fd, self._end, size)
            region = Region(self.fd, self._end, room, num_states=self._num_states)
        except OSError:
            return None
        self._end += size
        self._regions[room].append(region)
        return region.take()

    def taken(self) -> list[Region]:
        """The regions that blocks use now."""
        return [each for each in self._all() if each.state in (TAKEN, HELD)]

    def _all(self) -> list[Region]:
        with self._lock:
            return [each for alike in self._regions.values() for each in alike]

    def forget(self, rank: int) -> None:
        """The worker of this rank has ended, and frees nothing any more (send lock held)."""
        with self._lock:  # which one that is gone must not see
            for region in self._all():
                region.change(rank, FREE)

    def trim(self) -> None:
        """Free regions that have not been used for a while."""
        if not self._regions or not self._lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            self._drop_arrived()  # a look at the state of one that is gone would bring a page back
            for regions in self._regions.values():
                for region in tuple(regions):
                    is_idle = now - region.used_at > _IDLE_S
                    if is_idle and self._is_lost(region):
                        region.free()
                    elif is_idle and region.state == FREE:
                        region.free_memory()
                        regions.remove(region)
                    elif region.is_apart:
                        regions.remove(region)
        finally:
            self._lock.release()

    def _is_lost(self, region: Region) -> bool:
        """Whether it is taken, but Ctrl-C has come before anything could free it."""
        return False

    def in_forked_child(self) -> None:
        """In a forked child: a thread that is not there may hold the lock."""
        self._lock = threading.RLock()
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._is_closed = True
        with self._lock:
            self._regions.clear()
            self._sent.clear()
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1


class Landing(Staging):
    """The controller's side of what it fetches; a tensor stays valid after ``close``."""

    most = _LENT_BYTES

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, is_passed_on: bool = False
    ) -> torch.Tensor | None:
        """Memory for a value, to which workers can write; None if there is none.

        Args:
            is_passed_on: it is copied and freed soon.
        """
        more = _ON_THE_WAY_BYTES if is_passed_on else 0
        region = self.lend(math.prod(shape) * dtype.itemsize, more)
        if region is None:
            return None
        address = region.address

        def free() -> None:
            _lent.pop(address, None)
            region.free()
            if self._is_closed:
                self.close()

        tensor = region.tensor(shape, dtype, free)
        _lent[address] = region
        return tensor

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        """The region in which the elements of a tensor lie, if workers can write to it."""
        region = _lent.get(tensor.untyped_storage().data_ptr())
        return region if region is not None and region.fd == self.fd else None

    def close(self) -> None:
        """No more is lent.  The file is closed when nothing lies in it (see ``_before_fork``)."""
        self._is_closed = True
        if not any(region.fd == self.fd for region in tuple(_lent.values())):
            super().close()

    def filled(self, tensor: torch.Tensor) -> None:
        """No worker writes to this tensor any more."""
        region = self.region_of(tensor)
        if region is not None:
            region.is_filled = True

    def _is_lost(self, region: Region) -> bool:
        return region.state == TAKEN and region.address not in _lent


_lent: dict[int, Region] = {}
"""Those in which tensors of this process lie, by the address of the bytes."""


def _before_fork() -> None:
    """What a child writes is not seen in its parent, nor the other way: as all memory is then,
    these bytes are copied when they are written.
    """
    for address, region in tuple(_lent.items()):
        if region.is_filled:
            region.keep_apart()
            _lent.pop(address, None)


def _in_child() -> None:
    for region in _lent.values():  # threads that are not there wait for them
        region.is_apart = True
    _lent.clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


class Staged:
    """The worker's side (main thread; a region may be freed by any)."""

    def __init__(
        self,
        fd: int,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
        rank: int | None = None,
    ):
        """``pin``: makes memory (address, bytes) one that the device can read by itself; ``rank``:
        of this worker among those that hold a region together.
        """
        self._fd = fd
        self._own = 0 if rank is None else 1 + rank
        self._pin = pin
        self._unpin = unpin
        self._regions: dict[int, Region] = {}  # by their offset
        self._is_forked = False

    def hold(self, offset: int) -> None:
        """The block of a region has arrived."""
        self._regions[offset].state = HELD

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The block of a region, which is free again when the last view of the tensor is gone.

        Raises:
            OSError: this process has no memory to map it.
        """
        try:
            region = self.region(offset, math.prod(shape) * dtype.itemsize)
        except OSError:
            Region(self._fd, offset, 0, self._own).free()
            raise

        def free() -> None:
            if not self._is_forked:
                region.free()

        return region.tensor(shape, dtype, free)

    def region(self, offset: int, num_bytes: int) -> Region:
        """The region at an offset, lent for so many bytes; raises ``OSError`` as above."""
        region = self._regions.get(offset)
        return self._added(offset, _room(num_bytes)) if region is None else region

    def _added(self, offset: int, room: int) -> Region:
        for old in [each for each in self._regions.values() if each.state == GONE]:
            self._unpin(old.address)
            old.free_memory()  # looking at its state has brought a page back
            del self._regions[old.offset]
        region = self._regions[offset] = Region(self._fd, offset, room, self._own)
        self._pin(region.address, room)
        return region

    def num_bytes(self) -> int:
        """Memory of the file."""
        return os.fstat(self._fd).st_blocks * 512

    def in_forked_child(self) -> None:
        """In a forked child: the regions are the parent's."""
        self._is_forked = True
