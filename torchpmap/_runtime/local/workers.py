"""Starts, watches, replaces and ends the worker processes of a pool, and owns what they share.

``Supervisor`` decides which worker must be replaced, and when.  If a step fails here, it closes
what it has opened.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence

from torchpmap._base.config import Config
from torchpmap._base.deadline import Deadline
from torchpmap._base.devices import PLATFORMS, Device, threads_per_device
from torchpmap._base.errors import RuntimeClosed
from torchpmap._runtime import wire
from torchpmap._runtime.local.forkserver import explained
from torchpmap._runtime.local.monitor import Monitor
from torchpmap._runtime.local.process import WorkerProcess
from torchpmap._runtime.local.progress import Progress
from torchpmap._runtime.local.repair import Repair
from torchpmap._runtime.local.staging import Landing, Staging
from torchpmap._runtime.local.supervise import Event

_STOP_PATIENCE_S = 1.0
"""How long workers have to end by themselves, and once more after they were killed."""
_STORE_BYTES = 1 << 18
"""How much data of past epochs the store may hold."""
_REPAIR_S = 0.5
"""How long to wait for a repair, which checks more often than this whether workers are wanted."""


class Workers:
    """Owner: the pool, which must call ``end``."""

    def __init__(
        self,
        devices: Sequence[Device],
        config: Config,
        *,
        on_event: Callable[[Event], None],
        on_tick: Callable[[], float],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._devices = devices
        self._config = config
        self._is_wanted = True
        self.by_rank: dict[int, WorkerProcess] = {}
        with explained(), contextlib.ExitStack() as undo:
            self._store_fd = os.memfd_create("torchpmap-store", os.MFD_CLOEXEC)  # has no name
            undo.callback(os.close, self._store_fd)
            self.progress = Progress(len(devices))
            undo.callback(self.progress.close)
            self.landing = Landing(is_used=config.shared_memory)
            undo.callback(self.landing.close)
            # a device that copies from pinned memory holds a block of its own
            copies = PLATFORMS[devices[0].platform].is_asynchronous
            is_used = config.shared_memory and not copies
            self.common = Staging(is_used=is_used, num_workers=len(devices))
            undo.callback(self.common.close)
            self.monitor = Monitor(devices, on_event=on_event, on_tick=on_tick, on_crash=on_crash)
            undo.callback(self.monitor.stop)
            for rank in range(len(devices)):
                self.by_rank[rank] = self._new_worker(rank)
                undo.callback(self.by_rank[rank].close)
            undo.pop_all()

    def empty_store(self) -> None:
        """Delete past epochs from a large store (no worker uses it now, and each opens it again for
        the next epoch).
        """
        if os.fstat(self._store_fd).st_size > _STORE_BYTES:
            os.ftruncate(self._store_fd, 0)

    def _new_worker(self, rank: int) -> WorkerProcess:
        device_type = self._devices[rank].platform
        threads = threads_per_device(len(self._devices))
        shared = self._store_fd, *self.progress.inherited(), self.landing.fd, self.common.fd
        return WorkerProcess(rank, device_type, threads, self._config, self.monitor.exits, shared)

    def name(self, rank: int) -> str:
        """A worker in messages."""
        return f"{self._devices[rank]} (rank {rank}, pid {self.by_rank[rank].pid})"

    def start(self, rank: int, send_lock: threading.RLock) -> None:
        """Start a worker, in the place of one that is dead or was not started; may be tried again
        if it raises.
        """
        worker = self.by_rank[rank]
        if worker.was_tried:
            self._close(worker, send_lock)
            worker = self._new_worker(rank)
        try:
            worker.start(lambda: self._is_wanted)
            self.monitor.watch(worker)
        except BaseException:
            worker.close()
            raise
        self.by_rank[rank] = worker

    def _close(self, worker: WorkerProcess, send_lock: threading.RLock) -> None:
        if worker.is_open:
            if not self.monitor.forget(worker):
                raise RuntimeClosed("the thread that reads the workers' answers does not respond")
            with send_lock:  # no thread may send into a descriptor whose number is used again
                worker.close()
                self.common.forget(worker.rank)

    def control(self, ranks: Iterable[int], kind: int, value: int) -> None:
        """Send a message that workers obey even while they run a call; never waits."""
        for rank in ranks:
            with contextlib.suppress(OSError):  # the worker is gone, or its socket is full
                message = wire.CONTROL.pack(kind, value)
                self.by_rank[rank].control.send(message, wire.NO_WAIT)

    def end(self, repair: Repair | None) -> None:
        """End all workers, by force if they do not go; takes a few seconds at most.  ``repair``: in
        progress, if there is one.
        """
        self._is_wanted = False
        if repair is not None and repair.has_begun:
            repair.is_over(_REPAIR_S)
        workers = tuple(self.by_rank.values())
        for end in (WorkerProcess.end_commands, WorkerProcess.kill):
            for worker in workers:
                end(worker)
            patience = Deadline(_STOP_PATIENCE_S)
            for worker in workers:
                worker.wait(patience)
        if self.monitor.stop():  # else it still reads from them
            for worker in workers:
                worker.close()
        store, self._store_fd = self._store_fd, -1
        if store >= 0:
            os.close(store)
        self.landing.close()
        self.common.close()

    def in_forked_child(self) -> None:
        """In a forked child, which must not keep the parent's workers alive."""
        self.landing.in_forked_child()
        self.common.in_forked_child()
        for worker in self.by_rank.values():
            worker.staging.in_forked_child()
            worker.close()
