"""Run the rows of the fault matrix several times, and print the table of docs/faults.md.

    python tests/faults/report.py --runs 20

A row is measured from the moment the caller makes the call that meets the fault to the moment it
has its answer, or, where the controller ends, to the end of ``shutdown``.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("-k", default="row", help="which tests, as pytest's -k")
    options = parser.parse_args()
    here = Path(__file__).parent
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        command = [sys.executable, "-m", "pytest", str(here), "-k", options.k, "-n0", "-q"]
        for _ in range(options.runs):
            environment = {**os.environ, "TORCHPMAP_FAULT_TIMES": str(times)}
            failed += subprocess.run(command, env=environment, check=False).returncode != 0
        measured = [json.loads(line) for line in times.read_text().splitlines()]
    found: dict[int, list[float]] = defaultdict(list)
    bounds: dict[int, float] = defaultdict(float)
    for each in measured:
        row = int(re.findall(r"row_(\d+)", each["row"])[-1])
        found[row].append(each["seconds"])
        bounds[row] = max(bounds[row], each["bound"])
    print("| row | what happens | times | median | longest | bound |\n|---|---|---|---|---|---|")
    for row, what in ROWS.items():
        if row in found:
            seconds = f"{median(found[row]):.3f} s | {max(found[row]):.2f} s | {bounds[row]:g} s"
            print(f"| {row} | {what} | {len(found[row])} | {seconds} |")
        else:
            print(f"| {row} | {what} | | | | |")
    print(f"\n{options.runs} runs, {failed} of them with a failure")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
