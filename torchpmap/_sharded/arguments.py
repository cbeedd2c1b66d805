"""The arguments of an operation: by name, with a slot for every tensor on the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from torchpmap._base.torch_internals import is_composite
from torchpmap._base.writes import written_arguments
from torchpmap._sharded.rules.compute import elementwise
from torchpmap._sharded.rules.table import rule_of

_aten = torch.ops.aten
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "device": (None, torch.device("cpu")),
    "layout": (None, torch.strided),
    "memory_format": (None, torch.contiguous_format, torch.preserve_format),
    "pin_memory": (None, False),
}
"""Arguments that are not passed to blocks, and the values at which they have no effect."""

CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)

_ZEROS = {
    _aten.empty_like.default: _aten.zeros_like.default,
    _aten.new_empty.default: _aten.new_zeros.default,
}


class Unsupported(Exception):  # not an error: it runs in this process
    """The call cannot run on the devices."""


@dataclass(frozen=True)
class Slot:
    """Stands for an operand in the arguments."""

    position: int


def slotted(
    named: dict[str, Any], is_operand: Callable[[str, Any], bool]
) -> tuple[dict[str, Any], list[Any]]:
    """The arguments with a ``Slot`` for every operand, and the operands.

    ``is_operand``: of the name of an argument (empty: it is an item of a list) and a value.
    """
    operands: list[Any] = []
    slots = {name: _slot(name, value, is_operand, operands) for name, value in named.items()}
    return slots, operands


def _slot(
    name: str, value: Any, is_operand: Callable[[str, Any], bool], operands: list[Any]
) -> Any:
    if is_operand(name, value):
        operands.append(value)
        return Slot(len(operands) - 1)
    if isinstance(value, list | tuple):
        return [_slot("", item, is_operand, operands) for item in value]
    return value


def plain(func: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Drop the arguments that say where and how tensors are stored."""
    for name, harmless in _SETTINGS.items():
        if name not in arguments:
            continue
        value = arguments.pop(name)
        # the strides of the result say where the channels lie, its blocks are as ever
        if value not in harmless and not (value in CHANNELS_LAST and rule_of(func) is elementwise):
            raise Unsupported
    if func is _aten.new_empty_strided.default:
        empty = torch.empty_strided(arguments["size"], arguments.pop("stride"), device="meta")
        if not _aten.is_non_overlapping_and_dense.default(empty):
            raise Unsupported
        func = _aten.new_empty.default
    # fresh memory has other contents on every device
    return _ZEROS.get(func, func), arguments


def filled(arguments: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """The arguments with ``values`` for the operands."""
    return {name: _fill(value, values) for name, value in arguments.items()}


def _fill(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, Slot):
        return values[value.position]
    if isinstance(value, list):
        return [_fill(item, values) for item in value]
    return value


def positional(func: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    schema = func._schema.arguments
    last = max(
        (k for k, a in enumerate(schema) if a.name in arguments and not a.kwarg_only), default=-1
    )
    args = tuple(arguments.get(a.name, a.default_value) for a in schema[: last + 1])
    return args, {a.name: arguments[a.name] for a in schema[last + 1 :] if a.name in arguments}


def call(func: Any, arguments: dict[str, Any]) -> Any:
    """Run an operation on arguments by name."""
    args, kwargs = positional(func, arguments)
    return func(*args, **kwargs)


_ORDERED = frozenset(
    [
        *("_adaptive_avg_pool2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"),
        *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "adaptive_max_pool2d"),
        *("as_strided_scatter", "avg_pool2d", "diagonal_scatter", "flip", "index_fill"),
        *("index_put", "max_pool2d_with_indices", "max_pool3d_with_indices", "pixel_shuffle"),
        *("pixel_unshuffle", "reflection_pad2d", "reflection_pad3d", "replication_pad2d"),
        *("replication_pad3d", "rot90", "select_scatter", "slice_scatter", "sort"),
        *("upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d", "upsample_nearest3d"),
        "upsample_trilinear3d",
    ]
)
"""Operations that are not elementwise, whose results are ordered in memory as their operands."""
_OF_NUMBERS = ("number", "Optional[number]", "Tensor", "Optional[Tensor]")
_AT_A_ROW = (_aten.select.int, _aten.select_scatter.default)


class Facts(NamedTuple):
    """What holds for every call of an operation."""

    names: tuple[str, ...]
    """Of its arguments."""
    slots: frozenset[str]
    """Arguments whose Python numbers are inputs, not part of the key."""
    writes: bool
    is_composite: bool
    """Whether it is defined by other operations."""
    keeps_order: bool
    """Whether the dims of its results have the same order in memory as its operands'."""
    asks_order: bool
    """Whether torch's derivative of it depends on whether its first operand is contiguous."""


@cache
def facts_of(func: Any) -> Facts:
    schema = func._schema
    names = tuple(argument.name for argument in schema.arguments)
    is_elementwise = rule_of(func) is elementwise
    numbers = [a.name for a in schema.arguments if str(a.type) in _OF_NUMBERS]
    return Facts(
        names,
        frozenset(numbers if is_elementwise else ()),
        bool(written_arguments(func)),
        is_composite(func),
        is_elementwise or schema.name.removeprefix("aten::") in _ORDERED,
        schema.name in ("aten::_linalg_det", "aten::_linalg_slogdet"),
    )


def number_slots(func: Any, facts: Facts, args: Sequence[Any]) -> frozenset[str]:
    """Arguments of a call whose Python numbers are inputs, not part of the key: also which row of a
    cut dim is taken or put, so that all rows have one plan.
    """
    if func not in _AT_A_ROW:
        return facts.slots
    layout: Any = getattr(args[0], "_layout", None)
    dim = args[facts.names.index("dim")]
    if layout is None or not -len(layout.shape) <= dim < len(layout.shape):
        return frozenset()
    is_cut = layout.shape[dim] != layout.block_shape[dim]
    return frozenset({"index"} if is_cut else ())


def is_by_columns(func: Any, operands: Sequence[Any]) -> bool:
    """Whether the devices must take the first operand by columns: torch factorizes a contiguous
    matrix transposed, and asks in the backward pass whether it was contiguous.
    """
    return facts_of(func).asks_order and not operands[0].is_contiguous()


def occurrences(kind: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of ``kind`` among the arguments, each as often as it is given."""
    return list(_occurrences(kind, [*args, *kwargs.values()]))


# a nested function that calls itself would keep the tensors until Python collects garbage
def _occurrences(kind: Any, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is kind:
            yield value
        elif isinstance(value, list | tuple):
            yield from _occurrences(kind, value)
