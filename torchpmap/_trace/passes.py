"""What is done with a graph between the tracer and the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchpmap._base.errors import lost_write
from torchpmap._base.torch_internals import OpOverload
from torchpmap._collectives.backend import c10d
from torchpmap._layout.axis_stack import is_of_one
from torchpmap._trace.graphs import (
    Closure,
    all_modules,
    all_nodes,
    compute,
    drop_dead,
    kind_of_node,
    placeholders,
    storages,
    texts_in,
    writes,
    written_storages,
)
from torchpmap._trace.repetition import keep_only_places

_aten = torch.ops.aten
_WAIT = c10d.wait_tensor.default


def refuse_lost_writes(closure: Closure, place: str = "") -> None:
    """Raise for a write to a tensor from outside; ``place``: of the graph, in the error."""
    written = written_storages(closure.graph.nodes)
    for node, tensor in zip(closure.nodes, closure.tensors, strict=True):
        for storage in storages(node) & written.keys():
            raise RuntimeError(lost_write(tensor, f" ({written[storage].target}{place})"))


def refuse_lost_gradients(graph: torch.fx.GraphModule, leftover: Sequence[torch.Tensor]) -> None:
    """Raise for a gradient that the graph, now without dead code, no longer computes: it was
    neither returned nor used.
    """
    values = (node.meta.get("val") for node in graph.graph.nodes if leftover)
    # a gradient among the results of an operation is used if a node takes it out of them
    alive = {x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)}
    if any(grad.untyped_storage()._cdata not in alive for grad in leftover):
        raise RuntimeError(
            "the function calls .backward() and leaves a gradient on a captured parameter without "
            "using it; the devices work on copies of the caller's parameters, so the gradient "
            "would be lost. Return the .grad tensors, or use torchpmap.value_and_grad."
        )


def protect_inputs(module: torch.fx.GraphModule) -> bool:
    """Let in-place writes to an input go to a copy, because the stored value may be used again;
    returns whether there are any.
    """
    inputs, written, found = placeholders(module.graph), written_storages(module.graph.nodes), False
    for node in inputs:
        if not storages(node).isdisjoint(written):
            with module.graph.inserting_after(inputs[-1]):
                copy = module.graph.call_function(_aten.clone.default, (node,))
            copy.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(copy)
            copy.replace_input_with(copy, node)
            found = True
    return found


def clean(module: torch.fx.GraphModule) -> None:
    """Take out what would only be time spent in each call.

    Nothing in a graph records gradients any more, so it needs no detach but of what is then given
    another shape.  Nothing else sees that the shape of a tensor changes, if nothing else uses it: a
    matmul with a vector is written so by torch, and as a write it would count as an effect.  A rank
    that is alone in its group gets a copy of what it gives.
    """
    graph: Any = module.graph
    for node in graph.nodes:
        view = _IN_PLACE.get(node.target)
        if node.target is _aten.detach.default and not any(
            x.target in _IN_PLACE for x in node.users
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif view is not None and len(node.args[0].users) == 1:
            node.target = view
        elif node.target is _WAIT and is_of_one(str(node.args[0].args[-1])):
            collective = node.args[0]
            node.target, node.args = _aten.clone.default, collective.args[:1]
            graph.erase_node(collective)
    _drop_copies(module)


_IN_PLACE = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
}
"""Operations that change only the shape of a tensor -> what gives that shape."""


_SQUEEZE, _UNSQUEEZE = _aten.squeeze.dim, _aten.unsqueeze.default


def keep_rows(module: torch.fx.GraphModule) -> None:
    """Let operations on each number work on the blocks, each of one row, as they are:

        unsqueeze(add(squeeze(x, 0), w), 0)    ->    add(x, w)

    A view takes as long as a small operation does.
    """
    graph: Any = module.graph
    is_changed = False
    for node in graph.nodes if not writes(graph) else ():
        if _keeps_rows(node):
            with graph.inserting_after(node), node.meta["val"].fake_mode:
                row = graph.call_function(_SQUEEZE, (node, 0))
                row.meta = node.meta
                node.meta = node.meta | {"val": node.meta["val"].unsqueeze(0)}
            node.replace_all_uses_with(row, delete_user_cb=lambda user: user is not row)  # noqa: B023
            node.args = tuple(_row_of(x) or x for x in node.args)
            is_changed = True
        elif node.target is _UNSQUEEZE and node.args[1] == 0 and (whole := _row_of(node.args[0])):
            node.replace_all_uses_with(whole)
            is_changed = True
    if is_changed:
        drop_dead(graph)


def _row_of(value: Any) -> torch.fx.Node | None:
    """The block whose only row a value is; None if it is none."""
    if not isinstance(value, torch.fx.Node) or value.target is not _SQUEEZE or value.args[1] != 0:
        return None
    block: Any = value.args[0]
    is_row = isinstance(block, torch.fx.Node) and block.meta["val"].shape[:1] == (1,)
    return block if is_row else None


def _keeps_rows(node: torch.fx.Node) -> bool:
    """Whether an operation gives the same numbers for a block of one row as for that row."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or any(
        isinstance(x, torch.fx.Node) for x in node.kwargs.values()
    ):
        return False
    result, *given = (x.meta["val"] for x in (node, *node.all_input_nodes))
    if not all(isinstance(value, torch.Tensor) for value in (result, *given)):  # frexp gives two
        return False
    dims = {x.meta["val"].ndim for x in node.all_input_nodes if _row_of(x)}
    if target is _aten.gelu_backward.default and not all(map(_row_of, node.all_input_nodes)):
        return False  # oneDNN broadcasts nothing
    # a tensor without dims has less say in what dtype the result has
    return result.ndim in dims and len({value.dtype for value in given}) == 1


def _drop_copies(module: torch.fx.GraphModule) -> None:
    """Take out the copies that nothing needs.

    One is needed if it or its source is written to, or if its strides are others.  Results share no
    memory with each other, nor with inputs and constants, and the operands of a loop or branch
    share none with each other.
    """
    nodes = list(module.graph.nodes)
    given: set[int] = set()
    results: set[int] = set()
    operands: list[set[int]] = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            given |= storages(node)
        elif node.op == "output" or kind_of_node(node):
            places = {place for source in node.all_input_nodes for place in storages(source)}
            if node.op == "output":
                results = places
            else:
                operands.append(places)
    written = written_storages(module.graph.nodes)
    for node in nodes:
        if node.target is not _aten.clone.default:
            continue
        source = node.all_input_nodes[0]
        copy, original = node.meta["val"], source.meta["val"]
        ((own,), (other,)) = storages(node), storages(source)
        is_alike = (
            copy.stride() == original.stride()
            and copy.is_conj() == original.is_conj()
            and copy.is_neg() == original.is_neg()
        )
        if not is_alike or own in written or other in written:
            continue
        both = {own, other}
        is_result = not both.isdisjoint(results)
        if is_result and (both <= results or not both.isdisjoint(given)):
            continue
        if is_result and original.storage_offset():  # torch (2.13) refuses it of a branch
            continue
        if any(both <= places for places in operands):
            continue
        for places in (results, *operands):
            if own in places:
                places.add(other)
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
        _share(source, own, other)


def _share(source: torch.fx.Node, before: int, now: int) -> None:
    """Let the views of a node have its memory, that had the memory of a copy of it."""
    for node in source.users:
        if before != now and before in storages(node):
            compute(node)
            _share(node, before, now)


def drop_unused_index(graph: torch.fx.GraphModule) -> bool:
    index = placeholders(graph.graph)[0]
    if index.users:
        return True
    graph.graph.erase_node(index)
    return False


def names_in(graph: torch.fx.GraphModule) -> list[str]:
    """Every text among the arguments of a graph, and of the graphs inside it, once."""
    return list(dict.fromkeys(text for node in all_nodes(graph) for text in texts_in(node)))


def input_kinds(graph: torch.fx.GraphModule) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    values = [node.meta["val"] for node in placeholders(graph.graph)]
    return tuple((tuple(value.shape), value.dtype) for value in values)


def finish_graph(graph: torch.fx.GraphModule) -> None:
    for module in all_modules(graph):
        for node in module.graph.nodes:
            keep_only_places(node)  # fake tensors do not travel
        module.graph.lint()
        module.recompile()
