"""What it means that an operation can run block by block.

A signature names the dims of an operation's operands and results, as ``einsum`` does.  A dim with a
label can be cut: the operation on the k-th blocks along that label gives the k-th block of the
result.  ``None`` marks a dim along which the operation mixes elements, or that is broadcast.

    softmax(x, dim=1)    x: (0, None)            result: (0, None)
    x.sum(0)             x: (0, 1)               result: (1,), partial sums if 0 is cut
    x @ w                x: (i, k)  w: (k, j)    result: (i, j), partial sums if k is cut

A label is cut over some dims of the grid of devices, and all operands with that label are cut
alike: if an operand has larger blocks, or is whole, each device takes its part.  No dim of the grid
cuts two labels.  A result without a label that is cut is put together from the partial results of
the devices along those dims, if the signature says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torchpmap._layout.grid import Cut, trimmed

Labels = tuple[Hashable, ...]
"""A label per dim, or None."""

Combine = Literal["sum", "mean", "max", "min", "prod", "norm", "logsumexp", "equal"]
"""How partial results become the whole; ``equal``: every device has it already."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument."""

    position: int
    shape: tuple[int, ...]
    cut: Cut
    """How it lies on the grid of devices."""
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
    sizes: tuple[int, ...]
    """Of the grid of devices."""

    def parts(self, over: Iterable[int]) -> int:
        """Into how many blocks these dims of the grid cut."""
        return math.prod(self.sizes[k] for k in over)


class Rows(NamedTuple):
    """Rows ``start``, ``start + step``, ... of a dim that is cut: each device has those in its own
    block.
    """

    dim: int
    start: int
    step: int
    length: int
    is_back: bool
    """Whether they are put: into the first of two operands, or into zeros."""
    over: tuple[int, ...] = ()
    """The dims of the grid that cut the dim."""


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
    once: tuple[int, ...] = ()
    """Operands that each device would add to its partial result: only one of them may."""
    rows: Rows | None = None
    """What it takes or puts along the dim of that label, should this be cut."""


Rule = Callable[[Call], Signature | None]


@dataclass(frozen=True)
class Combination:
    """How devices put a result together from their parts."""

    kind: Combine
    over: tuple[int, ...]
    """The dims of the grid along which the devices have other parts."""


@dataclass(frozen=True)
class Placement:
    """How a call runs on the devices."""

    operands: dict[int, Cut]
    """How an operand must be cut, by position."""
    results: tuple[Cut, ...]
    combine: tuple[Combination | None, ...]
    over: tuple[int, ...] = ()
    """All dims of the grid along which devices have other blocks."""
    signature: Signature = Signature({}, ())
    rows: Rows | None = None


def placement_of(call: Call, rule: Rule | None, prefer: Cut = ()) -> Placement | None:
    """Where the operands and results of a call live; None if it cannot run block by block.

    ``prefer`` is the cut of the first result if the operands allow it.
    """
    is_cut = any(operand.cut for operand in call.operands)
    signature = None if rule is None or not (is_cut or prefer) else rule(call)
    for known in (call, _without_trivial_cuts(call)):
        is_cut = any(operand.cut for operand in known.operands)
        for wish in (prefer, ()):
            if signature is not None and (is_cut or wish):
                placement = _placed(known, signature, wish)
                if placement is not None:
                    return placement
    if is_cut:
        return None
    whole = ((),) * len(call.results)
    own = {operand.position: operand.cut if operand.written else () for operand in call.operands}
    return Placement(own, whole, (None,) * len(whole))


def _without_trivial_cuts(call: Call) -> Call:
    """The call without cuts into a single block, which need not be kept."""

    def real(cut: Cut) -> Cut:
        return trimmed(tuple(k for k in over if call.sizes[k] > 1) for over in cut)

    return replace(call, operands=tuple(replace(o, cut=real(o.cut)) for o in call.operands))


def _placed(call: Call, signature: Signature, prefer: Cut) -> Placement | None:
    cuts = _cut_labels(call, signature, prefer)
    if cuts is None:
        return None
    wanted: dict[int, Cut] = {}
    for operand in call.operands:
        wanted[operand.position] = cut = _cut(signature.operands.get(operand.position, ()), cuts)
        changes = operand.written and cut != operand.cut
        if changes or not _divides(call, operand.shape, cut):
            return None
    results: list[Cut] = []
    combine: list[Combination | None] = []
    kinds = signature.combine or (None,) * len(signature.results)
    for shape, labels, kind in zip(call.results, signature.results, kinds, strict=True):
        missing = sorted(k for label, over in cuts.items() if label not in labels for k in over)
        cut = _cut(labels, cuts)
        if (missing and kind is None) or not _divides(call, shape, cut):
            return None
        results.append(cut)
        combine.append(Combination(kind, tuple(missing)) if missing and kind else None)
    over = tuple(sorted(k for dims in cuts.values() for k in dims))
    rows = signature.rows
    if rows is not None:
        along = cuts.get(rows.dim, ())
        rows = rows._replace(over=along) if along else None
    return Placement(wanted, tuple(results), tuple(combine), over, signature, rows)


def _cut_labels(
    call: Call, signature: Signature, prefer: Cut
) -> dict[Hashable, tuple[int, ...]] | None:
    """The dims of the grid that cut each label; None if the operands do not agree."""
    given = [(signature.operands.get(o.position), o.cut) for o in call.operands if o.cut]
    if prefer:
        given.append((signature.results[0], prefer))
    cuts: dict[Hashable, tuple[int, ...]] = {}
    for labels, cut in given:
        for dim, over in enumerate(cut):
            label = None if labels is None else labels[dim]
            if not over:
                continue
            if label is None:
                return None
            short, long = sorted((cuts.get(label, ()), over), key=len)
            if long[: len(short)] != short:
                return None
            cuts[label] = long
    used = [k for over in cuts.values() for k in over]
    return cuts if len(used) == len(set(used)) else None


def _cut(labels: Labels, cuts: Mapping[Hashable, tuple[int, ...]]) -> Cut:
    """The cut of a value with these labels; a label that it has twice is cut where it is first."""
    return trimmed(
        cuts.get(label, ()) if label not in labels[:dim] else () for dim, label in enumerate(labels)
    )


def _divides(call: Call, shape: tuple[int, ...], cut: Cut) -> bool:
    return all(shape[dim] % call.parts(over) == 0 for dim, over in enumerate(cut))
