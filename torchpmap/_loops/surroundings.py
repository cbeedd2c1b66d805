"""Running the body of a loop again: in another place of a trace, on other values.

A derivative or a batched form of a loop is a new loop, whose body runs the user's function under
transforms of its own.  Two things make that the same function as before:

* ``Surroundings`` are what a function sees of the caller: bound axes, torch's settings and modes,
  random numbers.  They are noted where the loop is called, and restored for each run: a backward
  pass runs outside of them.
* ``closures`` are the tensors that the function closes over.  The loop takes them as inputs, so
  that transforms reach them, and each run gets the values of its own level in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from torchpmap._base.ambient import ambient, applied
from torchpmap._base.context import assigned
from torchpmap._base.pytree import map_tensors, tree_leaves
from torchpmap._base.torch_internals import (
    FakeTensor,
    forward_level,
    function_modes,
    innermost,
    is_wrapped,
    node_of,
    tracing_mode,
)
from torchpmap._layout import axis_stack
from torchpmap._loops.bodies import private
from torchpmap._loops.emit import discarded
from torchpmap._trace.block_program import surrounded_by, surrounding
from torchpmap._trace.capture import Exchange, Substitute, TracedCalls, without_finding
from torchpmap._trace.transform_rules import TransformRules
from torchpmap.random._streams import active_streams, repeated

T = TypeVar("T")

_steps: ContextVar[tuple[int, ...]] = ContextVar("torchpmap_steps", default=())


def steps() -> tuple[int, ...]:
    """The steps that run now of loops in Python, the outermost loop first."""
    return _steps.get()


class Surroundings:
    """What a function sees of the place where the loop is called."""

    def __init__(self) -> None:
        self._axes = axis_stack.bound()
        self._call = surrounding()
        self._settings = ambient()
        self._records = torch.is_grad_enabled()
        self._modes = [
            mode
            for mode in function_modes()
            if isinstance(mode, TracedCalls) or not isinstance(mode, Substitute)
        ]
        self._streams = active_streams()
        self._draws = 0 if self._streams is None else self._streams.draws

    @contextlib.contextmanager
    def restored(self, step: torch.Tensor | None = None, *, after: int = 0) -> Iterator[None]:
        """
        Args:
            step: the number of the step of a loop, on which random numbers depend.
            after: how many random numbers another part of the step has drawn before.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(axis_stack.bound_again(self._axes))
            stack.enter_context(surrounded_by(self._call))
            stack.enter_context(applied(self._settings))
            stack.enter_context(torch.set_grad_enabled(self._records))
            active = function_modes()
            for mode in self._modes:
                if not any(mode is other for other in active):
                    # a backward pass comes here after the rules have ended, with what they replace
                    is_rules = isinstance(mode, TransformRules)
                    stack.enter_context(mode if is_rules else _pushed(without_finding(mode)))
            if self._streams is not None:
                stack.enter_context(repeated(self._streams, self._draws + after, step))
            yield

    @property
    def draws_numbers(self) -> bool:
        """Whether torch's random functions draw from keys."""
        return self._streams is not None

    @contextlib.contextmanager
    def step(self, number: int, *, after: int = 0) -> Iterator[None]:
        """A step of a loop in Python; ``after`` as for ``restored``."""
        streams = self._streams
        with assigned(_steps, (*_steps.get(), number)):
            if streams is None:
                yield
                return
            with repeated(streams, self._draws + after, torch.tensor(number)):
                yield

    def advance(self, draws: int) -> None:
        """Note that the loop as a whole has drawn ``draws`` random numbers."""
        if self._streams is not None:
            self._streams.draws = self._draws + draws

    def draws(self) -> int:
        """How many random numbers were drawn since the loop was called."""
        return 0 if self._streams is None else self._streams.draws - self._draws

    def rows(self) -> list[torch.Tensor]:
        """The indices along vmaps on which random numbers depend: a loop that draws has them as
        inputs, so that each vmap sees that its body differs by row.
        """
        return [] if self._streams is None else list(self._streams.vmapped_rows())


@contextlib.contextmanager
def _pushed(mode: TorchFunctionMode) -> Iterator[None]:
    """Enter a mode that is entered elsewhere: without the actions of its own ``__enter__``."""
    TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


def find_closures(
    run: Callable[..., T], *inputs: Sequence[torch.Tensor]
) -> tuple[T, list[torch.Tensor]]:
    """What ``run`` returns for copies of its inputs, and the tensors made before that transforms
    may trace and it uses.  It may use the inputs themselves too, as what it closes over.
    """
    found = _Found()
    with discarded():
        copies = [private(tensors) for tensors in inputs]
        with found:
            result = run(*copies)
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            found.note(leaf)
    return result, list(found.tensors.values())


class _Found(Substitute):
    """Notes the tensors that enter operations in the block but were made before it."""

    def __init__(self) -> None:
        super().__init__(self.note)
        self.tensors: dict[int, torch.Tensor] = {}
        mode = tracing_mode()
        assert mode is not None
        self._tracer = mode.tracer
        self._last: Node = mode.tracer.graph._root.prev
        """Of those made before."""
        self._wrapped: dict[int, torch.Tensor] = {}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.tensors and self._is_from_outside(tensor):
            self.tensors[id(tensor)] = tensor
        return tensor

    def wrapped(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            self._wrapped[id(tensor)] = tensor

    def _is_from_outside(self, tensor: torch.Tensor) -> bool:
        mode = tracing_mode()
        if mode is None or mode.tracer is not self._tracer:
            return False  # in the graph of a loop inside: what that reads, it has read here before
        if id(tensor) in self._wrapped:
            return False  # what is inside has been here before
        value = innermost(tensor)
        if not isinstance(value, FakeTensor):
            return not value.is_meta  # torch makes fakes of these; the user's are refused later
        node = node_of(self._tracer, value)
        # what the graph reads from outside becomes a new placeholder
        if node is not None and node.op != "placeholder" and self._last < node:
            return False
        # no transform traces the rest: it is a constant of the loop (``_loops/emit``)
        return is_wrapped(tensor) or tensor.requires_grad or forward_level() >= 0


class Lifted:
    """A function of the user's with what it closes over as arguments of its own."""

    def __init__(
        self, surroundings: Surroundings, closures: Sequence[torch.Tensor], draws: int
    ) -> None:
        """``closures``: of ``find_closures``; ``draws``: how many random numbers a run draws."""
        surroundings.advance(draws)
        self._surroundings = surroundings
        self._closures = closures
        self.constants = [*closures, *(surroundings.rows() if draws else [])]
        """What it closes over."""

    def run(
        self,
        run: Callable[[], T],
        constants: Sequence[torch.Tensor],
        step: torch.Tensor | None = None,
        *,
        after: int = 0,
    ) -> T:
        """What ``run``, which calls the function, returns for these values of the constants (which
        others may follow); ``step``, ``after``: as for ``restored``.
        """
        exchange = Exchange(self._closures, constants[: len(self._closures)])
        with exchange, self._surroundings.restored(step, after=after):
            result = run()
        # what is returned as it is enters no operation
        found: T = map_tensors(exchange.find, result)
        return found
