"""Operations on sharded tensors that draw random numbers.

The numbers of all rows are drawn in the calling process, so they are the same on any number of
devices, and each device gets those of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchpmap._base.pytree import tree_map
from torchpmap._layout.layout import Layout, general_layout, replicated_layout, spread_layout
from torchpmap._runtime.base import Handle
from torchpmap._sharded.gather_report import note_gather
from torchpmap._sharded.operations import move
from torchpmap._sharded.strides import strides_of, strides_of_copy
from torchpmap._sharded.transfer import (
    blocks_of,
    check_equal_everywhere,
    places_here,
    store,
)
from torchpmap._sharded.views import write

_aten = torch.ops.aten


def _overloads(*names: str) -> frozenset[Any]:
    found = [getattr(_aten, name) for name in names]
    return frozenset(getattr(each, overload) for each in found for overload in each.overloads())


_FILLING = _overloads(
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
)
"""They write random numbers whatever was there before."""
_LIKE = _overloads("rand_like", "randn_like", "randint_like") | {_aten.bernoulli.p}
"""They take only the shape and the dtype of a tensor."""
_DRAWING = _FILLING | _LIKE


def _bernoulli(x: Any, generator: Any = None) -> Any:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (_like(x, wide, torch.rand_like, generator) < x).to(x.dtype)


def _bernoulli_(x: Any, p: Any, generator: Any = None) -> Any:
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return x.copy_(_like(x, wide, torch.rand_like, generator) < p)


def _normal(mean: Any, std: Any = 1.0, generator: Any = None) -> Any:
    like = mean if isinstance(mean, torch.Tensor) else std
    if isinstance(std, torch.Tensor) and std.shape != like.shape:
        like = mean + std
    return _like(like, like.dtype, torch.randn_like, generator) * std + mean


def _native_dropout(x: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def _like(x: Any, dtype: torch.dtype, draw: Callable[..., torch.Tensor], generator: Any) -> Any:
    return draw(x, dtype=dtype, **({} if generator is None else {"generator": generator}))


_COMPOSED: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli_.Tensor: _bernoulli_,
    _aten.native_dropout.default: _native_dropout,
    _aten.normal.Tensor_Tensor: _normal,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
}
"""They draw numbers that depend on values; the same numbers as torch draws on the CPU."""

FROM_VALUES = _overloads(
    *("_sample_dirichlet", "_standard_gamma", "binomial", "multinomial", "poisson")
)
"""Functions whose numbers depend on values in ways that only torch knows."""


def is_drawn(func: Any, args: Sequence[Any], operands: Sequence[Any]) -> bool:
    """Whether ``draw`` can run a call without fetching its operands."""
    if func in _COMPOSED:
        return True
    return func in _DRAWING and len(operands) == 1 and args[0] is operands[0]


def draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation that draws random numbers."""
    if func in _COMPOSED:
        return _COMPOSED[func](*args, **kwargs)
    target, *rest = args
    layout, handle = target._alive()
    handle.team.runtime.check(handle)
    host = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
    drawn = func(host, *rest, **kwargs)
    what = f"what {func} draws"
    if func in _FILLING:
        write(target, send_again(layout, host, what))
        return target
    wanted = general_layout(layout.shape, drawn.dtype, layout.sharding)
    return target._made(wanted, send_again(wanted, drawn, what), strides=strides_of(drawn))


def with_whole(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments with some of the operands whole on every device; all processes must call it."""
    note_gather(func, sum(operand.nbytes for operand in operands))
    copies = {}
    for operand in operands:
        layout, handle = operand._alive()
        wanted = replicated_layout(layout.shape, layout.dtype, layout.devices)
        moved = move(layout, handle, wanted)
        copies[id(operand)] = operand._made(wanted, moved, strides=strides_of_copy(operand))
    given: tuple[Sequence[Any], dict[str, Any]] = exchanged((args, kwargs), copies)
    return given


def exchanged(tree: Any, others: Mapping[int, Any]) -> Any:
    """A tree with other leaves, by the ``id`` of those that they replace."""
    return tree_map(lambda leaf: others.get(id(leaf), leaf), tree)


def draw_from_whole(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Any]
) -> Any:
    """Run an operation that draws numbers which depend on values of several processes: each process
    draws those of all rows, and its devices get their blocks; all processes must call it.
    """
    args, kwargs = with_whole(func, args, kwargs, operands)
    result = func(*args, **kwargs)
    wanted = spread_layout(result.shape, result.dtype, operands[0]._alive()[0].devices)
    return operands[0]._made(wanted, send_again(wanted, result, f"the result of {func}"))


def send_again(layout: Layout, host: torch.Tensor, what: str) -> Handle:
    """Send a value that was computed in this process, or raise if several processes would hold
    copies that differ.
    """
    has_copies = len(layout.devices) > len(blocks_of(layout))
    if has_copies and len(places_here(layout)) < len(layout.devices):
        check_equal_everywhere({what: host}, layout.ranks)
    return store(layout, host)
