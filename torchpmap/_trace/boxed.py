"""Code that frees its arguments: it takes them in a list, which it empties.

Python keeps what a caller passes as ``*args`` until the call returns.  Of a list that is emptied,
each tensor is freed after its last use, and a result may take its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType
from typing import Any

import torch

from torchpmap._base.platform import Boxed


def boxed_artifact(artifact: Any) -> Boxed:
    """What Inductor's ``standalone_compile`` returns, as a function that takes a list."""
    compiled, parameters = _parts(artifact)

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        blocks[:0] = parameters
        return compiled(blocks)

    return run if parameters else compiled


def boxed_body(artifact: Any, num_results: int) -> Boxed:
    """The same for the body of a loop, without what AOTAutograd does around Inductor's code (torch
    2.13: 6 us a call).  That serves gradients, writes to inputs, and results that are views, none
    of which a body has.
    """
    return own_code(artifact, num_results) or boxed_artifact(artifact)


def own_code(artifact: Any, num_results: int) -> Boxed | None:
    """Inductor's code alone; None if there is more, or if it has other results."""
    from torch._inductor.output_code import CompiledFxGraph

    compiled, parameters = _parts(artifact)
    code = _closed_over(compiled, CompiledFxGraph)
    if code is None or parameters or len(code.output_strides or ()) != num_results:
        return None
    found: Boxed = code.current_callable
    return found


def _parts(artifact: Any) -> tuple[Boxed, Sequence[torch.Tensor]]:
    """(a function that takes a list, what stands first in that list).

    The artifact takes ``*args`` and passes them to such a function (torch 2.11 to 2.15), which is
    looked for in its closure.
    """
    forward = artifact._compiled_fn.__wrapped__  # without torch.compiler.disable
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    compiled: Boxed = cells["compiled_fn"].cell_contents
    parameters: Sequence[torch.Tensor] = cells["params_buffers_flat"].cell_contents
    assert compiled._boxed_call  # type: ignore[attr-defined]
    return compiled, parameters


_EMPTY = CellType()


def _closed_over(function: Any, kind: type) -> Any:
    """What a function and those in its closure call that is of a kind, if there is one."""
    seen: set[int] = set()
    open_ = [function]
    found = []
    while open_:
        value = open_.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            found.append(value)
            continue
        cells = getattr(value, "__closure__", None) or ()
        inside = [cell.cell_contents for cell in cells if cell != _EMPTY]
        inside.append(getattr(value, "__wrapped__", None) or getattr(value, "compiled_fn", None))
        open_ += [each for each in inside if callable(each) and not isinstance(each, type)]
    return found[0] if len(found) == 1 else None


def boxed_call(function: Callable[..., Sequence[torch.Tensor]]) -> Boxed:
    """Any function, as one that takes a list; it frees nothing before it returns."""

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(blocks)
        blocks.clear()
        return function(*given)

    return run
