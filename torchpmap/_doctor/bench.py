"""How fast this machine is: a short table.  Medians; nothing else should run meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from torchpmap._collectives import psum
from torchpmap._runtime.current import devices, local_device_count
from torchpmap._sharded.device_put import block_until_ready, device_put, replicate
from torchpmap._transforms.pmap import pmap

_SECONDS = 0.5
"""How long each row is measured at least."""
_ROUNDS = 5
_CHAIN = 200
_EAGER = {"backend": "eager"}
_MB = 1 << 20


def run(show: Callable[[str], Any] | None) -> list[dict[str, Any]]:
    """Measure all rows; ``show`` gets each as a line of text."""
    found = []
    count = local_device_count()
    if show is not None:
        show(f"{count} devices: {' '.join(map(str, devices()))}")
    for name, unit, value in _rows(count):
        found.append({"name": name, "unit": unit, "value": value})
        if show is not None:
            show(f"  {name:<52}{value:10.4g} {unit}")
    return found


def _rows(count: int) -> Iterator[tuple[str, str, float]]:
    begin = time.perf_counter()
    double = pmap(lambda x: x * 2, compile=_EAGER)
    x = block_until_ready(double(torch.ones(count, 4)))
    yield "first result of a process (without import torch)", "s", time.perf_counter() - begin

    def chain() -> None:
        y = x
        for _ in range(_CHAIN):
            y = double(y)
        block_until_ready(y)

    yield f"call, one of {_CHAIN} that nothing waits for", "us", _median(chain) / _CHAIN * 1e6
    yield "call, waited for", "us", _median(lambda: block_until_ready(double(x))) * 1e6
    whole = replicate(torch.ones(4))

    def operations() -> None:
        y = whole
        for _ in range(_CHAIN):
            y = y + whole
        block_until_ready(y)

    yield "operation on a ShardedTensor, one of many", "us", _median(operations) / _CHAIN * 1e6
    for elements, size in ((1, "4 B"), (4 * _MB, "16 MB")):
        total = pmap(lambda x: psum(x, "i"), "i", compile=_EAGER)
        rows = device_put(torch.ones(count, elements), devices()[:count])
        seconds = _median(partial(_wait_for, total, rows))
        yield f"psum of {size} per device, waited for", "us", seconds * 1e6
    batch = torch.ones(count, 16 * _MB)
    gigabytes = batch.nbytes / 1e9
    sent = _median(lambda: block_until_ready(device_put(batch, devices()[:count])))
    yield "host to devices", "GB/s", gigabytes / sent
    there = block_until_ready(device_put(batch, devices()[:count]))
    yield "devices to host", "GB/s", gigabytes / _median(there.cpu)


def _wait_for(function: Callable[[Any], Any], x: Any) -> None:
    block_until_ready(function(x))


def _median(function: Callable[[], Any]) -> float:
    """Seconds per call."""
    function()
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < _ROUNDS or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
