"""What calls, collectives and transfers take, beside plain torch on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import torchpmap as tp
from _gpu.bench import Bench, timed

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
Times = dict[str, float]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Loop:
    """A function whose result is its next argument."""

    def __init__(self, call: Callable[[Any], Any], start: Any, wait: Callable[[Any], Any]) -> None:
        self.call, self.value, self.wait = call, start, wait
        for _ in range(3):
            self.value = call(self.value)
        wait(self.value)

    def chained(self, calls: int) -> Times:
        """Seconds per call, until the results are there and until the last call returned."""
        call, value = self.call, self.value
        begin = time.perf_counter()
        for _ in range(calls):
            value = call(value)
        issued = time.perf_counter()
        self.wait(value)
        done = time.perf_counter()
        self.value = value
        return {"total": (done - begin) / calls, "calls return": (issued - begin) / calls}

    def synced(self, calls: int) -> Times:
        """Seconds per call that is waited for."""

        def one() -> None:
            self.value = self.call(self.value)
            self.wait(self.value)

        return {"call and wait": timed(one, calls)}


def ours(bench: Bench, function: Callable[[Any], Any], size: int) -> Loop:
    mapped = tp.pmap(function, "i", compile=bench.compile)
    return Loop(mapped, torch.zeros(1, size), tp.block_until_ready)


def plain(bench: Bench, function: Callable[[Any], Any], size: int) -> Loop:
    start = torch.zeros(size, device=bench.device)
    return Loop(function, start, lambda _: bench.synchronize())


def calls(bench: Bench) -> None:
    """The overhead of a call above the compiled function."""
    loops = {
        "torchpmap": ours(bench, double, 3),
        "torch.compile": plain(bench, bench.compiled(double), 3),
        "eager": plain(bench, double, 3),
    }
    number = bench.sized(1000, 5)
    bench.compare(
        f"y = f(y), {number} times",
        {name: lambda loop=loop: loop.chained(number) for name, loop in loops.items()},
        rounds=11,
    )
    number = bench.sized(200, 3)
    found = bench.compare(
        "round trip of x * 2",
        {name: lambda loop=loop: loop.synced(number) for name, loop in loops.items()},
        rounds=11,
    )
    above = found[0].median("torchpmap") - found[0].median("torch.compile")
    bench.number("round trip above torch.compile", above * 1e6, "us")


def collectives(bench: Bench) -> None:
    for name, size, number in (("4 B", 1, 100), ("1 MB", MB // 4, 50), ("256 MB", 64 * MB, 10)):
        size, number = bench.sized(size, 4), bench.sized(number, 2)
        loops = {
            "torchpmap": ours(bench, lambda x: tp.psum(x, "i"), size),
            "clone": plain(bench, torch.clone, size),
        }
        bench.compare(
            f"psum over one rank of {name}",
            {key: lambda loop=loop, n=number: loop.synced(n) for key, loop in loops.items()},
            rounds=5,
        )


SIZES = {"1 KB": KB, "1 MB": MB, "64 MB": 64 * MB, "1 GB": GB}


def feeds(bench: Bench, name: str, size: int) -> None:
    """From the host to the device."""
    host = torch.zeros(1, bench.sized(size, KB) // 4)
    pinned = host if bench.is_small else host.pin_memory()

    def raw(source: torch.Tensor) -> Callable[[], Times]:
        def one() -> None:
            source.to(bench.device, non_blocking=True, copy=True)
            bench.synchronize()

        return lambda: {"host to device": timed(one)}

    contenders = {
        "torchpmap": lambda: {
            "host to device": timed(lambda: tp.device_put(host).block_until_ready())
        },
        "pageable": raw(host),
        "pinned": raw(pinned),
    }
    bench.compare(f"feed {name}", contenders, rounds=5 if size >= GB else 11)


def fetches(bench: Bench, name: str, size: int) -> None:
    """From the device to the host."""
    numbers = bench.sized(size, KB) // 4
    add = tp.pmap(lambda x: x + 1, compile=bench.compile)
    held = tp.pmap(lambda x: x.expand(numbers) + 0, compile=bench.compile)(torch.zeros(1))
    there = torch.zeros(numbers, device=bench.device)
    target = torch.empty(numbers, pin_memory=not bench.is_small)

    def mapped() -> Times:
        nonlocal held
        held = add(held).block_until_ready()  # a value that was never fetched
        return {"device to host": timed(held.cpu)}

    def raw(copy: Callable[[], Any]) -> Callable[[], Times]:
        def one() -> None:
            copy()
            bench.synchronize()

        return lambda: {"device to host": timed(one)}

    contenders = {
        "torchpmap": mapped,
        "pageable": raw(there.cpu),
        "pinned": raw(lambda: target.copy_(there, non_blocking=True)),
    }
    bench.compare(f"fetch {name}", contenders, rounds=5 if size >= GB else 11)


def run(bench: Bench) -> None:
    tp.init(1)
    with bench.part("calls"):
        calls(bench)
    with bench.part("psum"):
        collectives(bench)
    for name, size in bench.sized(SIZES, {"1 KB": KB}).items():
        with bench.part(f"feed {name}"):
            feeds(bench, name, size)
        with bench.part(f"fetch {name}"):
            fetches(bench, name, size)
