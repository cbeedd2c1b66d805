"""Make calls for a long time, break things meanwhile, and measure what stays behind.

    python tests/faults/soak.py --seconds 600 --seed 1
    python tests/faults/soak.py --faults 170 --seed 1      # nothing but faults

It ends with exit status 1 at the first wrong value, hang, left-over or growth, and says which seed
and which round it was.  Memory is the growth per 1,000 calls of what a process allocates and does
not free, after its first 4,000 calls, since the first calls of every program allocate what the
others use.
"""

import argparse
import ctypes
import gc
import os
import sys
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("TORCHPMAP_WARM", "0")

import torch
from _chaos import Chaos
from _leftovers import MARK, Inventory
from _support import anonymous_bytes, known_pids

import torchpmap as tp

CONTROLLER_BAR, WORKER_BAR = 0.1, 0.05
"""MB per 1,000 calls."""
WARM_UP, MEASURED = 4000, 4000
"""Calls of a process before its memory is measured, and at least while it is."""
GOOD_ROUNDS = 50
"""Between two faults of a soak."""
ROUNDS_PER_SAMPLE = 20
M_MMAP_THRESHOLD = -3
"""Of ``malloc.h``."""


def rounds(chaos: Chaos, seconds: float | None, faults: int | None) -> Iterator[Callable[[], None]]:
    """What to do next, until the time or the number of faults is over."""
    if faults is not None:
        yield from [chaos.faulty_round] * faults
        return
    end = time.monotonic() + (seconds or 0)
    while time.monotonic() < end:
        yield from [chaos.good_round] * chaos.random.randint(1, 2 * GOOD_ROUNDS)
        yield chaos.faulty_round


def growths(lives: Iterable[list[tuple[int, int]]]) -> list[float]:
    """MB per 1,000 calls, of the (calls, bytes) of each process that lived long enough to tell."""
    found = []
    for life in lives:
        samples = [sample for sample in life if sample[0] >= life[0][0] + WARM_UP]
        third = len(samples) // 3
        if third and samples[-1][0] - samples[0][0] >= MEASURED:
            (calls, low), (later, high) = (
                tuple(map(median, zip(*part, strict=True)))
                for part in (samples[:third], samples[-third:])
            )
            found.append((high - low) / (later - calls) * 1000 / 2**20)
    return found


def trim(row: torch.Tensor) -> torch.Tensor:
    """Give back what is free: it is no growth, and how much of it is kept depends on chance."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return row


def keep_nothing_free() -> None:
    """Large blocks go back at once: ``malloc_trim`` leaves some in the arenas of other threads."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)


class Memory:
    """Samples of the anonymous memory of the controller and of each worker, while no value is held.

    Buffers of the shared-memory group, which are as large as the largest operand, are none of it.
    """

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def sample(self, operations: int) -> None:
        row = torch.zeros(len(known_pids()))
        trim(tp.pmap(trim, compile=False)(row).cpu())
        for pid in [os.getpid(), *filter(None, known_pids())]:
            try:
                self._samples[pid].append((operations, anonymous_bytes(pid)))
            except OSError:  # it just ended
                continue

    def report(self) -> tuple[list[float], list[float]]:
        """Growth of the controller, and of each worker, of those that lived long enough."""
        own = self._samples.pop(os.getpid())
        return growths([own]), growths(self._samples.values())


def largest(growths: list[float]) -> str:
    return f"{max(growths):.3f} MB" if growths else "not measured"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--faults", type=int, help="that many, instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.stdout.flush()
    console = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # workers print floods

    def say(text: str) -> None:
        os.write(console, f"{text}\n".encode())

    keep_nothing_free()
    os.environ.setdefault(MARK, str(uuid.uuid4()))
    tp.init(4)
    Chaos(options.seed).good_round()
    tp.shutdown()
    before = Inventory.take()
    tp.init(4)
    chaos, memory = Chaos(options.seed), Memory()
    start = time.monotonic()
    for number, act in enumerate(rounds(chaos, options.seconds, options.faults)):
        try:
            act()
        except BaseException:
            say(f"round {number} of seed {options.seed} failed: {chaos.story}")
            raise
        if number % ROUNDS_PER_SAMPLE == 0:
            chaos.held.clear()
            memory.sample(chaos.operations)
    chaos.held.clear()
    own, workers = memory.report()
    tp.shutdown()
    left = before.left_behind()
    faults = sum(chaos.seen.values())
    say(
        f"seed {options.seed}: {chaos.operations} calls, {faults} faults, "
        f"{time.monotonic() - start:.0f} s; no hang, no wrong value"
    )
    say(", ".join(f"{name} {count}" for name, count in sorted(chaos.seen.items())))
    say(
        f"growth per 1,000 calls: controller {largest(own)}, "
        f"the largest of {len(workers)} workers {largest(workers)}"
    )
    say(f"left behind: {', '.join(left) or 'nothing'}")
    grown = max(own, default=0) > CONTROLLER_BAR or max(workers, default=0) > WORKER_BAR
    return int(bool(left) or grown)


if __name__ == "__main__":
    sys.exit(main())
