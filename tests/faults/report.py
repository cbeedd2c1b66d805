"""Run the rows of the fault matrix, each at least 20 times, and print the table of docs/faults.md.

    python tests/faults/report.py --runs 20

Most rows have several tests; a row that has been measured often enough is left out from then on.
A row is measured from the moment the caller makes the call that meets the fault to the moment it
has its answer; where the program ends (rows 23 and 24), from its end until nothing of it is left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROWS = {
    1: "an idle worker is killed",
    2: "a worker is killed while the others wait for it in a collective",
    3: "a worker is killed in the middle of a transfer of 16 MB",
    4: "a worker ends by a crash, `os._exit`, or `sys.exit`",
    5: "workers die while the pool starts; the fork server is killed",
    6: "two workers, or all, die in one call",
    7: "a worker dies again during the repair",
    8: "the function raises on one rank",
    9: "all ranks raise different exceptions",
    10: "the exception cannot be pickled, rebuilt, or printed",
    11: "the function raises under a transform, or inside a compiled call",
    12: "the function swallows the consequence, is busy, or forks",
    13: "ranks run different collectives",
    14: "ranks give different shapes",
    15: "ranks differ in dtype, order, permutation or groups",
    16: "a rank returns early, or joins late",
    17: "an axis is not bound here",
    18: "a loop, a sleep or a lock never ends (`timeout=0.5`)",
    19: "C code holds the interpreter lock (`timeout=0.5`)",
    20: "a worker is stopped by SIGSTOP",
    21: "a rank is slow, and no timeout was given: no error",
    22: "Ctrl-C during a call, once and twice",
    23: "the controller ends by SIGTERM, SIGKILL, `os._exit` or `shutdown`",
    24: "the program ends without `shutdown`, with calls in flight",
    25: "eight threads call; a call inside a call",
    26: "memory or descriptors run out",
    27: "thousands of calls, failures and pools; floods of output",
    28: "bad input",
    29: "strangers connect",
    30: "the same numbers again, on every rank and after a repair",
}


def run(which: str) -> tuple[list[dict[str, Any]], bool]:
    """What a run of tests has measured, and whether they passed."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        times.touch()
        here = str(Path(__file__).parent)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", here, "-k", which, "-n0", "-q"],
            env={**os.environ, "TORCHPMAP_FAULT_TIMES": str(times), "TORCHPMAP_TEST_ALL": "1"},
            stdout=sys.stderr,
            check=False,
        )
        return [json.loads(line) for line in times.read_text().splitlines()], done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("-k", default="row", help="which tests, as pytest's -k")
    options = parser.parse_args()
    passes = failed = 0
    found: dict[int, list[float]] = defaultdict(list)
    bounds: dict[int, float] = defaultdict(float)
    which = options.k
    while which:
        measured, is_good = run(which)
        for each in measured:
            row = int(re.findall(r"row_(\d+)", each["row"])[-1])
            found[row].append(each["seconds"])
            bounds[row] = max(bounds[row], each["bound"])
        passes, failed = passes + 1, failed + (not is_good)
        print({row: len(times) for row, times in sorted(found.items())}, file=sys.stderr)
        scarce = [row for row, times in found.items() if len(times) < options.runs]
        which = " or ".join(f"row_{row:02}_" for row in scarce)
    print("| row | what happens | times | median | longest | bound |\n|---|---|---|---|---|---|")
    for row, what in ROWS.items():
        if row in found:
            seconds = f"{median(found[row]):.3f} s | {max(found[row]):.2f} s | {bounds[row]:g} s"
            print(f"| {row} | {what} | {len(found[row])} | {seconds} |")
        else:
            print(f"| {row} | {what} | | | | |")
    print(f"\n{passes} passes, {failed} of them with a failure")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
