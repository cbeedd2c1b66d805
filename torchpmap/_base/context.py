"""Values of context variables for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """In the block, and in no other thread, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
