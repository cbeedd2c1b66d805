"""What a call costs: dispatch, leaves, round trip, psum, fetch, first call; compared with JAX.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TORCHPMAP_DEVICE_TYPE": "cpu", "JAX_PLATFORMS": "cpu"}  # whatever the host has
# read when jax is imported; more virtual devices than are used cost nothing
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import numpy as np
import torch
from _harness import Check, Result, environment, interleave, print_checks, print_table

import torchpmap as tp
from torchpmap._doctor.bench import (
    CHAIN,
    LEAVES,
    MEGABYTE,
    Library,
    Mapped,
    Sample,
    Torchpmap,
    chained_sample,
    feed_sample,
    fetch_sample,
    per_leaf_sample,
    permute_sample,
    psum_sample,
    ring,
    sync_sample,
)

try:
    import jax
except ImportError:
    jax = None

CHAINED, PER_LEAF, SYNC, PSUM, PERMUTE, FETCH, FEED, FIRST = SECTIONS = (
    "chained",
    "per leaf",
    "sync",
    "psum",
    "ppermute",
    "fetch",
    "feed",
    "first call",
)
TITLES = {
    CHAINED: f"chained calls: y = f(y), {CHAIN} times, then wait (per call)",
    PER_LEAF: f"one more leaf: ({LEAVES}-leaf list - 1 leaf) / {LEAVES - 1}, chained (per call)",
    SYNC: "round trip: f(y), then wait (per call)",
    PSUM: "psum: f(y), then wait (per call)",
    PERMUTE: "ppermute by one device: f(y), then wait (per call)",
    FETCH: "fetch a computed 64 MB result to the host",
    FEED: "call with 64 MB of host memory, then wait",
    FIRST: "first call of an MLP training step in a fresh process",
}


# -- contenders ------------------------------------------------------------------------------------


class TorchpmapShardMap(Torchpmap):
    """``torchpmap.shard_map``; the function sees blocks of one row."""

    def map(self, fun: Callable[[Any], Any], num_devices: int) -> Mapped:
        mesh, rows = tp.make_mesh((num_devices,), ("i",)), tp.P("i")
        return tp.shard_map(fun, mesh=mesh, in_specs=rows, out_specs=rows)


class JaxPmap:
    """``jax.pmap``."""

    def map(self, fun: Callable[[Any], Any], num_devices: int) -> Mapped:
        return jax.pmap(fun, axis_name="i", devices=jax.devices()[:num_devices])

    def psum(self, x: Any) -> Any:
        return jax.lax.psum(x, "i")

    def shift(self, x: Any, num_devices: int) -> Any:
        return jax.lax.ppermute(x, "i", ring(num_devices))

    def block(self, tree: Any) -> Any:
        return jax.block_until_ready(tree)

    def fetch(self, value: Any) -> np.ndarray:
        return np.asarray(value)


class JaxShardMap(JaxPmap):
    """``jax.jit(jax.shard_map(...))``; the function sees blocks of one row."""

    def map(self, fun: Callable[[Any], Any], num_devices: int) -> Mapped:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("i",))
        rows = jax.sharding.PartitionSpec("i")
        return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=rows, out_specs=rows))


def libraries() -> dict[str, Library]:
    """The contenders by name, torchpmap first."""
    found: dict[str, Library] = {
        "torchpmap": Torchpmap(),
        "torchpmap.shard_map": TorchpmapShardMap(),
    }
    if jax is not None:
        found |= {"jax.pmap": JaxPmap(), "jax.shard_map": JaxShardMap()}
    return found


# -- beside them -----------------------------------------------------------------------------------


def copy_samples() -> dict[str, Any]:
    """The same bytes by ``memcpy``, into memory that is in use already and into new memory."""
    source = np.ones(64 * MEGABYTE // 4, np.float32)
    target = np.zeros_like(source)

    def timed(copy: Callable[[], Any]) -> dict[str, float]:
        start = time.perf_counter()
        copy()
        return {"64 MB": time.perf_counter() - start}

    return {
        "memcpy": lambda: timed(lambda: np.copyto(target, source)),
        "memcpy to new memory": lambda: timed(source.copy),
    }


# -- first call ------------------------------------------------------------------------------------


def first_call(num_devices: int, mode: str, cache: str) -> dict[str, float]:
    """Run one fresh process on an Inductor cache directory."""
    finished = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_first_call.py")), str(num_devices), mode],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])


def first_call_sample(num_devices: int, modes: Sequence[str]) -> Any:
    def sample() -> dict[str, float]:
        found = {}
        for mode in modes:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):  # the second run uses the cache of the first
                    times = first_call(num_devices, mode, cache)
                    if mode == "ready":
                        found[f"{state} cache: call, workers ready"] = times["call"]
                        found[f"{state} cache: until workers ready"] = times["start"]
                    else:
                        found[f"{state} cache: init to result"] = times["total"]
        return found

    return sample


# -- the run ---------------------------------------------------------------------------------------

# section -> (sample, numbers of devices, rounds, rounds of a quick run, unit)
STEADY: dict[str, tuple[Callable[[Library, int, int], Sample], tuple[int, ...], int, int, str]] = {
    CHAINED: (chained_sample, (2, 4, 8), 15, 5, "us"),
    PER_LEAF: (per_leaf_sample, (2, 4), 15, 5, "us"),
    SYNC: (sync_sample, (2, 4), 15, 5, "us"),
    PSUM: (psum_sample, (2, 4), 15, 3, "us"),
    PERMUTE: (permute_sample, (2, 4), 15, 3, "us"),
    FETCH: (fetch_sample, (2, 4), 11, 3, "ms"),
    FEED: (feed_sample, (2, 4), 11, 3, "ms"),
}


def measure(sections: Sequence[str], quick: bool, counts: Sequence[int]) -> list[Result]:
    """Run the sections; starting a pool for each number of devices is not timed."""
    results: list[Result] = []
    for num_devices in counts:
        mine = [name for name in STEADY if name in sections and num_devices in STEADY[name][1]]
        if not mine:
            continue
        tp.init(num_devices)
        for name in mine:
            prepare, _, full_rounds, quick_rounds, unit = STEADY[name]
            contenders = {
                label: prepare(library, num_devices, num_devices)
                for label, library in libraries().items()
            }
            if name == FETCH:
                contenders |= copy_samples()
            rounds = quick_rounds if quick else full_rounds
            results += interleave(TITLES[name], num_devices, contenders, rounds=rounds, unit=unit)
            print(".", end="", flush=True, file=sys.stderr)
    tp.shutdown()
    if FIRST in sections:
        modes = ("overlapped",) if quick else ("overlapped", "ready")
        contenders = {
            "4 devices": first_call_sample(4, modes),
            "1 device": first_call_sample(1, modes),
        }
        results += interleave(
            TITLES[FIRST], None, contenders, rounds=1 if quick else 3, unit="s", warm_ups=0
        )
    print(file=sys.stderr)
    return sorted(results, key=lambda result: list(TITLES.values()).index(result.section))


def name_of(result: Result) -> str:
    """The section of a result, as ``--only`` names it."""
    (section,) = (name for name, title in TITLES.items() if title == result.section)
    return section


def bars(results: Sequence[Result]) -> list[Check]:
    """What should hold of the first call; ``bars.py`` has the bars of the other sections."""
    return [
        Check(f"{FIRST}, {result.metric}, x 1 device", result.ratio("1 device"), 1.3)
        for result in results
        if name_of(result) == FIRST and "until workers" not in result.metric
    ]


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, below a minute")
    parser.add_argument("--check", action="store_true", help="print PASS or FAIL for each bar")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    parser.add_argument("--devices", nargs="+", type=int, default=(2, 4, 8), metavar="N")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = environment()
    print(", ".join(f"{key} {value}" for key, value in started.items()))
    if started["load_average"] > 0.5:
        print("this machine is busy: trust ratios only, and measure again when it is quiet")
    if jax is None:
        print("jax is not installed: only torchpmap is measured")
    results = measure(options.only, options.quick, options.devices)
    print_table(results)
    if options.check:
        print_checks(bars(results))
    if options.output:
        report = {
            "environment": started,
            "load_average_at_end": os.getloadavg()[0],
            "garbage_collection": "disabled inside timed loops",
            "results": [{"name": name_of(result), **result.to_json()} for result in results],
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
