"""The one thread of the controller that reads the answers of all workers, and notices their ends.

::

    worker sockets --> answers   --> Pending requests (callers wait on them), failures --> on_event
    pidfds, exits  --> deaths    --> on_event

It never waits for anything: not for the rest of a frame, not for room in a socket, not for a lock
that is held while a thread waits.  Callers rely on it to end their waits.  If it fails, it calls
``on_crash``, and the pool is closed.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from torchpmap._base.deadline import Deadline
from torchpmap._base.devices import Device
from torchpmap._base.ending import surely
from torchpmap._base.errors import pack_exception
from torchpmap._runtime import wire
from torchpmap._runtime.local.forkserver import EXIT
from torchpmap._runtime.local.incidents import Era
from torchpmap._runtime.local.output import Printer
from torchpmap._runtime.local.process import WorkerProcess
from torchpmap._runtime.local.reentry import MONITOR
from torchpmap._runtime.local.supervise import Drained, Event, Exited, Failed, Ready
from torchpmap._runtime.wire import FrameReader

_BEGIN_S = 3600.0
"""How long its owner may take to get ready, at most: ``begin`` says when it is."""
_EXIT_S = 0.5
"""How long the fork server may take to say how a worker has ended."""
_TURN_BYTES = 1 << 20
"""How many bytes of answers are read before it is the turn of another worker."""
_JOIN_S = 1.0
"""How long to wait for this thread, which waits for nothing itself."""
_KNOWN_S = 1.0
"""How long a caller waits for this thread, at most."""
_PRINT_S = 0.5
"""How long to wait for the user's stream to take what is left."""


class Pending:
    """A request to several ranks, waited for by one caller (filled by the monitor, or interrupted
    by a repair).
    """

    __slots__ = (
        "_lock",
        "era",
        "interrupted",
        "is_withheld",
        "missing",
        "replies",
        "seq",
        "targets",
        "what",
    )

    def __init__(
        self,
        seq: int,
        era: Era,
        ranks: Iterable[int],
        what: str,
        targets: dict[int, memoryview] | None = None,
    ) -> None:
        self.seq = seq
        self.era = era
        self.what = what
        """What the ranks do while the controller waits."""
        self.missing = set(ranks)
        self.targets = targets or {}
        self.replies: dict[int, bytes] = {}
        self.interrupted = False
        self.is_withheld = False
        """Whether the command will fail whatever the ranks still answer."""
        self._lock = threading.Lock()
        self._lock.acquire()

    def place(self, rank: int, length: int) -> memoryview | None:
        """Where the caller wants the answer of a rank; None if it does not say."""
        target = self.targets.get(rank)
        if target is not None and len(target) != length:
            raise wire.FrameError(f"{length} bytes of a value that has {len(target)}")
        return target

    def release(self, *, interrupted: bool) -> None:
        """Wake the waiter; only for the thread that took the request out of ``Monitor.pending``."""
        self.interrupted = interrupted
        self._lock.release()

    def wait(self) -> bool:
        """Wait for all answers; False when a failure came first."""
        self._lock.acquire()
        return not self.interrupted


class Monitor:
    """Owns the reading side; ``watch``/``forget``/``stop`` may be called from any thread."""

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        on_event: Callable[[Event], None],
        on_tick: Callable[[], float],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """``on_tick`` is called now and then after ``begin``, and tells after how many seconds
        again; ``on_crash`` with an unexpected exception, which ends the thread.
        """
        self.pending: dict[int, Pending] = {}
        """Requests by seq: callers add, the monitor removes; guarded by the interpreter (single
        dict operations).
        """
        self._devices = devices
        self._on_event = on_event
        self._on_tick = on_tick
        self._on_crash = on_crash
        self._next_tick = time.monotonic() + _BEGIN_S
        self._commands: list[
            Callable[[], None]
        ] = []  # appended by any thread, run and cleared by the monitor
        self._readers: dict[WorkerProcess, FrameReader] = {}
        self._gone: dict[WorkerProcess, Deadline] = {}
        """Workers that have ended, and how long to wait for the fork server to say how."""
        self._exit_codes: dict[int | None, int] = {}
        """What it has said, by pid."""
        self._stopped = False
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._woken, self._waker = map(undo.enter_context, socket.socketpair())
            self._waker.setblocking(False)
            self._selector.register(self._woken, selectors.EVENT_READ, self._run_commands)
            self._exits, self.exits = map(undo.enter_context, socket.socketpair())
            self._selector.register(self._exits, selectors.EVENT_READ, self._read_exits)
            self.printer = Printer()
            undo.callback(self.printer.stop, 0)
            self._thread = threading.Thread(target=self._run, name=MONITOR, daemon=True)
            undo.callback(setattr, self, "_stopped", True)  # Ctrl-C while it starts
            self._thread.start()
            undo.pop_all()

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        return self._thread, self.printer.thread

    def begin(self) -> None:
        """From now on call ``on_tick``."""
        self.soon(lambda: setattr(self, "_next_tick", 0.0))

    def watch(self, worker: WorkerProcess) -> None:
        self.soon(lambda: self._register(worker))

    def forget(self, worker: WorkerProcess) -> bool:
        """Stop reading from a worker; returns whether its descriptors may be closed."""
        done = threading.Event()

        def unregister() -> None:
            self._unregister(worker)
            done.set()

        self.soon(unregister)
        return done.wait(_JOIN_S)

    def stop(self) -> bool:
        """Print what is left and end the thread; returns whether it has stopped reading."""
        self._stopped = True
        self.soon(lambda: None)
        if threading.current_thread() is self._thread:  # it has failed
            self._unregister_all()
        else:
            self._thread.join(_JOIN_S)
        self.printer.stop(_PRINT_S)
        return not self._readers

    def soon(self, command: Callable[[], None]) -> None:
        """Call ``command`` in the monitor thread."""
        self._commands.append(command)
        with contextlib.suppress(OSError):  # BlockingIOError: many wake-ups are pending already
            self._waker.send(b"!", wire.NO_SIGNAL)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        except BaseException as error:
            if not self._stopped:  # else nothing is left to read
                self._on_crash(error)
        self._unregister_all()
        for resource in (self._selector, self._woken, self._waker, self._exits, self.exits):
            resource.close()

    def _unregister_all(self) -> None:
        for worker in tuple(self._readers):
            with contextlib.suppress(Exception):  # this may be why the thread has failed
                self._unregister(worker)

    def _turn(self) -> None:
        for key, _ in self._selector.select(max(0.0, self._next_tick - time.monotonic())):
            if self._is_watched(key):  # not forgotten meanwhile
                key.data()
        for worker, patience in tuple(self._gone.items()):
            if worker.pid in self._exit_codes or patience.passed:
                self._report_end(worker)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._on_tick()

    def _run_commands(self) -> None:
        self._woken.recv(4096)
        while self._commands:
            self._commands.pop(0)()

    def _read_exits(self) -> None:
        self._exit_codes.update(EXIT.iter_unpack(self._exits.recv(64 * EXIT.size)))

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        """Whether this registration still holds: a descriptor's number may be used again."""
        present = self._selector.get_map().get(key.fileobj)
        return present is not None and present.data is key.data

    def _register(self, worker: WorkerProcess) -> None:
        self._readers[worker] = FrameReader(worker.socket, functools.partial(self._room, worker))
        prefix = f"[{self._devices[worker.rank]}] "
        self.printer.add(worker.rank, worker.output, worker.errors, prefix)
        for source, fileobj in ((self._answers, worker.socket), (self._ended, worker.pidfd)):
            read = functools.partial(source, worker)
            self._selector.register(fileobj, selectors.EVENT_READ, read)

    def _unregister(self, worker: WorkerProcess) -> None:
        for fileobj in (worker.socket, worker.pidfd):
            if fileobj in self._selector.get_map():
                self._selector.unregister(fileobj)
        self._gone.pop(worker, None)
        if self._readers.pop(worker, None) is not None:
            worker.last_words = self.printer.remove(worker.rank)

    def _room(
        self, worker: WorkerProcess, kind: int, seq: int, length: int, given: memoryview
    ) -> memoryview:
        """The memory for the body of a large answer."""
        if length > wire.MAX_BODY:
            raise wire.FrameError(f"an answer of {length} bytes")
        pending = self.pending.get(seq) if kind == wire.REPLY else None
        place = None if pending is None else pending.place(worker.rank, length)
        return memoryview(bytearray(length)) if place is None else place

    def _fail(self, worker: WorkerProcess, seq: int, length: int) -> None:
        """Report that there is no memory for an answer."""
        error = MemoryError(f"no memory for an answer of {length} bytes")
        where = f"in the calling process, from {self._devices[worker.rank]}"
        self._on_event(Failed(worker.rank, seq, False, pack_exception(error), where))

    def _answers(self, worker: WorkerProcess) -> None:
        reader = self._readers[worker]
        try:
            for kind, seq, body in reader.frames(socket.MSG_DONTWAIT, _TURN_BYTES):
                try:
                    self._answer(worker, kind, seq, body)
                except MemoryError:
                    self._fail(worker, seq, len(body))
        except MemoryError:
            self._fail(worker, *reader.head[1:])
        except EOFError:
            # the worker ends, has closed its socket, or has sent a broken frame; one that has
            # ended by itself keeps its exit code
            worker.kill()
            if worker.socket in self._selector.get_map():
                self._selector.unregister(worker.socket)

    def _answer(self, worker: WorkerProcess, kind: int, seq: int, body: memoryview) -> None:
        rank = worker.rank
        if kind == wire.REPLY:
            pending = self.pending.get(seq)
            if pending is not None:  # else it came too late
                self._take(pending, rank, body)
        elif kind == wire.FAILED:
            self._on_event(Failed(rank, seq, *pickle.loads(body)))
        elif kind == wire.DRAINED:
            self._on_event(Drained(rank))
        elif kind == wire.READY:
            self._on_event(Ready(rank, seq))
        else:
            raise wire.FrameError(f"unknown kind {kind}")

    def _take(self, pending: Pending, rank: int, body: memoryview) -> None:
        target = pending.place(rank, len(body))
        if target is None:
            pending.replies[rank] = bytes(body)
        elif body and target is not body:  # else it was read there
            target[:] = body
        pending.missing.discard(rank)
        done = not pending.missing and not pending.is_withheld
        if done and self.pending.pop(pending.seq, None) is not None:
            pending.release(interrupted=False)

    def withhold(self, seq: int) -> None:
        """Give no caller the answers to a command that is about to fail (any thread)."""
        pending = self.pending.get(seq)
        if pending is not None:
            pending.is_withheld = True

    def interrupt_all(self) -> None:
        for seq in tuple(self.pending):
            self.interrupt(seq)

    def first_missing(self, rank: int) -> int | None:
        """The first request that a rank has not answered."""
        pending = tuple(self.pending.values())
        return min((each.seq for each in pending if rank in each.missing), default=None)

    def interrupt(self, seq: int) -> None:
        pending = self.pending.pop(seq, None)
        if pending is not None:
            pending.release(interrupted=True)

    def give_up(self, seq: int, event: Event) -> None:
        """Report that the caller of a request was interrupted, unless it has ended: commands from
        now on wait until it has.
        """
        is_known = threading.Event()

        def end() -> None:
            if seq in self.pending:
                self._on_event(event)
            is_known.set()

        def tell() -> None:
            self.soon(end)
            is_known.wait(_KNOWN_S)

        if seq in self.pending:
            surely(tell)

    def _ended(self, worker: WorkerProcess) -> None:
        """The process has ended; the fork server says how."""
        self._selector.unregister(worker.pidfd)
        self._gone[worker] = Deadline(_EXIT_S)

    def _report_end(self, worker: WorkerProcess) -> None:
        self._answers(worker)  # its last answers
        self._unregister(worker)
        last_words = worker.last_words.decode(errors="replace")
        assert worker.pid is not None
        code = self._exit_codes.pop(worker.pid, None)
        self._on_event(Exited(worker.rank, code, worker.pid, last_words))

    def say(self, line: str) -> None:
        """Print a line of torchpmap's own on stderr."""
        self.printer.write("stderr", line + "\n")
