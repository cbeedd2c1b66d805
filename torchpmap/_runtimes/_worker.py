"""The worker process of one device.

Two threads::

    main     command socket --> frames in order: define, call, put, fetch, ... --> answers on the
    same socket control  control socket --> "cut epoch e": free the main thread from a collective;
    end of file: leave at once

``values`` (handle -> tensor) and ``plans`` belong to the main thread alone; ``Groups`` guards what
both threads touch.

An exception in a call never ends the worker.  It drops its process groups *first* (peers blocked in
a collective with it then fail in milliseconds), reports, and skips every further call until the
controller starts a new epoch: what was queued behind a failed call could mean anything.

The controller may die in any way, also by SIGKILL while this process holds the GIL in C code: the
lifeline is a pipe nobody writes to, armed to deliver SIGTERM when its other end closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from torchpmap import _wire
from torchpmap._compile import Runner, compile_definition
from torchpmap._config import Config
from torchpmap._effects import mark_lines
from torchpmap._errors import ShardLost, pack_exception
from torchpmap._groups import Groups, RankPartition, is_communication
from torchpmap._program import EagerCall, Program, run_eager_call
from torchpmap._runtimes._progress import WorkerProgress
from torchpmap._wire import FrameReader, InheritedFd, Stream, frame

__all__ = ["Birth", "main"]

CUT = struct.Struct("<q")  # epoch
_HARMLESS = (_wire.PUT, _wire.FREE, _wire.FORGET, _wire.DEFINE)
"""What a rank does also after a failure: skipping it would leave a gap, and it involves no other
rank.
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


def main(birth: Birth) -> None:
    """Run until told to stop or until the controller is gone; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    _arm_lifeline(birth.lifeline.fd)
    _redirect_output(birth)
    mark_lines(_wire.PLAIN_LINE)
    if birth.device_type == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = _nth_visible_gpu(
            birth.rank
        )  # graphs say cuda:0 on every rank
    device = torch.device("cuda", 0) if birth.device_type == "cuda" else torch.device("cpu")
    torch.set_num_threads(birth.num_threads)
    # -1: the store does not remove its file, which has no name
    store = torch.distributed.FileStore(birth.store.path(), -1)
    groups = Groups(birth.rank, device, store, birth.config)
    threading.Thread(
        target=_listen, args=(birth.control.socket(), groups), name="torchpmap-control", daemon=True
    ).start()
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        _Worker(birth, device, groups).serve()
    # a process with a group in flight or a user's thread alive may hang in interpreter shutdown:
    # leave directly
    _flush()
    os._exit(0)


class _Worker:
    def __init__(self, birth: Birth, device: torch.device, groups: Groups) -> None:
        self.rank = birth.rank
        self.device = device
        self.groups = groups
        self.values: dict[int, torch.Tensor] = {}
        self.plans: dict[int, tuple[str, Runner]] = {}
        self.functions: dict[int, bytes] = {}
        self.index_tensors: dict[int, torch.Tensor] = {}
        self.failed = False
        self.progress = WorkerProgress(birth.rank, birth.progress, birth.bell)
        sock = birth.command.socket()
        self.stream = Stream(sock)
        self.reader = FrameReader(sock)
        self.doing = "starting"

    def serve(self) -> None:
        handlers: dict[int, Callable[[int, int], None]] = {
            _wire.CALL: self.call,
            _wire.PUT: self.put,
            _wire.FREE: self.free,
            _wire.FETCH: self.fetch,
            _wire.SYNC: self.sync,
            _wire.RING: self.ring,
            _wire.DEFINE: self.define,
            _wire.EAGER: self.eager,
            _wire.GROUP: self.group,
            _wire.FORGET: self.forget,
        }
        torch.set_grad_enabled(False)
        calls_are_done = self.device.type == "cpu"  # when they return
        while True:
            length, kind, seq = self.reader.header()
            handler = handlers.get(kind)
            if handler is None:
                if kind == _wire.STOP:
                    return
                self.supervised(kind, seq, length)
                continue
            if self.failed and kind not in _HARMLESS:
                self.skip(kind, length)
                continue
            try:
                handler(seq, length)
                if calls_are_done:
                    self.progress.note(seq)
            except (EOFError, ConnectionResetError, BrokenPipeError):
                raise
            except BaseException as error:
                self.fail(seq, error)

    # -- hot path ----------------------------------------------------------------------------------

    def call(self, seq: int, length: int) -> None:
        plan_id, out, num_inputs, *handles = self.reader.body(length).cast("q").tolist()
        if len(handles) > num_inputs:
            self.release(handles[num_inputs:])
        self.doing, run = self.plans[plan_id]
        results = run(*self.stored(handles[:num_inputs]))
        self.values.update(zip(range(out, out + len(results)), results, strict=True))

    def skip(self, kind: int, length: int) -> None:
        """Do nothing of a command behind a failure, except to free what it says nobody uses."""
        body = self.reader.body(length)
        if kind == _wire.CALL:
            _, _, num_inputs, *handles = body.cast("q").tolist()
            self.release(handles[num_inputs:])

    def put(self, seq: int, length: int) -> None:
        (handle,) = struct.unpack("<q", self.reader.body(8))
        tensor = _wire.read_tensor(self.reader)
        self.values[handle] = tensor if self.device.type == "cpu" else tensor.to(self.device)

    def free(self, seq: int, length: int) -> None:
        self.release(self.reader.body(length).cast("q").tolist())

    def release(self, handles: list[int]) -> None:
        """Forget values; ``-first`` stands for all outputs of an uncompiled call, however many."""
        deque(map(self.values.pop, handles, repeat(None)), maxlen=0)  # a loop in C: leaves are many
        for first in [-handle for handle in handles if handle < 0]:
            outputs = range(first, first + _wire.EAGER_OUTPUTS)
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
        """Send a stored tensor, or one row of it: handle, dim (-1: all of it), position."""
        handle, dim, position = struct.unpack("<3q", self.reader.body(length))
        (tensor,) = self.stored([handle])
        if dim >= 0:
            tensor = tensor.select(dim, position)
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        payload = _wire.bytes_of(tensor)
        self.stream.send([_wire.HEADER.pack(len(payload), _wire.DATA, seq), payload])

    def sync(self, seq: int, length: int) -> None:
        self.synchronize(seq)
        self.stream.send([frame(_wire.DONE, seq)])

    def ring(self, seq: int, length: int) -> None:
        self.synchronize(seq)
        self.progress.ring()

    def synchronize(self, seq: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.progress.note(seq)

    # -- rare frames -------------------------------------------------------------------------------

    def define(self, seq: int, length: int) -> None:
        definition = pickle.loads(self.reader.body(length))
        self.doing = f"compiling {definition.name}"
        index = self.index(definition.ranks)
        runner = compile_definition(definition, index)
        self.plans[definition.plan_id] = (f"running {definition.name}", runner)
        self.reply(seq, None)

    def index(self, ranks: Sequence[int]) -> torch.Tensor:
        """This rank's position among the ranks of a plan, as data: all run one graph."""
        position = ranks.index(self.rank)
        if position not in self.index_tensors:
            self.index_tensors[position] = torch.tensor(position, device=self.device)
        return self.index_tensors[position]

    def eager(self, seq: int, length: int) -> None:
        call: EagerCall = pickle.loads(self.reader.body(length))
        self.doing = f"running {call.name}"
        if call.function is not None:
            _wire.keep_latest(self.functions, call.function_id, call.function)
        program: Program
        # anew for every call: what the last one wrote to the function's surroundings must not be
        # seen
        program, captured = pickle.loads(self.functions[call.function_id])
        report, stored = run_eager_call(
            call,
            program,
            captured,
            self.stored(call.inputs),
            self.index(call.ranks),
            self.groups.ensure,
        )
        for offset, tensor in enumerate(stored):
            self.values[call.first_output + offset] = tensor
        self.reply(seq, report)

    def group(self, seq: int, length: int) -> None:
        name, partition = pickle.loads(self.reader.body(length))
        self.groups.ensure(name, partition)

    def forget(self, seq: int, length: int) -> None:
        for plan_id in self.reader.body(length).cast("q").tolist():
            self.plans.pop(plan_id, None)

    def reply(self, seq: int, report: Any) -> None:
        import cloudpickle

        _flush()
        self.stream.send([frame(_wire.REPLY, seq, cloudpickle.dumps(report))])

    # -- failure and repair ------------------------------------------------------------------------

    def fail(self, seq: int, error: BaseException) -> None:
        communication = is_communication(error)
        self.groups.drop()
        self.failed = True
        who = f"(rank {self.rank}, pid {os.getpid()})"
        where = f"on device {self.device.type}:{self.rank} {who} while {self.doing}"
        _flush()
        body = pickle.dumps((communication, pack_exception(error), where))
        self.stream.send([frame(_wire.FAILED, seq, body)])

    def supervised(self, kind: int, seq: int, length: int) -> None:
        body = self.reader.body(length)
        if kind == _wire.DRAIN:
            self.stream.send([frame(_wire.DRAINED, seq)])
            return
        assert kind == _wire.REGROUP, f"unknown frame {kind}"
        epoch: int
        groups: dict[str, RankPartition]
        epoch, groups = pickle.loads(body)
        self.failed = False
        self.functions.clear()  # the controller sends them again
        self.groups.renew(epoch)
        try:
            for name, partition in groups.items():
                self.groups.ensure(name, partition)
        except Exception as error:
            self.fail(seq, error)
        else:
            self.stream.send([frame(_wire.READY, epoch)])


def _listen(control: socket.socket, groups: Groups) -> None:
    while True:
        try:
            message = control.recv(CUT.size, socket.MSG_WAITALL)
        except OSError:
            message = b""
        if len(message) < CUT.size:
            os._exit(0)
        groups.cut(*CUT.unpack(message))


def _arm_lifeline(fd: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(fd, 1) == b"":  # the controller went before the signal was armed
            os._exit(0)


def _redirect_output(birth: Birth) -> None:
    """Everything written to stdout and stderr, also from C, travels to the controller, which prints
    it where the user looks.
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
