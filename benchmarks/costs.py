"""What a call costs against devices, leaves and bytes: a line fitted to each, and where it bends.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dispatch  # noqa: F401 - first: it chooses the devices

# isort: split
import numpy as np
import torch
from _harness import Sample, environment, interleave

import torchpmap as tp
from torchpmap._doctor.bench import Loop, Torchpmap, double, double_all, zeros

FEW = 2
"""Devices, where something else varies."""
BENT = 1.5
"""So many times what the line says of a point that was not used for it."""
LEAVES = (1, 3, 10, 30, 100, 300)
BYTES = tuple(4 << 2 * k for k in range(0, 13, 2))


@dataclass(frozen=True)
class Series:
    """Seconds of a call, by the one number that varies."""

    title: str
    unit: str
    """Of that number."""
    seconds: dict[int, float]

    def line(self, points: Sequence[int]) -> tuple[float, float]:
        """Seconds of none, and for each one more: the least relative errors at these points."""
        x, y = np.array(points), np.array([self.seconds[each] for each in points])
        slope, fixed = np.polyfit(x, y, 1, w=1 / y)
        return float(fixed), float(slope)

    @property
    def bend(self) -> tuple[int, float] | None:
        """The first number whose call takes ``BENT`` times what the smaller ones let expect."""
        numbers = sorted(self.seconds)
        for k in range(3, len(numbers)):
            fixed, slope = self.line(numbers[:k])
            ratio = self.seconds[numbers[k]] / (fixed + slope * numbers[k])
            if ratio > BENT:
                return numbers[k], ratio
        return None

    def told(self) -> str:
        """The line, how far points are from it, and where it bends."""
        fixed, slope = self.line(sorted(self.seconds))
        errors = [abs(s / (fixed + slope * n) - 1) for n, s in self.seconds.items()]
        bend = "no bend" if self.bend is None else "{} takes {:.1f} x the line".format(*self.bend)
        return (
            f"{self.title:<28} {fixed * 1e6:9.1f} us + {slope * 1e6:.5f} us per {self.unit}, "
            f"within {max(errors):.0%}; {bend}"
        )


def synced(fun: Callable[[Any], Any], start: Any, num_devices: int) -> Sample:
    loop = Loop(Torchpmap(), fun, start, num_devices)
    calls = max(2, min(100, int(0.05 / loop.synced(2))))
    return lambda: {"total": loop.synced(calls)}


def series(title: str, unit: str, samples: dict[int, Sample], rounds: int) -> Series:
    contenders = {str(number): sample for number, sample in samples.items()}
    (result,) = interleave(title, None, contenders, rounds=rounds, unit="us")
    return Series(title, unit, {number: result.median(str(number)) for number in samples})


def measure(most: int, rounds: int) -> list[Series]:
    """``most``: devices."""
    tp.init(most)
    total = Torchpmap().psum
    counts = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    found = [
        series(title, "device", {n: synced(fun, zeros(n, 1), n) for n in counts}, rounds)
        for title, fun in (("x * 2", double), ("psum of 4 B", total))
    ]
    lists = {n: synced(double_all, [zeros(FEW, 3)] * n, FEW) for n in LEAVES}
    found.append(series(f"x * 2, {FEW} devices", "leaf", lists, rounds))
    for title, fun in (("x * 2", double), ("psum", total)):
        blocks = {size: synced(fun, zeros(FEW, size // 4), FEW) for size in BYTES}
        found.append(series(f"{title}, {FEW} devices", "byte of a device", blocks, rounds))
    tp.shutdown()
    return found


def draw(found: Sequence[Series], path: Path) -> None:
    """Points and lines, one picture for what varies in each."""
    from matplotlib import pyplot

    units = list(dict.fromkeys(each.unit for each in found))
    figure, parts = pyplot.subplots(1, len(units), figsize=(4 * len(units), 3.5))
    for part, unit in zip(parts, units, strict=True):
        for each in (each for each in found if each.unit == unit):
            numbers = sorted(each.seconds)
            fixed, slope = each.line(numbers)
            (points,) = part.loglog(numbers, [each.seconds[n] * 1e6 for n in numbers], "o")
            line = [(fixed + slope * n) * 1e6 for n in numbers]
            part.loglog(numbers, line, "-", color=points.get_color(), label=each.title)
        part.set(xlabel=f"{unit}s", ylabel="us, call and wait")
        part.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=32, help="how many at most")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--draw", type=Path, help="write a picture (needs matplotlib)")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = environment()
    print(", ".join(f"{key} {value}" for key, value in started.items()))
    found = measure(options.devices, options.rounds)
    print("\ncall and wait: seconds of none + of each one more; errors relative to the line")
    for each in found:
        print(f"  {each.told()}")
    if options.draw:
        draw(found, options.draw)
    if options.output:
        lines = [{"title": s.title, "unit": s.unit, "seconds": s.seconds} for s in found]
        options.output.write_text(json.dumps([started, *lines], indent=1) + "\n")


if __name__ == "__main__":
    main()
