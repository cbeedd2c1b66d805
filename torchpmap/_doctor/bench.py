"""How fast this machine is: the programs that ``make bench`` times beside those of JAX, in a short
table.  Medians; nothing else should run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from torchpmap._collectives import ppermute, psum
from torchpmap._runtime.current import devices, local_device_count
from torchpmap._sharded.device_put import block_until_ready
from torchpmap._transforms.pmap import pmap

Mapped = Callable[[Any], Any]
Sample = Callable[[], Mapping[str, float]]
"""One round: metric -> seconds."""
CHAIN, LEAVES, MEGABYTE = 1000, 100, 1 << 20
_ROUNDS = 5  # under a launcher all processes make as many calls
_SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0}


class Library(Protocol):
    """How a library maps a function; results can be passed on to the next call as they are."""

    def map(self, fun: Mapped, num_devices: int) -> Mapped:
        """``fun``, mapped over the first ``num_devices`` devices with the axis name "i"."""

    def psum(self, x: Any) -> Any:
        """The sum over the axis, inside a mapped function."""

    def shift(self, x: Any, num_devices: int) -> Any:
        """The value of the device before this one, inside a mapped function."""

    def block(self, tree: Any) -> Any:
        """Wait for every leaf."""

    def fetch(self, value: Any) -> np.ndarray:
        """The whole value in host memory."""


class Torchpmap:
    """``torchpmap.pmap`` with its defaults."""

    def map(self, fun: Mapped, num_devices: int) -> Mapped:
        return pmap(fun, axis_name="i", devices=devices()[:num_devices])

    def psum(self, x: Any) -> Any:
        return psum(x, "i")

    def shift(self, x: Any, num_devices: int) -> Any:
        return ppermute(x, "i", ring(num_devices))

    def block(self, tree: Any) -> Any:
        return block_until_ready(tree)

    def fetch(self, value: Any) -> np.ndarray:
        found: np.ndarray = value.numpy()
        return found


# -- one round -------------------------------------------------------------------------------------


class Loop:
    """A mapped function whose result is its next argument."""

    def __init__(self, library: Library, fun: Mapped, start: Any, num_devices: int) -> None:
        self.library = library
        self.mapped = library.map(fun, num_devices)
        self.value = start
        self.synced(3)  # compiles on every device, and lays out the value for the next call

    def chained(self, calls: int) -> dict[str, float]:
        """Seconds per call, until the results are there and until the last call returned."""
        mapped, value = self.mapped, self.value
        start = time.perf_counter()
        for _ in range(calls):
            value = mapped(value)
        issued = time.perf_counter()
        self.value = self.library.block(value)
        done = time.perf_counter()
        return {"total": (done - start) / calls, "calls return": (issued - start) / calls}

    def synced(self, calls: int) -> float:
        """Seconds per call that is waited for."""
        mapped, block, value = self.mapped, self.library.block, self.value
        start = time.perf_counter()
        for _ in range(calls):
            value = block(mapped(value))
        self.value = value
        return (time.perf_counter() - start) / calls


def double(x: Any) -> Any:
    return x * 2


def double_all(xs: list[Any]) -> list[Any]:
    return [x * 2 for x in xs]


def ring(num_devices: int) -> list[tuple[int, int]]:
    return [(k, (k + 1) % num_devices) for k in range(num_devices)]


def zeros(rows: int, size: int) -> np.ndarray:
    return np.zeros((rows, size), np.float32)  # doubled and summed they never become inf


# ``rows``: of this process; ``num_devices``: of all


def chained_sample(library: Library, rows: int, num_devices: int) -> Sample:
    loop = Loop(library, double, zeros(rows, 3), num_devices)
    return lambda: loop.chained(CHAIN)


def per_leaf_sample(library: Library, rows: int, num_devices: int) -> Sample:
    one = Loop(library, double_all, [zeros(rows, 3)], num_devices)
    many = Loop(library, double_all, [zeros(rows, 3)] * LEAVES, num_devices)

    def sample() -> dict[str, float]:
        few, lots = one.chained(300), many.chained(100)
        return {metric: (lots[metric] - few[metric]) / (LEAVES - 1) for metric in few}

    return sample


def sync_sample(library: Library, rows: int, num_devices: int) -> Sample:
    loop = Loop(library, double, zeros(rows, 3), num_devices)
    return lambda: {"total": loop.synced(300)}


def psum_sample(library: Library, rows: int, num_devices: int) -> Sample:
    # every call is waited for: some ten pipelined collectives can deadlock jax on few cores
    small = Loop(library, library.psum, zeros(rows, 1), num_devices)
    large = Loop(library, library.psum, zeros(rows, MEGABYTE // 4), num_devices)
    huge = Loop(library, library.psum, zeros(rows, 16 * MEGABYTE), num_devices)
    return lambda: {"4 B": small.synced(100), "1 MB": large.synced(10), "64 MB": huge.synced(1)}


def permute_sample(library: Library, rows: int, num_devices: int) -> Sample:
    def shift(x: Any) -> Any:
        return library.shift(x, num_devices)

    loop = Loop(library, shift, zeros(rows, MEGABYTE // 4), num_devices)
    return lambda: {"1 MB": loop.synced(20)}


def feed_sample(library: Library, rows: int, num_devices: int) -> Sample:
    start = zeros(rows, 64 * MEGABYTE // 4 // num_devices)
    loop = Loop(library, double, start, num_devices)

    def sample() -> dict[str, float]:
        loop.value = start
        return {"64 MB": loop.synced(1)}

    return sample


def fetch_sample(library: Library, rows: int, num_devices: int) -> Sample:
    loop = Loop(library, double, zeros(rows, 64 * MEGABYTE // 4 // num_devices), num_devices)

    def sample() -> dict[str, float]:
        loop.synced(1)  # a new value, because jax caches fetched values
        start = time.perf_counter()
        loop.library.fetch(loop.value)
        return {"64 MB": time.perf_counter() - start}

    return sample


# -- the short table -------------------------------------------------------------------------------

_TABLE: dict[str, tuple[Callable[[Library, int, int], Sample], str]] = {
    "call and wait": (sync_sample, "us"),
    "psum of {}, and wait": (psum_sample, "us"),
    "ppermute of {}, and wait": (permute_sample, "us"),
    "fetch {}": (fetch_sample, "ms"),
    "call with {} of host memory": (feed_sample, "ms"),
    f"one more leaf of {LEAVES}": (per_leaf_sample, "us"),
    "chained call": (chained_sample, "us"),
}
"""The rows as ``make bench`` calls them."""


def run(show: Callable[[str], Any] | None) -> list[dict[str, Any]]:
    """Measure all rows; ``show`` gets each as a line of text."""
    found = []
    if show is not None:
        show(f"{len(devices())} devices: {' '.join(map(str, devices()))}")
    for name, unit, value in _rows():
        found.append({"name": name, "unit": unit, "value": value})
        if show is not None:
            show(f"  {name:<52}{value:10,.1f} {unit}")
    return found


def _rows() -> Iterator[tuple[str, str, float]]:
    library, rows, num_devices = Torchpmap(), local_device_count(), len(devices())
    begin = time.perf_counter()
    block_until_ready(library.map(double, num_devices)(torch.ones(rows, 3)))
    yield "first result of a process (without import torch)", "s", time.perf_counter() - begin
    for name, (prepare, unit) in _TABLE.items():
        sample = prepare(library, rows, num_devices)
        sample()
        rounds = [sample() for _ in range(_ROUNDS)]
        for metric in rounds[0]:
            if metric != "calls return":
                seconds = median(each[metric] for each in rounds)
                yield name.format(metric), unit, seconds * _SCALES[unit]
