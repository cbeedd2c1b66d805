"""Along which axes values vary: JAX's *varying manual axes*.

Inside a ``shard_map`` with ``check_vma=True`` every value has such a set of axes, as a part of its
type.  An argument varies along the axes that cut it.  The result of an operation varies along the
axes along which any operand does; collectives add and remove axes.

A derivative is that of the typed program.  Where a value meets one that varies along more axes, it
is cast first (``_trace/casts``), and the transpose of the cast is the sum over the devices: this is
why the gradient of a value that devices share is summed by itself.

The axes are noted of the memory that holds a value, below all function transforms.  So all views of
a value have the same, also after a write through one of them, and so have the tensors that autograd
saves.

``_trace/replication`` asks another question of the finished graph: which values may differ.  What
``all_gather`` and ``pcast`` return varies by its type, but is the same on all devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from torchpmap._base.storages import storage_of
from torchpmap._base.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    innermost,
    with_memory,
)
from torchpmap._base.writes import written_values
from torchpmap._layout.axis_stack import Axis

Axes = frozenset[Axis]
NONE: Axes = frozenset()

_AXES = "torchpmap_axes"
_GRADIENT = "torchpmap_gradient"


def axes_of(value: torch.Tensor) -> Axes:
    """The tracked axes along which a value varies."""
    found: Axes = getattr(_memory(value), _AXES, NONE)
    return found


def set_axes(value: torch.Tensor, axes: Axes) -> None:
    memory = _memory(value)
    if axes or hasattr(memory, _AXES):
        setattr(memory, _AXES, axes)


def union(values: Iterable[torch.Tensor]) -> Axes:
    """The axes along which any of the values varies."""
    return NONE.union(*map(axes_of, values))


def is_gradient(value: torch.Tensor) -> bool:
    """Whether a value is computed from gradients alone."""
    return getattr(_memory(value), _GRADIENT, False)


def mark_gradient(value: torch.Tensor) -> None:
    setattr(_memory(value), _GRADIENT, True)


def in_order(axes: Axes) -> list[Axis]:
    """Axes in an order that is the same on all devices."""
    return sorted(axes, key=lambda axis: (axis.line.dims if axis.line else (), str(axis.name)))


def named(axes: Axes) -> str:
    """Axes, as messages name them."""
    return " and ".join(repr(axis.name) for axis in in_order(axes))


def _memory(value: torch.Tensor) -> Any:
    storage = storage_of(value)
    return innermost(value) if storage is None else storage


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class Tracking(TorchDispatchMode):
    """Notes of the result of each operation what its operands have: axes, and being gradients."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = with_memory(func)(*args, **kwargs)
        written = written_values(func, args, kwargs) if isinstance(func, OpOverload) else []
        given = [*args, *kwargs.values()]
        if is_by_element(func):
            results = result or args[0]  # a list that is written to is the first argument
            for k, each in enumerate(results):
                row = [x[k : k + 1] if isinstance(x, list | tuple) else x for x in given]
                _note(list(tensors_in(row)), [each])
        else:
            _note(list(tensors_in(given)), tensors_in([result, *written]))
        return result


def is_by_element(func: Any) -> bool:
    """Whether an operation takes lists, and computes each place by itself."""
    name = getattr(func, "_opname", "")
    return name.startswith(("_foreach_", "_fused_"))


def _note(operands: Sequence[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
    axes = union(operands)
    gradients = bool(operands) and all(map(is_gradient, operands))
    if axes or gradients:
        for x in results:
            set_axes(x, axes | axes_of(x))
            if gradients:
                mark_gradient(x)
