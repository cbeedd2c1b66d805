"""Constants of a graph move to its device once, when the graph is loaded.

Tracing initialises no device, so ``torch.tensor(...)`` in a function for an accelerator becomes a
constant on the host, and a copy to the device in every call.  ``place`` makes that copy.

In torch 2.11 to 2.15 two things initialise CUDA nevertheless, if this host has it: the backward
pass of a traced function, because autograd records an event for each gradient (in C++), and
``torch.cond``, because Dynamo saves the states of all generators.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from torchpmap._trace.graphs import all_modules

_aten = torch.ops.aten
_UNDERSTOOD = {"device", "dtype", "layout", "non_blocking", "pin_memory"}


def place(graph: GraphModule, device: torch.device) -> None:
    """Put the constants that a graph copies to an accelerator on ``device``."""
    for module in all_modules(graph):
        if _place(module, device):
            module.recompile()


def _place(module: GraphModule, device: torch.device) -> bool:
    copies = [node for node in module.graph.nodes if _copies_a_constant(node)]
    for number, node in enumerate(copies):
        fresh = node.args[0]
        (source,) = fresh.all_input_nodes
        name = f"_constant_on_device{number}"
        value = getattr(module, source.target)
        dtype = node.kwargs.get("dtype", value.dtype)
        module.register_buffer(name, value.to(device, dtype))
        with module.graph.inserting_before(node):
            placed = module.graph.get_attr(name)
            # a function may write to its constant: each call has a fresh one
            again = module.graph.call_function(fresh.target, (placed,))
        node.replace_all_uses_with(again)
        for unused in (node, fresh):
            module.graph.erase_node(unused)
        if not source.users:
            module.graph.erase_node(source)
            delattr(module, source.target)
    return bool(copies)


def _copies_a_constant(node: Node) -> bool:
    if node.target is not _aten._to_copy.default or "device" not in node.kwargs:
        return False
    fresh = node.args[0]
    return (
        node.kwargs.keys() <= _UNDERSTOOD
        and torch.device(str(node.kwargs["device"])).type != "cpu"
        and isinstance(fresh, Node)
        and fresh.target is _aten.lift_fresh_copy.default
        and fresh.all_input_nodes[0].op == "get_attr"
        and len(fresh.users) == 1  # nothing else reads it, or writes to it
    )
