"""One fresh process of the "first call" section of ``dispatch.py``; prints its times as JSON.

``python _first_call.py NUM_DEVICES {overlapped,ready,doubled} [BACKEND]``.  ``overlapped`` does
what a program does: choose the devices, call.  ``ready`` waits in between until every worker has
answered, so that starting the pool and the call are timed apart.  ``doubled`` waits for ``x * 2``,
for which workers need no compiler.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time

import torch

import torchpmap as tp

Parameters = list[tuple[torch.Tensor, torch.Tensor]]

SIZES = (32, 64, 64, 10)
ROWS = 32


def loss(parameters: Parameters, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error of a small multi-layer perceptron."""
    for w, b in parameters[:-1]:
        x = torch.relu(x @ w + b)
    w, b = parameters[-1]
    return ((x @ w + b - y) ** 2).mean()


def step(
    parameters: Parameters, x: torch.Tensor, y: torch.Tensor
) -> tuple[Parameters, torch.Tensor]:
    """One data-parallel step of gradient descent: gradients and loss are averaged."""
    value, gradients = tp.value_and_grad(loss)(parameters, x, y)
    gradients = tp.pmean(gradients, "i")
    updated = [
        (w - 0.1 * dw, b - 0.1 * db) for (w, b), (dw, db) in zip(parameters, gradients, strict=True)
    ]
    return updated, tp.psum(value, "i") / tp.axis_size("i")


def main(num_devices: int, mode: str, backend: str = "inductor") -> dict[str, float]:
    """Time the parts of a first call in seconds."""
    torch.manual_seed(0)
    parameters = [
        (torch.randn(m, n) / m**0.5, torch.zeros(n)) for m, n in itertools.pairwise(SIZES)
    ]
    x, y = torch.randn(num_devices, ROWS, SIZES[0]), torch.randn(num_devices, ROWS, SIZES[-1])
    how = {"backend": backend}
    mapped = functools.partial(tp.pmap, axis_name="i", in_axes=(None, 0, 0), out_axes=None)
    # workers that start before anything is to be compiled do so without the compiler
    train = None if mode == "doubled" else mapped(step, compile=how)
    start = time.perf_counter()
    tp.init(num_devices)
    if mode == "ready":
        tp.block_until_ready(tp.replicate(torch.zeros(1)))
    if mode == "doubled":
        tp.block_until_ready(tp.replicate(torch.ones(3)) * 2)
    ready = time.perf_counter()
    train = train or mapped(step, compile=how)
    tp.block_until_ready(train(parameters, x, y))
    first = time.perf_counter()
    tp.block_until_ready(train(parameters, x, y))
    second = time.perf_counter()
    return {
        "ready_at": ready,
        "start": ready - start,
        "call": first - ready,
        "total": first - start,
        "second": second - first,
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
