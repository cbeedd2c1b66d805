"""The one thread of the controller that reads: answers, deaths and output of all workers.

::

    worker sockets --> answers   --> Pending requests (callers wait on them), failures --> on_event
    sentinels      --> deaths    --> on_event
    output pipes   --> lines     --> sys.stdout / sys.stderr, prefixed with the device

It never sends on a command socket and never takes the send lock: a sender may be blocked on a
worker that is itself blocked sending to us, and only reading resolves that.
"""

from __future__ import annotations

import os
import pickle
import selectors
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchpmap import _wire
from torchpmap._devices import Device
from torchpmap._runtimes._process import WorkerProcess
from torchpmap._runtimes._supervise import Drained, Event, Exited, Failed, Ready

__all__ = ["Monitor", "Pending"]

_LAST_WORDS_BYTES = 4000
_FLUSH_INTERVAL_S = 0.5


class Pending:
    """A request to several ranks, waited for by one caller (filled by the monitor, or interrupted
    by a repair).
    """

    __slots__ = ("_lock", "interrupted", "missing", "replies", "seq", "targets")

    def __init__(
        self, seq: int, ranks: Iterable[int], targets: dict[int, memoryview] | None = None
    ) -> None:
        self.seq = seq
        self.missing = set(ranks)
        self.targets = targets or {}
        self.replies: dict[int, Any] = {}
        self.interrupted = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def release(self, *, interrupted: bool) -> None:
        """Wake the waiter; only for whoever took the request out of ``Monitor.pending``."""
        self.interrupted = interrupted
        self._lock.release()

    def wait(self) -> bool:
        """Wait for all answers; False when a failure came first."""
        self._lock.acquire()
        return not self.interrupted


class Monitor:
    """Owns the reading side; ``watch``/``forget`` may be called from any thread."""

    def __init__(
        self,
        devices: Sequence[Device],
        on_event: Callable[[Event], None],
        on_idle: Callable[[], None],
    ) -> None:
        self.pending: dict[int, Pending] = {}
        """Requests by seq: callers add, the monitor removes; guarded by the interpreter (single
        dict operations).
        """
        self.prompt = False
        """Whether plans print: then what they printed comes before their results (set by any
        thread).
        """
        self._devices = devices
        self._on_event = on_event
        self._on_idle = on_idle
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._commands: list[
            Callable[[], None]
        ] = []  # appended by any thread, run and cleared by the monitor
        self._partial: dict[int, bytes] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torchpmap-monitor", daemon=True)
        self._thread.start()

    def watch(self, worker: WorkerProcess) -> None:
        self._do(lambda: self._register(worker))

    def forget(self, worker: WorkerProcess) -> None:
        """Stop reading from a worker; returns when its descriptors may be closed."""
        done = threading.Event()

        def unregister() -> None:
            self._unregister(worker)
            done.set()

        self._do(unregister)
        done.wait()

    def stop(self) -> None:
        self._stopped = True
        self._do(lambda: None)
        self._thread.join()
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.write(self._wake_writer, b"!")

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            ready = self._selector.select(_FLUSH_INTERVAL_S)
            if not ready:
                self._on_idle()
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake_reader, 4096)
                    while self._commands:
                        self._commands.pop(0)()
                elif self._is_watched(key):  # not forgotten meanwhile
                    source, worker = key.data
                    source(worker)

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        """Whether it is still this registration: descriptors' numbers are used again."""
        present = self._selector.get_map().get(key.fileobj)
        return present is not None and present.data is key.data

    def _register(self, worker: WorkerProcess) -> None:
        for source, fileobj in self._sources(worker):
            self._selector.register(fileobj, selectors.EVENT_READ, (source, worker))

    def _unregister(self, worker: WorkerProcess) -> None:
        for _, fileobj in self._sources(worker):
            if fileobj in self._selector.get_map():
                self._selector.unregister(fileobj)
        self._rest(worker)

    def _sources(
        self, worker: WorkerProcess
    ) -> tuple[tuple[Callable[[WorkerProcess], None], Any], ...]:
        return (
            (self._answers, worker.socket),
            (self._exited, worker.process.sentinel),
            (self._output, worker.output),
            (self._errors, worker.errors),
        )

    def _answers(self, worker: WorkerProcess) -> None:
        try:
            self._answer(worker)
            while worker.reader.buffered:
                self._answer(worker)
        except (EOFError, ConnectionResetError):
            self._selector.unregister(worker.socket)  # its sentinel follows

    def _answer(self, worker: WorkerProcess) -> None:
        length, kind, seq = worker.reader.header()
        rank = worker.rank
        if self.prompt:
            self._rest(worker)
        if kind == _wire.DONE:
            self._complete(rank, seq)
        elif kind == _wire.DATA:
            pending = self.pending.get(seq)
            target = pending.targets[rank] if pending is not None else memoryview(bytearray(length))
            worker.reader.into(target)
            self._complete(rank, seq)
        elif kind == _wire.REPLY:
            report = bytes(worker.reader.body(length))
            self._rest(worker)  # what the call printed comes before its result
            pending = self.pending.get(seq)
            if pending is not None:
                pending.replies[rank] = report
            self._complete(rank, seq)
        elif kind == _wire.FAILED:
            communication, packed, where = pickle.loads(worker.reader.body(length))
            self._on_event(Failed(rank, seq, communication, packed, where))
        elif kind == _wire.DRAINED:
            self._on_event(Drained(rank))
        else:
            assert kind == _wire.READY, f"unknown frame {kind}"
            self._on_event(Ready(rank, seq))

    def _complete(self, rank: int, seq: int) -> None:
        pending = self.pending.get(seq)
        if pending is not None:
            pending.missing.discard(rank)
            if not pending.missing and self.pending.pop(seq, None) is not None:
                pending.release(interrupted=False)

    def interrupt_all(self) -> None:
        for seq in tuple(self.pending):
            self.interrupt(seq)

    def interrupt(self, seq: int) -> None:
        pending = self.pending.pop(seq, None)
        if pending is not None:
            pending.release(interrupted=True)

    def _exited(self, worker: WorkerProcess) -> None:
        for _, fileobj in self._sources(worker):
            if fileobj in self._selector.get_map():
                self._selector.unregister(fileobj)
        self._rest(worker)
        worker.process.join()
        last_words = worker.last_words.decode(errors="replace")
        self._on_event(Exited(worker.rank, worker.process.exitcode, worker.pid, last_words))

    # -- output ------------------------------------------------------------------------------------

    def _output(self, worker: WorkerProcess, *, to_the_end: bool = False) -> None:
        self._print(worker, worker.output, sys.stdout, to_the_end)

    def _errors(self, worker: WorkerProcess, *, to_the_end: bool = False) -> None:
        read = self._print(worker, worker.errors, sys.stderr, to_the_end)
        worker.last_words = (worker.last_words + read)[-_LAST_WORDS_BYTES:]

    def _rest(self, worker: WorkerProcess) -> None:
        """Print what was written so far, also a last line that has no end yet."""
        self._output(worker, to_the_end=True)
        self._errors(worker, to_the_end=True)

    def _print(self, worker: WorkerProcess, fd: int, stream: Any, to_the_end: bool) -> bytes:
        read = b""
        while True:
            try:
                chunk = os.read(fd, 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
                break
            read += chunk
        *lines, rest = (self._partial.pop(fd, b"") + read).split(b"\n")
        if rest and to_the_end:
            lines.append(rest)
        elif rest:
            self._partial[fd] = rest
        prefix = f"[{self._devices[worker.rank]}] "
        try:
            for line in lines:
                text = line.decode(errors="replace")
                own = text.startswith(_wire.PLAIN_LINE)
                stream.write((text[1:] if own else prefix + text) + "\n")
            if lines:
                stream.flush()
        except Exception:
            pass  # the user's stream is closed, absent or broken; this thread must live
        return read
