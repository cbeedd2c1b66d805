"""Collectives over named axes, with the signatures and the meaning of ``jax.lax``.

Each works on a pytree leaf by leaf, over a process axis, a vmapped axis, or a tuple of both
(row-major: the first name is the slowest), under every nesting of ``torch.func``'s transforms.
"""

from torchpmap._collectives.exchange import all_gather, all_to_all, psum_scatter, pswapaxes
from torchpmap._collectives.permute import ppermute, pshuffle
from torchpmap._collectives.queries import (
    axis_bound,
    axis_index,
    axis_size,
    pmax_if_bound,
    pmean_if_bound,
    pmin_if_bound,
    psum_if_bound,
)
from torchpmap._collectives.ragged import ragged_all_to_all
from torchpmap._collectives.reduce import pbroadcast, pmax, pmean, pmin, psum

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_bound",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pmax",
    "pmax_if_bound",
    "pmean",
    "pmean_if_bound",
    "pmin",
    "pmin_if_bound",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_if_bound",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
]
