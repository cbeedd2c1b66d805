"""Run the suite on a GPU, with nothing but torch, numpy, cloudpickle and pytest; ``make test-gpu``.

    python tests/gpu.py --output DIR                      # both sections
    python tests/gpu.py --output DIR --section one        # a few minutes
    python tests/gpu.py --output DIR --section shared --part 1/3 --minutes 9

``one`` is one device and NCCL, ``shared`` the whole suite with four workers that share a GPU and
talk through Gloo.  Each test file runs in a process of its own, some at a time.  When it ends, its
result is added to DIR/tests.jsonl, and DIR/tests.md is written anew; files that are in DIR already
are not run again.  Without a GPU the lagging platform stands for it (tests/README.md), on which
``shared`` runs the tests of faults and of waiting.

This file is also the plugin of pytest that writes what each test gave, and limits its time.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import pytest
import torch

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
REPORT = "TORCHPMAP_TEST_REPORT"
"""Names the file to which the plugin writes."""

ONE, SHARED = SECTIONS = ("one", "shared")
ON_ONE_DEVICE = ("runtime/test_one_device.py",)
WHILE_LAGGING = (
    *("faults", "runtime/test_timeouts.py", "runtime/test_waits.py"),
    "transforms/test_donation.py",
)
TEST_S = 120
"""How long a test may take that says nothing about it."""
FILE_S = 480.0
"""How long a file may take."""
TAIL = 3000
"""Characters of a failure that are kept."""


# -- the plugin ------------------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORT in os.environ and (report.when == "call" or report.outcome != "passed"):
        text = report.longreprtext[-TAIL:] if report.failed else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "text": text}
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.config.pluginmanager.hasplugin("timeout"):
        return (yield)
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker else TEST_S

    def end(_: int, frame: FrameType | None) -> None:
        pytest.fail(f"it took longer than {limit:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- one file --------------------------------------------------------------------------------------

RUNNING: set[subprocess.Popen[bytes]] = set()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End it, with all that it has started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    RUNNING.discard(process)


@dataclass
class Ended:
    """What the tests of a file gave."""

    section: str
    file: str
    seconds: float
    counts: dict[str, int]
    failures: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    """Why none of its tests ran."""

    @property
    def is_good(self) -> bool:
        return not self.failures


def run_file(section: str, file: str, has_gpu: bool, limit_s: float) -> Ended:
    """Run the tests of a file in a process of its own."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report", Path(folder) / "log"
        # the first switches off what pyproject.toml wants of pytest-xdist
        options = ("-o", "addopts=", "-p", "gpu", "-p", "no:cacheprovider", "-q", "--color=no")
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, str(TESTS / file)],
                cwd=ROOT,
                env=environment(section, has_gpu) | {REPORT: str(report)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            RUNNING.add(process)
            try:
                code = process.wait(limit_s)
                why = f"it ended with code {code}"
            except subprocess.TimeoutExpired:
                code, why = -1, f"it was killed after {limit_s:.0f} s"
            finally:
                kill(process)
        lines = report.read_text().splitlines() if report.exists() else []
        text = log.read_text(errors="replace")
    ended = Ended(section, file, round(time.monotonic() - begin, 1), {})
    tests = [json.loads(line) for line in lines]
    ended.counts = dict(Counter(test["outcome"] for test in tests))
    ended.failures = {test["test"]: test["text"] for test in tests if test["outcome"] == "failed"}
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", text)
    if code in (2, 4) and not tests and missing:
        ended.left_out = f"it needs {missing[1]}"
    elif code not in (0, 1, 5):  # 5: every test was left out
        ended.failures[file] = f"{why}\n{text[-TAIL:]}"
    return ended


def environment(section: str, has_gpu: bool) -> dict[str, str]:
    """For the tests of a section."""
    own = {name: value for name, value in os.environ.items() if "TORCHPMAP_" not in name}
    own["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    own["TORCHPMAP_TEST_SCALE"] = "2"  # time bounds are those of a quiet machine
    if not has_gpu:
        return own | {"TORCHPMAP_TEST_LAG": "1"}
    shares = "1" if section == SHARED else "0"
    return own | {"TORCHPMAP_TEST_DEVICE": "cuda", "TORCHPMAP_TEST_SHARE": shares}


def files_of(section: str, has_gpu: bool) -> list[str]:
    """The test files of a section."""
    if section == ONE:
        return list(ON_ONE_DEVICE)
    tops = [TESTS / name for name in (("",) if has_gpu else WHILE_LAGGING)]
    found = {path for top in tops for path in (top.rglob("test_*.py") if top.is_dir() else [top])}
    return sorted(str(path.relative_to(TESTS)) for path in found)


# -- all files -------------------------------------------------------------------------------------


def table(ended: Sequence[Ended], waiting: Sequence[tuple[str, str]], where: str) -> str:
    """All results as Markdown."""
    lines = ["# Tests on a GPU", "", where, ""]
    lines += ["| section | files | passed | failed | skipped |", "|---|---|---|---|---|"]
    for section in dict.fromkeys(each.section for each in ended):
        mine = [each for each in ended if each.section == section]
        counts: Counter[str] = Counter()
        for each in mine:
            counts.update(each.counts)
        # a file that was killed, or does not import, has failed without a test that did
        failed = max(counts["failed"], sum(len(each.failures) for each in mine))
        lines.append(
            f"| {section} | {len(mine)} | {counts['passed']} | {failed} | {counts['skipped']} |"
        )
    left_out = [f"* {each.section} {each.file}: {each.left_out}" for each in ended if each.left_out]
    lines += ["", "## Left out", "", *left_out] if left_out else []
    later = [f"* {section} {file}" for section, file in waiting]
    lines += ["", "## Not run yet", "", *later] if later else []
    for each in ended:
        for name, text in each.failures.items():
            lines += ["", f"## {each.section} {name}", "", "```text", text.strip(), "```"]
    return "\n".join(lines) + "\n"


def described() -> tuple[bool, str]:
    """Whether there is a GPU, and what all this runs on."""
    has_gpu = torch.cuda.device_count() > 0
    version = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    if not has_gpu:
        return False, f"No GPU here: the lagging platform stands for it. {version}"
    # not in this process: workers could not be forked from one that uses the GPU
    ask = "import torch; print(torch.cuda.get_device_name(0))"
    name = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout
    return True, f"{torch.cuda.device_count()} x {name.strip()}, {version}"


def run_all(options: argparse.Namespace, has_gpu: bool, where: str) -> list[Ended]:
    """Run what is wanted and not done yet; write each result when it is there."""
    journal: Path = options.output / "tests.jsonl"
    done = []
    if journal.exists():
        done = [Ended(**json.loads(line)) for line in journal.read_text().splitlines()]
    number, parts = options.part
    known = {(each.section, each.file) for each in done}
    waiting = [
        (section, file)
        for section in options.section
        for file in (options.files or files_of(section, has_gpu))[number - 1 :: parts]
        if (section, file) not in known
    ]
    deadline = time.monotonic() + 60 * options.minutes

    def run(work: tuple[str, str]) -> Ended | None:
        left = deadline - time.monotonic()
        return run_file(*work, has_gpu, min(left, FILE_S)) if left > 5 else None

    with ThreadPoolExecutor(options.jobs) as threads:
        try:
            for each in as_completed([threads.submit(run, work) for work in waiting]):
                ended = each.result()
                if ended is not None:
                    done.append(ended)
                    waiting.remove((ended.section, ended.file))
                    note(ended, journal)
                    (options.output / "tests.md").write_text(table(done, waiting, where))
        except BaseException:  # Ctrl-C does not reach the files, which are in sessions of their own
            threads.shutdown(wait=False, cancel_futures=True)
            for process in tuple(RUNNING):
                kill(process)
            raise
    print("".join(f"not run yet: {section} {file}\n" for section, file in waiting), end="")
    return done


def note(ended: Ended, journal: Path) -> None:
    with journal.open("a") as file:
        file.write(json.dumps(asdict(ended)) + "\n")
    said = ended.left_out or ", ".join(f"{n} {what}" for what, n in ended.counts.items())
    verdict = "ok" if ended.is_good else "FAILED"
    print(f"{verdict:6} {ended.section} {ended.file}: {said} ({ended.seconds} s)", flush=True)


def part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise ValueError
    return int(number), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(description="Run the suite on a GPU.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--part", type=part, default=(1, 1), help="K/N: every N-th file from the K-th"
    )
    parser.add_argument("--files", nargs="+", help="of tests/, in place of those of the section")
    parser.add_argument("--minutes", type=float, default=25, help="no file is begun after these")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=max(1, cores // 4), help="files at a time")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C
    options.output.mkdir(parents=True, exist_ok=True)
    has_gpu, where = described()
    print(where, flush=True)
    done = run_all(options, has_gpu, where)
    print(f"written to {options.output}/tests.jsonl and tests.md")
    return 0 if all(each.is_good for each in done) else 1


if __name__ == "__main__":
    sys.exit(main())
