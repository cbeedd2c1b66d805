"""Pytrees: the one flatten used everywhere.

Nodes are what ``torch.utils._pytree`` has registered; everything else is a leaf. ``None`` is a leaf
too: as an argument or output it means "empty". Dicts are the same structure whatever the order of
their keys; code that sees the order is traced for each (``Structure.dict_order``).

``flatten`` is on the path of every call, so it is one walk that returns the leaves and a *token*, a
hashable picture of the tree as it was met. A token seen before leads straight to its ``Structure``;
only a new one is described in full (key paths, sorted keys):

    tree -- _walk --> leaves as met, token -- _structures[token] --> Structure
                                                  (order: leaves as met -> sorted keys)

Torch's own ``TreeSpec`` is not the key: it does not hash, depends on the order of dict keys, and
takes ten times as long to build (20 us against 2 us for a list of 100 tensors). Nor is optree's:
it is not told all of torch's registry, and takes ``{1: x}`` for ``{True: x}`` (benchmarks/README).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree

# torch's own functions, for what operations of torch take and return
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from torchpmap._base.exact import exact

T = TypeVar("T")
Tree = TypeVar("Tree")
"""A pytree, or a leaf, in the signature of a function that keeps its structure."""

MAPPINGS = (dict, OrderedDict, defaultdict)
_MAX_STRUCTURES = 4096
_MAX_LEAF_TYPES = 256
_STR = {str}
_NO_NODES = {bool, int, float, str, type(None), torch.dtype, torch.device}
_structures: dict[Hashable, Structure] = {}
_flat_calls: dict[int, Structure] = {}  # by number of arguments, if all are leaves
_leaf_types: set[type] = set()
_registered = pytree.SUPPORTED_NODES
_num_registered = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One container: how to rebuild it, and what its children are called."""

    kind: type
    context: Any  # a copy of what ``rebuild`` wants besides the children
    labels: tuple[Hashable, ...]  # one per child: index, dict key or field name
    keys: tuple[str, ...]  # the labels as they are written in a path: "[0]", "['w']", ".x"
    children: tuple[Node | None, ...]  # None: a leaf
    rebuild: Callable[[Any, Any], Any]
    num_leaves: int


class Structure:
    """The shape of a pytree without its leaves; hashable, and equal for equal trees.

    Leaves are numbered with dict keys in sorted order. ``unflatten`` gives every dict the key order
    of the tree this very object came from; that order is not part of equality.
    """

    __slots__ = ("_hash", "_key", "_order", "dict_order", "num_leaves", "root")

    def __init__(self, root: Node | None) -> None:
        order: list[int] = []
        orders: list[Hashable] = []
        self.root = root
        self._key = _canonical(root, 0, order, orders)
        self.dict_order = tuple(orders) if any(orders) else None
        """The orders of keys that are not sorted: what code can see of a tree, beyond equality."""
        self._hash = hash(self._key)
        self._order = None if order == sorted(order) else order
        self.num_leaves = len(order)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure) and self._hash == other._hash and self._key == other._key
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.root,)

    def __repr__(self) -> str:
        return f"Structure({self.shown('*' for _ in range(self.num_leaves))})"

    def shown(self, leaves: Iterable[str]) -> str:
        """The tree with these texts for its leaves, the same in all processes.

        Containers of the user's do not show themselves: that may want leaves of a kind, or tell an
        address.
        """
        return _text(self.root, iter(self._as_met(list(leaves))))

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Put ``leaves`` into a tree of this structure."""
        if len(leaves) != self.num_leaves:
            raise ValueError(f"{self} takes {self.num_leaves} leaves, but got {len(leaves)}")
        if self.root is None:
            return leaves[0]
        return _build(self.root, self._as_met(leaves), 0)

    def paths(self, name: str = "") -> list[str]:
        """Return the path of every leaf, ``"params['w'][0]"`` for ``name="params"``."""
        return self.in_leaf_order(_paths(self.root, name))

    def call_paths(self, names: Sequence[str]) -> list[str]:
        """Return the paths of the leaves of ``(args, kwargs)``, given the names of the ``args``."""
        assert self.root is not None
        args, kwargs = self.root.children
        assert args is not None
        assert kwargs is not None
        starts = [*names, *map(str, kwargs.labels)]
        paths: list[str] = []
        for start, child in zip(starts, args.children + kwargs.children, strict=True):
            paths += _paths(child, start)
        return self.in_leaf_order(paths)

    def _as_met(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Undo ``in_leaf_order``."""
        if self._order is None:
            return leaves
        as_met = [None] * len(leaves)
        for i, leaf in zip(self._order, leaves, strict=True):
            as_met[i] = leaf
        return as_met

    def in_leaf_order(self, as_met: list[Any]) -> list[Any]:
        """Reorder one value per leaf from the order of the walk to the order of the leaves."""
        order = self._order
        return as_met if order is None else [as_met[i] for i in order]


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Split a pytree into its leaves and its structure.

    Example:
        >>> flatten({"b": 1, "a": (2, None)})
        ([2, None, 1], Structure({'b': *, 'a': (*, *)}))
    """
    as_met, structure = flatten_as_met(tree)
    return structure.in_leaf_order(as_met), structure


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """Flatten the arguments of a call; the order of keyword arguments does not matter."""
    if kwargs:
        return flatten((args, kwargs))
    for argument in args:  # few: a loop is faster than issuperset
        if type(argument) not in _leaf_types:
            return flatten((args, kwargs))
    structure = _flat_calls.get(len(args))
    if structure is None or len(_registered) != _num_registered:
        found = flatten((args, kwargs))  # which may find that a type is now a node
        if _leaf_types.issuperset(map(type, args)):
            _flat_calls[len(args)] = found[1]
        return found
    return list(args), structure


def flatten_as_met(tree: Any) -> tuple[list[Any], Structure]:
    """Flatten with the leaves in the order of the walk."""
    global _num_registered
    if len(_registered) != _num_registered:
        # A type may have become a node since it was met as a leaf.
        _leaf_types.clear()
        _num_registered = len(_registered)
    leaves: list[Any] = []
    token = _walk(tree, leaves)
    structure = _structures.get(token)
    if structure is None:
        # The first walk that meets a leaf type gives an unusual token. The second gives the usual
        # one, so that equal trees share one Structure, which calls compare in half the time.
        leaves.clear()
        token = _walk(tree, leaves)
        structure = _structures.get(token)
    if structure is None:
        if len(_structures) >= _MAX_STRUCTURES:
            _structures.clear()
        structure = _structures[token] = Structure(_describe(tree))
    return leaves, structure


def _walk(tree: Any, leaves: list[Any]) -> Hashable:
    kind = type(tree)
    context: Hashable = None
    children: Any = tree
    if kind is dict:
        children = tree.values()
        context = _keys_context(tree) if tree else None
    elif kind is not tuple and kind is not list:
        definition = None if kind in _leaf_types else _definition(kind)
        if definition is None:
            leaves.append(tree)
            return None
        flat, value = definition.flatten_fn(tree)
        children = list(flat)
        context = _keys_context(tree) if kind in MAPPINGS else exact(value)
        if kind is defaultdict:
            context = (context, exact(tree.default_factory))
    if _leaf_types.issuperset(map(type, children)):
        leaves.extend(children)
        return kind, context, len(children)
    return kind, context, tuple([_walk(child, leaves) for child in children])


def _keys_context(mapping: Any) -> Hashable:
    keys = tuple(mapping)
    # 1, 1.0 and True are equal keys, but not the same tree.
    return keys if _STR.issuperset(map(type, keys)) else exact(keys)


def _definition(kind: type) -> pytree.NodeDef | None:
    """Return torch's definition of a node type; remember any other type as a leaf type."""
    known: Any = namedtuple if pytree.is_namedtuple_class(kind) else kind
    found = _registered.get(known)
    if found is None:
        if len(_leaf_types) >= _MAX_LEAF_TYPES:
            _leaf_types.clear()
        _leaf_types.add(kind)
    return found


def registration(kind: type) -> Any:
    """What torch knows of a type that is a node, to be given to ``register_again``; or None."""
    return _registered.get(kind)


def register_again(kind: type, known: Any) -> None:
    """Make a type a node in this process, as it is in the one that ``known`` comes from."""
    _registered.setdefault(kind, known)


def open_node(tree: Any) -> tuple[list[Any], Node] | None:
    """Take one level of a tree apart into children and a node that does not have them yet."""
    kind = type(tree)
    definition = _definition(kind)
    if definition is None:
        return None
    flat, context = definition.flatten_fn(tree)
    children = list(flat)
    if definition.flatten_with_keys_fn is None:
        keys = tuple(f"[<flat index {i}>]" for i in range(len(children)))
    else:
        keys = tuple(_key_text(key) for key, _ in definition.flatten_with_keys_fn(tree)[0])
    labels: tuple[Hashable, ...] = tuple(range(len(children)))
    if kind in MAPPINGS:
        labels = tuple(tree)
    elif is_registered_dataclass(context, keys):
        labels = tuple(context[0])
    return children, Node(kind, _own(context), labels, keys, (), definition.unflatten_fn, 0)


def _key_text(key: Any) -> str:
    """A key as paths have it: of a tensor, such as those in ``optimizer.state``, no numbers."""
    inner = getattr(key, "key", None)
    return f"[<{type(inner).__name__}>]" if isinstance(inner, torch.Tensor) else str(key)


def is_registered_dataclass(context: Any, keys: tuple[str, ...]) -> bool:
    """Tell the nodes of ``pytree.register_dataclass`` from all others."""
    # pytree.register_dataclass drops the fields that are None; its context is [kept, dropped].
    if type(context) is not list or len(context) != 2 or type(context[0]) is not list:
        return False
    return keys == tuple(f".{name}" for name in context[0])


def _describe(tree: Any) -> Node | None:
    opened = open_node(tree)
    if opened is None:
        return None
    values, node = opened
    children = tuple(_describe(value) for value in values)
    total = sum(count_leaves(child) for child in children)
    return Node(node.kind, node.context, node.labels, node.keys, children, node.rebuild, total)


def _own(context: Any) -> Any:
    """What a node holds besides its children, as it is now: the user may change it later."""
    return _copied(context, {})


def _copied(context: Any, made: dict[int, Any]) -> Any:
    """``made``: copies by the id of the original, as a context may contain itself."""
    kind = type(context)
    if id(context) in made:
        return made[id(context)]
    if isinstance(context, tuple):
        parts = [_copied(each, made) for each in context]
        return tuple.__new__(kind, parts) if kind is tuple or hasattr(kind, "_fields") else context
    if kind not in (list, dict, OrderedDict, set, np.ndarray):
        return context
    copy = made[id(context)] = context.copy()
    if kind is list:
        copy[:] = [_copied(each, made) for each in context]
    elif kind is dict or kind is OrderedDict:
        copy.update((key, _copied(value, made)) for key, value in context.items())
    return copy


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``tree_map_only`` of tensors, for arguments of an operation: an eighth of its time."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple:
        return tuple([map_tensors(function, each) for each in value])
    if kind is list:
        return [map_tensors(function, each) for each in value]
    if kind is dict:
        return {name: map_tensors(function, each) for name, each in value.items()}
    return value if kind in _NO_NODES else tree_map_only(torch.Tensor, function, value)


def count_leaves(node: Node | None) -> int:
    """Return the number of leaves of a subtree; None is a leaf."""
    return 1 if node is None else node.num_leaves


def _canonical(node: Node | None, start: int, order: list[int], orders: list[Hashable]) -> Hashable:
    """Return a key that ignores the order of dict keys; append each leaf's place as met, and the
    order of each dict, None if it is sorted.
    """
    if node is None:
        order.append(start)
        return None
    starts = []
    for child in node.children:
        starts.append(start)
        start += count_leaves(child)
    indices: Sequence[int] = range(len(starts))
    if node.kind is dict or node.kind is defaultdict:
        indices = sorted(indices, key=lambda i: sort_key(node.labels[i]))
        is_sorted = list(indices) == list(range(len(starts)))
        orders.append(None if is_sorted else tuple(indices))
    context: Hashable = exact(node.context)
    if node.kind in MAPPINGS:
        context = exact([node.labels[i] for i in indices])
        if node.kind is defaultdict:
            context = (context, exact(node.context[0]))
    children = tuple([_canonical(node.children[i], starts[i], order, orders) for i in indices])
    return node.kind, context, children


def sort_key(label: Hashable) -> tuple[Any, ...]:
    """Return a sort key for a dict key of any type."""
    # Keys of other types go by their text: "<" may not exist, or not be a total order.
    kind = type(label)
    if issubclass(kind, torch.Tensor):  # its text has numbers; they stay in their order
        return kind.__qualname__, ""
    return kind.__qualname__, label if kind is str or kind is int else repr(label)


def _build(node: Node, leaves: Sequence[Any], start: int) -> Any:
    children = node.children
    if len(children) == node.num_leaves and not any(children):
        values: Any = leaves[start : start + node.num_leaves]
    else:
        values = []
        for child in children:
            if child is None:
                values.append(leaves[start])
                start += 1
            else:
                values.append(_build(child, leaves, start))
                start += child.num_leaves
    kind = node.kind
    if kind is dict:
        return dict(zip(node.labels, values))  # noqa: B905 - `strict` costs a third of it
    if kind is tuple or kind is list:
        return kind(values)
    return node.rebuild(list(values), _own(node.context))


def _text(node: Node | None, leaves: Iterator[str]) -> str:
    if node is None:
        return next(leaves)
    kind, parts = node.kind, [_text(child, leaves) for child in node.children]
    if kind is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if kind is list:
        return f"[{', '.join(parts)}]"
    if kind in MAPPINGS:
        pairs = zip(node.keys, parts, strict=True)  # a key is written in brackets
        items = ", ".join(f"{key[1:-1]}: {part}" for key, part in pairs)
        return f"{{{items}}}" if kind is dict else f"{kind.__name__}({{{items}}})"
    pairs = zip(node.keys, parts, strict=True)
    fields = [f"{key[1:]}={part}" if key.startswith(".") else part for key, part in pairs]
    # that of a named tuple or dataclass says no more than the names of the fields
    is_said = node.context is kind or is_registered_dataclass(node.context, node.keys)
    if node.context is not None and not is_said:
        fields.append(_context_text(node.context))
    return f"{kind.__name__}({', '.join(fields)})"


def _context_text(context: Any) -> str:
    try:
        text = repr(context)
    except Exception:  # code of the user's
        text = ""
    return type(context).__name__ if not text or " at 0x" in text else text


def _paths(node: Node | None, name: str) -> list[str]:
    if node is None:
        return [name]
    paths: list[str] = []
    for key, child in zip(node.keys, node.children, strict=True):
        paths += _paths(child, name + key)
    return paths


def replaced(leaves: Sequence[T], positions: Sequence[int], values: Sequence[T]) -> list[T]:
    """A copy of ``leaves`` with new values at some positions."""
    copy = list(leaves)
    for position, value in zip(positions, values, strict=True):
        copy[position] = value
    return copy
