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

import functools
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchpmap._base.errors import CollectiveMismatch
from torchpmap._base.torch_groups import ProcessGroup, Work
from torchpmap._runtime.groups.shared_memory import SLOT_BYTES, Meeting
from torchpmap._runtime.wire import DTYPES

_SMALL_BYTES = 1 << 15
"""Up to this size every rank reduces the whole tensor; above it, a share that it hands on."""

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
    "permute",
)
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
            doing = described(number)
            # a number below 0 is of a comparison, which is all that some calls are
            what.append(doing if call is None else call if number < 0 else f"{doing} in {call}")
        ranks = self.meeting.ranks
        if what[0] == what[1]:
            if self._is_same_call(odd):
                self.meeting.refuse_history()
            what[1] += " (another function)"
        raise CollectiveMismatch(
            f"rank {ranks[self._rank]} runs {what[0]}, but rank {ranks[odd]} {what[1]}. All "
            "devices must run the same collectives in the same order."
        )

    def _all_reduce(self, x: torch.Tensor, operation: Any) -> None:
        name, reduce = _reduction(operation)
        if self._size == 1:
            return
        kind = _kind(name, x.dtype, x.numel())
        most = SLOT_BYTES if self._size == 2 else _SMALL_BYTES
        for piece in _pieces(x):
            if piece.nbytes <= most:
                self._reduce_whole(piece, reduce, kind)
            else:
                self._reduce_shares(piece.view(-1), reduce, kind)

    def _reduce_whole(
        self, x: torch.Tensor, reduce: Callable[..., torch.Tensor], kind: int
    ) -> None:
        """Every rank reduces the whole tensor, which takes the fewest operations."""
        _, rows = self.meeting.rows(x.dtype, x.shape)
        rows[self._rank].copy_(x)
        self._meet(kind)
        _reduce_rows(rows, reduce, x)

    def _reduce_shares(
        self, piece: torch.Tensor, reduce: Callable[..., torch.Tensor], kind: int
    ) -> None:
        """Every rank reduces a share, and hands it on."""
        rank, size, count = self._rank, self._size, piece.numel()
        slots = self.meeting.slots(piece.dtype)[:, :count]
        slots[rank].copy_(piece)
        self._meet(kind)
        share = -(-count // size)
        mine = slots[:, min(rank * share, count) : min((rank + 1) * share, count)]
        _reduce_rows(mine[:size].unbind(), reduce, mine[size])
        self._meet(kind)
        piece.copy_(slots[size])

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        kind = _kind("all_gather", x.dtype, x.numel())
        pieces = _pieces(x.contiguous())
        if len(pieces) == 1:
            taken: Sequence[torch.Tensor] = (out.view(self._size, *x.shape),)
        else:
            taken = out.view(self._size, x.numel()).split(pieces[0].numel(), 1)
        for given, theirs in zip(pieces, taken, strict=True):
            together, rows = self.meeting.rows(x.dtype, given.shape)
            rows[self._rank].copy_(given)
            self._meet(kind)
            theirs.copy_(together)

    def _reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, operation: Any) -> None:
        _, reduce = _reduction(operation)
        size, step = self._size, SLOT_BYTES // x.element_size() // self._size
        kind = _kind("reduce_scatter", x.dtype, x.numel())
        columns = x.reshape(size, out.numel()).split(step, 1)
        for given, taken in zip(columns, out.view(-1).split(step), strict=True):
            together, rows = self.meeting.rows(x.dtype, given.shape)
            rows[self._rank].copy_(given)
            self._meet(kind)
            _reduce_rows(together[:, self._rank].unbind(), reduce, taken)

    def _all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, taken: Sequence[int], given: Sequence[int]
    ) -> None:
        """``taken`` and ``given``: rows from and to each rank; empty if all are the same."""
        size, kind = self._size, _kind("all_to_all", x.dtype, 0)
        mine, source, target = _bounds(x.nbytes, tuple(given), size), _bytes_of(x), _bytes_of(out)
        places = _bounds(out.nbytes, tuple(taken), size)
        begin, longest = 0, 1
        while begin < longest:
            slots = self.meeting.slots(torch.uint8)
            bounds = self.meeting.bounds
            bounds[self._rank][:] = mine
            piece = source[begin : begin + SLOT_BYTES]
            slots[self._rank, : piece.numel()].copy_(piece)
            self._meet(kind)
            for rank, theirs in enumerate(bounds):
                first, last = theirs[self._rank], theirs[self._rank + 1]
                if last - first != places[rank + 1] - places[rank]:
                    ranks = self.meeting.ranks
                    raise CollectiveMismatch(
                        f"rank {ranks[rank]} gives {last - first} bytes to rank "
                        f"{ranks[self._rank]} in all_to_all, but that one expects "
                        f"{places[rank + 1] - places[rank]}"
                    )
                low, high = max(first, begin), min(last, begin + SLOT_BYTES)
                if low < high:
                    place = places[rank] + low - first
                    there = slots[rank, low - begin : high - begin]
                    target[place : place + high - low].copy_(there)
                longest = max(longest, theirs[size])
            begin += SLOT_BYTES

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        kind = _kind("broadcast", x.dtype, x.numel())
        for piece in _pieces(x):
            _, rows = self.meeting.rows(x.dtype, piece.shape)
            if self._rank == root:
                rows[root].copy_(piece)
            self._meet(kind)
            if self._rank != root:
                piece.copy_(rows[root])

    def permute(self, x: torch.Tensor, source: int | None) -> torch.Tensor:
        """``x`` of the rank ``source``, or zeros if that is None; every rank gives its ``x``."""
        x = x.contiguous()
        kind = _kind("permute", x.dtype, x.numel())
        out = torch.zeros_like(x) if source is None else torch.empty_like(x)
        for given, taken in zip(_pieces(x), _pieces(out), strict=True):
            _, rows = self.meeting.rows(x.dtype, given.shape)
            rows[self._rank].copy_(given)
            self._meet(kind)
            if source is not None:
                taken.copy_(rows[source])
        return out

    # -- what torch asks for -----------------------------------------------------------------------

    @_without_grad
    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        for x in tensors:
            if x.is_contiguous():
                self._all_reduce(x, options.reduceOp)
            else:
                dense = x.contiguous()
                self._all_reduce(dense, options.reduceOp)
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
            self._reduce_scatter(out, x, options.reduceOp)
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
            self._broadcast(x, options.rootRank)
        return DONE

    # as torch 2.11 calls them
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _kind(name: str, dtype: torch.dtype, count: int) -> int:
    return _NUMBERS[name, dtype] << _COUNT_BITS | count


def described(kind: int) -> str:
    if kind < 0:
        return "a collective with compile=False"
    name, dtype = _KINDS[kind >> _COUNT_BITS]
    count = kind & (1 << _COUNT_BITS) - 1
    return f"{name} of {dtype}" + (f" x {count}" if count else "")


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts of a contiguous tensor that fit in a slot."""
    return (x,) if x.nbytes <= SLOT_BYTES else x.view(-1).split(SLOT_BYTES // x.element_size())


def _reduction(operation: Any) -> tuple[str, Callable[..., torch.Tensor]]:
    for known, reduction in _REDUCTIONS.items():
        if operation == known:
            return reduction
    raise NotImplementedError(f"process group: this one cannot reduce with {operation}")


def _reduce_rows(
    rows: Sequence[torch.Tensor], reduce: Callable[..., torch.Tensor], out: torch.Tensor
) -> None:
    """Reduce in the order of the ranks, so that all get the same bits."""
    if len(rows) == 1:
        out.copy_(rows[0])
        return
    reduce(rows[0], rows[1], out=out)
    for row in rows[2:]:
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
