"""Where code that Inductor (torch 2.13) makes writes or reads too early: wrong numbers, no error.

*Writes.*  Inductor turns ``y.index_put(i, v)`` and ``y.slice_scatter(v)`` into writes to ``y`` when
nothing reads ``y`` later.  It does so too

* when ``y`` is expanded, so that several elements lie at one place, as in gradients of indexing
  under ``vmap`` (https://github.com/pytorch/pytorch/issues/183986);
* when ``v`` or ``i`` is a view of ``y``, as after ``y[1:] = y[:-1].clone()``
  (https://github.com/pytorch/pytorch/pull/185450);
* when ``y`` is ``cat([a, b])`` and ``a`` is read later: ``a`` is computed into the memory of ``y``.
  This concerns sums over devices too, which are of one ``cat`` for a tree of values.

Such a ``y`` is copied first.

*Reads.*  On a CPU, loops are given other ranges so that they can be one loop.  A loop that reads
what a scatter has written forgets by that (``recompute_size_and_body``) that it does, and may run
before the scatter, as in gradients of ``gather``.

Delete each rule when the oldest torch that is supported has it right.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from torchpmap._base.replaced import Replaced, Replacement

_aten = torch.ops.aten
_WRITES = {
    _aten.index_put.default,
    _aten._unsafe_index_put.default,
    _aten.slice_scatter.default,
    _aten.select_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default,
    torch.ops._c10d_functional.all_reduce.default,
}


@functools.cache
def copying_pass() -> Any:
    """The pass, for ``post_grad_custom_post_pass``, the last one before Inductor's own."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class CopyBases(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            copy_bases(graph)

        def uuid(self) -> bytes:  # is part of the keys of Inductor's cache
            return get_hash_for_files((__file__,))

    return CopyBases()


def _renaming(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        own(node, *args, **kwargs)
        # by its mutations, a value has another name after each
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return recompute_size_and_body


@functools.cache
def reads_in_order() -> Replaced:
    """A block in which loops that get other ranges still wait for what they read."""
    from torch._inductor.scheduler import SchedulerNode

    return Replaced([Replacement(SchedulerNode, "recompute_size_and_body", _renaming)])


def copy_bases(graph: Graph) -> None:
    """Copy each tensor that may not be written to in place."""
    for node in graph.nodes:
        if node.target in _WRITES and _needs_a_copy(node):
            base: Any = node.args[0]
            contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(node):
                copy = graph.call_function(_aten.clone.default, (base,), contiguous)
            copy.meta["val"] = base.meta["val"].clone(**contiguous)
            node.update_arg(0, copy)


def _needs_a_copy(node: Node) -> bool:
    base: Any = node.args[0]
    *views, root = _views(base)
    read: list[Node] = []
    torch.fx.map_arg(node.args[1:], read.append)
    return (
        any(map(_is_expanded, views))
        or any(_views(each)[-1] is root for each in read)
        or _has_parts_of_others(root)
    )


def _has_parts_of_others(node: Node) -> bool:
    """Whether it is a ``cat`` of values that others use too."""
    operands: Any = node.args[0] if node.target is _aten.cat.default else ()
    chains = [_views(each) for each in operands]
    return any(
        len(each.users) > 1
        for chain in chains
        if chain[-1].op != "placeholder"  # a caller's value stays where it is
        for each in chain
    )


def _views(node: Node) -> list[Node]:
    """A node, what it is a view of, and so on."""
    found = [node]
    while True:
        source: Any = node.args[0] if node.args else None
        is_part = node.target is operator.getitem and getattr(source.target, "is_view", False)
        if not is_part and not getattr(node.target, "is_view", False):
            return found
        node = source
        found.append(node)


def _is_expanded(node: Node) -> bool:
    value = node.meta["val"]
    each_dim = zip(value.shape, value.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in each_dim)
