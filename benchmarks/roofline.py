"""The seconds that ``f.lower(x).cost()`` says a call will take, beside those that it takes.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TORCHPMAP_DEVICE_TYPE"] = "cpu"  # whatever the host has

import torch
from _harness import environment, no_gc

import torchpmap as tp

BAR = 2.0
"""How many times longer or shorter a call may take."""


def layers(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of three layers, averaged: matrix products."""

    def loss(w: torch.Tensor) -> torch.Tensor:
        y = x
        for k in range(3):
            y = torch.relu(y @ w[k])
        return y.square().mean()

    return tp.pmean(tp.grad(loss)(w), "i")


def elements(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Arithmetic on many numbers: memory."""
    return 0.9 * w.flatten() + x.sum() * torch.relu(w.flatten())


def sums(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sums over the devices, small ones and large ones: collectives."""
    total = tp.psum(w, "i")
    for _ in range(50):
        x = 0.5 * tp.psum(x, "i")
    return total * x.sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "layers": (layers, (3, 1024, 1024), (256, 1024)),
    "elements": (elements, (4096, 1024), (4, 4)),
    "sums": (sums, (2048, 1024), (2, 256)),
}


def measured(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of a call that is waited for: the quickest, as other programs only make it longer."""
    taken = []
    with no_gc():
        for number in range(rounds + 3):
            begin = time.perf_counter()
            tp.block_until_ready(call())
            taken += [time.perf_counter() - begin] if number >= 3 else []
    return min(taken)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--check", action="store_true", help="print PASS or FAIL for each program")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args(argv)
    tp.init(num_devices=arguments.devices)
    machine = tp.debug.calibrate()
    print(machine)
    found = {}
    for name, (program, weights, rows) in PROGRAMS.items():
        f = tp.pmap(program, "i", in_axes=(None, 0))
        given = tp.replicate(torch.randn(weights) / 32), torch.randn(arguments.devices, *rows)
        cost = f.lower(*given).cost(machine)
        assert cost.seconds is not None
        seconds = measured(lambda f=f, given=given: f(*given), arguments.rounds)
        ratio = seconds / cost.seconds
        found[name] = {"predicted_s": cost.seconds, "measured_s": seconds}
        verdict = "PASS" if 1 / BAR <= ratio <= BAR else "FAIL"
        print(
            f"{name:<10} predicted {cost.seconds * 1e3:8.2f} ms   measured {seconds * 1e3:8.2f} ms"
            f"   {ratio:5.2f} x" + (f"   {verdict}" if arguments.check else "")
        )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"environment": environment(), "programs": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
