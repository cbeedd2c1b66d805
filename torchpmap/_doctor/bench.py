"""How fast this machine is: a short table.  Medians; nothing else should run meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from torchpmap._collectives import psum
from torchpmap._runtime.current import devices, local_device_count, local_devices
from torchpmap._sharded.device_put import block_until_ready, device_put, replicate
from torchpmap._transforms.pmap import pmap
from torchpmap._transforms.timing import times

_CHAIN = 200
_EAGER = {"backend": "eager"}
_MB = 1 << 20


def run(show: Callable[[str], Any] | None) -> list[dict[str, Any]]:
    """Measure all rows; ``show`` gets each as a line of text."""
    found = []
    if show is not None:
        show(f"{len(devices())} devices: {' '.join(map(str, devices()))}")
    for name, unit, value in _rows():
        found.append({"name": name, "unit": unit, "value": value})
        if show is not None:
            show(f"  {name:<52}{value:10.4g} {unit}")
    return found


def _rows() -> Iterator[tuple[str, str, float]]:
    count = local_device_count()
    begin = time.perf_counter()
    double = pmap(lambda x: x * 2, compile=_EAGER)
    rows = block_until_ready(double(torch.ones(count, 4)))
    yield "first result of a process (without import torch)", "s", time.perf_counter() - begin
    chain = _seconds(lambda: _repeat(double, rows)) / _CHAIN
    yield f"call, one of {_CHAIN} that nothing waits for", "us", chain * 1e6
    yield "call, waited for", "us", _seconds(lambda: double(rows)) * 1e6
    whole = replicate(torch.ones(4))
    chain = _seconds(lambda: _repeat(lambda y: y + whole, whole)) / _CHAIN
    yield "operation on a ShardedTensor, one of many", "us", chain * 1e6
    total = pmap(lambda x: psum(x, "i"), "i", compile=_EAGER)
    for elements, size in ((1, "4 B"), (4 * _MB, "16 MB")):
        summed = device_put(torch.ones(count, elements), local_devices())
        seconds = _seconds(lambda summed=summed: total(summed))  # type: ignore[misc]
        yield f"psum of {size} per device, waited for", "us", seconds * 1e6
    batch = torch.ones(count, 16 * _MB)
    there = block_until_ready(device_put(batch, local_devices()))
    sent = _seconds(lambda: device_put(batch, local_devices()))
    yield "host to devices", "GB/s", batch.nbytes / sent / 1e9
    yield "devices to host", "GB/s", batch.nbytes / _seconds(there.cpu) / 1e9


def _repeat(function: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(_CHAIN):
        x = function(x)
    return x


def _seconds(function: Callable[[], Any]) -> float:
    """Of a call whose result is waited for."""
    return median(times(function))
