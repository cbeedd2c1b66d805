"""Every bar of this package in one table: today's number, the bar, PASS or FAIL, the spread.

``make bench`` runs this; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTPUT = HERE.parent / "outputs" / "bench.json"

Samples = Mapping[str, Sequence[float]]
"""Contender -> one number per round, in seconds (of memory: bytes)."""
Key = tuple[str, str, int | None]
"""Program, metric, number of devices (None: the metric says it)."""

JAX = "jax.pmap"
SCALES = {"x": 1.0, "s": 1.0, "ms/s": 1e3, "MB": 1e-6}


@dataclass(frozen=True)
class Bar:
    """What a metric should be at most: as a multiple of ``beside``, or in ``unit``."""

    text: str
    key: Key
    bar: float
    beside: str | None = None
    unit: str = "x"


def pair(text: str, section: str, metric: str, *bars: float) -> list[Bar]:
    """The bars of 2 and of 4 devices beside ``jax.pmap``."""
    return [
        Bar(f"{text}, {count} devices", (section, metric, count), bar, JAX)
        for count, bar in zip((2, 4), bars, strict=True)
    ]


BARS: list[Bar] = [
    *pair("call and wait", "sync", "total", 1.2, 1.6),
    *pair("`psum` of 4 B, and wait", "psum", "4 B", 1.0, 1.2),
    *pair("`psum` of 1 MB, and wait", "psum", "1 MB", 0.8, 1.0),
    *pair("`psum` of 64 MB, and wait", "psum", "64 MB", 0.39, 0.41),
    *pair("`ppermute` of 1 MB, and wait", "ppermute", "1 MB", 0.6, 1.0),
    *pair("fetch 64 MB", "fetch", "64 MB", 1.2, 1.5),
    *pair("call with 64 MB of host memory", "feed", "64 MB", 0.29, 0.63),
    *pair("one more leaf of 100", "per leaf", "total", 0.5, 0.6),
    *pair("chained call", "chained", "total", 0.45, 0.46),
    Bar("large MLP step, 2 devices", ("train", "total", 2), 1.2, "one process"),
    Bar("`x * 2` in a fresh process, 4 devices", ("fresh", "x * 2", None), 2.2, unit="s"),
    Bar("then a compiled step", ("fresh", "then a compiled step", None), 1.5, unit="s"),
    Bar("README, 4 devices: to the result", ("fresh", "README, result", None), 3.0, unit="s"),
    Bar("README, 4 devices: to the end", ("fresh", "README, end", None), 3.4, unit="s"),
    Bar("8 idle devices, CPU per second", ("idle", "idle, CPU", None), 2.0, unit="ms/s"),
    Bar("8 idle devices, memory", ("idle", "idle, memory", None), 600.0, unit="MB"),
]
"""The one list of bars, in the order of the table."""


@dataclass(frozen=True)
class Row:
    """A line of the table; ``value`` is None if it was not measured, and ``verdict`` says why."""

    text: str
    unit: str
    bar: float
    verdict: str
    value: float | None = None
    spread: tuple[float, float] | None = None
    """The least and the most of the rounds."""


# -- judging: no clocks, no processes --------------------------------------------------------------


def judge(bar: Bar, samples: Samples | None) -> Row:
    """Compare a metric with its bar: the median, or the ratio of medians."""
    if samples is None:
        return Row(bar.text, bar.unit, bar.bar, "not measured")
    mine = next(iter(samples.values()))
    if bar.beside is None:
        numbers = [each * SCALES[bar.unit] for each in mine]
        value = statistics.median(numbers)
    elif bar.beside in samples:
        theirs = samples[bar.beside]
        numbers = [one / other for one, other in zip(mine, theirs, strict=True)]
        value = statistics.median(mine) / statistics.median(theirs)
    else:
        verdict = "no jax" if bar.beside == JAX else "not measured"
        return Row(bar.text, bar.unit, bar.bar, verdict)
    verdict = "PASS" if value <= bar.bar else "FAIL"
    return Row(bar.text, bar.unit, bar.bar, verdict, value, (min(numbers), max(numbers)))


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """The row as text: what, value, bar, verdict, spread."""
    bar = f"{row.bar:g} {row.unit}"
    if row.value is None or row.spread is None:
        return row.text, "", bar, row.verdict, ""
    low, high = row.spread
    return row.text, f"{row.value:.3g} {row.unit}", bar, row.verdict, f"{low:.3g} to {high:.3g}"


HEADER = ("", "measured", "bar", "", "least and most of the rounds")


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    lines = [HEADER, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def page(report: Mapping[str, Any]) -> str:
    """``docs/benchmarks.md`` of a run."""
    rows = [
        Row(**{**row, "spread": row["spread"] and tuple(row["spread"])}) for row in report["rows"]
    ]
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    facts, passed = report["environment"], sum(row.verdict == "PASS" for row in rows)
    quick = ", a quick run" if report["quick"] else ""
    return (
        f"{INTRODUCTION}\n## The last run\n\n{passed} of {len(rows)} bars are met. "
        f"{facts['date'][:10]}{quick}: {facts['cpu']}, {facts['num_cores']} cores,\n"
        f"load {facts['load_average']:.2f} before it; torch {facts['torch']}, "
        f"jax {facts['jax'] or 'not installed'}, Python {facts['python']}.\n\n{text}\n"
    )


INTRODUCTION = """\
# How fast it is

The numbers that this package is held to, from one run of `make bench` on CPU devices. `x` is the
time as a multiple of that of `jax.pmap` (of the large MLP step: of `torch.compile` in one process
with two threads): the ratio of medians of rounds in which both take turns, with the least and the
most of the ratios within rounds. [Benchmarks](../benchmarks/README.md) says what each row times.
This page is written by

```console
$ make bench  # writes outputs/bench.json
$ .venv/bin/python benchmarks/bars.py --page docs/benchmarks.md  # and this page from it
```
"""


# -- measuring: the other programs of this folder --------------------------------------------------


def run(script: str, *arguments: str) -> str:
    """Output of a benchmark in a process of its own, so that none inherits another's workers."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def results_of(script: str, *arguments: str) -> list[dict[str, Any]]:
    """The results that a benchmark writes with ``--output``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        run(script, *arguments, "--output", str(path))
        return json.loads(path.read_text())["results"]


def calibrate(quick: bool) -> dict[Key, Samples]:
    """Have the machine measured for ``f.lower(x).cost().seconds``; no bar is about it."""
    print(run("roofline.py", "--check", "--rounds", "10" if quick else "40"), file=sys.stderr)
    return {}


def calls(quick: bool) -> dict[Key, Samples]:
    sections = list(dict.fromkeys(bar.key[0] for bar in BARS if bar.beside == JAX))
    arguments = ["--only", *sections, "--devices", "2", "4", *(["--quick"] if quick else [])]
    found: dict[Key, Samples] = {}
    for line in results_of("dispatch.py", *arguments):
        found[line["name"], line["metric"], line["num_devices"]] = line["rounds_s"]
    return found


def train(quick: bool) -> dict[Key, Samples]:
    arguments = ["--one-process", *(["--quick"] if quick else [])]
    (line,) = results_of("train_step.py", *arguments)
    return {("train", line["metric"], line["num_devices"]): line["rounds_s"]}


def processes(part: str, *arguments: str) -> dict[Key, Samples]:
    measured = json.loads(run("_processes.py", part, *arguments))
    return {(part, name, None): {"torchpmap": numbers} for name, numbers in measured.items()}


PARTS: dict[str, Callable[[bool], dict[Key, Samples]]] = {
    "calibrate": calibrate,
    "calls": calls,
    "train": train,
    "fresh": lambda quick: processes("fresh", "2" if quick else "5"),
    "idle": lambda quick: processes("idle"),
}


def measure(parts: Sequence[str], quick: bool) -> tuple[dict[Key, Samples], list[str]]:
    """What the bars are about, and the parts that failed: the others are still worth their time."""
    found: dict[Key, Samples] = {}
    failed = []
    for part in parts:
        print(part, file=sys.stderr)
        try:
            found |= PARTS[part](quick)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            failed.append(part)
    return found, failed


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write; or write the page of the last run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, about two minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON of the run")
    parser.add_argument("--page", type=Path, help="do not measure: write the page of --output")
    options = parser.parse_args(argv)
    if options.page is not None:
        options.page.write_text(page(json.loads(options.output.read_text())))
        return
    from _harness import environment

    started = environment()
    found, failed = measure(options.only, options.quick)
    rows = [judge(bar, found.get(bar.key)) for bar in BARS]
    print(table(rows))
    if started["load_average"] > 0.5:
        print("This machine was busy: measure again when it is quiet.")
    report = {
        "environment": started,
        "load_average_at_end": os.getloadavg()[0],
        "quick": options.quick,
        "rows": [vars(row) for row in rows],
        "samples": [{"key": key, "samples": samples} for key, samples in found.items()],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")
    if failed:
        sys.exit(f"These parts failed, see above: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
