"""Jobs that go wrong, each a few processes as ``mpirun`` would start them, with what must come of
it.

    jobs = Jobs()

    @jobs.add(2, fails("CollectiveMismatch"))
    def they_differ(rank): ...

Run as a script this file imports everything once, and forks the processes of the jobs of one module
from itself, because importing torch takes longer than all of them.  Nothing may hang: a process
that does not end is killed, and has no exit code.
"""

import atexit
import importlib
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._decomp
import torch._dynamo
import torch._refs
import torch.fx.experimental.proxy_tensor
from _launched import free_port, of_failed, outputs
from _support import EAGER, SCALE

import torchpmap as tp

LIMIT_S = 40.0
TOGETHER = 4
"""Jobs that run at once: most of their time they wait."""


class Ended(NamedTuple):
    """One process of a job."""

    code: int | None
    """As of ``subprocess``: negative for a signal; None if it hung and was killed."""
    output: str
    """With " @" for the places of functions of the jobs, whose numbers change."""


class Job(NamedTuple):
    num_ranks: int
    function: Callable[[int], Any]
    environment: dict[str, str]
    check: Callable[[list[Ended]], None]


class Jobs(dict[str, Job]):
    """By name."""

    def add(self, num_ranks: int, check: Any, name: str = "", **environment: str) -> Any:
        """``check``: of how the processes ended."""

        def add(function: Callable[[int], Any]) -> Callable[[int], Any]:
            assert (name or function.__name__) not in self
            self[name or function.__name__] = Job(num_ranks, function, environment, check)
            return function

        return add

    def check(self, name: str, processes: list[Ended]) -> None:
        assert len(processes) == self[name].num_ranks
        assert None not in [process.code for process in processes], f"it hangs: {processes}"
        self[name].check(processes)

    def run(self, folder: Path, chosen: list[str]) -> None:
        """Run some, and write down how their processes ended."""
        torch.set_num_threads(1)
        ended = {}
        # one with a time limit of its own starts while no other does
        alone = [name for name in chosen if "TORCHPMAP_TIMEOUT" in self[name].environment]
        others = [name for name in chosen if name not in alone]
        groups = [others[k : k + TOGETHER] for k in range(0, len(others), TOGETHER)]
        for names in [*groups, *([name] for name in alone)]:
            ports: set[int] = set()
            while len(ports) < len(names):  # different ones, although none is taken yet
                ports.add(free_port())
            started = {name: _start(self[name], name, folder, ports.pop()) for name in names}
            codes = _codes([pid for processes in started.values() for pid in processes])
            for name, processes in started.items():
                ended[name] = [Ended(codes.get(pid), _plain(processes[pid])) for pid in processes]
        (folder / "ended").write_bytes(pickle.dumps(ended))


def _start(job: Job, name: str, folder: Path, port: int) -> dict[int, Path]:
    """The process id of each rank, and the file of its output."""
    started = {}
    with patch.dict(os.environ, MASTER_PORT=str(port), TORCHPMAP_TIMEOUT="60"):
        os.environ.update(job.environment)
        os.environ["OMPI_COMM_WORLD_SIZE"] = str(job.num_ranks)
        for rank in range(job.num_ranks):
            os.environ["OMPI_COMM_WORLD_RANK"] = str(rank)
            path = folder / f"{name}{rank}"
            started[_process(job.function, rank, path)] = path
    return started


def _process(function: Callable[[int], Any], rank: int, path: Path) -> int:
    """Fork a process that ends as a script does; its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    output = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        function(rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _plain(path: Path) -> str:
    place = r", defined at (_jobs|test_torchrun_\w+)\.py:\d+"
    return re.sub(place, " @", path.read_text())


def _codes(pids: list[int]) -> dict[int, int]:
    """Wait for all; those that hang are killed, and missing."""
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S * SCALE
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


# -- what jobs do ----------------------------------------------------------------------------------


def total(x: torch.Tensor) -> torch.Tensor:
    return tp.psum(x, "i")


def mapped(function: Callable[..., Any] = total, **options: Any) -> Callable[..., Any]:
    return tp.pmap(function, "i", **{"compile": EAGER, **options})


def warmed_up() -> Callable[..., torch.Tensor]:
    """A mapped sum that every process has called once."""
    sums = mapped()
    sums(torch.ones(1))
    return sums


# -- and how they must end -------------------------------------------------------------------------


def says(output: str, text: str | re.Pattern[str]) -> None:
    found = re.search(text, output) if isinstance(text, re.Pattern) else text in output
    assert found, f"{text!r} is not in:\n{output}"


def fails(*texts: str | re.Pattern[str]) -> Callable[[list[Ended]], None]:
    """All processes fail with these in what they print, and none comes to "a value"."""

    def check(processes: list[Ended]) -> None:
        for output in of_failed(processes):
            for text in texts:
                says(output, text)
            assert "a value" not in output.splitlines()

    return check


def misses_rank_1(text: str | re.Pattern[str], code: int = 0) -> Callable[[list[Ended]], None]:
    """Rank 1 has gone with this code, and rank 0 fails with this text."""

    def check(processes: list[Ended]) -> None:
        assert [process.code for process in processes] == [1, code]
        says(outputs(processes)[0], text)

    return check


if __name__ == "__main__":
    module, folder, *names = sys.argv[1:]
    importlib.import_module(module).jobs.run(Path(folder), names)
