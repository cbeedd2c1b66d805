"""What each collective of a graph gives, computed from what all members of its group give.

For ways to run a program in one process.  Sums are taken in the order of the members, as groups in
shared memory do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._collectives.backend import c10d

Values = Sequence[torch.Tensor]

_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def _reduced(values: Values, op: str) -> torch.Tensor:
    return functools.reduce(_REDUCTIONS[op], values[1:], values[0].clone())


def _all_reduce(values: Values, places: Sequence[int], op: str) -> list[torch.Tensor]:
    total = _reduced(values, op)
    return [total.clone() for _ in places]


def _all_gather(values: Values, places: Sequence[int], size: int) -> list[torch.Tensor]:
    return [torch.cat([*values]) for _ in places]


def _reduce_scatter(
    values: Values, places: Sequence[int], op: str, size: int
) -> list[torch.Tensor]:
    parts = _reduced(values, op).chunk(size)
    return [parts[place].clone() for place in places]


def _all_to_all(
    values: Values, places: Sequence[int], receives: list[int], sends: list[int]
) -> list[torch.Tensor]:
    sent = [value.split(sends) for value in values]
    return [torch.cat([parts[place] for parts in sent]) for place in places]


def _ppermute(
    values: Values, places: Sequence[int], sources: list[int], destinations: list[int]
) -> list[torch.Tensor]:
    source_of = dict(zip(destinations, sources, strict=True))
    zeros = functools.partial(torch.zeros_like, values[0], memory_format=torch.contiguous_format)
    return [values[source_of[k]].clone() if k in source_of else zeros() for k in places]


MEANINGS: dict[Any, Callable[..., list[torch.Tensor]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    torch.ops.torchpmap.ppermute.default: _ppermute,
}
"""Operation -> ``(values of the members, places, *arguments)``, which gives a result per place."""
