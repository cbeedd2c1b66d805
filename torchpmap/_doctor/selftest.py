"""Whether it works: each step runs something on all devices and compares the result."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchpmap import checkpoint
from torchpmap._base.config import config
from torchpmap._base.errors import WorkerDied
from torchpmap._collectives import psum
from torchpmap._runtime.current import device_count, is_launched, local_device_count
from torchpmap._sharded.device_put import device_put
from torchpmap._transforms.grad import grad
from torchpmap._transforms.pmap import pmap

_EAGER = {"backend": "eager"}
_LIMIT_S = 120.0
_LARGE = 1 << 21
"""Elements per device, 8 MB."""


@dataclass(frozen=True)
class Step:
    """What one step gave."""

    name: str
    seconds: float
    error: str | None


def run() -> Iterator[Step]:
    """All steps, each as soon as it is done; the ones after a failure run too."""
    with contextlib.suppress(ValueError):  # a variable is wrong, which the first step tells
        if config.timeout is None:
            config.timeout = _LIMIT_S
    for name, step in _STEPS.items():
        begin = time.perf_counter()
        try:
            if step in _FOR_ONE_PROCESS and is_launched():
                continue
            if step is _replacement and config.runtime == "inline":  # it would end this process
                continue
            step()
            error = None
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        yield Step(name, time.perf_counter() - begin, error)


def _rows() -> torch.Tensor:
    return torch.arange(1.0, local_device_count() + 1)


def _expect(got: Any, expected: torch.Tensor) -> None:
    got = got.cpu()
    if not torch.allclose(got, expected, rtol=1e-4):
        raise AssertionError(f"expected {expected.tolist()}, but got {got.tolist()}")


def _start() -> None:
    _expect(pmap(lambda x: x * 2, compile=_EAGER)(_rows()), _rows() * 2)


def _collective() -> None:
    total = torch.tensor(float(device_count()))
    counted = pmap(lambda x: psum(x, "i"), "i", compile=_EAGER)(torch.ones(local_device_count()))
    _expect(counted, total.expand(local_device_count()))


def _compiled() -> None:
    _expect(pmap(lambda x: torch.tanh(x) * 3)(_rows()), torch.tanh(_rows()) * 3)


def _gradient() -> None:
    _expect(pmap(grad(lambda x: x**3))(_rows()), 3 * _rows() ** 2)


def _large_values() -> None:
    value = torch.arange(float(local_device_count() * _LARGE)).reshape(-1, _LARGE)
    _expect(pmap(lambda x: x + 1, compile=_EAGER)(value), value + 1)


def _saving() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(f"{folder}/saved", {"x": device_put(_rows())})
        _expect(checkpoint.load(f"{folder}/saved")["x"], _rows())


def _replacement() -> None:
    pids = pmap(lambda x: torch.tensor(os.getpid()), compile=False)(_rows())
    os.kill(int(pids.cpu()[-1]), signal.SIGKILL)
    try:
        _start()
    except WorkerDied:
        _start()


_STEPS: dict[str, Callable[[], None]] = {
    "devices start": _start,
    "collective": _collective,
    "compiled function": _compiled,
    "gradient": _gradient,
    "large values": _large_values,
    "checkpoint": _saving,
    "a worker that dies is replaced": _replacement,
}
_FOR_ONE_PROCESS = (_saving, _replacement)
"""These need a folder that all processes name alike, and workers."""
