"""Writes in place to what a body gets.

A body may write to its carry, to a row or to an operand.  The value from before may still be
needed: by the rows of a vmap that are done, the other branch, a backward pass, the caller.  So a
body that writes gets copies, and one that does not gets the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from torchpmap._base.torch_internals import layers


class Writes:
    """To which of its tensors a body was seen to write."""

    def __init__(self, count: int = 0) -> None:
        """``count``: how many tensors there are, if they are not noted first."""
        self.seen = [False] * count

    @contextlib.contextmanager
    def noted(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Note which of these are written to in the block."""
        before = [_version(x) for x in tensors]
        yield
        now = [_version(x) != version for x, version in zip(tensors, before, strict=True)]
        self.seen = [a or b for a, b in zip(now, self.seen or [False] * len(now), strict=True)]

    def private(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, with copies in the place of those that are written to."""
        return [x.clone() if w else x for x, w in zip(tensors, self.seen, strict=True)]


def _version(tensor: torch.Tensor) -> tuple[int, ...]:
    """Another one after each write, at whichever level of transforms it happens."""
    return tuple(0 if x.is_inference() else x._version for x in layers(tensor))
