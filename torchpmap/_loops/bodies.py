"""The user's functions, as loops and branches call them: what enters and leaves them is private.

A body may write in place to its carry, to a row or to an operand, and return it, or a part of it,
or a tensor that it closes over.  The value from before may still be needed: by the caller, by the
rows of a vmap that are done, by the other branch, by a backward pass.  So a body gets copies, and
what a loop or branch returns shares memory with nothing.  In a traced graph the copies that nothing
needs are taken out again (``_trace/passes.clean``).

A write to what the body closes over cannot be kept, because a traced body runs once.  It is an
error, in plain code too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from torchpmap._base.errors import write_in_body
from torchpmap._base.refuse_writes import RefuseWrites
from torchpmap._loops.trees import Tree
from torchpmap._trace.traced_views import traced_views
from torchpmap.random._streams import in_body

_repeated: ContextVar[bool] = ContextVar("torchpmap_repeated", default=False)


def is_repeated() -> bool:
    """Whether a step runs whose body has run before.  A traced body runs once, so what was checked
    then need not be checked again, and checks take longer than most steps.
    """
    return _repeated.get()


def private(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, which share memory with nothing."""
    return [x.clone() for x in tensors]


def private_leaf(leaf: Any) -> Any:
    """The same for any leaf of a pytree."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class Function:
    """A function of the user's that a loop or branch calls, possibly often."""

    def __init__(self, name: str, fun: Callable[..., Any], *trees: Tree) -> None:
        """``name``: of the loop or branch, for errors.  ``trees``: of the arguments of ``fun``."""
        self._name = name
        self._fun = fun
        self._trees = trees
        self._has_run = False
        self._refused: RuntimeError | None = None

    def __call__(self, *arguments: Sequence[Any]) -> Any:
        """What the function returns, for the leaves of its arguments."""
        if self._has_run or is_repeated():
            token = _repeated.set(True)
            try:
                return self._run(arguments)
            finally:
                _repeated.reset(token)
        views = traced_views()
        if views is not None:
            views.refresh_all()  # the body may not, as that writes to what it closes over
        with RefuseWrites([], self._refuse):
            found = self._run(arguments)
        self._has_run = True
        return found

    def _run(self, arguments: Sequence[Sequence[Any]]) -> Any:
        values = [
            tree.build([private_leaf(x) for x in leaves])
            for tree, leaves in zip(self._trees, arguments, strict=True)
        ]
        with in_body(self._name):
            return self._fun(*values)

    def _refuse(self, tensor: torch.Tensor, operation: str) -> RuntimeError:
        self._refused = RuntimeError(write_in_body(self._name, tensor, operation))
        return self._refused

    def raise_refused(self) -> None:
        """Raise the error for a write to what the function closes over, if there was one that has
        not reached the caller.
        """
        if self._refused is not None:
            raise self._refused
