"""What a mapped call costs above its compiled code in a process that runs it, as under torchrun.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# as a launcher describes a job of one process; read when torchpmap starts
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ["TORCHPMAP_DEVICE_TYPE"] = "cpu"  # whatever the host has

import torch
from _harness import Check, Result, environment, interleave, print_checks, print_table
from torch._inductor import standalone_compile
from torch.fx.experimental.proxy_tensor import make_fx

import torchpmap as tp

CALLS = 2000
TITLE = f"one process of a job: y = f(y), {CALLS} times (per call)"
OURS, CODE, COMPILED = "torchpmap", "Inductor's code", "torch.compile"


def function(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def contenders() -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """Per contender, the function to call and its first argument."""
    x = torch.zeros(3)
    graph = make_fx(lambda x: [function(x)])(x)
    code = standalone_compile(graph, [x], dynamic_shapes="from_example_inputs")
    return {
        OURS: (tp.pmap(function), torch.zeros(1, 3)),
        CODE: (lambda x: code(x)[0], x),
        COMPILED: (torch.compile(function), x),
    }


def sample(call: Callable[[Any], Any], x: Any) -> Callable[[], dict[str, float]]:
    def chained() -> dict[str, float]:
        y = call(x)
        start = time.perf_counter()
        for _ in range(CALLS):
            y = call(y)
        return {"per call": (time.perf_counter() - start) / CALLS}

    return chained


def bars(results: Sequence[Result]) -> list[Check]:
    """What should hold on a quiet machine."""
    (result,) = results
    added = (result.median(OURS) - result.median(CODE)) * 1e6
    return [
        Check("above Inductor's code, us", added, 5.0),
        Check("x torch.compile", result.ratio(COMPILED), 1.0),
    ]


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, a few seconds")
    parser.add_argument("--check", action="store_true", help="print PASS or FAIL for each bar")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    at_start = environment()
    print(", ".join(f"{key} {value}" for key, value in at_start.items()))
    samples = {name: sample(*each) for name, each in contenders().items()}
    rounds = 5 if options.quick else 51
    results = interleave(TITLE, 1, samples, rounds=rounds, unit="us", warm_ups=2)
    print_table(results)
    if options.check:
        print_checks(bars(results))
    if options.output:
        report = {"environment": at_start, "results": [result.to_json() for result in results]}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
