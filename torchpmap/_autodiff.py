"""What a mapped function says to those who differentiate it from outside: not yet, rather than a
wrong value.

Gradients *inside* a mapped function are complete.  From outside, results that would depend on
something differentiable carry a backward that raises, and function transforms raise at the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchpmap._layout import Layout
from torchpmap._runtimes._base import Handle
from torchpmap._sharded import make_sharded

__all__ = ["not_yet_differentiable", "refuse_transforms"]

_REMEDY = (
    "Differentiate inside the mapped function (pmap(torchpmap.value_and_grad(loss), ...)) and "
    "return the gradients; to use the value only, call it under torch.no_grad() or detach the "
    "arguments."
)


class _NotYet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prefix: str, outputs: Sequence[tuple[Layout, Handle]], *sources: torch.Tensor
    ) -> Any:
        ctx.prefix = prefix
        results = tuple(make_sharded(layout, handle) for layout, handle in outputs)
        ctx.mark_non_differentiable(
            *(r for r in results if not (r.is_floating_point() or r.is_complex()))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.prefix}: differentiating through pmap from outside is not supported yet. "
            f"{_REMEDY}"
        )


def not_yet_differentiable(
    outputs: Sequence[tuple[Layout, Handle]], prefix: str, sources: Sequence[torch.Tensor]
) -> list[Any]:
    """Outputs that require grad as they should, and whose backward (to ``sources``) raises."""
    return list(_NotYet.apply(prefix, outputs, torch.zeros((), requires_grad=True), *sources))


def refuse_transforms(leaves: Sequence[Any], prefix: str) -> None:
    """Raise if an argument belongs to a function transform around the call."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            kind = "torch.func.vmap" if torch._C._functorch.is_batchedtensor(leaf) else "torch.func"
            raise NotImplementedError(
                f"{prefix}: {kind} around a pmapped function is not supported yet. {_REMEDY}"
            )
