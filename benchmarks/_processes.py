"""Whole processes for ``bars.py``: the first results of fresh ones, and what idle devices cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVICES, IDLE_DEVICES, IDLE_S = 4, 8, 10
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def fresh(rounds: int) -> dict[str, list[float]]:
    """Seconds, one per round; a first run, which is not counted, fills the compiler's cache."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHPMAP_DEVICE_TYPE": "cpu"}
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
        program = Path(folder, "readme.py")
        block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert block is not None
        program.write_text(block[1])
        for number in range(rounds + 1):
            measured = first_results(environment) | twenty_lines(program, environment)
            for name, seconds in measured.items():
                if number > 0:
                    found.setdefault(name, []).append(seconds)
    return found


def first_results(environment: Mapping[str, str]) -> dict[str, float]:
    """A process that doubles numbers, and then calls a compiled step."""
    worker = str(Path(__file__).with_name("_first_call.py"))
    # the clock of ``perf_counter`` is the same in every process
    begin = time.perf_counter()
    command = [sys.executable, worker, str(DEVICES), "doubled"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    times = json.loads(done.stdout.splitlines()[-1])
    return {"x * 2": times["ready_at"] - begin, "then a compiled step": times["call"]}


def twenty_lines(program: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """The first program of the README, from outside."""
    begin = time.perf_counter()
    command = [sys.executable, "-u", str(program)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        result = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not line.startswith("tensor"):
        raise RuntimeError(f"README's program ended with {process.returncode}, printed {line!r}")
    return {"README, result": result, "README, end": time.perf_counter() - begin}


def idle() -> dict[str, list[float]]:
    """Seconds of CPU per second, and bytes, of all processes but the caller's (Linux only)."""
    import torch

    import torchpmap as tp

    tp.init(IDLE_DEVICES, device_type="cpu")
    tp.block_until_ready(tp.replicate(torch.ones(3)) * 2)
    time.sleep(2)  # what starting them has left to do
    mine = list(descendants(os.getpid()))
    before, begin = sum(map(cpu_seconds, mine)), time.perf_counter()
    time.sleep(IDLE_S)
    used = (sum(map(cpu_seconds, mine)) - before) / (time.perf_counter() - begin)
    memory = sum(map(proportional_bytes, mine))
    tp.shutdown()
    return {"idle, CPU": [used], "idle, memory": [memory]}


def descendants(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from descendants(child)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def proportional_bytes(process: int) -> int:
    """Memory of a process; of what it shares with others, its part."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    report = idle() if sys.argv[1] == "idle" else fresh(int(sys.argv[2]))
    print(json.dumps(report))
