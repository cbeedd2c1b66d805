"""How long calls on the devices take, for ``debug.calibrate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchpmap._sharded.device_put import block_until_ready
from torchpmap.multihost import broadcast

_ROUNDS, _SECONDS = 7, 0.5


def times(function: Callable[[], Any]) -> list[float]:
    """Seconds of some calls, each waited for, without the first one, which may compile; under a
    launcher all processes make as many calls.
    """
    block_until_ready(function())
    rounds = max(_ROUNDS, int(_SECONDS / _seconds(function)))
    return [_seconds(function) for _ in range(broadcast(rounds))]


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    block_until_ready(function())
    return time.perf_counter() - start
