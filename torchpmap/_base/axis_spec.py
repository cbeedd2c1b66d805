"""Axis specifications over pytrees: prefix rules, legal axes, one size for all mapped axes.

A specification is a pytree whose leaves are ints and None ("unmapped"); each leaf covers a whole
subtree of what it describes. The messages are JAX 0.7's, with the user's argument names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.nn import Module

from torchpmap._base.exact import exact
from torchpmap._base.pytree import (
    MAPPINGS,
    Node,
    count_leaves,
    flatten,
    flatten_as_met,
    is_registered_dataclass,
    open_node,
    sort_key,
)

IN_AXES_HINT = (
    "\n\nThe 'full pytree' here is the tuple of arguments passed positionally to the pmapped "
    "function, and the value of `in_axes` must be a tree prefix of that tuple. But it was not a "
    "prefix.\n\nCheck that the value of the `in_axes` argument to `pmap` is a tree prefix of the "
    "tuple of arguments passed positionally to the pmapped function."
)
KWARGS_HINT = (
    "\n\nWhen some arguments are passed by keyword to the pmapped function, they are not included "
    "in the comparison to `in_axes`. Instead, each argument passed by keyword is mapped over its "
    "leading axis."
)
OUT_AXES_HINT = (
    "\n\nThe full pytree is the output of the pmapped function. Ensure that the `out_axes` "
    "argument to `pmap` is a pytree prefix of the pmapped function's output."
)

LeafInfo = tuple[str, tuple[int, ...] | None, str]
"""(path, shape, dtype) of one leaf; the shape of an empty leaf is None."""


def check_axis_spec(spec: Any, what: str) -> None:
    """Raise ``TypeError`` unless every leaf is an ``int`` or None (not a bool, not a numpy int)."""
    for leaf in flatten(spec)[0]:
        if leaf is not None and type(leaf) is not int:
            raise TypeError(
                f"{what} must be an int, None, or (nested) container with those types as leaves, "
                f"but got {spec}."
                + ("" if leaf is spec else f" The leaf {leaf!r} is a {type(leaf).__name__}.")
            )


def broadcast_axes(
    prefix: Any, tree: Any, *, what: str, hint: str = "", root: str = ""
) -> list[int | None]:
    """Return the axis of every leaf of ``tree``, given a specification that is a prefix of it.

    Args:
        prefix: checked by ``check_axis_spec``; a leaf of it covers a whole subtree.
        tree: the full pytree. Its None leaves match anything and get None.
        what: name of the specification in messages, ``"pmap in_axes"``.
        hint: paragraphs appended to a message.
        root: key path of ``tree`` itself. JAX compares ``(in_axes, 0)`` with ``(args, kwargs)``, so
            its paths for in_axes start with ``"[0]"``.

    Raises:
        ValueError: not a prefix; the text is JAX's, with the key path of the first difference.
    """
    leaves, structure = flatten_as_met(tree)
    axes: list[int | None] = []
    problem = _match(prefix, structure.root, leaves, axes, root)
    if problem is not None:
        path, difference, details = problem
        raise ValueError(
            f"pytree structure error: different {difference} at key path\n    {what}{path}\n"
            f"At that key path, the prefix pytree {what} has a subtree of type{details}{hint}"
        )
    return structure.in_leaf_order(axes)


def canonical_axis(axis: int, ndim: int, *, what: str, path: str) -> int:
    """Return the axis counted from the front; ``ValueError`` unless ``-ndim <= axis < ndim``.

    For out_axes, ``ndim`` counts the new axis.
    """
    if -ndim <= axis < ndim:
        return axis % ndim
    legal = f"{-ndim} <= axis < {ndim}" if ndim else "None, because there is no dimension"
    raise ValueError(
        f"{what}: axis {axis} is out of bounds for array of dimension {ndim}, which is {path}; "
        f"expected {legal}."
    )


def mapped_axis_size(
    leaves: Sequence[LeafInfo],
    axes: Sequence[int | None],
    *,
    what: str = "pmap",
    axis_size: int | None = None,
) -> int | None:
    """Return the size that all mapped axes have; ``axis_size`` (or None) if nothing is mapped.

    Args:
        leaves: (path, shape, dtype) of every leaf; an empty leaf has the shape None.
        axes: axis of every leaf, negative counts from the back.
        what: name of the calling function, for the messages.
        axis_size: the size the user promised.

    Raises:
        ValueError: an axis does not exist, or sizes differ (the message counts each size).
    """
    votes: dict[int, list[tuple[int, LeafInfo]]] = {}
    for leaf, axis in zip(leaves, axes, strict=True):
        path, shape, dtype = leaf
        if axis is None or shape is None:
            continue
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{what} was requested to map its argument along axis {axis}, which implies that "
                f"its rank should be at least {axis + 1 if axis >= 0 else -axis}, but is only "
                f"{len(shape)} (its shape is {shape}) (argument {path})"
                f"{in_a_list(path, dtype)}"
            )
        votes.setdefault(shape[axis], []).append((axis, leaf))
    if len(votes) > 1:
        raise ValueError(_vote(votes, what, axis_size))
    for size, voters in votes.items():
        if axis_size is not None and axis_size != size:
            raise ValueError(
                f"Specified axis_size {axis_size} doesn't match received axis_size {size}. "
                f"({_example(*voters[0])})"
            )
        return size
    return axis_size


def in_a_list(path: str, dtype: str) -> str:
    """Advice about a number that has no dims, if it was met in a list or tuple."""
    if dtype not in ("bool", "int", "float", "complex") or not re.search(r"\[\d+\]$", path):
        return ""
    return (
        f". It is the Python number at {path}: lists and tuples are trees of their items, not "
        "arrays. Pass torch.tensor(...) of the list."
    )


def argument_names(fun: Callable[..., Any], num_args: int) -> list[str]:
    """Return the names of the first ``num_args`` positional arguments of ``fun``.

    Example:
        >>> argument_names(lambda x, *rest: x, 3)
        ['x', 'rest[0]', 'rest[1]']
    """
    names: list[str] = []
    rest, first = "args", 0
    try:
        parameters = inspect.signature(fun.forward if isinstance(fun, Module) else fun).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest, first = parameter.name, len(names)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [f"{rest}[{i - first}]" for i in range(len(names), num_args)])[:num_args]


def type_text(dtype: str, shape: Sequence[int]) -> str:
    """Return a tensor type as JAX prints it, ``float32[4,3]``."""
    # not ``kind_of``: JAX's messages have no space there, and numbers have no torch.dtype
    return f"{dtype.removeprefix('torch.')}[{','.join(map(str, shape))}]"


def _vote(votes: dict[int, list[tuple[int, LeafInfo]]], what: str, axis_size: int | None) -> str:
    lines = [f"{what} got inconsistent sizes for array axes to be mapped:"]
    if axis_size is not None:
        lines.append(f"  * the `axis_size` argument was {axis_size};")
    ranked = sorted(votes.items(), key=lambda item: -len(item[1]))
    for place, (size, voters) in enumerate(ranked):
        example = _example(*voters[0])
        if len(voters) == 1:
            lines.append(f"  * one axis had size {size}: {example};")
        else:
            many = "some" if place else "most"
            count = f"{many} axes ({len(voters)} of them)"
            lines.append(f"  * {count} had size {size}, e.g. {example};")
    return "\n".join(lines)[:-1]


def _example(axis: int, leaf: LeafInfo) -> str:
    path, shape, dtype = leaf
    return f"axis {axis} of argument {path} of type {type_text(dtype, shape or ())}"


def _match(
    prefix: Any, node: Node | None, leaves: list[Any], axes: list[int | None], path: str
) -> tuple[str, str, str] | None:
    """Append the axes of one subtree, or return where and how it differs from the prefix."""
    start = len(axes)
    opened = open_node(prefix)
    if opened is None or (node is None and leaves[start] is None):
        axis = prefix if opened is None else None
        covered = leaves[start : start + count_leaves(node)]
        axes += [None if leaf is None else axis for leaf in covered]
        return None
    values, spec = opened
    if node is None:
        leaf = leaves[start]
        # while tracing it is a tensor of another class
        kind = torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf)
        return path, *_different_types(spec, kind)
    if spec.kind is not node.kind:
        return path, *_different_types(spec, node.kind)
    difference = _different_children(spec, node)
    if difference is not None:
        return path, *difference
    entries = dict(zip(spec.labels, values, strict=True))
    for label, key, child in zip(node.labels, node.keys, node.children, strict=True):
        problem = _match(entries.get(label), child, leaves, axes, path + key)
        if problem is not None:
            return problem
    return None


def _different_types(spec: Node, full: Any) -> tuple[str, str]:
    return "types", (
        f"\n    {spec.kind}\nbut at the same key path the full pytree has a subtree of different "
        f"type\n    {full}."
    )


def _different_children(spec: Node, node: Node) -> tuple[str, str] | None:
    if issubclass(spec.kind, list | tuple):
        if len(spec.labels) == len(node.labels):
            return None
        name = spec.kind.__name__
        return f"lengths of {name}", (
            f" {name} of length {len(spec.labels)}, but the full pytree has a subtree of the same "
            f"type but of length {len(node.labels)}."
        )
    if is_registered_dataclass(node.context, node.keys):
        return None  # the class fixes the fields; those not listed are None
    ours, theirs = (sorted(n.labels, key=sort_key) for n in (spec, node))
    if len(ours) != len(theirs):
        odd = sorted({*ours} ^ {*theirs}, key=sort_key)
        return "numbers of pytree children", (
            f"\n    {spec.kind}\nwith {len(ours)} child keys\n    {_words(ours)}\nbut at the same "
            f"key path the full pytree has a subtree of the same type but with {len(theirs)} child "
            f"keys\n    {_words(theirs)}\nso the symmetric difference on key sets is\n"
            f"    {_words(odd)}"
        )
    mapping = spec.kind in MAPPINGS
    mine, full = (tuple(ours), tuple(theirs)) if mapping else (spec.context, node.context)
    if exact(mine) == exact(full):
        return None
    return "pytree metadata", (
        f"\n    {spec.kind}\nwith metadata\n    {mine}\nbut at the same key path the full pytree "
        f"has a subtree of the same type but with metadata\n    {full}"
    )


def _words(labels: list[Hashable]) -> str:
    return " ".join(map(str, labels))
