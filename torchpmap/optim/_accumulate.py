"""``accumulate``: an optimizer that steps with the mean of several gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchpmap._base.boundary import boundary, outside_graphs
from torchpmap._base.pytree import flatten
from torchpmap.optim import _checks as checks
from torchpmap.optim._functional import FunctionalOptimizer

_OURS = _CALLS, _GRAD = "accumulated_calls", "accumulated_grad"
"""Names in the state of a parameter: how many gradients it has had since its last step, and their
sum, divided by the number that makes a step."""


@boundary
def accumulate(optimizer: FunctionalOptimizer, every: int) -> AccumulatingOptimizer:
    """Return an optimizer that changes the parameters with every ``every``-th call of ``update``.

    It then takes one step with the mean of the gradients since the last step. The other calls
    return the parameters as they are. All calls are one traced program: it computes a step each
    time, and keeps that of the last call only. ``flush(state, params)`` takes a step with the
    gradients that are left over, such as those at the end of an epoch.

    Args:
        optimizer: from ``functional``.
        every: how many gradients make a step.

    Returns:
        An ``AccumulatingOptimizer``, with ``init`` and ``update`` like those of ``optimizer``, and
        ``flush``.

    Raises:
        TypeError: ``optimizer`` is something else.
        ValueError: ``every`` is not an int of at least 1.

    Example:
        >>> import torch, torchpmap as tp
        >>> optimizer = tp.optim.accumulate(tp.optim.functional(torch.optim.SGD, lr=1.0), every=2)
        >>> w = torch.tensor(5.0)
        >>> state = optimizer.init(w)
        >>> for grad in (1.0, 3.0, 1.0):
        ...     w, state = optimizer.update(torch.tensor(grad), state, w)
        ...     print(w.item(), state["accumulated_calls"].item())
        5.0 1
        3.0 0
        3.0 1
        >>> w, state = optimizer.flush(state, w)
        >>> print(w.item(), state["accumulated_calls"].item())
        2.0 0

    Source: ``optax.MultiSteps``; ``(loss / every).backward()`` in loops of torch.
    """
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            "optim.accumulate takes what torchpmap.optim.functional returns, but got "
            f"an object {checks.kind(optimizer)}."
        )
    if type(every) is not int or every < 1:
        raise ValueError(f"optim.accumulate: every must be an int of at least 1, not {every!r}.")
    return AccumulatingOptimizer(optimizer, every)


class AccumulatingOptimizer:
    """``init`` and ``update`` of an optimizer that accumulates; made by ``accumulate``."""

    def __init__(self, optimizer: FunctionalOptimizer, every: int) -> None:
        self.__wrapped__ = optimizer.__wrapped__  # pmap follows it
        self._optimizer = optimizer
        self._every = every

    def __repr__(self) -> str:
        return f"optim.accumulate({self._optimizer!r}, every={self._every})"

    @outside_graphs
    def init(self, params: Any) -> Any:
        """Return the state before the first call: that of the optimizer, and in the dict of every
        parameter the number of gradients since its last step, and their sum so far.

        init: (params) -> the tree of ``params`` with a dict of tensors in place of every leaf
        """
        leaves, structure = flatten(params)
        states = checks.subtrees(structure, self._optimizer.init(params), "state")
        return structure.unflatten(
            [
                None if leaf is None else {**entries, **_nothing(leaf)}
                for leaf, entries in zip(leaves, states, strict=True)
            ]
        )

    @outside_graphs
    def update(
        self, grads: Any, state: Any, params: Any, **hyperparameters: Any
    ) -> tuple[Any, Any]:
        """Return the parameters and the state after one more gradient.

        update: (grads, state, params) -> (params, state)

        Args:
            grads: tree like ``params``; for None neither the parameter nor its state changes.
            state: from ``init`` or ``update``.
            params: pytree of floating-point or complex tensors; None leaves pass through.
            hyperparameters: as of ``functional``'s ``update``; those of the other calls are not
                used. A schedule counts steps: ``schedule(call // every)``.

        Raises:
            TypeError: the optimizer makes its state in its first step (SGD with dampening, some
                that are not torch's).
            Else what ``functional``'s ``update`` raises.
        """

        def with_one_more(old: dict[str, torch.Tensor], grad: torch.Tensor) -> _Sum:
            calls = old[_CALLS] + 1
            return _Sum(old[_GRAD] + grad / self._every, calls, calls == self._every)

        return self._step(grads, state, params, with_one_more, hyperparameters)

    @outside_graphs
    def flush(self, state: Any, params: Any, **hyperparameters: Any) -> tuple[Any, Any]:
        """Return the parameters and the state after a step with the mean of the gradients since the
        last step, fewer than ``every``: the rest of an epoch. Without any, nothing changes.

        flush: (state, params) -> (params, state)

        Args:
            state: from ``init``, ``update`` or ``flush``.
            params: as those of ``update``.
            hyperparameters: as of ``update``.

        Raises:
            What ``update`` raises.
        """

        def rest(old: dict[str, torch.Tensor], _: torch.Tensor) -> _Sum:
            calls, grad = old[_CALLS], old[_GRAD]
            mean = grad * (self._every / calls.clamp(min=1)).to(grad.dtype)
            return _Sum(mean, calls, calls > 0)

        # any tree of gradients would do
        return self._step(params, state, params, rest, hyperparameters)

    def _step(
        self,
        grads: Any,
        state: Any,
        params: Any,
        sum_of: Callable[[dict[str, torch.Tensor], torch.Tensor], _Sum],
        hyperparameters: dict[str, Any],
    ) -> tuple[Any, Any]:
        """A step of the optimizer with the means, kept for the parameters whose step is due."""
        structure, leaves, given, states = checks.opened(params, grads, state, _OURS)
        sums = [
            None if grad is None else sum_of(old, grad)
            for grad, old in zip(given, states, strict=True)
        ]
        inner = [old and {k: x for k, x in old.items() if k not in _OURS} for old in states]
        means = [each and each.mean for each in sums]
        stepped, after = self._optimizer._updated(structure, leaves, means, inner, hyperparameters)
        for k, each in enumerate(sums):
            checks.refuse_new_state(self._optimizer, inner[k] or {}, after[k] or {})
            if each is None:
                stepped[k], after[k] = leaves[k], states[k]
                continue
            due = each.is_due
            after[k] = {name: torch.where(due, x, inner[k][name]) for name, x in after[k].items()}
            after[k][_CALLS] = torch.where(due, 0, each.calls)
            after[k][_GRAD] = torch.where(due, 0, each.mean)
            stepped[k] = torch.where(due, stepped[k], leaves[k])
        return structure.unflatten(stepped), structure.unflatten(after)


class _Sum(NamedTuple):
    """The gradients of a parameter."""

    mean: torch.Tensor
    calls: torch.Tensor
    """How many gradients are in it."""
    is_due: torch.Tensor
    """Whether the step with it is kept."""


def _nothing(leaf: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter that has had no gradient since its last step."""
    calls = torch.zeros((), dtype=torch.int64, device=leaf.device)
    return {_CALLS: calls, _GRAD: torch.zeros_like(leaf, requires_grad=False)}
