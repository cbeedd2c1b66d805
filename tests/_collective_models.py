"""What collectives are, in plain torch: from the rows of those that take part to what each gets."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Rows = list[Any]

HALVES = (torch.bfloat16, torch.float16)
NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16)


def in_groups(
    model: Callable[..., Rows], rows: Rows, groups: Iterable[Sequence[int]] | None = None
) -> Rows:
    """A model of one group, for all rows."""
    out: dict[int, Any] = {}
    for group in groups or [range(len(rows))]:
        out.update(zip(group, model([rows[k] for k in group]), strict=True))
    return [out[k] for k in range(len(rows))]


def _same(rows: Sequence[torch.Tensor], value: torch.Tensor) -> Rows:
    return [value.clone() for _ in rows]


def _total(rows: Rows, dims: Sequence[int]) -> torch.Tensor:
    """A sum over rows and dims; of halves in float32."""
    wide = torch.float32 if rows[0].dtype in HALVES else rows[0].dtype
    total = torch.stack([row.to(wide) for row in rows]).sum(0, dtype=wide)
    return total.sum(tuple(dims), dtype=wide) if dims else total


def _psum(rows: Rows, dims: Sequence[int] = ()) -> Rows:
    if rows[0].dtype == torch.bool:
        rows = [row.to(torch.int32) for row in rows]
    return _same(rows, _total(rows, dims).to(rows[0].dtype))


def _pmean(rows: Rows, dims: Sequence[int] = ()) -> Rows:
    if rows[0].dtype in NARROW:
        rows = [row.to(torch.int32) for row in rows]
    mean = _total(rows, dims) / (len(rows) * math.prod(rows[0].shape[d] for d in dims))
    return _same(rows, mean.to(rows[0].dtype) if rows[0].dtype in HALVES else mean)


def _extreme(reduce: Callable[..., torch.Tensor]) -> Callable[..., Rows]:
    def model(rows: Rows, dims: Sequence[int] = ()) -> Rows:
        return _same(rows, reduce(torch.stack(rows), (0, *(d if d < 0 else d + 1 for d in dims))))

    return model


def _all_gather(rows: Rows, axis: int = 0, tiled: bool = False) -> Rows:
    return _same(rows, torch.cat(rows, axis) if tiled else torch.stack(rows, axis))


def _psum_scatter(rows: Rows, scatter_dimension: int = 0, tiled: bool = False) -> Rows:
    if rows[0].dtype == torch.bool:
        raise TypeError("JAX refuses it")
    return _slices(_psum(rows)[0], len(rows), scatter_dimension, tiled)


def _all_to_all(rows: Rows, split_axis: int, concat_axis: int, tiled: bool = False) -> Rows:
    sent = [_slices(row, len(rows), split_axis, tiled) for row in rows]
    join = torch.cat if tiled else torch.stack
    return [join([parts[k] for parts in sent], concat_axis) for k in range(len(rows))]


def _slices(x: torch.Tensor, size: int, dim: int, tiled: bool) -> Rows:
    if x.shape[dim] % size or (not tiled and x.shape[dim] != size):
        raise ValueError(f"dim {dim} of {tuple(x.shape)} is not cut into {size}")
    if tiled:
        return [part.clone() for part in x.chunk(size, dim)] if x.shape[dim] else [x] * size
    return [part.clone() for part in x.unbind(dim)]


def _ppermute(rows: Rows, perm: Sequence[tuple[int, int]]) -> Rows:
    out = [torch.zeros_like(row) for row in rows]
    for source, destination in perm:
        out[destination] = rows[source].clone()
    return out


def _pbroadcast(rows: Rows, source: int) -> Rows:
    return _same(rows, rows[source])


MODELS: dict[str, Callable[..., Rows]] = {
    "psum": _psum,
    "pmean": _pmean,
    "pmax": _extreme(torch.amax),
    "pmin": _extreme(torch.amin),
    "all_gather": _all_gather,
    "psum_scatter": _psum_scatter,
    "all_to_all": _all_to_all,
    "pswapaxes": lambda rows, axis: _all_to_all(rows, axis, axis),
    "ppermute": _ppermute,
    "pshuffle": lambda rows, perm: [rows[k].clone() for k in perm],
    "pbroadcast": _pbroadcast,
    "axis_index": lambda rows: [torch.tensor(k) for k in range(len(rows))],
}
