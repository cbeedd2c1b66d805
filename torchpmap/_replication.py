"""Which values of a traced graph may differ between devices.

A value is *replicated* when it depends on nothing that differs between devices, or has passed
through a collective that gives every device the same.  What ``out_axes=None`` declares replicated
and is not, is made so with a broadcast: JAX returns its first device's value and silently leaves
the others different.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

__all__ = ["is_random", "varying_nodes"]

_c10d = torch.ops._c10d_functional
_EQUALISING = (_c10d.all_reduce.default, _c10d.all_gather_into_tensor.default)


def varying_nodes(
    graph: torch.fx.Graph, varying_inputs: Collection[torch.fx.Node], group: str
) -> set[torch.fx.Node]:
    """The nodes whose value may differ between the members of ``group``; a graph may still be under
    construction.
    """
    varying = set(varying_inputs)
    for node in graph.nodes:
        if node.target in _EQUALISING and node.args[-1] == group:
            continue
        if is_random(node) or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    return varying


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws from a random generator."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )
