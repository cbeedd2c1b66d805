"""What two integers differ by, if that is the same number in every run of a traced function, or in
every row of a vmap where nothing is traced.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Node

from torchpmap._base.torch_internals import (
    fake_mode,
    innermost,
    node_of,
    outside_transforms,
    torch_function_off,
    tracing_mode,
)
from torchpmap._trace.graphs import storages, written_storages

_aten = torch.ops.aten
_Sum = tuple[Counter[Any], int]
"""Nodes with factors, and a number, to be added up."""

_SAME = (
    *(_aten.alias.default, _aten.detach.default, _aten.clone.default, _aten._to_copy.default),
    _aten.lift_fresh_copy.default,
)
_MOST = 64
"""Longer sums are not followed."""


def difference(a: torch.Tensor, b: torch.Tensor, most: int) -> int | None:
    """``a - b``; None if it is not known, or if ``a`` may wrap around although ``b`` is between
    ``-most`` and ``most``.  Both are integers without dims.
    """
    mode = tracing_mode()
    if mode is None:
        return _difference_of_rows(a, b)
    met: set[Node] = set()
    dtype = a.dtype if a.dtype == b.dtype else torch.int64
    first, second = (_sum(_node(x, mode.tracer), dtype, _MOST, met) for x in (a, b))
    if first is None or second is None:
        return None
    factors, number = _added(first, second, -1)
    fits = abs(number) + most <= torch.iinfo(dtype).max
    return None if not fits or any(factors.values()) or _are_written(met) else number


def _difference_of_rows(a: torch.Tensor, b: torch.Tensor) -> int | None:
    if fake_mode() is not None:
        return None
    with torch_function_off():
        rows = innermost(a.long() - b.long())
        with outside_transforms():
            found = set(rows.flatten().tolist())
    return found.pop() if len(found) == 1 else None


def _are_written(nodes: set[Node]) -> bool:
    """Whether the memory of any of the nodes is written to, after the first of them: its value
    depends on when it is read, and there may be views of it.
    """
    if not nodes:
        return False
    first, held = min(nodes), set[int]().union(*map(storages, nodes))
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        for near in (*node.users, *node.all_input_nodes):
            if near not in seen and not held.isdisjoint(
                storages(near) | {*written_storages([near])}
            ):
                seen.add(near)
                waiting.append(near)
    return any(first < x and not held.isdisjoint(written_storages([x])) for x in seen)


def _node(value: torch.Tensor, tracer: Any) -> Any:
    """The node of a traced value; the value itself if it has none, as a tensor from outside."""
    value = innermost(value)
    with outside_transforms():
        node = node_of(tracer, value)
    return value if node is None else node


def _sum(value: Any, dtype: torch.dtype, most: int, met: set[Node]) -> _Sum | None:
    """A value as a sum of numbers of a dtype; None if it is too long, or no integer.  Nodes that it
    follows are added to ``met``.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return Counter(), value
    if isinstance(value, torch.Tensor):
        return Counter({id(value): 1}), 0
    if not isinstance(value, Node) or not most or not _is_integer(value):
        return None
    met.add(value)
    factors, number = _parts(value, most - 1, met) or (Counter({value: 1}), 0)
    own = value.meta["val"].dtype
    if own == dtype:
        return factors, number
    # numbers of a dtype wrap around, so that a sum that is cast is none of the cast numbers
    return Counter({(dtype, own, frozenset(factors.items()), number): 1}), 0


def _parts(node: Node, most: int, met: set[Node]) -> _Sum | None:
    """The sum that a node computes; None if it computes something else."""
    if node.target not in (*_SAME, *_ADDING, *_SUBTRACTED, _aten.mul.Tensor):
        return None
    if len(node.args) > 2:  # rsub with a factor
        return None
    parts = [_sum(arg, node.meta["val"].dtype, most, met) for arg in node.args]
    first, second = parts[0], parts[-1]
    if first is None or second is None:
        return None
    if node.target in _ADDING:
        alpha: Any = node.kwargs.get("alpha", 1)
        return _added(first, second, alpha * _ADDING[node.target])
    if node.target is _aten.mul.Tensor:
        if first[0] and second[0]:
            return None
        (factors, number), factor = (second, first[1]) if not first[0] else (first, second[1])
        return Counter({key: k * factor for key, k in factors.items()}), number * factor
    if node.target is _aten.rsub.Scalar:
        return _added(second, first, -1)
    return _added((Counter(), 0), first, -1 if node.target in _SUBTRACTED else 1)


def _added(a: _Sum, b: _Sum, factor: int) -> _Sum:
    found = Counter(a[0])
    for key, k in b[0].items():
        found[key] += k * factor
    return found, a[1] + b[1] * factor


_SUBTRACTED = (_aten.neg.default, _aten.rsub.Scalar)
_ADDING = {_aten.add.Tensor: 1, _aten.sub.Tensor: -1}


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    kind = getattr(value, "dtype", torch.float32)
    return not (kind.is_floating_point or kind.is_complex or kind is torch.bool)
