"""What to write in mapped functions instead of what needs values, or of what only JAX has."""

from __future__ import annotations

from traceback import walk_tb
from typing import Any

import torch

_CALL = "_torchpmap_call"

_USUAL = "torch.where, torch.cond or a static argument"

_FIXED_SIZES = "Python numbers as sizes, which may be static arguments"
_BY_MASK = "torch.where(mask, x, 0) and sums of the mask, or torch.topk with a fixed number of rows"
_IDIOMS = {
    "__getitem__": (
        "x[i : i + 8], x.narrow(0, i, 8) or torchpmap.dynamic_slice with a length that does not "
        "depend on values, and torch.where(mask, x, 0) instead of x[mask]"
    ),
    "__setitem__": (
        "torch.where(mask, value, x) instead of x[mask] = value, and a slice x[i : i + 8] with a "
        "length that does not depend on values"
    ),
    **dict.fromkeys(
        ("narrow", "split", "tensor_split", "chunk"), "a length that is a Python number"
    ),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "where"), _BY_MASK),
    **dict.fromkeys(
        ("unique", "unique_consecutive", "unique_dim"),
        "torch.sort, and a mask of where neighbours differ",
    ),
    "one_hot": "num_classes as a Python number: one_hot(x, 10)",
    "bincount": "torch.zeros(n).scatter_add(0, x, torch.ones(len(x))) with a fixed n",
    "repeat_interleave": "output_size= as a Python number, or x[torch.searchsorted(...)]",
    "roll": "x[(torch.arange(n) - shift) % n]",
    "full": "x.expand(shape).clone() for torch.full(shape, x)",
    **dict.fromkeys(("arange", "linspace", "zeros", "ones", "empty"), _FIXED_SIZES),
    **dict.fromkeys(("reshape", "view", "expand", "new_zeros", "new_full"), _FIXED_SIZES),
    **dict.fromkeys(("Tensor", "new_tensor", "FloatTensor"), "torch.stack([x, y])"),
    "equal": "(x == y).all()",
    "allclose": "torch.isclose(x, y).all()",
    "__contains__": "(x == value).any()",
    "topk": "a Python number as k",
}
"""Name of a function -> what else there is."""


def note_call(error: BaseException, func: Any) -> None:
    """Note the function of torch that raised."""
    if not hasattr(error, _CALL):
        setattr(error, _CALL, getattr(func, "__name__", ""))


def idiom(error: BaseException) -> str:
    """What to use instead of what the error says needs a value."""
    places = (frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__))
    if "torch.distributions.distribution" in places:  # its check of arguments
        return "validate_args=False for the distribution, whose check of arguments reads them"
    return _IDIOMS.get(getattr(error, _CALL, ""), _USUAL)


_ATTRIBUTES = {
    "at": "torch: x[k] = y writes in place, and x.index_put((k,), y) gives a new tensor",
    "astype": "torch: x.to(dtype)",
    "copy": "torch: x.clone()",
    "block_until_ready": "in a mapped function there is nothing to wait for",
    "weak_type": "torch: only Python numbers are weak",
    "devices": "torch: x.device",
    "sharding": "in a mapped function a tensor is the part of one device",
    "addressable_shards": "in a mapped function a tensor is the part of one device",
}
"""Attributes of JAX's and numpy's arrays that tensors lack."""


def translate(error: AttributeError) -> None:
    """Say what torch has instead of an attribute of arrays that a tensor lacks."""
    name = error.name or ""
    if isinstance(error.obj, torch.Tensor) and name in _ATTRIBUTES:
        error.args = (f"a tensor has no attribute {name!r}; {_ATTRIBUTES[name]}",)
