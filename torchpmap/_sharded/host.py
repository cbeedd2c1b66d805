"""Operations on sharded tensors that only this process can run, on fetched copies.

A value that the operation writes is sent to the devices again; the written tensor, and all tensors
that share its value, then refer to the new value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from torchpmap._base.errors import kind_of
from torchpmap._base.torch_internals import LEVEL, forward_state, lazy_bits, untraced
from torchpmap._layout.common_grid import common_grid
from torchpmap._layout.layout import Layout
from torchpmap._runtime.base import Handle
from torchpmap._sharded.arguments import is_by_columns, occurrences
from torchpmap._sharded.draws import (
    FROM_VALUES,
    draw,
    draw_from_whole,
    exchanged,
    is_drawn,
    send_again,
    with_whole,
)
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.layers import on_host
from torchpmap._sharded.spmd import in_columns
from torchpmap._sharded.strides import strides_of_copy
from torchpmap._sharded.transfer import is_whole_here
from torchpmap._sharded.trial import insist_on_kind
from torchpmap._sharded.views import (
    host_copies,
    share_values,
    write_all,
)


@lazy_bits()  # operations of several steps conjugate, and go on
def run_on_host(
    kind: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Any]
) -> Any:
    """Run an operation on tensors of class ``kind``; it writes to ``targets``, some of these."""
    operands = list({id(x): x for x in occurrences(kind, args, kwargs)}.values())
    if kwargs.get("device") == _META:
        return _of_no_values(func, args, kwargs, operands)
    if is_drawn(func, args, operands):
        return draw(func, args, kwargs)
    layouts = [operand._alive()[0] for operand in operands]
    before = [target._handle for target in targets]
    if func in FROM_VALUES and not all(map(is_whole_here, layouts)):
        return draw_from_whole(func, args, kwargs, operands)
    are_together = len({layout.ranks for layout in layouts}) == 1
    if are_together and len(targets) < 2 and common_grid(layouts) is None:
        kept = (*targets, *operands)[0]
        moved = [operand for operand in operands if operand is not kept]
        args, kwargs = with_whole(func, args, kwargs, moved)
        return func(*args, **kwargs)
    for layout in layouts:
        _insist_whole(layout, func)
    if func is not torch.ops.aten._local_scalar_dense.default:
        note_gather(func, sum(operand.nbytes for operand in operands))
    if share_values(targets, operands):
        copies = host_copies(operands)
    else:
        copies = [_copy(operand) for operand in operands]
        if is_by_columns(func, operands):
            copies[0] = in_columns(copies[0])
    gathered = {id(x): copy for x, copy in zip(operands, copies, strict=True)}
    host_args, host_kwargs = exchanged((args, kwargs), gathered)
    result = on_host(func)(*host_args, **host_kwargs)
    if targets:
        _write_back(func, targets, before, gathered)
        originals = {id(gathered[id(target)]): target for target in targets}
        return exchanged(result, originals)
    return result


_META = torch.device("meta")


def _insist_whole(layout: Layout, func: Any) -> None:
    """Raise, in all processes, if only several of them have a value together."""
    if not is_whole_here(layout):
        where = " ".join(map(str, layout.devices))
        raise RuntimeError(
            f"{func} needs the whole value {kind_of(layout.shape, layout.dtype)}, as the devices "
            f"cannot run it block by block, but its blocks ({layout.sharding.spec} on {where}) are "
            "in several processes. Run it in a mapped function (torchpmap.pmap, "
            "torchpmap.shard_map), or on torchpmap.multihost.all_gather(x), which every process "
            "has whole."
        )


def _of_no_values(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any]
) -> Any:
    """A result on the meta device, such as that of ``x.to("meta")``, which torch also asks for when
    a tangent is zero.
    """
    stand_ins = {
        id(x): torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for x in operands
    }
    args, kwargs = exchanged((args, kwargs), stand_ins)
    return func(*args, **kwargs)


def _copy(operand: Any) -> torch.Tensor:
    """A copy on the host with the same order of dims in memory, which the result inherits."""
    host: torch.Tensor = operand.to_host()
    own = strides_of_copy(operand)
    if own is None:
        return host
    copy = torch.empty_strided(host.shape, own.strides, dtype=host.dtype, device="cpu")
    return copy.copy_(host)


def _write_back(
    func: Any,
    targets: Sequence[Any],
    before: Sequence[Handle],
    gathered: dict[int, torch.Tensor],
) -> None:
    for target in targets:
        insist_on_kind(func, target, gathered[id(target)])
    what = f"what {func} writes"
    write_all(targets, before, [send_again(x._layout, gathered[id(x)], what) for x in targets])


def is_recorded(x: torch.Tensor) -> bool:
    """Whether operations on ``x`` are differentiated (it requires grad, or has a tangent)."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return forward_state[LEVEL] >= 0 and forward_ad.unpack_dual(x).tangent is not None


@untraced
class ToHost(torch.autograd.Function):
    """The whole value on the host, differentiably."""

    @staticmethod
    def forward(value: Any) -> torch.Tensor:
        return value.to_host()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.cpu()
