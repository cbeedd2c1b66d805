"""Start one worker through ``torch.multiprocessing``'s fork server, without the ``__main__`` guard.

The fork server is preloaded with torch and this package (see ``_template``), so a worker is forked
in milliseconds.  Usual ``multiprocessing`` children re-import the user's main module, which is why
scripts need ``if __name__ == "__main__"``; our workers get graphs or pickled functions and never
need it, so ``_GuardlessPopen`` leaves it out of what the child prepares.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn, util
from typing import Any

import torch.multiprocessing

from torchpmap._config import Config
from torchpmap._runtimes._progress import Progress
from torchpmap._runtimes._worker import Birth, main
from torchpmap._wire import FrameReader, InheritedFd

__all__ = ["WorkerProcess", "preload"]

_PRELOAD = "torchpmap._runtimes._template"


def preload() -> None:
    """Start the fork server in the background (returns at once); its imports run while the caller
    goes on.
    """
    torch.multiprocessing.get_context("forkserver")  # registers torch's reductions
    server: Any = forkserver._forkserver
    wanted = [name for name in server._preload_modules if name != "__main__"]  # its default
    if _PRELOAD not in wanted:
        forkserver.set_forkserver_preload([*wanted, _PRELOAD])
    forkserver.ensure_running()


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


class _GuardlessPopen(popen_forkserver.Popen):
    """``popen_forkserver.Popen`` whose child does not import the user's main module."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        prepare = spawn.get_preparation_data(process_obj._name)
        prepare.pop("init_main_from_name", None)
        prepare.pop("init_main_from_path", None)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(prepare, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, writer = forkserver.connect_to_new_process(self._fds)
        parent_writer = os.dup(writer)  # the child polls this to learn that its parent is gone
        self.finalizer = util.Finalize(self, _close_fds, (parent_writer, self.sentinel))
        with open(writer, "wb", closefd=True) as stream:
            stream.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    # the default start method *inside* the worker: with "forkserver", any lock that a library makes
    # there (tqdm's, while Inductor compiles) is a named semaphore, reported as leaked at exit
    _start_method = "fork"

    @staticmethod
    def _Popen(process_obj: Any) -> _GuardlessPopen:
        return _GuardlessPopen(process_obj)


class WorkerProcess:
    """One worker and our ends of its sockets (owner: the runtime, which must call ``close``).

    Frames may be sent before ``start``: they wait in the socket.
    """

    def __init__(
        self,
        rank: int,
        device_type: str,
        num_threads: int,
        config: Config,
        store_fd: int,
        progress: Progress,
    ) -> None:
        self.rank = rank
        self.last_words = b""
        """The tail of its stderr (written by the monitor)."""
        self.socket, self._command = socket.socketpair()
        self.control, self._control = socket.socketpair()
        self._lifeline, self.lifeline = os.pipe()
        self.output, self._output = os.pipe()
        self.errors, self._errors = os.pipe()
        os.set_blocking(self.output, False)
        os.set_blocking(self.errors, False)
        self.reader = FrameReader(self.socket)
        memory, bell = progress.inherited()
        birth = Birth(
            rank=rank,
            device_type=device_type,
            num_threads=num_threads,
            config=config,
            command=InheritedFd(self._command.fileno()),
            control=InheritedFd(self._control.fileno()),
            lifeline=InheritedFd(self._lifeline),
            output=InheritedFd(self._output),
            errors=InheritedFd(self._errors),
            store=InheritedFd(store_fd),
            progress=memory,
            bell=bell,
        )
        self.process = _Process(
            target=main, args=(birth,), name=f"torchpmap-{device_type}:{rank}", daemon=True
        )

    def start(self) -> None:
        """Fork the worker; waits for the fork server's imports if they are still running."""
        try:
            self.process.start()
        finally:
            self._command.close()
            self._control.close()
            for fd in (self._lifeline, self._output, self._errors):
                os.close(fd)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    def hang_up(self) -> None:
        """Let the worker end after what it was sent (a frame would have to wait for room in the
        socket).
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self, grace_s: float) -> None:
        """Reap the process (started before; killed if it does not end within ``grace_s``) and close
        our ends.
        """
        self.process.join(grace_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.socket.close()
        self.control.close()
        for fd in (self.lifeline, self.output, self.errors):
            os.close(fd)
