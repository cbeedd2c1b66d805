"""What torch decides by a value, decided on the devices.

A ``GradScaler`` skips a step if a gradient is not finite, and an ``AveragedModel`` begins with a
copy.  In a trace both ways are computed, and ``torch.where`` takes one of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer

from torchpmap._base.exact import exact
from torchpmap._base.optimizers import Positive
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole_capture import WholeCapture

tracing: dict[int, Any] = {}
"""The ``Optimizers`` of a trace, by the thread that traces."""


def numbers_of(optimizer: Optimizer) -> Hashable:
    """What is no tensor in the state and the settings of an optimizer."""
    tables = [*optimizer.state.values(), *optimizer.param_groups]
    kinds = torch.Tensor, list
    return exact([{k: x for k, x in t.items() if not isinstance(x, kinds)} for t in tables])


class Skippable:
    """A step that changes something only where a condition is true."""

    def __init__(
        self, optimizer: Optimizer, condition: torch.Tensor, capture: WholeCapture
    ) -> None:
        self._optimizer, self._condition, self._capture = optimizer, condition, capture
        params = [x for group in optimizer.param_groups for x in group["params"]]
        entries = [x for each in optimizer.state.values() for x in each.values()]
        written = [x for x in (*params, *entries) if isinstance(x, torch.Tensor)]
        with torch.no_grad():
            self._copies = [(x, x.clone()) for x in written]
        self._numbers = numbers_of(optimizer)

    def end(self) -> None:
        if numbers_of(self._optimizer) != self._numbers:
            raise Untraceable(
                f"{type(self._optimizer).__name__} changes a number of Python in a step that a "
                "GradScaler may skip",
                users_line(),
                "tensors in the state of the optimizer",
            )
        with torch.no_grad():
            for x, before in self._copies:
                if self._capture.substitute(x)._version:
                    x.copy_(torch.where(self._condition, x, before))


def _noting(own: Any) -> Any:
    """Of an ``Optimizer``: a trace hears of those that are made in it."""

    @functools.wraps(own)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        active = tracing.get(threading.get_ident())
        if active is not None:
            active.made.add(self)

    return init


def _scaled(own: Any) -> Any:
    """Of a ``GradScaler``: a step that may be skipped."""

    @functools.wraps(own)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        active = tracing.get(threading.get_ident())
        if active is None:
            return own(self, optimizer, *args, **kwargs)

        def step_if_finite(optimizer: Optimizer, found: Any, *args: Any, **kwargs: Any) -> Any:
            active.condition = sum(found["found_inf_per_device"].values()) == 0
            try:
                return optimizer.step(*args, **kwargs)
            finally:
                active.condition = None

        with (  # a fused step would look at the gradients itself
            patch.object(optimizer, "_step_supports_amp_scaling", False, create=True),
            patch.object(self, "_maybe_opt_step", step_if_finite),
        ):
            return own(self, optimizer, *args, **kwargs)

    return step


def _averaged(own: Any) -> Any:
    """Of an ``AveragedModel``: whether it is the first average is decided on the devices."""

    @functools.wraps(own)
    def update_parameters(self: Any, model: torch.nn.Module) -> None:
        if threading.get_ident() not in tracing:
            return own(self, model)
        with torch.no_grad():
            is_first = self.n_averaged == 0
            with Positive([self.n_averaged]):
                own(self, model)
            new = *model.parameters(), *model.buffers()
            averages = *self.module.parameters(), *self.module.buffers()
            for average, now in zip(averages, new, strict=False):
                average.copy_(torch.where(is_first, now, average))

    return update_parameters


decided = Replaced(
    [
        Replacement(Optimizer, "__init__", _noting),
        Replacement(torch.amp.GradScaler, "step", _scaled),
        Replacement(torch.optim.swa_utils.AveragedModel, "update_parameters", _averaged),
    ]
)
