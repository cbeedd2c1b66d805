"""Which signature an operation has: torch's tag for elementwise operations, and three tables.

The tables are torchpmap's own.  The sharding propagation of ``torch.distributed.tensor`` knows more
operations and needs no process group.  But in torch 2.13 it runs ``cumsum(-1)`` and ``cumprod(-1)``
along a cut dim, and the gradient of ``select``, block by block, which gives wrong numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from torchpmap._sharded.rules.compute import COMPUTE, elementwise
from torchpmap._sharded.rules.layers import LAYERS
from torchpmap._sharded.rules.shape import SHAPE
from torchpmap._sharded.rules.signature import Rule

_ELEMENTWISE = frozenset(
    [
        "_conj",
        "_conj_physical",
        "_neg_view",
        "_prelu_kernel",
        "_prelu_kernel_backward",
        "_to_copy",
        "clone",
        "complex",
        "copy",
        "elu_backward",
        "empty_like",
        "fill",
        "floor_divide",
        "full_like",
        "hardshrink_backward",
        "hardsigmoid_backward",
        "hardswish",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "leaky_relu",
        "log_sigmoid_backward",
        "log_sigmoid_forward",
        "masked_fill",
        "mish_backward",
        "ones_like",
        "polar",
        "rsub",
        "softplus_backward",
        "softshrink_backward",
        "zero",
        "zeros_like",
    ]
)
"""Elementwise operations without torch's tag."""


@cache
def rule_of(func: Any) -> Rule | None:
    """The rule of an ATen operation (an ``OpOverload``); None: it is not known to be blockwise."""
    if func.namespace != "aten":
        return None
    name = func._schema.name.removeprefix("aten::")
    in_place = func._schema.is_mutable and name.endswith("_")
    base = name[:-1] if in_place else name
    if base in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return elementwise
    if in_place:  # torch tags few in-place operations
        packet = getattr(torch.ops.aten, base, None)
        twin = getattr(packet, func._overloadname, None)
        if twin is not None and torch.Tag.pointwise in twin.tags:
            return elementwise
    elif func._schema.is_mutable:
        return None  # out= of an operation that is not elementwise
    return COMPUTE.get(base) or SHAPE.get(base) or LAYERS.get(base)
