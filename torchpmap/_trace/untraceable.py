"""The verdict that a function cannot become a graph."""

from __future__ import annotations


class Untraceable(Exception):  # a verdict, not an error: the front end decides what it means
    """The program cannot become a graph: ``reason``, met at ``where`` (``file:line``) in the user's
    code.
    """

    def __init__(self, reason: str, where: str, instead: str) -> None:
        """``instead``: what to use instead."""
        super().__init__(f"{where}: {reason}. Use {instead}")
