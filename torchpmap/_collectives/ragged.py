"""ragged_all_to_all: slices of any size from every device to every device.

The sizes are tensors, so no shape may depend on them: every device gets all operands, and looks up
in them each row of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchpmap._base.arrays import for_torch
from torchpmap._base.boundary import boundary
from torchpmap._base.errors import check_array
from torchpmap._collectives.backend import summable
from torchpmap._collectives.exchange import all_gather, all_to_all
from torchpmap._collectives.groups import choose, pick
from torchpmap._collectives.operands import AxisName, IndexGroups, resolve

_TABLE = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@boundary
def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: IndexGroups = None,
) -> torch.Tensor:
    """Send slices of ``operand``, of any size, to devices; get ``output`` with those received.

    ragged_all_to_all: (any[r, *s], any[m, *s], int[k] x 4) per device -> any[m, *s] per device
    Backward: the cotangent of a received row goes back to the row that was sent; that of any other
    row to ``output``.

    Of k slices the first k / n go to device 0, the next to device 1, and so on. Where some overlap
    on their receiver, those of the last sender win, and among these the last slice. Every device
    receives all operands.

    Args:
        operand: the rows that slices are taken from.
        output: what is returned where nothing is received.
        input_offsets: first row of every slice in ``operand``.
        send_sizes: rows of every slice; 0 sends nothing.
        output_offsets: first row of every slice in the ``output`` of its *receiver*.
        recv_sizes: sizes of the slices that this device receives, which are
            ``all_to_all(send_sizes, axis_name, 0, 0, tiled=True)``.
        axis_name: name of a bound axis or a tuple of names, the first the slowest.
        axis_index_groups: lists of axis indices that cover the axis, all of one length n.

    Returns:
        Tensor of the shape and dtype of ``output``.

    Raises:
        NameError: the axis is not bound.
        TypeError, ValueError: dtypes or shapes do not fit, or bad groups.
        IndexError, RuntimeError: where it runs: a slice leaves its tensor, or ``recv_sizes`` are
            wrong.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda *xs: tp.ragged_all_to_all(*xs, axis_name="i"), axis_name="i")
        >>> operand, output = [[1, 2, 2], [3, 4, 0]], [[0] * 4] * 2
        >>> input_offsets, send_sizes = [[0, 1], [0, 1]], [[1, 2], [1, 1]]
        >>> output_offsets, recv_sizes = [[0, 0], [1, 2]], [[1, 1], [2, 1]]
        >>> given = operand, output, input_offsets, send_sizes, output_offsets, recv_sizes
        >>> f(*map(torch.tensor, given)).tolist()
        [[1, 3, 0, 0], [2, 2, 4, 0]]

    Source: jax.lax.ragged_all_to_all; checked in tests/collectives/test_collectives_ragged.py.
    """
    slices = input_offsets, send_sizes, output_offsets, recv_sizes
    return _exchange(operand, output, slices, axis_name, axis_index_groups)


def _exchange(
    operand: Any, output: Any, slices: Sequence[Any], axis_name: AxisName, groups: IndexGroups
) -> torch.Tensor:
    over = resolve("ragged_all_to_all", axis_name, groups, equal=True)
    operand, output, *table = (_tensor(x) for x in (operand, output, *slices))
    _check_rows(operand, output)
    _check_slices(table, over.size)
    *sent, expected = (x.to(torch.int64) for x in table)
    arriving = all_to_all(  # [k, 3], in one message
        torch.stack(sent, 1), axis_name, 0, 0, axis_index_groups=groups, tiled=True
    )
    rows = all_gather(summable(operand), axis_name, axis_index_groups=groups, tiled=True)
    return _written(rows, summable(output), arriving, expected, over.size).to(output.dtype)


def _written(
    rows: torch.Tensor,
    output: torch.Tensor,
    arriving: torch.Tensor,
    expected: torch.Tensor,
    num_devices: int,
) -> torch.Tensor:
    """``output`` with the slices written into it.

    Args:
        rows: the operands of all devices, one after the other.
        output: the rows to write to.
        arriving: first row, size and destination of every slice for this device, by sender.
        expected: the sizes that this device was told, its ``recv_sizes``.
        num_devices: how many operands there are.
    """
    if not len(rows) or not len(output):
        return output.clone()
    start, size, to = arriving.unbind(1)
    num_slices, each = len(start), len(rows) // num_devices
    leaves = (start < 0) | (start + size > each) | (to < 0) | (to + size > len(output))
    wrong = (size != expected) | (size < 0) | (leaves & (size > 0))

    place = torch.arange(len(output), device=to.device)
    covers = (place[:, None] >= to) & (place[:, None] < to + size)  # [m, k]
    number = torch.arange(1, num_slices + 1, device=to.device)
    last = torch.where(covers, number, 0).amax(1)  # number of the slice that wins, 0: none
    first_row = (number - 1) // (num_slices // num_devices) * each + start
    row = pick(first_row - to, (last - 1).clamp(min=0)) + place
    row = torch.where(last > 0, row, 0)
    row = torch.where(wrong.any(), len(rows), row)  # there is no such row: torch raises
    received = (last > 0).reshape(-1, *(1,) * (output.dim() - 1))
    return choose(received, pick(rows, row), output)


def _tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, np.ndarray):
        check_array(x, "ragged_all_to_all: an operand")
        return torch.as_tensor(for_torch(x))
    raise TypeError(f"ragged_all_to_all takes tensors and numpy arrays, but got {x!r}")


def _check_rows(operand: torch.Tensor, output: torch.Tensor) -> None:
    if operand.dtype != output.dtype:
        raise TypeError(
            "ragged_all_to_all operand and output must have one dtype, but got "
            f"{operand.dtype} and {output.dtype}"
        )
    if not operand.dim() or not output.dim() or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            "ragged_all_to_all operand and output may differ only in the size of dim 0, but have "
            f"the shapes {tuple(operand.shape)} and {tuple(output.shape)}"
        )


def _check_slices(table: Sequence[torch.Tensor], size: int) -> None:
    for name, x in zip(_TABLE, table, strict=True):
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(
                f"ragged_all_to_all {name} must be integer type, but has dtype {x.dtype}"
            )
        if x.dim() != 1 or not len(x):
            raise ValueError(
                f"ragged_all_to_all {name} must be rank 1 with positive dimension size, but got "
                f"shape {tuple(x.shape)}"
            )
    lengths = [len(x) for x in table]
    if len(set(lengths)) > 1 or lengths[0] % size:
        raise ValueError(
            f"ragged_all_to_all {', '.join(_TABLE)} must have one length, a multiple of the "
            f"{size} devices that take part, but got the lengths {lengths}"
        )
