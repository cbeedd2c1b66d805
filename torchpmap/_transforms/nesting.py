"""A ``pmap`` of a ``pmap``: the devices that each axis gets, and what the inner call looks like.

rows x cols = 2 x 4 on 8 devices    2 x 4 devices, one row and one column each
              4 x 4                 4 x 2 devices, one row and two columns each
              3 x 3                 3 x 1 devices: 9 do not fit, 3 x 2 does not divide
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchpmap._layout.grid import Cut, nested
from torchpmap._sharded.transfer import host_tensor
from torchpmap._transforms.arguments import Options, RowArguments, split_statics, take_apart
from torchpmap._transforms.call import Static


def inner_call(
    fun: Callable[..., Any], options: Options, outer: RowArguments
) -> RowArguments | None:
    """The call that a row of ``outer`` makes of the mapped function ``fun``; None if the two do not
    fit together leaf by leaf, and for misuse, which is reported where the function is called.
    """
    if options.devices is not None:
        return None
    values = [_row_of(leaf, axis) for leaf, axis in zip(outer.leaves, outer.axes, strict=True)]
    args, kwargs = outer.structure.unflatten(values)
    try:
        args, kwargs = split_statics(options, args, kwargs)
        call = take_apart(fun, options, args, kwargs, None)
    except (TypeError, ValueError):
        return None
    if any(isinstance(x, Static) and isinstance(x.value, torch.Tensor) for x in call.leaves):
        return None
    given = [x for x in values if isinstance(x, torch.Tensor)]
    taken = call.travelling(call.leaves)
    same = len(given) == len(taken) and all(x is y for x, y in zip(given, taken, strict=True))
    return call if same else None


def _row_of(leaf: Any, axis: int | None) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, Static):
        return leaf.value
    tensor = leaf if isinstance(leaf, torch.Tensor) else host_tensor(leaf)
    shape = list(tensor.shape)
    if axis is not None:
        del shape[axis]
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def cuts_of(levels: Sequence[RowArguments]) -> list[Cut]:
    """For every leaf that travels, the dim that each level maps; levels have the same leaves."""
    cuts: list[Cut] | None = None
    for call in reversed(levels):
        axes = call.travelling(call.axes)
        inside: list[Cut] = [()] * len(axes) if cuts is None else cuts
        cuts = [nested(axis, cut) for axis, cut in zip(axes, inside, strict=True)]
    return cuts or []


def device_counts(sizes: Sequence[int], available: int) -> tuple[int, ...]:
    """Devices along each axis: divisors of the sizes; most in all, then most on the first axis."""
    choices = itertools.product(*(_divisors(size, available) for size in sizes))
    fitting = (counts for counts in choices if math.prod(counts) <= available)
    return max(fitting, key=lambda counts: (math.prod(counts), counts))


def _divisors(size: int, most: int) -> list[int]:
    return [n for n in range(1, min(size, most) + 1) if size % n == 0]


def counts_of_list(sizes: Sequence[int], num_devices: int) -> tuple[int, ...] | None:
    """Devices along each axis of a list of devices, which must be one per row, or one per row and
    column, and so on; None if it is not.
    """
    for num_axes in range(1, len(sizes) + 1):
        if math.prod(sizes[:num_axes]) == num_devices:
            return (*sizes[:num_axes], *(1,) * (len(sizes) - num_axes))
    return None
