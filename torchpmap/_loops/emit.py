"""Loops and branches as nodes of a graph: torch's ``scan``, ``while_loop`` and ``cond``.

This is the level below all transforms, so torch's rules for derivatives and batching are not used
(https://github.com/pytorch/pytorch/issues/172568 lists what is missing; 184528 and 175522 are wrong
results).  The body becomes a graph.  What it reads from the graph around it becomes an input::

    w, x = ...                                  w, x = ...
    scan(lambda c, x: c @ w + x, x0, xs)        scan(body, [x0], [xs], (w,))
                                                body: (c, x, w) -> (c @ w + x, ...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from torchpmap._base.inexact import Kind, kinds_of
from torchpmap._base.pytree import tree_map
from torchpmap._base.sources import users_line
from torchpmap._base.storages import apart, memory_order
from torchpmap._base.torch_internals import (
    depth,
    fake_mode,
    is_wrapped,
    new_fake,
    node_of,
    outside_modes,
    outside_transforms,
    torch_function_off,
    tracing_mode,
    track,
)
from torchpmap._collectives.varying import Axes, axes_of, set_axes
from torchpmap._layout import axis_stack
from torchpmap._trace.capture import is_real
from torchpmap._trace.graphs import (
    GRAPHS,
    SCAN,
    Closure,
    added,
    current_capture,
    current_closure,
    drop_dead,
    kind_of_node,
    output_of,
    placeholders,
    results_of,
)
from torchpmap._trace.passes import clean, protect_inputs, refuse_lost_writes
from torchpmap._trace.traced_views import traced_views
from torchpmap._trace.unread import drop_unused_inputs

_aten = torch.ops.aten
_cond = torch.ops.higher_order.cond
T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


def fake(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return new_fake(fake_mode(), shape, dtype, device)


# -- the body --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    """A graph for the inside of a loop."""

    module: GraphModule
    """Placeholders: those that it was traced for, then one for each of ``reads``."""
    reads: tuple[torch.Tensor, ...]
    """What it reads from the graph around it."""
    results: tuple[Kind, ...]
    axes: tuple[Axes, ...]
    """Per result: along which axes it varies."""


class _Reads(Closure):
    """Gives each tensor from outside that meets an operation of a body an input of its graph."""

    def __init__(self) -> None:
        super().__init__(current_capture())

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.capture is not None:
            tensor = self.capture.substitute(tensor)
        if is_real(tensor) or node_of(self.tracer, tensor) is not None:
            return tensor
        if is_wrapped(tensor):
            raise RuntimeError(
                f"at {users_line()}: the body of a loop or branch uses other tensors from outside "
                "than when it ran for the first time. It must do the same each time that it is "
                "traced."
            )
        graph = self.graph
        node = graph.placeholder(f"read_{len(self.nodes)}")
        self.nodes.append(node)
        self.tensors.append(tensor)
        # which operations are views depends on the order; torch wants its operands contiguous
        order = memory_order(tensor)
        with outside_transforms():  # transforms in the body would trace what this does
            with outside_modes():
                node.meta["val"] = tensor.permute(order)
            if order != sorted(order):
                back = [order.index(dim) for dim in range(len(order))]
                node = graph.call_function(_aten.permute.default, (node, back))
                node.meta["is_read"] = True
            track(self.tracer, tensor, node)
        return tensor


def inner(body: Callable[..., Tensors], kinds: Sequence[Kind], axes: Sequence[Axes] = ()) -> Inner:
    """Trace ``body`` on tensors of these kinds, which vary along these axes, into a graph of its
    own.
    """
    from torchpmap._trace.graph_mode import graph_of

    reads = _Reads()
    varying: list[Axes] = []

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with axis_stack.entering(depth() + 1, None):
            results = [reads.substitute(x) for x in body(*tensors)]
        varying[:] = map(axes_of, results)
        # torch lets no result share memory with an input or another result, and (2.13) takes no
        # branches of which one returns a part of a larger tensor
        dense = [_dense(x.detach()) for x in results]
        with torch_function_off():  # no question of the user's
            whole = [x.clone() if x.storage_offset() else x for x in dense]
        return tuple(apart(whole, (*tensors, *reads.tensors)))

    examples = [fake(*kind) for kind in kinds]
    for example, along in zip(examples, axes, strict=False):
        set_axes(example, along)
    module = graph_of(flat, examples, reads)
    return _finished(module, reads, len(examples), tuple(varying))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides that its shape gives.  A dim of size 1 has any stride in a
    contiguous tensor, but torch compares the strides of branches.
    """
    strides, size = [], 1
    for length in reversed(x.shape):
        strides.append(size)
        size *= max(length, 1)
    is_dense = x.stride() == tuple(reversed(strides))
    return x if is_dense else x.clone(memory_format=torch.contiguous_format)


def _finished(
    module: GraphModule, reads: _Reads, num_examples: int, varying: tuple[Axes, ...]
) -> Inner:
    graph = module.graph
    refuse_lost_writes(reads, ", in the body of a loop or branch")
    reads.place(num_examples)
    places = placeholders(graph)[:num_examples]
    protect_inputs(module)  # a function of the user's may write to a cotangent
    clean(module)
    drop_dead(graph)
    kept = [(n, t) for n, t in zip(reads.nodes, reads.tensors, strict=True) if n.users]
    for node in reads.nodes:
        if not node.users:
            graph.erase_node(node)
    tensors = [tensor for _, tensor in kept]
    tensors += _constants(module, [*places, *(node for node, _ in kept)])
    graph.lint()
    module.recompile()
    values = [node.meta["val"] for node in results_of(graph)]
    return Inner(module, tuple(tensors), tuple(kinds_of(values)), varying)


def _constants(module: GraphModule, places: Sequence[Node]) -> list[torch.Tensor]:
    """Make the constants of a body inputs too: compilers keep constants in the outermost graph."""
    found: list[torch.Tensor] = []
    names: dict[str, Node] = {}
    last = places[-1] if places else module.graph._root
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = getattr(module, node.target)
        if not isinstance(value, torch.Tensor):
            continue
        if node.target not in names:
            with torch_function_off():  # it is no closure of a loop around this one
                fresh = _aten.lift_fresh_copy.default(value)
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"constant_{len(found)}")
            last.meta["val"] = fresh
            names[node.target] = last
            found.append(fresh)
        node.replace_all_uses_with(names[node.target])
        module.graph.erase_node(node)
    for name in names:
        delattr(module, name)
    return found


def shared(inner: Sequence[Inner], num_own: int = 0) -> list[torch.Tensor]:
    """Give graphs the same inputs, after ``num_own`` of their own: what any of them reads."""
    reads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    owned: list[dict[int, Node]] = []
    for each in inner:
        places = placeholders(each.module.graph)
        pairs = list(zip(each.reads, places[num_own:], strict=True))
        reads |= {id(x): (x, node.meta["val"]) for x, node in pairs}
        owned.append({id(x): node for x, node in pairs})
    for each, mine in zip(inner, owned, strict=True):
        graph = each.module.graph
        places = placeholders(graph)
        before = (places[-1] if places else graph._root).next
        with graph.inserting_before(before):
            for k, (key, (_, value)) in enumerate(reads.items()):
                node = graph.placeholder(f"operand_{k}")
                node.meta["val"] = value
                if key in mine:
                    mine[key].replace_all_uses_with(node)
        for node in mine.values():
            graph.erase_node(node)
        graph.lint()
        each.module.recompile()
    return [x for x, _ in reads.values()]


def with_one_result(inner: Inner) -> Inner:
    """Let a graph return its only result, in no tuple."""
    output = output_of(inner.module.graph)
    output.args = tuple(results_of(inner.module.graph))
    inner.module.recompile()
    return inner


@contextlib.contextmanager
def discarded() -> Iterator[None]:
    """Remove from the graph what the block has put into it, besides what it reads from outside."""
    mode, views = tracing_mode(), traced_views()
    assert mode is not None
    if views is not None:
        views.refresh_all()  # and not in the block
    with added(mode.tracer.graph) as nodes:
        yield
    for node in reversed(nodes):
        stays = node.op == "placeholder" or "is_read" in node.meta
        if not stays and not node.users:
            node.graph.erase_node(node)


# -- the node --------------------------------------------------------------------------------------


def operands(tensors: Tensors, beside: Tensors = ()) -> list[torch.Tensor]:
    """Tensors as the graph that is being traced knows them, contiguous, and sharing no memory with
    each other or with those ``beside`` them, which torch forbids.
    """
    closure = current_closure()
    known = (x if closure is None else closure.substitute(x) for x in tensors)
    return apart((_dense(x.detach()) for x in known), beside)


def read(reads: Tensors, beside: Tensors = ()) -> list[torch.Tensor]:
    """What the graphs inside read, as their operands."""
    return operands([x.permute(memory_order(x)) for x in reads], beside)


def trace_until_axes_stay(
    trace: Callable[[list[Axes]], tuple[T, Sequence[Axes]]], carry: Tensors
) -> tuple[T, list[Axes]]:
    """What ``trace`` makes of the axes along which a carry varies, and these: the fewest that a
    step keeps.

    ``trace`` also returns the axes of the carry after a step.
    """
    axes = [axes_of(x) for x in carry]
    while True:
        found, after = trace(axes)
        grown = [a | b for a, b in zip(axes, after, strict=True)]
        if grown == axes:
            return found, axes
        axes = grown


def call(
    target: Any, *args: Any, results: Sequence[Kind], axes: Sequence[Axes], name: str
) -> list[torch.Tensor]:
    """Add ``target(*args)``, which returns ``results``, to the graph that is being traced.

    Args:
        target: the operation.
        args: graphs, and tuples and lists of ``operands``.
        results: kinds of the results.
        axes: along which axes each varies.
        name: what the user called.
    """
    mode = tracing_mode()
    assert mode is not None
    tracer = mode.tracer
    for k, module in enumerate(args):
        if isinstance(module, GraphModule):
            tracer.root.register_module(_free_name(tracer.root, f"{target._name}_body{k}"), module)
    proxies = tree_map(tracer.unwrap_proxy, args)
    node = tracer.create_proxy("call_function", target, proxies, {}, name=target._name).node
    node.meta |= {  # what later passes ask
        GRAPHS: [each for each in args if isinstance(each, GraphModule)],
        "axes": [
            (part.name, part.group)
            for parts in axis_stack.bound()
            for part in parts
            if part.group is not None
        ],
        "line": users_line(),
        "called": name,
    }
    if kind_of_node(node) == SCAN:
        drop_unused_inputs(node)
    values = tuple(fake(*kind) for kind in results)
    track(tracer, values, node)
    for value, along in zip(values, axes, strict=True):
        set_axes(value, along)
    return list(values)


def branch(first: torch.Tensor, inner: Sequence[Inner], name: str) -> list[torch.Tensor]:
    """Add a branch to the graph that is being traced; ``first``: whether it is the first of two."""
    reads = shared(inner)
    (first,) = operands([first])
    decided = axes_of(first)
    axes = [decided.union(*along) for along in zip(*(each.axes for each in inner), strict=True)]
    modules, given = [each.module for each in inner], tuple(read(reads))
    return call(_cond, first, *modules, given, results=inner[0].results, axes=axes, name=name)


def _free_name(root: Any, name: str) -> str:
    number = 0
    while hasattr(root, f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
