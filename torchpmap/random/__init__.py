"""Random numbers from explicit keys, bit-exact with ``jax.random``.

A key is a plain tensor, int64[2].  Every function is a pure function of the key and the other
arguments: it works eagerly and inside ``pmap``, ``vmap``, ``grad`` and ``torch.compile``, on every
device, and gives the same numbers everywhere.  ``split`` and ``fold_in`` derive new keys::

    key = tp.random.key(0)
    keys = tp.random.split(key, tp.device_count())
    tp.pmap(lambda key: tp.random.normal(key, (3,)))(keys)
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from torchpmap._base.jax_names import missing_in as _missing_in
from torchpmap.random._choices import categorical, choice, permutation
from torchpmap.random._continuous import (
    exponential,
    gumbel,
    laplace,
    logistic,
    normal,
    truncated_normal,
    uniform,
)
from torchpmap.random._integers import bernoulli, rademacher, randint
from torchpmap.random._keys import PRNGKey, bits, fold_in, key, split

__all__ = [
    "PRNGKey",
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "laplace",
    "logistic",
    "normal",
    "permutation",
    "rademacher",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

if not _TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = _missing_in(__name__)
