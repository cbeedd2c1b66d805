"""The logger "torchpmap": what is traced and compiled, how long each stage takes, and why again."""

from __future__ import annotations

import logging

from torchpmap._base.config import config

_logger = logging.getLogger("torchpmap")


def _level() -> int:
    try:
        return logging.WARNING if config.log_compiles else logging.DEBUG
    except ValueError:  # a wrong environment variable is reported where a runtime starts
        return logging.DEBUG


def is_heard() -> bool:
    """Whether the next message will go anywhere, so that it is worth its making."""
    return _logger.isEnabledFor(_level())


def tell(message: str, *args: object) -> None:
    """Report a stage; ``args``: as for ``logging``."""
    _logger.log(_level(), message, *args)
