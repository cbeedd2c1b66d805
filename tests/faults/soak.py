"""Make calls for a long time, break things meanwhile, and measure what stays behind.

    python tests/faults/soak.py --seconds 600 --seed 1
    python tests/faults/soak.py --faults 170 --seed 1      # nothing but faults

It ends with exit status 1 at the first wrong value, hang, left-over or growth, and says which seed
and which round it was.  Memory is the growth of the resident set per 1,000 calls: from the median
of the second fifth of all samples to the median of the last one, since the first calls of every
program allocate what the others use.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("TORCHPMAP_WARM", "0")

from _chaos import Chaos
from _leftovers import MARK, Inventory
from _support import known_pids, rss_bytes

import torchpmap as tp

CONTROLLER_BAR, WORKER_BAR = 0.1, 0.05
"""MB per 1,000 calls."""
GOOD_ROUNDS = 20
"""Between two faults of a soak."""


def rounds(chaos: Chaos, seconds: float | None, faults: int | None) -> Iterator[Callable[[], None]]:
    """What to do next, until the time or the number of faults is over."""
    if faults is not None:
        yield from [chaos.faulty_round] * faults
        return
    end = time.monotonic() + (seconds or 0)
    while time.monotonic() < end:
        yield from [chaos.good_round] * chaos.random.randint(1, 2 * GOOD_ROUNDS)
        yield chaos.faulty_round


def growth(samples: list[tuple[int, int]]) -> float:
    """MB per 1,000 calls, of (calls, bytes)."""
    fifth = len(samples) // 5
    (calls, low), (later, high) = (
        tuple(map(median, zip(*part, strict=True)))
        for part in (samples[fifth : 2 * fifth + 1], samples[-fifth - 1 :])
    )
    return (high - low) / max(later - calls, 1) * 1000 / 2**20


class Memory:
    """Samples of the resident set of the controller and of each worker."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def sample(self, operations: int) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but kept for later, is no growth
        for pid in [os.getpid(), *filter(None, known_pids())]:
            try:
                self._samples[pid].append((operations, rss_bytes(pid)))
            except OSError:  # it just ended
                continue

    def report(self) -> tuple[float, float]:
        """Growth of the controller, and the largest of the workers that lived for 5,000 calls."""
        own = self._samples.pop(os.getpid())
        workers = [
            growth(samples)
            for samples in self._samples.values()
            if samples[-1][0] - samples[0][0] >= 5000
        ]
        return growth(own), max(workers, default=0.0)


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
        memory.sample(chaos.operations)
    chaos.held.clear()
    controller, worker = memory.report()
    tp.shutdown()
    left = before.left_behind()
    faults = sum(chaos.seen.values())
    say(
        f"seed {options.seed}: {chaos.operations} calls, {faults} faults, "
        f"{time.monotonic() - start:.0f} s; no hang, no wrong value"
    )
    say(", ".join(f"{name} {count}" for name, count in sorted(chaos.seen.items())))
    say(f"growth per 1,000 calls: controller {controller:.3f} MB, worker {worker:.3f} MB")
    say(f"left behind: {', '.join(left) or 'nothing'}")
    grown = options.faults is None and (controller > CONTROLLER_BAR or worker > WORKER_BAR)
    return int(bool(left) or grown)


if __name__ == "__main__":
    sys.exit(main())
