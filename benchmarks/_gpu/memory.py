"""Device memory: at most in use with and without donation, and while a plan is compiled."""

from __future__ import annotations

from typing import Any

import torch

import torchpmap as tp
from _gpu import inside
from _gpu.bench import Bench, on_worker

GB = 1 << 30


def chain(bench: Bench, donate: Any, leaves: int) -> None:
    """State of 1 GB in so many tensors, updated ten times."""
    numbers = bench.sized(GB, 1 << 16) // 4 // leaves
    name = f"{leaves} tensors, {'donated' if donate == 0 else 'kept'}"
    start = tp.pmap(lambda x: [x.expand(numbers) + k for k in range(leaves)], compile=bench.compile)
    step = tp.pmap(
        lambda state: [x * 1.5 for x in state], donate_argnums=donate, compile=bench.compile
    )
    state = step(start(torch.zeros(1)))
    tp.block_until_ready(state)
    on_worker(inside.forget_peak)
    for _ in range(10):
        state = step(state)
    tp.block_until_ready(state)
    held, peak = on_worker(inside.memory)
    bench.number(f"{name}: at most, x the state", peak / (numbers * 4 * leaves), "")
    bench.number(f"{name}: after the last call, x the state", held / (numbers * 4 * leaves), "")
    last = state[-1][:, 0].cpu().item()
    bench.check(f"{name}: the values", last == (leaves - 1) * 1.5**11, last)


def compiling(bench: Bench) -> None:
    """The first call compiles: example inputs on the device would be 1 GB more."""
    numbers = bench.sized(GB, 1 << 16) // 4
    x = tp.device_put(torch.zeros(1, numbers))
    f = tp.pmap(lambda x: (x * 2 + 1).sum(), compile=bench.compile)
    for name in ("first call, which compiles", "second call"):
        on_worker(inside.forget_peak)
        f(x).block_until_ready()
        _, peak = on_worker(inside.memory)
        bench.number(f"{name}: at most, x the argument", peak / (4 * numbers), "")


def run(bench: Bench) -> None:
    tp.init(1)
    with bench.part("compiling"):
        compiling(bench)
    for leaves in (1, 64):
        for donate in (0, ()):
            with bench.part(f"{leaves} tensors, donate_argnums={donate}"):
                chain(bench, donate, leaves)
