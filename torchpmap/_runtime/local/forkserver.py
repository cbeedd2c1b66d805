"""The process from which workers are forked, and how it is asked for one.

It imports torch once, so that a worker starts in milliseconds, and the compiler when it is told
that graphs will be compiled: that takes twice as long again, and a script that compiles nothing
should not wait for it.  It is like the fork server of
``multiprocessing``, except that

* its ``sys.path`` is that of this process, without the current folder that ``python -c`` would add
  (``multiprocessing`` starts its fork server so);
* it listens nowhere, and has no folder: requests come over a socket that it inherits;
* if it or this process is killed or stopped, no wait is endless and no process is left: a pipe that
  only this process keeps open kills the fork server when it closes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import NamedTuple

from torchpmap._base.config import Config, config
from torchpmap._base.deadline import Deadline
from torchpmap._base.devices import has_accelerator
from torchpmap._base.errors import PmapError, RuntimeClosed

FORK, LOAD = b"F", b"L"
"""Requests: a worker, with descriptors; and that the next ones have the compiler in memory."""
ANSWER = struct.Struct("<q")  # pid (or minus an errno); with a pidfd
EXIT = struct.Struct("<qq")  # pid and exit code of a worker

_ATTEMPTS = 2
_IMPORT_S = 300.0
"""Longer than any import takes."""
_STOPPED_S = 5.0
"""How long a fork server may be stopped before it is replaced."""
_LOOK_S = 0.1
_END_S = 1.0


class Fds(NamedTuple):
    """The descriptors of a request that a worker keeps.  Three others come first: the socket for
    the answer, the pickled ``WorkerArgs``, and the pipe for the exit code.
    """

    command: int
    control: int
    lifeline: int
    output: int
    errors: int
    store: int
    progress: int
    bell: int
    landing: int
    common: int
    stacks: int
    staging: int


class WorkerArgs(NamedTuple):
    """What a worker is told when it starts."""

    rank: int
    device_type: str
    num_threads: int
    config: Config
    path: list[str]
    argv: list[str]
    folder: str | None
    variables: dict[str, str | None]
    """Of the environment, that are others than in the fork server; None: it has none any more."""


class ForkServer:
    """Started when it is first needed, and again when it is gone (any thread)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for moments only
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lifeline = -1
        self._environment: dict[str, str] = {}
        """Of this process when the other one was started."""
        self.is_compiler_wanted = False
        self._is_loading = False
        """Whether the process was told so."""
        self._has_forked = False
        self._is_warm = True

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def ensure_running(self) -> None:
        """Start it if need be; returns at once, while its imports run."""
        self._unless_busy(self._ensure_running)

    def expect_compiling(self) -> None:
        """Let the compiler be in the memory of the workers that are forked from now on."""
        if not self.is_compiler_wanted:
            self.is_compiler_wanted = True
            self._unless_busy(lambda: None if self._has_forked else self._load())

    def _unless_busy(self, work: Callable[[], object]) -> None:
        """Do what another thread does before it forks a worker, unless it does so now."""
        if self._lock.acquire(blocking=False):
            try:
                work()
            finally:
                self._lock.release()

    def _load(self) -> None:
        """Tell the process to import the compiler, if it is wanted and was not told."""
        if self._channel is not None and self.is_compiler_wanted and not self._is_loading:
            self._is_loading = True
            self._send(LOAD)

    def _send(self, request: bytes, fds: Sequence[int] = ()) -> None:
        """As ``socket.send_fds``, which takes no flags (Python 3.11)."""
        assert self._channel is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        # where it is gone, no answer will come
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendmsg([request], rights, socket.MSG_NOSIGNAL)

    def fork(
        self, data: bytes, fds: Sequence[int], is_wanted: Callable[[], bool]
    ) -> tuple[int, int]:
        """Pid and pidfd of a new worker that gets ``data`` and copies of ``fds``; waits for the
        imports.

        Raises:
            RuntimeClosed: the worker is not wanted any more.
            OSError: there are no descriptors, no memory or no processes left.
            PmapError: the fork server cannot be started.
        """
        memory = os.memfd_create("torchpmap-worker", os.MFD_CLOEXEC)
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            for _ in range(_ATTEMPTS):
                answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with answer:
                    with theirs, self._lock:
                        process = self._ensure_running()
                        _hand_on_limit(process.pid)
                        self._load()
                        self._has_forked = True
                        self._send(FORK, [theirs.fileno(), memory, *fds])
                    found = _answered(answer, process.pid, is_wanted)
                if found is not None:
                    return found
                with self._lock:  # the fork server is gone, or never answers
                    if self._process is process:
                        self._end()
        finally:
            os.close(memory)
        raise PmapError(
            "the process from which workers are forked does not start, or ends again and again; "
            "its output on stderr says why."
        )

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        is_warm, process = config.warm, self._process
        if process is not None and process.poll() is None and (self._is_warm or not is_warm):
            return process
        self._end()
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                their_lifeline, lifeline = os.pipe()
                undo.callback(os.close, lifeline)
                try:
                    process = self._process = _spawn(theirs.fileno(), their_lifeline, is_warm)
                finally:
                    os.close(their_lifeline)
            undo.pop_all()
        self._channel, self._lifeline, self._environment = ours, lifeline, dict(os.environ)
        self._has_forked, self._is_loading, self._is_warm = False, False, is_warm
        self._load()
        atexit.unregister(self.stop)
        atexit.register(self.stop)
        return process

    def changed_variables(self) -> dict[str, str | None]:
        """Of the environment, since the process was started."""
        before, now = self._environment, dict(os.environ)
        return {k: now.get(k) for k in before.keys() | now if before.get(k) != now.get(k)}

    def stop(self) -> None:
        """End it at exit, when no worker is wanted any more."""
        if self._lock.acquire(timeout=_END_S):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        """End it, even if it is stopped: closing its lifeline kills it."""
        self._close_channel()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.kill()
                process.wait(_END_S)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            os.close(self._lifeline)
            self._channel, self._lifeline = None, -1

    def in_forked_child(self) -> None:
        """In a forked child: the fork server is the parent's."""
        self._lock = threading.Lock()
        self._close_channel()
        if self._process is not None:
            self._process.returncode = 0  # else Popen warns that the process still runs
            self._process = None


def _answered(
    answer: socket.socket, forks: int, is_wanted: Callable[[], bool]
) -> tuple[int, int] | None:
    """Pid and pidfd of a new worker; None if the fork server, whose pid is ``forks``, will not
    answer.
    """
    poll = select.poll()
    poll.register(answer, select.POLLIN)
    deadline, stopped = Deadline(_IMPORT_S), None
    while not deadline.passed and (stopped is None or not stopped.passed):
        if not is_wanted():
            raise RuntimeClosed("the pool was shut down while its workers started")
        if poll.poll(int(1000 * _LOOK_S)):
            message, fds, _, _ = socket.recv_fds(answer, ANSWER.size, 1)
            if not message:
                return None
            (pid,) = ANSWER.unpack(message)
            if pid > 0 and fds:
                return pid, fds[0]
            # a worker whose pidfd could not be received ends, since its other descriptors are
            # closed
            number = errno.EMFILE if pid > 0 else -pid
            raise OSError(number, os.strerror(number))
        if process_state(forks) not in ("T", "t"):
            stopped = None
        elif stopped is None:
            stopped = Deadline(_STOPPED_S)
    return None


def _hand_on_limit(pid: int) -> None:
    """Let a process, and those that it forks, have as many descriptors as this one may have now."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # it has ended, or this process may not
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _spawn(channel: int, lifeline: int, is_warm: bool) -> subprocess.Popen[bytes]:
    python_path = os.environ.get("PYTHONPATH")
    args, environment = command(
        "from torchpmap._runtime.local.preload import prepare, serve; "
        f"prepare(); serve({channel}, {lifeline}, {python_path!a}, {not has_accelerator()})"
    )
    environment["TORCHPMAP_WARM"] = str(int(is_warm))  # ``tp.config`` is not known there
    # the server ignores Ctrl-C only after its start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            args, stdin=subprocess.DEVNULL, pass_fds=(channel, lifeline), env=environment
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def command(code: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a Python that runs ``code`` with the ``sys.path`` of this
    process.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if "-I" not in flags and "-P" not in flags:
        flags.append("-P")  # else ``-c`` puts the current folder first
    environment = dict(os.environ)
    if "PYTHONPATH" in environment:
        # a relative folder may be another one now than when this process started
        absolute = filter(os.path.isabs, environment["PYTHONPATH"].split(os.pathsep))
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    code = f"import sys; sys.path[:] = {import_path()!a}; {code}"
    return [spawn.get_executable(), *flags, "-c", code], environment


def import_path() -> list[str]:
    """Where this process looks for modules."""
    return [entry for entry in sys.path if type(entry) is str]


def process_state(pid: int) -> str:
    """As in ``/proc/PID/stat``: T is stopped by a signal, t by a debugger; "" if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def child_programs(pid: int) -> list[str]:
    """The names of the programs that a process has started, and that still run."""
    found = []
    with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{child}/comm").read_text().strip()
                    if process_state(int(child)) not in ("Z", "") and "python" not in name:
                        found.append(name)
    return found


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """If there are no file descriptors left, raise an error that says what to do about it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or error.__cause__ is not None:
            raise
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: no file descriptor is left to start a worker, which "
            f"takes about 20. The limit of this process is {soft} (at most {hard}): raise it "
            "(`ulimit -n`), or close files.",
        ) from error


server = ForkServer()
os.register_at_fork(after_in_child=server.in_forked_child)
