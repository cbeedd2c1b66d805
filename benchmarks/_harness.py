"""Interleaved timing: each round measures every contender, so a busy moment hits all alike."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Check", "Result", "environment", "interleave", "print_checks", "print_table"]

Sample = Callable[[], Mapping[str, float]]
"""One round of one contender: metric -> seconds."""

UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True)
class Result:
    """One line of the table: a metric of every contender, in seconds, one number per round."""

    section: str
    metric: str
    num_devices: int | None
    """None if the contenders differ in it."""
    unit: str
    seconds: dict[str, list[float]]
    """Contender -> one number per round; the first contender is compared with the others."""

    def median(self, name: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.seconds[name])

    @property
    def subject(self) -> str:
        """The contender that the ratios are about."""
        return next(iter(self.seconds))

    def ratio(self, other: str) -> float:
        """Median of the subject over median of ``other``."""
        return self.median(self.subject) / self.median(other)

    def paired_ratio(self, other: str) -> float:
        """Median of the ratios within each round."""
        pairs = zip(self.seconds[self.subject], self.seconds[other], strict=True)
        return statistics.median([mine / theirs for mine, theirs in pairs])

    def to_json(self) -> dict[str, Any]:
        """The content of the line, and the measurements behind it."""
        others = list(self.seconds)[1:]
        return {
            "section": self.section,
            "metric": self.metric,
            "num_devices": self.num_devices,
            "median_s": {name: self.median(name) for name in self.seconds},
            "ratio_of_medians": {name: self.ratio(name) for name in others},
            "median_of_ratios": {name: self.paired_ratio(name) for name in others},
            "rounds_s": self.seconds,
        }


@dataclass(frozen=True)
class Check:
    """A number and the bar it should stay under."""

    text: str
    value: float
    bar: float


def interleave(
    section: str,
    num_devices: int | None,
    contenders: Mapping[str, Sample],
    *,
    rounds: int,
    unit: str,
    warm_ups: int = 1,
) -> list[Result]:
    """Measure A B C A B C ...: one result per metric, without the first ``warm_ups`` rounds."""
    collected: dict[str, dict[str, list[float]]] = {}
    for number in range(-warm_ups, rounds):
        for name, sample in contenders.items():
            with no_gc():
                measured = sample()
            for metric, seconds in measured.items():
                if number >= 0:
                    collected.setdefault(metric, {}).setdefault(name, []).append(seconds)
    return [
        Result(section, metric, num_devices, unit, seconds) for metric, seconds in collected.items()
    ]


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """No cyclic garbage collection inside; old garbage is collected before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def environment() -> dict[str, Any]:
    """The machine and the versions that are measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchpmap", "numpy", "jax", "jaxlib")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def print_table(results: Sequence[Result]) -> None:
    """Print medians, and ratios as "ratio of medians (median of the ratios within rounds)"."""
    section = None
    for result in results:
        if result.section != section:
            section = result.section
            print(f"\n{section}")
        devices = "" if result.num_devices is None else f"{result.num_devices} devices, "
        scale = UNITS[result.unit]
        times = "  ".join(f"{name} {result.median(name) * scale:.1f}" for name in result.seconds)
        ratios = "  ".join(
            f"{result.ratio(name):.2f} ({result.paired_ratio(name):.2f}) x {name}"
            for name in list(result.seconds)[1:]
        )
        print(f"  {devices + result.metric:<34} {result.unit:<3} {times:<62} {ratios}".rstrip())


def print_checks(checks: Sequence[Check]) -> None:
    """Print every bar with PASS or FAIL; FAIL is no error, because a busy machine fails some."""
    print("\nbars")
    for check in checks:
        verdict = "PASS" if check.value <= check.bar else "FAIL"
        print(f"  {verdict}  {check.text}: {check.value:.2f} (at most {check.bar:g})")
