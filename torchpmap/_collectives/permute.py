"""Permutations over named axes: ppermute and pshuffle.

One axis is permuted as it is. Over several, for example over the devices and the rows that each of
them holds, most values stay on their device. The others travel by *shift*: all values that go from
a device p to device p + 1 are one message, all from p to p + 2 the next. A ring of 16 rows on 4
devices sends one row per device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import Tree
from torchpmap._collectives.backend import Pairs
from torchpmap._collectives.groups import Tensors, entry, gathered, pick, whole
from torchpmap._collectives.operands import (
    AxisName,
    Over,
    map_leaves,
    own_values,
    permutation,
    resolve,
)
from torchpmap._collectives.primitives import Permute
from torchpmap._layout.axis_stack import Axis, joined


@boundary
def ppermute(x: Tree, axis_name: AxisName, perm: Iterable[tuple[int, int]]) -> Tree:
    """Send ``x`` from device to device as ``perm`` says; a device without a sender gets zeros.

    ppermute: any[*s] per device -> any[*s] per device
    Backward: ppermute of the cotangents with sources and destinations swapped.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names, whose row-major index ``perm`` uses.
            Only rows that change device are sent.
        perm: (source, destination) pairs, each device at most once on either side; negative indices
            count from the end.

    Returns:
        Same structure, shapes and dtypes as ``x``.

    Raises:
        NameError: the axis is not bound.
        IndexError: an index is not on the axis.
        ValueError: a source or destination occurs twice.

    Example:
        >>> import torch, torchpmap as tp
        >>> ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
        >>> f = tp.pmap(lambda x: tp.ppermute(x, "i", ring), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [3.0, 0.0, 1.0, 2.0]

    Source: jax.lax.ppermute under jax.pmap; checked in tests/collectives/test_collectives.py.
    """
    over = resolve("ppermute", axis_name)
    pairs = permutation("ppermute", perm, over)
    over = replace(over, how=pairs)
    if not over.axes:
        return own_values(over, x)
    if len(over.axes) == 1:
        return map_leaves(over, x, lambda xs: over.fold(lambda s: Permute(s, pairs), xs))
    return map_leaves(over, x, lambda xs: _route(over, pairs)(xs))


@boundary
def pshuffle(x: Tree, axis_name: AxisName, perm: Sequence[int]) -> Tree:
    """Give device k the ``x`` of device ``perm[k]``.

    pshuffle: any[*s] per device -> any[*s] per device
    Backward: pshuffle of the cotangents with the inverse permutation.

    Args:
        x: tensor or pytree; same shapes and dtypes on every device.
        axis_name: name of a bound axis or a tuple of names.
        perm: a permutation of the axis indices.

    Returns:
        Same structure, shapes and dtypes as ``x``.

    Raises:
        NameError: the axis is not bound.
        ValueError: ``perm`` is not a permutation.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.pshuffle(x, "i", [3, 2, 1, 0]), axis_name="i")
        >>> f(torch.arange(4.0)).tolist()
        [3.0, 2.0, 1.0, 0.0]

    Source: jax.lax.pshuffle; checked in tests/collectives/test_collectives.py.
    """
    perm = list(perm)
    if set(perm) != set(range(len(perm))):
        raise ValueError(f"`perm` does not represent a permutation: {perm}")
    return ppermute(x, axis_name, zip(perm, range(len(perm)), strict=True))


def _route(over: Over, pairs: Pairs) -> Callable[[Tensors], Tensors]:
    """Moves values over several axes: the process axes are devices, the others are their lanes.

    Every lane picks one of its candidates: all lanes of its device, what arrives here with every
    shift, and zeros.
    """
    sizes = [axis.size for axis in over.axes]
    crossed = [k for k, axis in enumerate(over.axes) if axis.group is not None]
    devices = joined([over.axes[k] for k in crossed])
    assert len(devices) <= 1  # process axes are of one mesh
    num_devices = math.prod(sizes[k] for k in crossed)
    grid = np.arange(over.size).reshape(sizes)  # row-major index by [device, lane]
    grid = np.moveaxis(grid, crossed, range(len(crossed))).reshape(num_devices, -1)
    place_of = {int(k): place for place, k in np.ndenumerate(grid)}

    sent: dict[int, list[list[int]]] = {}  # shift -> per device, the lanes it sends
    got: dict[int, tuple[int, int]] = {}  # destination -> (shift, place in that message)
    for source, destination in pairs:
        (device, lane), (to, _) = place_of[source], place_of[destination]
        shift = (to - device) % num_devices
        if shift:
            leaving = sent.setdefault(shift, [[] for _ in range(num_devices)])[device]
            got[destination] = shift, len(leaving)
            leaving.append(lane)
        else:
            got[destination] = 0, lane

    start, end = {0: 0}, grid.shape[1]
    for shift, rows in sent.items():
        start[shift] = end
        end += max(map(len, rows))
    choice = {k: start[got[k][0]] + got[k][1] if k in got else end for k in range(over.size)}
    place = entry(over.index(), choice)
    shifts = [_shift(devices[0], shift, rows) for shift, rows in sent.items()]
    lanes = [axis for k, axis in enumerate(over.along) if k not in crossed]

    def run(xs: Tensors) -> Tensors:
        here = gathered(lanes, xs)
        arrived = [shift(here) for shift in shifts]
        nothing = [torch.zeros_like(x[:1]) for x in here]
        candidates = zip(here, *arrived, nothing, strict=True)
        return [pick(torch.cat(given), place) for given in candidates]

    return run


def _shift(devices: Axis, shift: int, leaving: list[list[int]]) -> Callable[[Tensors], Tensors]:
    """Sends one message: of the lanes of devices p, those that are ``leaving``, to devices
    p + shift.  A device with fewer to send repeats lane 0.
    """
    count = max(map(len, leaving))
    table = torch.tensor(
        [lanes + [0] * (count - len(lanes)) for lanes in leaving], device=devices.index.device
    )
    lanes = pick(table, devices.index)
    pairs = tuple((k, (k + shift) % devices.size) for k, row in enumerate(leaving) if row)
    step = whole(devices)
    return lambda xs: step.run(lambda scope: Permute(scope, pairs), [pick(x, lanes) for x in xs])
