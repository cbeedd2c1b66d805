"""A call of one operation, tried before anything is sent to the devices.

On meta tensors it shows its errors, which are torch's own, and the shapes and dtypes of its
results.  Where meta tensors are less strict than a device, it runs on numbers that stand for the
operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap._base.inexact import is_inexact
from torchpmap._base.pytree import TreeSpec, tree_flatten, tree_unflatten
from torchpmap._base.torch_internals import outside_modes
from torchpmap._base.writes import written_names, written_values
from torchpmap._sharded.arguments import (
    Slot,
    Unsupported,
    call,
    filled,
    is_by_columns,
    positional,
)
from torchpmap._sharded.layers import INSTEAD, run_on_blocks
from torchpmap._sharded.memory import Remote
from torchpmap._sharded.rules.compute import elementwise
from torchpmap._sharded.rules.table import rule_of
from torchpmap._sharded.unforeseen import name_of


@dataclass(frozen=True)
class Trial:
    """A call on meta tensors."""

    func: Any
    arguments: dict[str, Any]
    """With a ``Slot`` for each operand."""
    values: list[Any]
    """Meta tensors and numbers, per operand."""
    written: tuple[int, ...]
    leaves: tuple[int | None, ...]
    spec: TreeSpec
    results: tuple[torch.Tensor, ...]
    """The new tensors, or what was written if there are none."""

    makes_new: bool
    by_columns: bool
    """See ``is_by_columns``."""

    def result(self, values: Sequence[Any]) -> Any:
        """What the operation returns, made of what it wrote and its results."""
        if self.leaves == (0,) and self.spec.is_leaf():  # faster than tree_unflatten
            return values[0]
        leaves = [None if k is None else values[k] for k in self.leaves]
        return tree_unflatten(leaves, self.spec)

    @property
    def numbers(self) -> set[int]:
        """Which operands are numbers."""
        return {k for k, x in enumerate(self.values) if not isinstance(x, torch.Tensor)}

    @property
    def row(self) -> int | None:
        """Which operand is the number of the row that it takes or puts; None: there is none."""
        match self.arguments.get("index"):
            case Slot(position) if position in self.numbers:
                return position
        return None

    @property
    def num_rows(self) -> int:
        """Of which ``row`` is one."""
        return int(self.values[0].shape[self.arguments["dim"]])

    @property
    def has_integers(self) -> bool:
        """Whether a tensor is of an integer dtype, for which a number may be out of range."""
        every = (*self.values, *self.results)
        return any(isinstance(x, torch.Tensor) and not is_inexact(x) for x in every)

    def check_numbers(self, operands: Sequence[Any]) -> None:
        """Raise what torch raises for a row that is not there, and for numbers that do not suit
        integers, such as 300 for uint8.
        """
        if self.row is not None:
            if not -self.num_rows <= operands[self.row] < self.num_rows:
                raise IndexError(
                    f"select(): index {operands[self.row]} out of range for tensor of size "
                    f"{list(self.values[0].shape)} at dimension {self.arguments['dim']}"
                )
            return
        if not self.has_integers:
            return
        with outside_modes(), torch.no_grad():
            ones = stand_ins(operands, lambda x: torch.ones((1,) * x.ndim, dtype=x.dtype))
            call(self.func, filled(self.arguments, ones))

    def check_places(self, operands: Sequence[Any]) -> None:
        """Raise ``IndexError`` for places that are no integers, and for those on the host that are
        not in what is written: the error of a device would come late, and leave no value.
        """
        given = self.arguments.get("index", self.arguments.get("indices"))
        if given is None or self.arguments.get("self") != Slot(self.written[0]):
            return
        shape = self.values[self.written[0]].shape or (1,)
        dim = self.arguments.get("dim", 0) % len(shape)
        if name_of(self.func) == "put_":
            shape = (math.prod(shape),)
        for k, slot in enumerate(given) if isinstance(given, list) else [(dim, given)]:
            if slot is None:
                continue
            places, size = operands[slot.position], shape[k]
            if places.is_floating_point() or places.is_complex():
                raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
            if isinstance(places, Remote):
                continue
            least = -size if name_of(self.func) in _FROM_END else 0
            with outside_modes():
                wrong = places[(places < least) | (places >= size)].tolist()
            if wrong:
                raise IndexError(
                    f"{self.func}: index {wrong[0]} is out of bounds for dimension {k} with size "
                    f"{size}"
                )


_FROM_END = ("_index_put_impl_", "index_fill_", "index_put_", "put_")
"""They take negative places, which count from the end."""


def tried(
    func: Any, arguments: dict[str, Any], operands: Sequence[Any], *, on_cpu: bool = True
) -> Trial:
    """Run a call on meta tensors of the whole shapes; ``on_cpu``: whether the devices are CPUs."""
    if name_of(func) in INSTEAD and written_names(func._schema.arguments):
        raise Unsupported  # out=: what runs instead returns its results
    values = stand_ins(operands, lambda x: meta(x.shape, x.dtype))
    result = masked(on_meta(func, arguments, values), arguments)
    check_here(func, arguments, operands, on_cpu=on_cpu)
    leaves, spec = tree_flatten(result)
    if any(not (leaf is None or isinstance(leaf, torch.Tensor)) for leaf in leaves):
        raise Unsupported
    slots = written_values(func, (), arguments)
    written = tuple(slot.position for slot in slots if isinstance(slot, Slot))
    for position in written:
        insist_on_kind(func, operands[position], values[position])
    places = {id(values[position]): k for k, position in enumerate(written)}
    results = tuple(leaf for leaf in leaves if leaf is not None and id(leaf) not in places)
    if not (results or written) or (results and written and name_of(func) not in INSTEAD):
        raise Unsupported
    places |= {id(leaf): len(written) + k for k, leaf in enumerate(results)}
    numbers_of = tuple(None if leaf is None else places[id(leaf)] for leaf in leaves)
    written_ones = tuple(values[k] for k in written)
    return Trial(
        func,
        arguments,
        values,
        written,
        numbers_of,
        spec,
        results or written_ones,
        bool(results),
        is_by_columns(func, operands),
    )


def insist_on_kind(func: Any, target: torch.Tensor, written: torch.Tensor) -> None:
    """Raise ``RuntimeError`` if what is written to a tensor is of another shape or dtype."""
    if (target.shape, target.dtype) != (written.shape, written.dtype):
        raise RuntimeError(
            f"{func} would change the shape or dtype of a ShardedTensor in place; use the "
            "out-of-place operation."
        )


def on_meta(func: Any, arguments: dict[str, Any], values: Sequence[Any]) -> Any:
    with outside_modes(), torch.no_grad():
        try:
            return _as_on_device(func, filled(arguments, values))
        except NotImplementedError:
            raise Unsupported from None
        except Exception as error:
            if rule_of(func) is not None:  # without a rule it may need the values
                _raise_as_here(func, arguments, values, error)
            raise Unsupported from None


def _as_on_device(func: Any, arguments: dict[str, Any]) -> Any:
    """Run what a device runs for an operation."""
    if name_of(func) not in INSTEAD:
        return call(func, arguments)
    args, kwargs = positional(func, arguments)
    return run_on_blocks(name_of(func), 1, "", *args, **kwargs)


def masked(result: Any, arguments: dict[str, Any]) -> Any:
    """Drop gradients that are not wanted: some operations return them on meta tensors only."""
    wanted = arguments.get("output_mask")
    if wanted is None:
        return result
    return tuple(x if wants else None for x, wants in zip(result, wanted, strict=True))


_COMMON = frozenset([torch.float32, torch.float64])
_MAX_TRIED = 2**16


def check_here(
    func: Any, arguments: dict[str, Any], values: Sequence[Any], *, on_cpu: bool = True
) -> None:
    """Run a call in this process, on numbers that stand for its operands, where meta tensors allow
    what kernels refuse and the error of a device would come late.

    Some reductions refuse nothing; on CPUs, dtypes other than the common ones are refused.  An
    elementwise operation is tried on a few elements (some kernels refuse one alone).  Another large
    call is not tried: that would take as long as the call.

    Raises:
        Unsupported: it fails, but on other values it may not.
        What torch raises, if it does not depend on the values.
    """
    if rule_of(func) is elementwise:
        values = stand_ins(values, lambda x: meta([min(n, 2) for n in x.shape], x.dtype))
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    is_common = {x.dtype for x in tensors} <= _COMMON or name_of(func) in INSTEAD
    is_large = sum(x.numel() for x in tensors) > _MAX_TRIED
    if all(x.numel() for x in tensors) and (is_common or is_large or not on_cpu):
        return
    with outside_modes(), torch.no_grad():
        try:
            _raise_as_here(func, arguments, values, Unsupported())
        except Exception:
            if rule_of(func) is not None:  # without a rule it may need the values
                raise
            raise Unsupported from None


def _raise_as_here(
    func: Any, arguments: dict[str, Any], values: Sequence[Any], error: Exception
) -> None:
    """Raise what a call raises in this process; on meta tensors some errors have another text."""
    # no divisor may be 0, and places must be
    new = torch.ones if rule_of(func) is elementwise else torch.zeros
    try:
        given = stand_ins(values, lambda x: new(x.shape, dtype=x.dtype, device="cpu"))
    except RuntimeError:  # not enough memory
        raise error from None
    _as_on_device(func, filled(arguments, given))


def stand_ins(values: Sequence[Any], make: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Operands with other tensors in the places of tensors."""
    return [make(x) if isinstance(x, torch.Tensor) else x for x in values]


def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
