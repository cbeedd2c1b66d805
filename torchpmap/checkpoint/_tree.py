"""A pytree as a checkpoint sees it: leaves under readable keys, in containers that JSON can name.

Keys are those of ``torch.distributed.checkpoint`` for nested dicts and lists: the labels on the way
to the leaf, with dots between them.  Without a tree to fill, a loaded tree has the saved dicts,
lists and tuples; other containers come back as dicts of their fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchpmap._base.errors import check_array
from torchpmap._base.pytree import MAPPINGS, Node, Structure, flatten_as_met
from torchpmap._layout.mesh import NamedSharding
from torchpmap._sharded.tensor import ShardedTensor

VALUES = (type(None), bool, int, float, complex, str, bytes)
Route = tuple[str | int, ...]
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
    route: Route
    """The same for torch.distributed.checkpoint: an int for a place in a list."""
    path: str
    """In the script: ``tree['params']['w']``."""
    value: Any


def leaves_of(tree: Any, name: str) -> tuple[list[Leaf], Structure]:
    """The leaves of ``tree``, which the caller knows as ``name``.

    Raises:
        TypeError: a dict has a key that is neither a string nor an int.
        ValueError: two leaves would have the same key.
    """
    as_met, structure = flatten_as_met(tree)
    values, paths = structure.in_leaf_order(as_met), structure.paths(name)
    routes = structure.in_leaf_order(_routes(structure.root, name, iter(as_met))[0])
    if structure.root is None:
        routes = [(_ROOT,)]
    leaves: dict[str, Leaf] = {}
    for value, path, (first, *rest) in zip(values, paths, routes, strict=True):
        route = (str(first), *rest)  # torch.distributed.checkpoint saves the tree as a dict
        key = ".".join(map(str, route))
        if key in leaves:
            raise ValueError(
                f"torchpmap.checkpoint: {leaves[key].path} and {path} would both be saved as "
                f"{key!r}. Rename one of the keys."
            )
        leaves[key] = Leaf(key, route, path, value)
    return list(leaves.values()), structure


def _routes(node: Node | None, path: str, leaves: Iterator[Any]) -> tuple[list[Route], bool]:
    """The route to every leaf, and whether torch.distributed.checkpoint (DCP) would look into it.

    DCP takes a list without tensors or dicts for one value.  The labels of such a list become
    strings, so that DCP takes it for a dict.
    """
    if node is None:
        return [()], isinstance(next(leaves), torch.Tensor | np.ndarray | np.generic)
    labels = _labels(node, path)
    below = [
        _routes(child, path + key, leaves)
        for key, child in zip(node.keys, node.children, strict=True)
    ]
    opens = any(looked_into for _, looked_into in below) and all(inner for inner, _ in below)
    if not opens:
        labels = [str(label) for label in labels]
    routes = [
        (label, *rest) for label, (inner, _) in zip(labels, below, strict=True) for rest in inner
    ]
    return routes, True


def _labels(node: Node, path: str) -> list[str | int]:
    if node.kind in MAPPINGS:
        for label in node.labels:
            if type(label) not in (str, int):
                raise TypeError(
                    f"torchpmap.checkpoint: the dict {path} has the key {label!r}, but the keys "
                    "must be strings or ints: they become the names in the checkpoint."
                )
        return [str(label) for label in node.labels]
    if node.kind in (list, tuple):
        return list(range(len(node.labels)))
    return [key.strip(".[]'\"") for key in node.keys]


def skeleton_of(structure: Structure) -> Any:
    """The containers as JSON, with keys in place of the leaves."""

    def describe(node: Node | None, route: Route) -> Any:
        if node is None:
            return ".".join(map(str, route or (_ROOT,)))
        names = _labels(node, "")
        kind = "dict" if node.kind in MAPPINGS else "fields"
        if node.kind in (list, tuple):
            kind = node.kind.__name__
        labels = node.labels if kind == "dict" else names
        children = [describe(c, (*route, n)) for n, c in zip(names, node.children, strict=True)]
        return {kind: [list(pair) for pair in zip(labels, children, strict=True)]}

    return describe(structure.root, ())


def rebuild(skeleton: Any, values: Mapping[str, Any]) -> Any:
    """The tree of a skeleton, with ``values`` by key."""
    if isinstance(skeleton, str):
        return values[skeleton]
    ((kind, children),) = skeleton.items()
    built = {label: rebuild(child, values) for label, child in children}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(built.values())
    return built


def leaf_kind(leaf: Leaf) -> str:
    """What a leaf is saved as.

    Raises:
        TypeError: it cannot be saved.
    """
    value = leaf.value
    if type(value) in _TENSORS and value.layout == torch.strided and not value.is_quantized:
        return "tensor"
    if isinstance(value, np.ndarray | np.generic):
        check_array(value, f"torchpmap.checkpoint.save: {leaf.path}")
        return "ndarray" if isinstance(value, np.ndarray) else "numpy scalar"
    if type(value) in VALUES:
        return type(value).__name__
    raise TypeError(
        f"torchpmap.checkpoint.save: {leaf.path} has type {type(value).__name__}, but what can be "
        "saved are ShardedTensors, dense tensors, numpy arrays, numbers, strings, bytes and None, "
        "in any pytree. For a module or an optimizer save its state_dict()."
    )
