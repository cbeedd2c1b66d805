"""What a loop costs: building and compiling a scan by its length, and a step beside jax.lax.scan.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "TORCHPMAP_DEVICE_TYPE": "cpu",  # whatever the host has
    "JAX_PLATFORMS": "cpu",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(),  # empty
}

import numpy as np
import torch
from _harness import Check, Result, environment, interleave, print_checks, print_table

import torchpmap as tp

try:
    import jax
except ImportError:
    jax = None

STEPS = 1000
LENGTHS = (10, 100, 1_000, 10_000)
SMALL, STACKED, LAYER = "small body", "with outputs", "matmul and tanh"
BODIES = (SMALL, STACKED, LAYER)
BUILD, STEP = "trace and compile, empty cache", f"one of {STEPS} steps"
BAR = 3.0

Loop = Callable[..., Any]


# -- the loops, for either library -----------------------------------------------------------------


def start(body: str) -> tuple[np.ndarray, np.ndarray]:
    """(first carry, weights)"""
    generator = np.random.default_rng(0)
    width = 64 if body == LAYER else 8
    carry = generator.normal(size=(16, width)).astype(np.float32)
    weights = (generator.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32)
    # a gradient of 1,000 steps stays near 1: numbers below 1e-38 take a CPU many times longer,
    # unless it takes them for 0, as XLA lets it
    return carry, weights if body == LAYER else 0.1 + weights[0] / 1000


def loop(body: str, scan: Loop, tanh: Callable[[Any], Any], length: int) -> Loop:
    """A function of the first carry and the weights: (last carry, outputs or None)."""

    def step(w: Any, c: Any) -> tuple[Any, Any]:
        if body == LAYER:
            # a number that differs, so that no cache has the code of another length
            return tanh(c @ w) * (1 + 1 / length), None
        after = c * 0.9 + w * (c - 1.0)
        return after, (after[0] if body == STACKED else None)

    return lambda c, w: scan(lambda carry, _: step(w, carry), c, None, length=length)


def of_torchpmap(body: str, length: int, *, is_gradient: bool) -> Loop:
    run = loop(body, tp.scan, torch.tanh, length)

    def loss(c: Any, w: Any) -> Any:
        last, ys = run(c, w)
        return last.sum() if ys is None else last.sum() + (ys * ys).sum()

    fun = torch.func.grad(loss, argnums=(0, 1)) if is_gradient else run
    return tp.pmap(fun, devices=tp.devices()[:1])


def of_jax(body: str, length: int, *, is_gradient: bool) -> Loop:
    run = loop(body, jax.lax.scan, jax.numpy.tanh, length)

    def loss(c: Any, w: Any) -> Any:
        last, ys = run(c, w)
        return last.sum() if ys is None else last.sum() + (ys * ys).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)) if is_gradient else run)


def contender(body: str, of: Callable[..., Loop], *, is_gradient: bool) -> Callable[[], Any]:
    """Compile; returns a function that measures ten calls, of which the last is waited for."""
    fun = of(body, STEPS, is_gradient=is_gradient)
    is_ours = of is of_torchpmap
    values = [v[None] if is_ours else v for v in start(body)]
    wait = tp.block_until_ready if is_ours else jax.block_until_ready
    values = (
        [tp.device_put_sharded(list(v), tp.devices()[:1]) for v in values] if is_ours else values
    )
    for _ in range(3):
        wait(fun(*values))

    def sample() -> dict[str, float]:
        begun = time.perf_counter()
        for _ in range(10):
            result = fun(*values)
        wait(result)
        return {
            f"{body}, {'backward' if is_gradient else 'forward'}": (time.perf_counter() - begun)
            / (10 * STEPS)
        }

    return sample


def build_time(body: str, of: Callable[..., Loop], length: int) -> float:
    """Seconds of the first call, less those of the second."""
    fun = of(body, length, is_gradient=True)
    is_ours = of is of_torchpmap
    wait = tp.block_until_ready if is_ours else jax.block_until_ready
    values = [v[None] if is_ours else v for v in start(body)]
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        wait(fun(*values))
        times.append(time.perf_counter() - begun)
    return times[0] - times[1]


def measure(quick: bool) -> list[Result]:
    libraries = {"torchpmap": of_torchpmap} | ({"jax.lax.scan": of_jax} if jax else {})
    results = []
    for of in libraries.values():
        build_time(SMALL, of, 5)  # imports what compiling needs
    for length in LENGTHS:
        contenders = {
            name: lambda of=of, length=length: {
                f"{length} steps, {LAYER}, backward": build_time(LAYER, of, length)
            }
            for name, of in libraries.items()
        }
        results += interleave(BUILD, None, contenders, rounds=1, unit="s", warm_ups=0)
    for body in BODIES:
        for is_gradient in (False, True):
            contenders = {
                name: contender(body, of, is_gradient=is_gradient) for name, of in libraries.items()
            }
            results += interleave(STEP, None, contenders, rounds=3 if quick else 11, unit="us")
    return results


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--check", action="store_true", help="print PASS or FAIL for each bar")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = environment()
    print(", ".join(f"{key} {value}" for key, value in started.items()))
    tp.init(os.cpu_count())  # one core for each device, of which one works
    results = measure(options.quick)
    tp.shutdown()
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    print_table(results)
    if options.check and jax is not None:
        print_checks(
            [
                Check(f"{r.section}, {r.metric}, x jax.lax.scan", r.ratio("jax.lax.scan"), BAR)
                for r in results
                if r.section == STEP
            ]
        )
    if options.output:
        report = {"environment": started, "results": [result.to_json() for result in results]}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
