"""Whether this process runs the cells of a notebook, and how to show something in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def display_in_cell() -> Callable[..., Any] | None:
    """IPython's ``display``; None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    display: Callable[..., Any] = ipython.display.display
    return display
