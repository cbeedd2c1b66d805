"""Start a script as several processes, as ``torchrun`` does, and read what each rank wrote; or a
program of one process, and see what it leaves behind.

finished = launch(2, "script.py", str(folder))
assert finished.code == 0, finished.output
"""

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _leftovers import MARK, marked
from _support import DEVICE, SCALE, names_to_run, wait_for

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LIMIT_S = 100.0


@dataclass(frozen=True)
class Finished:
    """How a launched job ended."""

    code: int
    output: str


def launch(num_ranks: int, *command: str, limit_s: float = LIMIT_S, **options: Any) -> Finished:
    """Run ``torchrun --nproc-per-node=num_ranks command`` to its end; a job that does not end is
    killed, and a failure. ``options``: of ``Job``.
    """
    return Job(num_ranks, *command, **options).wait(limit_s)


class Job:
    """A launched job that still runs."""

    def __init__(
        self,
        num_ranks: int,
        *command: str,
        options: tuple[str, ...] = ("--standalone",),
        environment: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._output: str | None = None
        torchrun = (sys.executable, "-m", "torch.distributed.run", *options)
        self._process = subprocess.Popen(
            [*prefix, *torchrun, f"--nproc-per-node={num_ranks}", *command],
            env=_environment(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, limit_s: float = LIMIT_S) -> Finished:
        try:
            self._output, _ = self._process.communicate(timeout=limit_s * SCALE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs; its output so far:\n{self.kill()}") from None
        return Finished(self._process.returncode, self._output)

    def kill(self) -> str:
        """End it, if it has not; its output."""
        if self._output is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._output, _ = self._process.communicate()
        return self._output


def run_program(
    *arguments: str, fails: bool = False, limit_s: float = LIMIT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a program in Python printed, run in a process of its own; it must succeed, or fail."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=limit_s * SCALE,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def succeed(*jobs: Job) -> None:
    """Wait for jobs that need each other; raise, with what each has written, if any fails."""
    try:
        codes = [job.wait().code for job in jobs]
    except AssertionError:
        codes = []
    if any(codes) or not codes:
        outputs = [f"-- job {number}:\n{job.kill()}" for number, job in enumerate(jobs)]
        raise AssertionError("\n".join(["a job hangs or fails", *outputs]))


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in ("TORCHPMAP_TEST_PLATFORM", "TORCHPMAP_TEST_DEVICE")
        or (not name.startswith(("TORCHPMAP_", "GLOO_")) and name not in ("MASTER_ADDR", "RANK"))
    }
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    return {
        **inherited,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",  # torchrun would say that it sets it
        "TORCHPMAP_DEVICE_TYPE": DEVICE,
        "TORCHPMAP_TIMEOUT": "60",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **more,
    }


# -- one program -----------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, threading, time
import torch, torchpmap as tp
EAGER = {"backend": "eager"}
def pids():
    ask = tp.pmap(lambda x: torch.tensor(os.getpid()), compile=False)
    return ask(torch.zeros(tp.device_count())).tolist()
"""


def script(*parts: str, **environment: str) -> "Program":
    """A controller of its own, in which ``pids()`` asks for its workers."""
    return Program("-c", "\n".join([HEAD, *map(textwrap.dedent, parts)]), **environment)


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it left running."""

    code: int | None
    """As of ``subprocess``: negative for a signal; None if the program hung and was killed."""
    output: str
    left: list[int]
    """Its processes that still run."""
    files: list[str]
    """What it made in the folders for temporary files and shared memory."""
    seconds: float
    """After which nothing was left, or all patience."""

    def clean(self, code: int = 0) -> str:
        """The output of a program that has ended with this code, and has left nothing."""
        assert self.code == code, self.output
        assert not self.left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in self.left]
        assert not self.files
        return self.output


class Program:
    """Python in a session of its own; its standard error goes where its output goes."""

    def __init__(
        self, *arguments: str, stdin: str = "", cwd: Path | None = None, **environment: str
    ) -> None:
        self._mark, self._stdin = str(uuid.uuid4()), stdin
        self._folder = tempfile.TemporaryDirectory()
        self._shared = set(os.listdir("/dev/shm"))
        own = {"TORCHPMAP_WARM": "0", "TMPDIR": self._folder.name, MARK: self._mark}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **own, **environment},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, seconds: float = 90.0, *, patience: float = 2.0) -> Ended:
        """Wait for its end; what is still there ``patience`` seconds later is left behind."""
        code: int | None
        try:
            output, _ = self.process.communicate(self._stdin, timeout=seconds * SCALE)
            code = self.process.returncode
        except subprocess.TimeoutExpired:
            self._end()
            output, _ = self.process.communicate()
            code = None
        over = time.monotonic()
        wait_for(lambda: not marked(self._mark) and not self._files(), patience)
        ended = Ended(code, output, marked(self._mark), self._files(), time.monotonic() - over)
        self._end()
        self._folder.cleanup()
        return ended

    def _files(self) -> list[str]:
        """But for the compiler's cache, which is to stay."""
        shared = [name for name in os.listdir("/dev/shm") if "torchpmap" in name]
        new = [*os.listdir(self._folder.name), *(set(shared) - self._shared)]
        return [name for name in new if not name.startswith("torchinductor")]

    def _end(self) -> None:
        for pid in marked(self._mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


# -- many small jobs -------------------------------------------------------------------------------


def jobs_of(request: pytest.FixtureRequest, folder: Path, **settings: str) -> dict[str, Any]:
    """Run those jobs of a test file (see ``runtime/_jobs.py``) that are to be tested: by name, how
    each of their processes ended.
    """
    names = names_to_run(request, "test_the_processes_of_a_job")
    program = str(TESTS / "runtime" / "_jobs.py")
    command = [sys.executable, program, request.module.__name__, str(folder), *names]
    subprocess.run(command, env=_environment(settings), check=True, stdin=subprocess.DEVNULL)
    found: dict[str, Any] = pickle.loads((folder / "ended").read_bytes())
    return found


class Runs:
    """Unpickling it prints."""

    def __reduce__(self) -> Any:
        return print, ("EXECUTED",)


def outputs(processes: Any) -> list[str]:
    """What each printed, without the prefix that torch gives to lines of uncaught exceptions."""
    return [re.sub(r"^\[rank\d\]: ?", "", text, flags=re.MULTILINE) for _, text in processes]


def of_failed(processes: Any) -> list[str]:
    """What each printed, where all have failed."""
    assert {code for code, _ in processes} == {1}
    return outputs(processes)


# -- many small cases in one job -------------------------------------------------------------------


@dataclass(frozen=True)
class Raised:
    """A case ended with an exception."""

    kind: str
    text: str


def run_cases(cases: Mapping[str, Callable[[], Any]], folder: str) -> None:
    """In a rank: run the cases one after the other, and write down what each gave."""
    answers: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            answers[name] = case()
        except Exception as error:
            answers[name] = Raised(type(error).__name__, str(error))
    path = Path(folder) / f"rank{os.environ['RANK']}"
    with path.open("wb") as file:
        pickle.dump(answers, file)


def answers(num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What the ranks of ``run_cases`` wrote."""
    found = []
    for rank in range(num_ranks):
        with (folder / f"rank{rank}").open("rb") as file:
            found.append(pickle.load(file))
    return found


def check(got: Any, expected: Any, where: str) -> None:
    """Raise ``AssertionError`` unless a rank got what is expected."""
    if isinstance(expected, Raised):
        assert isinstance(got, Raised), f"{where}: {got!r}"
        assert got.kind == expected.kind, f"{where}: {got}"
        assert expected.text in got.text, f"{where}: {got}"
    elif isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: {got!r}"
        # the order of additions in a kernel is another one than on the host
        rough = DEVICE != "cpu" and expected.dtype == torch.float32
        near = {"rtol": 5e-5, "atol": 1e-5} if rough else {}
        torch.testing.assert_close(got, expected, **near, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected), f"{where}: {got!r}"
        assert len(got) == len(expected), f"{where}: {got!r}"
        for place, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
            check(mine, wanted, f"{where}[{place}]")
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), f"{where}: {got!r}"
        for key, wanted in expected.items():
            check(got[key], wanted, f"{where}[{key!r}]")
    else:
        assert got == expected, where


def host(tree: Any) -> Any:
    """A tree of results as plain tensors."""
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree
    )
