"""What torch decides by a value, decided on the devices.

A ``GradScaler`` skips a step if a gradient is not finite, and an ``AveragedModel`` begins with a
copy.  In a trace both ways are computed, and ``torch.where`` takes one of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.optim import Optimizer

from torchpmap._base.exact import exact
from torchpmap._base.optimizers import Positive
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._base.storages import storage_number
from torchpmap._trace.graphs import written_storages
from torchpmap._trace.reach import SIMPLE
from torchpmap._trace.untraceable import Untraceable
from torchpmap._trace.whole_capture import WholeCapture

tracing: dict[int, Any] = {}
"""The ``Optimizers`` of a trace, by the thread that traces."""


def _contents(optimizer: Optimizer) -> list[Any]:
    """What is in the state, the settings and the attributes of an optimizer."""
    settings = [{k: x for k, x in t.items() if k != "params"} for t in optimizer.param_groups]
    own = {k: x for k, x in vars(optimizer).items() if k not in ("state", "param_groups")}
    return list(_leaves([*optimizer.state.values(), settings, own]))


def _leaves(value: Any) -> Iterator[Any]:
    """As ``flatten`` gives them, but keys may be parameters."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def numbers_of(optimizer: Optimizer) -> Hashable:
    """Those of Python among them."""
    return exact([x for x in _contents(optimizer) if isinstance(x, SIMPLE)])


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    params = [x for group in optimizer.param_groups for x in group["params"]]
    return [x for x in (*params, *_contents(optimizer)) if isinstance(x, torch.Tensor)]


class Skippable:
    """A step that changes something only where a condition is true."""

    def __init__(
        self, optimizer: Optimizer, condition: torch.Tensor, capture: WholeCapture
    ) -> None:
        self._optimizer, self._condition, self._capture = optimizer, condition, capture
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            self._refuse("has hooks")
        grads = [leaf.gradient() for leaf in capture.leaves.values()]
        known = {id(x): x for x in (*_tensors(optimizer), *grads) if x is not None}
        with torch.no_grad():
            self._copies = {key: (x, x.clone()) for key, x in known.items()}
        self._numbers = numbers_of(optimizer)
        self._num_nodes = len(capture.graph.nodes)

    def end(self) -> None:
        if numbers_of(self._optimizer) != self._numbers:
            self._refuse("changes a number of Python")
        capture, nodes = self._capture, self._capture.graph.nodes
        known = {*self._copies, *map(id, capture.stand_ins.values())}
        for entries in self._optimizer.state.values():  # of new ones the caller hears
            known |= set(map(id, entries.values()))
        written = written_storages(islice(nodes, self._num_nodes, None)).keys()
        mine = {key: storage_number(capture.substitute(x)) for key, (x, _) in self._copies.items()}
        given = {storage_number(x.meta["val"]) for x in nodes if x.op == "placeholder"}
        if written & given - set(mine.values()) or set(map(id, _tensors(self._optimizer))) - known:
            self._refuse("changes tensors that are not in its state")
        with torch.no_grad():
            for key, (x, before) in self._copies.items():
                if mine[key] in written:
                    x.copy_(torch.where(self._condition, x, before))

    def _refuse(self, what: str) -> NoReturn:
        raise Untraceable(
            f"{type(self._optimizer).__name__} {what} in a step that a GradScaler may skip",
            users_line(),
            "tensors in the state of the optimizer",
        )


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
