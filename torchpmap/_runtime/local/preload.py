"""The fork server's own side: pays the imports once for all workers, then forks one for each
request.  It pays those of the compiler, and one compilation, when it is told to.

It must start no thread and must never touch CUDA, or forked workers would be broken.
"""

# ruff: noqa: E402 - what is set first must be set before the imports

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

gc.disable()  # the objects made below stay: traversing them again and again takes 0.8 s

# Inductor would start a pool of compile processes, and probe the C++ compiler four times (6 s) for
# vector instructions that /proc/cpuinfo lists already.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch

from torchpmap._base.config import config
from torchpmap._runtime.local import worker
from torchpmap._runtime.local.forkserver import (
    ANSWER,
    EXIT,
    LOAD,
    Fds,
    WorkerArgs,
)
from torchpmap._runtime.local.worker_setup import arm_lifeline, leave_signals_to_controller
from torchpmap._trace.toolchain import cpp_compiler, import_inductor, warm_up

torch.set_num_threads(1)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_IDLE_MS = 1000


def _keep_memory() -> None:
    """Let glibc keep freed pages: fresh ones make a 64 MB operation three times slower."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def prepare() -> None:
    """Begin, after the imports."""
    _keep_memory()
    _keep_objects()


def _keep_objects() -> None:
    gc.freeze()  # workers do not traverse these objects either, so their pages stay shared
    gc.enable()


@contextlib.contextmanager
def _for_workers() -> Iterator[None]:
    """Keep for all workers what the block loads; where it fails, they do it and report why."""
    gc.disable()
    with contextlib.suppress(Exception):
        yield
    _keep_objects()


def load_package() -> None:
    """Pay what every worker would whose functions name the package, as ``tp.psum`` does."""
    with _for_workers():
        importlib.import_module("torchpmap._api")


def load_compiler(*, compiles: bool) -> None:
    """Pay what every worker that compiles would.  ``compiles``: whether to compile; with an
    accelerator visible Inductor would ask for its state, and so initialise it.
    """
    with _for_workers():
        if config.warm and not compiles:
            import_inductor()
        elif config.warm and cpp_compiler():
            warm_up()  # every worker starts with Inductor's modules and tables in memory


def serve(channel_fd: int, lifeline: int, python_path: str | None, compiles: bool) -> NoReturn:
    """Fork workers until the controller is gone; never returns.  ``compiles``: as in
    ``load_compiler``.
    """
    leave_signals_to_controller()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    arm_lifeline(lifeline)
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path
    channel = socket.socket(fileno=channel_fd)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    exit_pipes: dict[int, int] = {}  # by pid
    # an exit code is reported at once, also in the middle of an import
    signal.signal(signal.SIGCHLD, lambda *_: _reap(exit_pipes))
    has_package = False
    while True:
        # the first workers are wanted at once; those that come later have the package in memory
        idles = exit_pipes and not has_package
        if not poll.poll(_IDLE_MS if idles else None):
            load_package()
            has_package = True
            continue
        request, fds, _, _ = socket.recv_fds(channel, len(LOAD), len(Fds._fields) + 3)
        if not request:
            os._exit(0)
        if request == LOAD:
            load_compiler(compiles=compiles)
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # ``exit_pipes`` stays as it is
        pid, pidfd = _fork(fds, [channel.fileno(), lifeline, *exit_pipes.values()])
        if pid > 0:
            exit_pipes[pid] = fds.pop(2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if fds:  # else there is no room for any, and no answer either: this process is replaced
            with socket.socket(fileno=fds.pop(0)) as answer, contextlib.suppress(OSError):
                socket.send_fds(answer, [ANSWER.pack(pid)], pidfd)  # if it is still waited for
        for each in (*fds, *pidfd):
            os.close(each)


def _reap(exit_pipes: dict[int, int]) -> None:
    """Report the exit codes of workers that have ended (a signal handler: may interrupt itself)."""
    for pid in tuple(exit_pipes):
        found = status = 0
        with contextlib.suppress(ChildProcessError):  # the call within this one has reported it
            found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            pipe = exit_pipes.pop(pid)
            with contextlib.suppress(OSError):  # the controller has closed its end
                os.write(pipe, EXIT.pack(pid, os.waitstatus_to_exitcode(status)))
            os.close(pipe)


def _fork(fds: Sequence[int], not_theirs: Sequence[int]) -> tuple[int, list[int]]:
    """Pid of a new worker and its pidfd; minus an errno if there can be none."""
    try:
        if len(fds) < len(Fds._fields) + 3:  # some could not be received
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
        if pid == 0:
            _become_worker(fds, not_theirs)
        return pid, [os.pidfd_open(pid)]
    except OSError as error:
        return -(error.errno or 1), []


def _become_worker(fds: Sequence[int], not_theirs: Sequence[int]) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        answer, data, exit_pipe, *inherited = fds
        for fd in (*not_theirs, answer, exit_pipe):
            os.close(fd)
        with open(data, "rb") as file:
            file.seek(0)
            args: WorkerArgs = pickle.load(file)
        sys.path[:], sys.argv[:] = args.path, args.argv
        if args.folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(args.folder)
        multiprocessing.current_process().name = f"torchpmap-{args.device_type}:{args.rank}"
        # with "forkserver" any lock that a library makes (tqdm's, while Inductor compiles) is a
        # named semaphore, reported as leaked at exit
        multiprocessing.set_start_method("fork", force=True)
        worker.main(args, Fds(*inherited))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
