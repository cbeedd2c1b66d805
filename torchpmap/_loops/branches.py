"""``cond`` and ``switch``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torchpmap._base.boundary import outside_graphs
from torchpmap._base.pytree import flatten, tree_map
from torchpmap._base.torch_internals import (
    batched_levels,
    fake_mode,
    innermost,
    is_vmap,
    row_numbers,
    transforms,
)
from torchpmap._collectives.groups import varied
from torchpmap._collectives.varying import axes_of, union
from torchpmap._layout import axis_stack
from torchpmap._loops.bodies import Function, is_repeated, private, private_leaf
from torchpmap._loops.branch_node import Branch, chosen, place_of
from torchpmap._loops.checks import check_function, whole_number
from torchpmap._loops.scan import is_staged
from torchpmap._loops.surroundings import Lifted, Surroundings, find_closures
from torchpmap._loops.trees import (
    Parts,
    Tensors,
    Tree,
    cast_weak,
    category,
    kind,
    same_kinds,
    take_apart,
)
from torchpmap._loops.without_values import without_values
from torchpmap._trace.casts import is_tracked, must_vary, must_vary_wholly, together
from torchpmap._trace.transformable import Body, apply


@outside_graphs
def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    operand: Any = ...,
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
        operand: in place of ``operands``, the only one.

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
    funs, names = (true_fun, false_fun), ("true_fun", "false_fun")
    for name, fun in zip(names, funs, strict=True):
        check_function("cond", name, fun)
    operands = _all_operands("cond", operands, operand)
    chosen = _predicate(pred)
    if isinstance(chosen, bool):
        return _only("cond", funs[0 if chosen else 1], operands)
    return _run(chosen, _Branches("cond", names, funs, operands))


@outside_graphs
def switch(
    index: Any, branches: Sequence[Callable[..., Any]], *operands: Any, operand: Any = ...
) -> Any:
    """Call one of several functions, by an index that may be a traced value.

    switch: (int[], [(*operands) -> r, ...], *operands) -> r

    Args:
        index: an integer, or an integer tensor without dims; an index beyond the first or last
            function means that one.
        branches: functions of the operands that return the same structure, shapes and dtypes.
        operands: pytrees of tensors; the functions may close over others.
        operand: in place of ``operands``, the only one.

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
        check_function("switch", "each branch", fun)
    if not branches:
        raise ValueError("switch: got an empty sequence of branches; give at least one branch.")
    operands = _all_operands("switch", operands, operand)
    if isinstance(index, np.ndarray | np.generic):
        index = torch.tensor(index)
    if not isinstance(index, torch.Tensor):
        place = place_of(whole_number("switch", "the index", index), len(branches))
        return _only("switch", branches[place], operands)
    if index.dim():
        raise TypeError(f"switch: the index must be a scalar, but got one of kind {kind(index)}.")
    if category(index.dtype) != 1:
        raise TypeError(f"switch: the index must be an integer, but got one of {kind(index)}.")
    if len(branches) == 1:
        return _only("switch", branches[0], operands)
    names = tuple(f"branch {number}" for number in range(len(branches)))
    selector = index < 1 if len(branches) == 2 else index
    return _run(selector, _Branches("switch", names, branches, operands))


def _all_operands(name: str, operands: tuple[Any, ...], operand: Any) -> tuple[Any, ...]:
    if operand is ...:
        return operands
    if operands:
        raise TypeError(
            f"{name}: got operand= beside {len(operands)} operands by position; pass all of them "
            "by position."
        )
    return (operand,)


def _only(name: str, fun: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """What a branch returns that Python has chosen."""
    leaves, structure = flatten(operands)
    tree = Tree(structure, (True,) * len(leaves))
    return tree_map(private_leaf, Function(name, lambda given: fun(*given), tree)(leaves))


def _predicate(pred: Any) -> bool | torch.Tensor:
    if isinstance(pred, np.ndarray | np.generic):
        pred = torch.tensor(pred)
    if isinstance(pred, bool | int | float):
        return bool(pred)
    if isinstance(pred, complex) or (isinstance(pred, torch.Tensor) and pred.is_complex()):
        raise TypeError(f"cond: the predicate must be a bool or a real number, but got {pred!r}.")
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


# -- several branches ------------------------------------------------------------------------------


class _Branches:
    """Branches on lists of tensors."""

    def __init__(
        self,
        name: str,
        names: tuple[str, ...],
        funs: Sequence[Callable[..., Any]],
        operands: tuple[Any, ...],
    ) -> None:
        self.name = name
        self._names = names
        self.given = take_apart(operands, "operand")
        self._functions = [
            Function(name, functools.partial(_called, fun), self.given.tree) for fun in funs
        ]
        self._tree: Tree | None = None
        self._like: list[torch.Tensor] = []

    @property
    def count(self) -> int:
        return len(self._functions)

    def parts(self, which: int, operands: Sequence[torch.Tensor]) -> Parts:
        returned = self._functions[which](operands)
        return take_apart(returned, f"the output of {self._names[which]}")

    def every(
        self, surroundings: Surroundings, operands: Sequence[torch.Tensor]
    ) -> tuple[list[Parts], int]:
        """What all of them return, and how many random numbers any draws.  All begin with the same
        numbers: only one of them counts.
        """
        found, draws = [], 0
        for which in range(self.count):
            with surroundings.restored():
                found.append(self.parts(which, operands))
                draws = max(draws, surroundings.draws())
        return found, draws

    def kinds(self, surroundings: Surroundings, which: int) -> Parts | None:
        """What a branch would return; None if that cannot be found out without running it.  As many
        random numbers are drawn as by it, if those are more.
        """
        with surroundings.restored():
            found = without_values(lambda: self.parts(which, self.given.tensors))
        self._functions[which].raise_refused()
        return found

    def unify(self, found: Sequence[Parts]) -> list[Tensors]:
        """The results of all branches, in the same dtypes where some are Python numbers."""
        first = found[0]
        for name, parts in zip(self._names, found, strict=True):
            if parts.tree != first.tree:
                raise TypeError(
                    f"{self.name}: all branches must return the same structure, but "
                    f"{self._names[0]} returned {first.tree} and {name} returned {parts.tree}."
                )
        leaves = zip(*(zip(p.tensors, p.weak, strict=True) for p in found), strict=True)
        like = [_widest(leaf) for leaf in leaves]
        unified = [cast_weak(parts, like) for parts in found]
        wrong = [
            f"  {path}: {kind(mine[0])} from {self._names[0]}, {kind(x)} from {name}"
            for path, mine in zip(
                first.tree.paths("output"), zip(*unified, strict=True), strict=True
            )
            for name, x in zip(self._names, mine, strict=True)
            if not same_kinds([mine[0]], [x])
        ]
        if wrong:
            raise TypeError(
                f"{self.name}: all branches must return the same shapes and dtypes, but\n"
                + "\n".join(wrong)
                + "\nConvert the result of one branch (x.to(dtype), x.reshape(...))."
            )
        self._tree, self._like = first.tree, like
        return unified

    def run(self, which: int, operands: Sequence[torch.Tensor]) -> Tensors:
        """A branch, after ``unify`` has seen all."""
        return cast_weak(self.parts(which, operands), self._like)

    def build(self, results: Sequence[torch.Tensor]) -> Any:
        assert self._tree is not None
        return self._tree.build(results)


def _called(fun: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    return fun(*operands)


def _widest(leaf: Sequence[tuple[torch.Tensor, bool]]) -> torch.Tensor:
    """Of what the branches return for a leaf, that whose dtype Python numbers take."""
    strong = [x for x, weak in leaf if not weak]
    return strong[0] if strong else max((x for x, _ in leaf), key=lambda x: category(x.dtype))


def _run(selector: torch.Tensor, branches: _Branches) -> Any:
    if is_staged():
        return branches.build(_staged(selector, branches))
    levels = batched_levels(selector)
    surroundings = Surroundings()
    operands = branches.given.tensors
    if levels or fake_mode() is not None:  # without values (``without_values``) any may be taken
        with axis_stack.parting(levels, branches.name):
            found, _ = branches.every(surroundings, operands)
        unified = branches.unify(found)
        return branches.build([chosen(selector, leaf) for leaf in zip(*unified, strict=True)])
    which = place_of(innermost(selector).item(), branches.count)
    deciding = axes_of(selector)
    part = axis_stack.split_by(deciding)
    given = [varied(x, deciding) for x in operands]
    with must_vary(deciding, branches.name, part):
        taken = branches.parts(which, given)
    results = [varied(x, deciding) for x in taken.tensors]
    taken = replace(taken, tensors=results)
    is_cast = any(map(operator.is_not, given, operands))
    is_due = not is_repeated() or is_tracked() or any(taken.weak) or surroundings.draws_numbers
    if is_due or any(map(is_vmap, transforms())):
        every = range(branches.count)
        kinds = [taken if k == which else branches.kinds(surroundings, k) for k in every]
        known = [parts for parts in kinds if parts is not None]
        if len(known) < len(kinds):
            results = together(results, given) if is_cast else results
            must_vary_wholly(results, branches.name)
        else:  # Python numbers take the dtype of the other branches
            leaves = list(zip(*branches.unify(known), strict=True))
            results = [leaf[which] for leaf in leaves]
            rows = [frozenset[int]().union(*x) for x in zip(*(x.rows for x in known), strict=True)]
            results = [_with_rows(x, levels) for x, levels in zip(results, rows, strict=True)]
            results = together(results, given, rows) if is_cast else results
            with axis_stack.split_again(part):
                results = [varied(x, union(leaf)) for x, leaf in zip(results, leaves, strict=True)]
    return taken.tree.build(private(results))


def _with_rows(result: torch.Tensor, levels: frozenset[int]) -> torch.Tensor:
    """With rows of the vmaps of some levels, which another branch gives it."""
    missing = levels - batched_levels(result)
    for each in transforms() if missing else ():
        if is_vmap(each) and each.level() in missing:
            number = row_numbers(each, result.device)
            result = torch.where(number == number, result, result)
    return result


def _staged(selector: torch.Tensor, branches: _Branches) -> Tensors:
    surroundings = Surroundings()
    operands = branches.given.tensors

    def once(inputs: Tensors) -> tuple[list[Tensors], int]:
        found, draws = branches.every(surroundings, inputs)
        return branches.unify(found), draws

    (unified, draws), closures = find_closures(once, operands)
    lifted = Lifted(surroundings, closures, draws)
    count = len(lifted.constants)
    # what only some devices compute would otherwise have a gradient that only some sum
    deciding = axes_of(selector)
    varying = [union(leaf) | deciding for leaf in zip(*unified, strict=True)]

    def body(which: int) -> Body:
        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            results = lifted.run(lambda: branches.run(which, tensors[count:]), tensors)
            return [varied(x, axes) for x, axes in zip(results, varying, strict=True)]

        return run

    construct = Branch(branches.name, tuple(map(body, range(branches.count))))
    given = [varied(x, deciding) for x in (*lifted.constants, *private(operands))]
    return apply(construct, [selector, *given])
