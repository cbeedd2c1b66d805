"""``while_loop`` and ``fori_loop``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from torchpmap._base.boundary import outside_graphs
from torchpmap._base.inexact import copied_tangents, kinds_of
from torchpmap._base.torch_internals import batched_levels, fake_mode, innermost
from torchpmap._collectives.groups import varied
from torchpmap._collectives.varying import Axes, axes_of
from torchpmap._layout import axis_stack
from torchpmap._loops.bodies import Function
from torchpmap._loops.checks import check_function, whole_number
from torchpmap._loops.scan import Body, check_unroll, first_carry, is_staged, lifted_carry, run_scan
from torchpmap._loops.surroundings import Surroundings
from torchpmap._loops.trees import (
    Parts,
    Tensors,
    Tree,
    category,
    check_carry,
    kind,
    take_apart,
)
from torchpmap._loops.while_node import While, no_reverse
from torchpmap._loops.without_values import without_values
from torchpmap._trace.transformable import Transformable, apply

_Carry = TypeVar("_Carry")


@outside_graphs
def while_loop(
    cond_fun: Callable[[_Carry], Any], body_fun: Callable[[_Carry], _Carry], init_val: _Carry
) -> _Carry:
    """Apply ``body_fun`` while ``cond_fun`` is true; returns the last value.

    while_loop: (carry -> bool[], carry -> carry, carry) -> carry

    Like ``while cond_fun(value): value = body_fun(value)``, but in a mapped function both are
    traced and compiled once, and the test may depend on values.  Under ``vmap`` the loop goes on
    until all rows are done, and rows that are done keep their value.  In a mapped function devices
    may run different numbers of steps as long as the loop contains no collective over the axis
    along which they differ; a test on a ``psum`` is the same on all devices.

    Forward-mode derivatives work, reverse mode does not.

    Args:
        cond_fun: returns a bool, or a bool tensor without dims, for a value.
        body_fun: returns the next value, whose structure, shapes and dtypes stay the same.
        init_val: tensors, numpy arrays, numbers and None in any pytree.  A Python number takes the
            dtype that comes out of the body.

    Returns:
        The value for which ``cond_fun`` is false.

    Raises:
        TypeError: the body changes the structure, a shape or a dtype; the test is not a boolean
            scalar.
        ValueError: in a backward pass; or a test that may differ along an axis over which the loop
            has a collective.

    Example:
        >>> import torch, torchpmap as tp
        >>> double = lambda x: tp.while_loop(lambda s: s[0] < 20, lambda s: (s[0] * 2, s[1] + 1),
        ...                                  (x, 0))
        >>> tp.pmap(double)(torch.tensor([1.0, 30.0]))[1].tolist()
        [5, 0]

    Source: jax.lax.while_loop; checked in tests/loops.
    """
    check_function("while_loop", "cond_fun", cond_fun)
    check_function("while_loop", "body_fun", body_fun)
    return _run("while_loop", cond_fun, body_fun, init_val)


@outside_graphs
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, _Carry], _Carry],
    init_val: _Carry,
    *,
    unroll: int | bool | None = None,
) -> _Carry:
    """Apply ``body_fun(i, value)`` for ``i`` from ``lower`` up to, not including, ``upper``.

    fori_loop: (int, int, (int[], carry) -> carry, carry) -> carry

    With bounds that are Python numbers this is a ``scan``, and can be differentiated in reverse
    mode.  With a tensor as bound, which may differ between devices, it is a ``while_loop``.

    Args:
        lower: the first ``i``.
        upper: the end; no step is run if it is not beyond ``lower``.
        body_fun: gets ``i``, an integer tensor (int32 for Python numbers, as in JAX), and the
            value; returns the next value, whose structure, shapes and dtypes stay the same.
        init_val: tensors, numpy arrays, numbers and None in any pytree.
        unroll: as for ``scan``.

    Returns:
        The last value.

    Raises:
        TypeError: a bound is not an integer scalar, or the body changes the structure, a shape or
            a dtype.
        ValueError: in a backward pass, if a bound is a tensor.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.fori_loop(0, 4, lambda i, x: x * 2 + i, torch.tensor(1.0))
        tensor(27.)

    Source: jax.lax.fori_loop; checked in tests/loops.
    """
    check_function("fori_loop", "body_fun", body_fun)
    bounds = [_bound(lower, "lower"), _bound(upper, "upper")]
    if all(isinstance(bound, int) for bound in bounds):
        is_unrolled = check_unroll("fori_loop", unroll)
        return _counted(bounds[0], bounds[1], body_fun, init_val, is_unrolled)
    tensors = [bound for bound in bounds if isinstance(bound, torch.Tensor)]
    dtype = tensors[0].dtype
    if tensors[-1].dtype != dtype:
        raise TypeError(
            f"fori_loop: the bounds must have the same dtype, but are {kind(tensors[0])} and "
            f"{kind(tensors[-1])}."
        )
    first, end = (
        bound if isinstance(bound, torch.Tensor) else torch.full_like(tensors[0], bound)
        for bound in bounds
    )

    def body(state: Any) -> Any:
        i, value = state
        return i + 1, body_fun(i, value)

    return _run("fori_loop", lambda state: state[0] < end, body, (first, init_val))[1]


def _bound(bound: Any, name: str) -> Any:
    if isinstance(bound, np.ndarray) and not bound.ndim:
        bound = bound[()]
    if isinstance(bound, torch.Tensor):
        if bound.dim() or category(bound.dtype) != 1:
            raise TypeError(
                f"fori_loop: {name} must be an integer scalar, but got one of {kind(bound)}."
            )
        return bound
    return whole_number("fori_loop", name, bound)


def _counted(
    lower: int, upper: int, fun: Callable[[Any, Any], Any], init: Any, is_unrolled: bool
) -> Any:
    limits = torch.iinfo(torch.int32)
    dtype = torch.int32 if limits.min <= lower and upper <= limits.max else torch.int64
    numbers = torch.arange(lower, max(lower, upper), dtype=dtype)
    given = take_apart(init, "carry")
    row = take_apart(numbers, "i").tree
    body = Body("fori_loop", lambda value, i: (fun(i, value), None), given.tree, row)
    carry, _ = run_scan(
        body, given, [numbers], numbers.numel(), reverse=False, is_unrolled=is_unrolled
    )
    return given.tree.build(carry)


# -- the loop --------------------------------------------------------------------------------------


class _Loop:
    """Test and body on lists of tensors."""

    def __init__(self, name: str, test: Callable[..., Any], body: Callable[..., Any], tree: Tree):
        self.name = name
        self._test = Function(name, test, tree)
        self._body = Function(name, body, tree)
        self.tree = tree

    def test(self, carry: Sequence[torch.Tensor]) -> torch.Tensor:
        found = self._test(carry)
        if isinstance(found, bool | np.bool_ | np.ndarray):
            found = torch.tensor(found)
        if not isinstance(found, torch.Tensor) or found.dim() or found.dtype != torch.bool:
            shown = kind(found) if isinstance(found, torch.Tensor) else repr(found)
            raise TypeError(
                f"{self.name}: cond_fun must return a boolean scalar (True, False, or a bool "
                f"tensor without dims), but returned {shown}. Write a comparison, such as x != 0."
            )
        return found

    def first(self, carry: Sequence[torch.Tensor]) -> Parts:
        return take_apart(self._body(carry), "carry")

    def body(self, carry: Sequence[torch.Tensor]) -> Tensors:
        return check_carry(self.name, self.tree, list(carry), self.first(carry))

    def check_unused(self, carry: Tensors, surroundings: Surroundings, tested: int) -> None:
        """Raise what a body would raise that no step has run."""
        with surroundings.restored(torch.tensor(0), after=tested):
            found = without_values(lambda: self.first(carry))
        self._body.raise_refused()
        if found is not None:
            check_carry(self.name, self.tree, carry, found)


def _run(name: str, test: Callable[..., Any], body: Callable[..., Any], init: Any) -> Any:
    given = take_apart(init, "carry")
    loop = _Loop(name, test, body, given.tree)
    with contextlib.ExitStack() as parts:
        found = _staged(loop, given) if is_staged() else _steps(loop, given, parts)
    return given.tree.build(found)


def _steps(loop: _Loop, init: Parts, parts: contextlib.ExitStack) -> Tensors:
    """``parts``: those of the program in which devices take different numbers of steps."""
    surroundings = Surroundings()
    carry = first_carry(init, loop.first, surroundings)
    number = 0
    levels: frozenset[int] = frozenset()
    deciding: Axes = frozenset()
    went_on: torch.Tensor | None = None
    axes: list[Axes] = []
    while True:
        # rows that are done test no more
        with axis_stack.parting(levels, loop.name), surroundings.step(number):
            goes_on, tested = loop.test(carry), surroundings.draws()
        if levels and went_on is not None:  # a test that draws may be true once more
            goes_on = goes_on & went_on
        carry = [varied(x, axes_of(goes_on)) for x in carry]
        if not axes_of(goes_on) <= deciding:
            deciding |= axes_of(goes_on)
            parts.enter_context(axis_stack.entered(axis_stack.split_by(deciding)))
        if fake_mode() is None:
            if not bool(innermost(goes_on).any()):
                break
        elif axes == (axes := list(map(axes_of, carry))):  # steps change nothing else
            break
        levels, went_on = batched_levels(goes_on), goes_on
        with axis_stack.parting(levels, loop.name), surroundings.step(number, after=tested):
            after = loop.body(carry)
        if levels:
            after = [torch.where(goes_on, new, old) for new, old in zip(after, carry, strict=True)]
        carry, number = after, number + 1
    if not number:
        loop.check_unused(carry, surroundings, tested)
    return apply(_NoReverse(loop.name), carry) if carry else carry


@dataclass(frozen=True)
class _NoReverse(Transformable):
    """Values whose backward raises, as it does in a trace."""

    name: str

    def run(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return [x.clone() for x in tensors]

    def vjp(self, *_: Any) -> NoReturn:
        raise ValueError(no_reverse(self.name))

    def jvp(self, tensors: Any, tangents: Any) -> Any:
        return copied_tangents(tangents, kinds_of(tensors))

    def vmap(self, info: Any, dims: Any, tensors: Any) -> Any:
        return apply(self, tensors), dims


def _staged(loop: _Loop, init: Parts) -> Tensors:
    surroundings = Surroundings()

    tested = 0
    """How many random numbers the test draws, in each step before the body."""

    def once(start: Tensors) -> tuple[Tensors, Tensors, int]:
        nonlocal tested
        carry = first_carry(replace(init, tensors=start), loop.first, surroundings)
        with surroundings.restored(torch.tensor(0)):
            deciding, tested = axes_of(loop.test(carry)), surroundings.draws()
            after = [varied(x, deciding) for x in loop.body(carry)]
            return carry, after, surroundings.draws()

    first, lifted = lifted_carry(init, surroundings, once)
    counts = [torch.zeros((), dtype=torch.int64)] if surroundings.draws() else []  # of the steps
    skipped = len(counts)

    def split(carry: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, Tensors]:
        return carry[0] if skipped else None, list(carry[skipped:])

    def test(constants: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> torch.Tensor:
        number, carry = split(given)
        return lifted.run(lambda: loop.test(carry), constants, number)

    def step(constants: Any, given: Any, _: Any) -> Any:
        number, carry = split(given)
        after = lifted.run(lambda: loop.body(carry), constants, number, after=tested)
        return [*([] if number is None else [number + 1]), *after], []

    construct = While(step, len(lifted.constants), skipped + len(first), loop.name, test)
    return apply(construct, [*lifted.constants, *counts, *first])[skipped:]
