"""Process-axis collectives on plain tensors, as operations of torch's back ends.

Each function issues ``torch.ops._c10d_functional`` operations and waits for them. They refer to a
group by *name*, so a traced graph is the same on all ranks and works with a rebuilt group. Nothing
here differentiates or batches; that is the job of the primitives.

Gloo carries few dtypes, has no reduction for bool, 16-bit and unsigned integers, complex numbers
and float8, and its max and min drop NaN. Every function therefore accepts every dtype and
translates:

* data that only moves travels as bytes if the back end does not know its dtype;
* sums are taken in a wider dtype, complex sums as pairs of reals. Sums of float16 and bfloat16 are
  widened on CPUs only: on GPUs NCCL adds in the dtype itself, as it does for JAX;
* max and min of floats are taken on integers that sort like the floats, with NaN beyond the
  extreme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from torchpmap._base.devices import PLATFORMS
from torchpmap._base.inexact import is_inexact
from torchpmap._base.torch_groups import group_named
from torchpmap._base.torch_internals import FakeTensor, fake_mode, is_profiler_on
from torchpmap._layout import axis_stack

ReduceOp = Literal["sum", "max", "min"]
Pairs = tuple[tuple[int, int], ...]
"""(source, destination) of every value that a permutation moves."""

c10d = torch.ops._c10d_functional
NAMESPACES = ("_c10d_functional", "torchpmap")
"""Namespaces of the operations in graphs that communicate."""

_CARRIED = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)

# Reduced in a type that both torch and Gloo know; narrowing wraps as the narrow type would.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.complex32: torch.complex64,
}

# Added in float32: they have at most half its digits.
_HALVES = (torch.float16, torch.bfloat16)

# Flipping the top bit of an uint64 makes an int64 that compares in the same order.
_SIGN_64 = torch.iinfo(torch.int64).min


def all_reduce(x: torch.Tensor, op: ReduceOp, group: str) -> torch.Tensor:
    """[*s] -> [*s]: the sum, max or min over the group."""
    _record("all_reduce", op, group, x)

    def run(carried: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_reduce(carried.contiguous(), op, group))

    return reduced(x, op, run)


def all_reduce_many(xs: Sequence[torch.Tensor], op: ReduceOp, group: str) -> list[torch.Tensor]:
    """``all_reduce`` of several tensors, in one message per dtype: latency is paid once.

    In a graph for devices that exchange data while they compute, ``_trace/buckets`` chooses the
    messages of sums.
    """
    if len(xs) == 1 or (op == "sum" and _goes_in_buckets(xs[0])):
        return [all_reduce(x, op, group) for x in xs]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, x in enumerate(xs):
        alike.setdefault((x.dtype, x.device), []).append(position)
    results = list(xs)
    for positions in alike.values():
        flat = torch.cat([xs[i].reshape(-1) for i in positions])
        parts = all_reduce(flat, op, group).split([xs[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            results[i] = part.reshape(
                xs[i].shape
            ).clone()  # a view would keep the whole buffer alive
    return results


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[*s] -> [size, *s]: the tensors of all members, in rank order."""
    _record("all_gather", "", group, x)

    def run(carried: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(carried, size, group))

    return _moved(x.unsqueeze(0), run)


def reduce_scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[size, *s] -> [*s]: member k gets row k of the sum."""
    _record("reduce_scatter", "sum", group, x)

    def run(carried: torch.Tensor) -> torch.Tensor:
        carried = carried.contiguous()
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(carried, "sum", size, group))

    return reduced(x, "sum", run).squeeze(0)


def all_to_all(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[size, *s] -> [size, *s]: row j of the result on member k is row k of member j."""
    _record("all_to_all", "", group, x)
    rows = [1] * size

    def run(carried: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_to_all_single(carried, rows, rows, group))

    return _moved(x, run)


def permute(x: torch.Tensor, pairs: Pairs, group: str) -> torch.Tensor:
    """[*s] -> [*s]: the value of the member that sends here, zeros where none does."""
    _record("permute", str(pairs), group, x)
    sources, destinations = [s for s, _ in pairs], [d for _, d in pairs]

    def run(carried: torch.Tensor) -> torch.Tensor:
        return torch.ops.torchpmap.ppermute(carried, sources, destinations, group)

    return _moved(x, run)


def _goes_in_buckets(x: torch.Tensor) -> bool:
    if not isinstance(x, FakeTensor):
        return False
    platform = PLATFORMS.get(x.device.type)
    return platform is not None and platform.bucket_bytes is not None


def _record(name: str, how: str, group: str, x: torch.Tensor) -> None:
    if not isinstance(x, FakeTensor) and fake_mode() is None:
        axis_stack.record((name, how, group, tuple(x.shape), str(x.dtype)))


# --- dtypes ---------------------------------------------------------------------------------------


def widened(x: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """``x`` in a dtype that torch can reduce with ``op``; ``narrowed`` takes the result back."""
    if x.dtype == torch.uint64:
        bits = x.view(torch.int64)
        return bits if op == "sum" else bits ^ _SIGN_64
    if op == "sum" and x.dtype in _HALVES and x.device.type == "cpu":
        return x.to(torch.float32)
    return x.to(_WIDER.get(x.dtype, x.dtype))


def summable(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype in which its cotangents are summed, so that several sums are rounded once;
    integers and bools, which have none, are returned as they are.
    """
    return widened(x, "sum") if is_inexact(x) else x


def narrowed(x: torch.Tensor, op: ReduceOp, dtype: torch.dtype) -> torch.Tensor:
    """Undo ``widened`` on a result."""
    if dtype == torch.uint64:
        return (x if op == "sum" else x ^ _SIGN_64).contiguous().view(dtype)
    return x.to(dtype)


def _moved(x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run data movement along dim 0, as bytes in a further last dim if the dtype is not carried."""
    x = x.resolve_conj().resolve_neg().contiguous()
    if x.dtype in _CARRIED:
        return run(x)
    if x.dtype == torch.bool:  # Inductor (torch 2.13) makes failing C++ of a bool viewed as a byte
        return run(x.to(torch.uint8)).to(torch.bool)
    as_bytes = run(x.unsqueeze(-1).view(torch.uint8))
    return as_bytes.contiguous().view(x.dtype).squeeze(-1)


def reduced(
    x: torch.Tensor, op: ReduceOp, run: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run a reduction on ``x`` in a dtype whose reduction the back end, or torch, gets right."""
    wide = widened(x, op)
    if wide.dtype == torch.bool:
        result = run(wide.to(torch.uint8)).to(torch.bool)
    elif wide.is_complex():
        pairs = torch.view_as_real(wide.resolve_conj())
        result = torch.view_as_complex(run(pairs).contiguous())
    elif op != "sum" and wide.is_floating_point():
        result = _reduced_in_order(wide, op, run)
    else:
        result = run(wide)
    return narrowed(result, op, x.dtype)


def _reduced_in_order(
    x: torch.Tensor, op: ReduceOp, run: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Max or min of floats through integers of equal order, as many bytes as the floats.

    Read as integers, floats sort in order where the sign bit is clear and in reverse where it is
    set; flipping the other bits of the latter sorts them all (1.0 = 0x3f800000 stays, -1.0 =
    0xbf800000 becomes 0xc07fffff). The flip is its own inverse. The largest and smallest integers
    decode to NaN, so NaN placed there always wins. -0.0 is less than 0.0, in any order.
    """
    exact = x.to(torch.float32) if x.dtype in _HALVES else x
    integer = torch.int64 if exact.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)

    def flipped(bits: torch.Tensor) -> torch.Tensor:
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    beyond = limits.max if op == "max" else limits.min
    keys = torch.where(torch.isnan(exact), beyond, flipped(exact.contiguous().view(integer)))
    return flipped(run(keys)).view(exact.dtype).to(x.dtype)


# --- ppermute operator ----------------------------------------------------------------------------
# How much a rank sends and receives depends on the rank. A graph must not, so the sizes are
# computed inside an operator.


def _ppermute_run(
    x: torch.Tensor, sources: list[int], destinations: list[int], group: str
) -> torch.Tensor:
    process_group = group_named(group)
    rank, size = process_group.rank(), process_group.size()
    permute = getattr(process_group, "permute", None)
    if permute is not None:  # a group in shared memory, which needs no counts
        return permute(x, sources[destinations.index(rank)] if rank in destinations else None)
    sends, receives = [0] * size, [0] * size
    for source, destination in zip(sources, destinations, strict=True):
        if source == rank:
            sends[destination] = 1
        if destination == rank:
            receives[source] = 1
    rows = x.contiguous().unsqueeze(0)[: sum(sends)]
    # waits here, because a compiler would write the next value over the input while it is still
    # being read; it knows the collectives of torch, but not this one
    received = c10d.wait_tensor(c10d.all_to_all_single(rows, receives, sends, group))
    if sum(receives):
        return received.squeeze(0)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


_library = torch.library.Library("torchpmap", "DEF")
_library.define(
    "ppermute(Tensor x, int[] sources, int[] destinations, str group) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("ppermute", _ppermute_run, "CompositeExplicitAutograd")
_library.impl("ppermute", lambda x, *_: x.new_empty(x.shape), "Meta")


# --- without torch's dispatcher -------------------------------------------------------------------


def _all_reduced(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    all_reduced = getattr(group_named(group), "all_reduced", None)
    if all_reduced is None or is_profiler_on():  # a profile lists operations
        return c10d.all_reduce.default(x, op, group)
    return all_reduced(x, op)


def _permuted(x: torch.Tensor, *how: Any) -> torch.Tensor:
    run = torch.ops.torchpmap.ppermute.default if is_profiler_on() else _ppermute_run
    return run(x, *how)


DIRECTLY = {c10d.all_reduce.default: _all_reduced, torch.ops.torchpmap.ppermute.default: _permuted}
"""Operation -> what does the same in a graph that is run operation by operation.  To call one
through the dispatcher takes longer than a small collective, and ``all_reduce`` copies its input.
"""
