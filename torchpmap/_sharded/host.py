"""Operations on sharded tensors that run in this process, on gathered copies.

A value that the operation writes is sent to the devices again; the written tensor, and all tensors
that share its value, then refer to the new value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from torchpmap._base.pytree import tree_flatten, tree_map, tree_unflatten
from torchpmap._base.torch_internals import LEVEL, forward_state, untraced
from torchpmap._layout.layout import spread_layout
from torchpmap._sharded.arguments import occurrences
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.strides import strides_of_results
from torchpmap._sharded.transfer import check_equal_everywhere, places_here, store
from torchpmap._sharded.views import Make, host_copies, link_view, share_values, write


def run_on_host(
    kind: Any,
    make: Make,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    targets: Sequence[Any],
) -> Any:
    """Run an operation on tensors of class ``kind``; it writes to ``targets``, some of these."""
    operands = list({id(x): x for x in occurrences(kind, args, kwargs)}.values())
    if kwargs.get("device") == _META:
        return _of_no_values(func, args, kwargs, operands)
    if func in _RANDOM and len(operands) == 1:
        return _filled(make, func, *operands, *args[1:], **kwargs)
    if func is not torch.ops.aten._local_scalar_dense.default:
        note_gather(func, sum(operand.nbytes for operand in operands))
    try:
        if share_values(targets, operands):
            copies = host_copies(operands)
        else:
            copies = [_copy(operand) for operand in operands]
    except RuntimeError as error:
        error.add_note(f"{func} needs whole values here: the devices cannot run it on their blocks")
        raise
    gathered = {id(x): copy for x, copy in zip(operands, copies, strict=True)}
    host_args, host_kwargs = tree_map(lambda value: gathered.get(id(value), value), (args, kwargs))
    result = func(*host_args, **host_kwargs)
    if targets:
        _write_back(make, func, targets, gathered)
        originals = {id(gathered[id(target)]): target for target in targets}
        return tree_map(lambda value: originals.get(id(value), value), result)
    return _view_of(make, args[0], func, args[1:], result) if func.is_view else result


_META = torch.device("meta")


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
    args, kwargs = tree_map(lambda value: stand_ins.get(id(value), value), (args, kwargs))
    return func(*args, **kwargs)


_RANDOM = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in (
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_"),
    )
    for overload in getattr(torch.ops.aten, name).overloads()
)
"""They write random numbers whatever was there before, so nothing is fetched."""


def _filled(make: Make, func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Random numbers are drawn in this process, so they are the same on any number of devices."""
    layout, handle = target._alive()
    handle.team.runtime.check(handle)
    host = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
    func(host, *args, **kwargs)
    if layout.is_replicated and len(places_here(layout)) < len(layout.devices):
        check_equal_everywhere({f"what {func} draws": host})
    write(target, store(layout, host), make)
    return target


def _copy(operand: Any) -> torch.Tensor:
    """A copy on the host with the same order of dims in memory, which the result inherits."""
    host: torch.Tensor = operand.to_host()
    if operand.is_contiguous():
        return host
    source = strides_of_results(torch.ops.aten.clone.default, operand)[0]
    return torch.empty_strided(host.shape, source.strides, dtype=host.dtype, device="cpu").copy_(
        host
    )


def _write_back(
    make: Make, func: Any, targets: Sequence[Any], gathered: dict[int, torch.Tensor]
) -> None:
    for target in targets:
        host, layout = gathered[id(target)], target._alive()[0]
        if tuple(host.shape) != layout.shape or host.dtype != layout.dtype:
            raise RuntimeError(
                f"{func} would change the shape or dtype of a ShardedTensor in place; use the "
                "out-of-place operation."
            )
    for target in targets:
        write(target, store(target._layout, gathered[id(target)]), make)


def _view_of(make: Make, parent: Any, func: Any, args: Sequence[Any], result: Any) -> Any:
    """Put a view on the devices again, so that a write to it can reach ``parent``."""
    layout = parent._alive()[0]
    leaves, spec = tree_flatten(result)
    found = strides_of_results(func, parent, args)
    views = []
    for leaf, strides in zip(leaves, found, strict=True):
        wanted = spread_layout(leaf.shape, leaf.dtype, layout.devices)
        views.append(make(wanted, store(wanted, leaf), strides=strides))
    link_view(views, parent, func, args)
    return tree_unflatten(views, spec)


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
