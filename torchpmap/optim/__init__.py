"""What a training loop needs besides the gradients, as pure functions for mapped functions.

``functional`` makes two of them of any ``torch.optim`` optimizer, ``accumulate`` lets it step with
the mean of several gradients, ``schedule`` makes a function of the step of a ``lr_scheduler``, and
``clip_grad_norm`` scales gradients.  All numbers are torch's own.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from torchpmap._base.jax_names import missing_in as _missing_in
from torchpmap.optim._accumulate import AccumulatingOptimizer, accumulate
from torchpmap.optim._clip import clip_grad_norm
from torchpmap.optim._functional import FunctionalOptimizer, functional
from torchpmap.optim._schedule import Schedule, schedule

__all__ = [
    "AccumulatingOptimizer",
    "FunctionalOptimizer",
    "Schedule",
    "accumulate",
    "clip_grad_norm",
    "functional",
    "schedule",
]

if not _TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = _missing_in(__name__)
