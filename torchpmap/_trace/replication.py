"""Which values of a traced graph may differ between devices.

A value is *replicated* when it depends on nothing that differs between devices, or has passed
through a collective that gives every device the same.  A value that ``out_axes=None`` declares
replicated, but that may differ, is broadcast.  JAX instead returns the first device's value and
silently leaves the others different.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torchpmap._base.torch_internals import OpOverload
from torchpmap._collectives import pbroadcast
from torchpmap._collectives.backend import c10d
from torchpmap._layout.axis_stack import Axis, Partition, bind, joined, peers

_EQUALISING = (c10d.all_reduce.default, c10d.all_gather_into_tensor.default)


def varying_nodes(
    graph: torch.fx.Graph, varying_inputs: Collection[torch.fx.Node], *groups: str
) -> set[torch.fx.Node]:
    """The nodes whose value may differ between devices that are together in each of ``groups``; the
    graph may still be under construction.
    """
    varying = set(varying_inputs)
    for node in graph.nodes:
        if node.target in _EQUALISING and node.args[-1] in groups:
            continue
        if is_random(node) or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    return varying


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws from a random generator."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):  # attention and RNNs draw only for this
            given = node.args[position:] or [node.kwargs.get(argument.name, argument.default_value)]
            return bool(given[0] != 0)
    return True


def replicated(
    results: Sequence[tuple[torch.Tensor, Sequence[Axis]]],
    varying_arguments: Sequence[bool],
    varying_closures: Collection[torch.fx.Node],
    groups: Mapping[str, Partition],
) -> list[torch.Tensor]:
    """In a trace, broadcast from the first device blocks that must be the same but may differ.

    Args:
        results: blocks of a device, each with the axes along which it must be the same.
        varying_arguments: whether devices hold different blocks, per argument of the trace.
        varying_closures: nodes of closures that may differ.
        groups: the process groups by name, as indices of devices.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    arguments = [node for node in tracer.graph.nodes if node.op == "placeholder"]
    inputs = {node for node, varies in zip(arguments, varying_arguments, strict=False) if varies}
    inputs |= set(varying_closures)
    known: dict[Partition, set[torch.fx.Node]] = {}

    def varies(node: torch.fx.Node, axis: Axis) -> bool:
        lines = peers(axis)
        if lines not in known:
            alike = [name for name, parts in groups.items() if _is_within(lines, parts)]
            known[lines] = varying_nodes(tracer.graph, inputs, *alike)
        return node in known[lines]

    def settle(block: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
        slot: Any = get_proxy_slot(block, tracer, None)
        if slot is None:  # no traced input was touched
            return block
        for axis in joined([a for a in axes if a.size > 1 and varies(slot.proxy.node, a)]):
            with bind(axis):
                block = pbroadcast(block.detach(), axis.name, 0)
        return block

    return [settle(block, axes) for block, axes in results]


def _is_within(lines: Partition, parts: Partition) -> bool:
    """Whether every line is in one of the parts."""
    return all(any(set(line) <= set(part) for part in parts) for line in lines)
