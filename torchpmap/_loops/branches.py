"""``cond`` and ``switch``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import tree_map
from torchpmap._base.torch_internals import (
    innermost,
    is_vmap_wrapper,
    layers,
    level_of,
)
from torchpmap._collectives.groups import varied
from torchpmap._collectives.varying import Axes, axes_of, union
from torchpmap._layout import axis_stack
from torchpmap._loops.branch_node import Branch
from torchpmap._loops.operator import apply
from torchpmap._loops.scan import is_staged
from torchpmap._loops.surroundings import Surroundings, find_closures, with_closures
from torchpmap._loops.trees import Parts, Tensors, Tree, category, kind, same_kinds, take_apart
from torchpmap._loops.without_values import without_values
from torchpmap._loops.writes import Writes
from torchpmap._trace.casts import is_tracked, must_vary


@boundary
def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Call one of two functions, by a predicate that may be a traced value.

    cond: (bool[], (*operands) -> r, (*operands) -> r, *operands) -> r

    Only the branch that is taken runs, except under ``vmap`` with a predicate that differs from row
    to row: then both run, and each row selects.  In a mapped function, devices may take different
    branches as long as these contain no collective over the axis along which they differ.

    Args:
        pred: a bool, a number or a tensor with one element and no dims; not 0 means true.
        true_fun: called with the operands.
        false_fun: called with the operands; returns the same structure, shapes and dtypes.
        operands: pytrees of tensors; the functions may close over others.

    Returns:
        What the function returns.

    Raises:
        TypeError: the predicate is not a scalar, or the branches return different kinds of values.

    Example:
        >>> import torch, torchpmap as tp
        >>> half = lambda x: tp.cond(x.sum() > 4, lambda x: x / 2, lambda x: x, x)
        >>> tp.pmap(half)(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 2.0], [1.5, 2.0]]

    Source: jax.lax.cond; checked in tests/loops.
    """
    for fun in (true_fun, false_fun):
        if not callable(fun):
            raise TypeError(f"cond: the branches must be functions, but got {fun!r}.")
    chosen = _predicate(pred)
    if isinstance(chosen, bool):
        return (true_fun if chosen else false_fun)(*operands)
    names = ("true_fun", "false_fun")
    return _run(chosen, _Pair("cond", names, (true_fun, false_fun)), operands)


@boundary
def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Call one of several functions, by an index that may be a traced value.

    switch: (int[], [(*operands) -> r, ...], *operands) -> r

    Args:
        index: an integer, or an integer tensor without dims; an index beyond the first or last
            function means that one.
        branches: functions of the operands that return the same structure, shapes and dtypes.
        operands: pytrees of tensors; the functions may close over others.

    Returns:
        What the function returns.

    Raises:
        ValueError: no branches.
        TypeError: the index is not an integer scalar, or the branches return different kinds of
            values.

    Example:
        >>> import torch, torchpmap as tp
        >>> f = lambda k, x: tp.switch(k, [torch.neg, torch.square, lambda x: x + 1], x)
        >>> tp.pmap(f)(torch.tensor([0, 1, 7]), torch.tensor([3.0, 3.0, 3.0])).tolist()
        [-3.0, 9.0, 4.0]

    Source: jax.lax.switch; checked in tests/loops.
    """
    if not isinstance(branches, Iterable):
        raise TypeError(f"switch: branches must be a sequence of functions, but got {branches!r}.")
    branches = tuple(branches)
    for fun in branches:
        if not callable(fun):
            raise TypeError(f"switch: the branches must be functions, but got {fun!r}.")
    if not branches:
        raise ValueError("switch: got an empty sequence of branches; give at least one branch.")
    if isinstance(index, np.ndarray | np.generic):
        index = torch.tensor(index)
    if not isinstance(index, torch.Tensor):
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(
                f"switch: the index must be an integer, but got {index!r} of type "
                f"{type(index).__name__}."
            )
        place = operator.index(index)
        return branches[min(max(place, 0), len(branches) - 1)](*operands)
    if index.dim():
        raise TypeError(f"switch: the index must be a scalar, but got one of kind {kind(index)}.")
    if category(index.dtype) != 1:
        raise TypeError(f"switch: the index must be an integer, but got one of {kind(index)}.")
    if len(branches) == 1:
        return branches[0](*operands)
    return _among(index, branches, 0, operands)


def _among(
    index: torch.Tensor, branches: Sequence[Callable[..., Any]], first: int, operands: Any
) -> Any:
    """``branches``, the first of which has the number ``first``, by halves."""
    if len(branches) == 1:
        return branches[0](*operands)
    half = len(branches) // 2
    lower, upper = branches[:half], branches[half:]
    parts = (
        lambda *xs: _among(index, upper, first + half, xs),
        lambda *xs: _among(index, lower, first, xs),
    )
    names = (_numbers(first + half, len(upper)), _numbers(first, len(lower)))
    return _run(index >= first + half, _Pair("switch", names, parts), operands)


def _numbers(first: int, count: int) -> str:
    return f"branch {first}" if count == 1 else f"branches {first} to {first + count - 1}"


def _predicate(pred: Any) -> bool | torch.Tensor:
    if isinstance(pred, bool | int | float | complex):
        return bool(pred)
    if isinstance(pred, np.ndarray | np.generic):
        pred = torch.tensor(pred)
    if not isinstance(pred, torch.Tensor):
        raise TypeError(
            f"cond: the predicate must be a scalar (a bool, a number or a tensor without dims), "
            f"but got {pred!r} of type {type(pred).__name__}."
        )
    if pred.dim():
        raise TypeError(
            f"cond: the predicate must be a scalar, but got a tensor of kind {kind(pred)}. Use "
            "torch.where to choose element by element, or .any() or .all()."
        )
    return pred if pred.dtype == torch.bool else pred != 0


# -- two branches ----------------------------------------------------------------------------------


class _Pair:
    """Two branches on lists of tensors."""

    def __init__(
        self, name: str, names: tuple[str, str], funs: tuple[Callable[..., Any], ...]
    ) -> None:
        self.name = name
        self._names = names
        self._funs = funs
        self.tree: Tree | None = None
        self._like: list[torch.Tensor] = []

    def parts(self, which: int, operands: Any) -> Parts:
        return take_apart(self._funs[which](*operands), f"the output of {self._names[which]}")

    def unified(self, both: Sequence[Parts]) -> tuple[Tensors, Tensors]:
        """The results of both, in the same dtypes where one is a Python number."""
        first, second = both
        if first.tree != second.tree:
            shown = [f"{n} returned {p.tree}" for n, p in self._named(both)]
            raise TypeError(
                f"{self.name}: all branches must return the same structure, but {shown[0]} and "
                f"{shown[1]}."
            )
        found: list[list[torch.Tensor]] = [[], []]
        wrong = []
        paths = first.tree.paths("output")
        leaves = zip(first.tensors, first.weak, second.tensors, second.weak, paths, strict=True)
        for x, x_weak, y, y_weak, path in leaves:
            a, b = x, y
            if x_weak and category(x.dtype) <= category(y.dtype):
                a = x.to(y.dtype)
            elif y_weak and category(y.dtype) <= category(x.dtype):
                b = y.to(x.dtype)
            if not same_kinds([a], [b]):
                wrong.append(
                    f"  {path}: {kind(a)} from {self._names[0]}, {kind(b)} from {self._names[1]}"
                )
            found[0].append(a)
            found[1].append(b)
        if wrong:
            raise TypeError(
                f"{self.name}: all branches must return the same shapes and dtypes, but\n"
                + "\n".join(wrong)
                + "\nConvert the result of one branch (x.to(dtype), x.reshape(...))."
            )
        self.tree, self._like = first.tree, found[0]
        return found[0], found[1]

    def _named(self, both: Sequence[Parts]) -> list[tuple[str, Parts]]:
        return list(zip(self._names, both, strict=True))

    def run(self, which: int, operands: Any) -> Tensors:
        """A branch, after ``unified`` has seen both."""
        parts = self.parts(which, operands)
        return [
            x.to(y.dtype) if weak else x
            for x, weak, y in zip(parts.tensors, parts.weak, self._like, strict=True)
        ]

    @property
    def codes(self) -> tuple[Any, ...]:
        return tuple(getattr(fun, "__code__", fun) for fun in self._funs)


def batched_levels(tensor: torch.Tensor) -> frozenset[int]:
    """The levels of the vmaps along which a tensor differs from row to row."""
    return frozenset(level_of(x) for x in layers(tensor) if is_vmap_wrapper(x))


def _run(pred: torch.Tensor, pair: _Pair, operands: Any) -> Any:
    if is_staged():
        return _staged(pred, pair, operands)
    levels = batched_levels(pred)
    around = Surroundings()
    if levels:
        with axis_stack.parting(levels, pair.name):
            first, second = [_numbered(around, pair, which, operands) for which in (0, 1)]
        yes, no = pair.unified([first, second])
        chosen = [torch.where(pred, a, b) for a, b in zip(yes, no, strict=True)]
        assert pair.tree is not None
        return pair.tree.build(chosen)
    which = 0 if bool(innermost(pred)) else 1
    taken = _decided(pair, which, operands, axes_of(pred))
    known = pair.codes in _checked and not is_tracked()
    if known and not any(taken.weak) and not around.draws_numbers:
        return taken.tree.build(taken.tensors)
    with around.restored():  # and as many random numbers are drawn as by the other branch
        other = without_values(lambda: pair.parts(1 - which, operands))
    if other is None:
        return taken.tree.build(taken.tensors)
    # Python numbers take the dtype of the other branch
    results = pair.unified([taken, other] if which == 0 else [other, taken])
    if len(_checked) < _MAX_CHECKED:
        _checked.add(pair.codes)
    return taken.tree.build(
        [varied(x, axes_of(y)) for x, y in zip(results[which], other.tensors, strict=True)]
    )


_MAX_CHECKED = 4096
_checked: set[Any] = set()
"""The code of pairs of branches that were seen to return the same kinds of values."""


def _decided(pair: _Pair, which: int, operands: Any, deciding: Axes) -> Parts:
    """The branch that is taken, where devices along the axes ``deciding`` may take another one."""
    own = tree_map(
        lambda x: varied(x, deciding) if isinstance(x, torch.Tensor) else x, _copied(operands)
    )
    with must_vary(deciding, pair.name):
        found = pair.parts(which, own)
    return replace(found, tensors=[varied(x, deciding) for x in found.tensors])


def _numbered(around: Surroundings, pair: _Pair, which: int, operands: Any) -> Parts:
    """Both branches begin with the same random numbers: only one of them counts."""
    with around.restored():
        return pair.parts(which, _copied(operands))


def _copied(operands: Any) -> Any:
    """For a branch, which may write to them."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, operands)


def _staged(pred: torch.Tensor, pair: _Pair, operands: Any) -> Any:
    around, writes = Surroundings(), Writes()
    given = take_apart(operands, "operand")

    def once() -> tuple[Tensors, int]:
        draws = 0
        both = []
        for which in (0, 1):
            inputs = [x.clone() for x in given.tensors]
            with around.restored(), writes.noted(inputs):
                both.append(pair.parts(which, given.tree.build(inputs)))
                draws = max(draws, around.draws())
        first, second = pair.unified(both)
        return [*first, *second], draws

    (both, draws), closures = find_closures(once)
    around.advance(draws)
    rows = around.rows() if draws else []
    count = len(both) // 2
    # what only some devices compute would otherwise have a gradient that only some sum
    deciding = axes_of(pred)
    varying = [union([a, b, pred]) for a, b in zip(both[:count], both[count:], strict=True)]

    def branch(which: int) -> Any:
        def body(tensors: Sequence[torch.Tensor]) -> Tensors:
            inputs = tensors[len(closures) + len(rows) :]

            def run() -> Tensors:
                with around.restored():
                    return pair.run(which, given.tree.build(writes.private(inputs)))

            results = with_closures(run, closures, tensors[: len(closures)])
            return [varied(x, axes) for x, axes in zip(results, varying, strict=True)]

        return body

    construct = Branch(pair.name, (branch(0), branch(1)))
    operands = [varied(x, deciding) for x in (*closures, *rows, *given.tensors)]
    results = apply(construct, [pred, *operands])
    assert pair.tree is not None
    return pair.tree.build(results)
