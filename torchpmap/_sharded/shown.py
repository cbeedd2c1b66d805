"""What a sharded tensor looks like: its text, and its view in a notebook."""

from __future__ import annotations

from typing import Any

from torchpmap._layout.layout import Layout
from torchpmap._layout.picture import picture

_MOVES_UP_TO = 1000
"""How many elements are fetched at most; a larger value is shown without its numbers."""


def text_of(x: Any) -> str:
    """``repr`` of a ShardedTensor."""
    layout: Layout | None = x._layout
    if layout is None:
        return f"ShardedTensor(shape={list(x.shape)}, deleted by {x._consumed_by})"
    where = " ".join(map(str, layout.devices))
    if layout.is_replicated:
        where = f"replicated on {where}"
    elif layout.dim is not None:
        where = f"rows of dim {layout.dim} on {where}"
    else:
        where = f"{layout.sharding.spec} on {where}"
    if x._is_closed():
        where = f"{where}, which were shut down: the data is gone"
    if not _is_fetched(x, layout):
        return f"ShardedTensor(shape={list(x.shape)}, dtype={x.dtype}, {where})"
    numbers = repr(x.to_host())[len("tensor(") : -1]
    return f"ShardedTensor({numbers}, {where})"


def html_of(x: Any) -> str | None:
    """The map of the blocks, with the numbers if ``text_of`` fetches them.

    None leaves a value that is gone, or whose computation failed, to ``text_of``, which tells what
    happened: a notebook asks for both.
    """
    layout: Layout | None = x._layout
    if layout is None or x._is_closed():
        return None
    try:
        return picture(layout).html(x.to_host() if _is_fetched(x, layout) else None)
    except Exception:
        return None


def _is_fetched(x: Any, layout: Layout) -> bool:
    is_here = not x._is_closed() and (layout.is_replicated or x.is_fully_addressable)
    return is_here and x.numel() <= _MOVES_UP_TO
