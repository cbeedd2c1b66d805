"""Code that frees its arguments: it takes them in a list, which it empties.

Python keeps what a caller passes as ``*args`` until the call returns.  Of a list that is emptied,
each tensor is freed after its last use, and a result may take its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.graph import _BoxedCodeGen

from torchpmap._base.platform import Boxed


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def boxed_graph(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph whose ``forward`` takes a list."""
    copy = copied(graph.graph)
    copy.set_codegen(_BoxedCodeGen())
    return torch.fx.GraphModule(graph, copy)


def boxed_artifact(artifact: Any) -> Boxed:
    """What Inductor's ``standalone_compile`` returns, as a function that takes a list.

    The artifact takes ``*args`` and passes them to a function that takes a list (torch 2.11 to
    2.15): this one is looked for in its closure.
    """
    forward = artifact._compiled_fn.__wrapped__  # without torch.compiler.disable
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    compiled: Boxed = cells["compiled_fn"].cell_contents
    parameters = cells["params_buffers_flat"].cell_contents
    assert compiled._boxed_call  # type: ignore[attr-defined]

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        blocks[:0] = parameters
        return compiled(blocks)

    return run if parameters else compiled


def boxed_call(function: Callable[..., Sequence[torch.Tensor]]) -> Boxed:
    """Any function, as one that takes a list; it frees nothing before it returns."""

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(blocks)
        blocks.clear()
        return function(*given)

    return run
