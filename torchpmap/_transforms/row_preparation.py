"""How the rows of a ``pmap`` call share the devices, and those of mapped functions inside it.

rows x cols = 2 x 4 on 8 devices    2 x 4 devices, one row and one column each
              4 x 4                 4 x 2 devices, one row and two columns each
              3 x 3                 3 x 1 devices: 9 do not fit, 3 x 2 does not divide
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchpmap._base.devices import Device
from torchpmap._base.errors import warn
from torchpmap._base.pytree import flatten_call
from torchpmap._layout.grid import Cut, Grid
from torchpmap._layout.layout import Layout, replicated_layout
from torchpmap._runtime.current import check_devices, process_count, process_index
from torchpmap._runtime.current import devices as all_devices
from torchpmap._sharded.tensor import ShardedTensor, spans_processes
from torchpmap._trace.row_program import RowProgram
from torchpmap._transforms.arguments import Options, split_statics, take_apart
from torchpmap._transforms.call import CallArguments, Static, leaf_kind
from torchpmap._transforms.preparation import Decided, Preparation

_Levels = list[tuple["RowPreparation", CallArguments]]
"""Mapped calls whose axes share the devices, the outermost first."""


class RowPreparation(Preparation):
    """The plans of a function that gets rows."""

    options: Options

    def __init__(
        self, fun: Callable[..., Any], options: Options, inner: RowPreparation | None = None
    ) -> None:
        """``inner``: the preparation of ``fun``, if it is mapped itself."""
        super().__init__(fun, options)
        self._inner = inner
        self._has_warned = False

    def arguments_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_all_rows: bool = False
    ) -> CallArguments:
        """Check a call (statics already wrapped) against the options, and take it apart.

        ``has_all_rows``: whether the arguments have the rows of all processes in any case.
        """
        options = self.options
        leaves, _ = flatten_call(args, kwargs)
        spans = has_all_rows or any(map(spans_processes, leaves))
        size = options.axis_size
        if size is not None and not spans and process_count() > 1:  # it counts all processes' rows
            within = options.devices or all_devices(options.platform)
            processes = len({device.process_index for device in within})
            if size % processes:
                raise ValueError(
                    f"{options.prefix}: axis_size={size} counts the rows of all processes, but "
                    f"does not divide over {processes} of them. Make it a multiple of {processes}."
                )
            options = replace(options, axis_size=size // processes)
        chosen = options.devices
        num_devices = None if chosen is None else len(chosen if spans else _here(chosen))
        return take_apart(self._fun, options, args, kwargs, num_devices, spans)

    def whole_program(self, call: CallArguments, count: int = 1) -> RowProgram:
        """``count``: the devices that share the rows."""
        options = self.options
        return RowProgram(
            self._fun,
            options.name,
            options.prefix,
            call.structure,
            call.template,
            (options.axis_name,),
            (call.size // count,),
            options.out_axes,
            options.randomness,
            self._seed,
            options.check_replicated,
        )

    def decide(self, call: CallArguments) -> Decided:
        levels = self._levels(call)
        grid = self._choose_devices(levels)
        if len(levels) == 1:
            self._warn_of_idle_devices(call.size, grid)
        program = _program_of(levels, grid)
        leaves = call.travelling(call.leaves)
        layouts = tuple(
            _layout_of(leaf, cut, grid) for leaf, cut in zip(leaves, program.all_cuts, strict=True)
        )
        return Decided(program, grid, layouts, (call.cuts, grid.sizes, program.sizes))

    def check_devices(self, call: CallArguments) -> None:
        """Raise the errors of choosing devices for a call."""
        self._choose_devices(self._levels(call))

    def _levels(self, call: CallArguments) -> _Levels:
        """This call, and those of mapped functions directly inside it that can share devices."""
        levels = [(self, call)]
        inner = self._inner if process_count() == 1 else None
        while inner is not None:
            found = _inner_call(inner._fun, inner.options, levels[-1][1])
            if found is None:
                break
            levels.append((inner, found))
            inner = inner._inner
        return levels

    def _choose_devices(self, levels: _Levels) -> Grid:
        """As many devices as can have equally many rows each; a given list is taken as it is.

        With several processes, the rows are those of this process, on its devices, unless an
        argument has the rows of all processes.
        """
        options = self.options
        spans = bool(levels[0][1].spans)
        sizes = [call.size for _, call in levels]
        names = tuple(each.options.axis_name for each, _ in levels)
        if options.devices is not None:
            mine = options.devices if spans else _here(options.devices)
            counts = counts_of_list(sizes, len(mine))
            if counts is None:
                raise ValueError(self._wrong_number(sizes, mine))
            check_devices(options.devices)
            if len(mine) < len(options.devices):
                counts = (len(options.devices),)
            return Grid(mine, options.devices, counts, names)
        available = tuple(all_devices(options.platform))
        if process_count() > 1 and not spans:
            return Grid(_here(available), available, (len(available),), names)
        counts = device_counts(sizes, len(available))
        devices = available[: math.prod(counts)]
        return Grid(devices, devices, counts, names)

    def _warn_of_idle_devices(self, rows: int, grid: Grid) -> None:
        """Warn once if devices that have nothing to do would make the call quicker."""
        if self._has_warned or self.options.devices is not None or process_count() > 1:
            return
        used, available = len(grid.devices), len(all_devices(self.options.platform))
        if rows // used <= -(-rows // available):
            return
        self._has_warned = True
        below, above = rows - rows % available, rows + -rows % available
        better = [f"{count} rows" for count in (below, above) if count > 0]
        warn(
            f"{self.options.prefix}: {rows} rows run on {used} of {available} devices, "
            f"{rows // used} on each, because each device gets equally many. Pass "
            f"{' or '.join(better)} (torchpmap.shard_batch(batch, stacked=True) pads a batch and "
            "returns a mask), or another number of devices to torchpmap.init."
        )

    def _wrong_number(self, sizes: Sequence[int], devices: tuple[Device, ...]) -> str:
        text = (
            f"{self.options.prefix}: Leading axis size of input to pmapped function must "
            f"equal the number of local devices passed to pmap. Got axis_size={sizes[0]}, "
            f"num_local_devices={len(devices)} (devices={list(devices)})."
        )
        if len(sizes) == 1:
            return text
        product = " * ".join(map(str, sizes))
        return f"{text} For a pmap of a pmap, {product} = {math.prod(sizes)} devices will do too."


def _program_of(levels: _Levels, grid: Grid) -> RowProgram:
    """The program of a call, with the programs inside it."""
    counts = (grid.sizes_here[0], *grid.sizes[1:])
    programs = [
        preparation.whole_program(call, count)
        for (preparation, call), count in zip(levels, counts, strict=True)
    ]
    return functools.reduce(lambda inner, own: own.of(inner, grid.sizes), reversed(programs))


def _here(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices of this process."""
    mine = process_index()
    return tuple(device for device in devices if device.process_index == mine)


def _layout_of(leaf: Any, cut: Cut, grid: Grid) -> Layout:
    """Where an argument goes; an unmapped one that all devices are known to share stays shared."""
    shape, dtype = leaf_kind(leaf)
    if cut:
        return grid.layout(shape, dtype, cut)
    is_known = type(leaf) is ShardedTensor and leaf.is_fully_replicated
    layout = replicated_layout(shape, dtype, grid.axis_devices)
    if is_known and leaf._alive()[0].same_place(layout):
        return layout
    return replicated_layout(shape, dtype, _here(grid.axis_devices))


def _inner_call(
    fun: Callable[..., Any], options: Options, outer: CallArguments
) -> CallArguments | None:
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
    shape, dtype = leaf_kind(leaf)
    row = [size for dim, size in enumerate(shape) if dim != axis]
    return torch.empty(row, dtype=dtype, device="meta")


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
