"""Run the rows of the fault matrix, each at least 20 times, and print the table of docs/faults.md.

    python tests/faults/report.py --runs 20

Most rows have several tests; a row that has been measured often enough is left out from then on.
A row is measured from the moment the caller makes the call that meets the fault to the moment it
has its answer; where the program ends (rows 23 and 24), from its end until nothing of it is left.
"""

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

TABLE = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
ROWS = {int(row): what for row, what in re.findall(r"^\| (\d+) \| (.*?) \|", TABLE, re.MULTILINE)}


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
