"""A process group of CPU processes on one host, over memory that they share.

Gloo sends every byte through a socket, which costs a fifth of a millisecond for four bytes, and
several copies for large tensors.  Here each rank copies its input into a slot that all can read,
meets the others, and reads their slots::

    rank 0   slot 0 <- mine | meet | out <- slot 0 + slot 1
    rank 1   slot 1 <- mine | meet | out <- slot 0 + slot 1

An input that does not fit in a slot goes in several pieces.  A collective runs in the calling
thread, and is complete when it returns.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchpmap._base.errors import CollectiveMismatch
from torchpmap._base.torch_groups import ProcessGroup, Work
from torchpmap._runtime.groups import kernel
from torchpmap._runtime.groups.kernel import ODD, Task
from torchpmap._runtime.groups.shared_memory import SLOT_BYTES, Meeting
from torchpmap._runtime.wire import DTYPES

_SMALL_BYTES = 1 << 15
"""Up to this size every one of several ranks reduces the whole; above it, a share."""

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_NAMES: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}
_OPERATIONS = (*_REDUCE, "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute")
_KINDS = list(itertools.product(_OPERATIONS, DTYPES))
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_COUNT_BITS = 48


def _without_grad(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.no_grad`` only where it is needed: it takes a third as long as a small collective."""
    guarded = torch.no_grad()(collective)

    @functools.wraps(collective)
    def run(*args: Any) -> Any:
        return guarded(*args) if torch.is_grad_enabled() else collective(*args)

    return run


class _Done(Work):
    """Stands for a collective that has returned, and so is complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True


DONE = _Done()


class SharedMemoryGroup(ProcessGroup):  # type: ignore[misc]
    """The collectives that ``torch.ops._c10d_functional`` asks a group for."""

    def __init__(self, meeting: Meeting, calls: Mapping[int, str]) -> None:
        """``calls``: the names of calls, by the number of their ``Occasion``."""
        super().__init__(meeting.place, len(meeting.ranks))
        self.meeting = meeting
        self._calls = calls
        self._rank, self._size = meeting.place, len(meeting.ranks)

    def agree(self, number: int) -> bool:
        """Whether all ranks have come with the same number, of up to 62 bits; the group stays
        usable if they have not.
        """
        kind = -1 - number
        odd = self.meeting.meet(kind, patient=True)
        if odd is None:
            return True
        (mine, *_), (theirs, *_) = map(self.meeting.purpose_of, (self._rank, odd))
        if theirs >= 0 or theirs == mine or not self._is_same_call(odd):
            self._refuse(odd)
        return False

    def _meet(self, kind: int) -> None:
        odd = self.meeting.meet(kind)
        if odd is not None:
            self._refuse(odd)

    def _is_same_call(self, odd: int) -> bool:
        (_, mine, _), (_, theirs, _) = map(self.meeting.purpose_of, (self._rank, odd))
        return mine == theirs

    def _refuse(self, odd: int) -> NoReturn:
        what = []
        for place in (self._rank, odd):
            number, occasion, _ = self.meeting.purpose_of(place)
            call = self._calls.get(occasion)
            if number < 0:  # of a comparison, which is all that some calls are
                what.append(call or "a comparison in a call that this process has not made")
            else:
                doing = described(number)
                what.append(doing if call is None else f"{doing} in {call}")
        ranks = self.meeting.ranks
        if what[0] == what[1]:
            if self._is_same_call(odd):
                self.meeting.refuse_history()
            what[1] += " (another function)"
        raise CollectiveMismatch(
            f"rank {ranks[self._rank]} runs {what[0]}, but rank {ranks[odd]} {what[1]}. All "
            "devices must run the same collectives in the same order."
        )

    def _ran(
        self,
        kind: int,
        purpose: int,
        out: torch.Tensor,
        x: torch.Tensor,
        reduction: tuple[str, torch.dtype] | None = None,
        **more: Any,
    ) -> Task | None:
        """Run a collective of contiguous tensors in C++; None if Python must."""
        library = kernel.library()
        reduce = reduction and library and library.reduction(*reduction)
        if library is None or (reduction and reduce is None):
            return None
        task = Task(kind, x.data_ptr(), out.data_ptr(), x.nbytes, x.element_size())
        task.reduce, task.wrong = reduce, -1
        for name, value in more.items():
            setattr(task, name, value)
        answer = self.meeting.finish(purpose, library.run, ctypes.byref(task))
        if answer == ODD:
            self._refuse(self.meeting.state.odd)
        return task

    def _rows(self, purpose: int, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Give ``x`` in pieces: (where a piece begins, [size, elements]: the same of all ranks)."""
        flat = x.view(-1)
        for begin, given in _pieces(flat, SLOT_BYTES // x.element_size()):
            rows = self.meeting.slots(x.dtype)[:, : given.numel()]
            rows[self._rank].copy_(given)
            self._meet(purpose)
            yield begin, rows

    def _all_reduce(self, out: torch.Tensor, x: torch.Tensor, name: str) -> None:
        """``out`` may be ``x``."""
        if self._size == 1:
            out.copy_(x)
            return
        purpose = _kind(name, x.dtype, x.numel())
        # in pieces of up to this size every rank reduces the whole, which takes the fewest
        # operations; of others a share, that it hands on
        most = SLOT_BYTES if self._size == 2 else _SMALL_BYTES
        if self._ran(kernel.REDUCE, purpose, out, x, (name, x.dtype), whole_bytes=most):
            return
        rank, reduce, flat = self._rank, _REDUCE[name], out.view(-1)
        for begin, rows in self._rows(purpose, x):
            count = rows.shape[1]
            piece = flat[begin : begin + count]
            if piece.nbytes <= most:
                _reduce_rows(rows, reduce, piece)
                continue
            share = -(-count // self._size)
            mine = rows[:, rank * share : (rank + 1) * share]
            shares = self.meeting.slots(x.dtype)[:, :share]
            _reduce_rows(mine, reduce, shares[rank, : mine.shape[1]])
            self._meet(purpose)
            piece.copy_(shares.reshape(-1)[:count])

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        x, purpose = _dense(x), _kind("all_gather", x.dtype, x.numel())
        if not self._ran(kernel.GATHER, purpose, out, x):
            taken = out.view(self._size, x.numel())
            for begin, rows in self._rows(purpose, x):
                taken[:, begin : begin + rows.shape[1]].copy_(rows)

    def _reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, name: str) -> None:
        size, x = self._size, _dense(x)
        purpose = _kind("reduce_scatter", x.dtype, x.numel())
        if size > 1 and self._ran(
            kernel.SCATTER, purpose, out, x, (name, x.dtype), bytes=out.nbytes
        ):
            return
        taken = out.view(-1)
        for begin, given in _pieces(
            x.view(size, out.numel()), SLOT_BYTES // size // x.element_size()
        ):
            rows = self.meeting.slots(x.dtype)[:, : given.numel()].unflatten(1, given.shape)
            rows[self._rank].copy_(given)
            self._meet(purpose)
            target = taken[begin : begin + given.shape[1]]
            _reduce_rows(rows[:, self._rank], _REDUCE[name], target)

    def _all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> None:
        """``taken`` and ``given``: rows from and to each rank; empty if all are the same."""
        size, purpose = self._size, _kind("all_to_all", x.dtype, 0)
        source = _bytes_of(x)
        mine = _bounds(x.nbytes, tuple(given), size)
        places = _bounds(out.nbytes, tuple(taken), size)
        (sent, _), (got, _) = mine.buffer_info(), places.buffer_info()
        task = self._ran(kernel.EXCHANGE, purpose, out, source, given=sent, taken=got)
        if task is not None:
            if task.wrong >= 0:
                bounds = self.meeting.bounds(self.meeting.state.met)
                self._refuse_rows(task.wrong, bounds[task.wrong], places)
            return
        target = _bytes_of(out)
        begin, longest = 0, 1
        while begin < longest:
            slots = self.meeting.slots(torch.uint8)
            bounds = self.meeting.bounds(self.meeting.state.met + 1)
            bounds[self._rank][:] = mine
            piece = source[begin : begin + SLOT_BYTES]
            slots[self._rank, : piece.numel()].copy_(piece)
            self._meet(purpose)
            for rank, theirs in enumerate(bounds):
                first, last = theirs[self._rank], theirs[self._rank + 1]
                if last - first != places[rank + 1] - places[rank]:
                    self._refuse_rows(rank, theirs, places)
                low, high = max(first, begin), min(last, begin + SLOT_BYTES)
                if low < high:
                    place = places[rank] + low - first
                    there = slots[rank, low - begin : high - begin]
                    target[place : place + high - low].copy_(there)
                longest = max(longest, theirs[size])
            begin += SLOT_BYTES

    def _refuse_rows(self, rank: int, given: Sequence[int], taken: Sequence[int]) -> NoReturn:
        """``given`` by a rank, and ``taken`` by this one: where the parts begin."""
        ranks, here = self.meeting.ranks, self._rank
        raise CollectiveMismatch(
            f"rank {ranks[rank]} gives {given[here + 1] - given[here]} bytes to rank {ranks[here]} "
            f"in all_to_all, but that one expects {taken[rank + 1] - taken[rank]}"
        )

    def _move(self, name: str, out: torch.Tensor, x: torch.Tensor, source: int) -> None:
        """``out``: ``x`` of the rank ``source``; as it is, if that is -1."""
        purpose = _kind(name, x.dtype, x.numel())
        if not self._ran(kernel.MOVE, purpose, out, x, source=source):
            flat = out.view(-1)
            for begin, rows in self._rows(purpose, x):
                if source >= 0:
                    flat[begin : begin + rows.shape[1]].copy_(rows[source])

    def permute(self, x: torch.Tensor, source: int | None) -> torch.Tensor:
        """``x`` of the rank ``source``, or zeros if that is None; every rank gives its ``x``."""
        x = _dense(x)
        out = torch.zeros_like(x) if source is None else torch.empty_like(x)
        self._move("permute", out, x, -1 if source is None else source)
        return out

    def all_reduced(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The sum, max or min over the ranks."""
        x = _dense(x)
        out = torch.empty_like(x)
        self._all_reduce(out, x, name)
        return out

    # -- what torch asks for -----------------------------------------------------------------------

    @_without_grad
    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        for x in tensors:
            dense, name = _dense(x), _name_of(options.reduceOp)
            self._all_reduce(dense, dense, name)
            if dense is not x:
                x.copy_(dense)
        return DONE

    @_without_grad
    def all_gather_single_coalesced(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], options: Any = None
    ) -> _Done:
        for out, x in zip(outs, xs, strict=True):
            self._all_gather(out, x)
        return DONE

    @_without_grad
    def reduce_scatter_single_coalesced(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], options: Any
    ) -> _Done:
        for out, x in zip(outs, xs, strict=True):
            self._reduce_scatter(out, x, _name_of(options.reduceOp))
        return DONE

    @_without_grad
    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        taken: Sequence[int],
        given: Sequence[int],
        options: Any = None,
    ) -> _Done:
        self._all_to_all(out, x, taken, given)
        return DONE

    @_without_grad
    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        for x in tensors:
            root, dense = options.rootRank, _dense(x)
            self._move("broadcast", dense, dense, -1 if root == self._rank else root)
            if dense is not x:
                x.copy_(dense)
        return DONE

    # as torch 2.11 calls them
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` as the bytes in its memory say: contiguous, and with no sign or conjugate to come."""
    x = x.contiguous()
    return x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x


def _kind(name: str, dtype: torch.dtype, count: int) -> int:
    return _NUMBERS[name, dtype] << _COUNT_BITS | count


def described(kind: int) -> str:
    if kind < 0:
        return "a collective with compile=False"
    name, dtype = _KINDS[kind >> _COUNT_BITS]
    count = kind & (1 << _COUNT_BITS) - 1
    return f"{name} of {dtype}" + (f" x {count}" if count else "")


def _pieces(x: torch.Tensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Parts of the last dim, and where each begins: at least one, so that all meet."""
    for begin in range(0, max(1, x.shape[-1]), step):
        yield begin, x[..., begin : begin + step]


def _name_of(operation: Any) -> str:
    for known, name in _NAMES.items():
        if operation == known:
            return name
    raise NotImplementedError(f"process group: this one cannot reduce with {operation}")


def _reduce_rows(
    rows: torch.Tensor, reduce: Callable[..., torch.Tensor], out: torch.Tensor
) -> None:
    """Reduce in the order of the ranks, so that all get the same bits."""
    out.copy_(rows[0])
    for row in rows[1:]:
        reduce(out, row, out=out)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    # a tensor of one element counts as contiguous with any stride; the new last dim has stride 1
    return x.reshape(-1).unsqueeze(-1).view(torch.uint8).view(-1)


@functools.lru_cache(maxsize=256)
def _bounds(total: int, rows: tuple[int, ...], size: int) -> array[int]:
    """Where, in ``total`` bytes, the part of each rank begins, and where the last one ends."""
    if not rows:
        return array("q", [k * (total // size) for k in range(size + 1)])
    row = total // max(1, sum(rows))
    return array("q", [row * sum(rows[:k]) for k in range(size + 1)])
