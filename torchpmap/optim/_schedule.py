"""``schedule``: a scheduler of ``torch.optim.lr_scheduler`` as a function of the step.

A scheduler is Python code that writes to an optimizer, so no graph can contain it.  It runs once,
in the controller, and what it wrote becomes a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchpmap._base.boundary import boundary
from torchpmap.optim import _checks as checks


@boundary
def schedule(
    scheduler: Callable[..., LRScheduler],
    *,
    lr: float | Sequence[float],
    num_steps: int,
    **options: Any,
) -> Schedule:
    """Return the learning rates of a ``torch.optim.lr_scheduler`` as a function of the step.

    schedule: (scheduler, lr, num_steps) -> Schedule
    Schedule: (step: int) -> float, or (step: int[*s]) -> T[*s] of the default dtype

    Step 0 is the first update, as in a loop that calls ``scheduler.step()`` after each
    ``optimizer.step()``. torch's scheduler runs here, once, through all steps (some 10 us each),
    and leaves a table. So ``LambdaLR``, ``SequentialLR`` and schedulers of your own work too, and
    mapped functions can look up a step that is a tensor, without a new trace.

    Args:
        scheduler: a class (``torch.optim.lr_scheduler.CosineAnnealingLR``), or a function that
            takes the optimizer and returns a scheduler.
        lr: the learning rate of the optimizer; a list: one for each parameter group.
        num_steps: how many steps the table has. Beyond them (and before step 0) the rate of a
            tensor is NaN, because a graph cannot raise for a value, and an int raises.
        options: passed on to ``scheduler``.

    Returns:
        A ``Schedule``. If ``lr`` is a list it returns a list, which ``update(..., lr=)`` of an
        optimizer takes.

    Raises:
        TypeError: ``ReduceLROnPlateau``, which depends on the loss; or no scheduler of torch.
        ValueError: the scheduler changes other hyperparameters too (``OneCycleLR`` and ``CyclicLR``
            with ``cycle_momentum=True``), or has fewer steps.

    Example:
        >>> import torch, torchpmap as tp
        >>> halve = torch.optim.lr_scheduler.StepLR
        >>> rate = tp.optim.schedule(halve, lr=0.8, num_steps=6, step_size=2, gamma=0.5)
        >>> rate(0), rate(5), rate(torch.tensor([0, 2, 6]))
        (0.8, 0.2, tensor([0.8000, 0.4000,    nan]))
        >>> tp.pmap(rate)(torch.arange(4)).tolist()[:2]
        [0.800000011920929, 0.800000011920929]

    Source: the schedules of optax, which are functions of the step; numbers of torch.
    """
    if isinstance(scheduler, type):
        _refuse(scheduler)
    if not callable(scheduler):
        raise TypeError(
            "optim.schedule takes a class of torch.optim.lr_scheduler and its options, or a "
            f"function from an optimizer to a scheduler, but got {scheduler!r}. A scheduler that "
            "is in use belongs to its optimizer."
        )
    if type(num_steps) is not int or num_steps < 1:
        raise ValueError(
            f"optim.schedule: num_steps must be an int of at least 1, not {num_steps!r}."
        )
    rates = lr if isinstance(lr, Sequence) else [lr]
    name, table = _run(scheduler, options, [float(rate) for rate in rates], num_steps)
    return Schedule(table, isinstance(lr, Sequence), name)


class Schedule:
    """Learning rates by step; made by ``torchpmap.optim.schedule``."""

    def __init__(self, table: torch.Tensor, is_list: bool, name: str) -> None:
        self._table = torch.cat([table, torch.full_like(table[:1], torch.nan)])
        """float64[steps + 1, groups]; the last row is for steps that the table does not have."""
        self._is_list = is_list
        self._name = name

    def __repr__(self) -> str:
        return f"optim.schedule({self._name}, num_steps={self.num_steps})"

    @property
    def num_steps(self) -> int:
        """How many steps have a learning rate."""
        return len(self._table) - 1

    @boundary
    def __call__(self, step: int | torch.Tensor) -> Any:
        """Return the learning rate of a step; a list of them if ``lr`` was a list.

        Args:
            step: an int, or a tensor of whole numbers of any shape and dtype, such as the counter
                ``state["w"]["step"]`` of an optimizer.

        Raises:
            IndexError: an int that is not one of ``range(num_steps)``.
            TypeError: ``step`` is something else.
        """
        if isinstance(step, torch.Tensor) and not (step.is_complex() or step.dtype == torch.bool):
            row = step.long()
            row = torch.where((row >= 0) & (row < self.num_steps), row, self.num_steps)
            table = self._table.to(step.device, torch.get_default_dtype())
            # [None]: the value of an index without dims would be read
            rates: list[Any] = [column[row[None]][0] for column in table.unbind(1)]
        elif type(step) is int:
            if not 0 <= step < self.num_steps:
                raise IndexError(f"{self!r} has no step {step}. Make it with a larger num_steps.")
            rates = self._table[step].tolist()
        else:
            raise TypeError(
                f"{self!r} takes the number of a step, an int or a tensor of whole numbers, but "
                f"got {checks.kind(step)}."
            )
        return rates if self._is_list else rates[0]


def _refuse(cls: type) -> None:
    if issubclass(cls, ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau depends on the loss, so it is no function of the step. Run torch's "
            "scheduler in the controller on an optimizer of its own, and pass its learning rate to "
            "the mapped function as an argument."
        )
    if not issubclass(cls, LRScheduler):
        raise TypeError(
            f"optim.schedule needs a torch.optim.lr_scheduler.LRScheduler, but got {cls.__name__}."
        )


def _run(
    make: Callable[..., LRScheduler], options: dict[str, Any], lrs: list[float], num_steps: int
) -> tuple[str, torch.Tensor]:
    """The name of a scheduler, and what it gives: float64[num_steps, groups]."""
    groups = [{"params": [torch.zeros(1, device="cpu")], "lr": lr} for lr in lrs]
    optimizer = SGD(groups, momentum=0.9)  # some schedulers ask for a momentum
    before = _others(optimizer)
    scheduler = make(optimizer, **options)
    _refuse(type(scheduler))
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"optim.schedule: {name} was made for another optimizer. Use the one that the function "
            "receives."
        )
    rows = []
    for step in range(num_steps):
        if step:
            optimizer.step()  # first, or torch warns
            scheduler.step()
        rows.append([float(group["lr"]) for group in optimizer.param_groups])
    changed = [key for key, value in _others(optimizer).items() if value != before[key]]
    if changed:
        raise ValueError(
            f"optim.schedule gives learning rates only, but {name} changes {', '.join(changed)} "
            "too. Pass cycle_momentum=False, if it has that."
        )
    return name, torch.tensor(rows, dtype=torch.float64, device="cpu")


def _others(optimizer: Optimizer) -> dict[str, Any]:
    """The hyperparameters besides the learning rate."""
    names = optimizer.defaults.keys() - {"lr"}
    return {name: [group[name] for group in optimizer.param_groups] for name in sorted(names)}
