"""The worker process of one device.

Two threads::

    main     command socket --> frames in order: define, call, put, fetch, ... --> answers, there
    control  control socket --> abort: free the main thread from a collective
                                cancel: end its call
                                dump: report what it does
                                end of file: leave at once

``values`` (handle -> tensor) and ``plans`` belong to the main thread alone; ``Groups`` guards what
both threads touch.

An exception in a call never ends the worker, whatever its type; only the end of the command socket
does (``reader.has_ended``).  After an exception the worker drops its process groups *first* (peers
blocked in a collective with it then fail in milliseconds), and reports.  It skips every further
call until the controller starts a new epoch, since calls behind a failed one may depend on it.

A call may fork, and return in the child, too.  The child then exits at once, since sockets, shared
numbers and groups are the parent's.

The controller may die in any way, even by SIGKILL while this process holds the GIL in C code.  So
the lifeline, a pipe to which nothing is written, delivers SIGKILL when its other end closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import linecache
import multiprocessing.util
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from types import FrameType
from typing import Any, NoReturn

import torch

from torchpmap._base.config import Config
from torchpmap._base.errors import CallCancelled, ShardLost, WorkerError, pack_exception
from torchpmap._runtime import wire
from torchpmap._runtime.groups.process_groups import Groups, RankPartition, is_communication
from torchpmap._runtime.local.progress import WorkerProgress
from torchpmap._runtime.task import Rank, Task, Work
from torchpmap._runtime.wire import FrameReader, InheritedFd, Origin, Stream, frame
from torchpmap._trace.compile import Definition, Runner, compile_definition, run_first_time
from torchpmap._trace.effects import mark_lines

_NEVER = 1 << 62
_FOREVER_S = 30 * 24 * 3600.0
_NOTHING: Mapping[int, torch.Tensor] = {}
_HARMLESS = (wire.PUT, wire.FREE, wire.FORGET, wire.DEFINE)
"""Commands that a rank obeys even after a failure: they involve no other rank, and skipping one
would leave a gap.
"""


@dataclass(frozen=True)
class Birth:
    """What a worker is told when it starts."""

    rank: int
    device_type: str
    num_threads: int
    config: Config
    command: InheritedFd
    control: InheritedFd
    lifeline: InheritedFd
    output: InheritedFd
    errors: InheritedFd
    store: InheritedFd
    progress: InheritedFd
    bell: InheritedFd
    stacks: InheritedFd


def main(birth: Birth) -> None:
    """Run until the controller is gone; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    arm_lifeline(birth.lifeline.fd)
    _redirect_output(birth)
    mark_lines(wire.PLAIN_LINE)
    if birth.device_type == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = _nth_visible_gpu(
            birth.rank
        )  # graphs say cuda:0 on every rank
    device = torch.device("cuda", 0) if birth.device_type == "cuda" else torch.device("cpu")
    torch.set_num_threads(birth.num_threads)
    # the controller decides how long a collective may wait, since it sees why
    groups = Groups(birth.rank, device, None, replace(birth.config, timeout=_FOREVER_S))
    worker = _Worker(birth, device, groups)
    faulthandler.register(signal.SIGUSR1, file=birth.stacks.fd)
    signal.signal(signal.SIGUSR2, worker.interrupt)
    os.register_at_fork(after_in_child=worker.forsake)
    multiprocessing.util.register_after_fork(birth.lifeline, _arm_child)
    threading.Thread(
        target=_listen, args=(birth.control.socket(), worker), name="torchpmap-control", daemon=True
    ).start()
    exitcode = 0
    try:
        worker.serve()
    except BaseException as error:
        if type(error) is not EOFError:
            traceback.print_exc()
            exitcode = 1
    _kill_children()
    # a process with a group in flight or a user's thread alive may hang in interpreter shutdown:
    # leave directly
    _flush()
    os._exit(exitcode)


class _Worker:
    def __init__(self, birth: Birth, device: torch.device, groups: Groups) -> None:
        self.rank = birth.rank
        self.device = device
        self.groups = groups
        self.values: dict[int, torch.Tensor] = {}
        self.plans: dict[int, tuple[str, Runner]] = {}
        self.bodies: dict[int, bytes] = {}
        self.index_tensors: dict[int, torch.Tensor] = {}
        self.failed = False
        self.running = 0
        """The call whose user code runs; 0: none, so no interrupt may raise."""
        self.cancelled_from = _NEVER
        self.was_cancelled = False
        self.epoch_begin = 0
        """The command that began the epoch."""
        self.is_forked = False
        self.where = f"on device {device.type}:{birth.rank}"
        self.store_path = birth.store.path()
        self.progress = WorkerProgress(birth.rank, birth.progress, birth.bell)
        sock = birth.command.socket()
        self.stream = Stream(sock)
        self.reader = FrameReader(sock)
        self.doing = "starting"

    def serve(self) -> NoReturn:
        handlers: dict[int, Callable[[int, int], None]] = {
            wire.CALL: self.call,
            wire.PUT: self.put,
            wire.FREE: self.free,
            wire.FETCH: self.fetch,
            wire.SYNC: self.sync,
            wire.RING: self.ring,
            wire.DEFINE: self.define,
            wire.TASK: self.task,
            wire.GROUP: self.group,
            wire.FORGET: self.forget,
        }
        torch.set_grad_enabled(False)
        calls_are_done = self.device.type == "cpu"  # when they return
        reader = self.reader
        while True:
            length, kind, seq = reader.header()
            handler = handlers.get(kind)
            if handler is None:
                self.supervised(kind, seq, length)
                continue
            if self.failed and kind not in _HARMLESS:
                self.skip(kind, length)
                continue
            try:
                try:
                    handler(seq, length)
                finally:
                    self.running = 0  # an interrupt before this is caught below
                if self.is_forked:
                    os._exit(0)
                if calls_are_done:
                    self.progress.note(seq)
            except BaseException as error:
                if reader.has_ended or self.stream.is_torn:
                    raise
                self.fail(seq, error)
                reader.skip()

    # -- hot path ----------------------------------------------------------------------------------

    def call(self, seq: int, length: int) -> None:
        plan_id, out, num_inputs, *handles = self.reader.body(length).cast("q").tolist()
        if len(handles) > num_inputs:
            self.release(handles[num_inputs:])
        self.doing, run = self.plans[plan_id]
        inputs = self.stored(handles[:num_inputs])
        self.running = seq
        if seq >= self.cancelled_from:
            self.interrupt()
        results = run(*inputs)
        self.values.update(zip(range(out, out + len(results)), results, strict=True))

    def skip(self, kind: int, length: int) -> None:
        """Skip a command behind a failure, but free the values that it names."""
        if kind == wire.CALL:
            _, _, num_inputs, *handles = self.reader.body(length).cast("q").tolist()
            self.release(handles[num_inputs:])
        self.reader.skip()

    def put(self, seq: int, length: int) -> None:
        self.doing = "receiving a value"
        (handle,) = struct.unpack("<q", self.reader.body(8))
        tensor = wire.read_tensor(self.reader, self.where)
        self.values[handle] = tensor if self.device.type == "cpu" else tensor.to(self.device)

    def free(self, seq: int, length: int) -> None:
        self.release(self.reader.body(length).cast("q").tolist())

    def release(self, handles: list[int]) -> None:
        """Forget values; ``-first`` stands for all outputs of an uncompiled call, however many."""
        deque(map(self.values.pop, handles, repeat(None)), maxlen=0)  # a loop in C: leaves are many
        for first in [-handle for handle in handles if handle < 0]:
            outputs = range(first, first + wire.TASK_OUTPUTS)
            for stored in [stored for stored in self.values if stored in outputs]:
                del self.values[stored]

    def stored(self, handles: Sequence[int]) -> list[torch.Tensor]:
        try:
            return list(map(self.values.__getitem__, handles))
        except KeyError:  # this process is younger than the value
            raise ShardLost(
                "an argument is lost: it lived on a device whose worker died. Compute or load it "
                "again."
            ) from None

    def fetch(self, seq: int, length: int) -> None:
        """Send a stored tensor, or one row of it: handle, dim (-1: all of it), position, and the
        dtype and shape that are expected.
        """
        handle, dim, position, *expected = self.reader.body(length).cast("q").tolist()
        (tensor,) = self.stored([handle])
        if dim >= 0:
            tensor = tensor.select(dim, position)
        wire.refuse_other(tensor, expected, self.where)
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        payload = wire.bytes_of(tensor)
        self.stream.send([wire.HEADER.pack(len(payload), wire.DATA, seq), payload])

    def sync(self, seq: int, length: int) -> None:
        self.synchronize(seq)
        self.stream.send([frame(wire.DONE, seq)])

    def ring(self, seq: int, length: int) -> None:
        self.synchronize(seq)
        self.progress.ring()

    def synchronize(self, seq: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.note(seq)

    # -- rare frames -------------------------------------------------------------------------------

    def define(self, seq: int, length: int) -> None:
        self.doing = "receiving a plan"
        definition: Definition = pickle.loads(self.reader.body(length))
        self.begin(seq, f"compiling {definition.name}")
        runner = compile_definition(definition, self.index(definition.ranks))
        running = f"running {definition.name}"

        def run_first(*blocks: torch.Tensor) -> Sequence[torch.Tensor]:
            results, later = run_first_time(definition, runner, blocks, self.where)
            self.plans[definition.plan_id] = (running, later)
            return results

        self.plans[definition.plan_id] = (running, run_first)
        self.reply(seq, None)

    def begin(self, seq: int, doing: str) -> None:
        """From here on the command may be cancelled, until its reply."""
        self.doing = doing
        self.running = seq
        if seq >= self.cancelled_from:
            self.interrupt()

    def index(self, ranks: Sequence[int]) -> torch.Tensor:
        """This rank's position among the ranks of a plan, as data: all run one graph."""
        position = ranks.index(self.rank)
        if position not in self.index_tensors:
            self.index_tensors[position] = torch.tensor(position, device=self.device)
        return self.index_tensors[position]

    def task(self, seq: int, length: int) -> None:
        self.doing = "receiving a call"
        task: Task = pickle.loads(self.reader.body(length))
        if task.body is not None:
            wire.keep_latest(self.bodies, task.body_id, task.body)
        linecache.cache.update(task.sources)
        self.begin(seq, f"running {task.name}")
        # unpickled for every call: changes that the last one made to captured objects must not be
        # seen
        work: Work = pickle.loads(self.bodies[task.body_id])
        rank = Rank(task.ranks, task.group, self.index(task.ranks), self.groups.ensure)
        report, stored = work.run(rank, task.given, self.stored(task.inputs))
        self.reply(seq, (report, len(stored)), dict(enumerate(stored, task.first_output)))

    def group(self, seq: int, length: int) -> None:
        name, partition = pickle.loads(self.reader.body(length))
        self.groups.ensure(name, partition)

    def forget(self, seq: int, length: int) -> None:
        for plan_id in self.reader.body(length).cast("q").tolist():
            self.plans.pop(plan_id, None)

    def reply(self, seq: int, report: Any, values: Mapping[int, torch.Tensor] = _NOTHING) -> None:
        import cloudpickle

        body = cloudpickle.dumps(report)
        self.running = 0
        if self.was_cancelled:  # and the function caught it
            raise CallCancelled
        if self.is_forked:
            os._exit(0)
        self.values.update(values)
        _flush()
        self.stream.send([frame(wire.REPLY, seq, body)])

    # -- failure and repair ------------------------------------------------------------------------

    def fail(self, seq: int, error: BaseException) -> None:
        if self.is_forked:
            os._exit(1)
        origin = Origin.COMMUNICATION if is_communication(error) else Origin.USER
        if self.was_cancelled:
            origin = Origin.CANCELLED
        self.groups.drop()
        self.failed = True
        _flush()
        packed = self.pack(seq, error)
        where = f"{self.where} (rank {self.rank}, pid {os.getpid()}) while {self.doing}"
        self.stream.send([frame(wire.FAILED, seq, pickle.dumps((origin, packed, where)))])

    def pack(self, seq: int, error: BaseException) -> bytes:
        """An exception as bytes; its text and its pickling may run the user's code, which can be
        cancelled like the function itself.
        """
        try:
            try:
                self.begin(seq, self.doing)
                return pack_exception(error)
            finally:
                self.running = 0
        except CallCancelled:
            late = "it took too long to get its text, or to pickle it"
            return pack_exception(WorkerError(f"{type(error).__qualname__}: {late}"))

    def supervised(self, kind: int, seq: int, length: int) -> None:
        body = self.reader.body(length)
        if kind == wire.DRAIN:
            self.stream.send([frame(wire.DRAINED, seq)])
            return
        if kind != wire.REGROUP:
            raise self.reader.broken(f"of unknown kind {kind}")
        epoch: int
        groups: dict[str, RankPartition]
        epoch, groups = pickle.loads(body)
        self.failed = self.was_cancelled = False
        self.cancelled_from, self.epoch_begin = _NEVER, seq
        self.bodies.clear()  # the controller sends them again
        # a new store for each epoch, since a store remembers what it has read; -1: it does not
        # remove its file, which has no name
        self.groups.renew(epoch, torch.distributed.FileStore(self.store_path, -1))
        try:
            for name, partition in groups.items():
                self.groups.ensure(name, partition)
        except Exception as error:
            self.fail(seq, error)
        else:
            self.stream.send([frame(wire.READY, epoch)])

    # -- from other threads, signals and forks -----------------------------------------------------

    def cancel(self, seq: int) -> None:
        """End this epoch's calls from ``seq`` on (control thread)."""
        if seq > self.epoch_begin:
            self.cancelled_from = min(seq, self.cancelled_from)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def interrupt(self, _: Any = None, frame: FrameType | None = None) -> None:
        """Raise if the running call is cancelled (signal handler, so in the main thread).

        Not in an import, which would leave half a module for all later calls; the controller asks
        again.
        """
        if self.running >= self.cancelled_from and not _imports(frame):
            if not self.failed:  # else it packs an exception, in several steps
                self.running = 0
            self.was_cancelled = True
            raise CallCancelled

    def describe(self) -> bytes:
        """What the main thread does (control thread)."""
        waits = self.groups.waits()
        return json.dumps({"seq": self.running, "doing": self.doing, "waits": waits}).encode()

    def forsake(self) -> None:
        """In a child that a call has forked: it may work on, but not as this worker."""
        self.is_forked = True
        self.groups.forsake()


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _listen(control: socket.socket, worker: _Worker) -> NoReturn:
    message = bytearray(wire.CONTROL.size)
    while True:
        try:
            got = control.recv_into(message, 0, socket.MSG_WAITALL)
        except OSError:
            got = 0
        if got < len(message):
            os._exit(0)
        kind, value = wire.CONTROL.unpack(message)
        if kind == wire.ABORT:
            worker.groups.abort(value)
        elif kind == wire.CANCEL:
            worker.cancel(value)
        elif kind == wire.DUMP:
            body = worker.describe()
            with contextlib.suppress(OSError):
                control.send(wire.CONTROL.pack(value, len(body)) + body, socket.MSG_DONTWAIT)


def arm_lifeline(fd: int) -> None:
    """Die when the other end of a pipe is closed, even while this process is stopped or holds the
    GIL in C code.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(fd, 1) == b"":  # the controller went before the signal was armed
            os._exit(0)


def _arm_child(lifeline: InheritedFd) -> None:
    """In a child that user code has made with ``multiprocessing``: it dies with the pool too."""
    # opened again: the signal for a shared descriptor goes to the worker alone
    arm_lifeline(os.open(lifeline.path(), os.O_RDONLY | os.O_CLOEXEC))


def _kill_children() -> None:
    """End the processes that user code has forked or spawned with ``multiprocessing``: no exit
    handler of this process does it.
    """
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed
            child.kill()


def _redirect_output(birth: Birth) -> None:
    """Send everything written to stdout and stderr, also from C, to the controller, which prints
    it.
    """
    os.dup2(birth.output.fd, 1)
    os.dup2(birth.errors.fd, 2)
    birth.output.close()
    birth.errors.close()
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _nth_visible_gpu(rank: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[rank].strip() if visible else str(rank)
