"""``scan`` and ``map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from torchpmap._base.boundary import outside_graphs
from torchpmap._base.inexact import kinds_of
from torchpmap._base.torch_internals import fake_mode, tracing_mode
from torchpmap._collectives.groups import varied
from torchpmap._collectives.varying import axes_of
from torchpmap._loops.bodies import Function, private
from torchpmap._loops.checks import check_function, whole_number
from torchpmap._loops.emit import discarded
from torchpmap._loops.scan_node import Scan
from torchpmap._loops.surroundings import Lifted, Surroundings, find_closures
from torchpmap._loops.trees import (
    Parts,
    Tensors,
    Tree,
    check_carry,
    kind,
    take_apart,
    with_weak_carry,
)
from torchpmap._loops.without_values import without_values
from torchpmap._trace import transform_rules
from torchpmap._trace.transformable import apply

_Carry = TypeVar("_Carry")


@outside_graphs
def scan(
    f: Callable[[_Carry, Any], tuple[_Carry, Any]],
    init: _Carry,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[_Carry, Any]:
    """Run ``f`` over the rows of ``xs``, each time on what it returned before; returns the last
    carry and the stacked outputs.

    scan: (f: (carry, x) -> (carry, y), carry, x[n, ...]) -> (carry, y[n, ...])

    Like this loop, but in a mapped function the body is traced and compiled once, whatever the
    number of steps::

        ys = []
        for x in xs:
            carry, y = f(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    It can be differentiated in reverse and forward mode, any number of times.  The gradient of a
    traced scan stores the carry of every step, and computes the rest of a step again.  Outside of a
    trace ``f`` is called for each step.

    Args:
        f: the body; ``f(carry, x)`` returns the next carry, whose structure, shapes and dtypes are
            those of the first, and an output.
        init: the first carry: tensors, numpy arrays, numbers and None in any pytree.  A Python
            number takes the dtype that comes out of the body.
        xs: a pytree of tensors with the same size of dim 0, or None.
        length: the number of steps; needed if ``xs`` has no tensors.
        reverse: whether to go from the last row to the first; outputs stand at the place of their
            row.
        unroll: True puts all steps into the graph.  Numbers change nothing.

    Returns:
        The pair (last carry, outputs with the steps along dim 0; None where ``f`` returns None).

    Raises:
        ValueError: rows of different numbers, or neither ``xs`` nor ``length``.
        TypeError: the carry changes its structure, a shape or a dtype.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.scan(lambda total, x: (total + x, total * x), 1.0, torch.tensor([2.0, 3.0]))
        (tensor(6.), tensor([2., 9.]))
        >>> means = tp.pmap(lambda x: tp.scan(lambda c, _: (tp.pmean(c, "i") + x, c), x, length=3),
        ...                 axis_name="i")
        >>> means(torch.tensor([0.0, 4.0]))[0].tolist()
        [6.0, 10.0]

    Source: jax.lax.scan; checked in tests/loops.
    """
    given, rows = take_apart(init, "carry"), take_apart(xs, "xs")
    steps, unrolled = _length("scan", rows, length), check_unroll("scan", unroll)
    body = Body("scan", f, given.tree, rows.tree)
    carry, ys = run_scan(body, given, rows.tensors, steps, reverse, is_unrolled=unrolled)
    return given.tree.build(carry), body.results(ys)


@outside_graphs
def map(f: Callable[[Any], Any], xs: Any, batch_size: int | None = None) -> Any:
    """Apply ``f`` to each row of ``xs``, one after the other; returns the stacked results.

    map: (f: x -> y, x[n, ...]) -> y[n, ...]

    ``tp.vmap`` computes all rows at once; this needs the memory of one row, or of a batch.

    Args:
        f: a function of one row.
        xs: a pytree of tensors with the same size of dim 0.
        batch_size: how many rows to compute at once, with ``torch.func.vmap``; the last batch may
            be smaller.

    Returns:
        The results, with the rows along dim 0.

    Raises:
        ValueError: rows of different numbers, or none at all.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.map(lambda x: x.sum(), torch.arange(6.0).reshape(3, 2))
        tensor([1., 5., 9.])

    Source: jax.lax.map; checked in tests/loops.
    """
    check_function("map", "f", f)
    rows = take_apart(xs, "xs")
    length = _length("map", rows, None)
    if batch_size is not None:
        batch_size = whole_number("map", "batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"map: batch_size must be positive, but got {batch_size}.")
        return _in_batches(f, rows, length, batch_size)
    none = take_apart(None, "carry")
    body = Body("map", lambda _, x: (None, f(x)), none.tree, rows.tree)
    _, ys = run_scan(body, none, rows.tensors, length, reverse=False)
    return body.results(ys)


def _in_batches(f: Callable[[Any], Any], rows: Parts, length: int, size: int) -> Any:
    size = min(size, max(length, 1))
    whole = length // size * size
    trees: list[Tree] = []
    function = Function("map", f, rows.tree)

    def one(*tensors: torch.Tensor) -> Any:
        found = take_apart(function(tensors), "output")
        trees[:] = [found.tree]
        return tuple(found.tensors)

    def batch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(transform_rules.vmap(one, 0, "different")(*tensors))

    batches = [x[:whole].reshape(whole // size, size, *x.shape[1:]) for x in rows.tensors]
    results = map(lambda tensors: batch(tensors), batches)
    results = [y.reshape(whole, *y.shape[2:]) for y in results]
    if whole < length:
        rest = batch([x[whole:] for x in rows.tensors])
        results = [torch.cat(pair) for pair in zip(results, rest, strict=True)]
    return trees[-1].build(results)


def check_unroll(name: str, unroll: int | bool | None) -> bool:
    """Whether all steps go into the graph."""
    if unroll is None or isinstance(unroll, bool):
        return unroll is True
    if whole_number(name, "unroll", unroll) < 1:
        raise ValueError(f"{name}: unroll must be a positive number or a bool, but got {unroll}.")
    return False


def _length(name: str, rows: Parts, length: int | None) -> int:
    paths = rows.tree.paths("xs")
    for x, path in zip(rows.tensors, paths, strict=True):
        if not x.dim():
            raise ValueError(f"{name}: {path} has no leading dim to scan over; it is a number.")
    sizes = [x.shape[0] for x in rows.tensors]
    shown = ", ".join(f"{size} ({path})" for size, path in zip(sizes, paths, strict=True))
    if length is not None:
        length = whole_number(name, "length", length)
        if length < 0:
            raise ValueError(f"{name}: length must not be negative, but got {length}.")
        if any(size != length for size in sizes):
            raise ValueError(
                f"{name} got length={length}, but the leading dims of xs have the sizes {shown}."
            )
        return length
    if not sizes:
        raise ValueError(
            f"{name} got no values to scan over and no length: give xs, or the length."
        )
    if len(set(sizes)) > 1:
        raise ValueError(f"{name} got values with different leading sizes: {shown}.")
    return sizes[0]


# -- the loop --------------------------------------------------------------------------------------


@dataclass
class Body:
    """The body of a scan, on lists of tensors."""

    name: str
    fun: Callable[[Any, Any], Any]
    carry: Tree
    row: Tree
    _ys: Tree | None = None

    def __post_init__(self) -> None:
        check_function(self.name, "f", self.fun)
        self._call = Function(self.name, self.fun, self.carry, self.row)

    def first(self, carry: Sequence[torch.Tensor], row: Sequence[torch.Tensor]) -> Any:
        """What the function returns: (the next carry, the output), taken apart."""
        returned = self._call(carry, row)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            shown = type(returned).__name__
            if isinstance(returned, torch.Tensor):
                shown = f"a tensor of kind {kind(returned)}"
            elif isinstance(returned, tuple | list):
                shown = f"a {shown} of {len(returned)}"
            raise TypeError(
                f"{self.name}: the body must return a pair (carry, output), but returned {shown}. "
                "An output may be None."
            )
        return take_apart(returned[0], "carry"), take_apart(returned[1], "output")

    def __call__(
        self, carry: Sequence[torch.Tensor], row: Sequence[torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        after, ys = self.first(carry, row)
        if self._ys is None:
            self._ys = ys.tree
        elif self._ys != ys.tree:
            raise TypeError(
                f"{self.name}: the body must return outputs of the same structure in each step, "
                f"but returned {self._ys} and {ys.tree}."
            )
        return check_carry(self.name, self.carry, carry, after), ys.tensors

    def results(self, ys: Sequence[torch.Tensor]) -> Any:
        assert self._ys is not None
        return self._ys.build(ys)


def is_staged() -> bool:
    """Whether the caller's operations become nodes of a graph, and their values are not known."""
    return tracing_mode() is not None and fake_mode() is not None


def run_scan(
    body: Body,
    init: Parts,
    xs: Sequence[torch.Tensor],
    length: int,
    reverse: bool,
    *,
    is_unrolled: bool = False,
) -> tuple[Tensors, Tensors]:
    """(the last carry, the stacked outputs)"""
    if is_staged() and length > 1 and not is_unrolled:
        return _staged(body, init, xs, length, reverse)
    surroundings = Surroundings()
    numbers = range(length)
    rows = list(zip(*(x.unbind(0) for x in xs), strict=True)) if xs else [()] * length
    carry = list(init.tensors)
    ys: list[Tensors] = [[] for _ in numbers]
    if any(init.weak):
        row = rows[0] if length else _some_row(xs)
        carry = first_carry(init, lambda carry: body.first(carry, row)[0], surroundings)
    if not length:
        return private(carry), _no_rows(body, carry, _some_row(xs), surroundings)
    for k in reversed(numbers) if reverse else numbers:
        with surroundings.step(k):
            carry, ys[k] = body(carry, rows[k])
    return private(carry), [torch.stack(y) for y in zip(*ys, strict=True)]


def _some_row(xs: Sequence[torch.Tensor]) -> Tensors:
    """A row for kinds alone, if there is none."""
    return [x.new_zeros(x.shape[1:]) for x in xs]


def _no_rows(
    body: Body, carry: Tensors, row: Sequence[torch.Tensor], surroundings: Surroundings
) -> Tensors:
    """The outputs of no step at all."""

    def step() -> Parts:
        _, ys = body(carry, row)
        return Parts(body.carry, ys, ())

    kinds = kinds_of(infer_kinds(step, surroundings).tensors)
    surroundings.advance(0)
    return [torch.zeros(0, *shape, dtype=dtype, device=device) for shape, dtype, device in kinds]


def first_carry(
    init: Parts, first: Callable[[Sequence[Any]], Parts], surroundings: Surroundings
) -> Tensors:
    """The first carry, in the dtypes that come out of the body; ``first``: the carry after a first
    step.
    """
    return with_weak_carry(init, lambda carry: infer_kinds(lambda: first(carry), surroundings))


def infer_kinds(step: Callable[[], Parts], surroundings: Surroundings) -> Parts:
    """What a first step returns, for its kinds.  It runs only if they are not known without it."""
    with surroundings.restored(torch.tensor(0)):
        if is_staged():
            with discarded():
                return step()
        found = without_values(step)
        return step() if found is None else found


def lifted_carry(
    init: Parts,
    surroundings: Surroundings,
    once: Callable[..., tuple[Tensors, Tensors, int]],
    *more: Tensors,
) -> tuple[Tensors, Lifted]:
    """The first carry, in the dtypes and varying along the axes that the carry has after any step,
    and the body with what it closes over.

    ``once`` gets copies of the carry and of ``more``.  It runs a step, and returns the carry, what
    the step returns (the next carry comes first), and how many random numbers it drew.
    """
    while True:
        (carry, found, draws), closures = find_closures(once, init.tensors, *more)
        pairs = list(zip(init.tensors, found, strict=False))
        if all(axes_of(after) <= axes_of(x) for x, after in pairs):
            break
        init = replace(init, tensors=[varied(x, axes_of(after)) for x, after in pairs])
    pairs = list(zip(init.tensors, carry, strict=True))
    first = [x if x.dtype == like.dtype else x.to(like.dtype) for x, like in pairs]
    return first, Lifted(surroundings, closures, draws)


def _staged(
    body: Body, init: Parts, xs: Sequence[torch.Tensor], length: int, reverse: bool
) -> tuple[Tensors, Tensors]:
    surroundings = Surroundings()
    numbers = torch.arange(length)  # on the device; captured rows are still on the host

    def once(start: Tensors, first: Tensors) -> tuple[Tensors, Tensors, int]:
        number, *row = first
        given = replace(init, tensors=start)
        carry = first_carry(given, lambda carry: body.first(carry, row)[0], surroundings)
        with surroundings.restored(number):
            after, ys = body(carry, row)
            return carry, [*after, *ys], surroundings.draws()

    first, lifted = lifted_carry(init, surroundings, once, [x[0] for x in (numbers, *xs)])

    def step(constants: Any, carry: Any, given: Any) -> Any:
        number, *row = given
        return lifted.run(lambda: body(carry, row), constants, number)

    loop = Scan(step, len(lifted.constants), len(first), length, reverse)
    # what the caller writes to afterwards is not what a backward pass sees
    results = apply(loop, [*lifted.constants, *private(first), numbers, *private(xs)])
    return results[: len(first)], results[len(first) :]
