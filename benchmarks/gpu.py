"""The first half hour on one GPU: whether it works, how fast, how much memory, what faults cost.

    python benchmarks/gpu.py --output DIR                        # all sections
    python benchmarks/gpu.py --output DIR --sections smoke latency

See README.md beside this file.  Nothing but torch, numpy and cloudpickle is needed, and no network.
Each section runs in a process of its own, for a limited time, and adds its results to
DIR/journal.jsonl at once; DIR/results.json and DIR/table.md have them all.  Without a GPU the
lagging platform stands for it, and sizes are small: that tests the script, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _gpu.table import compared, rendered
from _harness import environment

HERE = Path(__file__).resolve().parent
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


@dataclass(frozen=True)
class Section:
    """Where a section is, and how its process is started."""

    module: str
    function: str
    limit_s: float
    launcher: tuple[str, ...] = ()
    shares: bool = False
    """Whether two workers use one GPU, if there is only one."""


SECTIONS = {
    "smoke": Section("smoke", "run", 200),
    "jit": Section("jit", "run", 200),
    "jit-shared": Section("jit", "shared", 200, shares=True),
    "latency": Section("latency", "run", 240),
    "memory": Section("memory", "run", 100),
    "faults": Section("faults", "run", 120),
    "collective-faults": Section("faults", "collectives", 120, shares=True),
    "training": Section("training", "local", 250),
    "training-torchrun": Section("training", "torchrun", 190, launcher=LAUNCHER),
    "training-jit": Section("training", "jit", 190),
    "training-compile": Section("training", "compiled", 150),
    "graphs": Section("compiling", "graphs", 150),
    "dropout": Section("compiling", "dropout", 100),
    "first-call": Section("compiling", "first_call", 200),
}
MINUTES = 29.0


# -- in the process of a section -------------------------------------------------------------------


def run_section(name: str, journal: Path, device_type: str) -> None:
    from _gpu.bench import Bench

    section = SECTIONS[name]
    function = getattr(importlib.import_module(f"_gpu.{section.module}"), section.function)
    function(Bench(name, journal, device_type))


# -- in the first process --------------------------------------------------------------------------


def started(name: str, journal: Path, device_type: str) -> tuple[int | None, float, str]:
    """Run a section in a process of its own: its exit code (None: killed), seconds, last words."""
    section, begin = SECTIONS[name], time.monotonic()
    mine = ("--inside", name, "--output", str(journal.parent), "--device", device_type)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *section.launcher, sys.argv[0], *mine],
            env=variables(section, device_type),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(section.limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, time.monotonic() - begin, log.read()[-3000:]


def variables(section: Section, device_type: str) -> dict[str, str]:
    """The environment of a section."""
    found = {name: value for name, value in os.environ.items() if "TORCHPMAP_" not in name}
    here = str(HERE.parent), str(HERE.parent / "tests")
    path = [*here, *filter(None, [os.environ.get("PYTHONPATH")])]
    found |= {"PYTHONPATH": os.pathsep.join(path), "TORCHPMAP_DEVICE_TYPE": device_type}
    if device_type == "cpu":
        stand_in = "_platforms:Lagging"
        found |= {"TORCHPMAP_TEST_PLATFORM": stand_in, "TORCHPMAP_WARM": "0"}
        return found | {"OMP_NUM_THREADS": "1"}
    if section.shares and torch.cuda.device_count() == 1:
        found["TORCHPMAP_TEST_PLATFORM"] = "_platforms:SharedCuda"
    return found


def described(device_type: str) -> dict[str, Any]:
    """The machine and the versions that are measured."""
    found = environment()
    for name in ("jax", "jaxlib"):
        del found[name]
    if device_type == "cpu":
        return found | {"gpu": None}
    # not in this process, whose children must be able to use the GPU alone
    ask = "import json, torch; p = torch.cuda.get_device_properties(0); "
    ask += "print(json.dumps([p.name, p.total_memory, torch.version.cuda or torch.version.hip, "
    ask += "torch.cuda.nccl.version()]))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    with contextlib.suppress(ValueError):
        name, memory, version, nccl = json.loads(done.stdout)
        found |= {"gpu": name, "gpu_memory_GB": round(memory / 2**30, 1), "cuda": version}
        found |= {"nccl": nccl, "gpus": torch.cuda.device_count()}
    return found


def read(journal: Path) -> list[dict[str, Any]]:
    """All lines of a journal; the last may be torn."""
    found = []
    for line in journal.read_text().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def write(output: Path, machine: Mapping[str, Any], waiting: Sequence[str]) -> list[dict[str, Any]]:
    lines = read(output / "journal.jsonl")
    lines += compared(lines)
    report = {"environment": machine, "not_run": list(waiting), "results": lines}
    (output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (output / "table.md").write_text(rendered(machine, lines, waiting))
    return lines


def forget(journal: Path, sections: Sequence[str]) -> None:
    """Remove what an earlier run of these sections wrote."""
    kept = [line for line in read(journal) if line["section"] not in sections]
    journal.write_text("".join(json.dumps(line) + "\n" for line in kept))


def main() -> int:
    """0 unless a section did not reach its end, or something was not as it must be."""
    parser = argparse.ArgumentParser(description="Measure torchpmap on one GPU.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="none is begun after these")
    parser.add_argument("--inside", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device_type = options.device or ("cuda" if torch.cuda.device_count() else "cpu")
    journal = options.output / "journal.jsonl"
    if options.inside:
        run_section(options.inside, journal, device_type)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a section is ended with this process
    options.output.mkdir(parents=True, exist_ok=True)
    machine = described(device_type)
    if device_type == "cpu":
        print("No GPU here: this tests the script on the lagging platform, and measures nothing.")
    else:
        print(
            f"{machine.get('gpu')}, torch {machine['torch']}, at most {options.minutes:g} minutes"
        )
    forget(journal, options.sections)
    waiting, end = list(options.sections), time.monotonic() + 60 * options.minutes
    good = True
    while waiting and time.monotonic() < end:
        name = waiting.pop(0)
        code, seconds, words = started(name, journal, device_type)
        ended = {"section": name, "ended": code, "seconds": round(seconds, 1)}
        with journal.open("a") as file:
            file.write(json.dumps(ended | ({"log": words} if code != 0 else {})) + "\n")
        mine = [line for line in write(options.output, machine, waiting) if line["section"] == name]
        wrong = [line["name"] for line in mine if line.get("passed") is False]
        good = good and code == 0 and not wrong
        verdict = "ok" if code == 0 and not wrong else "FAILED"
        print(f"{verdict:6} {name}: {seconds:.0f} s {', '.join(wrong)}".rstrip(), flush=True)
    print("".join(f"not run: {name}\n" for name in waiting), end="")
    print(f"written to {options.output}/results.json and table.md")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
