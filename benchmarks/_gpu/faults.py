"""Seconds from a fault to the error, and to the next right result; which values survive.

``run`` uses one device.  ``collectives`` needs two, since no collective of one can be cut half-way:
two GPUs where there are, else two workers that share one and talk through Gloo.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import torchpmap as tp
from _gpu import inside
from _gpu.bench import EAGER, Bench


def rows() -> torch.Tensor:
    return torch.arange(float(tp.device_count())) + 1


def pids() -> list[int]:
    ask = tp.pmap(lambda _: torch.tensor(inside.pid()), compile=False)
    return [int(pid) for pid in ask(rows()).cpu().flatten().tolist()]


@contextlib.contextmanager
def fault(bench: Bench, name: str, *, lost: Sequence[int] = ()) -> Iterator[Callable[..., None]]:
    """Yields a function that makes the faulty call.  Behind the block a call must be right, the
    values on ``lost`` devices must be gone, and the others as they were.
    """
    with bench.part(name):
        total = tp.pmap(lambda x: tp.psum(x, "i"), "i", compile=EAGER)
        total(rows()).block_until_ready()
        kept = tp.pmap(lambda x: x * 10, compile=EAGER)(rows()).block_until_ready()
        before = pids()
        begin = time.perf_counter()

        def call(function: Callable[[], Any], kinds: Any) -> None:
            try:
                function()
            except kinds as error:
                first = (str(error).splitlines() or [""])[0]
                bench.number(f"{name}: until the error", time.perf_counter() - begin, "s")
                bench.check(f"{name}: the error", True, f"{type(error).__name__}: {first}")
            else:
                bench.check(f"{name}: the error", False, "none was raised")

        yield call
        again = total(rows()).cpu()
        bench.number(f"{name}: until the next right result", time.perf_counter() - begin, "s")
        bench.check(f"{name}: the next result", (again == rows().sum()).all(), again.tolist())
        for device, value in enumerate(rows().tolist()):
            try:
                survived = kept.addressable_data(device).item()
            except tp.ShardLost:
                survived = None
            expected = None if device in lost else 10 * value
            what = "is lost" if expected is None else "survives"
            bench.check(
                f"{name}: the value on device {device} {what}", survived == expected, survived
            )
        same = [old == new for old, new in zip(before, pids(), strict=True)]
        wanted = [device not in lost for device in range(len(same))]
        bench.check(f"{name}: only lost workers are replaced", same == wanted, same)


def wait(function: Callable[[torch.Tensor], Any]) -> None:
    tp.block_until_ready(function(rows()))


def run(bench: Bench) -> None:
    tp.init(1)
    for how, compile in (("compiled", bench.compile), ("compile=False", False)):
        with fault(bench, f"out of memory, {how}") as call:
            huge = tp.pmap(lambda x: x.expand(1 << 45).contiguous(), compile=compile)
            call(partial(wait, huge), (RuntimeError, MemoryError))
    with fault(bench, "an exception") as call:
        broken = tp.pmap(lambda x: torch.linalg.cholesky(x.reshape(1, 1)), compile=EAGER)
        call(lambda: broken(-rows()).cpu(), Exception)
    with fault(bench, "an assert in a kernel", lost=[0]) as call:
        pick = tp.pmap(lambda x, k: x.index_select(0, k), compile=EAGER)
        table, far = torch.zeros(1, 5), torch.tensor([[99]])
        call(lambda: pick(table, far).cpu(), (RuntimeError, IndexError))
    with fault(bench, "an idle worker is killed", lost=[0]):
        os.kill(pids()[0], signal.SIGKILL)
        with contextlib.suppress(tp.WorkerDied):  # of the first call, if it comes too early
            tp.pmap(lambda x: x * 2, compile=EAGER)(rows()).cpu()
    with fault(bench, "a worker is killed while calls run", lost=[0]) as call:
        x, pid = torch.ones(1, bench.sized(4096, 64), bench.sized(4096, 64)), pids()[0]
        multiply = tp.pmap(lambda x: x @ x * 1e-4, compile=EAGER)

        def chain() -> None:
            y = multiply(x)
            for _ in range(200):
                y = multiply(y)
            os.kill(pid, signal.SIGKILL)
            y.cpu()

        call(chain, tp.PmapError)


def collectives(bench: Bench) -> None:
    tp.init(2)
    numbers = bench.sized(1 << 24, 1 << 10)

    def unless_first(act: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            if int(tp.axis_index("i")) == 1:
                act()
            return tp.psum(x.expand(numbers).contiguous(), "i")

        return step

    def raising() -> None:
        raise ArithmeticError("before the collective")

    def dying() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with fault(bench, "a rank raises, the other waits in a collective") as call:
        cut = tp.pmap(unless_first(raising), "i", compile=False)
        call(lambda: cut(rows()).cpu(), ArithmeticError)
    with fault(bench, "a rank dies, the other waits in a collective", lost=[1]) as call:
        cut = tp.pmap(unless_first(dying), "i", compile=False)
        call(lambda: cut(rows()).cpu(), tp.PmapError)
    with fault(bench, "a rank dies among compiled collectives", lost=[1]) as call:
        mean = tp.pmap(lambda x: tp.psum(x, "i") / 2, "i", compile=bench.compile)
        y, pid = mean(torch.ones(2, numbers)), pids()[1]

        def chain() -> None:
            z = y
            for number in range(100):
                z = mean(z)
                if number == 50:
                    os.kill(pid, signal.SIGKILL)
            z.cpu()

        call(chain, tp.PmapError)
    with fault(bench, "a call takes too long in a collective") as call:
        slow = tp.pmap(unless_first(lambda: time.sleep(30)), "i", compile=False, timeout=1.0)
        call(lambda: slow(rows()).cpu(), tp.CallTimeout)
