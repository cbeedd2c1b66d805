"""What the tests of the runtime share: waiting, processes, and the handles on a running pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torchpmap as tp
from torchpmap import _current

EAGER = {"backend": "eager"}
"""``compile=`` of tests that are not about compiling: the traced graph is run as it is."""

SCALE = float(os.environ.get("TORCHPMAP_TEST_SCALE", "1"))
"""Factor on all time bounds, for slow machines."""


def wait_for(predicate: Callable[[], object], seconds: float = 2.0) -> bool:
    """Poll until ``predicate`` is true; False if it is not after ``seconds`` (times SCALE)."""
    end = time.monotonic() + seconds * SCALE
    pause = 0.0005
    while not predicate():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def worker_pids(num_devices: int = 4) -> list[int]:
    """Process id of the worker of every device, asked of the workers themselves."""
    ask = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)
    return ask(torch.zeros(num_devices)).tolist()


def known_pids() -> list[int | None]:
    """Process ids of the current pool as the controller knows them; None: not running now."""
    runtime = _current._runtime
    workers = {} if runtime is None or runtime.closed else runtime._pool.workers
    found: list[int | None] = []
    for worker in workers.values():
        try:
            found.append(worker.process.pid)
        except ValueError:  # being replaced
            found.append(None)
    return found


def stat(pid: int | str) -> tuple[str, int, int] | None:
    """(state, parent, session) of a process, or None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[3])


def is_running(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    found = stat(pid)
    return found is not None and found[0] not in "ZX"


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_fds(pid: int | str = "self") -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
