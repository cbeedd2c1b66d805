"""CUDA graphs, random numbers beside torch's own, and the first call with cold and warm caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import torchpmap as tp
from _gpu import inside
from _gpu.bench import Bench, on_worker, timed
from _gpu.latency import Loop, ours

LAYERS = 20
FIRST_CALL = Path(__file__).parents[1] / "_first_call.py"


def layers(x: torch.Tensor) -> torch.Tensor:
    """Kernels so small that launching them takes longer than running them."""
    for _ in range(LAYERS):
        x = torch.tanh(x - x.mean())
    return x


def graphs(bench: Bench) -> None:
    """Fifty steps with ``mode="reduce-overhead"``: ``torch.compile`` uses CUDA graphs for it."""
    tp.init(1)
    bench.write(name="CUDA graphs", note="left out on accelerators, whatever the mode, at present")
    mode = bench.sized({"mode": "reduce-overhead"}, {"backend": "eager"})
    start, size = torch.ones(1, 4096), 4096
    quick = Loop(tp.pmap(layers, compile=mode), start, tp.block_until_ready)
    graphed = bench.compiled(layers, mode="reduce-overhead")
    there = torch.ones(size, device=bench.device)

    def captured(x: torch.Tensor) -> torch.Tensor:
        if not bench.is_small:
            torch.compiler.cudagraph_mark_step_begin()
        return graphed(x).clone()

    loops = {
        "torchpmap, reduce-overhead": quick,
        "torchpmap": ours(bench, layers, size),
        "torch.compile": Loop(bench.compiled(layers), there, lambda _: bench.synchronize()),
        "torch.compile with CUDA graphs": Loop(captured, there, lambda _: bench.synchronize()),
    }
    steps = bench.sized(50, 2)
    with bench.part("steps"):
        bench.compare(
            f"{LAYERS} small layers, {steps} steps",
            {name: lambda loop=loop: loop.chained(steps) for name, loop in loops.items()},
            rounds=11,
        )
    with bench.part("memory"):
        before, _ = on_worker(inside.memory)
        for _ in range(10):
            quick.chained(steps)
        after, _ = on_worker(inside.memory)
        bench.number(f"growth of memory in {10 * steps} steps", (after - before) / 2**20, "MB")


def dropout(bench: Bench) -> None:
    """Numbers that do not depend on the number of devices cost more than torch's own."""
    tp.init(1)
    size = bench.sized(10**8, 10**3)
    there = torch.ones(size, device=bench.device)
    x = tp.pmap(lambda x: x.expand(size) + 0, compile=bench.compile)(torch.ones(1))
    key = tp.random.key(0)[None]
    mapped = tp.pmap(lambda x: F.dropout(x, 0.1), compile=bench.compile)
    normal = tp.pmap(lambda k: tp.random.normal(k, (size,)), compile=bench.compile)
    native = bench.compiled(lambda x: F.dropout(x, 0.1))

    def once(function: Any, *args: Any) -> Any:
        def one() -> None:
            tp.block_until_ready(function(*args))
            bench.synchronize()

        one()
        return lambda: {"call and wait": timed(one)}

    with bench.part("dropout"):
        contenders = {
            "torchpmap": once(mapped, x),
            "torch": once(lambda x: F.dropout(x, 0.1), there),
            "torch.compile": once(native, there),
        }
        bench.compare(f"dropout of {size:.0e} numbers", contenders, rounds=11, unit="ms")
    with bench.part("normal"):
        contenders = {
            "tp.random.normal": once(normal, key),
            "torch.randn_like": once(torch.randn_like, there),
        }
        bench.compare(f"{size:.0e} normal numbers", contenders, rounds=11, unit="ms")


def first_call(bench: Bench) -> None:
    """A fresh process compiles a small training step, on an empty cache and then on a full one."""
    how = "inductor" if not bench.is_small else "eager"
    for mode in bench.sized(("ready", "overlapped"), ("overlapped",)):
        with tempfile.TemporaryDirectory() as folder, bench.part(f"first call, {mode}"):
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            for state in bench.sized(("cold", "warm"), ("cold",)):
                finished = subprocess.run(
                    [sys.executable, str(FIRST_CALL), "1", mode, how],
                    env={**os.environ, **caches},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                times = json.loads(finished.stdout.splitlines()[-1])
                name = f"{state} caches, {'workers ready' if mode == 'ready' else 'from init'}"
                for metric in ("call", "second") if mode == "ready" else ("total",):
                    bench.number(f"{name}: {metric}", times[metric], "s")
