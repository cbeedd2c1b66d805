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
does.  After an exception the worker drops its process groups *first* (peers
blocked in a collective with it then fail in milliseconds), and reports.  It skips every further
call until the controller starts a new epoch, since calls after a failed one may depend on it.

A call may fork, and return in the child, too.  The child then exits at once, since sockets, shared
numbers and groups are the parent's.

The controller may die in any way, even by SIGKILL while this process holds the GIL in C code.  So
the lifeline, a pipe to which nothing is written, delivers SIGKILL when its other end closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import linecache
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import torch

from torchpmap._base.devices import PLATFORMS
from torchpmap._base.errors import CallCancelled, WorkerError, pack_exception
from torchpmap._base.platform import LATE_HINT
from torchpmap._runtime import wire
from torchpmap._runtime.completion import Completion
from torchpmap._runtime.executor import Compiled, Executor
from torchpmap._runtime.groups.process_groups import Groups, RankPartition, is_communication
from torchpmap._runtime.local.forkserver import Fds, WorkerArgs
from torchpmap._runtime.local.progress import AT, COMPILES, FUNCTION, HOST, WorkerProgress
from torchpmap._runtime.local.stacks import answer
from torchpmap._runtime.local.staging import Staged
from torchpmap._runtime.local.store import WorkerStore
from torchpmap._runtime.local.values import Values
from torchpmap._runtime.local.worker_setup import (
    arm_child,
    arm_lifeline,
    change_variables,
    flush,
    kill_children,
    obey_in_children,
    redirect_output,
)
from torchpmap._runtime.task import Task, Work
from torchpmap._runtime.wire import FrameError, FrameReader, Stream, frame
from torchpmap._trace.compile import EAGER, Definition
from torchpmap._trace.effects import mark_lines
from torchpmap._trace.toolchain import import_inductor

_NEVER, _FOREVER_S = 1 << 62, 30 * 24 * 3600.0
_BEFORE_IMPORT_S = 1.0
_NOTHING: Mapping[int, torch.Tensor] = {}
_HARMLESS = (wire.PUT, wire.FREE, wire.FORGET, wire.DEFINE)
"""Commands that a rank obeys even after a failure: they involve no other rank, and skipping one
would leave a gap.
"""


_HINT = f"\nThe device cannot be used any more, so its worker ends. {LATE_HINT}"


def main(args: WorkerArgs, fds: Fds) -> None:
    """Run until the controller is gone; never returns."""
    arm_lifeline(fds.lifeline)
    redirect_output(fds.output, fds.errors)
    mark_lines(wire.PLAIN_LINE)
    platform = PLATFORMS[args.device_type]
    if platform.is_initialized():
        raise RuntimeError(
            f"{platform.name} was initialised in the process that forks the workers, which cannot "
            "use it then. Something that Python imports at its start does that; it must not."
        )
    # the variables that choose devices stay those by which the others were chosen
    choosing = {*platform.variables, "CUDA_DEVICE_ORDER"}
    change_variables({k: v for k, v in args.variables.items() if k not in choosing})
    os.environ.update(platform.environment(args.rank))  # graphs name device 0 on every rank
    for name, value in platform.worker_settings.items():
        os.environ.setdefault(name, value)
    device = platform.open(0, args.rank)
    torch.set_num_threads(args.num_threads)
    # the controller decides how long a collective may wait, since it sees why
    groups = Groups(args.rank, device, None, replace(args.config, timeout=_FOREVER_S))
    worker = _Worker(args, fds, device, groups)
    faulthandler.register(signal.SIGUSR1, file=fds.stacks)
    signal.signal(signal.SIGUSR2, worker.interrupt)
    obey_in_children()
    os.register_at_fork(after_in_child=worker.in_forked_child)
    multiprocessing.util.register_after_fork(worker, lambda _: arm_child(fds.lifeline))
    threading.Thread(
        target=_listen,
        args=(socket.socket(fileno=fds.control), worker),
        name="torchpmap-control",
        daemon=True,
    ).start()
    exitcode = 0
    try:
        worker.serve()
    except BaseException as error:
        if type(error) is not EOFError:
            traceback.print_exc()
            exitcode = 1
    kill_children()
    # a process with a group in flight or a user's thread alive may hang in interpreter shutdown:
    # leave directly
    flush()
    os._exit(exitcode)


class _Worker:
    def __init__(self, args: WorkerArgs, fds: Fds, device: torch.device, groups: Groups) -> None:
        self.rank = args.rank
        self.device = device
        self.platform = PLATFORMS[args.device_type]
        self.groups = groups
        self.plans: dict[int, Compiled] = {}
        self.bodies: dict[int, bytes] = {}
        self.failed = False
        self.running = 0
        """The call whose user code runs; 0: none, so no interrupt may raise."""
        self.cancelled_from = _NEVER
        self.was_cancelled = False
        self.epoch_begin = 0
        """The command that began the epoch."""
        self.is_forked = False
        self.where = f"on device {device.type}:{args.rank}"
        self.staged = Staged(fds.staging, self.platform.pin, self.platform.unpin)
        self.common = Staged(fds.common, self.platform.pin, self.platform.unpin, args.rank)
        landed = Staged(fds.landing, self.platform.pin, self.platform.unpin)
        self.values = Values(self.platform, device, self.where, self.staged, self.common, landed)
        self.store_path = f"/proc/self/fd/{fds.store}"
        self.progress = WorkerProgress(args.rank, fds.progress, fds.bell)
        self.stacks = fds.stacks
        device_at, host_at = map(self.progress.number, (AT, HOST))
        sock = socket.socket(fileno=fds.command)
        self.stream = Stream(sock)
        self.reporting = threading.Lock()
        self.communicates = False
        """Whether the current command has collectives."""
        self.source: torch.Tensor | None = None
        """Memory of the host from which the device copies in the current command."""
        self.completion: Completion | None = None
        if self.platform.is_asynchronous:
            self.completion = Completion(
                *(self.platform, lambda: groups.is_aborted, self.progress.note, self.fail_late),
                begin=functools.partial(device_at.__setitem__, 0),
            )
        self.at = device_at if self.completion is None else host_at
        self.reader = FrameReader(sock, self.values.room)
        self.doing = "starting"
        self.executor = Executor(
            *(args.rank, device, self.platform, groups, self.where, self.values.usage),
            doing=lambda: self.doing,
        )

    def serve(self) -> NoReturn:
        handlers = self.executor.handlers
        handlers |= {
            wire.CALL: self.call,
            wire.PUT: self.put,
            wire.FREE: self.free,
            wire.FETCH: self.fetch,
            wire.DEFINE: self.define,
            wire.TASK: self.task,
            wire.GROUP: self.group,
            wire.FORGET: self.forget,
            wire.LOAD: self.load,
        }
        torch.set_grad_enabled(False)
        done = self.progress.note if self.completion is None else self.launched
        at = self.at
        while True:
            try:
                for kind, seq, body in self.reader.frames():
                    handler = handlers.get(kind)
                    if handler is None:
                        self.supervised(kind, seq, body)
                        continue
                    if self.failed and kind not in _HARMLESS:
                        self.skip(kind, body)
                        continue
                    at[0] = seq
                    try:
                        try:
                            handler(seq, body)
                        finally:
                            self.running = 0  # an interrupt before this is caught below
                        if self.is_forked:
                            os._exit(0)
                        done(seq)
                    except BaseException as error:
                        if type(error) is FrameError or self.stream.is_torn():
                            raise
                        self.fail(seq, error)
            except MemoryError as error:  # for the body of a frame
                self.doing = "receiving a command"
                self.fail(self.reader.head[1], error)

    # -- hot path ----------------------------------------------------------------------------------

    def call(self, seq: int, body: memoryview) -> None:
        plan_id, out, num_inputs, *handles = body.cast("q").tolist()
        plan = self.plans[plan_id]
        self.doing, self.communicates = plan.doing, plan.communicates
        inputs = self.values.of(handles[:num_inputs])
        if len(handles) > num_inputs:  # donated inputs among them: only ``inputs`` holds them now
            self.values.release(handles[num_inputs:])
        self.running = seq
        if seq >= self.cancelled_from:
            self.interrupt()
        results = self.platform.launch(plan.run, inputs, plan.outputs)
        self.values.add(out, results)

    def skip(self, kind: int, body: memoryview) -> None:
        """Skip a command after a failure, but free the values that it names."""
        if kind == wire.CALL:
            _, _, num_inputs, *handles = body.cast("q").tolist()
            self.values.release(handles[num_inputs:])

    def put(self, seq: int, body: memoryview) -> None:
        self.doing = "receiving a value"
        source = self.values.put(body)
        if self.completion is not None:  # else the device has read it
            self.source = source

    def free(self, seq: int, body: memoryview) -> None:
        self.values.release(body.cast("q").tolist())

    def fetch(self, seq: int, body: memoryview) -> None:
        (value_seq,) = struct.unpack_from("<q", body)
        if self.completion is not None and not self.completion.wait(value_seq):
            return
        fetched = self.values.fetched(body[8:])
        payload = memoryview(b"") if fetched is None else wire.bytes_of(fetched)
        self.stream.send([wire.HEADER.pack(len(payload), wire.REPLY, seq), payload])

    # -- an asynchronous device --------------------------------------------------------------------

    def launched(self, seq: int) -> None:
        """The command has returned, but the device may still be at it."""
        assert self.completion is not None
        self.completion.launched(seq, self.doing, self.communicates, self.source)
        self.communicates, self.source = False, None

    def wait_for_device(self) -> bool:
        """Wait until the device has done everything; whether nothing has failed."""
        return self.completion is None or self.completion.settle()

    # -- rare frames -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A block whose time is not that of a call."""
        compiles = self.progress.number(COMPILES)
        compiles[0] = True
        try:
            yield
        finally:
            compiles[0] = False

    def define(self, seq: int, body: memoryview) -> None:
        self.doing = "receiving a plan"
        with self.compiling():
            definition: Definition = pickle.loads(body)
            self.doing = f"compiling {definition.name}"
            if definition.backend != EAGER:  # which is not cancelled, as it takes no time
                self.begin(seq, self.doing)
            self.plans[definition.plan_id], report = self.executor.define(definition)
            self.reply(seq, tuple(report))

    def begin(self, seq: int, doing: str) -> None:
        """From here on the command may be cancelled, until its reply."""
        self.doing = doing
        self.progress.number(FUNCTION)[0] = seq
        self.running = seq
        if seq >= self.cancelled_from:
            self.interrupt()

    def task(self, seq: int, body: memoryview) -> None:
        self.doing = "receiving a call"
        task: Task = pickle.loads(body)
        if task.body is not None:
            wire.keep_latest(self.bodies, task.body_id, task.body)
        linecache.cache.update(task.sources)
        self.begin(seq, f"running {task.name}")
        # unpickled for every call: changes that the last one made to captured objects must not be
        # seen
        work: Work = pickle.loads(self.bodies[task.body_id])
        if not self.wait_for_device():
            return
        report, stored = self.executor.run(task, work, self.values.of(task.inputs))
        self.reply(seq, (report, len(stored)), dict(enumerate(stored, task.first_output)))

    def group(self, seq: int, body: memoryview) -> None:
        name, partition = pickle.loads(body)
        self.doing = "joining a group"
        self.groups.ensure(name, partition)

    def load(self, seq: int, body: memoryview) -> None:
        # a plan for a CPU whose code was saved needs no compiler, and may come next
        wait = _BEFORE_IMPORT_S if self.device.type == "cpu" else 0.0
        begin = functools.partial(self.import_compiler, time.monotonic() + wait)
        self.reader.when_idle = begin if body else None

    def import_compiler(self, begin: float) -> None:
        """Have the compiler in memory before a plan needs it, unless a command comes first."""
        poll = select.poll()
        poll.register(self.stream.sock, select.POLLIN)
        if poll.poll(1e3 * max(begin - time.monotonic(), 0.0)):
            return
        self.reader.when_idle = None
        self.doing = "importing the compiler"
        with contextlib.suppress(Exception), self.compiling():  # a plan reports what is wrong
            import_inductor()

    def forget(self, seq: int, body: memoryview) -> None:
        plans, groups = pickle.loads(body)
        for plan_id in plans:
            self.plans.pop(plan_id, None)
        self.groups.release(groups)

    def reply(self, seq: int, report: Any, values: Mapping[int, torch.Tensor] = _NOTHING) -> None:
        import cloudpickle

        answer = cloudpickle.dumps(report)
        self.running = 0
        if self.was_cancelled:  # and the function caught it
            raise CallCancelled
        if self.is_forked:
            os._exit(0)
        self.values.update(values)
        flush()
        self.stream.send([frame(wire.REPLY, seq, answer)])

    # -- failure and repair ------------------------------------------------------------------------

    def fail(self, seq: int, error: BaseException) -> None:
        if self.is_forked:
            os._exit(1)
        is_consequence = self.was_cancelled or is_communication(error)
        self.groups.drop()
        self.failed = True
        with self.reporting:
            self.report(seq, self.doing, is_consequence, error, self.pack(seq, error))

    def fail_late(self, seq: int, doing: str, error: BaseException) -> None:
        """A command has failed that had returned (completion thread)."""
        with self.reporting:  # the abort makes the main thread fail, which may end the process
            self.groups.abort(self.groups.epoch)
            self.failed = True
            self.report(seq, doing, is_communication(error), error, pack_exception(error))

    def report(
        self, seq: int, doing: str, is_consequence: bool, error: BaseException, packed: bytes
    ) -> None:
        is_usable = self.platform.recover(error)
        flush()
        where = f"{self.where} (rank {self.rank}, pid {os.getpid()}) while {doing}"
        where += "" if is_usable else _HINT
        body = pickle.dumps((is_consequence, packed, where))
        self.stream.send([frame(wire.FAILED, seq, body)])
        if not is_usable:
            os._exit(1)

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

    def supervised(self, kind: int, seq: int, body: memoryview) -> None:
        if kind == wire.DRAIN:
            self.wait_for_device()  # a command that an abort has left half done fails now
            self.stream.send([frame(wire.DRAINED, seq)])
            return
        if kind != wire.REGROUP:
            raise FrameError(f"broken frame: of unknown kind {kind}")
        epoch: int
        groups: dict[str, RankPartition]
        epoch, groups = pickle.loads(body)
        if self.completion is not None:
            self.completion.renew()
        for number in (AT, HOST, COMPILES):  # what has failed, here or in a worker before this one
            self.progress.number(number)[0] = 0
        self.failed = self.was_cancelled = False
        self.cancelled_from, self.epoch_begin = _NEVER, seq
        self.bodies.clear()  # the controller sends them again
        try:
            self.groups.renew(epoch, self.store())
            for name, partition in groups.items():
                self.groups.ensure(name, partition)
        except Exception as error:
            self.fail(seq, error)
        else:
            self.stream.send([frame(wire.READY, epoch)])

    def store(self) -> torch.distributed.Store:
        """A new one for each epoch, since a store remembers what it has read."""
        if self.device.type == "cpu":
            return WorkerStore(self.store_path)
        # NCCL has threads that may ask a store; -1: it does not remove its file, which has no name
        return torch.distributed.FileStore(self.store_path, -1)

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

    def describe(self) -> None:
        """Say what the main thread does (control thread)."""
        seq, doing = self.running, self.doing
        if not seq and self.completion is not None and self.completion.current is not None:
            current = self.completion.current
            if current.seq > self.completion.done:
                seq, doing = current.seq, current.doing
        answer(self.stacks, seq, doing, self.groups.waits())

    def in_forked_child(self) -> None:
        """In a child that a call has forked: it may work on, but not as this worker."""
        self.is_forked = True
        self.groups.in_forked_child()
        self.staged.in_forked_child()
        self.common.in_forked_child()


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
            worker.describe()
