"""Measures how fast the devices are while all of them work (``torchpmap.debug.calibrate``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchpmap._collectives import psum
from torchpmap._plan.roofline import Machine
from torchpmap._runtime.current import local_device_count, local_devices
from torchpmap._sharded.device_put import device_put
from torchpmap._transforms.pmap import pmap
from torchpmap._transforms.timing import times

_EAGER = {"backend": "eager"}
_WIDTH = 512
"""Of matrices, which is what layers have."""
_ELEMENTS = 1 << 22
"""More than caches hold."""
_SENT = 1 << 20
_FEW, _MANY = 4, 16
"""Steps of a call: the difference is that of the steps alone."""


def measured() -> Machine:
    call_s = _quickest(lambda x: x * 2, torch.ones(4))
    product_s = _per_step(lambda x: x @ x, torch.eye(_WIDTH))
    moved_s = _per_step(lambda x: x * 0.5, torch.ones(_ELEMENTS))
    few_s = _per_step(lambda x: psum(x, "i"), torch.zeros(4))
    many_s = _per_step(lambda x: psum(x, "i"), torch.zeros(_SENT))
    return Machine(
        flops=2 * _WIDTH**3 / product_s,
        memory_bytes=2 * 4 * _ELEMENTS / moved_s,
        collective_s=few_s,
        collective_bytes=4 * _SENT / max(many_s - few_s, 1e-9),
        call_s=call_s,
    )


def _per_step(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Seconds that a device takes for one step."""

    def steps(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                x = step(x)
            return x

        return run

    return max((_quickest(steps(_MANY), x) - _quickest(steps(_FEW), x)) / (_MANY - _FEW), 1e-9)


def _quickest(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Seconds of a call on all devices of this process, each of which has an ``x``; the quickest of
    some, as other programs only make it longer.
    """
    count = local_device_count()
    mapped: Any = pmap(f, "i", compile=_EAGER)
    rows = device_put(x.expand(count, *x.shape).clone(), local_devices())
    return min(times(lambda: mapped(rows)))
