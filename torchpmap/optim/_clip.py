"""``clip_grad_norm``: gradients whose norm is at most a given one."""

from __future__ import annotations

import torch

from torchpmap._base.boundary import boundary
from torchpmap._base.pytree import Tree, flatten
from torchpmap.optim import _checks as checks

_EPSILON = 1e-6  # torch's


@boundary
def clip_grad_norm(
    grads: Tree, max_norm: float | torch.Tensor, norm_type: float = 2.0
) -> tuple[Tree, torch.Tensor]:
    """Return gradients scaled down to a norm of ``max_norm``, and the norm that they had.

    clip_grad_norm: (tree of T[*s], max_norm) -> (tree of T[*s], norm T[])
    Backward: that of the scaling and of the norm.

    The norm is that of all leaves together, as of one vector; smaller gradients stay as they are.
    In a mapped function it is the norm of what one device has: average the gradients first.

    There is no ``error_if_nonfinite``, because a graph cannot raise for a value. As in torch, an
    infinite norm makes finite gradients 0 and infinite ones NaN, and a norm of NaN makes all
    gradients NaN. Look at the returned norm.

    Args:
        grads: pytree of floating-point or complex tensors; None leaves stay None.
        max_norm: a number, or a tensor without dims.
        norm_type: order of the norm; ``float("inf")`` for the largest absolute value.

    Returns:
        The pair (grads, norm). A tree without gradients has norm 0.

    Raises:
        TypeError: a leaf is something else, or sparse.

    Example:
        >>> import torch, torchpmap as tp
        >>> tp.optim.clip_grad_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
        ({'w': tensor([0.6000, 0.8000])}, tensor(5.))

    Source: ``torch.nn.utils.clip_grad_norm_``, which writes in place.
    """
    leaves, structure = flatten(grads)
    checks.check_grads(leaves, structure.paths("grads"))
    given = [leaf for leaf in leaves if leaf is not None]
    if not given:
        return grads, torch.tensor(0.0)
    order = float(norm_type)
    norms = [torch.linalg.vector_norm(leaf, order).to(given[0].device) for leaf in given]
    norm = torch.linalg.vector_norm(torch.stack(norms), order)
    scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    clipped = [None if leaf is None else _scaled(leaf, scale) for leaf in leaves]
    return structure.unflatten(clipped), norm


def _scaled(leaf: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (leaf * scale.to(leaf.device)).to(leaf.dtype)  # without dims it could be promoted
