"""What it means that an operation can run block by block.

A signature names the dims of an operation's operands and results, as ``einsum`` does.  A dim with a
label can be cut: the operation on the k-th blocks along that label gives the k-th block of the
result.  ``None`` marks a dim along which the operation mixes elements, or that is broadcast.

    softmax(x, dim=1)    x: (0, None)            result: (0, None)
    x.sum(0)             x: (0, 1)               result: (1,), partial sums if 0 is cut
    x @ w                x: (i, k)  w: (k, j)    result: (i, j), partial sums if k is cut

So all operands that are cut must be cut along one label.  A result without that label is put
together from the partial results of the devices, if the signature says how.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

Labels = tuple[Hashable, ...]
"""A label per dim, or None."""

Combine = Literal["sum", "mean", "max", "min", "prod", "norm", "logsumexp", "equal"]
"""How partial results become the whole; ``equal``: every device has it already."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument."""

    position: int
    shape: tuple[int, ...]
    cut: int | None
    """The dim that is cut over the devices."""
    written: bool
    """Whether the operation writes to it; then it must keep its layout."""
    itemsize: int

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """An operation with its arguments by name, defaults included; tensors are ``Operand``s."""

    func: Any
    arguments: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[tuple[int, ...], ...]
    """Shapes."""
    num_devices: int


@dataclass(frozen=True)
class Signature:
    """What a rule says of a call."""

    operands: dict[int, Labels]
    """By position; an operand that is missing must be whole on every device."""
    results: tuple[Labels, ...]
    combine: tuple[Combine | None, ...] = ()
    """Per result, for a label that it lacks; empty: none can be put together."""
    size: str | None = None
    """The argument that is the shape of the first result; on blocks it gets the block's shape."""
    as_view: bool = False
    """Whether a block of the result is the block of the operand in another shape."""


Rule = Callable[[Call], Signature | None]


@dataclass(frozen=True)
class Placement:
    """How a call runs on the devices."""

    operands: dict[int, int | None]
    """The dim along which an operand must be cut, by position."""
    results: tuple[int | None, ...]
    combine: tuple[Combine | None, ...]
    size: str | None = None
    as_view: bool = False


def placement_of(call: Call, rule: Rule | None, prefer: int | None = None) -> Placement | None:
    """Where the operands and results of a call live; None if it cannot run block by block.

    ``prefer`` is the dim of the result to cut when no operand is cut.
    """
    cut = [operand for operand in call.operands if operand.cut is not None]
    if cut or prefer is not None:
        signature = None if rule is None else rule(call)
        if signature is not None:
            labels = {_label(signature, o) for o in cut} or {signature.results[0][prefer or 0]}
            if len(labels) == 1 and None not in labels:
                placement = _placed(call, signature, *labels)
                if placement is not None:
                    return placement
    if cut and call.num_devices > 1:
        return None
    whole = (None,) * len(call.results)
    return Placement(
        {o.position: o.cut if o.written else None for o in call.operands}, whole, whole
    )


def _label(signature: Signature, operand: Operand) -> Hashable:
    labels = signature.operands.get(operand.position)
    assert operand.cut is not None
    return None if labels is None else labels[operand.cut]


def _placed(call: Call, signature: Signature, label: Hashable) -> Placement | None:
    wanted: dict[int, int | None] = {}
    for operand in call.operands:
        labels = signature.operands.get(operand.position, ())
        dim = labels.index(label) if label in labels else None
        stays = operand.cut is not None or operand.written
        if (stays and dim != operand.cut) or not _divides(call, operand.shape, dim):
            return None
        wanted[operand.position] = dim
    dims: list[int | None] = []
    combine: list[Combine | None] = []
    kinds = signature.combine or (None,) * len(signature.results)
    for shape, labels, kind in zip(call.results, signature.results, kinds, strict=True):
        dim = labels.index(label) if label in labels else None
        if (dim is None and kind is None) or not _divides(call, shape, dim):
            return None
        dims.append(dim)
        combine.append(kind if dim is None else None)
    return Placement(wanted, tuple(dims), tuple(combine), signature.size, signature.as_view)


def _divides(call: Call, shape: tuple[int, ...], dim: int | None) -> bool:
    return dim is None or shape[dim] % call.num_devices == 0
