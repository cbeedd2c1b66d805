"""The controller's side of one worker process: its sockets and pipes, its start and its end.

Scripts need no ``if __name__ == "__main__"``: workers get graphs or pickled functions, and never
import the user's main module.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from torchpmap._base.config import Config
from torchpmap._base.deadline import Deadline
from torchpmap._runtime.local.forkserver import (
    WorkerArgs,
    explained,
    import_path,
    process_state,
    server,
)
from torchpmap._runtime.local.staging import Staging


def preload() -> None:
    """Let the fork server's imports begin; returns at once."""
    with explained():
        server.ensure_running()


class WorkerProcess:
    """One worker, and the controller's ends of its sockets (the owner must call ``close``).

    Frames may be sent before ``start``: they wait in the socket.
    """

    def __init__(
        self,
        rank: int,
        device_type: str,
        num_threads: int,
        config: Config,
        exits: socket.socket,
        shared: Sequence[int],
    ) -> None:
        """``exits``: where the fork server reports the exit code; ``shared``: descriptors that all
        workers have.
        """
        self.rank = rank
        self.pid: int | None = None
        self.pidfd = -1
        self.last_words = b""
        """The tail of its stderr (written by the monitor)."""
        self._args = rank, device_type, num_threads, config
        with explained(), contextlib.ExitStack() as undo:
            self.socket, command = map(undo.enter_context, socket.socketpair())
            self.control, control = map(undo.enter_context, socket.socketpair())
            lifeline, self.lifeline = _pipe(undo)
            self.output, output = _pipe(undo)
            self.errors, errors = _pipe(undo)
            self.stacks = os.memfd_create("torchpmap-stacks", os.MFD_CLOEXEC)
            undo.callback(os.close, self.stacks)
            self.staging = Staging(is_used=config.shared_memory)
            undo.callback(self.staging.close)
            fcntl.fcntl(self.stacks, fcntl.F_SETFL, os.O_APPEND)  # so that it can be truncated
            for fd in (self.output, self.errors):
                os.set_blocking(fd, False)
            undo.pop_all()
        self._theirs = [command.detach(), control.detach(), lifeline, output, errors]
        self._exits, self._shared = exits, [*shared, self.stacks, self.staging.fd]

    def start(self, is_wanted: Callable[[], bool]) -> None:
        """Fork the worker; waits for the fork server's imports if they are still running."""
        variables = server.changed_variables()
        args = WorkerArgs(*self._args, import_path(), sys.argv, _folder(), variables)
        try:
            with explained():
                fds = [self._exits.fileno(), *self._theirs, *self._shared]
                self.pid, self.pidfd = server.fork(pickle.dumps(args), fds, is_wanted)
        finally:
            self._close_theirs()

    @property
    def was_tried(self) -> bool:
        """Whether ``start`` was called; it cannot be called again."""
        return not self._theirs

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called."""
        return self.socket.fileno() >= 0

    @property
    def state(self) -> str:
        """As in ``/proc/PID/stat``; "" if unknown."""
        return "" if self.pid is None else process_state(self.pid)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # it has ended
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end_commands(self) -> None:
        """Let the worker end after the commands it was sent (a frame that says so would have to
        wait for room in the socket).
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def wait(self, patience: Deadline) -> None:
        """Wait until the process has ended."""
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            poll.poll(int(1000 * patience.left()))

    def close(self) -> None:
        """Close the controller's ends; idempotent."""
        self._close_theirs()
        self.socket.close()
        self.control.close()
        self.staging.close()
        fds = self.lifeline, self.output, self.errors, self.stacks, self.pidfd
        self.lifeline = self.output = self.errors = self.stacks = self.pidfd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    pipe = os.pipe()
    for fd in pipe:
        undo.callback(os.close, fd)
    return pipe


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None
