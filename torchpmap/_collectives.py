"""Collectives over named axes, with the signatures and the meaning of ``jax.lax``.

Each works on a pytree leaf by leaf, over a process axis, a vmapped axis, or a tuple of both
(row-major: the first name is the slowest), under every nesting of ``torch.func``'s transforms.

    _collectives_raw          plain tensors over a process group: dtypes, messages
    _collectives_primitives   derivative and batching rules
    _collectives_operands     axis names, groups, leaves
    _collectives_reduce       psum pmean pmax pmin pbroadcast
    _collectives_move         all_gather psum_scatter all_to_all ppermute pshuffle pswapaxes
"""

from __future__ import annotations

import torch

from torchpmap._collectives_move import (
    all_gather,
    all_to_all,
    psum_scatter,
    pswapaxes,
)
from torchpmap._collectives_operands import AxisName, Groups, resolve
from torchpmap._collectives_permute import ppermute, pshuffle
from torchpmap._collectives_reduce import pbroadcast, pmax, pmean, pmin, psum

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
]


def axis_size(axis_name: AxisName) -> int:
    """Return the number of devices along ``axis_name``, as a Python int.

    axis_size: -> int

    Args:
        axis_name: name of a bound axis, or a tuple of names, whose sizes multiply.

    Returns:
        The size; 1 for an empty tuple.

    Raises:
        NameError: the axis is not bound.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: x / tp.axis_size("i"), axis_name="i")(torch.arange(4.0)).tolist()
        [0.0, 0.25, 0.5, 0.75]

    Source: jax.lax.axis_size; checked in tests/test_collectives.py.
    """
    return resolve("axis_size", axis_name).size


def axis_index(axis_name: AxisName) -> torch.Tensor:
    """Return the index of this device along ``axis_name``.

    axis_index: -> int64[] per device
    Backward: none. The index is a tensor, never a Python int: every device runs the same program.

    Args:
        axis_name: name of a bound axis, or a tuple of names: the row-major index over all of them.

    Returns:
        int64 scalar, 0 <= index < axis_size; 0 for an empty tuple.

    Raises:
        NameError: the axis is not bound.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.pmap(lambda x: x + 10 * tp.axis_index("i"), axis_name="i")(torch.zeros(4)).tolist()
        [0.0, 10.0, 20.0, 30.0]

    Source: jax.lax.axis_index, which gives int32; checked in tests/test_collectives.py.
    """
    return resolve("axis_index", axis_name).index()
