"""A pytree as a checkpoint sees it: leaves under readable keys, in containers that JSON can name.

A key is the labels on the way to the leaf, with dots between them: ``params.w``, ``layers.0``.
Without a tree to fill, a loaded tree has the saved dicts, lists and tuples; other containers come
back as dicts of their fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap._base.data import DTYPES
from torchpmap._base.errors import check_array, dtype_name
from torchpmap._base.pytree import MAPPINGS, Node, Structure, flatten
from torchpmap._layout.mesh import NamedSharding
from torchpmap._sharded.tensor import ShardedTensor

VALUES = (type(None), bool, int, float, complex, str, bytes)
"""Types of leaves that the table has."""
ARRAYS = ("tensor", "ndarray", "numpy scalar")
"""Kinds of leaves that are in files of blocks."""
_ODD = re.compile("q.*|bits.*|u?int[1-7]")
SAVED_DTYPES = {name: dtype for name, dtype in DTYPES.items() if not _ODD.fullmatch(name)}
"""Dtypes of blocks; tensors of the others cannot be copied, or are more than their bytes."""
_ROOT = "value"  # the key of a tree that is one leaf
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, ShardedTensor)


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """Shape, dtype and sharding of a value that does not exist yet, for ``load``.

    Args:
        shape: of the whole value.
        dtype: a torch dtype.
        sharding: where the value is placed; None: a CPU tensor.

    Example:
        >>> import torch, torchpmap as tp
        >>> mesh = tp.make_mesh((4,), ("i",), devices=tp.devices())
        >>> rows = tp.NamedSharding(mesh, tp.P("i"))
        >>> tp.checkpoint.ShapeDtypeStruct((8, 3), torch.float32, rows).sharding.spec
        PartitionSpec('i',)

    Source: ``jax.ShapeDtypeStruct``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None = None


@dataclass(frozen=True)
class Leaf:
    """One leaf and its names."""

    key: str
    """In the checkpoint: ``params.w``."""
    path: str
    """In the script: ``tree['params']['w']``."""
    value: Any


@dataclass(frozen=True)
class Stored:
    """In the place of an array of a tree, what the table says of it."""

    row: Any


def leaves_of(tree: Any, name: str) -> tuple[list[Leaf], Structure]:
    """The leaves of ``tree``, which the caller knows as ``name``, and its structure.

    Raises:
        TypeError: a dict has a key that is neither a string nor an int.
        ValueError: two leaves would have the same key.
    """
    values, structure = flatten(tree)
    keys: list[str] = []
    rebuilt(structure.root, keys.append, name)
    leaves: dict[str, Leaf] = {}
    for path, key, value in zip(
        structure.paths(name), structure.in_leaf_order(keys), values, strict=True
    ):
        if key in leaves:
            raise ValueError(
                f"torchpmap.checkpoint: {leaves[key].path} and {path} would both be saved as "
                f"{key!r}. Rename one of the keys."
            )
        leaves[key] = Leaf(key, path, value)
    return list(leaves.values()), structure


def rebuilt(
    node: Node | None, leaf: Callable[[str], Any], path: str = "tree", route: Sequence[str] = ()
) -> Any:
    """A tree of dicts, lists and tuples, with ``leaf(key)`` as its leaves; other containers become
    dicts.
    """
    if node is None:
        return leaf(".".join(route) if route else _ROOT)
    children = zip(_labels(node, path), node.keys, node.children, strict=True)
    parts = {
        label: rebuilt(child, leaf, path + key, (*route, str(label)))
        for label, key, child in children
    }
    return node.kind(parts.values()) if node.kind in (list, tuple) else parts


def _labels(node: Node, path: str) -> Sequence[Any]:
    """What the children of a container are called."""
    if node.kind in MAPPINGS:
        for label in node.labels:
            if type(label) not in (str, int):
                raise TypeError(
                    f"torchpmap.checkpoint: the dict {path} has the key {label!r}, but the keys "
                    "must be strings or ints: they become the names in the checkpoint."
                )
    if node.kind in (*MAPPINGS, list, tuple):
        return node.labels
    return [key.strip(".[]'\"") for key in node.keys]


def leaf_kind(leaf: Leaf) -> str:
    """What a leaf is saved as.

    Raises:
        TypeError: it cannot be saved.
    """
    value, name = leaf.value, type(leaf.value).__name__
    if type(value) in _TENSORS:
        if value.layout == torch.strided and dtype_name(value.dtype) in SAVED_DTYPES:
            return "tensor"
        name = f"{name} ({dtype_name(value.dtype)}, {value.layout})"
    if isinstance(value, np.ndarray | np.generic):
        check_array(value, f"torchpmap.checkpoint.save: {leaf.path}")
        return "ndarray" if isinstance(value, np.ndarray) else "numpy scalar"
    if type(value) in VALUES:
        return name
    raise TypeError(
        f"torchpmap.checkpoint.save: {leaf.path} has type {name}, but what can be saved are "
        "ShardedTensors, dense tensors, numpy arrays, numbers, strings, bytes and None, in any "
        "pytree. For a module or an optimizer save its state_dict()."
    )
