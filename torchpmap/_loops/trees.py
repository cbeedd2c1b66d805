"""What goes into a loop and comes out of it: pytrees as lists of tensors, and their kinds.

None is a leaf without a tensor.  A Python number is a *weak* leaf, as in JAX: it takes the dtype
that it meets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchpmap._base.arrays import for_torch
from torchpmap._base.errors import check_array, kind_of
from torchpmap._base.pytree import Structure, flatten
from torchpmap._base.torch_internals import batched_levels
from torchpmap._collectives.groups import varied
from torchpmap._collectives.varying import axes_of
from torchpmap._trace.traced_views import settle

_NUMBERS = (bool, int, float, complex)

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Tree:
    """A pytree without its tensors."""

    structure: Structure
    has_tensor: tuple[bool, ...]
    """Per leaf; the others are None."""

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        given = iter(tensors)
        return self.structure.unflatten([next(given) if has else None for has in self.has_tensor])

    def __str__(self) -> str:
        """As it stands in errors: None is no tensor."""
        return self.shown("*" for has in self.has_tensor if has)

    def shown(self, tensors: Iterable[str]) -> str:
        """As errors show it, with these texts for its tensors."""
        given = iter(tensors)
        return self.structure.shown(next(given) if has else "None" for has in self.has_tensor)

    def paths(self, name: str) -> list[str]:
        """Of the leaves that are tensors."""
        paths = zip(self.structure.paths(name), self.has_tensor, strict=True)
        return [path for path, has in paths if has]


@dataclass(frozen=True)
class Parts:
    """A pytree taken apart."""

    tree: Tree
    tensors: Tensors
    weak: tuple[bool, ...]
    """Per tensor: whether it was a Python number."""
    numbers: tuple[Any, ...] = ()
    """Per tensor, if any was a Python number: the leaf itself."""
    levels: tuple[frozenset[int], ...] = ()
    """Per tensor, if they have no values: of the vmaps of which it would have rows."""

    @property
    def rows(self) -> Sequence[frozenset[int]]:
        """Per tensor, the levels of the vmaps of which it has rows."""
        return self.levels or list(map(batched_levels, self.tensors))


def take_apart(value: Any, what: str) -> Parts:
    """``what``: as errors name the value, "the carry of scan"."""
    leaves, structure = flatten(value)
    tree = Tree(structure, tuple(leaf is not None for leaf in leaves))
    present = [leaf for leaf in leaves if leaf is not None]
    settle(present)
    if all(isinstance(leaf, torch.Tensor) for leaf in present):
        return Parts(tree, present, (False,) * len(present))
    paths = tree.paths(what)
    tensors = [_tensor(leaf, path) for leaf, path in zip(present, paths, strict=True)]
    weak = tuple(type(leaf) in _NUMBERS for leaf in present)
    return Parts(tree, tensors, weak, tuple(present) if any(weak) else ())


def _tensor(leaf: Any, path: str) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, (*_NUMBERS, np.ndarray, np.generic)):
        check_array(leaf, path)
        return torch.tensor(for_torch(leaf))
    raise TypeError(
        f"{path} is {leaf!r} of type {type(leaf).__name__}, but loops and branches take and return "
        "tensors, numpy arrays, numbers and None. Close over other values instead."
    )


def kind(tensor: torch.Tensor) -> str:
    return kind_of(tensor.shape, tensor.dtype)


def same_kinds(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(these, those, strict=True))


def category(dtype: torch.dtype) -> int:
    """bool < integers < floating point < complex"""
    if dtype == torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def cast_weak(parts: Parts, like: Sequence[torch.Tensor]) -> Tensors:
    """The tensors, with Python numbers in the dtypes of others, if those can hold them."""
    return [
        x.to(other.dtype) if weak and category(x.dtype) <= category(other.dtype) else x
        for x, weak, other in zip(parts.tensors, parts.weak, like, strict=True)
    ]


def check_carry(name: str, carry: Tree, given: Sequence[torch.Tensor], parts: Parts) -> Tensors:
    """What the body of a loop returned, as the next carry; raises if it is of another kind.

    A carry goes on to vary along all axes along which it did.
    """
    if parts.tree.structure != carry.structure or parts.tree.has_tensor != carry.has_tensor:
        raise TypeError(
            f"{name}: the body must return a carry of the structure that it gets, but it got "
            f"{carry.shown(map(kind, given))} and returned "
            f"{parts.tree.shown(map(kind, parts.tensors))}."
        )
    tensors = cast_weak(parts, given)
    if same_kinds(given, tensors):
        return [varied(x, axes_of(before)) for x, before in zip(tensors, given, strict=True)]
    lines = [
        f"  {path}: {kind(before)} went in, {kind(after)} came out"
        for path, before, after in zip(carry.paths("carry"), given, tensors, strict=True)
        if not same_kinds([before], [after])
    ]
    raise TypeError(
        f"{name}: the body must keep the shapes and dtypes of its carry, but\n"
        + "\n".join(lines)
        + "\nStart with a carry of the kind that comes out, or convert what the body returns "
        "(x.to(dtype))."
    )


def with_weak_carry(init: Parts, step: Callable[[Sequence[Any]], Parts]) -> Tensors:
    """The first carry, in the dtypes that come out of a step.

    A Python number adds no dtype of its own: ``0.0 + x`` is float16 if ``x`` is.  A tensor without
    dims would, if ``x`` has none either (torch 2.13), so the first step gets the number itself.
    """
    tensors = list(init.tensors)
    if not any(init.weak):
        return tensors
    if init.numbers:
        with contextlib.suppress(*_NO_NUMBER):
            given = [
                n if w else x for n, w, x in zip(init.numbers, init.weak, tensors, strict=True)
            ]
            after = step(given)
            if after.tree == init.tree:
                pairs = zip(after.tensors, after.weak, tensors, strict=True)
                like = [x if weak else y for y, weak, x in pairs]  # numbers say nothing
                tensors = cast_weak(init, like)
    while True:
        after = step(tensors)
        if after.tree != init.tree:
            return tensors
        found = cast_weak(replace(init, tensors=tensors), after.tensors)
        if same_kinds(found, tensors):
            return tensors
        tensors = found


_NO_NUMBER = (TypeError, AttributeError, ArithmeticError, ValueError)
"""What a body raises that needs a tensor."""
