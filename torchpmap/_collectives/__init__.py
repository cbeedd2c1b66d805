"""Collectives over named axes, with the signatures and the meaning of ``jax.lax``.

Each works on a pytree leaf by leaf, over a process axis, a vmapped axis, or a tuple of both
(row-major: the first name is the slowest), under every nesting of ``torch.func``'s transforms.
"""

from torchpmap._collectives.cast import pcast as pcast
from torchpmap._collectives.exchange import all_gather as all_gather
from torchpmap._collectives.exchange import all_to_all as all_to_all
from torchpmap._collectives.exchange import psum_scatter as psum_scatter
from torchpmap._collectives.exchange import pswapaxes as pswapaxes
from torchpmap._collectives.permute import ppermute as ppermute
from torchpmap._collectives.permute import pshuffle as pshuffle
from torchpmap._collectives.queries import axis_bound as axis_bound
from torchpmap._collectives.queries import axis_index as axis_index
from torchpmap._collectives.queries import axis_size as axis_size
from torchpmap._collectives.queries import pmax_if_bound as pmax_if_bound
from torchpmap._collectives.queries import pmean_if_bound as pmean_if_bound
from torchpmap._collectives.queries import pmin_if_bound as pmin_if_bound
from torchpmap._collectives.queries import psum_if_bound as psum_if_bound
from torchpmap._collectives.ragged import ragged_all_to_all as ragged_all_to_all
from torchpmap._collectives.reduce import pbroadcast as pbroadcast
from torchpmap._collectives.reduce import pmax as pmax
from torchpmap._collectives.reduce import pmean as pmean
from torchpmap._collectives.reduce import pmin as pmin
from torchpmap._collectives.reduce import psum as psum
