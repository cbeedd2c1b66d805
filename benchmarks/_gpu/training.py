"""GPT-2 in bfloat16 with batches of the host: steps per second, a trace, the GPU's idle share.

Four sections of equal work, each in a process of its own: ``pmap`` of the whole step from a plain
script and under torchrun, ``jit`` of it, and plain ``torch.compile`` with the fused AdamW.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import torchpmap as tp
from _gpu import inside
from _gpu.bench import Bench, on_worker
from _gpu.gpt2 import TOY, Sizes, batches, model_and_loss

RATE = 1e-4
Steps = Callable[[int], float]
"""Runs a number of steps, waits, and returns the loss of the last."""
Ask = Callable[[Callable[[], Any]], Any]
"""Calls a function in the process that runs the steps."""


def mapped(bench: Bench, sizes: Sizes) -> tuple[Steps, Ask]:
    """``pmap`` of the step, in the runtime of this process."""
    if tp.process_count() == 1:
        tp.init(1)
    model, loss = model_and_loss(sizes, bench.device_type)
    optimizer = tp.optim.functional(torch.optim.AdamW, lr=RATE)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = tp.replicate((params, optimizer.init(params)))
    order = itertools.cycle(batches(sizes))

    @tp.pmap(
        axis_name="i",
        in_axes=(None, 0, 0),
        out_axes=None,
        donate_argnums=0,
        compile=bench.compile,
    )
    def step(state: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, torch.Tensor]:
        params, kept = state
        value, grads = tp.pmean(tp.value_and_grad(loss)(params, x, y), "i")
        return optimizer.update(grads, kept, params), value

    def steps(count: int) -> float:
        nonlocal state
        for x, y in itertools.islice(order, count):
            state, value = step(state, *tp.multihost.local_rows([x[None], y[None]]))
        tp.block_until_ready(state)
        return value.item()

    return steps, on_worker


def jitted(bench: Bench, sizes: Sizes) -> tuple[Steps, Ask]:
    """The lines of ``plain`` with the whole step in ``tp.jit``."""
    tp.init(1)
    model, loss = model_and_loss(sizes, bench.device_type)
    tp.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    order = itertools.cycle(batches(sizes))

    @tp.jit(compile=bench.compile, fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss(dict(model.named_parameters()), x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def steps(count: int) -> float:
        for batch in itertools.islice(order, count):
            value = step(*tp.shard_batch(batch))
        return value.item()

    return steps, on_worker


def plain(bench: Bench, sizes: Sizes) -> tuple[Steps, Ask]:
    """``torch.compile`` of the loss, the fused AdamW, and batches that are pinned already."""
    model, loss = model_and_loss(sizes, bench.device_type)
    model.to(bench.device)
    params = dict(model.named_parameters())
    compiled = bench.compiled(loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    order = itertools.cycle(
        [x if bench.is_small else x.pin_memory() for x in batch] for batch in batches(sizes)
    )

    def steps(count: int) -> float:
        for batch in itertools.islice(order, count):
            x, y = (part.to(bench.device, non_blocking=True) for part in batch)
            value = compiled(params, x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        bench.synchronize()
        return value.item()

    return steps, lambda function: function()


def measure(bench: Bench, make: Callable[[Bench, Sizes], tuple[Steps, Ask]]) -> None:
    sizes = bench.sized(Sizes(), TOY)
    tokens = sizes.batch * sizes.context
    begin = time.perf_counter()
    steps, ask = make(bench, sizes)
    ask(inside.forget_peak)
    steps(1)
    bench.number("until the first step is done", time.perf_counter() - begin, "s")
    bench.number("memory at most, with compiling", ask(inside.memory)[1] / 2**30, "GB")
    steps(bench.sized(4, 1))
    ask(inside.forget_peak)
    times, losses = [], []
    number = bench.sized(10, 2)
    for _ in range(bench.sized(5, 1)):
        begin = time.perf_counter()
        losses.append(steps(number))
        times.append((time.perf_counter() - begin) / number)
    median = sorted(times)[len(times) // 2]
    bench.number("step", median * 1e3, "ms")
    bench.number("tokens per second", tokens / median, "1/s")
    bench.number("memory at most", ask(inside.memory)[1] / 2**30, "GB")
    bench.number("loss of the last step", losses[-1], "nats")
    bench.check("the loss falls", losses[-1] < losses[0] or bench.is_small, losses)
    with bench.part("profile"):
        profile(bench, steps, ask)


def profile(bench: Bench, steps: Steps, ask: Ask) -> None:
    path = bench.journal.parent / f"{bench.section}.trace.json.gz"
    ask(inside.start_profiler)
    steps(bench.sized(5, 1))
    (share,) = ask(partial(inside.stop_profiler, str(path)))
    bench.number("share of time in which the GPU is idle", None if share < 0 else share, "")


def local(bench: Bench) -> None:
    measure(bench, mapped)


torchrun = local
"""The launcher makes the difference."""


def jit(bench: Bench) -> None:
    measure(bench, jitted)


def compiled(bench: Bench) -> None:
    measure(bench, plain)
